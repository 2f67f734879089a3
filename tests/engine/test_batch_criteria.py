"""Criteria that are no mean of sample losses: every engine minimises their own value."""

import copy

import pytest
import torch
from exhaustive import exhaustive_for
from further_cases import covering
from small_federations import Given, reals, run_rounds, seeded, sgd, shared_out
from tables import table_test
from torch import nn
from torch.nn import functional

from pl_fed import EngineOptions, Federation
from pl_fed.aggregators import Term
from pl_fed.attacks import Attack
from pl_fed.clients import Ditto, DittoChoice, DittoGreedy, FedAvg, FedTilt, Finetuning, PerFedAvg
from pl_fed.data import Arrays, FederatedData
from pl_fed.samplers import All


class MaskedBCE(nn.Module):
    """Binary cross entropy over the present labels; a missing label is -1."""

    def __init__(self):
        super().__init__()
        self.reduction = "mean"

    def forward(self, outputs, targets):
        present = targets >= 0
        losses = functional.binary_cross_entropy_with_logits(
            outputs, targets.clamp(min=0), reduction="none"
        )
        losses = torch.where(present, losses, 0)
        return losses if self.reduction == "none" else losses.sum() / present.sum().clamp(min=1)


class PixelCrossEntropy(nn.Module):
    """Cross entropy over pixels; those of class 255 are ignored."""

    def __init__(self):
        super().__init__()
        self.reduction = "mean"

    def forward(self, outputs, targets):
        return functional.cross_entropy(
            outputs, targets.long(), ignore_index=255, reduction=self.reduction
        )


class TokenCrossEntropy(nn.Module):
    """Cross entropy over the flattened tokens of a minibatch, as for language models."""

    def __init__(self):
        super().__init__()
        self.reduction = "mean"

    def forward(self, outputs, targets):
        return functional.cross_entropy(
            outputs.flatten(0, 1),
            targets.long().flatten(),
            ignore_index=-100,
            reduction=self.reduction,
        )


class AlwaysMean(nn.Module):
    """A loss that does not support ``reduction="none"``."""

    reduction = "mean"

    def forward(self, outputs, targets):
        return (outputs - targets).abs().mean()


class Tokens(nn.Module):
    """Logits [batch, tokens, 5] of tokens, given as floating-point numbers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)

    def forward(self, x):
        return self.head(self.embedding(x.long()))


def labels(sizes, draw, owner):
    x = torch.randn(len(owner), 4, generator=draw)
    y = torch.randint(-1, 2, (len(owner), 3), generator=draw).double()
    return MaskedBCE(), lambda: nn.Linear(4, 3), reals(x, y, owner)


def pixels(sizes, draw, owner):
    x = torch.randn(len(owner), 2, 3, 3, generator=draw)
    y = torch.randint(3, (len(owner), 3, 3), generator=draw)
    y = y.masked_fill(torch.rand(y.shape, generator=draw) < 0.6, 255)
    return PixelCrossEntropy(), lambda: nn.Conv2d(2, 3, 1), reals(x, y, owner)


def tokens(sizes, draw, owner):
    x = torch.randint(5, (len(owner), 6), generator=draw)
    length = torch.randint(1, 7, (len(owner), 1), generator=draw)
    y = x.roll(-1, 1).masked_fill(torch.arange(6) >= length, -100)
    return TokenCrossEntropy(), Tokens, reals(x, y, owner)


def distances(sizes, draw, owner):
    x = torch.randn(len(owner), 4, generator=draw)
    return AlwaysMean(), lambda: nn.Linear(4, 2), reals(x, x[:, :2] ** 2, owner)


KINDS = {kind.__name__: kind for kind in (labels, pixels, tokens, distances)}
EQUAL, UNEQUAL = [8, 4, 12, 8], [9, 4, 6, 11]
each_kind = pytest.mark.parametrize("kind", KINDS)


def make_federation(kind, sizes, algorithm=FedAvg, **options):
    """Return a client with a kind of criterion, and the samples of all clients."""
    draw = torch.Generator().manual_seed(0)
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    criterion, net, arrays = KINDS[kind](sizes, draw, owner)
    options = {"optimizer": sgd(0.1), "local_epochs": 2, **options}
    return algorithm(seeded(net), criterion=criterion, **options), arrays


def engine_options(engine):
    if engine == "auto":
        return {"engine": "auto"}
    return {"engine": engine, "chunk_size": 2}


ENGINES = ["one_by_one_compiled", "stacked", "stacked_compiled", "auto"]


@exhaustive_for("tokens", "distances")
@pytest.mark.slow
@each_kind
def test_engines_agree_for_full_minibatches(uncompiled, kind):
    client, arrays = make_federation(kind, EQUAL, Ditto)
    data = shared_out(arrays)
    expected = run_rounds(client, data, engine="one_by_one")
    for engine in ENGINES:
        outcome = run_rounds(client, data, **engine_options(engine))
        assert expected.distance(outcome) < 1e-10, engine


@pytest.mark.slow
@each_kind
def test_engines_agree_for_minibatches_of_several_sizes(uncompiled, kind):
    client, arrays = make_federation(kind, UNEQUAL)
    expected = run_rounds(client, shared_out(arrays), engine="one_by_one")
    for engine in ("one_by_one_compiled", "auto"):
        outcome = run_rounds(client, shared_out(arrays), **engine_options(engine))
        assert expected.distance(outcome) < 1e-10, engine


@pytest.mark.slow
@each_kind
def test_stacking_is_refused_for_minibatches_of_several_sizes(uncompiled, kind):
    client, arrays = make_federation(kind, UNEQUAL)
    match = r"^Expected argument `federation.engine.name` to be one_by_one, .*stacked.*\(4\)"
    dropped = shared_out(arrays, drop_last=True)
    expected = run_rounds(client, dropped, engine="one_by_one")
    for engine in ("stacked", "stacked_compiled"):
        with pytest.raises(ValueError, match=match):
            run_rounds(client, shared_out(arrays), engine=engine)
        assert expected.distance(run_rounds(client, dropped, engine=engine)) < 1e-10, engine


@pytest.mark.slow
@each_kind
def test_minimised_loss_equals_the_criterion_by_hand(kind):
    client, arrays = make_federation(kind, UNEQUAL, local_steps=1, local_epochs=None)
    outcome = run_rounds(client, shared_out(arrays, batch_size=11), rounds=1)
    losses, models = [], []
    for client_id in range(4):
        net = copy.deepcopy(client.global_model).double()
        own = arrays.client == client_id
        loss = client.criterion(net(arrays.inputs[own].double()), arrays.targets[own].double())
        loss.backward()
        losses.append(loss.item())
        models.append(torch.cat([(p - 0.1 * p.grad).detach().flatten() for p in net.parameters()]))
    assert float(outcome.reports[0]["train/loss"]) == pytest.approx(sum(losses) / 4, abs=1e-10)
    torch.testing.assert_close(outcome.w, torch.stack(models).mean(0), rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "kind"), covering([Ditto, Finetuning], KINDS))
def test_logged_losses_equal_the_criterion_by_hand(kind, algorithm):
    options = {"finetune_epochs": 1} if algorithm is Finetuning else {}
    client, arrays = make_federation(kind, UNEQUAL, algorithm, **options)
    client = client.double()
    data = shared_out(arrays, val_fraction=0.3, test_fraction=0.4)
    federation = Federation(All(), seed=0, engine=EngineOptions("auto"))
    federation.setup(client, data, "fit")
    client.train()
    federation.run_round(0, client.configure_optimizers())
    client.eval()
    with torch.no_grad():
        federation.evaluate("test", torch.arange(4))
    for name in ("global", "personal"):
        expected = []
        for client_id, net in enumerate(federation.models_of(torch.arange(4), name)):
            own = federation.data.test.samples(client_id)
            x, y = federation.data.inputs[own], federation.data.targets[own]
            expected.append(client.criterion(net(x), y).item())
        logged = federation.metrics("test")[name]
        assert logged.per_client()["loss"].tolist() == pytest.approx(expected, abs=1e-10)
        assert float(logged.compute()["loss"]) == pytest.approx(sum(expected) / 4, abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "kind"), covering([PerFedAvg, DittoGreedy, DittoChoice], KINDS)
)
def test_criterion_supports_masks_of_batch_parts_and_validation_data(kind, algorithm):
    """These masks exclude samples; no engine pads minibatches for such a criterion."""
    lams = {DittoGreedy: {"lams": [0.1, 1.0]}, DittoChoice: {"lams": [0.1, 1.0]}}
    client, arrays = make_federation(kind, EQUAL, algorithm, **lams.get(algorithm, {}))
    data = shared_out(arrays, batch_size=2, val_fraction=0.25)
    assert torch.isfinite(run_rounds(client, data).w).all()


def test_start_losses_equal_the_criterion_by_hand():
    """The start losses of Byzantine clients are those of their poisoned data."""

    class Shifted(Attack):
        def poison(self, batch, context):
            return batch._replace(inputs=batch.inputs + 1)

    client, arrays = make_federation("labels", UNEQUAL)
    client, start_losses = client.double(), []

    class Spy(Term):
        def forward(self, uploads, weights, context):
            start_losses.append(context.start_losses)
            return super().forward(uploads, weights, context)

    settings = {"attack": Shifted(), "ids": [1], "engine": "one_by_one"}
    run_rounds(client, shared_out(arrays), rounds=1, aggregator=Spy(0.1), **settings)
    expected = []
    for client_id in range(4):
        own = arrays.client == client_id
        x = arrays.inputs[own].double() + (client_id == 1)
        expected.append(
            client.criterion(client.global_model(x), arrays.targets[own].double()).item()
        )
    assert start_losses[-1].tolist() == pytest.approx(expected, abs=1e-10)


@table_test(
    ("algorithm", "options", "words"),
    [
        (FedTilt, {}, "FedTilt tilts sample losses"),
        (Ditto, {"regularizer": "fisher"}, "needs sample gradients"),
    ],
)
def test_algorithms_that_need_sample_losses_refuse_batch_criteria(algorithm, options, words):
    class Smoothed(nn.CrossEntropyLoss):
        """Cross entropy that is divided by the number of classes in the batch."""

        def forward(self, outputs, targets):
            loss = super().forward(outputs, targets)
            return loss if self.reduction == "none" else loss / len(targets.unique())

    x, y = torch.randn(12, 4), torch.arange(12) % 3
    arrays = Arrays(x, y, torch.arange(12) // 4, num_classes=3)
    client = algorithm(nn.Linear(4, 3), criterion=Smoothed(), **options)
    match = f"^Expected argument `criterion` to be the mean of .* but got Smoothed.*{words}"
    with pytest.raises(ValueError, match=match):
        run_rounds(client, shared_out(arrays))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("criterion", "targets"),
    [
        (nn.CrossEntropyLoss(), "classes"),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 2.0]), ignore_index=1), "classes"),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 2.0]), label_smoothing=0.1), "classes"),
        (nn.MultiMarginLoss(), "classes"),
        (nn.CrossEntropyLoss(), "probabilities"),
        (nn.MSELoss(), "probabilities"),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0, 3.0, 4.0])), "probabilities"),
        (nn.HuberLoss(), "probabilities"),
    ],
)
def test_losses_of_torch_are_recognised_as_means_of_sample_losses(criterion, targets):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(24, 4, generator=draw)
    y = torch.randint(3, (24,), generator=draw)
    owner = torch.arange(24) // 8
    if targets == "classes":
        arrays = Arrays(x, y, owner, num_classes=3)
    else:
        arrays = Arrays(x, torch.rand(24, 3, generator=draw).softmax(1), owner)
    client = FedAvg(seeded(lambda: nn.Linear(4, 3)), criterion=criterion)
    Federation(All(), seed=0).setup(client, shared_out(arrays), "fit")
    assert client.averages_samples


def test_single_missing_label_is_detected():
    """Codes of missing labels are the smallest or the largest numbers."""
    x = torch.randn(5000, 4)
    y = torch.randint(2, (5000, 3)).float()
    y[3001, 1] = -1
    data = FederatedData(Given(Arrays(x, y, torch.arange(5000) // 500)), batch_size=10, seed=0)
    client = FedAvg(nn.Linear(4, 3), criterion=MaskedBCE())
    Federation(All(), seed=0).setup(client, data, "fit")
    assert not client.averages_samples


def test_batch_criterion_is_reported_once(caplog):
    client, arrays = make_federation("labels", UNEQUAL)
    federation = Federation(All(), seed=0)
    for stage in ("fit", "validate", "test"):
        federation.setup(client, shared_out(arrays), stage)
    assert sum("MaskedBCE is not the mean" in message for message in caplog.messages) == 1
