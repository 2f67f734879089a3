"""The block of lines before a run: a description of the run."""

import inspect
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from rich.console import Console
from rich.table import Table

from pl_fed.clients.module_optimizer import ModuleOptimizer
from pl_fed.data.module import FederatedData
from pl_fed.federation import Federation
from pl_fed.reports.configs import describe, format_value


class Introduction(Callback):
    """Introduction: prints the algorithm, the data, the attack and the other parts of a fit.

    Arguments of a class are shown if they differ from its defaults.

    Args:
        federation: The federation.
        config: The config of the run.
        folder: The run's folder; ``None`` prints no folder.
    """

    def __init__(
        self, federation: Federation, config: Mapping[str, Any], folder: Path | None = None
    ) -> None:
        self.federation = federation
        self.config = config
        self.folder = folder

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the lines."""
        if not trainer.is_global_zero:
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in self.lines(trainer).items():
            table.add_row(name, text)
        Console(markup=False, highlight=False).print(table)

    def lines(self, trainer: Trainer) -> dict[str, str]:
        """Return the descriptions of the parts by their names."""
        federation = self.federation
        parts = self.config.get("federation") or {}
        rounds = float(trainer.estimated_stepping_batches)
        population = federation.client.population
        clients = f"{population.cohort} of {population.clients} clients per round"
        limit = f"{rounds:.0f} rounds" if math.isfinite(rounds) else "no limit of rounds"
        return {
            "algorithm": self._describe_algorithm(),
            "data": self._describe_data(),
            "rounds": f"{limit}, {clients} ({_name(parts.get('sampler')) or 'Uniform'})",
            "attack": self._describe_attack(parts.get("adversary") or {}),
            "defence": self._describe_defence(parts),
            **_describe_section("privacy", "DifferentialPrivacy", parts),
            **_describe_section("systems", "Systems", parts),
            "engine": f"{federation.engine.name}, on {_describe_device(trainer)}",
            "logs": ", ".join(["metrics.csv", *map(_describe_logger, trainer.loggers[1:])]),
            **({} if self.folder is None else {"folder": str(self.folder)}),
        }

    def _describe_algorithm(self) -> str:
        section = self.config["model"]
        arguments = section.get("init_args") or {}
        net = arguments.get("net")
        number = self.federation.client.row("global").data.numel()
        optimizer = arguments.get("optimizer")
        named = describe_changes(optimizer) if optimizer else ""
        own = self.federation.client.objective.optimizer
        return ", ".join(
            filter(
                None,
                (
                    describe_changes({**section, "init_args": _without_classes(arguments)}),
                    f"{_name(net) or 'net'} ({number:,} trained parameters)",
                    own.describe() if isinstance(own, ModuleOptimizer) else named,
                ),
            )
        )

    def _describe_data(self) -> str:
        section, data = self.config["data"], self.federation.session.states.loaded
        partitioner = section.get("partitioner")
        split = describe(partitioner) if partitioner else "the owners of the samples"
        skew = section.get("skew")
        datamodule = self.federation.session.datamodule
        parts = f", official {' and '.join(data.official)} parts" if data.official else ""
        held_out = datamodule.held_out
        new = f", {held_out.num_clients} held-out clients" if held_out else ""
        drops = " without the last, smaller one of a pass" if datamodule.drop_last else ""
        return (
            f"{_name(section['dataset'])}, {int(data.train.sizes.sum()):,} training samples of"
            f" {data.num_clients} clients{new}, split by {split}{parts}, minibatches of"
            f" {datamodule.batch_size}{drops}"
            + (f", {describe_changes(skew)}" if skew else "")
            + _describe_central(datamodule)
        )

    def _describe_attack(self, adversary: Mapping[str, Any]) -> str:
        texts = []
        if adversary.get("attack"):
            count = int(self.federation.is_byzantine.sum())
            start = adversary.get("start_round") or 0
            stop = adversary.get("stop_round")
            rounds = f", from round {start + 1} on" if start else ""
            if stop is not None:
                rounds = f", in rounds {start + 1} to {stop}"
            clients = "client" if count == 1 else "clients"
            attack = describe_changes(adversary["attack"])
            texts.append(f"{attack} by {count} Byzantine {clients}{rounds}")
        if adversary.get("corruption"):
            texts.append(f"{describe_changes(adversary['corruption'])} on the data of all clients")
        return ", ".join(texts) or "none"

    def _describe_defence(self, parts: Mapping[str, Any]) -> str:
        aggregators = [*(parts.get("pre_aggregators") or []), parts.get("aggregator")]
        names = [describe_changes(aggregator) for aggregator in aggregators if aggregator]
        return ", ".join(names) or "none (Mean, equal weights)"


def _describe_central(datamodule: FederatedData) -> str:
    """Return the numbers of the server's samples, if it has any."""
    data = datamodule.central_data
    if data is None:
        return ""
    val, test = (len(data.part(part).index) for part in ("val", "test"))
    return f", {val:,} validation and {test:,} test samples of the server"


def describe_changes(section: Any) -> str:
    """Return a class of a config with the arguments that differ from their defaults.

    Example:
        >>> import torch
        >>> arguments = {"lr": 0.1, "momentum": 0}
        >>> describe_changes({"class_path": "torch.optim.SGD", "init_args": arguments})
        'SGD(lr=0.1)'
    """
    if not isinstance(section, Mapping):
        return format_value(section)
    defaults = _defaults(str(section.get("class_path")))
    arguments = {
        name: value
        for name, value in (section.get("init_args") or {}).items()
        if name not in defaults or value != defaults[name]
    }
    return describe({"class_path": section.get("class_path"), "init_args": arguments})


def _defaults(class_path: str) -> dict[str, Any]:
    """Return the defaults of a class's arguments, also of those that its base classes take."""
    module, _, name = class_path.rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)
    defaults: dict[str, Any] = {}
    for base in reversed(inspect.getmro(kind)) if inspect.isclass(kind) else ():
        constructor = vars(base).get("__init__")
        if constructor is not None and base is not object:
            parameters = inspect.signature(constructor).parameters.values()
            defaults |= {p.name: p.default for p in parameters if p.default is not p.empty}
    return defaults


def _without_classes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a class that are no classes themselves."""
    return {name: value for name, value in arguments.items() if not isinstance(value, Mapping)}


def _name(section: Any) -> str:
    """Return the name of a class in a config, without its arguments."""
    if not isinstance(section, Mapping):
        return "" if section is None else format_value(section)
    return str(section.get("class_path")).rpartition(".")[2]


def _describe_section(name: str, kind: str, parts: Mapping[str, Any]) -> dict[str, str]:
    """Return the line about a section of the federation, such as privacy, if it has it."""
    section = parts.get(name)
    return {name: describe({"class_path": kind, "init_args": section})} if section else {}


def _describe_logger(logger: Logger) -> str:
    """Return the class of a logger; for Weights & Biases, its mode, too."""
    name = type(logger).__name__
    return f"W&B ({os.environ.get('WANDB_MODE', 'online')})" if name == "WandbLogger" else name


def _describe_device(trainer: Trainer) -> str:
    count = trainer.world_size
    return str(trainer.strategy.root_device.type) + (f", {count} processes" if count > 1 else "")
