"""A PyTorch Lightning trainer for federated learning: personalized, fair and robust at once."""

from pl_fed.federation import Federation as Federation
from pl_fed.trainer import Trainer as Trainer

__version__ = "0.1.0"
