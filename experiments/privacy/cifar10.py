"""pfl-research's CIFAR-10 benchmark with differential privacy, by pl_fed and by pfl-research.

PL_FED_DATA=../data python -m experiments.privacy.cifar10

The two libraries take turns of 10 rounds in one process with one thread. They share the split, the
initial weights and the test images. After each turn, a row of cifar10.csv holds the accuracy and
the processor time of a round. A killed command resumes, and a finished one only writes the table in
cifar10.md and the picture. ``--rounds`` may grow later. ``--privacy none`` runs without privacy.
Without pfl-research, only pl_fed runs. To install it beside pl_fed's packages:
``pip install --no-deps pfl==0.6.0 prv-accountant==0.2.0 multiprocess dill``
"""

import argparse
import importlib.util
import os
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback
from torch import Tensor, nn

from experiments.benchmarks.cases import PflCNN
from experiments.grid import QUIET, ROOT, Config, Row, append, key_of, merge_configs, read, spec
from experiments.make_cifar10_npz import OUTPUT, write_if_missing
from experiments.tables import COLOURS, MARKERS, markdown

HERE = Path(__file__).parent
CONFIG = HERE / "cifar10.yaml"
NAMES = ("library", "privacy", "seed", "round")
LIBRARIES = ("pl_fed", "pfl")
PRIVACY = {"dp": "ε = 2", "none": "no privacy"}
EVERY = 10  # rounds of a turn
_TABLE = re.compile("(<!-- table -->).*?(<!-- /table -->)", re.DOTALL)


class GlorotCNN(PflCNN):
    """pfl's CNN with its initial weights: Glorot's uniform distribution.

    Args:
        seed: Seed of the weights. They depend on nothing else.

    Shape:
        [batch, 3, 32, 32] → logits [batch, 10].
    """

    def __init__(self, seed: int = 0) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__()
            for layer in self.layers:
                if isinstance(layer, nn.Conv2d | nn.Linear):
                    nn.init.xavier_uniform_(layer.weight)


class Turns(Callback):
    """Turns: evaluates pl_fed every 10 rounds, and lets pfl-research run as many.

    Args:
        results: The CSV with a row for each evaluation.
        privacy: The value of this column, ``dp`` or ``none``.
        seed: The value of this column.
        pfl_folder: Folder of pfl-research's saved model; ``None`` runs pl_fed only.
    """

    def __init__(
        self, results: str, privacy: str, seed: int = 0, pfl_folder: str | None = None
    ) -> None:
        self.results, self.privacy, self.seed = Path(results), privacy, seed
        self.pfl_folder = pfl_folder
        self.seconds: list[float] = []
        self.begun: float | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Prepare the test images, and pfl-research."""
        data = trainer.datamodule.clients
        self.test = data.batch(data.test.index)
        self.pfl = self._build_pfl(trainer) if self.pfl_folder else None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Record the time of the last round; after each turn, evaluate and let pfl run."""
        self._end_round(trainer.current_epoch, pl_module)
        self.begun = time.process_time()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Evaluate the last turn."""
        self._end_round(trainer.current_epoch, pl_module)

    def _end_round(self, rounds: int, pl_module: Any) -> None:
        if self.begun is not None:
            self.seconds.append(time.process_time() - self.begun)
            self.begun = None
        if rounds % EVERY:
            return
        if not self._has_row("pl_fed", rounds):
            self._write("pl_fed", rounds, pl_module.global_model, self.seconds)
        self.seconds = []
        is_due = self.pfl is not None and rounds >= self.pfl.rounds
        if is_due and not self._has_row("pfl", rounds):
            seconds = self.pfl.advance(rounds) if rounds > self.pfl.rounds else []
            self._write("pfl", rounds, self.pfl.net, seconds)

    def _build_pfl(self, trainer: Any) -> Any:
        """Return the run of pfl-research, with the training images of the same clients."""
        from experiments.privacy.cifar10_by_pfl import PflRun

        return PflRun(
            users_of(trainer.datamodule.clients),
            GlorotCNN(self.seed),
            trainer.federation.privacy,
            self.seed,
            Path(self.pfl_folder or ""),
        )

    def _has_row(self, library: str, rounds: int) -> bool:
        key = (library, self.privacy, str(self.seed), str(rounds))
        return key in {key_of(row, NAMES) for row in read(self.results)}

    def _write(self, library: str, rounds: int, net: nn.Module, seconds: Sequence[float]) -> None:
        """Write the row of an evaluation."""
        key = (library, self.privacy, str(self.seed), str(rounds))
        accuracy, loss = evaluate(net, self.test.inputs, self.test.targets)
        row = {
            **dict(zip(NAMES, key)),
            "accuracy": f"{accuracy:.4f}",
            "loss": f"{loss:.4f}",
            "seconds": f"{statistics.median(seconds):.3f}" if seconds else "",
        }
        append(self.results, NAMES, key, [row])
        print(", ".join(row.values()), file=sys.stderr, flush=True)


@torch.no_grad()
def evaluate(net: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """Return accuracy and mean loss of a net on images [n, 3, 32, 32] and classes [n]."""
    was_training = net.training
    net.eval()
    correct, loss = 0.0, 0.0
    for images, classes in zip(inputs.split(500), targets.split(500)):
        logits = net(images)
        correct += float((logits.argmax(1) == classes).sum())
        loss += float(nn.functional.cross_entropy(logits, classes, reduction="sum"))
    net.train(was_training)
    return correct / len(targets), loss / len(targets)


def users_of(clients: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the training images and classes of each client."""
    batches = [clients.training_samples(client) for client in range(clients.num_clients)]
    return [(batch.inputs, batch.targets) for batch in batches]


def config_of(privacy: str, seed: int, rounds: int, folder: Path, pfl: bool) -> Config:
    """Return the config of a run: cifar10.yaml, with changes.

    Args:
        privacy: ``dp``, or ``none`` for the same federation without ``federation.privacy``.
        seed: Seed of the split, the weights and the run.
        rounds: The number of rounds. The noise stays that of the 3000 rounds of the file.
        folder: Folder of the results.
        pfl: Whether pfl-research runs, too.
    """
    run = f"{privacy}_{seed}"
    turns = {"results": str(folder / "cifar10.csv"), "privacy": privacy, "seed": seed}
    if pfl:
        turns["pfl_folder"] = str(ROOT / "runs" / "experiments" / "cifar10" / f"pfl_{run}")
    change: Config = {
        "seed_everything": seed,
        "data": {"dataset": spec("pl_fed.data.Npz", path=str(OUTPUT))},
        "trainer": {
            **QUIET,
            "default_root_dir": str(ROOT / "runs" / "experiments" / "cifar10" / run),
            "max_epochs": rounds,
            "limit_val_batches": 0,
            "limit_test_batches": 0,
            "callbacks": [spec("experiments.privacy.cifar10.Turns", **turns)],
        },
    }
    config = merge_configs(yaml.safe_load(CONFIG.read_text()), change)
    config["model"]["init_args"]["net"]["init_args"] = {"seed": seed}
    if privacy == "none":
        del config["federation"]["privacy"]
    return config


def fit(config: Config) -> None:
    """Run a federation by the command ``fit``, or resume its last checkpoint."""
    from pl_fed.command.fit import FederatedCLI
    from pl_fed.run_folder import last_checkpoint

    folder = Path(config["trainer"]["default_root_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    saved = any(last_checkpoint(run) for run in folder.iterdir() if run.is_dir())
    resume = ["--ckpt_path", "last"] if saved else []
    FederatedCLI(["fit", "--config", str(file), *resume])


def is_finished(rows: Sequence[Row], privacy: str, seed: int, rounds: int, pfl: bool) -> bool:
    """Return whether all libraries have a row for the last round."""
    done = {key_of(row, NAMES) for row in rows}
    libraries = LIBRARIES if pfl else LIBRARIES[:1]
    return all((name, privacy, str(seed), str(rounds)) in done for name in libraries)


def curve(rows: Sequence[Row], library: str, privacy: str) -> dict[int, float]:
    """Return the accuracy by round, as the mean over seeds."""
    accuracies: dict[int, list[float]] = {}
    for row in rows:
        if (row["library"], row["privacy"]) == (library, privacy):
            accuracies.setdefault(int(row["round"]), []).append(float(row["accuracy"]))
    return {round: statistics.mean(values) for round, values in sorted(accuracies.items())}


def time_ratios(rows: Sequence[Row], privacy: str) -> tuple[list[float], list[float], list[float]]:
    """Return seconds of a round of pl_fed and of pfl, and their ratio, for each common turn."""
    seconds: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        if row["privacy"] == privacy and row["seconds"]:
            seconds.setdefault(key_of(row, NAMES[2:]), {})[row["library"]] = float(row["seconds"])
    pairs = [turn for turn in seconds.values() if len(turn) == len(LIBRARIES)]
    ours, theirs = ([turn[name] for turn in pairs] for name in LIBRARIES)
    return ours, theirs, [pfl / pl_fed for pl_fed, pfl in zip(ours, theirs)]


def make_table(rows: Sequence[Row]) -> str:
    """Return the table: accuracies after equal rounds, and the time of a round."""
    lines = []
    for privacy, title in PRIVACY.items():
        curves = {name: curve(rows, name, privacy) for name in LIBRARIES}
        common = sorted(set(curves["pl_fed"]) & set(curves["pfl"]))
        if not common or not common[-1]:
            continue
        ours, theirs, ratios = time_ratios(rows, privacy)
        last = common[-1]
        for name, seconds in zip(LIBRARIES, (ours, theirs)):
            tail = [curves[name][round] for round in common[-5:]]
            row = [title, name, str(last), f"{curves[name][last]:.4f}"]
            row += [f"{statistics.mean(tail):.4f}", f"{statistics.median(seconds):.2f} s"]
            row += [f"{statistics.median(ratios):.2f}" if name == "pfl" else "1"]
            lines.append(row)
    head = ["", "library", "rounds", "test accuracy", "mean of the last five evaluations"]
    return markdown([*head, "processor time of a round", "relative to pl_fed"], lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the accuracy by round of each library, with and without privacy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    styles = zip((COLOURS[5], COLOURS[4]), MARKERS, LIBRARIES)
    for colour, marker, library in styles:
        for privacy, style in zip(PRIVACY, ("-", ":")):
            accuracies = curve(rows, library, privacy)
            if accuracies:
                label = f"{library}, {PRIVACY[privacy]}"
                line = {"color": colour, "marker": marker, "ls": style, "ms": 4, "lw": 1.6}
                axes.plot(list(accuracies), list(accuracies.values()), label=label, **line)
    axes.set_xlabel("round")
    axes.set_ylabel("accuracy on the 10,000 test images")
    axes.set_title("pfl-research's CIFAR-10 setting", loc="left", fontsize=11, fontweight="bold")
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)


def write_report(folder: Path) -> None:
    """Write the table into cifar10.md if the file exists, and the picture."""
    rows = read(folder / "cifar10.csv")
    page = folder / "cifar10.md"
    if page.exists():
        table = f"\\1\n\n{make_table(rows)}\n\\2"
        page.write_text(_TABLE.sub(table, page.read_text()))
    draw(rows, folder / "cifar10.png")


def main() -> None:
    """Run the missing rounds, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--privacy", nargs="+", default=["dp"], choices=PRIVACY)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=200, help="a multiple of 10")
    parser.add_argument("--folder", type=Path, default=HERE, help="where to write")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args()
    if options.rounds < EVERY or options.rounds % EVERY:
        parser.error(f"expected --rounds to be a multiple of {EVERY} but got {options.rounds}")
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    pfl = importlib.util.find_spec("pfl") is not None
    if not pfl and not options.report:
        print("pfl-research is not installed: only pl_fed runs. See --help.", file=sys.stderr)
    root = Path(os.environ.get("PL_FED_DATA", "data"))
    if not options.report and not write_if_missing(root):
        parser.error(f"expected PL_FED_DATA to name a folder with CIFAR10 but got {root}")
    for seed in options.seeds:
        for privacy in options.privacy:
            rows = read(options.folder / "cifar10.csv")
            if not options.report and not is_finished(rows, privacy, seed, options.rounds, pfl):
                fit(config_of(privacy, seed, options.rounds, options.folder, pfl))
    write_report(options.folder)


if __name__ == "__main__":
    main()
