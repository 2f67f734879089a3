"""The evaluation of models on the clients' own data: sums for metrics, and predictions."""
