"""Reports made from run records: intervals, comparisons, the paper's tables, curves and pages."""
