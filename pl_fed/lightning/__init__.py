"""Trainer and loop of Lightning: the only files that name its internals."""
