"""FLAME's Figures 4 to 7 (attacks) and 9 to 12 (λ, H, ρ and the number of clients a round).

PL_FED_DATA=../data python -m experiments.flame.figures attacks
PL_FED_DATA=../data python -m experiments.flame.figures parameters
"""

import argparse
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from experiments.evidence import count_draws
from experiments.flame.report import HYBRID, finish_panels, mean_over_rounds
from experiments.flame.run import HERE, METHODS, config
from experiments.grid import (
    Config,
    FitResult,
    Job,
    Row,
    Rows,
    finished_rows,
    group_rows,
    merge_configs,
    read,
    shorten,
    spec,
    work,
)
from experiments.tables import COLOURS, MARKERS
from pl_fed.samplers import Uniform

ATTACKS: dict[str, Config] = {  # as in the paper: variance 0.1
    "label poisoning": spec("pl_fed.attacks.RandomLabels", redraw="access"),
    "same value": spec("pl_fed.attacks.SameValue"),
    "sign flipping": spec("pl_fed.attacks.SignFlipping", factor=None, of="model"),
    "Gaussian": spec("pl_fed.attacks.RandomUpdates", std=0.1**0.5, on="model"),
}
FRACTIONS = (0.0, 0.2, 0.5, 0.8)
SETTING, CLIENTS = "fmnist/hybrid_q2_dir0.5", 50
KRUM = spec("pl_fed.aggregators.Krum", num_selected=5, squared=False, without_neighbours="first")
ROBUST: dict[str, dict[str, Any]] = {  # ρ = λ / m, where FLAME's u is its θ
    "FLAME": {"rho": 1 / CLIENTS},
    "pFedMe": {},
    "Ditto, as coded": {},
    "Ditto": {},
    "multi-Krum": {},
}
PARAMETERS: dict[str, dict[str, dict[str, Any]]] = {
    "Fig. 9: λ": {
        f"λ = {lam}": {"lam": float(lam), "rho": 0.1, "local_epochs": 3} for lam in (1, 3, 5)
    },
    "Fig. 10: H": {f"H = {h}": {"lam": 5.0, "rho": 0.1, "local_epochs": h} for h in (1, 5, 10)},
    "Fig. 11: ρ": {
        f"ρ = {rho}": {"lam": 3.0, "rho": rho, "local_epochs": 3} for rho in (0.1, 0.5, 1.0)
    },
    "Fig. 12: s of 100": {
        f"s = {s}": {"lam": 3.0, "rho": 0.03, "local_epochs": 3, "s": s} for s in (10, 30, 50)
    },
}
ROUNDS = 30  # of the curves


def attack_jobs(seeds: Iterable[int]) -> list[Job]:
    """Return the jobs of Figures 4 to 7; without attackers, one job stands for all attacks."""
    jobs = []
    for seed in seeds:
        for fraction in FRACTIONS:
            for name in ATTACKS if fraction else ["none"]:
                for method, own in ROBUST.items():
                    krum = method == "multi-Krum"
                    model_config = config(SETTING, "Ditto" if krum else method, seed, **own)
                    change: Config = {"data": {"num_clients": CLIENTS}}
                    change["trainer"] = {"limit_val_batches": 0}
                    if fraction:
                        adversary = {"attack": ATTACKS[name], "fraction": fraction}
                        change["federation"] = {"adversary": adversary, "max_rejected": 1.0}
                    if krum:
                        init = dict(model_config["model"]["init_args"])
                        init.pop("lam")
                        model_config["model"] = spec("pl_fed.clients.FedAvg", **init)
                        change = merge_configs(change, {"federation": {"aggregator": KRUM}})
                    key = (name, f"{fraction:g}", method, str(seed))
                    jobs.append(Job(key, merge_configs(model_config, change)))
    return jobs


def parameter_jobs(seeds: Iterable[int]) -> list[Job]:
    """Return the jobs of Figures 9 to 12."""
    jobs = []
    for seed in seeds:
        for figure, lines in PARAMETERS.items():
            for name, arguments in lines.items():
                own = {**arguments}
                s = own.pop("s", None)
                model_config = config("fmnist/label_q2", "FLAME", seed, **own)
                change: Config = {"trainer": {"max_epochs": ROUNDS, "check_val_every_n_epoch": 1}}
                if s:
                    change["data"] = {"num_clients": 100}
                    sampler = spec("pl_fed.samplers.Uniform", cohort_size=s)
                    change["federation"] = {"sampler": sampler}
                jobs.append(Job((figure, name, str(seed)), merge_configs(model_config, change)))
    return jobs


def count_draws_of_curves() -> list[Tensor]:
    """Return the number of rounds of each client, for each run with a cohort of some clients."""
    draws = []
    for job in parameter_jobs([1]):
        if sampler := job.config["federation"]["sampler"].get("init_args"):
            clients, seed = job.config["data"]["num_clients"], job.config["seed_everything"]
            draws.append(count_draws(Uniform(**sampler), clients, ROUNDS, seed))
    return draws


def attack_rows(fitted: FitResult) -> Rows:
    """Return the row of a run with its final accuracies."""
    names = fitted.tested_models(("global", "personal", "hybrid"))
    row = {f"{model}_accuracy": shorten(fitted.last[f"test/{model}/accuracy"]) for model in names}
    return {"attacks.csv": [row]}


def parameter_rows(fitted: FitResult) -> Rows:
    """Return the rows of a run with its losses in each round."""
    rows = [
        {
            "round": validation["round"],
            "train_loss": shorten(validation["train/loss"]) if validation["train/loss"] else "",
            **{f"{m}_loss": shorten(validation[f"val/{m}/loss"]) for m in ("global", "personal")},
        }
        for validation in fitted.rounds
        if validation.get("val/personal/loss")
    ]
    last = {f"{m}_loss": shorten(fitted.last[f"test/{m}/loss"]) for m in ("global", "personal")}
    return {"parameter_curves.csv": rows, "parameters.csv": [last]}


def draw_attacks(rows: list[Row], path: Path) -> None:
    """Draw accuracy against the share of Byzantine clients: a column for each attack."""
    figure = Figure(figsize=(3.1 * len(ATTACKS) + 0.6, 6.4), layout="constrained")
    panels = figure.subplots(2, len(ATTACKS), sharex=True, sharey=True)
    for column, attack in enumerate(ATTACKS):
        shown_rows = [row for row in rows if row["attack"] in (attack, "none")]
        for (method,), own in group_rows(shown_rows, "method"):
            number = [*METHODS, "multi-Krum"].index(method)
            style = {"color": COLOURS[number], "marker": MARKERS[number], "ms": 4.5}
            for axes, model in zip(panels[:, column], ("personal", "global")):
                if points := shares(own, f"{model}_accuracy"):
                    axes.plot(*zip(*points), label=method, **style)
            if method == "FLAME":
                points = shares(own, "hybrid_accuracy")
                panels[0, column].plot(*zip(*points), ":", color=COLOURS[number], label=HYBRID)
        panels[0, column].set_title(attack, fontsize=10.5)
        panels[1, column].set_xlabel("malicious clients, %")
    for axes, model in zip(panels[:, 0], ("personal", "global")):
        axes.set_ylabel(f"accuracy of {model} models")
    finish_panels(figure, panels, columns=6)
    figure.savefig(path, dpi=130)


def shares(rows: list[Row], column: str) -> list[tuple[float, float]]:
    """Return pairs of a share of Byzantine clients in percent and the mean of a column."""
    return sorted(
        (100 * float(fraction), statistics.mean(float(row[column]) for row in group))
        for (fraction,), group in group_rows(rows, "fraction")
        if group[0].get(column)
    )


def draw_parameters(rows: list[Row], path: Path) -> None:
    """Draw losses over rounds: personal models above, global models below."""
    figure = Figure(figsize=(3.1 * len(PARAMETERS) + 0.6, 6.0), layout="constrained")
    panels = figure.subplots(2, len(PARAMETERS), sharex=True, sharey="row")
    for column, name in enumerate(PARAMETERS):
        shown_rows = [row for row in rows if row["figure"] == name]
        for number, ((line,), own) in enumerate(group_rows(shown_rows, "line")):
            for axes, model in zip(panels[:, column], ("personal", "global")):
                points = mean_over_rounds(own, f"{model}_loss")
                axes.plot(*zip(*points), color=COLOURS[(0, 5, 4)[number]], label=line)
        for axes in panels[:, column]:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
            axes.grid(alpha=0.3, which="both")
            axes.spines[["top", "right"]].set_visible(False)
        panels[0, column].set_title(name, fontsize=10.5)
        panels[0, column].legend(frameon=False, fontsize="small")
        panels[1, column].set_xlabel("round")
    for axes, model in zip(panels[:, 0], ("personal", "global")):
        axes.set_ylabel(f"validation loss of {model} models")
    figure.savefig(path, dpi=130)


def draw(folder: Path = HERE) -> None:
    """Draw the pictures of the finished runs."""
    if rows := finished_rows(folder / "attacks.csv"):
        draw_attacks(rows, folder / "attacks.png")
    if rows := read(folder / "parameter_curves.csv"):
        draw_parameters(rows, folder / "parameters.png")


def main() -> None:
    """Run the missing runs, and draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("part", choices=["attacks", "parameters"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.part == "attacks":
        names, rows_of, jobs = ("attack", "fraction", "method", "seed"), attack_rows, attack_jobs
    else:
        names, rows_of, jobs = ("figure", "line", "seed"), parameter_rows, parameter_jobs
    work(jobs(options.seeds), HERE / f"{options.part}.csv", names, rows_of, options.workers)
    draw()


if __name__ == "__main__":
    main()
