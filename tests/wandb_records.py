"""Records of W&B's offline runs."""

import json
import subprocess

from wandb.util import get_core_path


def read_records(run):
    """The records of all offline runs in a run's folder, by the program of ``wandb leet``."""
    entries = []
    inspect = [get_core_path(), "leet", "inspect", "--no-observability", "--json"]
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        text = subprocess.run(
            [*inspect, "--run-file", str(file), str(file.parent)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        entries += [json.loads(line) for line in text.splitlines() if line.strip()]
    return entries
