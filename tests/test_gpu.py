"""The promises of pl_fed on a CUDA device: the CPU's numbers, equal engines, resume, processes.

The tests skip on a machine without such a device. ``PL_FED_TEST_DEVICE=cpu`` runs them on the CPU,
to check the tests themselves.
"""

import csv
import os
import socket
import traceback
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from forked_processes import fork_context
from lightning.pytorch.strategies import DDPStrategy
from small_federations import classes, seeded, shared_out
from torch import nn

import pl_fed
from pl_fed.aggregators import Krum, Median
from pl_fed.attacks import ALittleIsEnough, RandomLabels
from pl_fed.clients import APFL, FLAME, Ditto, DittoChoice, FedAvg, FedRep, FedTilt, Scaffold
from pl_fed.engine.batched import StackedRunner
from pl_fed.rounds.adversary import Adversary
from pl_fed.samplers import Uniform

DEVICE = os.environ.get("PL_FED_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
]

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
SIZES = [9, 30, 12, 21, 15, 18]
IMAGES = (2, 6, 6)
ENGINES = ["one_by_one", "stacked", "one_by_one_compiled", "stacked_compiled"]
ROUNDS = 3


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 8), nn.Tanh(), nn.Linear(8, 3))


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)
    )


def batch_norm_net():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))


def dropout_net():
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 8), nn.Dropout(0.3), nn.Linear(8, 3))


NETS = {"mlp": mlp, "cnn": cnn, "batch norm": batch_norm_net}
ALGORITHMS = {
    "FedAvg": FedAvg,
    "Ditto": Ditto,
    "FLAME": FLAME,
    "FedTilt": FedTilt,
    "SCAFFOLD": Scaffold,
    "FedRep": FedRep,
    "APFL": APFL,
}


def fit(
    folder,
    *,
    device=DEVICE,
    engine="one_by_one",
    net=mlp,
    algorithm=Ditto,
    precision="64-true",
    rounds=ROUNDS,
    checkpoint=None,
    momentum=0.5,
    storage=None,
    compile_mode=None,
    adversary=None,
    aggregator=None,
    **trainer_settings,
):
    """Run a federation on the device, and return its numbers on the CPU."""
    momentum = 0.0 if algorithm is Scaffold else momentum
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
    client = algorithm(seeded(net), optimizer=sgd, local_epochs=2)
    data = shared_out(classes(SIZES, IMAGES), val_fraction=0.2, test_fraction=0.2)
    federation = pl_fed.Federation(
        Uniform(4),
        aggregator=aggregator,
        adversary=adversary or Adversary(),
        engine=pl_fed.EngineOptions(engine, compile_mode=compile_mode),
        storage=storage or pl_fed.StorageOptions(),
        seed=0,
    )
    trainer = pl_fed.Trainer(
        federation,
        run_dir=folder,
        accelerator=device,
        precision=precision,
        max_epochs=rounds,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"devices": 1, **trainer_settings},
    )
    trainer.fit(client, data, ckpt_path=checkpoint)
    trainer.test(client, data, verbose=False)
    store = federation.state_dict()["store"]
    return {
        "client": {name: value.cpu() for name, value in client.state_dict().items()},
        "states": {name: in_order(table) for name, table in store.items() if table},
        "metrics": {
            name: value.cpu()
            for name, value in trainer.callback_metrics.items()
            if not name.startswith("time/")
        },
        "engine": str(federation.engine_choice.current),
    }


def in_order(table):
    """Return the rows of a client state, sorted by client."""
    order = table["clients"].cpu().argsort()
    rows = torch.cat([table["default"].expand(0, -1).cpu(), *(row.cpu() for row in table["rows"])])
    return rows[order]


def assert_close(outcome, expected, tolerance):
    for part in ("client", "states", "metrics"):
        assert outcome[part].keys() == expected[part].keys()
        for name, value in expected[part].items():
            torch.testing.assert_close(
                outcome[part][name], value, rtol=tolerance, atol=tolerance, msg=f"{part}: {name}"
            )


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory):
    """Return the numbers of a setting on the CPU, one client after the other; each runs once."""
    known = {}

    def run(**settings):
        key = str(sorted((name, str(value)) for name, value in settings.items()))
        if key not in known:
            known[key] = fit(tmp_path_factory.mktemp("cpu") / "run", device="cpu", **settings)
        return known[key]

    return run


@pytest.mark.parametrize(("net", "engine"), [("mlp", "stacked"), ("batch norm", "one_by_one")])
def test_auto_chooses_an_engine_and_gives_the_numbers_of_the_cpu(net, engine, on_the_cpu, tmp_path):
    outcome = fit(tmp_path / "run", engine="auto", net=NETS[net])
    if DEVICE == "cuda":
        assert outcome["engine"] == engine
    assert_close(outcome, on_the_cpu(net=NETS[net]), 1e-9)


def test_clients_choose_their_models_as_on_the_cpu(on_the_cpu, tmp_path):
    """Each client chooses its λ, and the better model of the hybrid, by its validation data."""
    choice = partial(DittoChoice, lams=[0.1, 1.0])
    outcome = fit(tmp_path / "run", engine="stacked", algorithm=choice)
    assert any(name.startswith("test/hybrid/") for name in outcome["metrics"])
    assert_close(outcome, on_the_cpu(algorithm=choice), 1e-9)


@pytest.mark.parametrize(("tf32", "tolerance"), [(False, 1e-4), (True, 1e-2)])
def test_convolutions_in_float32_stay_near(tf32, tolerance, on_the_cpu, monkeypatch, tmp_path):
    """cuDNN rounds the inputs of convolutions to TF32 (10 bits), unless it is told not to."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    outcome = fit(tmp_path / "run", engine="stacked", net=cnn, precision="32-true")
    loss = float(outcome["metrics"]["test/personal/loss"])
    expected = float(on_the_cpu(net=cnn)["metrics"]["test/personal/loss"])
    assert loss == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_gives_the_numbers_of_the_cpu(algorithm, on_the_cpu, tmp_path):
    kind = ALGORITHMS[algorithm]
    outcome = fit(tmp_path / "run", engine="stacked", algorithm=kind)
    assert_close(outcome, on_the_cpu(algorithm=kind), 1e-9)


@pytest.mark.parametrize("aggregator", [Median, Krum])
@pytest.mark.parametrize("attack", [RandomLabels, ALittleIsEnough])
def test_attacks_and_defences_give_the_numbers_of_the_cpu(attack, aggregator, on_the_cpu, tmp_path):
    setting = {"adversary": Adversary(attack(), ids=[1]), "aggregator": aggregator()}
    outcome = fit(tmp_path / "run", engine="stacked", **setting)
    setting = {"adversary": Adversary(attack(), ids=[1]), "aggregator": aggregator()}
    assert_close(outcome, on_the_cpu(**setting), 1e-9)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_lower_precisions_stay_near(engine, precision, on_the_cpu, tmp_path):
    outcome = fit(tmp_path / "run", engine=engine, precision=precision, rounds=1)
    loss = float(outcome["metrics"]["test/personal/loss"])
    expected = float(on_the_cpu(rounds=1)["metrics"]["test/personal/loss"])
    assert loss == pytest.approx(expected, rel=1e-5 if precision == "32-true" else 3e-2)


def test_states_on_disk_change_nothing(tmp_path):
    storage = pl_fed.StorageOptions(folder=str(tmp_path / "states"))
    outcome = fit(tmp_path / "run", storage=storage)
    assert_close(outcome, fit(tmp_path / "in memory"), 0.0)


@pytest.mark.parametrize(("begins", "ends"), [(DEVICE, DEVICE), (DEVICE, "cpu"), ("cpu", DEVICE)])
def test_runs_resume_on_any_device(begins, ends, tmp_path):
    whole = fit(tmp_path / "whole", device=ends)
    fit(tmp_path / "first", device=begins, rounds=2)
    checkpoint = tmp_path / "first" / "checkpoints" / "last.ckpt"
    resumed = fit(tmp_path / "second", device=ends, checkpoint=checkpoint)
    assert_close(resumed, whole, 0.0 if begins == ends else 1e-9)


def test_nccl_with_one_process(tmp_path):
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    outcome = join_process(0, 1, free_port(), tmp_path, backend)
    assert_close(outcome, fit(tmp_path / "alone"), 0.0)


@pytest.mark.parametrize("aggregator", [None, Median])
def test_two_processes_share_a_device(aggregator, tmp_path):
    port, context = free_port(), fork_context()
    arguments = [(rank, 2, port, tmp_path, "gloo", aggregator) for rank in range(2)]
    processes = [context.Process(target=save_outcome, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
        assert process.exitcode == 0
    alone = fit(tmp_path / "alone", aggregator=aggregator and aggregator())
    for rank in range(2):
        outcome = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert "failed" not in outcome, outcome["failed"]
        assert outcome["metrics"].keys() == alone["metrics"].keys()
        for name, value in alone["metrics"].items():
            torch.testing.assert_close(outcome["metrics"][name], value, rtol=1e-9, atol=1e-9)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def join_process(rank, size, port, folder, backend, aggregator=None):
    """Join a run as one of its processes; all of them use the first device."""
    environment = {
        "RANK": rank,
        "LOCAL_RANK": 0,
        "GROUP_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, str(value))
        return fit(
            folder / "run",
            aggregator=aggregator and aggregator(),
            num_nodes=size,
            strategy=DDPStrategy(process_group_backend=backend),
        )


def save_outcome(rank, size, port, folder, backend, aggregator):
    from lightning.pytorch.utilities import rank_zero_only

    rank_zero_only.rank = rank  # the value that torchrun's environment gives
    try:
        outcome = join_process(rank, size, port, folder, backend, aggregator)
    except BaseException:
        outcome = {"failed": traceback.format_exc()}
    torch.save(outcome, folder / f"{rank}.pt")


@pytest.mark.skipif(DEVICE != "cuda", reason="only a CUDA device has to be waited for")
@pytest.mark.parametrize("engine", ["stacked", "stacked_compiled"])
def test_local_steps_do_not_wait_for_the_device(engine, monkeypatch, tmp_path):
    rounds, run_stack = [], StackedRunner.run

    def run_without_waiting(*arguments):
        prepares = not rounds  # the first round traces and compiles
        torch.cuda.set_sync_debug_mode("default" if prepares else "error")
        try:
            return run_stack(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            rounds.append(None)

    monkeypatch.setattr(StackedRunner, "run", run_without_waiting)
    fit(tmp_path / "run", engine=engine)
    assert len(rounds) == ROUNDS


def test_command_line_gives_the_numbers_of_the_cpu(tmp_path):
    pytest.importorskip("jsonargparse")  # an image with a GPU may lack it
    from pl_fed.command.main import main

    settings = ("--config", str(QUICKSTART), "--trainer.logger=false", "--trainer.max_epochs=2")
    settings += ("--trainer.precision=64-true", "--trainer.enable_progress_bar=false")
    rows = {}
    for place, accelerator in (("cpu", "cpu"), ("device", DEVICE)):
        folder = tmp_path / place
        main(
            [
                *("fit", *settings, f"--trainer.accelerator={accelerator}"),
                f"--trainer.default_root_dir={folder}",
            ]
        )
        (path,) = folder.rglob("metrics.csv")
        with path.open() as file:
            rows[place] = list(csv.DictReader(file))
    assert len(rows["device"]) == len(rows["cpu"]) > 0
    for row, on_cpu in zip(rows["device"], rows["cpu"]):
        assert row.keys() == on_cpu.keys()
        for name in filter(lambda name: not name.startswith("time/"), row):
            number, expected = (float(cells[name] or "nan") for cells in (row, on_cpu))
            assert number == pytest.approx(expected, rel=1e-9, nan_ok=True), name


# The engines, compiled ones last


@pytest.mark.parametrize(("engine", "net"), product(ENGINES, NETS))
def test_every_engine_gives_the_numbers_of_the_cpu(engine, net, on_the_cpu, tmp_path):
    if "stacked" in engine and net == "batch norm":
        pytest.skip("BatchNorm does not stack")
    outcome = fit(tmp_path / "run", engine=engine, net=NETS[net])
    assert_close(outcome, on_the_cpu(net=NETS[net]), 1e-9)


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_engines_agree_about_dropout(engine, tmp_path):
    expected = fit(tmp_path / "one_by_one", net=dropout_net)
    assert_close(fit(tmp_path / "run", engine=engine, net=dropout_net), expected, 1e-9)


def test_cuda_graphs_give_the_numbers_of_eager_steps(tmp_path):
    expected = fit(tmp_path / "eager", engine="stacked", net=cnn)
    graphs = {"engine": "stacked_compiled", "compile_mode": "reduce-overhead"}
    assert_close(fit(tmp_path / "run", net=cnn, **graphs), expected, 1e-9)
