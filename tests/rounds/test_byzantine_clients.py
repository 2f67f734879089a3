"""Who lies, when, with what knowledge, and what comes of it: whole rounds, mostly by hand.

Clients estimate a point: with a learning rate of 1 each sends the way from w^t to its own number.
"""

import math

import pytest
import torch
from further_cases import covering, mark_further
from small_federations import (
    HalfSquares,
    Only,
    Point,
    VariedCohorts,
    classes,
    mlp,
    points,
    run_rounds,
    sections,
    seeded,
    sgd,
    shared_out,
)
from tables import table_test
from torch import nn

import pl_fed
from pl_fed import Adversary
from pl_fed.aggregators import (
    Aggregator,
    CenteredClipping,
    Krum,
    Median,
    TiltedMean,
    TrimmedMean,
)
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
from pl_fed.clients import FLAME, Ditto, FedAvg, FedBABU, FedRep, Local, LpProj, Scaffold
from pl_fed.rounds.byzantine_clients import ByzantineClients, draw_byzantine
from pl_fed.samplers import Uniform
from pl_fed.types import Batch

NUMBERS = [1.0, 2.0, 3.0, 4.0, 50.0, 60.0]


class Spy(Attack):
    """Record the arguments of `forge`, and send a number."""

    def __init__(self, number=0.0):
        self.number = number
        self.calls = []

    def forge(self, honest, own, context):
        self.calls.append((honest.flatten().tolist(), own.flatten().tolist(), context))
        return torch.full_like(own, self.number)


class Uncopied(list):
    """A list without copies: the server copies its aggregator."""

    def __deepcopy__(self, memo):
        return self


class Recorder(Aggregator):
    """Take the mean, and record the arguments of `forward`."""

    def __init__(self):
        super().__init__()
        self.calls = Uncopied()

    def max_byzantine(self, num_uploads):
        return 0

    def forward(self, uploads, weights, context):
        self.calls.append((uploads.flatten().tolist(), weights.tolist(), context))
        return uploads.mean(0)


class Accumulator(Recorder):
    """Add the sum of its earlier results to the mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("before", torch.zeros(1, dtype=torch.float64))

    def forward(self, uploads, weights, context):
        self.before = self.before + uploads.mean(0)
        return self.before.clone()


def make_estimating_client(lr=1.0):
    return FedAvg(Point(), criterion=HalfSquares(), optimizer=sgd(lr), local_steps=1)


def estimate(numbers=NUMBERS, rounds=1, **settings):
    arrays = points(*([number] for number in numbers))
    return run_rounds(make_estimating_client(), shared_out(arrays, 10), rounds, **settings)


# Selection of Byzantine clients


def test_listed_clients_forge():
    spy = Spy(number=-8.0)
    outcome = estimate(attack=spy, ids=[4, 5])
    ((honest, own, context),) = spy.calls
    assert (honest, own) == ([1, 2, 3, 4], [50, 60])
    assert context.attackers.tolist() == [4, 5]
    assert context.observed.tolist() == [0, 1, 2, 3]
    assert context.clients.tolist() == [0, 1, 2, 3, 4, 5]
    assert context.broadcast.tolist() == [0]
    assert outcome.w.item() == pytest.approx((1 + 2 + 3 + 4 - 8 - 8) / 6)


class NetReader(Spy):
    """Record the nets that `context.net` returns, and the layout of the uploads."""

    def forge(self, honest, own, context):
        update = torch.arange(1.0, 1 + own.shape[1], dtype=own.dtype)
        nets = context.net(), context.net(update)
        vectors = [nn.utils.parameters_to_vector(net.parameters()) for net in nets]
        self.calls.append((context, *vectors, update))
        return own


@pytest.mark.parametrize("algorithm", [FedAvg, FedRep, FedBABU])
def test_attackers_read_the_global_model_plus_an_update_and_its_layout(algorithm):
    client = algorithm(mlp(), optimizer=sgd(), local_steps=1)
    spy = NetReader()
    run_rounds(client, shared_out(classes([4, 4, 4])), 1, attack=spy, ids=[2])
    ((context, plain, moved, update),) = spy.calls
    assert torch.equal(plain, context.broadcast)
    assert torch.equal(moved, context.broadcast + update)
    assert context.layout.names == tuple(name for name, _ in mlp().named_parameters())
    last = context.layout.positions(context.layout.names[-1].split(".")[0]).tolist()
    assert context.unsent.tolist() == ([] if algorithm is FedAvg else last)
    assert context.frozen == (("2.weight", "2.bias") if algorithm is FedBABU else ())


def test_forged_numbers_in_parts_that_clients_keep_never_arrive():
    class Watched(Krum):
        def forward(self, uploads, weights, context):
            if uploads.shape[1] == client.row("global").layout.numel:  # no trial of the aggregator
                seen.append(uploads.clone())
                assert torch.equal(context.unsent, client.unsent_positions)
            return super().forward(uploads, weights, context)

    seen = []  # by the server, after the attackers' simulations
    client = FedRep(seeded(mlp), optimizer=sgd(0.1), head_steps=1, local_steps=1)
    data = shared_out(classes([4, 4, 4, 4, 4]))
    for attack in (Spy(number=9.0), InnerProductManipulation(factor="search", trials=2)):
        run_rounds(client, data, 1, attack=attack, ids=[2], aggregator=Watched())
    unsent = client.unsent_positions
    assert all(not uploads[:, unsent].any() for uploads in seen)
    assert (seen[0][2] == 9).sum() == seen[0].shape[1] - len(unsent) > 0


def test_forged_rows_of_lp_proj_lie_in_the_span_of_its_projection():
    class Watched(Krum):
        def forward(self, uploads, weights, context):
            seen.append(uploads.clone())
            return super().forward(uploads, weights, context)

    seen = []
    client = LpProj(seeded(mlp), dimensions=5, optimizer=sgd(0.1)).double()
    data = shared_out(classes([4, 4, 4, 4, 4]))
    run_rounds(client, data, 1, attack=Spy(number=9.0), ids=[2], aggregator=Watched())
    short = client.projection(seen[-1])
    torch.testing.assert_close(client.projection.lift(short), seen[-1], rtol=0, atol=1e-12)
    nines = client.projection(torch.full((43,), 9.0, dtype=torch.float64))
    torch.testing.assert_close(short[2], nines, rtol=0, atol=1e-12)


def test_spread_of_random_updates_is_that_of_the_short_rows_of_lp_proj():
    class Watched(RandomUpdates):
        def forge(self, honest, own, context):
            forged = super().forge(honest, own, context)
            standard = RandomUpdates(std=1.0).forge(honest, own, context)
            calls.append((forged, standard, client.projection(own[0])))
            return forged

    calls = []
    client = LpProj(seeded(mlp), dimensions=5, optimizer=sgd(0.1)).double()
    run_rounds(client, shared_out(classes([4, 4, 4])), 1, attack=Watched(), ids=[2])
    ((forged, standard, short),) = calls
    assert len(short) == 5
    torch.testing.assert_close(forged, standard * short.std(correction=0), rtol=1e-6, atol=0)


class NetJudge(Recorder):
    """Take the mean, and record what `context.net` makes of the first upload."""

    needs_net = True

    def forward(self, uploads, weights, context):
        net = context.net(uploads[0])
        vector = nn.utils.parameters_to_vector(net.parameters())
        self.calls.append(torch.equal(vector, context.broadcast + uploads[0]))
        context.reject_rows(uploads[:, 0] > 10)
        return uploads.mean(0)


def test_aggregators_with_needs_net_read_the_clients_models_and_reject_rows():
    judge = NetJudge()
    outcome = estimate(aggregator=judge)
    assert judge.calls[-1], "in the round; trials before it have random uploads"
    assert outcome.reports[0]["train/dropped"] == 2


def test_aggregators_without_needs_net_read_no_net():
    recorder = Recorder()
    estimate(aggregator=recorder)
    _, _, context = recorder.calls[-1]
    assert context.net is None
    assert context.samples is None


def test_only_byzantine_clients_in_the_cohort_forge():
    spy = Spy()
    estimate(attack=spy, ids=[1, 5], sampler=Only(3, 5, 0))
    ((honest, own, context),) = spy.calls
    assert (honest, own) == ([4, 1], [60])
    assert context.attackers.tolist() == [5]
    assert context.observed.tolist() == [3, 0]
    silent = Spy()
    outcome = estimate(attack=silent, ids=[1, 5], sampler=Only(3, 0))
    assert silent.calls == []
    assert outcome.reports[0]["train/forged"] == 0


@pytest.mark.parametrize(("fraction", "count"), [(0.34, 2), (0.5, 3), (0.1, 0)])
def test_seed_draws_the_fraction_of_byzantine_clients(fraction, count):
    spy = Spy()
    reports = estimate(attack=spy, fraction=fraction, rounds=3, seed=4).reports
    expected = draw_byzantine(fraction, 6, seed=4).nonzero().flatten().tolist()
    assert len(expected) == count
    assert [context.attackers.tolist() for *_, context in spy.calls] == [expected] * 3 * (count > 0)
    assert [report["train/byzantine"] for report in reports] == [count] * 3
    assert [report["train/forged"] for report in reports] == [count] * 3


def test_redraw_draws_byzantine_clients_in_every_round():
    spy = Spy()
    outcome = estimate(attack=spy, fraction=0.34, redraw=True, rounds=12)
    drawn_clients = [context.attackers.tolist() for *_, context in spy.calls]
    expected = [
        draw_byzantine(0.34, 6, 0, round).nonzero().flatten().tolist() for round in range(12)
    ]
    assert drawn_clients == expected
    assert {len(clients) for clients in drawn_clients} == {2}
    assert {client for clients in drawn_clients for client in clients} == set(range(6)), (
        "everybody's turn comes"
    )
    assert [report["train/byzantine"] for report in outcome.reports] == [2] * 12


def test_labels_of_the_rounds_byzantine_clients_are_poisoned():
    byzantine_clients = ByzantineClients(Adversary(RandomLabels(), 0.5, redraw=True))
    byzantine_clients.setup(num_clients=6, num_classes=3, seed=2)
    for round in range(5):
        byzantine_clients.begin(round)
        poisoned = sorted(byzantine_clients.poison(torch.arange(6), round))
        assert poisoned == draw_byzantine(0.5, 6, 2, round).nonzero().flatten().tolist()


# Start round


@pytest.mark.parametrize("start", [0, 1, 2])
def test_byzantine_clients_are_honest_before_the_start_round(start):
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
    assert [context.round for *_, context in spy.calls] == list(range(start, 2))


@pytest.mark.parametrize(("start", "rounds", "warns"), [(2, 2, True), (1, 2, False), (2, 0, False)])
def test_attack_after_the_last_round_is_announced(recwarn, start, rounds, warns):
    byzantine_clients = ByzantineClients(Adversary(RandomLabels(), ids=[1], start_round=start))
    byzantine_clients.warn_of_late_start(rounds)
    texts = [str(item.message) for item in recwarn]
    assert texts == warns * [
        "RandomLabels does nothing: it begins after 2 rounds, and the run has 2. Lower"
        " `federation.adversary.start_round`, or raise `trainer.max_epochs`."
    ]


def test_byzantine_clients_are_honest_from_the_stop_round_on():
    spy = Spy(number=-6.0)
    outcome = estimate(attack=spy, ids=[5], start_round=1, stop_round=3, rounds=5)
    honest = estimate(attack=Spy(number=-6.0), ids=[5], start_round=9, rounds=1)
    assert [report["train/forged"] for report in outcome.reports] == [0, 1, 1, 0, 0]
    assert [report["train/byzantine"] for report in outcome.reports] == [1] * 5
    assert [context.round for *_, context in spy.calls] == [1, 2]
    assert outcome.reports[0]["train/benign_distance"] == honest.reports[0]["train/benign_distance"]
    byzantine_clients = ByzantineClients(Adversary(RandomLabels(), ids=[1], stop_round=3))
    byzantine_clients.setup(num_clients=2, num_classes=3, seed=0)
    assert [list(byzantine_clients.poison(torch.arange(2), round)) for round in (2, 3)] == [[1], []]


def test_data_are_poisoned_from_the_start_round():
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


def test_attack_on_uploads_keeps_the_data():
    for attack, poisons in (
        (SignFlipping(), []),
        (Combined([SignFlipping(), RandomLabels()]), [1]),
    ):
        byzantine_clients = ByzantineClients(Adversary(attack, ids=[1]))
        byzantine_clients.setup(num_clients=2, num_classes=3, seed=0)
        assert list(byzantine_clients.poison(torch.arange(2), 0)) == poisons


# Knowledge


class BreakingFedAvg(FedAvg):
    """Clients whose numbers are above a bound get a loss of NaN."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * torch.where((batch.targets > 55).any(), torch.nan, 1.0)


def run_breaking(numbers, rounds=1, **settings):
    client = BreakingFedAvg(Point(), criterion=HalfSquares(), optimizer=sgd(1.0), local_steps=1)
    data = shared_out(points(*([number] for number in numbers)), 10)
    return run_rounds(client, data, rounds, **settings)


def test_omniscient_attack_sees_finite_uploads_and_the_aggregator():
    spy = Spy()
    run_breaking([1, 2, 60, 4, 5, 70], attack=spy, ids=[4, 5], aggregator=Median())
    ((honest, own, context),) = spy.calls
    assert honest == [1, 2, 4]
    assert context.observed.tolist() == [0, 1, 3]
    assert own[0] == 5
    assert math.isnan(own[1])
    assert context.attackers.tolist() == [4, 5]
    assert context.clients.tolist() == [0, 1, 2, 3, 4, 5]
    assert len(context.losses) == 6
    assert context.simulate_merge(torch.tensor([[7.0], [9.0]])).item() == 4, "of 1, 2, 4, 7 and 9"
    assert context.simulate_merge(torch.tensor([[7.0], [math.inf]])).item() == 3, "of 1, 2, 4 and 7"


def test_attack_with_own_knowledge_sees_no_other_uploads():
    spy = Spy()
    run_breaking([1, 2, 3, 4, 5, 70], attack=spy, ids=[4, 5], knowledge="own")
    ((honest, own, context),) = spy.calls
    assert honest == [5]
    assert own[0] == 5
    assert context.observed.tolist() == [4]
    assert context.attackers.tolist() == [4, 5]
    assert context.simulate_merge is None
    assert len(context.clients) == 6, "the size of the cohort is public"
    for secret in (context.losses, context.start_losses, context.group_counts, context.root):
        assert secret.numel() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("aggregator", "numbers"),
    [(Median(), NUMBERS), (TrimmedMean(), NUMBERS), (Krum(), [1, 2, 3, 99, 5, 6, 7, 8])],
    ids=["median", "trimmed mean", "Krum, and one is broken"],
)
@pytest.mark.parametrize("num_byzantine", [None, 1])
def test_simulated_merge_equals_the_merge_of_the_server(aggregator, numbers, num_byzantine):
    class Simulates(Attack):
        simulated = ()

        def forge(self, honest, own, context):
            forged = honest.mean(0) - torch.arange(1.0, 1 + len(own)).to(own)[:, None]
            context.simulate_merge(2 * forged)
            self.simulated = (*self.simulated, context.broadcast + context.simulate_merge(forged))
            return forged

    attack = Simulates()
    settings = {"ids": [4, 5], "aggregator": aggregator, "expected": num_byzantine}
    outcome = run_breaking(numbers, attack=attack, **settings)
    (simulated,) = attack.simulated
    assert torch.equal(simulated, outcome.w)
    assert outcome.reports[0]["train/rejected"] == len([n for n in numbers[:4] if n > 55])


def test_simulated_merge_has_the_weight_of_a_smaller_cohort_in_the_mean_of_all_clients():
    """Two of three expected changes count 2/3, before CenteredClipping compares them with τ."""

    class Simulates(Spy):
        def forge(self, honest, own, context):
            self.calls.append(context.broadcast + context.simulate_merge(own))
            return own

    attack, cohorts = Simulates(), VariedCohorts([0, 3], [0, 1, 2])
    client = FLAME(Point(), criterion=HalfSquares(), optimizer=sgd(1.0), local_steps=1)
    data = shared_out(points(*([number] for number in NUMBERS)), 10)
    settings = {"attack": attack, "ids": [3], "aggregator": CenteredClipping(1.0)}
    outcome = run_rounds(client, data, 1, sampler=cohorts, **settings)
    assert torch.equal(attack.calls[0], outcome.w)


def test_simulated_merges_leave_the_server_unchanged():
    class Simulates(Spy):
        def forge(self, honest, own, context):
            for factor in (1, 10, 100):
                context.simulate_merge(factor * own)
            return super().forge(honest, own, context)

    outcomes = [
        estimate(attack=attack, ids=[5], rounds=3, aggregator=Accumulator())
        for attack in (Spy(-5.0), Simulates(-5.0))
    ]
    assert torch.equal(outcomes[0].w, outcomes[1].w)


def test_simulated_merges_are_not_logged():
    reports = estimate(
        [1, 2, 3, 4, 50, 60],
        attack=InnerProductManipulation("search"),
        ids=[5],
        pre_aggregators=[pl_fed.aggregators.Clipping(2.5)],
    ).reports
    assert float(reports[0]["train/clipped"]) in (3, 4), "3, 4, 50, and perhaps the forged one"


# Context of the aggregator


@pytest.mark.slow
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
def test_expected_number_of_byzantine_clients(settings, expected):
    recorder = Recorder()
    attack = Spy() if "ids" in settings else None
    estimate(attack=attack, aggregator=recorder, **settings)
    *_, context = recorder.calls[-1]  # the earlier ones are simulations
    assert context.num_byzantine == expected
    for call in attack.calls if attack else ():
        assert call[-1].num_byzantine == expected, "the attack sees the same number"


def test_aggregator_does_not_see_the_byzantine_clients():
    recorder = Recorder()
    estimate(attack=Spy(-9.0), ids=[4, 5], aggregator=recorder)
    uploads, weights, context = recorder.calls[-1]
    assert uploads == [1, 2, 3, 4, -9, -9]
    assert weights == [1] * 6
    assert (len(context.attackers), len(context.observed), context.simulate_merge) == (0, 0, None)


# Results


def test_distance_from_the_benign_mean_by_hand():
    report = estimate(attack=Spy(-20.0), ids=[0, 1], aggregator=Median()).reports[0]
    # 3, 4, 50, 60, −20, −20: the median is 3.5, the mean of the first four 29.25
    assert float(report["train/benign_distance"]) == pytest.approx(25.75)
    assert float(report["train/update_norm"]) == pytest.approx(3.5)
    report = estimate(aggregator=Median()).reports[0]
    assert float(report["train/benign_distance"]) == pytest.approx(20 - 3.5)
    assert float(estimate().reports[0]["train/benign_distance"]) == 0
    half = estimate(aggregator=TiltedMean(lr=0.25)).reports[0]  # of the way to the mean, 20
    assert float(half["train/benign_distance"]) == pytest.approx(10)
    attacked_report = estimate(attack=Spy(1.0), ids=list(range(6))).reports[0]
    assert math.isnan(attacked_report["train/benign_distance"]), "of no benign client"


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_forged_uploads_that_are_not_finite_are_left_out(number):
    outcome = estimate(attack=Spy(number), ids=[4, 5])
    assert outcome.w.item() == pytest.approx(2.5)
    report = outcome.reports[0]
    assert (report["train/rejected"], report["train/forged"]) == (2, 2)
    assert float(report["train/benign_distance"]) == pytest.approx(0)


def test_forged_upload_counts_after_broken_training():
    outcome = run_breaking([1, 2, 3, 60], attack=Spy(-2.0), ids=[3])
    assert outcome.w.item() == pytest.approx(1)
    assert outcome.reports[0]["train/rejected"] == 0


class NaNs(Attack):
    """Break the client's own training, and send a small upload."""

    def poison(self, batch, context):
        return batch._replace(inputs=batch.inputs / 0)

    def forge(self, honest, own, context):
        return torch.zeros_like(own)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FedAvg, Scaffold])
def test_client_with_broken_training_proposes_no_server_state(kind):
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
        changes = [outcome.w_statistics - start.w_statistics for outcome in (attacked, honest)]
        torch.testing.assert_close(changes[0], changes[1] * 3 / 4)


class KeepsUpload(FedAvg):
    """A client that keeps its upload as a state."""

    def __init__(self, net, **kwargs):
        super().__init__(net, **kwargs)
        self.add_state("sent", self.zero_row)

    def end_round(self, client):
        client.states["sent"] = super().end_round(client)
        return client.states["sent"]


@pytest.mark.parametrize("chunk_size", [1, 2, 3, None])
def test_states_of_clients_are_not_forged(chunk_size):
    """Even if state and upload share memory."""
    client = KeepsUpload(Point(), criterion=HalfSquares(), optimizer=sgd(1.0), local_steps=1)
    data = shared_out(points([1], [2], [3]), 10)
    settings = {"attack": Spy(-7.0), "ids": [1], "chunk_size": chunk_size}
    outcome = run_rounds(client, data, 1, **settings)
    assert outcome.states["sent"].flatten().tolist() == [1, 2, 3]
    assert outcome.w.item() == pytest.approx((1 - 7 + 3) / 3)


def test_client_without_an_upload_forges_nothing():
    client = Local(seeded(mlp), optimizer=sgd(0.1), local_epochs=1)
    spy = Spy()
    outcome = run_rounds(client, shared_out(classes([8, 8, 8])), attack=spy, ids=[1])
    assert spy.calls == []
    assert outcome.reports[0]["train/forged"] == 0


@pytest.mark.slow
@table_test(
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
def test_forged_uploads_of_another_shape_or_dtype_are_refused(gives, got):
    class Odd(Attack):
        def forge(self, honest, own, context):
            return gives(own)

    message = rf"^Expected `forge` of Odd to give uploads of shape \[2, 1\] but got {got}\.$"
    with pytest.raises(ValueError, match=message):
        estimate(attack=Odd(), ids=[4, 5])


def test_warning_if_all_clients_are_byzantine():
    byzantine_clients = ByzantineClients(Adversary(Spy(), 1.0))
    with pytest.warns(UserWarning, match="All clients are Byzantine, so there are no metrics"):
        byzantine_clients.setup(3, 2, seed=0)


# Chunks, engines and resumes


SEARCH = {
    "attack": Combined([RandomLabels(), ALittleIsEnough("search")]),
    "fraction": 0.4,
    "redraw": True,
    "start_round": 1,
    "aggregator": Median(),
}
DRAWN = {"attack": Combined([RandomLabels(), RandomUpdates()]), "fraction": 0.3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "settings"),
    covering([{"chunk_size": 1}, {"chunk_size": 3}, {"engine": "stacked"}], [SEARCH, DRAWN]),
    ids=[f"engine{k}-settings{j}" for k in range(3) for j in range(2)],
)
def test_chunks_and_engines_agree_under_attack(settings, engine):
    client = Ditto(seeded(mlp), lam=0.5, optimizer=sgd(0.1), local_epochs=1)
    data = shared_out(classes([9, 8, 12, 10, 7, 11, 10]))
    alone = run_rounds(client, data, 4, sampler=Uniform(6), **settings)
    assert any(report["train/forged"] for report in alone.reports)
    other = run_rounds(client, data, 4, sampler=Uniform(6), **{**settings, **engine})
    assert alone.distance(other) < 1e-10


def make_run(folder, rounds=3, **settings):
    trainer = pl_fed.Trainer(
        pl_fed.Federation(Uniform(6), seed=0, **sections(engine="one_by_one", **settings)),
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


def run_training(folder, rounds, resumes=None, **settings):
    trainer, client, data = make_run(folder, rounds, **settings)
    trainer.fit(client, data, ckpt_path=resumes)
    trainer.test(client, data, verbose=False)
    return trainer, client


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
@pytest.mark.parametrize("settings", mark_further([SEARCH, DRAWN], [DRAWN]))
def test_resumed_run_has_the_same_byzantine_clients(tmp_path, settings):
    full, client = run_training(tmp_path / "whole", 4, **settings)
    run_training(tmp_path / "half", 2, **settings)
    last = tmp_path / "half" / "run" / "checkpoints" / "last.ckpt"
    resumed, again = run_training(tmp_path / "rest", 4, resumes=last, **settings)
    assert torch.equal(client.row("global").data, again.row("global").data)
    masks = [run.federation.is_byzantine for run in (full, resumed)]
    assert torch.equal(*masks)
    for name, value in full.callback_metrics.items():
        if name != "time/round":
            assert torch.equal(value, resumed.callback_metrics[name]), name


@pytest.mark.slow
def test_test_of_a_checkpoint_excludes_the_last_byzantine_clients(tmp_path):
    full, _ = run_training(tmp_path / "a", 3, **SEARCH)
    trainer, client, data = make_run(tmp_path / "b", **SEARCH)
    last = tmp_path / "a" / "run" / "checkpoints" / "last.ckpt"
    trainer.test(client, data, ckpt_path=last, verbose=False)
    byzantine = trainer.federation.is_byzantine
    assert torch.equal(byzantine, draw_byzantine(0.4, 9, seed=0, round=2))
    for name in ("test/global/accuracy", "test/personal/loss_var"):
        assert torch.equal(trainer.callback_metrics[name], full.callback_metrics[name])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SEARCH, DRAWN])
def test_metrics_include_benign_clients_only(tmp_path, settings):
    trainer, _ = run_training(tmp_path, 3, **settings)
    round = 2 if settings.get("redraw") else None
    benign = ~draw_byzantine(settings["fraction"], 9, 0, round)
    assert 0 < int(benign.sum()) < 9
    for model, metrics in trainer.federation.metrics("test").items():
        accuracies = metrics.per_client()["accuracy"]
        logged = trainer.callback_metrics[f"test/{model}/accuracy"]
        assert float(logged) == pytest.approx(float(accuracies[benign].mean()))
        assert float(accuracies.mean()) != pytest.approx(float(logged)), "all clients differ"
    table = (tmp_path / "run" / "per_client.csv").read_text().splitlines()
    column = table[0].split(",").index("byzantine")
    assert [row.split(",")[column] for row in table[1:]] == [str(int(not b)) for b in benign]
