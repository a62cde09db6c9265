"""Training frameworks: each file imports its framework, and nothing else in isda does."""
