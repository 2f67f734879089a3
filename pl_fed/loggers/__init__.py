"""Loggers of pl_fed's own; any of Lightning's works beside them."""

from pl_fed.loggers.run_csv import RunCSV as RunCSV
from pl_fed.loggers.waiting_rows import WaitingRows as WaitingRows
from pl_fed.loggers.wandb_loggers import wandb_loggers as wandb_loggers
