"""Callbacks that report on a federation: files, logs and summaries, one class for each."""

from pl_fed.callbacks.engine_report import EngineReport as EngineReport
from pl_fed.callbacks.introduction import Introduction as Introduction
from pl_fed.callbacks.last_checkpoint import LastCheckpoint as LastCheckpoint
from pl_fed.callbacks.moved_folder import MovedFolder as MovedFolder
from pl_fed.callbacks.participation import Participation as Participation
from pl_fed.callbacks.per_client import PerClient as PerClient
from pl_fed.callbacks.predictions import Predictions as Predictions
from pl_fed.callbacks.python_config import PythonConfig as PythonConfig
from pl_fed.callbacks.round_metrics import RoundMetrics as RoundMetrics
from pl_fed.callbacks.round_progress import RoundProgress as RoundProgress
from pl_fed.callbacks.run_summary import RunSummary as RunSummary
from pl_fed.callbacks.summary import Summary as Summary
from pl_fed.callbacks.wandb_axis import WandbAxis as WandbAxis
from pl_fed.callbacks.wandb_report import WandbReport as WandbReport
