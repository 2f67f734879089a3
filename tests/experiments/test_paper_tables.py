"""The papers' tables: the parts that are theirs alone, and the figures that agree."""

import importlib
from dataclasses import replace

import pytest
import torch
import yaml
from small_federations import classes, mlp, run_rounds, seeded, sgd, shared_out
from torch.nn.functional import cross_entropy

from experiments import summary
from experiments.__main__ import open_experiment
from experiments.ditto import points
from experiments.ditto.results import MIN_VALIDATION, choices_of, choose_lam, fallback_of, summarize
from experiments.ditto.studies import collect
from experiments.experiment import CellRun
from experiments.flame import page
from experiments.flame.reference import UnsynchronizedDitto
from experiments.flame.results import Results
from pl_fed.command.fit import FederatedCLI
from pl_fed.studies.cell_configs import check_config
from pl_fed.studies.cell_folder import iterate_numbers
from pl_fed.types import RoundContext


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


def fit(config, folder):
    """Return the numbers of the run of a config, and its folder."""
    folder.mkdir()
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    run = FederatedCLI(
        ["fit", "--config", str(file), f"--trainer.default_root_dir={folder}"]
    ).run_dir
    summary = yaml.safe_load((run / "summary.json").read_text())
    return dict(iterate_numbers(summary["metrics"])), run


@pytest.mark.exhaustive
@pytest.mark.slow
def test_choice_among_runs_equals_the_choice_within_one_run(tmp_path):
    """Each client chooses its λ among single runs, and in one run of DittoChoice."""
    lams = choices_of("clean")
    tiny = {
        "seed_everything": 1,
        "data": {
            "dataset": {"class_path": "pl_fed.data.Digits"},
            "partitioner": {
                "class_path": "pl_fed.partitioners.Quantity",
                "init_args": {"beta": 0.5},
            },
            "num_clients": 20,
            "batch_size": 16,
            "val_fraction": 0.1,
        },
        "federation": {
            "sampler": {"class_path": "pl_fed.samplers.Uniform", "init_args": {"cohort_size": 6}},
            "engine": {"name": "one_by_one"},
            "model_selection": None,
            "adversary": {"attack": {"class_path": "pl_fed.attacks.FlippedLabels"}, "ids": [2, 5]},
        },
        "trainer": {
            "max_epochs": 5,
            "check_val_every_n_epoch": 5,
            "num_sanity_val_steps": 0,
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
    }
    net = {"in_features": 64, "hidden": [8], "num_classes": 10}
    options = {
        "net": {"class_path": "pl_fed.models.MLP", "init_args": net},
        "local_epochs": 3,
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.3}},
    }

    def federate(algorithm, name, **own):
        model = {"class_path": f"pl_fed.clients.{algorithm}", "init_args": {**options, **own}}
        return fit({**tiny, "model": model}, tmp_path / name)

    clients, globals_ = [], []
    for lam in lams:
        numbers, folder = federate("Ditto", f"{lam}", lam=lam)
        tables = collect(CellRun({"method": f"Ditto, λ = {lam:g}", **numbers}, folder))
        globals_.append({k: v for k, v in tables["results.csv"][0].items() if "global" in k})
        clients.append(tables["clients.csv"])
    numbers, folder = federate("FedAvg", "alone")
    tables = collect(CellRun({"method": "FedAvg", **numbers}, folder))
    assert [*tables] == ["results.csv"], "there are no personal models"
    globals_.append({k: v for k, v in tables["results.csv"][0].items() if "global" in k})
    assert "val/global/accuracy_weighted" in globals_[0]
    assert all(figures == globals_[0] for figures in globals_), (
        "the global model is FedAvg's for every λ"
    )
    rule = {"lam": fallback_of("clean"), "min_validation": MIN_VALIDATION}
    chosen, _ = federate("DittoChoice", "one", lams=list(lams), **rule)
    few = [int(row["val_samples"]) < MIN_VALIDATION for row in clients[0]]
    assert any(few), "some clients have too few validation samples"
    assert not all(few)
    for name, value in summarize(choose_lam(clients, "clean")).items():
        assert value == pytest.approx(chosen[f"test/personal/{name}"], abs=2e-5)
    fixed = {summarize(choose_lam([c, c, c], "clean"))["accuracy"] for c in clients}
    assert len(fixed) > 1, "λ matters"


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "condition", "num_averaged"),
    [
        ("ditto/vehicle", "condition=clean,method=Krum", 1),
        ("ditto/vehicle", "condition=clean,method=multi-Krum", 7),
        ("ditto/vehicle", "condition=clean,method=k-norm", 7),
        ("ditto/vehicle", "condition=clean,method=k-loss", 1),
        ("flame/attacks", "attack=none,fraction=0,method=multi-Krum", 5),
    ],
)
def test_defences_average_the_papers_number_of_uploads(experiment, condition, num_averaged):
    """Three of ten uploads are outliers. Each upload moves one coordinate."""
    cells = open_experiment(experiment).cells
    cell = next(cell for cell in cells if cell.condition == condition)
    config = check_config(cell.arguments).complete_config["federation"]["aggregator"]
    module, name = config["class_path"].rsplit(".", 1)
    aggregator = getattr(importlib.import_module(module), name)(**config.get("init_args", {}))
    uploads = torch.eye(10, dtype=torch.float64) * torch.tensor([1.0] * 7 + [50.0] * 3)
    context = RoundContext(num_byzantine=3, clients=torch.arange(10), losses=torch.arange(10.0))
    context = replace(context, start_losses=torch.arange(10.0))
    merged = aggregator(uploads, torch.ones(10), context)
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
    row = {"data": "mnist", "split": "label_q2", "method": "FLAME", "seed": "1"}
    row |= {"test/personal/accuracy": "0.985", "hybrid_by_test_accuracy": "0.9861"}
    results = Results([{**row, "test/lagged_global/accuracy": "0.829"}])
    compared = page.compare(results, paper)
    assert list(compared) == ["mnist/label_q2"]
    agree = {name: comparison.agrees for name, comparison in compared["mnist/label_q2"].items()}
    assert agree == {"FLAME PM": True, "FLAME HM": False, "FLAME GM": True}
    assert "FLAME: 2 of 3 figures agree" in page.tabulate(results, compared)


@pytest.mark.slow
def test_pages_show_the_current_tables():
    """The test fails for new rows: run python -m experiments.summary."""
    for path, blocks in summary.make_texts().items():
        assert dict(summary.BLOCK.findall(path.read_text())) == blocks
