"""Reports made from run records: tables, Markdown blocks, figures and HTML pages.

A number goes from a line of ``metrics.jsonl`` to a cell through three functions:

* :meth:`isda.experiments.records.Run.metrics` reads and checks the lines,
* :func:`isda.experiments.records.summary` takes the mean over the last epochs of a run,
* :meth:`isda.experiments.report.sides.Side.estimate` the mean and standard deviation over seeds.

:mod:`~isda.experiments.report.comparison` adds the difference from a baseline with its interval.
Results are shown by :mod:`~isda.experiments.report.tables` (the paper's tables with our numbers),
:mod:`~isda.experiments.report.blocks` and :mod:`~isda.experiments.report.figures` (of the
documentation), :mod:`~isda.experiments.report.pages` (HTML, with
:mod:`~isda.experiments.report.plots` and :mod:`~isda.experiments.report.classes`),
:mod:`~isda.experiments.report.feature_tables` (generators and augmented features).
"""
