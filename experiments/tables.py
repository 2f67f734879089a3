"""Old name of :mod:`experiments.papers`."""

from experiments.papers import *  # noqa: F403
