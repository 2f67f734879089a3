"""Finetuning: FedAvg's global model, trained further on each client's data."""

import pytest
import torch
from exhaustive import exhaustive_but
from personal_models import trained, validated_by_training
from small_federations import HalfSquares, Point, classes, mlp, points, seeded, sgd, shared_out
from tables import table_test

from pl_fed.clients import Ditto, FedAvg, Finetuning

OBSERVED = ([1.0, 3.0], [4.0, 8.0, 6.0], [-2.0])


def own_data():
    return validated_by_training(shared_out(points(*OBSERVED), batch_size=8))


def point(lr=0.25, local_steps=1, kind=Finetuning, **kwargs):
    settings = {"optimizer": sgd(lr), "criterion": HalfSquares(), "local_steps": local_steps}
    return kind(Point(start=10.0), **settings, **kwargs)


def losses_at(models):
    """Each client's mean loss on its own data by a model of its own."""
    means = [sum((v - y) ** 2 / 2 for y in own) / len(own) for v, own in zip(models, OBSERVED)]
    return torch.tensor(means, dtype=torch.float64)


@exhaustive_but(
    "0.0-l2-one_by_one", "0.5-fisher-one_by_one", "0.5-l2-stacked", "0.0-fisher-stacked"
)
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
@pytest.mark.parametrize("regularizer", ["l2", "fisher"])
@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_finetuning_starts_at_the_global_model(engine, regularizer, lam):
    """v ← v − η (v − ȳ + λ F (v − w)), where F is 1, or the mean of the squares of w − y."""
    client = point(lam=lam, regularizer=regularizer, finetune_steps=3, finetune_lr=0.01)
    result = trained(client, own_data(), 2, engine=engine)
    w = float(result.w)
    models = []
    for own in OBSERVED:
        v, mean = w, sum(own) / len(own)
        weight = 1 if regularizer == "l2" else sum((w - y) ** 2 for y in own) / len(own)
        for _ in range(3):
            v -= 0.01 * (v - mean + lam * weight * (v - w))
        models.append(v)
    torch.testing.assert_close(result.metrics["personal"]["loss"], losses_at(models))
    torch.testing.assert_close(result.metrics["global"]["loss"], losses_at([w] * 3))
    assert result.kept == {}


@pytest.mark.slow
@pytest.mark.parametrize("nothing", [{"finetune_epochs": 0}, {"finetune_steps": 0}])
def test_no_finetuning_is_the_global_model(nothing):
    data = shared_out(classes([12, 9, 15]), val_fraction=0.3)
    client = Finetuning(seeded(mlp), lam=0.3, optimizer=sgd(0.1), **nothing)
    metrics = trained(client, data).metrics
    for name, values in metrics["global"].items():
        torch.testing.assert_close(values, metrics["personal"][name], rtol=1e-12, atol=0)
    finetuned = Finetuning(seeded(mlp), optimizer=sgd(0.1), finetune_epochs=1)
    moved = trained(finetuned, data).metrics["personal"]["loss"]
    assert not torch.equal(moved, metrics["personal"]["loss"])


@pytest.mark.slow
def test_global_model_equals_fedavg():
    data = shared_out(classes([7, 3, 10]), val_fraction=0.3)
    settings = {"optimizer": sgd(0.1, momentum=0.9), "local_epochs": 2}
    plain = trained(FedAvg(seeded(mlp), **settings), data, 3)
    tuned = trained(Finetuning(seeded(mlp), lam=2.0, finetune_epochs=3, **settings), data, 3)
    assert torch.equal(plain.w, tuned.w)
    assert plain.metrics["global"]["loss"].equal(tuned.metrics["global"]["loss"])


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "steps"), [(2, 4), (None, 2)])
def test_epochs_equal_their_number_of_steps_and_one_epoch_is_the_default(epochs, steps):
    """Four training samples in minibatches of two."""
    data = shared_out(classes([8, 8]), batch_size=2, val_fraction=0.5)
    settings = {"optimizer": sgd(0.1), "local_steps": 1}
    counted = {} if epochs is None else {"finetune_epochs": epochs}
    epochs_metrics = trained(Finetuning(seeded(mlp), **counted, **settings), data).metrics
    steps_metrics = trained(Finetuning(seeded(mlp), finetune_steps=steps, **settings), data).metrics
    assert torch.equal(epochs_metrics["personal"]["loss"], steps_metrics["personal"]["loss"])


@pytest.mark.slow
def test_both_solvers_of_ditto_find_the_same_solution():
    """Section 3.2: v_k* = (ȳ_k + λ w*) / (1 + λ), where w* is the mean of the ȳ_k."""
    means = [sum(own) / len(own) for own in OBSERVED]
    solved = [(mean + 0.5 * sum(means) / 3) / 1.5 for mean in means]
    after = trained(point(lam=0.5, finetune_steps=60), own_data(), 60)
    joint = trained(point(lam=0.5, kind=Ditto), own_data(), 100)
    for result in (after, joint):
        torch.testing.assert_close(result.metrics["personal"]["loss"], losses_at(solved))


@table_test(
    ("arguments", "match"),
    [
        ({"finetune_lr": -1.0}, "`finetune_lr` to be at least 0, and finite, but got -1.0"),
        ({"finetune_steps": -1}, "`finetune_steps` to be at least 1 but got -1"),
        ({"finetune_epochs": 1, "finetune_steps": 0}, "only one of `model.finetune_steps`"),
    ],
)
def test_invalid_arguments_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        Finetuning(Point(), **arguments)


@exhaustive_but("fisher-stacked_compiled", "kl-one_by_one_compiled", "kl-stacked")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["stacked", "stacked_compiled", "one_by_one_compiled"])
@pytest.mark.parametrize("regularizer", ["fisher", "kl"])
def test_engines_and_chunks_agree(uncompiled, engine, regularizer):
    data = shared_out(classes([12, 7, 20, 9]), val_fraction=0.4)
    settings = {"optimizer": sgd(0.1), "local_steps": 1, "finetune_epochs": 2}
    client = Finetuning(seeded(mlp), lam=2.0, regularizer=regularizer, **settings)
    first = trained(client, data, 1).metrics["personal"]["loss"]
    again = trained(client, data, 1, engine=engine, chunk_size=3).metrics["personal"]["loss"]
    torch.testing.assert_close(again, first, rtol=0, atol=1e-10)
    plain = trained(Finetuning(seeded(mlp), **settings), data, 1).metrics["personal"]["loss"]
    assert (plain - first).abs().max() > 1e-3
