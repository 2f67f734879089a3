"""Studies: sets of runs with axes and seeds, each run in a folder of its own."""
