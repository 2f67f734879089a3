"""Defences: their cost without an attack, and their gain under one."""

from collections.abc import Iterator, Sequence
from typing import Any

from pl_fed.reports import configs
from pl_fed.reports.comparisons import main_model
from pl_fed.reports.group import Group, is_lower_better, main_metric
from pl_fed.reports.robustness import comparable_groups

_DEFENCE = ("federation.aggregator", "federation.pre_aggregators")
_ADVERSARY = "federation.adversary"
_PLAIN = ("", "pl_fed.aggregators.Mean", "pl_fed.aggregators.Mean, uniform")


def measure_defences(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Yield the gain of each defence over the plain mean, by attack and share."""
    metric = main_metric(groups, "test")
    plain, defended = {}, []
    for group in comparable_groups(groups):
        defence, family, adversary = _split_settings(group)
        if defence in _PLAIN:
            plain[family, adversary] = group
        else:
            defended.append((group, family, adversary))
    for group, family, adversary in defended:
        reference, model = plain.get((family, adversary)), main_model(group)
        if reference is None or model is None:
            continue
        share = group.tested_runs[0].byzantine_share or 0.0
        gain = _mean_gain(reference, group, f"test/{model}/{metric}", metric)
        if gain is not None:
            yield {
                "group": group.number,
                "name": group.label,
                "model": model,
                "share of Byzantine clients": share,
                "cost without an attack": None if share else -gain,
                "gain under the attack": gain if share else None,
                "compared with": reference.title,
            }


def _split_settings(group: Group) -> tuple[str, str, str]:
    """Return the defence, the adversary and the other settings of a group, as text."""
    settings = configs.settings(group.config)

    def take(prefixes: Sequence[str]) -> list[tuple[str, Any]]:
        """Remove the settings under some keys, and return them."""
        keys = [k for k in settings if any(k == p or k.startswith(f"{p}.") for p in prefixes)]
        return sorted((key, settings.pop(key)) for key in keys)

    defence = [value for _, value in take(_DEFENCE)]
    adversary = [item for item in take([_ADVERSARY]) if not item[0].endswith(".expected")]
    attack = str(adversary) if group.tested_runs[0].byzantine_share else ""
    return ", ".join(map(str, defence)), str(sorted(settings.items())), attack


def _mean_gain(reference: Group, group: Group, name: str, metric: str) -> float | None:
    """Return the mean gain over the seeds of both groups; positive if the group is better."""
    before = _values_by_seed(reference, name)
    after = _values_by_seed(group, name)
    seeds = before.keys() & after.keys()
    if not seeds:
        return None
    gain = sum(after[seed] - before[seed] for seed in sorted(seeds)) / len(seeds)
    return -gain if is_lower_better([*reference.runs, *group.runs], metric) else gain


def _values_by_seed(group: Group, name: str) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for run in group.tested_runs:
        if (value := run.final(name)) is not None:
            values.setdefault(configs.describe_seeds(run.config), []).append(value)
    return {seed: sum(column) / len(column) for seed, column in values.items()}
