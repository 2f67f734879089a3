"""The progress of a run: one bar of rounds in a terminal, else one line per validation."""

import contextlib
import logging
import math
import sys
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console, Group
from rich.live import Live

from pl_fed.callbacks.round_display import RoundDisplay, Work, slow_work
from pl_fed.data.central import CENTRAL
from pl_fed.federation import Federation

_REFRESHES = 4  # per second
_PATIENCE = 0.5  # seconds without a bar of an evaluation


class RoundProgress(ProgressBar):
    """Round progress: a bar of rounds with the time left, the loss and the last validation.

    Clients get a second bar where a round takes longer than two seconds. The timing and compiling
    of engines is shown. All that is printed meanwhile appears above the bar. Without a terminal,
    the bar is one line per validation.

    It is the default of a trainer. Another progress bar among its callbacks replaces it.

    Args:
        federation: The federation.
    """

    def __init__(self, federation: Federation) -> None:
        super().__init__()
        self.federation = federation
        self.is_enabled = True
        self.display = RoundDisplay(math.inf)
        self._console = Console()
        self._until_stopped = contextlib.ExitStack()
        self._evaluation: Work | None = None  # outside of a fit

    def enable(self) -> None:
        """Show the progress."""
        self.is_enabled = True

    def disable(self) -> None:
        """Show nothing."""
        self.is_enabled = False
        self._stop()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        print(*args, **kwargs)

    # A fit

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the bar of rounds."""
        total = float(trainer.estimated_stepping_batches)
        self.display = RoundDisplay(
            total=total,
            finished=trainer.current_epoch,
            activity=lambda: self.federation.engine_choice.activity,
        )
        self._start(Live(get_renderable=lambda: self.display, **self._live_options()))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a round."""
        self.display.work = Work("Clients", len(batch))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the clients of a round, or finish it after the last one."""
        self.display.loss = outputs.get("loss", self.display.loss)  # the bar has its own thread
        if batch_idx + 1 >= len(batch):  # a cohort may be empty
            self.display.work = None
            self.display.finish_round(trainer.current_epoch + 1)
        elif self.display.work is not None:
            self.display.work.done = batch_idx + 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the last state of the bar on the screen."""
        self._stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the last state of the bar on the screen, above the error."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End all bars."""
        self._stop()

    # Evaluations

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a validation, in a fit or by itself."""
        work = Work("Validating", _count_batches(trainer.num_val_batches))
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.display.work = work
        else:
            self._start_evaluation(work)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Count a batch of clients."""
        self._count_batch()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the results of a validation in a fit; print them without a terminal."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            self._stop()
            return
        self.display.work = None
        results = self._describe_results(trainer)
        self.display.results = results
        if self.is_enabled and not self._has_terminal:
            print("  ".join(filter(None, [self.display.summarize(), results])), flush=True)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a test."""
        self._start_evaluation(Work("Testing", _count_batches(trainer.num_test_batches)))

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Count a batch of clients."""
        self._count_batch()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the bar of the test."""
        self._stop()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin predictions."""
        self._start_evaluation(Work("Predicting", _count_batches(trainer.num_predict_batches)))

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Count a batch of clients."""
        self._count_batch()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the bar of the predictions."""
        self._stop()

    # The bars

    @property
    def _has_terminal(self) -> bool:
        is_screen = self._console.is_terminal and not self._console.is_dumb_terminal
        return is_screen or self._console.is_jupyter

    def _live_options(self) -> dict[str, Any]:
        return {"console": self._console, "refresh_per_second": _REFRESHES}

    def _start(self, live: Live) -> None:
        """Show a live bar, with a terminal."""
        self._stop()
        if self.is_enabled and self._has_terminal:
            self._until_stopped.enter_context(live)
            self._until_stopped.enter_context(_redirect_logs())

    def _start_evaluation(self, work: Work) -> None:
        """Show a bar of an evaluation, once it takes a noticeable time; it vanishes at the end."""
        self._evaluation = work
        self._start(
            Live(
                get_renderable=lambda: Group(*slow_work(work, _PATIENCE)),
                transient=True,
                **self._live_options(),
            )
        )

    def _stop(self) -> None:
        """End the live bar."""
        self._until_stopped.close()
        self._evaluation = None

    def _count_batch(self) -> None:
        work = self._evaluation or self.display.work
        if work is not None:
            work.done += 1

    def _describe_results(self, trainer: Trainer) -> str:
        """Return the last validation as text: the monitored metric, by model."""
        metric, values = self.federation.monitored_metric, trainer.callback_metrics
        models = [*self.federation.client.evaluated][::-1]  # the clients' own models first
        texts: list[str] = []
        for model in models:
            if (value := values.get(f"val/{model}/{metric}")) is None:
                continue
            worst = values.get(f"val/{model}/{metric}_worst10")
            tail = "" if worst is None or texts else f", worst 10 % {float(worst):.3f}"
            texts.append(f"{model} {float(value):.3f}{tail}")
        if (value := values.get(f"val/{CENTRAL}/{metric}")) is not None:
            texts.append(f"global on the server's data {float(value):.3f}")
        return f"{metric} on validation data: {'; '.join(texts)}" if texts else ""


def _count_batches(batches: Any) -> float:
    """Return a number of batches of clients, of all dataloaders."""
    return float(sum(batches)) if isinstance(batches, list) else float(batches)


@contextlib.contextmanager
def _redirect_logs() -> Iterator[None]:
    """Let log handlers of the terminal write to the present ``sys.stderr`` and ``sys.stdout``.

    A handler keeps the stream of its creation, and its lines would go through a live bar.
    """
    streams = {sys.__stderr__: sys.stderr, sys.__stdout__: sys.stdout}
    loggers = [logging.getLogger(), *map(logging.getLogger, [*logging.root.manager.loggerDict])]
    handlers = {
        handler: handler.stream
        for logger in loggers
        for handler in logger.handlers
        if type(handler) is logging.StreamHandler and handler.stream in streams
    }
    for handler, stream in handlers.items():
        handler.setStream(streams[stream])
    try:
        yield
    finally:
        for handler, stream in handlers.items():
            handler.setStream(stream)
