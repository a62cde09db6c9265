"""Data sets, augmentation and the random numbers of a run."""
