"""Lightning's trainer and loop for federations: the only files that name Lightning's internals."""
