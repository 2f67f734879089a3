"""Models on the clients' own data: the sums that metrics are made of, and predictions."""
