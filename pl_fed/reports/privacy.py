"""The guarantees of private runs, and the guarantee of all of them together."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pl_fed.reports import configs
from pl_fed.reports.run import Run
from pl_fed.text import format_bound

EPSILON = "privacy/epsilon"
"""Name of the metric with ε of the rounds so far."""

_NOISE_SEED = "federation.privacy.noise_seed"
_DATASET = "data.dataset"
_PLACES = (".path", ".folder", ".dataset")  # arguments of data sources that name the data


def describe_guarantees(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the guarantee of each private run, as the run printed it, and the composed ones."""
    for run in runs:
        if statement := run.summary.get("privacy"):
            yield f"{run.name}: {statement}"
    yield from describe_compositions(runs)


class _PrivateRun(NamedTuple):
    """Private run: its guarantee, and the name of its noise, as far as it is known.

    ``replaces`` is whether neighbouring federations replace a client's data; otherwise one client
    sends nothing.
    """

    epsilon: float
    delta: float
    noise_seed: float | None
    noise: str | None
    replaces: bool


def describe_compositions(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a sentence for each data set that several private runs have read.

    All runs together have Σ ε and Σ δ as guarantee. This basic composition (C. Dwork and A. Roth,
    "The Algorithmic Foundations of Differential Privacy", 2014, theorem 3.16) holds for all
    mechanisms with the same neighbours; the runs' noise and cohorts must be independent, so that no
    two runs may have one ``noise_seed``, or resume one checkpoint.
    """
    by_dataset: dict[str, list[_PrivateRun]] = {}
    for run in runs:
        epsilon, delta = run.final(EPSILON), _read_option(run, "delta")
        if epsilon is not None and delta is not None:
            seed, noise = _read_option(run, "noise_seed"), run.summary.get("noise")
            noise = noise if isinstance(noise, str) else None
            own = _PrivateRun(epsilon, delta, seed, noise, _replaces_clients(run))
            by_dataset.setdefault(_name_dataset(run), []).append(own)
    for group in by_dataset.values():
        if len(group) < 2:
            continue
        if shared := _list_repeated([run.noise_seed for run in group]):
            yield (
                f"{len(group)} private runs read one data set, and some have the noise and"
                f" the cohorts of one `{_NOISE_SEED}` = {shared[0]:.0f}: together they have no"
                " guarantee; publish one of them."
            )
            continue
        if _list_repeated([run.noise for run in group]):
            yield (
                f"{len(group)} private runs read one data set, and some have the same noise"
                " and cohorts, because one resumed a checkpoint of another: together they have no"
                " guarantee, unless one only continues the other; publish one of them."
            )
            continue
        replacing = sum(run.replaces for run in group)
        if 0 < replacing < len(group):
            yield (
                f"{len(group)} private runs read one data set, {len(group) - replacing} of them for"
                f" neighbours in which one client sends nothing, and {replacing} for neighbours in"
                " which one client's data are replaced: ε of the two kinds do not add up; publish"
                " runs of one kind."
            )
            continue
        epsilon, delta = sum(run.epsilon for run in group), sum(run.delta for run in group)
        yield (
            f"{len(group)} private runs read one data set, and may have trained the same"
            f" clients: all of them together have ε = {format_bound(epsilon)} at"
            f" δ = {format_bound(delta)}, the sums over the runs (basic composition, for"
            " independent noise and cohorts)."
        )


def _list_repeated(values: Sequence[Any]) -> list[Any]:
    """Return the values that occur more than once; ``None`` stands for no value."""
    counts = Counter(value for value in values if value is not None)
    return [value for value, count in counts.items() if count > 1]


def _replaces_clients(run: Run) -> bool:
    """Return whether neighbouring federations of a run's guarantee replace a client's data."""
    flat = configs.flatten(run.config)
    sampler = configs.ClassPath(flat.get("federation.sampler") or "Uniform").short
    is_amplified = _find_option(run, "amplification") is not False
    return sampler == "Uniform" and is_amplified and _find_option(run, "min_separation") is None


def _read_option(run: Run, name: str) -> float | None:
    """Return a number of ``federation.privacy`` in the run's config, if it has one."""
    number = _find_option(run, name)
    return float(number) if isinstance(number, int | float) else None


def _find_option(run: Run, name: str) -> Any:
    """Return an option of ``federation.privacy`` in the run's config; ``None`` without it."""
    flat = configs.flatten(run.config)
    keys = (f"federation.privacy.{name}", f"federation.privacy.init_args.{name}")
    return next((flat[key] for key in keys if key in flat), None)


def _name_dataset(run: Run) -> str:
    """Return the data set in the run's config, without its partition into clients.

    Of pl_fed's own classes, only the place of the data counts: other columns or classes of one file
    are data of the same clients, and so is a data set that another run downloaded.
    """
    options = {
        key.removeprefix(_DATASET): value
        for key, value in configs.flatten(run.config).items()
        if key == _DATASET or key.startswith(f"{_DATASET}.")
    }
    if str(options.get("", "")).startswith("pl_fed."):
        options = {k: v for k, v in options.items() if not k or k.startswith(_PLACES)}
    for key in _PLACES:
        if isinstance(options.get(key), str):
            options[key] = os.path.abspath(os.path.expanduser(options[key]))
    return repr(sorted((key, str(value)) for key, value in options.items()))
