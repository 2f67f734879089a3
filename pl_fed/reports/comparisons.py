"""Comparisons of clients: between groups, with and without an attack, own and global model."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pl_fed.reports import configs
from pl_fed.reports.benefit import Benefit, average_figures, compare_runs
from pl_fed.reports.group import Group, is_lower_better, main_metric
from pl_fed.reports.pairs import match_runs, pair_clients, pair_models
from pl_fed.reports.robustness import build_lines, comparable_groups
from pl_fed.reports.run import sort_models

_LOSS = 0.05  # a client that loses more than this is counted
_LOCAL = "Local"
_Rows = Iterator[dict[str, Any]]


def main_model(group: Group) -> str | None:
    """Return the model of a group that clients use: personal if there is one, else global."""
    models = sort_models(model for run in group.tested_runs for model in run.models("test"))
    return models[0] if models else None


def compare_to_first(groups: Sequence[Group]) -> _Rows:
    """Yield the differences of each group from the first, by the models that clients use."""
    yield from _compare_to(groups[0], groups[1:], main_metric(groups, "test"))


def compare_to_local(groups: Sequence[Group]) -> _Rows:
    """Yield the differences of each group from local training, if there is a group of it."""
    benefits = {group.number: items for group, items in list_benefits(groups)}
    for local in _find_local(groups):
        others = [group for group in groups if group is not local]
        for row in _compare_to(local, others, main_metric(groups, "test")):
            yield row | average_figures(benefits[row["group"]])


def list_benefits(groups: Sequence[Group]) -> Iterator[tuple[Group, list[Benefit]]]:
    """Yield the benefit over local training for each seed, by group; nothing without local runs."""
    metric = main_metric(groups, "test")
    for local in _find_local(groups):
        others = [group for group in groups if group is not local]
        for group, _, (alone, joined) in _pair_columns(local, others, metric):
            lower = is_lower_better([*local.runs, *group.runs], metric)
            found = [
                compare_runs(run, local_run, (joined, alone), lower)
                for local_run, run in match_runs(local, group, (alone, joined))
            ]
            if benefits := [benefit for benefit in found if benefit is not None]:
                yield group, benefits


def _find_local(groups: Sequence[Group]) -> Sequence[Group]:
    """Return the first group of local training; none if there is none."""
    names = [configs.algorithm(group.config) if group.config else "" for group in groups]
    return [groups[names.index(_LOCAL)]] if _LOCAL in names else []


def _compare_to(reference: Group, groups: Sequence[Group], metric: str) -> _Rows:
    for group, model, columns in _pair_columns(reference, groups, metric):
        if pairs := pair_clients(reference, group, columns, metric):
            yield {"group": group.number, "name": group.label, "model": model, **pairs.describe()}


def _pair_columns(
    reference: Group, groups: Sequence[Group], metric: str
) -> Iterator[tuple[Group, str, tuple[str, str]]]:
    """Yield each group, its model, and the columns of the reference and the group."""
    own = main_model(reference)
    for group in groups:
        model = main_model(group)
        if own is not None and model is not None:
            yield group, model, (f"{own}_{metric}", f"{model}_{metric}")


def compare_own_to_global(groups: Sequence[Group]) -> _Rows:
    """Yield the number of clients that are worse off with their own model, by group."""
    metric = main_metric(groups, "test")
    for group in groups:
        model = main_model(group)
        columns = ("global_" + metric, f"{model}_{metric}")
        if model in (None, "global"):
            continue
        pairs = pair_models(group, columns, metric)
        if pairs is None:
            continue
        worse = pairs.gains < 0
        untrained = sum(r.untrained_clients for r in group.first_of_seeds(group.tested_runs))
        yield {
            "group": group.number,
            "name": group.label,
            "model": model,
            "worse off": pairs.worse_off,
            "their mean loss": float(-pairs.gains[worse].mean()) if worse.any() else None,
            "mean gain of the others": float(pairs.gains[~worse].mean())
            if (~worse).any()
            else None,
            "never took part": untrained,
        }


def compare_to_clean(groups: Sequence[Group]) -> _Rows:
    """Yield the losses of benign clients under an attack, by group and model."""
    metric = main_metric(groups, "test")
    for line in build_lines(comparable_groups(groups)):
        clean = line.groups.get(0.0)
        for share, group in line.groups.items():
            if not share or clean is None:
                continue
            for model in sort_models(m for run in group.tested_runs for m in run.models("test")):
                column = f"{model}_{metric}"
                pairs = pair_clients(clean, group, (column, column), metric)
                if pairs is None:
                    continue
                tail = -(-len(pairs.gains) // 10)
                ends = (np.sort(pairs.before), np.sort(pairs.after))
                if is_lower_better(group.runs, metric):
                    ends = (ends[0][::-1], ends[1][::-1])
                diverged = pairs.num_diverged
                last = "diverged" if diverged else f"{ends[1][:tail].mean():.3f}"
                yield {
                    "group": group.number,
                    "name": group.label,
                    "share": share,
                    "model": model,
                    **pairs.describe(),
                    f"lose more than {_LOSS:g}": int((pairs.gains < -_LOSS).sum()) + diverged,
                    "largest loss": None if diverged else float(-pairs.gains.min()),
                    "worst 10 %": f"{ends[0][:tail].mean():.3f} → {last}",
                }
