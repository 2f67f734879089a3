"""``python experiments/benchmarks/start.py``: the processor time of starting pl_fed.

Runs each command of the table in new processes, one thread each, and prints the median of their
user and system time. On a shared machine, the fastest run is more reliable. A first, uncounted run
compiles the bytecode. ``--beside ../other`` alternates with another checkout of the repository.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROUND = "-m pl_fed fit --config quickstart --trainer.max_epochs 1 --trainer.default_root_dir"
API = "from pl_fed import Trainer, clients, data"
COMMANDS = {
    "import torch": ["-c", "import torch"],
    "import pl_fed": ["-c", "import pl_fed"],
    API: ["-c", API],
    "pl_fed --help": ["-m", "pl_fed", "--help"],
    "pl_fed fit --help": ["-m", "pl_fed", "fit", "--help"],
    "pl_fed fit --help all": ["-m", "pl_fed", "fit", "--help", "all"],
    "one round, --trainer.logger false": [*ROUND.split(), "{folder}", "--trainer.logger", "false"],
    "one round, offline W&B": [*ROUND.split(), "{folder}"],
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "", "WANDB_MODE": "offline"}


def run(arguments: list[str], tree: Path) -> float:
    """Run Python with a checkout's package, and return its seconds of processor time.

    Raises:
        subprocess.CalledProcessError: If the command fails.
    """
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(tree)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *(word.format(folder=folder) for word in arguments)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="of each command and checkout")
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--only", default="", help="commands with this text in their names")
    arguments = parser.parse_args()
    trees = [Path(__file__).parents[2]]
    if arguments.beside is not None:
        trees.insert(0, arguments.beside.resolve())
    columns = [f"{tree.name}, {kind}, s" for tree in trees for kind in ("median", "fastest")]
    print(f"| command | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, command in COMMANDS.items():
        if arguments.only not in name:
            continue
        times: dict[Path, list[float]] = {tree: [] for tree in trees}
        for tree in trees:
            run(command, tree)
        for _ in range(arguments.runs):
            for tree in trees:
                times[tree].append(run(command, tree))
        cells = [f"{f(times[tree]):.2f}" for tree in trees for f in (statistics.median, min)]
        print(f"| `{name}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
