"""The modules and objects of an algorithm whose values may pass from one client to the next."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from pl_fed.clients.base import Client
from pl_fed.nets.fingerprints import is_by_user, package_of
from pl_fed.nets.kept_values import Part, ValueGuard
from pl_fed.tasks import LightningTask

_LIGHTNING = frozenset(
    (*vars(LightningModule()), "log", "log_dict", "optimizers", "lr_schedulers", "_hparams_name")
) - {"training"}
"""Attributes that Lightning, or pl_fed in its place, sets in a LightningModule."""

CLIENT_BOOKKEEPING = frozenset(
    (
        *vars(LightningModule()),
        *("constructor_arguments", "_rows", "_readable", "objective", "_states", "models"),
        *("_server_states", "_task_data", "keeps_optimizer_state", "_optimizer_layouts"),
        *("draws_globally", "reads_optimizer", "local_schedule", "compressor"),
    )
)
"""Attributes of a client whose change changes no step."""

_CLIENT = (
    CLIENT_BOOKKEEPING
    | _LIGHTNING
    | frozenset(
        (
            *("draws", "population", "task", "optimizer", "lr_scheduler"),
            *("adaptation", "preparation"),
            *("trained", "evaluated", "validated", "takes_integers", "local_work"),
            "reads_own_weights",
            "_task_is_open",
        )
    )
)
_TASK = frozenset(
    (
        *vars(LightningTask()),
        *("further_metrics", "directions", "averages_samples"),
        *("changes_inputs", "changes_targets", "mixes_samples"),
    )
)


class _PlainMetric(Metric):
    """Plain metric: a metric without a state, for the names of a metric's own attributes."""

    def update(self) -> None: ...

    def compute(self) -> None: ...


@cache
def _metric_attributes() -> frozenset[str]:
    """Return the attributes that torchmetrics sets in a metric."""
    return frozenset((*vars(_PlainMetric()), "_update_called", "_enable_grad", "_is_synced"))


def kept_parts(client: Client) -> list[Part]:
    """Return the parts of an algorithm: its models, criterion and task, and the algorithm itself.

    The trainer is a part, too: steps reach it by ``self.trainer``.
    The algorithm's own attributes are outside of modules: only an author of algorithms has some.
    Attributes that Lightning, torchmetrics and pl_fed set are ignored: they belong to no client.
    """
    modules = client.named_modules()
    parts = [
        Part(name, module, select_ignored(module), is_outside=module is client)
        for name, module in modules
    ]
    return [*parts, *_task_object(client), *trainer_parts(client)]


STOP = "trainer.should_stop"
"""The name of the attribute of a trainer that ends a fit."""

_VALUES = (bool, int, float, str, type(None), Tensor)


def trainer_parts(client: Client) -> list[Part]:
    """Return the trainer as a part with its plain values, and with attributes that a user adds.

    There is none for an algorithm without a trainer.
    """
    with suppress(RuntimeError):
        trainer = client.trainer
        ignored = (n for n, v in vars(trainer).items() if n[0] == "_" or not isinstance(v, _VALUES))
        return [Part("trainer", trainer, frozenset(ignored))]
    return []


def lay_rows(client: Client) -> None:
    """Move the tensors of all models into their rows, before a record notes their places."""
    for name in client.models:
        _ = client.row(name).data, client.statistics(name).data


@contextmanager
def restore_values(client: Client) -> Iterator[None]:
    """Restore what a computation changes in an algorithm's models, criterion and task."""
    lay_rows(client)
    guard = ValueGuard(kept_parts(client))
    try:
        yield
    finally:
        guard.restore()


def task_parts(client: Client) -> list[Part]:
    """Return the parts of an algorithm's criterion and task alone."""
    models = [client.model(name) for name in client.models]
    modules = [module for module in client.children() if not any(module is m for m in models)]
    parts = [part for module in modules for part in module_parts(module)]
    return [*parts, *_task_object(client)]


def _task_object(client: Client) -> list[Part]:
    """Return the task as a part, unless it is a module of the algorithm."""
    if isinstance(client.task, nn.Module):
        return []
    return [Part("task", client.task, _TASK if is_by_user(client.task) else None)]


def module_parts(module: nn.Module) -> list[Part]:
    """Return the parts of one module and its submodules."""
    return [Part(name, part, select_ignored(part)) for name, part in module.named_modules()]


def select_ignored(module: nn.Module) -> frozenset[str] | None:
    """Return the attributes of a module that do not count; ``None`` for all."""
    if isinstance(module, Client):
        return _CLIENT
    if isinstance(module, MetricCollection):
        return None
    if isinstance(module, Metric):
        if package_of(module) == "torchmetrics":
            return None
        states: dict[str, Any] = vars(module).get("_defaults", {})
        return _metric_attributes() | frozenset((*states, "update", "compute"))
    return _LIGHTNING if isinstance(module, LightningModule) else frozenset()


def user_names(client: Client, names: Iterable[str]) -> tuple[str, ...]:
    """Return names as the user's own module has them: without the name of the client's model."""
    prefix = re.compile(rf"^({'|'.join(client.models)})_model[.]")
    return tuple(dict.fromkeys(prefix.sub("", name) for name in sorted(names)))
