"""What the tests of the paper's tables share: the commands and two recipes."""

from functools import partial

from isda.experiments import cli

__all__ = ["CE", "ISDA", "show_report", "show_table"]

show_table, show_report = partial(cli.run, "table"), partial(cli.run, "report")
CE, ISDA = "cifar100-resnet32-ce", "cifar100-resnet32-isda"
