"""The same federation by pl_fed, as a user runs it: ``pl_fed.Trainer(...).fit``."""

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from cases import LAM, LR, Case
from lightning.pytorch import Callback
from settings import Settings

import pl_fed
from pl_fed.clients import Client, Ditto, FedAvg
from pl_fed.data import FederatedData
from pl_fed.samplers import All, Uniform

ContinueAfterRound = Callable[[float | None], bool]


class Rounds(Callback):
    """Times the rounds of a fit, from one's start to the next's: all that a round does is in it.

    Args:
        continue_after_round: Called before each round with the seconds of the previous round,
            ``None`` before the first; returns whether to run it. No round's time includes the call.
        now: Gives the time in seconds.
    """

    def __init__(self, continue_after_round: ContinueAfterRound, now: Callable[[], float]) -> None:
        self.continue_after_round, self.now = continue_after_round, now
        self.begun: float | None = None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop the clock, let others work, and start it anew."""
        seconds = None if self.begun is None else self.now() - self.begun
        trainer.should_stop = not self.continue_after_round(seconds)
        self.begun = self.now()


def fit(
    case: Case,
    data: FederatedData,
    settings: Settings,
    processes: int,
    continue_after_round: ContinueAfterRound,
) -> str:
    """Fit while ``continue_after_round`` returns true, and return the engine's name."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    sampler = Uniform(case.cohort) if case.cohort else All()
    engine = pl_fed.EngineOptions(settings.engine, compile_mode=settings.compile_mode)
    federation = pl_fed.Federation(sampler, engine=engine, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl_fed.Trainer(
            federation,
            callbacks=[Rounds(continue_after_round, settings.now)],
            default_root_dir=folder,
            max_epochs=10**9,
            accelerator=settings.device,
            devices=processes,
            strategy="ddp" if processes > 1 else "auto",
            limit_val_batches=0,
            log_every_n_steps=1000,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(client_of(case), data)
    return str(federation.engine_choice.current)


def client_of(case: Case) -> Client:
    torch.manual_seed(0)
    if case.ditto:
        return Ditto(case.build(), lam=LAM, optimizer=sgd, local_steps=case.steps)
    return FedAvg(case.build(), optimizer=sgd, local_steps=case.steps)


def sgd(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR)
