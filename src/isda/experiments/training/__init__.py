"""Training: the loop, one run's step, several runs side by side, run folders and resume."""
