"""Who lies, when, with what knowledge, and what comes of it: whole rounds, mostly by hand.

Clients estimate a point: with a learning rate of 1 each sends the way from w^t to its own number.
"""

import math

import pytest
import torch
from small_federations import (
    HalfSquares,
    Only,
    Point,
    classes,
    mlp,
    points,
    run_rounds,
    sections,
    seeded,
    sgd,
    shared_out,
)
from torch import nn

import pl_fed
from pl_fed import Adversary
from pl_fed.aggregators import Aggregator, Krum, Median, TiltedMean, TrimmedMean
from pl_fed.attacks import (
    ALittleIsEnough,
    Attack,
    Combined,
    FlippedLabels,
    InnerProductManipulation,
    RandomLabels,
    RandomUpdates,
    SignFlipping,
)
from pl_fed.clients import Ditto, FedAvg, Local, Scaffold
from pl_fed.rounds.byzantine_clients import ByzantineClients, draw_byzantine
from pl_fed.samplers import Uniform
from pl_fed.types import Batch

NUMBERS = [1.0, 2.0, 3.0, 4.0, 50.0, 60.0]


class Spy(Attack):
    """Keeps what it is told, and sends a number."""

    def __init__(self, number=0.0):
        self.number = number
        self.told = []

    def forge(self, honest, own, context):
        self.told.append((honest.flatten().tolist(), own.flatten().tolist(), context))
        return torch.full_like(own, self.number)


class Shared(list):
    """A list of which there are no copies, as the server makes of its aggregator."""

    def __deepcopy__(self, memo):
        return self


class Listening(Aggregator):
    """Takes the mean, and keeps what it is told."""

    def __init__(self):
        super().__init__()
        self.told = Shared()

    def max_byzantine(self, num_uploads):
        return 0

    def forward(self, uploads, weights, context):
        self.told.append((uploads.flatten().tolist(), weights.tolist(), context))
        return uploads.mean(0)


class Remembering(Listening):
    """Adds to the mean what it gave before."""

    def __init__(self):
        super().__init__()
        self.register_buffer("before", torch.zeros(1, dtype=torch.float64))

    def forward(self, uploads, weights, context):
        self.before = self.before + uploads.mean(0)
        return self.before.clone()


def estimating(lr=1.0):
    return FedAvg(Point(), criterion=HalfSquares(), optimizer=sgd(lr), local_steps=1)


def estimate(numbers=NUMBERS, rounds=1, **settings):
    given = points(*([number] for number in numbers))
    return run_rounds(estimating(), shared_out(given, 10), rounds, **settings)


# Who


def test_those_on_the_list_forge():
    spy = Spy(number=-8.0)
    outcome = estimate(attack=spy, ids=[4, 5])
    ((honest, own, context),) = spy.told
    assert (honest, own) == ([1, 2, 3, 4], [50, 60])
    assert context.attackers.tolist() == [4, 5]
    assert context.observed.tolist() == [0, 1, 2, 3]
    assert context.clients.tolist() == [0, 1, 2, 3, 4, 5]
    assert context.broadcast.tolist() == [0]
    assert outcome.w.item() == pytest.approx((1 + 2 + 3 + 4 - 8 - 8) / 6)


def test_only_those_in_the_cohort_forge():
    spy = Spy()
    estimate(attack=spy, ids=[1, 5], sampler=Only(3, 5, 0))
    ((honest, own, context),) = spy.told
    assert (honest, own) == ([4, 1], [60])
    assert context.attackers.tolist() == [5]
    assert context.observed.tolist() == [3, 0]
    silent = Spy()
    outcome = estimate(attack=silent, ids=[1, 5], sampler=Only(3, 0))
    assert silent.told == []
    assert outcome.reports[0]["train/forged"] == 0


@pytest.mark.parametrize(("fraction", "count"), [(0.34, 2), (0.5, 3), (0.1, 0)])
def test_a_fraction_is_drawn_by_the_seed(fraction, count):
    spy = Spy()
    reports = estimate(attack=spy, fraction=fraction, rounds=3, seed=4).reports
    expected = draw_byzantine(fraction, 6, seed=4).nonzero().flatten().tolist()
    assert len(expected) == count
    assert [context.attackers.tolist() for *_, context in spy.told] == [expected] * 3 * (count > 0)
    assert [report["train/byzantine"] for report in reports] == [count] * 3
    assert [report["train/forged"] for report in reports] == [count] * 3


def test_redrawn_in_each_round():
    spy = Spy()
    outcome = estimate(attack=spy, fraction=0.34, redraw=True, rounds=12)
    found = [context.attackers.tolist() for *_, context in spy.told]
    drawn = [draw_byzantine(0.34, 6, 0, round).nonzero().flatten().tolist() for round in range(12)]
    assert found == drawn
    assert {len(each) for each in found} == {2}
    assert {client for each in found for client in each} == set(range(6)), "everybody's turn comes"
    assert [report["train/byzantine"] for report in outcome.reports] == [2] * 12


def test_labels_are_poisoned_of_those_who_are_byzantine_in_the_round():
    byzantine_clients = ByzantineClients(Adversary(RandomLabels(), 0.5, redraw=True))
    byzantine_clients.setup(num_clients=6, num_classes=3, seed=2)
    for round in range(5):
        byzantine_clients.begin(round)
        poisoned = sorted(byzantine_clients.poison(torch.arange(6), round))
        assert poisoned == draw_byzantine(0.5, 6, 2, round).nonzero().flatten().tolist()


# When


@pytest.mark.parametrize("start", [0, 1, 2])
def test_they_are_honest_before_they_begin(start):
    spy = Spy(number=-6.0)
    outcome = estimate(attack=spy, ids=[5], start_round=start, rounds=2)
    w = 0.0
    for round in range(2):
        forged = round >= start
        sent = [number - w for number in NUMBERS]
        if forged:
            sent[5] = -6.0
        w += sum(sent) / 6
        report = outcome.reports[round]
        assert report["train/forged"] == int(forged)
        assert report["train/byzantine"] == 1, "a byzantine client, however it behaves"
        benign = sum(sent[:5]) / 5
        assert float(report["train/benign_distance"]) == pytest.approx(abs(sum(sent) / 6 - benign))
    assert outcome.w.item() == pytest.approx(w)
    assert [context.round for *_, context in spy.told] == list(range(start, 2))


def test_data_are_poisoned_from_then_on():
    byzantine_clients = ByzantineClients(Adversary(RandomLabels(), ids=[1], start_round=3))
    byzantine_clients.setup(num_clients=2, num_classes=3, seed=0)
    assert [list(byzantine_clients.poison(torch.arange(2), round)) for round in (2, 3)] == [[], [1]]
    byzantine_clients = ByzantineClients(
        Adversary(FlippedLabels(), ids=[1], start_round=3, corruption=RandomLabels(redraw=True))
    )
    byzantine_clients.setup(num_clients=2, num_classes=3, seed=0)
    batch = Batch(torch.zeros(50, 1), torch.zeros(50).long(), samples=torch.arange(50))
    before, after = (byzantine_clients.poison(torch.arange(2), round) for round in (2, 3))
    assert list(before) == list(after) == [0, 1]
    corrupted = [
        RandomLabels(redraw=True).poison(batch, _client(1, round)).targets for round in (2, 3)
    ]
    assert torch.equal(before[1](batch).targets, corrupted[0])
    assert torch.equal(after[1](batch).targets, 2 - corrupted[1]), "on top"


def _client(client, round=3):
    return pl_fed.types.ClientContext(seed=0, round=round, client=client, num_classes=3)


def test_who_forges_only_keeps_its_data():
    for attack, poisons in (
        (SignFlipping(), []),
        (Combined([SignFlipping(), RandomLabels()]), [1]),
    ):
        byzantine_clients = ByzantineClients(Adversary(attack, ids=[1]))
        byzantine_clients.setup(num_clients=2, num_classes=3, seed=0)
        assert list(byzantine_clients.poison(torch.arange(2), 0)) == poisons


# With what knowledge


class Broken(FedAvg):
    """Clients whose numbers are above a bound get a loss of NaN."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * torch.where((batch.targets > 55).any(), torch.nan, 1.0)


def breaking(numbers, rounds=1, **settings):
    client = Broken(Point(), criterion=HalfSquares(), optimizer=sgd(1.0), local_steps=1)
    data = shared_out(points(*([number] for number in numbers)), 10)
    return run_rounds(client, data, rounds, **settings)


def test_who_knows_all_knows_finite_uploads_and_the_defence():
    spy = Spy()
    breaking([1, 2, 60, 4, 5, 70], attack=spy, ids=[4, 5], aggregator=Median())
    ((honest, own, context),) = spy.told
    assert honest == [1, 2, 4]
    assert context.observed.tolist() == [0, 1, 3]
    assert own[0] == 5
    assert math.isnan(own[1])
    assert context.attackers.tolist() == [4, 5]
    assert context.clients.tolist() == [0, 1, 2, 3, 4, 5]
    assert len(context.losses) == 6
    assert context.simulate_merge(torch.tensor([[7.0], [9.0]])).item() == 4, "of 1, 2, 4, 7 and 9"
    assert context.simulate_merge(torch.tensor([[7.0], [math.inf]])).item() == 3, "of 1, 2, 4 and 7"


def test_who_knows_its_own_knows_no_other():
    spy = Spy()
    breaking([1, 2, 3, 4, 5, 70], attack=spy, ids=[4, 5], knowledge="own")
    ((honest, own, context),) = spy.told
    assert honest == [5]
    assert own[0] == 5
    assert context.observed.tolist() == [4]
    assert context.attackers.tolist() == [4, 5]
    assert context.simulate_merge is None
    assert len(context.clients) == 6, "how many they are is no secret"
    for secret in (context.losses, context.start_losses, context.root):
        assert secret.numel() == 0


@pytest.mark.parametrize(
    ("aggregator", "numbers"),
    [(Median(), NUMBERS), (TrimmedMean(), NUMBERS), (Krum(), [1, 2, 3, 99, 5, 6, 7, 8])],
    ids=["median", "trimmed mean", "Krum, and one is broken"],
)
@pytest.mark.parametrize("num_byzantine", [None, 1])
def test_what_is_tried_out_is_what_the_server_does(aggregator, numbers, num_byzantine):
    class Tries(Attack):
        tried = ()

        def forge(self, honest, own, context):
            forged = honest.mean(0) - torch.arange(1.0, 1 + len(own)).to(own)[:, None]
            context.simulate_merge(2 * forged)
            self.tried = (*self.tried, context.broadcast + context.simulate_merge(forged))
            return forged

    attack = Tries()
    how = {"ids": [4, 5], "aggregator": aggregator, "expected": num_byzantine}
    outcome = breaking(numbers, attack=attack, **how)
    (tried,) = attack.tried
    assert torch.equal(tried, outcome.w)
    assert outcome.reports[0]["train/rejected"] == len([n for n in numbers[:4] if n > 55])


def test_the_server_remembers_no_trial():
    class Tries(Spy):
        def forge(self, honest, own, context):
            for factor in (1, 10, 100):
                context.simulate_merge(factor * own)
            return super().forge(honest, own, context)

    outcomes = [
        estimate(attack=attack, ids=[5], rounds=3, aggregator=Remembering())
        for attack in (Spy(-5.0), Tries(-5.0))
    ]
    assert torch.equal(outcomes[0].w, outcomes[1].w)


def test_trials_do_not_count_in_the_log():
    reports = estimate(
        [1, 2, 3, 4, 50, 60],
        attack=InnerProductManipulation("search"),
        ids=[5],
        pre_aggregators=[pl_fed.aggregators.Clipping(2.5)],
    ).reports
    assert float(reports[0]["train/clipped"]) in (3, 4), "3, 4, 50, and perhaps the forged one"


# What the server is told


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"ids": [4, 5]}, 2),  # 6 · 2 / 6
        ({"ids": [4, 5], "sampler": Uniform(4)}, 1),  # 4 · 2 / 6
        ({"ids": [4, 5], "expected": 3}, 3),
        ({"ids": [4, 5], "expected": 0}, 0),
        ({"expected": 2}, 2),
        ({}, 0),
    ],
)
def test_how_many_the_server_counts_with(settings, expected):
    listening = Listening()
    attack = Spy() if "ids" in settings else None
    estimate(attack=attack, aggregator=listening, **settings)
    *_, context = listening.told[-1]  # before, it was tried out
    assert context.num_byzantine == expected
    for each in attack.told if attack else ():
        assert each[-1].num_byzantine == expected, "attackers know it, too"


def test_the_server_is_not_told_who_attacks():
    listening = Listening()
    estimate(attack=Spy(-9.0), ids=[4, 5], aggregator=listening)
    uploads, weights, context = listening.told[-1]
    assert uploads == [1, 2, 3, 4, -9, -9]
    assert weights == [1] * 6
    assert (len(context.attackers), len(context.observed), context.simulate_merge) == (0, 0, None)


# What comes of it


def test_the_distance_from_the_benign_mean_by_hand():
    report = estimate(attack=Spy(-20.0), ids=[0, 1], aggregator=Median()).reports[0]
    # 3, 4, 50, 60, −20, −20: the median is 3.5, the mean of the first four 29.25
    assert float(report["train/benign_distance"]) == pytest.approx(25.75)
    assert float(report["train/update_norm"]) == pytest.approx(3.5)
    report = estimate(aggregator=Median()).reports[0]
    assert float(report["train/benign_distance"]) == pytest.approx(20 - 3.5)
    assert float(estimate().reports[0]["train/benign_distance"]) == 0
    half = estimate(aggregator=TiltedMean(lr=0.25)).reports[0]  # of the way to the mean, 20
    assert float(half["train/benign_distance"]) == pytest.approx(10)
    everyone = estimate(attack=Spy(1.0), ids=list(range(6))).reports[0]
    assert math.isnan(everyone["train/benign_distance"]), "of no benign client"


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_forged_uploads_that_are_no_numbers_are_left_out(number):
    outcome = estimate(attack=Spy(number), ids=[4, 5])
    assert outcome.w.item() == pytest.approx(2.5)
    report = outcome.reports[0]
    assert (report["train/rejected"], report["train/forged"]) == (2, 2)
    assert float(report["train/benign_distance"]) == pytest.approx(0)


def test_a_forged_upload_of_a_client_whose_training_broke_counts():
    outcome = breaking([1, 2, 3, 60], attack=Spy(-2.0), ids=[3])
    assert outcome.w.item() == pytest.approx(1)
    assert outcome.reports[0]["train/rejected"] == 0


class NaNs(Attack):
    """Breaks its own training, and sends a small upload."""

    def poison(self, batch, context):
        return batch._replace(inputs=batch.inputs / 0)

    def forge(self, honest, own, context):
        return torch.zeros_like(own)


@pytest.mark.parametrize("kind", [FedAvg, Scaffold])
def test_a_client_whose_training_broke_proposes_nothing(kind):
    def net():
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    client = kind(seeded(net if kind is FedAvg else mlp), optimizer=sgd(0.1), local_epochs=1)
    data = shared_out(classes([8, 8, 8, 8]))
    outcome = run_rounds(client, data, 2, attack=NaNs(), ids=[2])
    assert outcome.w.isfinite().all()
    assert outcome.w_statistics.isfinite().all()
    assert all(row.isfinite().all() for row in outcome.server_states.values())
    assert outcome.reports[-1]["train/rejected"] == 0
    start, attacked = (run_rounds(client, data, n, attack=NaNs(), ids=[2]) for n in (0, 1))
    honest = run_rounds(client, data, 1, sampler=Only(0, 1, 3))
    if kind is Scaffold:  # a mean over all clients, in both cases
        for name, row in honest.server_states.items():
            torch.testing.assert_close(attacked.server_states[name], row)
    else:  # 3 of 4 propose
        changes = [each.w_statistics - start.w_statistics for each in (attacked, honest)]
        torch.testing.assert_close(changes[0], changes[1] * 3 / 4)


class Keeps(FedAvg):
    """Keeps what it sends."""

    def __init__(self, net, **kwargs):
        super().__init__(net, **kwargs)
        self.add_state("sent", self.zero_row)

    def end_round(self, client):
        client.states["sent"] = super().end_round(client)
        return client.states["sent"]


@pytest.mark.parametrize("chunk_size", [1, 2, 3, None])
def test_what_clients_keep_is_not_forged(chunk_size):
    """Even where it lies in the same memory as what they send."""
    client = Keeps(Point(), criterion=HalfSquares(), optimizer=sgd(1.0), local_steps=1)
    data = shared_out(points([1], [2], [3]), 10)
    how = {"attack": Spy(-7.0), "ids": [1], "chunk_size": chunk_size}
    outcome = run_rounds(client, data, 1, **how)
    assert outcome.states["sent"].flatten().tolist() == [1, 2, 3]
    assert outcome.w.item() == pytest.approx((1 - 7 + 3) / 3)


def test_who_sends_nothing_forges_nothing():
    client = Local(seeded(mlp), optimizer=sgd(0.1), local_epochs=1)
    spy = Spy()
    outcome = run_rounds(client, shared_out(classes([8, 8, 8])), attack=spy, ids=[1])
    assert spy.told == []
    assert outcome.reports[0]["train/forged"] == 0


@pytest.mark.parametrize(
    ("gives", "got"),
    [
        (lambda own: own[:1], r"\[1, 1\]"),
        (lambda own: own[:, :0], r"\[2, 0\]"),
        (lambda own: own.flatten(), r"\[2\]"),
        (lambda own: None, "NoneType"),
        (lambda own: own.tolist(), "list"),
        (lambda own: own.numpy(), "ndarray"),
        (lambda own: own > 0, "torch.bool, torch.strided, on cpu: give real .* as `own` has them"),
        (lambda own: own.long(), "torch.int64, torch.strided, on cpu: .*"),
        (lambda own: own * 1j, "torch.complex128, torch.strided, on cpu: .*"),
        (lambda own: own.to_sparse(), "torch.float64, torch.sparse_coo, on cpu: .*"),
        (lambda own: own.to("meta"), "torch.float64, torch.strided, on meta: .*"),
    ],
)
def test_forged_uploads_of_another_shape_or_kind(gives, got):
    class Odd(Attack):
        def forge(self, honest, own, context):
            return gives(own)

    message = rf"^Expected `forge` of Odd to give uploads of shape \[2, 1\] but got {got}\.$"
    with pytest.raises(ValueError, match=message):
        estimate(attack=Odd(), ids=[4, 5])


def test_everybody_is_warned_of():
    byzantine_clients = ByzantineClients(Adversary(Spy(), 1.0))
    with pytest.warns(UserWarning, match="All clients are Byzantine, so there are no metrics"):
        byzantine_clients.setup(3, 2, seed=0)


# Whatever the chunks, and through a stop


SEARCH = {
    "attack": Combined([RandomLabels(), ALittleIsEnough("search")]),
    "fraction": 0.4,
    "redraw": True,
    "start_round": 1,
    "aggregator": Median(),
}
DRAWN = {"attack": Combined([RandomLabels(), RandomUpdates()]), "fraction": 0.3}


@pytest.mark.slow
@pytest.mark.parametrize("how", [SEARCH, DRAWN])
@pytest.mark.parametrize("engine", [{"chunk_size": 1}, {"chunk_size": 3}, {"engine": "stacked"}])
def test_chunks_and_engines_do_not_matter(how, engine):
    client = Ditto(seeded(mlp), lam=0.5, optimizer=sgd(0.1), local_epochs=1)
    data = shared_out(classes([9, 8, 12, 10, 7, 11, 10]))
    alone = run_rounds(client, data, 4, sampler=Uniform(6), **how)
    assert any(report["train/forged"] for report in alone.reports)
    other = run_rounds(client, data, 4, sampler=Uniform(6), **{**how, **engine})
    assert alone.distance(other) < 1e-10


def made(folder, rounds=3, **how):
    trainer = pl_fed.Trainer(
        pl_fed.Federation(Uniform(6), seed=0, **sections(engine="one_by_one", **how)),
        default_root_dir=folder,
        run_dir=folder / "run",
        accelerator="cpu",
        max_epochs=rounds,
        precision="64-true",
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    client = Ditto(seeded(mlp), lam=0.5, optimizer=sgd(0.1), local_epochs=1)
    return trainer, client, shared_out(classes([20] * 9), val_fraction=0.2, test_fraction=0.3)


def trained(folder, rounds, resumes=None, **how):
    trainer, client, data = made(folder, rounds, **how)
    trainer.fit(client, data, ckpt_path=resumes)
    trainer.test(client, data, verbose=False)
    return trainer, client


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
@pytest.mark.parametrize("how", [SEARCH, DRAWN])
def test_a_resumed_run_has_the_same_byzantine_clients(tmp_path, how):
    whole, client = trained(tmp_path / "whole", 4, **how)
    trained(tmp_path / "half", 2, **how)
    last = tmp_path / "half" / "run" / "checkpoints" / "last.ckpt"
    resumed, again = trained(tmp_path / "rest", 4, resumes=last, **how)
    assert torch.equal(client.row("global").data, again.row("global").data)
    assert torch.equal(whole.federation.is_byzantine, resumed.federation.is_byzantine)
    for name, value in whole.callback_metrics.items():
        if name != "time/round":
            assert torch.equal(value, resumed.callback_metrics[name]), name


def test_a_run_that_only_tests_leaves_out_who_was_byzantine_last(tmp_path):
    whole, _ = trained(tmp_path / "a", 3, **SEARCH)
    trainer, client, data = made(tmp_path / "b", **SEARCH)
    last = tmp_path / "a" / "run" / "checkpoints" / "last.ckpt"
    trainer.test(client, data, ckpt_path=last, verbose=False)
    assert torch.equal(trainer.federation.is_byzantine, draw_byzantine(0.4, 9, seed=0, round=2))
    for name in ("test/global/accuracy", "test/personal/loss_var"):
        assert torch.equal(trainer.callback_metrics[name], whole.callback_metrics[name])


@pytest.mark.parametrize("how", [SEARCH, DRAWN])
def test_metrics_are_of_benign_clients_only(tmp_path, how):
    trainer, _ = trained(tmp_path, 3, **how)
    round = 2 if how.get("redraw") else None
    benign = ~draw_byzantine(how["fraction"], 9, 0, round)
    assert 0 < int(benign.sum()) < 9
    for model, metrics in trainer.federation.metrics("test").items():
        each = metrics.per_client()["accuracy"]
        found = trainer.callback_metrics[f"test/{model}/accuracy"]
        assert float(found) == pytest.approx(float(each[benign].mean()))
        assert float(each.mean()) != pytest.approx(float(found)), "that is not all clients'"
    table = (tmp_path / "run" / "per_client.csv").read_text().splitlines()
    column = table[0].split(",").index("byzantine")
    assert [row.split(",")[column] for row in table[1:]] == [str(int(not b)) for b in benign]
