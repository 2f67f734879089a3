"""Run a group of cases on the CPU and on the pretend device, and write their differences.

``python tests/devices/run_on_device.py GROUP FILE.json PART [WORDS ...]``; the part of the group is
``chosen``, the covering choice of ``make test``, or ``further``, the rest. Words select cases.
"""

import json
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("WANDB_MODE", "disabled")

import pretend_device

pretend_device.install()
sys.path[:0] = pretend_device.ROOMS

import torch  # noqa: E402
from device_cases import GROUPS  # noqa: E402
from planted_faults import planted_faults  # noqa: E402

GROUPS["planted faults"] = [planted_faults]

warnings.filterwarnings("ignore")
for library in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(library).setLevel(logging.ERROR)


def outcome_of(case, device):
    """Return a case's numbers, or its error."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        try:
            return case(device, Path(folder))
        except Exception as error:
            return error


def largest_difference(numbers, expected):
    """Return the largest difference of any number, and its name."""
    if numbers.keys() != expected.keys():
        return float("inf"), f"only once: {sorted(numbers.keys() ^ expected.keys())[:4]}"
    worst, where = 0.0, ""
    for name, value in expected.items():
        difference = (numbers[name].double() - value.double()).abs()
        both_nan = numbers[name].isnan() & value.isnan()
        difference = torch.where(both_nan, 0.0, difference).nan_to_num(nan=float("inf"))
        if difference.numel() and float(difference.max()) > worst:
            worst, where = float(difference.max()), name
    return worst, where


def compare(case, expected):
    """Run a case on the device, and return its comparison with the CPU's outcome."""
    started = time.process_time()
    with pretend_device.counting() as counts:
        outcome = outcome_of(case, "gpu")
    row = {"launches": sum(counts.launches.values()), "seconds": time.process_time() - started}
    if isinstance(expected, Exception) or isinstance(outcome, Exception):
        texts = [describe(expected), describe(outcome)]
        return row | {"cpu": texts[0], "device": texts[1], "same_error": texts[0] == texts[1]}
    difference, where = largest_difference(outcome, expected)
    return row | {"difference": difference, "where": where}


def describe(outcome):
    """Return an error's last line with its place in pl_fed; an empty text for numbers."""
    if not isinstance(outcome, Exception):
        return ""
    frames = traceback.extract_tb(outcome.__traceback__)
    places = [f"{f.filename.rpartition('/pl_fed/')[2]}:{f.lineno}" for f in frames]
    places = [p for p, f in zip(places, frames) if "/pl_fed/" in f.filename][-1:]
    return f"{type(outcome).__name__} at {places}: {(str(outcome).splitlines() or [''])[-1][:300]}"


def run_group(group, part, words=()):
    """Return the comparison of each case of a part of a group, and the number of all cases."""
    expected, rows = {}, {}
    cases = {name: case for walk in GROUPS[group] for name, case in walk().items()}
    for name, case in cases.items():
        is_further = getattr(case, "is_further", False)
        if is_further != (part == "further") or (words and not any(word in name for word in words)):
            continue
        on_cpu = getattr(case, "cpu", name)
        if on_cpu not in expected:
            expected[on_cpu] = outcome_of(cases.get(on_cpu, on_cpu), "cpu")
        tolerance = getattr(case, "tolerance", 1e-9)
        rows[name] = compare(case, expected[on_cpu]) | {"tolerance": tolerance}
    return {"rows": rows, "cases": len(cases)}


if __name__ == "__main__":
    assert sys.argv[1] in GROUPS, f"expected one of {list(GROUPS)}"
    assert sys.argv[3] in ("chosen", "further")
    group, path, part, *words = sys.argv[1:]
    Path(path).write_text(json.dumps(run_group(group, part, words), indent=1))
