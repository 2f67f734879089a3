"""Compressed uploads: memory, engines, attackers, privacy, resumes and refusals in whole rounds."""

import copy
import csv
import functools
import json
import math
import warnings

import numpy as np
import pytest
import torch
from contract_suite import find_configurations
from equal_trials import trials_skipped
from further_cases import mark_if
from small_federations import (
    Cohorts,
    HalfSquares,
    Point,
    classes,
    mlp,
    reals,
    run_rounds,
    seeded,
    sgd,
    shared_out,
)
from torch import nn
from torch.testing import assert_close

import pl_fed
import pl_fed.compressors
from pl_fed.aggregators import Aggregator, Krum, Mean, Median, PreAggregator, PreparedUploads
from pl_fed.attacks import Attack, LargeLoss, SignFlipping
from pl_fed.clients import FLAME, IFCA, L2SGD, Ditto, FedAvg, FedPer, Local, LpProj, Mocha, Scaffold
from pl_fed.compressors import (
    QSGD,
    Compressor,
    NaturalCompression,
    PowerSGD,
    RandomK,
    SignSGD,
    TopK,
)
from pl_fed.nets.rows import RowLayout
from pl_fed.preflight.compression_rules import warn_of_codec_memory
from pl_fed.privacy import DifferentialPrivacy
from pl_fed.rounds import upload_channel
from pl_fed.samplers import All, Poisson, Uniform

SIZES = [9, 4, 6, 11, 5, 8]
TRIAL_LENGTH = 64  # of the uploads on which a federation tries its aggregator
ARGUMENTS = {
    "TopK": [{"k": 9}, {"k": 9, "error_feedback": False}],
    "RandomK": [{"k": 9}, {"k": 9, "error_feedback": False}],
    "PowerSGD": [{"rank": 1}],
    "QSGD": [{"levels": 3}],
}
CODECS = find_configurations(pl_fed.compressors, Compressor, ARGUMENTS)


def data(**options):
    return shared_out(classes(SIZES), **options)


def run(codec, kind=FedAvg, net=mlp, rounds=4, sampler=None, **settings):
    client = kind(seeded(net), optimizer=sgd(), local_steps=2)
    sampler = Uniform(4) if sampler is None else sampler
    return run_rounds(
        client, data(drop_last=True), rounds, sampler=sampler, compression=codec, **settings
    )


class Recorded(Mean):
    """The mean; it stores the uploads of each round, and the ids of their clients."""

    def __init__(self):
        super().__init__()
        self.rounds = []

    def __deepcopy__(self, memo):
        return self  # a federation copies its aggregator

    def forward(self, uploads, weights, context):
        if uploads.shape[1] != TRIAL_LENGTH:
            self.rounds.append((context.clients.clone(), uploads.clone()))
        return super().forward(uploads, weights, context)


# Numbers


def test_top_k_with_error_feedback_equals_numpy():
    """FedAvg with EF-top-2 of six clients, four a round, written in plain NumPy."""
    rng = np.random.default_rng(0)
    d, k, lr, steps = 7, 2, 0.3, 3
    samples = [rng.normal(size=(size, d)) for size in (3, 2, 4, 1, 2, 3)]
    cohorts = [[0, 1, 2, 3], [2, 3, 4, 5], [0, 2, 3, 5], [1, 2, 4, 5], [0, 1, 4, 5], [0, 1, 2, 3]]
    y = torch.tensor(np.concatenate(samples))
    owner = [client for client, rows in enumerate(samples) for _ in rows]
    client = FedAvg(Point(d), optimizer=sgd(lr), local_steps=steps, criterion=HalfSquares())
    outcome = run_rounds(
        client,
        shared_out(reals(torch.zeros(len(y), 1), y, owner), batch_size=8),
        rounds=len(cohorts),
        sampler=Cohorts(*cohorts),
        compression=TopK(k),
    )
    w, memory = np.zeros(d), np.zeros((6, d))
    for cohort in cohorts:
        sent = np.zeros((4, d))
        for place, member in enumerate(cohort):
            model = w.copy()
            for _ in range(steps):
                model -= lr * (model - samples[member].mean(0))
            target = model - w + memory[member]
            chosen = np.argsort(-np.abs(target))[:k]
            sent[place, chosen] = target[chosen]
            memory[member] = target - sent[place]
        w += sent.mean(0)
    np.testing.assert_allclose(outcome.w.numpy(), w, rtol=0, atol=1e-10)
    np.testing.assert_allclose(outcome.states["compression.error"], memory, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_a_codec_that_sends_everything_changes_no_bit():
    for dtype in (torch.float64, torch.float32):
        expected, outcome = (run(codec, Ditto, dtype=dtype) for codec in (None, TopK(1.0)))
        assert torch.equal(outcome.w, expected.w)
        assert torch.equal(outcome.v, expected.v)
        assert not outcome.states["compression.error"].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [mark_if(kind in [k for k, _ in CODECS[:i]], kind, a) for i, (kind, a) in enumerate(CODECS)],
)
def test_engines_and_chunks_agree(kind, arguments):
    codec = kind(**arguments)
    stacks = {"engine": "stacked"}, {"engine": "stacked", "chunk_size": 3}
    for algorithm, choices in ((Ditto, stacks), (FedPer, (stacks[1], {"chunk_size": 1}))):
        expected = run(codec, algorithm, rounds=2)  # two of six clients at least return
        for options in choices:
            assert run(codec, algorithm, rounds=2, **options).distance(expected) < 1e-12


class Dropping(Compressor):
    """Drops half of the numbers by torch's own generator, as a codec written elsewhere."""

    def compress(self, rows, sending):
        return 2 * rows * (torch.rand_like(rows) < 0.5)

    def count_bits(self, layout, number_bits):
        return layout.numel


class Remembering(Dropping):
    """Halves a number of its own with each message."""

    scale = 1.0

    def compress(self, rows, sending):
        self.scale /= 2
        return self.scale * rows


def test_draws_of_a_codec_from_global_generators_depend_on_the_client_alone():
    """Neither on other clients nor on draws before: a resumed run has other ones."""
    expected = run(Dropping(), rounds=2, chunk_size=3)
    torch.rand(5)
    assert run(Dropping(), rounds=2, chunk_size=1).distance(expected) == 0
    assert run(Dropping(), rounds=2, seed=1).distance(expected) > 0


def test_codec_with_a_memory_of_its_own_gets_a_warning():
    layout = RowLayout.from_tensors({"weight": torch.zeros(5)}.items())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for codec in (Remembering(), Dropping(), TopK(2)):
            warn_of_codec_memory(codec, layout)
    assert [str(w.message).partition(" of")[0] for w in caught] == ["Remembering"]


@pytest.mark.slow
def test_large_uploads_are_compressed_in_pieces(monkeypatch):
    for codec in (RandomK(9), PowerSGD(1)):
        expected = run(codec, FedPer, engine="stacked")
        monkeypatch.setattr(upload_channel, "_PIECE", 60)  # two of 25 numbers
        assert run(codec, FedPer, engine="stacked").distance(expected) < 1e-12
        monkeypatch.undo()


def test_draws_depend_on_the_round_the_client_and_the_seed():
    recorded = Recorded()
    run(RandomK(9), aggregator=recorded, sampler=All(), rounds=2)
    run(RandomK(9), aggregator=recorded, sampler=All(), rounds=1, seed=1)
    sets = {tuple(row.nonzero().flatten().tolist()) for _, rows in recorded.rounds for row in rows}
    assert len(sets) == 3 * len(SIZES)


@pytest.mark.parametrize("codec", [TopK(9), RandomK(9), SignSGD(), PowerSGD(1)])
@pytest.mark.slow
def test_received_uploads_and_memory_add_up_to_the_uploads(codec):
    """With a model that does not move, the uploads of the run without compression are equal."""
    still = {"server_optimizer": lambda params: torch.optim.SGD(params, lr=0.0)}
    sums, recorded = {}, {}
    for name, compression in (("full", None), ("sent", codec)):
        recorded[name] = Recorded()
        outcome = run(compression, aggregator=recorded[name], rounds=6, **still)
        sums[name] = torch.zeros(len(SIZES), len(outcome.w)).double()
        for clients, rows in recorded[name].rounds:
            sums[name][clients] += rows
    assert_close(sums["sent"] + outcome.states["compression.error"], sums["full"])
    assert not torch.allclose(sums["sent"], sums["full"])


# A client harms only itself; a round happens whole or not at all


class OnceBroken(FedAvg):
    """Client 3 sends infinity in round 2."""

    round = 0

    def end_round(self, client):
        upload = super().end_round(client).clone()
        if self.round == 2:
            upload[client.ids == 3, 1] = math.inf
        return upload


def run_by_hand(federation, client, rounds, before=lambda round: None):
    with trials_skipped():
        federation.setup(client, data(), "fit")
    client.train()
    optimizer, reports, memories = client.configure_optimizers(), [], []
    for round in range(rounds):
        client.round = round
        before(round)
        reports.append(federation.run_round(round, optimizer))
        store = federation.store
        everyone = torch.arange(len(SIZES))
        memories.append(
            {name: store.read(name, everyone) for name in store.defaults if "compr" in name}
        )
    return reports, memories


@pytest.mark.parametrize("codec", [TopK(9), PowerSGD(1), SignSGD()])
def test_a_broken_upload_stays_broken_and_keeps_its_memory(codec):
    results = {}
    for kind in (FedAvg, OnceBroken):
        client = kind(seeded(mlp), optimizer=sgd(), local_steps=2).double()
        federation = pl_fed.Federation(All(), compression=copy.deepcopy(codec), seed=0)
        results[kind] = run_by_hand(federation, client, 3)
    reports, memories = results[OnceBroken]
    assert reports[2]["train/rejected"] == 1
    others = [0, 1, 2, 4, 5]
    for name in memories[0]:
        before, after, healthy = memories[1][name], memories[2][name], results[FedAvg][1][2][name]
        assert torch.equal(after[3], before[3])
        assert not torch.equal(healthy[3], before[3])
        assert torch.equal(after[others], healthy[others])


def test_a_skipped_round_keeps_all_memory():
    """Krum needs more uploads than round 1 has; neither the model nor the memory changes."""
    client = FedAvg(seeded(mlp), optimizer=sgd(), local_steps=2).double()
    sampler = Cohorts([0, 1, 2, 3, 4], [0, 1], [0, 1, 2, 3, 4])
    sampler.has_fixed_size, sampler.draw = False, sampler.sample
    sampler.draw_round = lambda round, *_: torch.tensor([[0, 1, 2, 3, 4], [0, 1]][round])
    federation = pl_fed.Federation(sampler, Krum(), compression=TopK(9), seed=0)
    rows = []
    _, memories = run_by_hand(
        federation, client, 2, before=lambda _: rows.append(client.row("global").data.clone())
    )
    assert torch.equal(client.row("global").data, rows[1])
    assert memories[0]["compression.error"].any()
    assert torch.equal(memories[0]["compression.error"], memories[1]["compression.error"])


def test_clients_outside_of_all_cohorts_keep_no_row():
    client = FedAvg(seeded(mlp), optimizer=sgd()).double()
    federation = pl_fed.Federation(Cohorts([0, 2, 5]), compression=TopK(9), seed=0)
    run_by_hand(federation, client, 2)
    assert federation.store.state_dict()["compression.error"]["clients"].tolist() == [0, 2, 5]


# Attackers send through the same channel


class Predicting(Attack):
    """Forges full rows, and notes the merge that the attackers simulate."""

    def __init__(self):
        self.predicted = []

    def __deepcopy__(self, memo):
        return self

    def forge(self, honest, own, context):
        forged = -3 * honest.mean(0).expand_as(own) + 0.1
        self.predicted.append(context.simulate_merge(forged))
        return forged


@pytest.mark.slow
def test_forged_uploads_are_what_the_codec_carries():
    for attack, codec in ((SignFlipping(), TopK(9)), (SignFlipping(), RandomK(9))):
        recorded = Recorded()
        run(codec, aggregator=recorded, sampler=All(), attack=attack, ids=[1, 4])
        for _, rows in recorded.rounds:
            assert ((rows != 0).sum(1) <= 9).all()


@pytest.mark.slow
def test_attackers_simulate_the_merge_with_the_codec():
    for codec in (TopK(9), QSGD(2), PowerSGD(1)):
        attack, recorded = Predicting(), Recorded()
        run(codec, aggregator=recorded, sampler=All(), attack=attack, ids=[1, 4], rounds=2)
        merged = [rows.mean(0) for _, rows in recorded.rounds]  # simulations are recorded, too
        for predicted, actual in zip(attack.predicted, merged[1::2], strict=True):
            assert_close(predicted, actual)


def test_an_upload_that_its_attacker_leaves_as_it_is_is_compressed_once():
    for codec in (RandomK(9, error_feedback=False), QSGD(2)):
        honest = run(codec, sampler=All(), rounds=1)
        outcome = run(codec, sampler=All(), rounds=1, attack=LargeLoss(3.0), ids=[1, 4])
        assert torch.equal(outcome.w, honest.w)


@pytest.mark.slow
def test_a_multiple_of_an_own_upload_is_the_multiple_of_its_message():
    """By its draws, a second compression would have lengthened RandomK's rows by d/k again."""
    for codec in (RandomK(9, error_feedback=False), QSGD(2), NaturalCompression()):
        honest, flipped = Recorded(), Recorded()
        for aggregator, attack in ((honest, {}), (flipped, {"attack": SignFlipping(3.0)})):
            ids = {"ids": [1, 4]} if attack else {}
            run(codec, sampler=All(), rounds=1, aggregator=aggregator, **attack, **ids)
        (_, sent), (_, forged) = honest.rounds[0], flipped.rounds[0]
        factors = torch.tensor([1.0, -3.0, 1.0, 1.0, -3.0, 1.0], dtype=sent.dtype)
        assert_close(forged, sent * factors[:, None], rtol=1e-14, atol=0)


class BreakingAttack(Attack):
    def forge(self, honest, own, context):
        return own.clone().fill_(math.nan)


def test_a_forged_upload_that_is_not_finite_is_left_out():
    reports = run(QSGD(), sampler=All(), attack=BreakingAttack(), ids=[1, 4]).reports
    assert [report["train/rejected"] for report in reports] == [2.0] * 4


# Parts that do not cross the network


@pytest.mark.slow
def test_parts_that_clients_keep_use_no_bit_of_a_message():
    for codec in (TopK(5), RandomK(5), QSGD(), SignSGD(), PowerSGD(1), NaturalCompression()):
        recorded = Recorded()
        outcome = run(codec, FedPer, aggregator=recorded, rounds=1)
        layout = FedPer(seeded(mlp)).sent_layout
        assert layout.names == ("0.weight", "0.bias")
        assert all(not rows[:, layout.numel :].any() for _, rows in recorded.rounds)
        assert all(rows[:, : layout.numel].any(1).all() for _, rows in recorded.rounds)
        sent = -(-codec.count_bits(layout, 64) // 8)
        assert outcome.reports[0]["train/upload_bytes"] == 4 * sent


def batch_norm_net():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def test_statistics_and_server_states_are_sent_in_full():
    d, statistics = 20 + 5 + 10 + 15 + 3, 10
    message = (9 * 64 + min(9 * 6, d) + 7) // 8
    report = run(TopK(9), Scaffold, batch_norm_net, rounds=1).reports[0]
    assert report["train/upload_bytes"] == 4 * (message + 8 * (statistics + d))
    assert report["train/download_bytes"] == 4 * 8 * (d + statistics + d)


# Bytes of all rounds


def trainer(folder, federation, rounds, **arguments):
    return pl_fed.Trainer(
        federation, max_epochs=rounds, run_dir=folder, accelerator="cpu",
        num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False, **arguments,
    )  # fmt: skip


def read_bytes(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [
            [float(row[name]) for name in ("train/upload_bytes", "bytes/up", "bytes/down")]
            for row in csv.DictReader(file)
            if row["bytes/up"]
        ]


@pytest.mark.slow
def test_bytes_add_up_over_rounds_also_after_a_resume(tmp_path):
    ends = {}
    for name, stops in (("through", [4]), ("resumed", [2, 4])):
        checkpoint = None
        for rounds in stops:
            client = Ditto(seeded(mlp), optimizer=sgd(), local_steps=2)
            federation = pl_fed.Federation(Poisson(0.6), compression=TopK(9), seed=0)
            fit = trainer(tmp_path / name, federation, rounds)
            fit.fit(client, data(), ckpt_path=checkpoint)
            checkpoint = tmp_path / name / "checkpoints" / "last.ckpt"
        everyone = torch.arange(len(SIZES))
        ends[name] = (
            client.row("global").data.clone(),
            *(federation.store.read(key, everyone) for key in sorted(federation.store.defaults)),
        )
    assert all(torch.equal(a, b) for a, b in zip(ends["through"], ends["resumed"], strict=True))
    table = read_bytes(tmp_path / "resumed")
    assert table == read_bytes(tmp_path / "through")
    assert [row[1] for row in table] == np.cumsum([row[0] for row in table]).tolist()
    assert len({row[0] for row in table}) > 1, "cohorts of several sizes"
    summary = json.loads((tmp_path / "resumed" / "summary.json").read_text())["counts"]
    assert [summary["bytes_up"], summary["bytes_down"]] == table[-1][1:]
    message = summary["upload_bytes"]
    assert message == (9 * 32 + 43 + 7) // 8  # 9 numbers, and a bit for each coordinate
    assert all(row[0] % message == 0 for row in table)


def test_clients_that_drop_out_download_and_do_not_upload():
    """With a dropout of 0.5, uploads follow the participants, and the totals the rounds."""
    reports = run(SignSGD(), rounds=6, systems=pl_fed.systems.Systems(dropout=0.5)).reports
    message, model = (43 + 64 + 7) // 8, 43 * 8
    uploads = [report["systems/participants"] * message for report in reports]
    assert [report["train/upload_bytes"] for report in reports] == uploads
    assert [report["train/download_bytes"] for report in reports] == [4 * model] * 6
    assert float(reports[-1]["bytes/up"]) == sum(uploads) < 6 * 4 * message
    assert float(reports[-1]["bytes/down"]) == 6 * 4 * model


@pytest.mark.slow
def test_power_sgd_resumes_bit_for_bit(tmp_path):
    ends = []
    for stops in ([4], [1, 3, 4]):
        checkpoint = None
        for rounds in stops:
            client = FedAvg(seeded(mlp), optimizer=sgd(), local_steps=2)
            federation = pl_fed.Federation(Uniform(3), compression=PowerSGD(1), seed=0)
            folder = tmp_path / str(len(stops))
            trainer(folder, federation, rounds).fit(client, data(), ckpt_path=checkpoint)
            checkpoint = folder / "checkpoints" / "last.ckpt"
        ends.append(client.row("global").data.clone())
    assert torch.equal(*ends)


@pytest.mark.slow
def test_a_checkpoint_of_another_compression_is_refused(tmp_path):
    settings = {"topk": TopK(9), "power": PowerSGD(1), "none": None}
    for name, codec in settings.items():
        federation = pl_fed.Federation(Uniform(3), compression=codec, seed=0)
        client = FedAvg(seeded(mlp), optimizer=sgd())
        trainer(tmp_path / name, federation, 1).fit(client, data())
    for saved, own in (("topk", "power"), ("none", "topk"), ("topk", "none")):
        federation = pl_fed.Federation(Uniform(3), compression=settings[own], seed=0)
        client = FedAvg(seeded(mlp), optimizer=sgd())
        checkpoint = tmp_path / saved / "checkpoints" / "last.ckpt"
        with pytest.raises(ValueError, match=r"set `federation.compression` as in its run"):
            trainer(tmp_path / "other", federation, 2).fit(client, data(), ckpt_path=checkpoint)


# Privacy


def private(**options):
    return DifferentialPrivacy(
        clip_norm=0.05, noise_multiplier=1.0, delta=0.01, noise_seed=0, **options
    )


@pytest.mark.slow
def test_the_server_clips_what_it_receives(monkeypatch):
    pytest.importorskip("dp_accounting")
    from pl_fed.rounds.privacy import RoundPrivacy

    received, protect = [], RoundPrivacy.protect

    def watch(self, uploads, share, note):
        received.append(uploads.clone())
        return protect(self, uploads, share, note)

    monkeypatch.setattr(RoundPrivacy, "protect", watch)
    settings = {"sampler": Poisson(0.6), "privacy": private()}
    outcome = run(TopK(9), Ditto, **settings)
    assert all(((rows != 0).sum(1) <= 9).all() for rows in received)
    assert max(float(rows.norm(dim=1).max()) for rows in received if len(rows)) > 0.05
    assert outcome.w.isfinite().all()
    stacked = run(TopK(9), Ditto, engine="stacked", **settings)
    assert outcome.distance(stacked) < 1e-12


@pytest.mark.slow
def test_memory_counts_as_a_state_for_amplification():
    pytest.importorskip("dp_accounting")
    with pytest.raises(ValueError, match=r"Poisson for FedAvg, .* \(compression.error\)"):
        run(TopK(9), sampler=Uniform(3), privacy=private())
    run(QSGD(), sampler=Uniform(3), privacy=private(), rounds=1)


# Refusals


class Halving(PreAggregator):
    def sent_numbers(self, numbers):
        return numbers // 2

    def forward(self, uploads, weights, context):
        return PreparedUploads(uploads, weights, context)


FULL = {"sampler": All()}
PART = {"sampler": Uniform(3)}
REFUSED = {
    "nothing is sent": (QSGD(), Local, PART, "sends uploads .* but got Local, which sends nothing"),
    "all parts are kept": (
        QSGD(),
        functools.partial(FedPer, own=["0", "2"]),
        PART,
        "sends parameters .* but got FedPer, which sends none",
    ),
    "a projection": (
        QSGD(),
        functools.partial(LpProj, dimensions=3),
        FULL,
        "LpProj, which sends a projection",
    ),
    "models with feedback": (TopK(3), FLAME, FULL, "without error feedback .* of FLAME .* twice"),
    "changes without feedback": (QSGD(), L2SGD, PART, "with error feedback .* of L2SGD"),
    "feedback for one of several models": (
        TopK(3),
        IFCA,
        PART,
        "without error feedback .* of IFCA, whose server keeps several models, but got TopK",
    ),
    "always changes": (TopK(3, False), Mocha, FULL, "with error feedback .* of Mocha"),
    "k above d": (TopK(44), FedAvg, PART, "`k` to be at most 43 but got 44"),
    "k above d of the shared part": (RandomK(26), FedPer, PART, "`k` to be at most 25 but got 26"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsound_compression_is_refused_with_one_sentence(name):
    codec, kind, settings, words = REFUSED[name]
    with pytest.raises(ValueError, match=f"^Expected .*{words}") as refusal:
        run(codec, kind, rounds=1, **settings)
    assert str(refusal.value).count("\n") == 0


class Halved(FedAvg):
    """Clients send half of the numbers, and the algorithm does not tell which."""

    @property
    def shared_numbers(self):
        return super().shared_numbers // 2


def test_an_algorithm_that_sends_fewer_numbers_names_them():
    with pytest.raises(ValueError, match=r"`sent_layout` of Halved to have at most the 21 numbers"):
        run(QSGD(), Halved, rounds=1)


def test_two_compressions_are_refused():
    with pytest.raises(ValueError, match=r"do not shorten uploads .* but got one that does"):
        run(TopK(9), pre_aggregators=[Halving()])


def test_compression_of_another_type_is_refused():
    with pytest.raises(TypeError, match="`compression` to be an object of a subclass of Compresso"):
        pl_fed.Federation(compression="TopK")


@pytest.mark.parametrize(
    ("kind", "codec", "sampler"),
    [
        (FLAME, QSGD(7), All()),
        (IFCA, QSGD(7), Uniform(3)),
        (IFCA, TopK(9, error_feedback=False), All()),
        (FLAME, TopK(9, error_feedback=False), All()),
        (FLAME, TopK(9), Uniform(3)),
        (L2SGD, SignSGD(), Uniform(3)),
        (Mocha, PowerSGD(1), All()),
        (Scaffold, RandomK(9), Uniform(3)),
    ],
)
def test_sound_combinations_train(kind, codec, sampler):
    outcome = run(codec, kind, sampler=sampler, aggregator=Median())
    losses = [float(report["train/loss"]) for report in outcome.reports]
    assert all(map(math.isfinite, losses))


def test_the_global_model_lags_the_mean_of_all_rows_by_the_memory():
    """L2SGD: w + mean of memory is the mean of the rows that clients keep, as without a codec."""
    outcome = run(TopK(9), L2SGD, rounds=8, sampler=Uniform(3))
    lag = outcome.states["compression.error"].mean(0)
    # an upload is share · change, so that the mean over clients has the weight 1 / cohort
    assert_close(outcome.w + lag * len(SIZES) / 3, outcome.states["personal"].mean(0))


def test_aggregators_see_rows_of_the_whole_length():
    class Lengths(Aggregator):
        def max_byzantine(self, num_uploads):
            return 0

        def forward(self, uploads, weights, context):
            assert uploads.shape[1] == 43
            return uploads.mean(0)

    run(SignSGD(), aggregator=Lengths(), rounds=1)
