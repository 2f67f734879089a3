"""Tables and pictures of data splits and of runs.

This file imports nothing, so that modules that only read run files load without PyTorch and
Lightning.
"""
