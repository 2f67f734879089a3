"""``python -m experiments.goldens.record --out FILE.npz``: record the numbers of federations.

Each case of :mod:`experiments.goldens.cases` is run in float64 for six rounds by every engine, in
one process, in two processes, and in one process that is stopped after three rounds and resumed.
After each round these are recorded: the global model, every client's states, the server's states,
and the validation metrics; after the last round the test metrics, too.

``python -m experiments.goldens.compare BEFORE.npz AFTER.npz`` tells whether a change of the code
changed any number.
"""

import argparse
import logging
import os
import socket
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor, multiprocessing

import pl_fed
from experiments.goldens.cases import CASES, Case, RandomSamples
from pl_fed.data import FederatedData
from pl_fed.samplers import Uniform

ENGINES = ("one_by_one", "stacked", "one_by_one_compiled", "stacked_compiled")
WAYS = ("one process", "two processes", "resumed")
ROUNDS, STOP_AFTER = 6, 3

Numbers = dict[str, np.ndarray]


class Recorder(Callback):
    """Records all numbers of a federation after each round, by ``<round>/<name>``."""

    def __init__(self) -> None:
        self.numbers: Numbers = {}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the round that has ended, with its validation."""
        for name, tensor in read_numbers(trainer, pl_module):
            self.numbers[f"{trainer.current_epoch}/{name}"] = tensor.detach().cpu().numpy().copy()


def read_numbers(trainer: Any, client: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every number of a federation that a resumed run needs, and the logged metrics.

    All processes must call this at the same time; only process 0 gets the clients' states.
    """
    for name, tensor in client.state_dict().items():
        if name.startswith("global_model."):
            yield name.replace("global_model.", "global/"), tensor
    state = trainer.federation.state_dict()
    for name, saved in state["store"].items():
        name = name.replace(".statistics", "_statistics")
        if saved:
            order = saved["clients"].argsort()
            rows = torch.cat([saved["default"].expand(0, -1), *saved["rows"]])
            yield f"clients/{name}/ids", saved["clients"][order]
            yield f"clients/{name}/rows", rows[order]
    yield from flatten("server", state["server"])
    for name, value in trainer.callback_metrics.items():
        if not name.startswith("time/"):
            yield f"logged/{name}", value


def flatten(prefix: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dictionaries and lists, by their paths."""
    if isinstance(value, Tensor):
        yield prefix, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from flatten(f"{prefix}/{key}", part)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from flatten(f"{prefix}/{index}", part)


def build_federation(case: Case, engine: str) -> pl_fed.Federation:
    """Return the federation of a case."""
    options: dict[str, Any] = {"sampler": Uniform(case.cohort), **case.federation()}
    return pl_fed.Federation(engine=pl_fed.EngineOptions(engine), seed=0, **options)


def build_client(case: Case) -> Any:
    """Return the algorithm of a case, with the same initial net in every process."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        net = case.net()
    options: dict[str, Any] = {
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=case.momentum)
    }
    if case.schedule:
        options["lr_scheduler"] = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
    return case.client(net, local_epochs=2, **options)


def fit(
    case: Case, engine: str, folder: Path, rounds: int, processes: int, checkpoint: Path | None
) -> Numbers:
    """Run the rounds of a case and return its numbers; of process 0 they are complete."""
    client, recorder = build_client(case), Recorder()
    data = FederatedData(
        RandomSamples(),
        batch_size=5,
        drop_last=case.drop_last,
        root_samples=case.root_samples,
        seed=0,
    )
    trainer = pl_fed.Trainer(
        build_federation(case, engine),
        run_dir=folder,
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        precision="64-true",
        max_epochs=rounds,
        gradient_clip_val=case.clip,
        num_sanity_val_steps=0,
        callbacks=[recorder],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(client, data, ckpt_path=checkpoint)
    if rounds == ROUNDS:
        for logged in trainer.test(client, data, verbose=False):
            for name, value in logged.items():
                recorder.numbers[f"test/{name}"] = np.asarray(value)
    return recorder.numbers


def run_case(case: Case, engine: str, way: str, processes: int = 1) -> Numbers:
    """Run a case in one of the three ways, and return its numbers."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        if way != "resumed":
            return fit(case, engine, folder / "run", ROUNDS, processes, None)
        before = fit(case, engine, folder / "begun", STOP_AFTER, processes, None)
        checkpoint = folder / "begun" / "checkpoints" / "last.ckpt"
        after = fit(case, engine, folder / "resumed", ROUNDS, processes, checkpoint)
        return {**before, **after}


def record_alone(names: Sequence[str], engines: Sequence[str], ways: Sequence[str]) -> Numbers:
    """Return the numbers of all runs in one process, by ``<case>/<engine>/<way>/…``."""
    recording: Numbers = {}
    for name in names:
        for engine in engines:
            for way in ways:
                numbers = run_case(CASES[name], engine, way)
                recording |= {f"{name}|{engine}|{way}|{key}": x for key, x in numbers.items()}
        print(name, flush=True)
    return recording


def record_in_two_processes(names: Sequence[str], engines: Sequence[str]) -> Numbers:
    """Return the numbers of all runs in two processes, as process 0 has them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "numbers.npz"
        workers = [
            context.Process(target=_work, args=(rank, port, names, engines, path))
            for rank in range(2)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        with np.load(path) as saved:
            return dict(saved)


def _work(rank: int, port: int, names: Sequence[str], engines: Sequence[str], path: Path) -> None:
    """Run all cases as one of two processes; process 0 writes the numbers."""
    prepare_process()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="goldens",
    )
    from lightning.pytorch.utilities import rank_zero_only

    rank_zero_only.rank = rank  # type: ignore[attr-defined]  # as a launcher would have it
    recording: Numbers = {}
    shared = path.parent
    for number, name in enumerate(names):
        for engine in engines:
            folder = shared / f"{number}-{engine}"
            try:
                numbers = fit(CASES[name], engine, folder, ROUNDS, 2, None)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            recording |= {f"{name}|{engine}|two processes|{key}": x for key, x in numbers.items()}
        if rank == 0:
            print(name, "in two processes", flush=True)
    if rank == 0:
        np.savez_compressed(path, **recording)


def prepare_process() -> None:
    """Use one thread, and silence Lightning."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for logger in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)


def main() -> None:
    """Record, and write one file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the .npz file to write")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="C")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    arguments = parser.parse_args()
    prepare_process()
    alone = [way for way in arguments.ways if way != "two processes"]
    recording = record_alone(arguments.cases, arguments.engines, alone)
    if "two processes" in arguments.ways:
        recording |= record_in_two_processes(arguments.cases, arguments.engines)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.out, **recording)
    print(f"{len(recording)} arrays are in {arguments.out}")


if __name__ == "__main__":
    main()
