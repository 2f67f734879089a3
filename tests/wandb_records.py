"""Records of W&B's offline runs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path


def read_records(run):
    """The records of all offline runs in a run's folder."""
    program = shutil.which("wandb", path=str(Path(sys.executable).parent)) or "wandb"
    entries = []
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        text = subprocess.run(
            [program, "leet", "inspect", "--json", str(file)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        entries += [json.loads(line) for line in text.splitlines() if line.strip()]
    return entries
