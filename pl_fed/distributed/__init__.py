"""Several processes: they divide the clients among them and add up the results."""
