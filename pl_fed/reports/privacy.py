"""The guarantees of private runs, and the guarantee of all of them together."""

from collections.abc import Iterator, Sequence

from pl_fed.reports import configs
from pl_fed.reports.run import Run

_EPSILON = "privacy/epsilon"
_DELTAS = ("federation.privacy.delta", "federation.privacy.init_args.delta")


def describe_guarantees(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the guarantee of each private run, as the run printed it, and the composed ones."""
    for run in runs:
        if statement := run.summary.get("privacy"):
            yield f"{run.name}: {statement}"
    yield from _describe_compositions(runs)


def _describe_compositions(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a sentence for each data set that several private runs have read.

    All runs together have Σ ε and Σ δ as guarantee. This basic composition (C. Dwork and A. Roth,
    "The Algorithmic Foundations of Differential Privacy", 2014, theorem 3.16) holds for all
    mechanisms; the runs' noise must be independent.
    """
    datasets: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        epsilon, delta = run.final(_EPSILON), _read_delta(run)
        if epsilon is not None and delta is not None:
            datasets.setdefault(_name_dataset(run), []).append((epsilon, delta))
    for guarantees in datasets.values():
        if len(guarantees) > 1:
            epsilon, delta = (sum(numbers) for numbers in zip(*guarantees))
            yield (
                f"{len(guarantees)} private runs read one data set, and may have trained the same"
                f" clients: all of them together have ε = {epsilon:.4g} at δ = {delta:.4g}, the"
                " sums over the runs (basic composition, for independent noise)."
            )


def _read_delta(run: Run) -> float | None:
    """Return δ in the run's config, if it has one."""
    flat = configs.flatten(run.config)
    delta = next((flat[key] for key in _DELTAS if key in flat), None)
    return float(delta) if isinstance(delta, int | float) else None


def _name_dataset(run: Run) -> str:
    """Return the data set in the run's config, without its partition into clients."""
    flat = configs.flatten(run.config)
    return repr(sorted((k, str(v)) for k, v in flat.items() if k.startswith("data.dataset")))
