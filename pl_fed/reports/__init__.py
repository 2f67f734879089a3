"""Tables and pictures of what a federation is, and of how runs went.

Nothing is imported here: what only reads files of runs waits neither for PyTorch nor for Lightning.
"""
