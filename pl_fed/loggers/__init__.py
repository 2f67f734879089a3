"""The loggers of pl_fed; all of Lightning's loggers work beside them."""

from pl_fed.loggers.postponed_experiments import forget_postponed as forget_postponed
from pl_fed.loggers.postponed_experiments import postpone_experiments as postpone_experiments
from pl_fed.loggers.run_csv import RunCSV as RunCSV
from pl_fed.loggers.run_csv import refuse_shared_file as refuse_shared_file
from pl_fed.loggers.waiting_rows import WaitingRows as WaitingRows
from pl_fed.loggers.wandb_loggers import begin_own_wandb_runs as begin_own_wandb_runs
from pl_fed.loggers.wandb_loggers import wandb_loggers as wandb_loggers
