"""``python experiments/benchmarks/studies.py``: many small runs, as a study and in other ways.

Runs of the quickstart (60 rounds) that differ in their seed, without a logger, one thread each:

- study: ``pl_fed study`` on all cores;
- processes: ``pl_fed fit`` one after another, and as many at a time as there are cores;
- warm: ``pl_fed fit`` again and again in one process, the rate of a warm run;
- hydra: a Hydra multirun of ``pl_fed fit``, one after another in one process, if
  ``hydra-core`` is installed.

Prints wall time, processor time and rate of each. Machines that do other work distort wall times.
The processor time of a study's workers is not known: it kills them at its end.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
WARM = """
import sys, time
from pl_fed.command.main import main
import torch
torch.set_num_threads(1)
runs, folder, rounds = int(sys.argv[1]), sys.argv[2], sys.argv[3]
for run in range(runs + 1):
    if run == 1:  # the first one is a warm-up
        wall, cpu = time.perf_counter(), time.process_time()
    sys.argv[1:] = ["fit", "--config", "quickstart", "--trainer.logger", "false",
                    "--seed_everything", str(run), "--trainer.max_epochs", rounds,
                    "--trainer.default_root_dir", f"{folder}/{run}"]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
print("seconds", time.perf_counter() - wall, time.process_time() - cpu, file=sys.stderr)
"""
HYDRA = """
import sys
import hydra
from omegaconf import DictConfig

@hydra.main(version_base=None, config_path=None)
def job(config: DictConfig) -> None:
    import torch
    from pl_fed.command.main import main
    torch.set_num_threads(1)
    sys.argv = ["pl_fed", "fit", "--config", "quickstart", "--trainer.logger", "false",
                "--seed_everything", str(config.seed), "--trainer.max_epochs", str(config.rounds),
                "--trainer.default_root_dir", f"runs/{config.seed}"]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise

job()
"""


def run(words: list[str], folder: str) -> str:
    """Run Python in a folder, and return its error output.

    Raises:
        subprocess.CalledProcessError: If the command fails.
    """
    command = [sys.executable, *words]
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stderr


def run_study(runs: int, rounds: int, folder: str) -> None:
    """Run a study of so many seeds on all cores."""
    change = f"{{trainer.logger: false, trainer.max_epochs: {rounds}}}"
    text = f"name: many\nbase: [quickstart, {change}]\nseeds: {runs}\n"
    Path(folder, "many.yaml").write_text(text)
    run(["-m", "pl_fed", "study", "many.yaml"], folder)


def run_processes(runs: int, rounds: int, folder: str, side_by_side: int) -> None:
    """Run a process for each seed, so many at a time."""
    words = (
        f"-m pl_fed fit --config quickstart --trainer.logger false --trainer.max_epochs {rounds}"
    )

    def fit(seed: int) -> None:
        own = ["--seed_everything", str(seed), "--trainer.default_root_dir", f"runs/{seed}"]
        run([*words.split(), *own], folder)

    with ThreadPoolExecutor(side_by_side) as pool:
        list(pool.map(fit, range(runs)))


def run_hydra(runs: int, rounds: int, folder: str) -> None:
    """Run a Hydra multirun of so many seeds in one process."""
    Path(folder, "job.py").write_text(HYDRA)
    seeds = ",".join(map(str, range(runs)))
    run(["job.py", "-m", f"+seed={seeds}", f"+rounds={rounds}"], folder)


def measure(way: str, runs: int, rounds: int) -> tuple[float, float]:
    """Return the wall and processor time of runs in one of the ways, in s."""
    cores = len(os.sched_getaffinity(0))
    ways = {
        "study": lambda folder: run_study(runs, rounds, folder),
        "processes": lambda folder: run_processes(runs, rounds, folder, 1),
        "processes_on_all_cores": lambda folder: run_processes(runs, rounds, folder, cores),
        "hydra": lambda folder: run_hydra(runs, rounds, folder),
    }
    with tempfile.TemporaryDirectory() as folder:
        if way == "warm":
            words = run(["-c", WARM, str(runs), folder, str(rounds)], folder).split()
            place = len(words) - words[::-1].index("seconds")
            return float(words[place]), float(words[place + 1])
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        ways[way](folder)
        wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ways = ["warm", "study", "processes_on_all_cores", "processes", "hydra"]
    parser.add_argument("ways", nargs="*", default=ways, help=f"of {', '.join(ways)}")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    print(
        "| way | runs | wall time, s | processor time, s | runs a minute |\n|---|---|---|---|---|"
    )
    for way in arguments.ways:
        wall, cpu = measure(way, arguments.runs, arguments.rounds)
        rate = 60 * arguments.runs / wall
        processor = "" if way == "study" else f"{cpu:.1f}"
        print(f"| {way} | {arguments.runs} | {wall:.1f} | {processor} | {rate:.1f} |", flush=True)


if __name__ == "__main__":
    main()
