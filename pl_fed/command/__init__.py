"""The command line: fit, validate, test, predict, partition, report and export."""
