"""The loggers of pl_fed; all of Lightning's loggers work beside them."""

from pl_fed.loggers.run_csv import RunCSV as RunCSV
from pl_fed.loggers.waiting_rows import WaitingRows as WaitingRows
from pl_fed.loggers.wandb_loggers import begin_own_wandb_runs as begin_own_wandb_runs
from pl_fed.loggers.wandb_loggers import wandb_loggers as wandb_loggers
