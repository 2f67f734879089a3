"""Metrics over clients."""

from pl_fed.metrics.client_metrics import ClientMetrics as ClientMetrics
