"""Lightning's hooks of a client: they set up, evaluate and save a federation."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from pl_fed.data.central import CENTRAL
from pl_fed.metrics import ClientMetrics


class FederationModule(LightningModule):
    """Federation module: a LightningModule that evaluates, predicts and saves a federation.

    It forwards Lightning's hooks to the federation of its trainer, and logs the metrics.
    """

    models: dict[str, Any]

    @property
    def federation(self) -> Any:
        """The federation of this client's trainer, a :class:`pl_fed.Federation`.

        Raises:
            TypeError: If the trainer is not a ``pl_fed.Trainer``.
        """
        federation = getattr(self.trainer, "federation", None)
        if federation is None:
            raise TypeError(
                "Expected a client to be fitted by `pl_fed.Trainer(federation=...)` but got"
                f" {type(self.trainer).__module__}.{type(self.trainer).__name__}."
            )
        return federation

    @classmethod
    def load_from_checkpoint(cls, *_: Any, **__: Any) -> "FederationModule":  # type: ignore[override]
        """Raise an error: a checkpoint contains all clients.

        Raises:
            TypeError: Always; the message names the way to load a checkpoint.
        """
        raise TypeError(
            f"Expected {cls.__name__} to be loaded with its federation, as by trainer.fit or"
            " trainer.test with `ckpt_path`, but got load_from_checkpoint: a checkpoint contains"
            " all clients, and `python -m pl_fed export` writes single models."
        )

    def setup(self, stage: str) -> None:
        """Make the federation ready, in the trainer's precision, before a checkpoint is loaded."""
        federation = self.federation  # raises under another trainer than pl_fed's
        self.trainer.precision_plugin.convert_module(self)
        self.to(self.device)  # so that `device` of a module within is that of its parameters
        datamodule = getattr(self.trainer, "datamodule", None)
        loads = getattr(self.trainer, "loads", False)
        settings = self.trainer.run_settings()  # type: ignore[attr-defined]
        federation.setup(self, datamodule, stage, loads, settings)

    def on_validation_epoch_start(self) -> None:
        """Reset the validation metrics."""
        _reset(self.federation.metrics("val"))
        _reset(self.federation.held_out_metrics("val"))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Evaluate a batch of client ids on the clients' validation data."""
        self.federation.evaluate("val", batch)

    def on_validation_epoch_end(self) -> None:
        """Log the metrics under ``val/``."""
        self._log_metrics("val")

    def on_test_epoch_start(self) -> None:
        """Reset the test metrics."""
        _reset(self.federation.metrics("test"))
        _reset(self.federation.held_out_metrics("test"))

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Evaluate a batch of client ids on the clients' test data."""
        self.federation.evaluate("test", batch)

    def on_test_epoch_end(self) -> None:
        """Log the metrics under ``test/``."""
        self._log_metrics("test")

    def predict_step(self, batch: Tensor, batch_idx: int) -> list[dict[str, Any]]:
        """Return the personalised predictions of a batch of client ids on their test data."""
        predictions: list[dict[str, Any]] = self.federation.predict(batch)
        return predictions

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict; entries that hooks of the net leave out or add do not count.

        A hook may leave out a frozen body, for example, which then stays as it was built.
        """
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        own = self.state_dict().keys()
        trained = {name for name, tensor in self.named_parameters() if tensor.requires_grad}
        missing, unexpected = {*result.missing_keys}, {*result.unexpected_keys}
        if strict and (missing & (own | trained) or unexpected - own):
            super().load_state_dict(state_dict, strict=True, assign=assign)
        return result

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the federation's state to a checkpoint."""
        checkpoint["federation"] = self.federation.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the federation's state from a checkpoint.

        Raises:
            ValueError: If pl_fed did not write the checkpoint, its models have other tensors, or a
                fit would train on with NaN or infinity in them, or without the states of
                optimizers and rounds.
        """
        if "federation" not in checkpoint:
            raise ValueError(
                "Expected a checkpoint of pl_fed but got one without the state of a federation."
            )
        if self.trainer.state.fn == "fit" and "optimizer_states" not in checkpoint:
            raise ValueError(
                "Expected a complete checkpoint to continue a run but got one that was written with"
                " `save_weights_only`: give last.ckpt or another complete one, or begin a new run"
                " with these weights by `federation.initial_model`."
            )
        self.federation.load_state_dict(checkpoint["federation"])
        if self.strict_loading:
            _check_tensors(checkpoint["state_dict"], self.state_dict())
        # a run without a limit of broken clients goes on with a destroyed model
        if self.trainer.state.fn == "fit" and self.federation.max_rejected < 1:
            parameters = {name for name, _ in self.named_parameters()}
            for part in ("state_dict", "current_model_state"):
                tensors = checkpoint.get(part) or {}
                _check_finite({name: [tensors[name]] for name in parameters & tensors.keys()})
            models: Any = self.models
            store = checkpoint["federation"]["store"]
            _check_finite({name: store[name]["rows"] for name in models.keys() & store.keys()})

    def _log_metrics(self, part: str) -> None:
        """Log the metrics of an evaluation; undefined ones, NaN, reach callbacks only."""
        tables = self.federation.metrics(part)
        held_out = self.federation.held_out_metrics(part)
        numbers = {
            f"{prefix}/{model}/{name}": _convert_metric(value)
            for prefix, by_model in ((part, tables), (f"{part}/held_out", held_out))
            for model, metrics in by_model.items()
            for name, value in metrics.compute().items()
        }
        central = self.federation.evaluate_central(part)
        numbers |= {
            f"{part}/{CENTRAL}/{name}": _convert_metric(value) for name, value in central.items()
        }
        monitor = self.federation.monitored_metric
        models = [*tables, *([CENTRAL] if central else [])]
        bar_names = [f"{part}/{model}/{monitor}" for model in models if part == "val"]
        loop: Any = self.trainer.fit_loop
        loop.log_evaluation(numbers, bar_names)


def _convert_metric(value: Tensor) -> Tensor:
    """Return a metric in float32, or as it is if it is finite and too large for float32."""
    converted = value.float()
    return value if converted.isinf() and value.isfinite() else converted


def _reset(metrics: Mapping[str, ClientMetrics]) -> None:
    for metric in metrics.values():
        metric.reset()


def _check_finite(models: Mapping[str, Iterable[Tensor]]) -> None:
    """Raise ``ValueError`` if a model of a checkpoint has NaN or infinity."""
    for name in sorted(models):
        for rows in models[name]:
            # a sum needs no memory, but may overflow
            if not math.isfinite(rows.sum()) and not rows.isfinite().all():
                raise ValueError(
                    f"Expected a checkpoint with finite models but got NaN or infinity in `{name}`:"
                    " use an earlier checkpoint, or start a new run."
                )


def _check_tensors(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if the models of a checkpoint and of the net have different tensors."""
    for name in dict.fromkeys((*own, *saved)):
        expected, got = (_describe_shape(tensors.get(name)) for tensors in (own, saved))
        if expected != got:
            raise ValueError(
                f"Expected a checkpoint whose models have {expected} for `{name}` but got one with"
                f" {got}: it is of another net."
            )


def _describe_shape(tensor: object) -> str:
    """Return the shape of a tensor in words, or "no tensor"."""
    return f"shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else "no tensor"
