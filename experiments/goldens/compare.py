"""``python -m experiments.goldens.compare BEFORE.npz AFTER.npz``: compare recordings.

Prints a line for each case: how many of its arrays are equal bit for bit, and the largest
difference of the others, relative to max(1, |number|). Exits with 1 if any difference is above
``--tolerance``, or if the second recording lacks an array of the first one.

With one file only, each of its runs is compared with that of the engine ``one_by_one`` in one
process: engines, processes and resumes must agree.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

Numbers = dict[str, np.ndarray]
Pair = tuple[str, np.ndarray, np.ndarray | None]


def difference(before: np.ndarray, after: np.ndarray) -> float:
    """Return the largest difference relative to max(1, |before|); infinity for other shapes."""
    if before.shape != after.shape:
        return float("inf")
    if not before.size or np.array_equal(before, after, equal_nan=before.dtype.kind == "f"):
        return 0.0
    a, b = before.astype(np.float64), after.astype(np.float64)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    return float(np.nanmax(np.abs(a - b) / np.maximum(1.0, np.abs(a))))


def pair_recordings(before: Numbers, after: Numbers) -> Iterator[Pair]:
    """Yield each array of the first recording beside that of the second."""
    for key, numbers in before.items():
        yield key, numbers, after.get(key)


def pair_runs(recording: Numbers) -> Iterator[Pair]:
    """Yield each array of the engine one_by_one beside that of every other run of its case."""
    for key, numbers in recording.items():
        case, engine, way, name = key.split("|")
        reference = recording.get(f"{case}|one_by_one|one process|{name}")
        if (engine, way) != ("one_by_one", "one process") and reference is not None:
            yield key, reference, numbers


def print_table(pairs: Iterator[Pair], tolerance: float) -> bool:
    """Print a line for each case, and return whether all differences are within the tolerance."""
    equal: dict[str, int] = {}
    total: dict[str, int] = {}
    worst: dict[str, tuple[float, str]] = {}
    for key, before, after in pairs:
        case, _, name = key.partition("|")
        distance = float("inf") if after is None else difference(before, after)
        total[case] = total.get(case, 0) + 1
        equal[case] = equal.get(case, 0) + (distance == 0.0)
        worst[case] = max(worst.get(case, (0.0, "")), (distance, name))
    for case in total:
        distance, name = worst[case]
        worst_name = f"  {name}" if distance else ""
        print(f"{case:36s} {equal[case]:6d} of {total[case]:6d} equal   {distance:.1e}{worst_name}")
    return all(distance <= tolerance for distance, _ in worst.values())


def main() -> None:
    """Compare, and exit with 1 if the numbers differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="one recording, or two")
    parser.add_argument("--tolerance", type=float, default=1e-12)
    arguments = parser.parse_args()
    recordings = [dict(np.load(path)) for path in arguments.files]
    pairs = pair_runs(*recordings) if len(recordings) == 1 else pair_recordings(*recordings)
    sys.exit(0 if print_table(pairs, arguments.tolerance) else 1)


if __name__ == "__main__":
    main()
