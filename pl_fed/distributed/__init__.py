"""Several processes: how they share the clients and add up their results."""
