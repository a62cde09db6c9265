"""Training: the loop, one run's step, several runs side by side, run folders and resume.

Read them in this order:

* ``loop`` trains runs: ``start`` prepares their folders, ``groups`` decides which of them train
  side by side (``width`` measures how many), and ``failures``, ``divergence`` and ``deadline`` end
  them early.
* ``side_by_side`` takes the steps of a group, captured in CUDA graphs.
* ``training_step`` is one run: its ``Lane`` holds network, optimizer and criterion; ``run_images``
  gives it batches of the ``images`` that all runs share.
* ``run_folder`` writes what a run leaves behind.
"""
