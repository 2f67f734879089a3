"""Noisy sums of buckets: the exact rows, their sensitivity and noise, and the aggregator's view."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rounds import SIZES, build, model_row, private, run, set_cohort, silence
from small_federations import classes, mlp, seeded, sgd, shared_out
from tables import table_test

pytest.importorskip("dp_accounting", reason="the extra pl_fed[privacy] is not installed")

import dp_accounting
from dp_accounting.pld import PLDAccountant

from pl_fed import Adversary, DifferentialPrivacy, EngineOptions
from pl_fed.aggregators import (
    Aggregator,
    Bulyan,
    CenteredClipping,
    Clipping,
    FLTrust,
    GeometricMedian,
    KLoss,
    Mean,
    Median,
    TiltedMean,
    TrimmedMean,
)
from pl_fed.attacks import SignFlipping
from pl_fed.clients import Ditto, FedAvg
from pl_fed.distributed.work_share import WorkShare
from pl_fed.privacy.buckets import Buckets
from pl_fed.random import key, normal_row
from pl_fed.rounds.privacy import build_privacy
from pl_fed.samplers import All, Poisson, Uniform
from pl_fed.types import RoundContext

COUNT, NUMEL = 3, 5


class Recorder(Aggregator):
    """Median that records its arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def max_byzantine(self, num_uploads):
        return Median().max_byzantine(num_uploads)

    def forward(self, uploads, weights, context):
        self.calls.append((uploads.clone(), weights, context))
        return Median()(uploads, weights, context)


def in_buckets(count=COUNT, **options):
    return private(buckets=count, **options)


def step(count=COUNT, cohort=8, **options):
    """Return the privacy step of 8 clients, of which all take part."""
    return build_privacy(in_buckets(count, **options), Poisson(cohort / 8), 8, seed=0)


def protect(privacy, uploads, clients):
    share = WorkShare.single_process(torch.tensor(clients, dtype=torch.int64))
    return privacy.protect(uploads, share, lambda *_: None)


def no_noise(numel, _):
    return torch.zeros(numel, dtype=torch.float64)


def clipped_rows(uploads, clients, round=0, clip_norm=0.05, count=COUNT):
    """Return the sums of clipped uploads by bucket, written as in the definition."""
    buckets = Buckets(count, 0).assign(torch.tensor(clients), round)
    rows = torch.zeros(count, uploads.shape[1], dtype=torch.float64)
    for upload, bucket in zip(uploads, buckets.tolist()):
        rows[bucket] += upload * min(1.0, clip_norm / float(upload.norm()))
    return rows


@settings(deadline=None, max_examples=50)
@given(
    clients=st.lists(st.integers(0, 10**6), min_size=1, max_size=20, unique=True),
    seed=st.integers(0, 100),
    round=st.integers(0, 1000),
    count=st.integers(2, 50),
)
def test_a_client_has_the_same_bucket_in_every_cohort(clients, seed, round, count):
    buckets = Buckets(count, seed)
    drawn = buckets.assign(torch.tensor(clients), round)
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < count
    for client, bucket in zip(clients, drawn):
        assert buckets.assign(torch.tensor([client]), round) == bucket


def test_buckets_are_equally_likely_and_independent_between_rounds_and_seeds():
    clients, count = torch.arange(40_000), 8
    first, second, third = (
        Buckets(count, seed).assign(clients, round) for seed, round in ((0, 0), (0, 1), (1, 0))
    )
    for draw in (first, count * first + second, count * first + third):
        cells = count if draw is first else count**2
        expected = len(clients) / cells
        excess = ((draw.bincount(minlength=cells) - expected) ** 2 / expected).sum()
        assert abs(float(excess) - cells) < 5 * math.sqrt(2 * cells)


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(
    data=st.data(),
    clients=st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True),
    count=st.integers(2, 8),
    round=st.integers(0, 20),
    scale=st.sampled_from([1e-3, 1.0, 1e30, 1e200]),
)
def test_one_client_changes_one_sum_by_at_most_the_clipping_norm(
    data, clients, count, round, scale
):
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    uploads = scale * torch.randn(len(clients), NUMEL, generator=draw, dtype=torch.float64)
    place = data.draw(st.integers(0, len(clients) - 1))

    def sums(uploads, clients):
        privacy = step(count)
        privacy.rounds, privacy._draw_noise = round, no_noise
        return protect(privacy, uploads, clients) * privacy.denominator / count

    own = sums(uploads, clients)
    others = torch.arange(len(clients)) != place
    removed = sums(uploads[others], [k for k in clients if k != clients[place]])
    changed = (own - removed).norm(dim=1)
    assert float(changed.norm()) <= 0.05 * (1 + 1e-9)
    bucket = int(Buckets(count, 0).assign(torch.tensor(clients), round)[place])
    assert [b for b in range(count) if changed[b] > 1e-12] in ([], [bucket])
    replaced = uploads.clone()
    replaced[place] = -replaced[place]
    assert float((own - sums(replaced, clients)).norm()) <= 2 * 0.05 * (1 + 1e-9)
    stranger = [*clients[:place], 99, *clients[place + 1 :]]  # with cohorts of fixed size
    assert float((own - sums(replaced, stranger)).norm()) <= 2 * 0.05 * (1 + 1e-9)


def test_rows_are_noisy_sums_by_the_expected_clients_of_a_bucket():
    clients, privacy = [0, 2, 3, 5, 7], step(cohort=4)
    uploads = torch.randn(5, NUMEL, dtype=torch.float64)
    expected = clipped_rows(uploads, clients)
    noise = torch.stack(
        [normal_row(key(0, "privacy noise", 0, bucket), NUMEL) for bucket in range(COUNT)]
    )
    rows = protect(privacy, uploads, clients)
    torch.testing.assert_close(rows, (expected + 0.05 * noise) * COUNT / 4, rtol=1e-12, atol=1e-14)
    again = protect(privacy, uploads, clients)
    assert not torch.isclose(rows, again).any(), "the next round has fresh noise"


def test_noise_of_the_buckets_is_independent_with_the_deviation_of_one_sum():
    numel = 50_000
    privacy = step(8, noise_multiplier=3.0)
    rows = protect(privacy, torch.zeros(0, numel, dtype=torch.float64), [])
    noise = rows * privacy.denominator / 8 / (3.0 * 0.05)
    assert float((noise.mean(1)).abs().max()) < 5 / numel**0.5
    assert float((noise.var(1) - 1).abs().max()) < 5 * (2 / numel) ** 0.5
    assert float((torch.corrcoef(noise) - torch.eye(8)).abs().max()) < 5 / numel**0.5


@pytest.mark.slow
def test_global_model_moves_by_the_aggregator_of_the_rows():
    federation, optimizer = build(privacy=in_buckets(), aggregator=Recorder())
    set_cohort(federation, 1, 3, 6)
    update, report = run(federation, optimizer)
    ((rows, _, _),) = federation.server.aggregator.calls
    torch.testing.assert_close(update, rows.quantile(0.5, dim=0), rtol=1e-12, atol=1e-14)
    assert report["privacy/clip_norm"] == 0.05
    assert report["train/cohort"] == 3


@pytest.mark.slow
def test_an_aggregator_sees_released_values_only():
    adversary = Adversary(SignFlipping(), ids=[2, 4], knowledge="own")
    federation, optimizer = build(
        privacy=in_buckets(), aggregator=Recorder(), adversary=adversary, sampler=Poisson(0.5)
    )
    for round, cohort in enumerate(([], range(8), [2, 4])):
        set_cohort(federation, *cohort)
        broadcast = model_row(federation).clone()
        run(federation, optimizer, round)
        rows, weights, context = federation.server.aggregator.calls[-1]
        assert rows.shape == (COUNT, len(broadcast))
        assert weights.tolist() == [1] * COUNT
        assert torch.equal(context.broadcast, broadcast)
        own = RoundContext(0, round, num_byzantine=1, clients=torch.arange(COUNT))
        losses = ("losses", "start_losses", "group_counts")
        for name in ("clients", *losses, "attackers", "observed", "root"):
            assert torch.equal(getattr(context, name), getattr(own, name)), name
        numbers = ("seed", "round", "num_byzantine", "num_samples")
        for name in (*numbers, "net", "samples", "simulate_merge"):
            assert getattr(context, name) == getattr(own, name), name


@pytest.mark.slow
def test_events_of_the_aggregator_are_events_of_buckets():
    federation, optimizer = build(
        privacy=in_buckets(4), pre_aggregators=[Clipping(1e-6)], aggregator=Median()
    )
    set_cohort(federation, 1, 3)
    report = run(federation, optimizer)[1]
    assert report["train/clipped_buckets"] == 4
    assert report["train/clipped"] <= 2


def test_assumed_byzantine_buckets_are_a_minority_and_a_larger_number_is_announced():
    context = RoundContext()
    for count, expected, assumed in ((8, 2, 2), (8, 3, 3), (8, 16, 3), (3, 1, 1), (2, 1, 0)):
        assert Buckets(count, 0).build_context(context, expected).num_byzantine == assumed
    adversary = Adversary(SignFlipping(), ids=[0, 1, 2, 3, 4, 5], knowledge="own")
    with pytest.warns(UserWarning, match=r"buckets` = 4 is below 7 for 3 expected .*assumes 1"):
        build(privacy=in_buckets(4), aggregator=TrimmedMean(), adversary=adversary)


class NoisyFedAvg(FedAvg):
    """Client 3 sends a long upload, client 5 NaN."""

    def end_round(self, client):
        upload = super().end_round(client)
        upload = torch.where(client.ids[:, None] == 3, 1e9, upload)
        return torch.where(client.ids[:, None] == 5, torch.nan, upload)


@pytest.mark.filterwarnings("ignore:pl_fed left out the uploads")
@pytest.mark.slow
def test_engines_agree_also_with_broken_and_long_uploads():
    client = NoisyFedAvg(seeded(mlp), optimizer=sgd(0.1), local_steps=2)
    models = []
    for engine in (EngineOptions("one_by_one"), EngineOptions("stacked", chunk_size=3)):
        federation, optimizer = build(
            client,
            in_buckets(4, target_quantile=0.5),
            aggregator=GeometricMedian(),
            sampler=Poisson(0.7),
            engine=engine,
        )
        for round in range(3):
            run(federation, optimizer, round)
        models.append(model_row(federation).clone())
    torch.testing.assert_close(models[1], models[0], rtol=1e-10, atol=1e-12)


def test_adaptive_clipping_moves_as_with_one_sum():
    norms = []
    for options in ({}, {"buckets": 4}):
        privacy = build_privacy(private(target_quantile=0.5, **options), All(), 8, seed=0)
        protect(privacy, torch.randn(4, NUMEL), [0, 1, 2, 3])
        norms.append(privacy.clip_norm)
    assert norms[0] == norms[1] != 0.05


@pytest.mark.slow
def test_stopped_and_resumed_run_is_bit_equal_also_with_a_memory_of_the_aggregator():
    options = {"privacy": in_buckets(), "aggregator": CenteredClipping(tau=0.02)}
    client = Ditto(seeded(mlp), optimizer=sgd(0.1))
    federation, optimizer = build(client, **options)
    for round in range(2):
        run(federation, optimizer, round)
    saved, model = federation.state_dict(), model_row(federation).clone()
    saved["server"]["aggregator"] = {
        name: buffer.clone() for name, buffer in saved["server"]["aggregator"].items()
    }
    expected, report = run(federation, optimizer, 2)
    resumed, optimizer = build(client, **options)
    resumed.load_state_dict(saved)
    model_row(resumed).copy_(model)
    update, resumed_report = run(resumed, optimizer, 2)
    assert torch.equal(update, expected)
    assert resumed_report["privacy/epsilon"] == report["privacy/epsilon"]


def test_resume_with_another_number_of_buckets_is_refused():
    saved = build(privacy=in_buckets(), aggregator=Median())[0].state_dict()
    for other, words in ((in_buckets(4), "4"), (private(), "None")):
        aggregator = Median() if other.buckets else Mean()
        with pytest.raises(ValueError, match=rf"`buckets` = {words} but got one with 3"):
            build(privacy=other, aggregator=aggregator)[0].load_state_dict(saved)


@pytest.mark.slow
def test_epsilon_is_that_of_one_sum():
    federation, optimizer = build(privacy=in_buckets(), aggregator=Median())
    for round in range(2):
        report = run(federation, optimizer, round)[1]
    accountant = PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(1.0))
    accountant.compose(event, 2)
    assert report["privacy/epsilon"] == pytest.approx(accountant.get_epsilon(0.01), rel=1e-9)
    assert "the global models and the noisy sums of 3 buckets" in federation.privacy_statement()


def by_root():
    return shared_out(classes(SIZES), root_samples=4)


REFUSED = {
    "mean": ({}, "an aggregator other than a mean .* but got Mean: the mean of 3 noisy sums"),
    "tilt 0": ({"aggregator": TiltedMean()}, "but got TiltedMean: .* √3 times the noise"),
    "losses": ({"aggregator": KLoss()}, "but got KLoss, which reads the clients' losses: use, for"),
    "root": ({"aggregator": FLTrust(), "data": by_root()}, "but got FLTrust, which reads the sam"),
    "samples": (
        {"aggregator": GeometricMedian(weighting="samples")},
        "`weighting` of GeometricMedian to be 'uniform' .* but got 'samples'",
    ),
    "too many": (
        {"aggregator": Median(), "privacy": in_buckets(5)},
        "privacy.buckets` to be at most the expected cohort of 4 clients but got 5: set a smaller",
    ),
    "too few": (
        {"aggregator": Bulyan(1)},
        "at least 7 rows for Bulyan but got 3: .*; the rows are the sums of .*buckets` = 3.",
    ),
}


@table_test(("settings", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_function_of_the_rows_is_refused_before_training(settings, words):
    with pytest.raises(ValueError, match=words):
        build(**{"privacy": in_buckets(), **settings})


WRONG = {
    "one": ({"buckets": 1}, "`federation.privacy.buckets` to be at least 2 but got 1"),
    "share": ({"buckets": 2.5}, "`federation.privacy.buckets` to be an integer"),
    "correlated": ({"buckets": 4, "min_separation": 3}, "Expected no `federation.privacy.buckets`"),
}


@table_test(("options", "words"), WRONG.values(), ids=WRONG)
def test_wrong_options_are_refused(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        DifferentialPrivacy(clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, **options)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [Uniform(5), All()], ids=["Uniform", "All"])
def test_other_samplers_run(sampler):
    federation, optimizer = build(privacy=in_buckets(), aggregator=Median(), sampler=sampler)
    assert run(federation, optimizer)[1]["privacy/epsilon"] > 0


@pytest.mark.slow
def test_silent_rows_are_the_sums_of_a_round():
    federation, optimizer = build(privacy=in_buckets(), aggregator=Recorder())
    set_cohort(silence(federation), 0, 1, 2, 3, 4)
    run(federation, optimizer)
    one_sum, other = build(privacy=private())
    set_cohort(silence(one_sum), 0, 1, 2, 3, 4)
    rows = federation.server.aggregator.calls[0][0]
    torch.testing.assert_close(rows.mean(0), run(one_sum, other)[0], rtol=1e-10, atol=1e-12)
