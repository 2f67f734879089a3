"""The experiment of pfl-research's CIFAR-10 setting: its config, its turns and its table."""

import functools
import math
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import pl_fed
from experiments.grid import QUIET, key_of, read, write
from experiments.privacy import cifar10 as experiment
from pl_fed.clients import FedAvg
from pl_fed.command.fit import FederatedCLI
from pl_fed.data import Arrays, FederatedData
from pl_fed.partitioners import IID
from pl_fed.samplers import All
from tests.small_federations import Given

CLIENTS, SAMPLES = 3, 4


def build_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 2))


def fit(folder, rounds, callback, privacy=None):
    """Fit a tiny federation of 3 clients with 4 images of 3 × 2 × 2 pixels, and 5 test images."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(256, (CLIENTS * SAMPLES + 5, 3, 2, 2), generator=draw).to(torch.uint8)
    split = torch.tensor([0] * CLIENTS * SAMPLES + [2] * 5)
    arrays = Arrays(images, torch.arange(len(images)) % 2, None, split, num_classes=2)
    data = FederatedData(
        Given(arrays), IID(), CLIENTS, val_fraction=0.0, normalize=[0.5, 0.25], seed=0
    )
    client = FedAvg(
        build_net(), local_epochs=1, optimizer=functools.partial(torch.optim.SGD, lr=0.1)
    )
    federation = pl_fed.Federation(
        All(), privacy=privacy, engine=pl_fed.EngineOptions("one_by_one"), seed=0
    )
    trainer = pl_fed.Trainer(
        federation,
        run_dir=str(folder / "run"),
        max_epochs=rounds,
        limit_val_batches=0,
        callbacks=[callback],
        **QUIET,
    )
    last = folder / "run" / "checkpoints" / "last.ckpt"
    trainer.fit(client, data, ckpt_path=str(last) if last.exists() else None)
    return client, data


class StandIn:
    """Stand-in of pfl-research's run: its net is always the initial one."""

    def __init__(self):
        self.net, self.rounds, self.advanced_to = build_net(), 0, []

    def advance(self, rounds):
        seconds = [0.25] * (rounds - self.rounds)
        self.rounds = rounds
        self.advanced_to.append(rounds)
        return seconds


@pytest.mark.slow
@pytest.mark.parametrize("privacy", experiment.PRIVACY)
def test_config_builds(privacy, tmp_path, capsys):
    """The command line accepts the config; the noise is that of all 3000 rounds."""
    config = experiment.config_of(privacy, 5, 40, tmp_path, pfl=True)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit, match="0"):
        FederatedCLI(["fit", "--config", str(file), "--print_config"])
    parsed = yaml.safe_load(capsys.readouterr().out)
    assert parsed["trainer"]["max_epochs"] == 40
    assert parsed["model"]["init_args"]["net"]["init_args"] == {"seed": 5}
    section = parsed["federation"]["privacy"]
    assert (section["rounds"] if privacy == "dp" else section) == (
        3000 if privacy == "dp" else None
    )


def test_initial_weights_follow_the_seed():
    """The net is that of pfl-research: 1,626,442 parameters, Glorot's bounds, its own seed."""
    nets = [experiment.GlorotCNN(seed) for seed in (0, 0, 1)]
    torch.manual_seed(7)
    nets[1] = experiment.GlorotCNN(0)
    rows = [nn.utils.parameters_to_vector(net.parameters()) for net in nets]
    assert len(rows[0]) == 1_626_442
    assert rows[0].equal(rows[1])
    assert not rows[0].equal(rows[2])
    layer = nets[0].layers[7]  # a linear layer, 12544 → 128
    bound = math.sqrt(6 / (12_544 + 128))
    assert 0.999 * bound < layer.weight.abs().max() <= bound


def test_evaluate_is_exact():
    """Logits (x, 0) give accuracy 2/3 and mean loss of log(1 + exp(∓x))."""
    net = nn.Linear(1, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0], [0.0]]))
        net.bias.zero_()
    inputs, targets = torch.tensor([[2.0], [-1.0], [3.0]]), torch.tensor([0, 1, 1])
    accuracy, loss = experiment.evaluate(net.train(), inputs, targets)
    expected = [math.log1p(math.exp(-2)), math.log1p(math.exp(-1)), math.log1p(math.exp(3))]
    assert accuracy == pytest.approx(2 / 3)
    assert loss == pytest.approx(sum(expected) / 3, rel=1e-6)
    assert net.training


@pytest.mark.slow
def test_turns_write_rows_and_resume(tmp_path, monkeypatch):
    """Each turn has a row of each library; a resumed run neither repeats nor misses a turn."""
    stand_in = StandIn()
    monkeypatch.setattr(experiment.Turns, "_build_pfl", lambda self, trainer: stand_in)
    results = tmp_path / "results" / "cifar10.csv"
    results.parent.mkdir()
    build = functools.partial(experiment.Turns, str(results), "none", 0, "unused")
    fit(tmp_path, 13, build())
    first = read(results)
    client, data = fit(tmp_path, 30, build())
    rows = read(results)
    assert rows[: len(first)] == first
    keys = [key_of(row, ("library", "round")) for row in rows]
    assert keys == [(name, str(r)) for r in (0, 10, 20, 30) for name in experiment.LIBRARIES]
    assert stand_in.advanced_to == [10, 20, 30]
    assert {row["loss"] for row in rows if row["library"] == "pfl"} == {rows[0]["loss"]}
    test = data.clients.batch(data.clients.test.index)
    assert len(test.targets) == 5
    accuracy, loss = experiment.evaluate(client.global_model, test.inputs, test.targets)
    assert (rows[-2]["accuracy"], rows[-2]["loss"]) == (f"{accuracy:.4f}", f"{loss:.4f}")
    assert rows[-2]["loss"] != rows[0]["loss"]


def test_users_have_the_clients_samples(tmp_path):
    """pfl-research's users hold each training sample once, normalized as for pl_fed."""
    _, data = fit(tmp_path, 1, experiment.Turns(str(tmp_path / "cifar10.csv"), "none"))
    users = experiment.users_of(data.clients)
    assert [len(targets) for _, targets in users] == [SAMPLES] * CLIENTS
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(256, (CLIENTS * SAMPLES + 5, 3, 2, 2), generator=draw)
    expected = (images[: CLIENTS * SAMPLES] / 255 - 0.5) / 0.25
    together = torch.cat([inputs for inputs, _ in users])
    order = [int((expected - image).abs().flatten(1).sum(1).argmin()) for image in together]
    assert sorted(order) == list(range(CLIENTS * SAMPLES))
    torch.testing.assert_close(together, expected[order])


def row(library, round, accuracy, seconds, privacy="dp"):
    names = (*experiment.NAMES, "accuracy", "loss", "seconds")
    return dict(zip(names, (library, privacy, "0", round, accuracy, "1.0", seconds)))


ROWS = [
    *(row("pl_fed", "0", "0.1", ""), row("pfl", "0", "0.1", "")),
    *(row("pl_fed", "10", "0.2", "2.0"), row("pfl", "10", "0.4", "3.0")),
    *(row("pl_fed", "20", "0.3", "4.0"), row("pfl", "20", "0.6", "4.0")),
    row("pl_fed", "30", "0.9", "1.0"),
]


def test_table_compares_equal_rounds_and_turns():
    """A turn of one library alone counts neither for the accuracy nor for the time."""
    assert experiment.time_ratios(ROWS, "dp") == ([2.0, 4.0], [3.0, 4.0], [1.5, 1.0])
    lines = experiment.make_table(ROWS).splitlines()[2:]
    assert lines == [
        "| ε = 2 | pl_fed | 20 | 0.3000 | 0.2000 | 3.00 s | 1 |",
        "| ε = 2 | pfl | 20 | 0.6000 | 0.3667 | 3.50 s | 1.25 |",
    ]


def test_finished_runs_have_the_last_row_of_both_libraries():
    assert experiment.is_finished(ROWS, "dp", 0, 20, pfl=True)
    assert experiment.is_finished(ROWS, "dp", 0, 30, pfl=False)
    assert not experiment.is_finished(ROWS, "dp", 0, 30, pfl=True)
    assert not experiment.is_finished(ROWS, "none", 0, 20, pfl=True)
    assert not experiment.is_finished(ROWS, "dp", 1, 20, pfl=True)


def test_report_replaces_the_table_and_draws(tmp_path):
    write(tmp_path / "cifar10.csv", ROWS)
    page = tmp_path / "cifar10.md"
    page.write_text("before\n<!-- table -->\nold\n<!-- /table -->\nafter\n")
    experiment.write_report(tmp_path)
    text = page.read_text()
    assert text.startswith("before\n<!-- table -->\n\n| ")
    assert text.endswith("|\n\n<!-- /table -->\nafter\n")
    assert "old" not in text
    assert (tmp_path / "cifar10.png").stat().st_size > 1000


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_both_libraries_compute_the_same_model(clip_norm, tmp_path, monkeypatch):
    """With equal cohorts and batches, and negligible noise, the models are equal."""
    by_pfl = pytest.importorskip(
        "experiments.privacy.cifar10_by_pfl", reason="needs pfl-research 0.6", exc_type=ImportError
    )
    privacy = None
    if clip_norm:
        privacy = pl_fed.DifferentialPrivacy(clip_norm, 1e-6, noise_multiplier=1e-9)
    monkeypatch.setattr(
        by_pfl, "build_mechanism", lambda *_: by_pfl.GaussianMechanism(clip_norm, 1e-9)
    )
    turns = experiment.Turns(str(tmp_path / "cifar10.csv"), "dp")
    client, data = fit(tmp_path, 10, turns, privacy)
    run = by_pfl.PflRun(
        experiment.users_of(data.clients),
        build_net(),
        privacy,
        seed=0,
        folder=Path(tmp_path / "pfl"),
        cohort=CLIENTS,
        batch_size=10,
        sampling="minimize_reuse",
    )
    assert len(run.advance(10)) == 10
    ours, theirs = (
        nn.utils.parameters_to_vector(m.parameters()) for m in (client.global_model, run.net)
    )
    assert not ours.equal(nn.utils.parameters_to_vector(build_net().parameters()))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
