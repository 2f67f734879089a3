"""The papers' tables: their configs, and the clients that are theirs alone."""

import importlib
from dataclasses import replace

import pytest
import torch
import yaml
from small_federations import classes, mlp, run_rounds, seeded, sgd, shared_out
from torch.nn.functional import cross_entropy

from experiments import summary
from experiments.ditto import points
from experiments.ditto import report as ditto_report
from experiments.ditto import run as ditto_run
from experiments.ditto.data import Share
from experiments.fedtilt import run as fedtilt
from experiments.fedtilt.data import Unbalanced
from experiments.flame import figures, report
from experiments.flame import run as flame
from experiments.flame.reference import UnsynchronizedDitto
from experiments.grid import QUIET, fit, merge_configs, spec
from pl_fed.command.fit import FederatedCLI
from pl_fed.data import Arrays
from pl_fed.types import RoundContext

CONFIGS = {
    **{f"flame {m}": flame.config("mnist/label_q2", m, 1) for m in flame.METHODS},
    **{f"flame {s}": flame.config(s, "FLAME", 1) for s in [*flame.SETTINGS, "cifar10/label_q2"]},
    **{str(job.key): job.config for job in figures.attack_jobs([1])[5:10]},
    **{str(job.key): job.config for job in figures.parameter_jobs([1])[::3]},
    **{
        f"fedtilt {s} {m} {split}": fedtilt.job(s, split, m, 0).config
        for number, (s, split) in enumerate(
            zip(fedtilt.SETTINGS + fedtilt.CIFAR10_SETTINGS, 3 * list(fedtilt.SPLITS))
        )
        for m in list(fedtilt.METHODS)[number % 2 :: 2]  # a setting and a method replace options
    },
    **{
        f"ditto {table} {condition} {m}": ditto_run.config(table, condition, m, 0)
        for table in ditto_run.TABLES
        for condition, first in (("A2_50", 0), ("A3_20", 1))
        for m in ditto_run.methods(table, condition)[first::2]
    },
}


@pytest.fixture(scope="module")
def parsed_config():
    """Returns the config that fit parses from a file; its parser is built once."""

    class ParsingCLI(FederatedCLI):
        def _run_subcommand(self, subcommand):
            """Train nothing."""

        def instantiate_classes(self):
            """Build nothing."""
            self.trainer = None

    command_line = None

    def parse(path):
        nonlocal command_line
        arguments = ["fit", "--config", str(path)]
        if command_line is None:
            command_line = ParsingCLI(arguments)
        command_line.parse_arguments(command_line.parser, arguments)
        return command_line.config.fit

    return parse


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_fit_accepts_the_config(name, tmp_path, parsed_config, capsys):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIGS[name]))
    try:
        config = parsed_config(tmp_path / "config.yaml")
    except SystemExit:
        pytest.fail(capsys.readouterr().err)
    assert config.model.class_path == CONFIGS[name]["model"]["class_path"]


def test_unsynchronized_ditto_equals_hand_computed_rounds():
    """Compute two rounds by hand: a step of each copy, w as their mean, v pulled to w."""
    data = shared_out(classes([6, 6]), batch_size=6)
    client = UnsynchronizedDitto(seeded(mlp), lam=0.5, global_lr=0.3, optimizer=sgd(0.1))
    result = run_rounds(client, data, rounds=2)
    start = torch.nn.utils.parameters_to_vector(seeded(mlp).parameters()).double().detach()
    net = mlp().double()

    def gradient(row, k):
        torch.nn.utils.vector_to_parameters(row, net.parameters())
        index = data.clients.train.samples(k)
        loss = cross_entropy(net(data.clients.inputs[index].double()), data.clients.targets[index])
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*net.parameters()])])

    copies, v, w = [start, start], [start, start], start
    for _ in range(2):
        v = [row - 0.1 * (gradient(row, k) + 0.5 * (row - w)) for k, row in enumerate(v)]
        copies = [row - 0.3 * gradient(row, k) for k, row in enumerate(copies)]
        w = torch.stack(copies).mean(0)
    torch.testing.assert_close(result.w, w)
    torch.testing.assert_close(result.v, torch.stack(v))
    torch.testing.assert_close(result.states["personal_alone"], torch.stack(copies))


@pytest.mark.slow
def test_choice_among_runs_equals_the_choice_within_one_run(tmp_path):
    """Each client chooses its λ among single runs, and in one run of DittoChoice."""
    lams = ditto_run.choices_of("clean")
    tiny = {
        "seed_everything": 1,
        "data": {
            "dataset": spec("pl_fed.data.Digits"),
            "partitioner": spec("pl_fed.partitioners.Quantity", beta=0.5),
            "num_clients": 20,
            "batch_size": 16,
            "val_fraction": 0.1,
        },
        "federation": {
            "sampler": spec("pl_fed.samplers.Uniform", cohort_size=6),
            "engine": {"name": "one_by_one"},
            "model_selection": None,
            "adversary": {"attack": spec("pl_fed.attacks.FlippedLabels"), "ids": [2, 5]},
        },
        "trainer": {**QUIET, "max_epochs": 5, "check_val_every_n_epoch": 5},
    }
    options = {
        "net": spec("pl_fed.models.MLP", in_features=64, hidden=[8], num_classes=10),
        "local_epochs": 3,
        "optimizer": spec("torch.optim.SGD", lr=0.3),
    }
    clients, globals_ = [], []
    for lam in lams:
        model = {"model": spec("pl_fed.clients.Ditto", lam=lam, **options)}
        tables = ditto_run.rows_of(fit(merge_configs(tiny, model), tmp_path / str(lam)))
        globals_.append({k: v for k, v in tables["results.csv"][0].items() if "global" in k})
        clients.append(tables["clients.csv"])
    fedavg = {"model": spec("pl_fed.clients.FedAvg", **options)}
    tables = ditto_run.rows_of(fit(merge_configs(tiny, fedavg), tmp_path / "alone"))
    assert [*tables] == ["results.csv"], "there are no personal models"
    globals_.append({k: v for k, v in tables["results.csv"][0].items() if "global" in k})
    assert all(figures == globals_[0] for figures in globals_), (
        "the global model is FedAvg's for every λ"
    )
    choices = spec(
        "pl_fed.clients.DittoChoice",
        lams=list(lams),
        lam=ditto_run.fallback_of("clean"),
        min_validation=ditto_run.MIN_VALIDATION,
        **options,
    )
    chosen = fit(merge_configs(tiny, {"model": choices}), tmp_path / "one")
    few = [int(row["val_samples"]) < ditto_run.MIN_VALIDATION for row in clients[0]]
    assert any(few), "some clients have too few validation samples"
    assert not all(few)
    for name, value in ditto_report.own_lam(clients, "clean").items():
        assert value == pytest.approx(float(chosen.last[f"test/personal/{name}"]), abs=2e-5)
    fixed = {ditto_report.own_lam([c, c, c], "clean")["accuracy"] for c in clients}
    assert len(fixed) > 1, "λ matters"


def test_share_takes_equal_fractions_of_all_parts():
    split = torch.tensor([0, 2] * 50)
    x = torch.arange(100.0)[:, None]
    share = Share(shared_out(Arrays(x, split // 2, split=split, num_classes=2)).dataset, 0.2)
    arrays = share.load()
    assert torch.equal(arrays.split.bincount(), torch.tensor([10, 0, 10]))
    assert len(arrays.inputs.unique()) == 20
    assert torch.equal(arrays.targets, arrays.inputs[:, 0].long() % 2)
    assert torch.equal(arrays.inputs, share.load().inputs)


def test_unbalanced_clients_have_two_classes_ten_to_one():
    labels = torch.arange(4).repeat(220)
    parts = Unbalanced(10).split(labels, 8, torch.Generator().manual_seed(3))
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(880))
    counts = torch.stack([labels[part].bincount(minlength=4) for part in parts])
    assert torch.equal(counts.sort(1).values, torch.tensor([[0, 0, 10, 100]]).expand(8, 4))
    for group in counts.split(4):
        assert torch.equal(group.sum(0), torch.full((4,), 110)), (
            "each class is once larger and once smaller"
        )
    with pytest.raises(ValueError, match="`num_clients` to be a multiple of the 4 classes but got"):
        Unbalanced().split(labels, 6, torch.Generator())


@pytest.mark.parametrize("name", points.FIGURE_1)
def test_errors_of_points_equal_theory_and_simulation(name):
    """The errors equal the minimum of (79) and (84) at λ*, and the errors of draws."""
    setting = points.FIGURE_1[name]
    noise = setting.sigma**2 / setting.samples
    excess = setting.malicious / (setting.devices - 1) * (setting.tau_a**2 - setting.tau**2)
    other_variance = (
        setting.devices * setting.tau**2 + noise + (excess if setting.malicious else 0.0)
    )
    least = 1 / (1 / noise + (setting.devices - 1) / other_variance)
    assert setting.best == pytest.approx(points.PAPER[name], abs=5e-5)
    assert setting.errors(setting.best)[0] == pytest.approx(least, rel=1e-12)
    assert setting.errors(0.0)[0] == pytest.approx(noise)
    drawn = points.Points(setting, seed=2)
    estimates = drawn.y.view(setting.devices, setting.samples, -1).mean(1)
    for lam in (0.3, setting.best, 1e9):
        models = (estimates + lam * estimates.mean(0)) / (1 + lam)
        squares = (models - drawn.truth)[: setting.benign].square()
        exact = setting.errors(lam)
        assert float(squares.mean()) == pytest.approx(exact[0], rel=0.06)
        assert float(squares.var(0).mean()) ** 0.5 == pytest.approx(exact[1], rel=0.06)


def aggregator(config):
    module, name = config["class_path"].rsplit(".", 1)
    return getattr(importlib.import_module(module), name)(**config.get("init_args", {}))


@pytest.mark.parametrize(
    ("config", "num_averaged"),
    [
        (ditto_run.DEFENCES["Krum"]["aggregator"], 1),
        (ditto_run.DEFENCES["multi-Krum"]["aggregator"], 7),
        (ditto_run.DEFENCES["k-norm"]["aggregator"], 7),
        (ditto_run.DEFENCES["k-loss"]["aggregator"], 1),
        (figures.KRUM, 5),
    ],
)
def test_defences_average_the_papers_number_of_uploads(config, num_averaged):
    """Three of ten uploads are outliers. Each upload moves one coordinate."""
    uploads = torch.eye(10, dtype=torch.float64) * torch.tensor([1.0] * 7 + [50.0] * 3)
    context = RoundContext(num_byzantine=3, clients=torch.arange(10), losses=torch.arange(10.0))
    context = replace(context, start_losses=torch.arange(10.0))
    merged = aggregator(config)(uploads, torch.ones(10), context)
    assert torch.equal(
        merged[merged != 0], torch.full((num_averaged,), 1 / num_averaged, dtype=torch.float64)
    )
    assert not merged[7:].any()


def test_table_counts_agreeing_figures():
    paper = [
        {"setting": "mnist/label_q2", "column": "FLAME PM", "mean": "0.98", "std": "0.003"},
        {"setting": "mnist/label_q2", "column": "FLAME HM", "mean": "0.98", "std": "0.003"},
        {"setting": "mnist/label_q2", "column": "FLAME GM", "mean": "0.80", "std": "0.02"},
        {"setting": "mnist/label_q3", "column": "FLAME GM", "mean": "0.80", "std": "0.02"},
    ]
    row = {
        "setting": "mnist/label_q2",
        "method": "FLAME",
        "seed": "1",
        "personal_accuracy": "0.985",
    }
    row |= {"hybrid_by_test_accuracy": "0.9861", "lagged_global_accuracy": "0.829"}
    results = report.Results([row])
    compared = report.comparisons(results, paper)
    assert list(compared) == ["mnist/label_q2"]
    agree = {name: comparison.agrees for name, comparison in compared["mnist/label_q2"].items()}
    assert agree == {"FLAME PM": True, "FLAME HM": False, "FLAME GM": True}
    assert "FLAME: 2 of 3 figures agree" in report.tables(results, compared)


@pytest.mark.slow
def test_pages_show_the_current_tables():
    """The test fails for new rows: run python -m experiments.summary."""
    for page, blocks in summary.texts().items():
        assert dict(summary.BLOCK.findall(page.read_text())) == blocks
