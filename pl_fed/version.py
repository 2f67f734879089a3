"""The version of pl_fed."""

__version__ = "0.1.0"
