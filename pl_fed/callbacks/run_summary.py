"""``summary.json``: the results of a run and its circumstances, for people and scripts."""

import csv
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from pl_fed.callbacks.round_metrics import find_evaluated_round
from pl_fed.callbacks.versions import read_commit, read_versions
from pl_fed.configurable import class_record
from pl_fed.federation import Federation
from pl_fed.files import replace_file
from pl_fed.functional.durability import measure_durability
from pl_fed.metrics.client_metrics import SUCCESS
from pl_fed.reports.configs import PYTHON_CONFIG, flatten
from pl_fed.rounds.broken_clients import NonFiniteLossError
from pl_fed.run_folder import SUMMARY
from pl_fed.text import first_line

_UPLOADS = ("forged", "clipped", "dropped", "rejected")
_DETECTION = ("attackers", "flagged", "flagged_attackers")
_STEALTH = ("attack_distance", "attack_cosine")
_CONFIGS = ("config.yaml", PYTHON_CONFIG)
_CLASSES = {  # keys of a config
    "client": "model",
    "net": "model.net",
    "dataset": "data.dataset",
    "partitioner": "data.partitioner",
    "sampler": "federation.sampler",
    "aggregator": "federation.aggregator",
    "attack": "federation.adversary.attack",
}


class RunSummary(Callback):
    """Run summary: writes ``summary.json`` at the end of a fit, a validation and a test.

    The file has the final metrics, measures of the attack over all rounds, counts of clients,
    rounds and uploads, seconds, seeds, classes, versions, the commit and the device. Metrics,
    measures and counts of uploads are those of ``metrics.csv``, so they are right after a resume.
    A sum over all rounds is ``null`` if the file lacks rows of rounds, as in a new folder for a
    checkpoint's path. An undefined or infinite number is ``null``, too.

    Args:
        federation: The federation.
        folder: The run's folder; ``None`` writes no file.
    """

    def __init__(self, federation: Federation, folder: Path | None = None) -> None:
        self.federation = federation
        self.folder = folder
        self._created = time.monotonic()
        self._trains = False
        self._start_up: float | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that no round has begun."""
        self._trains = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the time before the first round; remove the summary of a run with rounds left.

        The trainer has accepted the checkpoint by then, so a refused resume keeps the summary.
        """
        self._trains = not trainer.fit_loop.done
        folder = self._output_folder(trainer)
        if self._trains and folder:
            (folder / SUMMARY).unlink(missing_ok=True)
        if self._start_up is None:
            self._start_up = time.monotonic() - self._created

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the summary of a fit; a fit without a round left keeps that of its test."""
        folder = self._output_folder(trainer)
        if self._trains or (folder is not None and not (folder / SUMMARY).is_file()):
            self._write(trainer, "fit")

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Write the summary of a fit that diverged: that is a result, too."""
        if isinstance(exception, NonFiniteLossError) and trainer.state.fn == "fit":
            self._write(trainer, "fit", diverged=first_line(exception))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the summary of a validation without a fit."""
        if trainer.state.fn == "validate":
            self._write(trainer, "validate")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the summary of a test, with the results of the fit."""
        self._write(trainer, "test")

    def _output_folder(self, trainer: Trainer) -> Path | None:
        """Return the folder for the file; ``None`` if this process writes none."""
        is_dry_run = getattr(trainer, "fast_dev_run", False)
        return self.folder if trainer.is_global_zero and not is_dry_run else None

    def _write(self, trainer: Trainer, stage: str, diverged: str | None = None) -> None:
        folder = self._output_folder(trainer)
        if folder is None:
            return
        rounds, history = find_evaluated_round(trainer), read_history(folder / "metrics.csv")
        has_all_rounds = history["timed"] == [*range(max(rounds, len(history["timed"])))]
        if not has_all_rounds:  # sums would be those of a part
            history |= {"uploads": {}, "attack": {}, "small_cohorts": None}
        summary = {
            "finished": datetime.now().astimezone().isoformat(timespec="seconds"),
            "stage": stage,
            "diverged": diverged,
            "metrics": _add_undefined(history, trainer.callback_metrics),
            "attack": self._summarize_attack(history),
            "counts": self._counts(rounds, history),
            "seconds": self._seconds(history["seconds"], has_all_rounds),
            "seeds": self._seeds(),
            "config": next((name for name in _CONFIGS if (folder / name).is_file()), None),
            "classes": self._classes(),
            "higher_is_better": dict(self.federation.client.task.metric_directions()),
            "versions": read_versions(),
            "git": read_commit(),
            "device": _describe_device(trainer),
            "processes": self.federation.session.states.processes.size,
            "precision": str(trainer.precision),
            "privacy": self.federation.privacy_statement(),
            "noise": self.federation.noise_name(),
        }
        write_json(folder / SUMMARY, summary)

    def _summarize_attack(self, history: Mapping[str, Any]) -> dict[str, float]:
        """Return detection, stealth and, for an attack that stops, durability of a backdoor."""
        summary = summarize_attack(history["attack"])
        stop = self.federation.adversary.stop_round
        for model, success in history["backdoor"].items():
            durability = None if stop is None else measure_durability(success, stop)
            if durability is not None:
                summary[f"{model}_durability"] = float(durability.rounds)
                summary[f"{model}_outlasts"] = float(durability.outlasts)
        return summary

    def _counts(self, rounds: int, history: Mapping[str, Any]) -> dict[str, Any]:
        federation = self.federation
        byzantine = int(federation.is_byzantine.sum())
        clients = federation.session.states.loaded.num_clients
        client, rounds_runner = federation.client, federation.session.rounds
        systems, traffic = rounds_runner.systems, rounds_runner.traffic
        upload_bytes, download_bytes = traffic.client_bytes
        return {
            "clients": clients,
            "benign": clients - byzantine,
            "byzantine": byzantine,
            **self._count_held_out(),
            "untrained": len(federation.clients_without_training()),
            "cohort": client.population.cohort,
            "rounds": rounds,
            "upload_bytes": upload_bytes,
            "download_bytes": download_bytes,
            "bytes_up": traffic.up,
            "bytes_down": traffic.down,
            "rounds_without_step": history["small_cohorts"],
            **{f"uploads_{name}": history["uploads"].get(name) for name in _UPLOADS},
            **({} if systems is None else {"simulated_seconds": systems.seconds}),
        }

    def _count_held_out(self) -> dict[str, int]:
        """Return the number of held-out clients; nothing if all clients train."""
        held_out = self.federation.session.held_out
        return {} if held_out is None else {"held_out": held_out.states.loaded.num_clients}

    def _seconds(self, round_times: list[float], has_all_rounds: bool) -> dict[str, float | None]:
        rounds = math.fsum(round_times)
        return {
            "total": time.monotonic() - self._created,
            "start_up": self._start_up,
            "rounds": rounds if round_times and has_all_rounds else None,
            "per_round": rounds / len(round_times) if round_times else None,
        }

    def _seeds(self) -> dict[str, int | None]:
        seed = os.environ.get("PL_GLOBAL_SEED")
        return {
            "seed_everything": int(seed) if seed else None,
            "data": self.federation.session.datamodule.seed,
            "federation": self.federation.seed,
        }

    def _classes(self) -> dict[str, str | None]:
        """Return the class paths of the main objects, by their role; ``None`` for a default."""
        values = flatten(
            {
                "model": class_record(self.federation.client),
                "data": self.federation.session.datamodule.constructor_arguments,
                "federation": self.federation.constructor_arguments,
            }
        )
        paths = {role: values.get(key) for role, key in _CLASSES.items()}
        return {role: None if path is None else str(path) for role, path in paths.items()}


class _Validation(NamedTuple):
    """Validation of a model under a backdoor.

    Attributes:
        model: The model.
        number: The number in the column ``round``.
        has_time: Whether the row has the time of a round.
        success: The success of the backdoor.
    """

    model: str
    number: int
    has_time: bool
    success: float


def read_history(path: Path) -> dict[str, Any]:
    """Return the last metrics, the sums of uploads and the times of the rounds in a run's table.

    Args:
        path: The path of ``metrics.csv``.

    Returns:
        ``test`` and ``val``, each the last metrics by name without the part, and ``round``;
        ``attack``, the measures of the attack in each round by name; ``backdoor``, the success of a
        backdoor on validation data by model and last round of training;
        ``uploads``, the number of uploads over all rounds by outcome; ``small_cohorts``, the number
        of rounds without a step; ``seconds`` and ``timed``, the times of rounds and their numbers.
    """
    history: dict[str, Any] = {"test": {}, "val": {}, "uploads": {}, "seconds": [], "timed": []}
    history["small_cohorts"] = 0
    history["attack"] = {}
    validations: list[_Validation] = []
    for row in _read_rows(path):
        for part in ("test", "val"):
            if values := _strip_prefix(row, f"{part}/"):
                history[part] = {"round": int(row["round"]), **values}
        validations += _read_validations(row)
        for name, count in _strip_prefix(row, "train/").items():
            if name in _UPLOADS:
                history["uploads"][name] = history["uploads"].get(name, 0) + int(count)
            if name in (*_DETECTION, *_STEALTH):
                history["attack"].setdefault(name, []).append(count)
        history["small_cohorts"] += int(row.get("train/small_cohort", 0))
        if "time/round" in row:
            history["seconds"].append(row["time/round"])
            history["timed"].append(int(row["round"]))
    history["backdoor"] = _order_validations(validations, history["timed"])
    return history


def _read_validations(row: Mapping[str, float]) -> Iterator[_Validation]:
    """Yield the success of a backdoor on validation data in a row, by model."""
    for name, success in _strip_prefix(row, "val/").items():
        if name.endswith(f"/{SUCCESS}"):
            model = name.removesuffix(f"/{SUCCESS}")
            yield _Validation(model, int(row["round"]), "time/round" in row, success)


def _order_validations(
    validations: Iterable[_Validation], timed: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Return the success of a backdoor by model and last round of its training, from 0.

    A validation during a fit has the number of its round. One behind a fit, as of a checkpoint, has
    the number of rounds before it: if each round is logged, its row has no time of a round.

    Args:
        validations: The validations in the order of the file.
        timed: The numbers of the rounds with a time.
    """
    numbers = sorted(set(timed))
    logs_all = numbers == [*range(numbers[0], numbers[-1] + 1)] if numbers else False
    if len(numbers) == 1 and numbers[0] > 0:  # maybe one of every few rounds
        logs_all = False
    rounds, success = set(numbers), dict[str, dict[int, float]]()
    for model, number, has_time, value in validations:
        is_behind_fit = not has_time and (logs_all or number in rounds)
        last_round = number - 1 if is_behind_fit else number
        if last_round >= 0:
            success.setdefault(model, {}).setdefault(last_round, value)
    return success


def summarize_attack(rounds: Mapping[str, list[float]]) -> dict[str, float]:
    """Return detection over all uploads of a run, and the mean stealth over its rounds.

    A measure without a value is left out: precision of an aggregator that rejects no upload, and
    recall without attackers.

    Args:
        rounds: The measures of the attack in each round, by name.

    Example:
        >>> rounds = {"attackers": [2, 2], "flagged": [3, 0], "flagged_attackers": [2, 0]}
        >>> summarize_attack(rounds)
        {'detection_precision': 0.6666666666666666, 'detection_recall': 0.5}
    """
    attackers, flagged, hits = (math.fsum(rounds.get(name, ())) for name in _DETECTION)
    summary = {}
    if flagged:
        summary["detection_precision"] = hits / flagged
    if attackers:
        summary["detection_recall"] = hits / attackers
    for name in _STEALTH:
        if values := [value for value in rounds.get(name, ()) if math.isfinite(value)]:
            summary[name] = math.fsum(values) / len(values)
    return summary


def _add_undefined(
    history: Mapping[str, Any], latest: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """Return the last test and validation metrics, also those that are NaN in the latest one.

    Args:
        history: The metrics of :func:`read_history`, which lacks NaN.
        latest: The metrics of the latest evaluation, by name with the part.
    """
    metrics = {part: dict(history[part]) for part in ("test", "val")}
    for name, value in latest.items():
        part, _, metric = name.partition("/")
        if metrics.get(part) and math.isnan(float(value)):
            metrics[part][metric] = math.nan
    return metrics


def _read_rows(path: Path) -> Iterator[dict[str, float]]:
    """Yield the numbers in each row of ``metrics.csv``, by name."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        names = next(reader, [])
        for cells in reader:
            yield {name: float(cell) for name, cell in zip(names, cells) if cell}


def _strip_prefix(row: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the values of a row whose names have a prefix, without it."""
    return {k.removeprefix(prefix): value for k, value in row.items() if k.startswith(prefix)}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write strict JSON atomically: numbers that JSON lacks, NaN and infinity, are ``null``."""
    text = json.dumps(_replace_undefined(content), indent=1, allow_nan=False) + "\n"
    with replace_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _replace_undefined(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {name: _replace_undefined(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_replace_undefined(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _describe_device(trainer: Trainer) -> str:
    """Return the device, with the name of a GPU."""
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"
