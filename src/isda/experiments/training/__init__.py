"""Training: the loop, the step of a run, several runs side by side, run folders and resuming.

Read them in this order:

* ``loop`` trains runs: ``start`` prepares their folders, ``groups`` decides which of them train
  side by side (``width`` measures how many); ``failures``, ``divergence`` and ``deadline`` handle
  runs that end early.
* ``side_by_side`` executes the steps of a group, captured in CUDA graphs.
* ``training_step`` is one run: its ``Lane`` holds network, optimizer and criterion; ``run_images``
  gives it batches of the ``images`` that all runs share.
* ``run_folder`` writes the files of a run.
"""
