"""Validation on a random sample of clients."""

import csv

import pytest
import torch
from small_federations import Given, classes, mlp, seeded, sgd
from tables import table_test

import pl_fed
from pl_fed.clients import Ditto
from pl_fed.data import FederatedData
from pl_fed.evaluation.client_sample import ClientSample

SIZES = [20, 20, 30, 20, 0, 20, 20, 20]


def test_sample_is_drawn_from_the_clients_with_samples():
    sizes = torch.tensor([3, 0, 2, 5, 0])
    sample = ClientSample.draw(2, sizes, seed=0)
    assert sample.is_drawn.sum() == 2
    assert not sample.is_drawn[sizes == 0].any()
    assert sample.share == 2 / 3
    assert ClientSample.draw(9, sizes, seed=0).is_drawn.equal(sizes > 0)
    assert ClientSample.draw(9, sizes, seed=0).share == 1


@pytest.mark.parametrize(("share", "clients"), [(1.0, 10), (0.5, 5), (0.01, 1), (0.25, 3)])
def test_share_is_rounded_up(share, clients):
    assert ClientSample.draw(share, torch.ones(10, dtype=int), 0).is_drawn.sum() == clients


def test_shares_of_a_hundred_clients_are_exact():
    ones = torch.ones(100, dtype=int)
    for percent in range(1, 101):
        assert ClientSample.draw(percent / 100, ones, 0).is_drawn.sum() == percent


@pytest.mark.slow
def test_every_client_is_drawn_equally_often():
    sizes, draws = torch.ones(10, dtype=int), 2000
    counts = sum(ClientSample.draw(3, sizes, seed).is_drawn.int() for seed in range(draws))
    expected, deviation = draws * 0.3, (draws * 0.3 * 0.7) ** 0.5
    assert ((counts - expected).abs() < 4 * deviation).all()


def test_a_smaller_sample_is_a_part_of_a_larger_one():
    sizes = torch.ones(50, dtype=int)
    small, large = (ClientSample.draw(number, sizes, 3).is_drawn for number in (5, 20))
    assert large[small].all()


def make_federation(evaluate_clients, seed=0):
    return pl_fed.Federation(evaluate_clients=evaluate_clients, seed=seed)


def run_fit(folder, evaluate_clients, rounds=2, ckpt_path=None, **options):
    trainer = pl_fed.Trainer(
        make_federation(evaluate_clients),
        run_dir=folder,
        max_epochs=rounds,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    sizes = [size for size in SIZES if size]
    options = {"batch_size": 5, "val_fraction": 0.2, "seed": 0, **options}
    data = FederatedData(Given(classes(sizes)), **options)
    client = Ditto(seeded(mlp), optimizer=sgd(0.1))
    trainer.fit(client, data, ckpt_path=ckpt_path)
    trainer.test(client, data, verbose=False)
    return trainer


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_validation_sees_the_sample_and_test_all_clients(tmp_path):
    run_fit(tmp_path / "all", None)
    trainer = run_fit(tmp_path / "sample", 3)
    rows, all_rows = (read(tmp_path / run / "metrics.csv") for run in ("sample", "all"))
    clients = read(tmp_path / "sample/per_client_validation.csv")
    everyone = read(tmp_path / "all/per_client_validation.csv")
    assert [len(clients), len(everyone)] == [3, 7]
    assert clients == [everyone[int(row["client"])] for row in clients]
    assert len({row["val/global/loss"] for row in rows[:-1]}) == 2
    losses = torch.tensor([float(row["global_loss"]) for row in clients], dtype=torch.float64)
    assert float(rows[-2]["val/global/loss"]) == pytest.approx(losses.mean().item(), rel=1e-6)
    error = losses.std() / 3**0.5 * (1 - 3 / 7) ** 0.5
    assert float(rows[-2]["val/global/loss_se"]) == pytest.approx(error.item(), rel=1e-6)
    assert not any("_se" in name for name in all_rows[0])
    tests = {name: value for name, value in rows[-1].items() if name.startswith("test/")}
    assert tests == {name: all_rows[-1][name] for name in tests}
    evaluation = trainer.federation.session.evaluation
    assert evaluation.list_evaluated_clients("test").tolist() == list(range(7))


def test_validation_has_batches_of_drawn_clients_only():
    """Few clients of many are few batches; data that another federation uses are unlimited."""
    data = FederatedData(Given(classes([9] * 200)), val_fraction=0.2, seed=0)
    lengths = []
    for evaluated in (40, None):
        federation = make_federation(evaluated)
        federation.setup(Ditto(seeded(mlp), optimizer=sgd(0.1)), data, "fit")
        ids = torch.cat(list(data.val_dataloader()))
        assert ids.tolist() == federation.session.evaluation.list_evaluated_clients("val").tolist()
        assert torch.cat(list(data.test_dataloader())).tolist() == list(range(200))
        lengths.append(len(data.val_dataloader()))
    assert lengths == [2, 7]


@pytest.mark.slow
def test_training_does_not_depend_on_the_sample(tmp_path):
    models = [
        run_fit(tmp_path / str(number), number).lightning_module.state_dict()
        for number in (None, 2)
    ]
    assert all(models[0][name].equal(models[1][name]) for name in models[0])


@pytest.mark.slow
def test_resumed_run_validates_the_same_clients(tmp_path):
    run_fit(tmp_path / "one", 0.4, rounds=2)
    run_fit(tmp_path / "two", 0.4, rounds=1)
    run_fit(tmp_path / "two", 0.4, rounds=2, ckpt_path=tmp_path / "two/checkpoints/last.ckpt")
    tables = [(tmp_path / run / "per_client_validation.csv").read_text() for run in ("one", "two")]
    assert tables[0] == tables[1]


@table_test("evaluate_clients", [0, -1, 0.0, 1.5, float("nan"), True, "x"])
def test_other_numbers_are_refused(evaluate_clients):
    with pytest.raises((TypeError, ValueError), match=r"`federation\.evaluate_clients` to be"):
        make_federation(evaluate_clients)


def test_sample_without_validation_data_is_refused():
    data = FederatedData(Given(classes([9, 9])), val_fraction=0.0, seed=0)
    with pytest.raises(ValueError, match=r"validation samples for `federation\.evaluate_clients`"):
        make_federation(2).setup(Ditto(seeded(mlp), optimizer=sgd(0.1)), data, "fit")


@pytest.mark.slow
def test_metrics_do_not_depend_on_the_size_of_evaluation_batches(tmp_path):
    tables = []
    for size in (1, 3, None):
        run_fit(tmp_path / str(size), None, clients_per_eval_batch=size)
        tables.append(read(tmp_path / str(size) / "per_client.csv"))
    for rows in tables[1:]:
        for row, expected in zip(rows, tables[0], strict=True):
            numbers = {name: float(text) for name, text in row.items()}
            own = {name: float(text) for name, text in expected.items()}
            assert numbers == pytest.approx(own, rel=1e-6, nan_ok=True)
