"""A round with privacy: the exact update, the fixed denominator, the budget, and its refusals."""

import math
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from equal_trials import trials_skipped
from lightning import LightningModule
from lightning.pytorch.callbacks import Timer
from private_rounds import SIZES, build, model_row, private, run, set_cohort, silence
from small_federations import classes, mlp, seeded, sgd, shared_out
from tables import table_test

pytest.importorskip("dp_accounting", reason="the extra pl_fed[privacy] is not installed")

import dp_accounting

from pl_fed import Adversary, EngineOptions, Federation, Trainer
from pl_fed.aggregators import Clipping, Krum, Mean, Median
from pl_fed.attacks import (
    ALittleIsEnough,
    Attack,
    Combined,
    ConstrainedReplacement,
    FairnessAttack,
    ModelReplacement,
    RandomLabels,
    SignFlipping,
)
from pl_fed.clients import Ditto, FedAvg, FedBN, Local, Scaffold
from pl_fed.distributed.processes import Processes
from pl_fed.distributed.work_share import WorkShare
from pl_fed.functional.privacy import root_coefficients
from pl_fed.lightning.compatibility import check_private_monitors, warn_of_published_seed
from pl_fed.random import key, normal_row
from pl_fed.rounds.privacy import build_privacy
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import All, BySize, Cyclic, Poisson, Uniform


def uploads_of(clients):
    """Return the uploads of a round without privacy, [clients, numel]."""
    rows = []
    for client in clients:
        federation, optimizer = build(privacy=private(clip_norm=1e9))
        set_cohort(silence(federation), client)
        rows.append(4 * run(federation, optimizer)[0])
    return torch.stack(rows)


@pytest.mark.slow
def test_update_is_the_sum_of_clipped_uploads_and_noise_by_the_expected_cohort():
    federation, optimizer = build()
    set_cohort(federation, 1, 3, 6)
    update, report = run(federation, optimizer)
    uploads = uploads_of([1, 3, 6])
    norms = uploads.norm(dim=1)
    clipped = uploads * (0.05 / norms).clamp(max=1)[:, None]
    noise = 0.05 * normal_row(key(0, "privacy noise", 0), uploads.shape[1])
    torch.testing.assert_close(update, (clipped.sum(0) + noise) / 4, rtol=1e-12, atol=1e-14)
    assert report["train/clipped"] == int((norms > 0.05).sum()) > 0
    assert report["privacy/clip_norm"] == 0.05
    assert report["train/cohort"] == 3


def test_empty_cohort_releases_noise_and_spends_budget():
    federation, optimizer = build()
    set_cohort(federation)
    update, report = run(federation, optimizer)
    noise = 0.05 * normal_row(key(0, "privacy noise", 0), len(update))
    torch.testing.assert_close(update, noise / 4, rtol=1e-12, atol=1e-14)
    assert report["train/cohort"] == 0
    assert "train/loss" not in report
    expected, optimizer = build()
    assert report["privacy/epsilon"] == run(expected, optimizer)[1]["privacy/epsilon"] > 0


class BrokenFedAvg(FedAvg):
    """Client 3 sends NaN."""

    def end_round(self, client):
        upload = super().end_round(client)
        return torch.where(client.ids[:, None] == 3, torch.nan, upload)


@pytest.mark.filterwarnings("ignore:pl_fed left out the uploads")
def test_broken_uploads_count_as_zero_and_never_stop_the_run():
    """The denominator stays, and so does the noise: an observer cannot see the broken client."""
    broken, optimizer = build(BrokenFedAvg(seeded(mlp), optimizer=sgd(0.1)), max_rejected=0.0)
    set_cohort(broken, 1, 3)
    without, other = build()
    set_cohort(without, 1)
    torch.testing.assert_close(run(broken, optimizer)[0], run(without, other)[0])


@pytest.mark.slow
def test_engines_and_chunks_agree():
    client = Ditto(seeded(mlp), optimizer=sgd(0.1), local_steps=2)
    updates = []
    for engine in (
        EngineOptions("one_by_one"),
        EngineOptions("stacked"),
        EngineOptions("stacked", chunk_size=2),
    ):
        federation, optimizer = build(client, engine=engine)
        for round in range(3):
            run(federation, optimizer, round)
        updates.append(model_row(federation).clone())
    for update in updates[1:]:
        torch.testing.assert_close(update, updates[0], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_noise_of_a_simulated_cohort_is_smaller_and_its_epsilon_has_another_name():
    simulated = private(delta=1e-5, noise_cohort_size=400, population=8000)
    federation, optimizer = build(privacy=simulated)
    set_cohort(federation)
    update, report = run(federation, optimizer)
    noise = 0.05 * normal_row(key(0, "privacy noise", 0), len(update))
    torch.testing.assert_close(update, noise / 400, rtol=1e-12, atol=1e-14)
    assert "privacy/epsilon" not in report
    accountant = federation.session.rounds.privacy.accountant
    assert accountant.participation.rate == 0.05
    assert report["privacy/simulated_epsilon"] == accountant.epsilon(1.0, 1)
    assert "of a simulated federation with cohorts of 400 out of 8000 clients, not of this run" in (
        federation.privacy_statement()
    )


def test_adaptive_clipping_follows_the_noisy_quantile():
    settings = private(target_quantile=0.5, quantile_share=0.19, clip_lr=0.3)
    federation, optimizer = build(privacy=settings)
    set_cohort(federation, 1, 3, 6)
    update, report = run(federation, optimizer)
    uploads = uploads_of([1, 3, 6])
    norms = uploads.norm(dim=1)
    update_noise, count_noise = 1 / math.sqrt(0.81), 1 / (2 * math.sqrt(0.19))
    noise = update_noise * 0.05 * normal_row(key(0, "privacy noise", 0), uploads.shape[1])
    clipped = uploads * (0.05 / norms).clamp(max=1)[:, None]
    torch.testing.assert_close(update, (clipped.sum(0) + noise) / 4, rtol=1e-12, atol=1e-14)
    draw = float(normal_row(key(0, "privacy quantile", 0), 1))
    below = (float((norms <= 0.05).sum()) - 1.5 + count_noise * draw) / 4 + 0.5
    expected = 0.05 * math.exp(-0.3 * (below - 0.5))
    assert federation.session.rounds.privacy.clip_norm == pytest.approx(expected, rel=1e-12)
    assert report["privacy/clip_norm"] == 0.05


def test_adaptive_clipping_costs_no_more_than_its_noise_multiplier():
    plain, optimizer = build()
    adaptive, other = build(privacy=private(target_quantile=0.5))
    epsilons = [
        run(*parts)[1]["privacy/epsilon"] for parts in ((plain, optimizer), (adaptive, other))
    ]
    assert epsilons[0] == epsilons[1]


@pytest.mark.slow
def test_stopped_and_resumed_budget_continues():
    settings = private(target_quantile=0.5)
    federation, optimizer = build(privacy=settings)
    for round in range(2):
        run(federation, optimizer, round)
    saved, model = federation.state_dict(), model_row(federation).clone()
    expected, report = run(federation, optimizer, 2)
    resumed, optimizer = build(privacy=settings)
    resumed.load_state_dict(saved)
    model_row(resumed).copy_(model)
    update, own_report = run(resumed, optimizer, 2)
    assert torch.equal(update, expected)
    for name in ("privacy/epsilon", "privacy/clip_norm"):
        assert own_report[name] == report[name]


OTHER_SETTINGS = {
    "delta": (private(delta=0.02), "`delta` = 0.02 but got one with 0.01"),
    "noise": (private(noise_multiplier=2.0), "`noise_multiplier` = 2.0 but got one with 1.0"),
    "norm": (private(clip_norm=1.0), "`clip_norm` = 1.0 but got one with 0.05"),
}


@table_test(("settings", "words"), OTHER_SETTINGS.values(), ids=OTHER_SETTINGS)
def test_resume_with_other_privacy_settings_is_refused(settings, words):
    federation, _ = build()
    other, _ = build(privacy=settings)
    with pytest.raises(ValueError, match=words):
        other.load_state_dict(federation.state_dict())


@pytest.mark.slow
def test_resume_with_another_sampler_or_without_privacy_is_refused():
    saved = build()[0].state_dict()
    other, _ = build(sampler=Poisson(0.25))
    with pytest.raises(ValueError, match=r"`federation.privacy` and `sampling` = Participation"):
        other.load_state_dict(saved)
    plain = Federation(Poisson(0.5), seed=0)
    client = FedAvg(seeded(mlp), optimizer=sgd(0.1)).double()
    plain.setup(client, shared_out(classes(SIZES)), "fit")
    with pytest.raises(ValueError, match=r"of a run without `federation.privacy` but got one with"):
        plain.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"of a run with `federation.privacy` but got one without"):
        build()[0].load_state_dict(plain.state_dict())


def test_resume_of_a_target_for_another_number_of_rounds_is_refused():
    target = private(epsilon=9.0, noise_multiplier=None)
    saved = build(privacy=target, sampler=All(), rounds=3)[0].state_dict()
    with pytest.raises(ValueError, match=r"set `federation.privacy.rounds` to 3\."):
        build(privacy=target, sampler=All(), rounds=5)[0].load_state_dict(saved)
    remedy = private(epsilon=9.0, noise_multiplier=None, rounds=3)
    build(privacy=remedy, sampler=All(), rounds=5)[0].load_state_dict(saved)


def test_target_epsilon_determines_noise_and_ends_the_run():
    target = private(epsilon=5.0, noise_multiplier=None, rounds=3)
    federation, optimizer = build(privacy=target, sampler=All(), rounds=10)
    for round in range(3):
        assert not federation.budget_is_spent()
        report = run(federation, optimizer, round)[1]
    assert 5.0 * (1 - 1e-4) < report["privacy/epsilon"] <= 5.0
    assert federation.budget_is_spent()


@pytest.mark.parametrize("has_record", [True, False], ids=["", "of an earlier version"])
def test_evaluated_checkpoint_does_not_extend_the_budget(has_record):
    """An evaluation loads the noise of the run before any fit plans the rounds."""
    target, data = private(epsilon=5.0, noise_multiplier=None), shared_out(classes(SIZES))
    saved = build(privacy=target, sampler=All(), rounds=4, data=data)[0].state_dict()
    if not has_record:
        del saved["privacy"]["max_rounds"]
    federation = Federation(All(), privacy=target, engine=EngineOptions("one_by_one"), seed=0)
    client = fed_avg().double()
    with trials_skipped():
        federation.setup(client, data, "validate")
        federation.load_state_dict(saved)
        federation.setup(client, data, "fit", settings=RunSettings(rounds=100))
        federation.load_state_dict(saved)
    privacy = federation.session.rounds.privacy
    assert privacy.max_rounds == 4
    assert privacy.accountant.epsilon(privacy.noise_multiplier, privacy.max_rounds) <= 5.0


def test_other_sampler_after_the_first_round_is_refused():
    """The accounting of the first rounds is not that of the next ones."""
    data = shared_out(classes(SIZES))
    federation, optimizer = build(sampler=Poisson(0.25), data=data)
    federation.sampler = Poisson(0.5)
    settings = RunSettings(rounds=3)
    with trials_skipped():
        federation.setup(federation.client, data, "fit", settings=settings)
        assert federation.session.rounds.privacy.participation.rate == 0.5
        run(federation, optimizer)
        federation.sampler = Poisson(1.0)
        with pytest.raises(ValueError, match=r"the sampler and `federation\.privacy` to stay"):
            federation.setup(federation.client, data, "fit", settings=settings)
        federation.privacy = None
        with pytest.raises(ValueError, match=r"`federation\.privacy` to stay .* but got None"):
            federation.setup(federation.client, data, "fit", settings=settings)


def test_private_runs_of_one_seed_draw_other_cohorts():
    """Σ ε over runs needs independent cohorts; a checkpoint brings those of its run."""
    sizes = [3] * 60
    runs = [
        build(privacy=private(noise_seed=noise_seed), data=shared_out(classes(sizes)))[0]
        for noise_seed in (1, 2, 1)
    ]
    rounds = [run.session.rounds for run in runs]
    first, second, same = ([r.draw_cohort(t).tolist() for t in range(3)] for r in rounds)
    assert first == same != second
    saved = runs[0].state_dict()
    resumed = build(privacy=private(noise_seed=None), data=shared_out(classes(sizes)))[0]
    saved["privacy"]["settings"]["noise_seed"] = None
    assert resumed.session.rounds.draw_cohort(2).tolist() != first[2]
    resumed.load_state_dict(saved)
    assert resumed.session.rounds.draw_cohort(2).tolist() == first[2]


@pytest.mark.slow
def test_run_stops_before_epsilon_is_exceeded():
    limited = private(stop_at_epsilon=4.0, noise_multiplier=2.0)
    federation, optimizer = build(privacy=limited, sampler=All(), rounds=1000)
    round = 0
    while not federation.budget_is_spent():
        report = run(federation, optimizer, round)[1]
        round += 1
    assert report["privacy/epsilon"] <= 4.0
    assert run(federation, optimizer, round)[1]["privacy/epsilon"] > 4.0


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 4.0, 20.0], ids=str)
def test_further_fits_end_at_the_smaller_budget(limit):
    """A second fit for more rounds reaches neither ``epsilon`` nor ``stop_at_epsilon`` again."""
    target = private(epsilon=5.0, noise_multiplier=None, stop_at_epsilon=limit)
    data, settings = shared_out(classes(SIZES)), RunSettings(rounds=100)
    federation, optimizer = build(privacy=target, data=data, sampler=All(), rounds=4)
    privacy, budget = federation.session.rounds.privacy, min(5.0, limit or 5.0)
    for _ in range(2):
        while not federation.budget_is_spent():
            run(federation, optimizer, privacy.rounds)
        federation.setup(federation.client, data, "fit", settings=settings)
    assert privacy.epsilon() <= budget
    assert privacy.rounds == 4 if budget == 5.0 else privacy.rounds in (2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("ends", [{"stop_at_epsilon": 4.0}, {"epsilon": 4.0, "rounds": 7}], ids=str)
def test_trainer_ends_a_fit_at_the_budget(ends, tmp_path):
    settings = {"noise_multiplier": None if "epsilon" in ends else 2.0, **ends}
    federation = Federation(
        All(), privacy=private(**settings), engine=EngineOptions("one_by_one"), seed=0
    )
    trainer = Trainer(
        federation,
        max_epochs=40,
        default_root_dir=tmp_path,
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(fed_avg(), shared_out(classes(SIZES)))
    privacy = federation.session.rounds.privacy
    assert trainer.current_epoch == privacy.rounds < 40
    one_more = privacy.accountant.epsilon(privacy.noise_multiplier, privacy.rounds + 1)
    assert privacy.epsilon() <= 4.0 < one_more


class OtherProcess(Processes):
    """Other process: a process group of two whose other process has the given sums, in order."""

    def __init__(self, *others):
        super().__init__(rank=0, size=2)
        object.__setattr__(self, "others", list(others))

    def sum(self, tensor):
        return tensor + self.others.pop(0).to(tensor)


def test_processes_add_the_noise_once():
    """Each of two processes has half of the uploads, and gets the noisy mean of all of them."""
    uploads = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cohort = torch.arange(4)

    def protect(share, rows):
        privacy = build_privacy(private(clip_norm=1.0), All(), 4, seed=0)
        privacy.plan(3)
        return privacy.protect(rows, share, lambda *_: None)[0]

    expected = protect(WorkShare.single_process(cohort), uploads)
    norms = uploads.norm(dim=1)
    clipped = uploads * (1 / norms).clamp(max=1)[:, None]
    for workers in (torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1])):
        others = clipped[workers == 1].sum(0)[None], (norms[workers == 1] <= 1).sum().double()
        share = WorkShare(OtherProcess(*others), cohort, workers)
        torch.testing.assert_close(protect(share, uploads[workers == 0]), expected)


@pytest.mark.parametrize(("groups", "rounds"), [(2, 13), (3, 16)])
def test_budget_of_correlated_noise_counts_every_turn_of_a_client(groups, rounds):
    """A client of 2 groups takes part 7 times in 13 rounds."""
    correlated = private(min_separation=groups)
    federation, _ = build(privacy=correlated, sampler=Cyclic(groups), rounds=rounds)
    privacy = federation.session.rounds.privacy
    privacy.rounds = rounds
    coefficients, columns = root_coefficients(groups), range(0, rounds, groups)
    matrix = sum(
        coefficient * torch.ones(rounds - place, dtype=torch.float64).diag(-place)
        for place, coefficient in enumerate(coefficients)
    )
    assert len(columns) > 4
    sensitivity = float(matrix[:, [*columns]].sum(1).norm())
    expected = dp_accounting.get_epsilon_gaussian(1.0 / sensitivity, 0.01)
    assert privacy.epsilon() == pytest.approx(expected, rel=1e-9)


def first_update(**settings):
    """Return the update of the first round times m, and the federation."""
    federation, optimizer = build(privacy=private(**settings), sampler=All())
    return run(federation, optimizer)[0] * len(SIZES), federation


@pytest.mark.slow
def test_runs_of_one_seed_have_fresh_noise_by_default():
    """With equal noise, (4 a − b) / 3 would be the sum of the uploads."""
    a, first = first_update(noise_seed=None)
    b, second = first_update(noise_seed=None, noise_multiplier=4.0)
    uploads, _ = first_update(noise_multiplier=1e-12)
    assert first.session.rounds.privacy.noise_seed != second.session.rounds.privacy.noise_seed
    assert float(((4 * a - b) / 3 - uploads).norm() / uploads.norm()) > 0.01
    assert "noise_seed" not in first.privacy_statement()


@pytest.mark.slow
def test_noise_seed_repeats_a_run_and_the_statement_says_so():
    (a, first), (b, _) = (first_update(noise_seed=7) for _ in range(2))
    assert torch.equal(a, b)
    assert not torch.equal(a, first_update(noise_seed=8)[0])
    words = "`federation.privacy.noise_seed` = 7 repeats the noise: two published runs"
    assert words in first.privacy_statement()


@pytest.mark.parametrize("options", [{}, {"min_separation": 4}], ids=str)
def test_resume_keeps_fresh_noise(options):
    settings = {"privacy": private(noise_seed=None, **options), "sampler": Cyclic(4)}
    federation, optimizer = build(rounds=6, **settings)
    for round in range(3):
        run(federation, optimizer, round)
    saved, model = federation.state_dict(), model_row(federation).clone()
    expected, _ = run(federation, optimizer, 3)
    resumed, optimizer = build(rounds=6, **settings)
    resumed.load_state_dict(saved)
    model_row(resumed).copy_(model)
    assert torch.equal(run(resumed, optimizer, 3)[0], expected)
    assert resumed.noise_name() == federation.noise_name()
    other, optimizer = build(rounds=6, **settings)
    assert other.noise_name() is None
    run(other, optimizer)
    assert other.noise_name() != federation.noise_name()


def test_noise_of_a_checkpoint_without_a_noise_seed_is_that_of_the_federation():
    federation, _ = build(privacy=private(noise_seed=None))
    saved = federation.state_dict()
    del saved["privacy"]["noise_seed"]
    federation.load_state_dict(saved)
    assert federation.session.rounds.privacy.noise_seed == federation.seed


@pytest.mark.slow
def test_statement_names_the_unit_and_the_mechanism():
    federation, optimizer = build(privacy=private(noise_multiplier=1.5))
    run(federation, optimizer)
    statement = federation.privacy_statement()
    for words in (
        "after 1 rounds for a client with all its data",
        "Poisson sampling with rate 0.5",
        "the noise multiplier z = 1.5 and the clipping norm C = 0.05",
        "not logs and metrics",
    ):
        assert words in statement


@pytest.mark.parametrize(("epsilon", "text"), [(19.6412, "19.65"), (5.0, "5"), (4.9999999, "5")])
def test_statement_rounds_up(monkeypatch, epsilon, text):
    federation, _ = build()
    monkeypatch.setattr(federation.session.rounds.privacy, "epsilon", lambda: epsilon)
    federation.session.rounds.privacy.rounds = 1
    assert f"ε = {text} at δ = 0.01 after" in federation.privacy_statement()


def test_target_prints_its_noise(caplog):
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        federation, _ = build(privacy=private(epsilon=5.0, noise_multiplier=None), sampler=All())
    noise = federation.session.rounds.privacy.noise_multiplier
    assert f"the noise multiplier z = {noise:.6g} gives at most ε = 5" in caplog.text


def test_each_round_uses_fresh_noise_and_a_fresh_cohort():
    federation, optimizer = build()
    set_cohort(federation)
    first, report = run(federation, optimizer, 0)
    with pytest.raises(ValueError, match="to be round 1 but got round 0, whose cohort was drawn"):
        run(federation, optimizer, 0)
    second, next_report = run(federation, optimizer, 1)
    assert not torch.isclose(first, second).any()
    assert next_report["privacy/epsilon"] > report["privacy/epsilon"]


@pytest.mark.slow
def test_budget_does_not_begin_again_with_another_client_or_other_data():
    """The rounds of the second run would have the noise of the first."""
    data, settings = shared_out(classes(SIZES)), RunSettings(rounds=3)
    federation, _ = build(data=data)
    client = fed_avg().double()
    federation.setup(client, data, "fit", settings=settings)  # nothing is spent yet
    client.train()
    run(federation, client.configure_optimizers())
    other_data, other = shared_out(classes([6] * 9)), fed_avg().double()
    words = r"Expected a new Federation .* ε = .* in 1 rounds"
    for again in ((other, data), (client, other_data)):
        with pytest.raises(ValueError, match=words):
            federation.setup(*again, "fit", settings=settings)
    federation.setup(client, data, "fit", settings=settings)  # continues the budget
    assert federation.session.rounds.privacy.rounds == 1
    federation.setup(other, data, "validate")  # replaces the session, as a failed resume does
    for again in ((other, data), (client, data)):
        with pytest.raises(ValueError, match=words):
            federation.setup(*again, "fit", settings=settings)


def test_budget_of_a_checkpoint_continues_after_another_run_of_the_federation():
    data, settings = shared_out(classes(SIZES)), RunSettings(rounds=3)
    federation, optimizer = build(data=data)
    run(federation, optimizer)
    saved, other = federation.state_dict(), fed_avg().double()
    federation.setup(other, data, "fit", loads=True, settings=settings)
    federation.load_state_dict(saved)
    federation.setup(other, data, "fit", settings=settings)
    assert federation.session.rounds.privacy.rounds == 1


def test_loggers_that_publish_the_noise_seed_get_a_warning():
    loggers = [SimpleNamespace(_log_model="all"), SimpleNamespace(_log_model=False), object()]
    with pytest.warns(UserWarning, match="`log_model` publishes checkpoints, which have the noise"):
        warn_of_published_seed(SimpleNamespace(loggers=loggers))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_published_seed(SimpleNamespace(loggers=loggers[1:]))


def test_ends_of_a_run_by_clients_or_the_clock_are_refused():
    trainer = SimpleNamespace(callbacks=[], lr_scheduler_configs=[])
    check_private_monitors(trainer)
    words = r"Expected no `trainer.max_time` and no Timer with `federation.privacy`"
    with pytest.raises(ValueError, match=words):
        check_private_monitors(SimpleNamespace(callbacks=[Timer()], lr_scheduler_configs=[]))
    words = r"Expected `trainer.detect_anomaly` to be false"
    with torch.autograd.set_detect_anomaly(True), pytest.raises(ValueError, match=words):
        check_private_monitors(trainer)


def fed_avg(**options):
    return FedAvg(seeded(mlp), optimizer=sgd(0.1), **options)


def batch_norm_net():
    return torch.nn.Sequential(
        torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
    )


class OwnMean(Mean):
    """A mean that a user changed."""


class AddedMean(torch.nn.Module):
    """An augmentation that adds a running mean of all samples that it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.mean(), alpha=0.1)
        return x + self.mean


class AddedNoise(torch.nn.Module):
    """An augmentation that draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return x + torch.rand(x.shape, generator=self.generator)


FORGED = Adversary(SignFlipping(), fraction=0.25)
REFUSED = {
    "median": ({"aggregator": Median()}, "to be pl_fed.aggregators.Mean for .* but got Median"),
    "Krum": ({"aggregator": Krum()}, "but got Krum: no bound is known"),
    "samples": ({"aggregator": Mean("samples")}, "`weighting` of Mean to be 'uniform' for"),
    "clipping": ({"pre_aggregators": [Clipping()]}, "Expected no `federation.pre_aggregators`"),
    "by size": ({"sampler": BySize(2)}, "but got BySize: there is no accounting for its draws"),
    "a mean of one's own": ({"aggregator": OwnMean()}, "but got OwnMean: no bound is known"),
    "control": (
        {"client": Scaffold(seeded(mlp), optimizer=sgd(0.1))},
        r"but got Scaffold, whose server also keeps states of clients \(control\)",
    ),
    "nothing is sent": ({"client": Local(seeded(mlp))}, "but got Local, which sends nothing"),
    "BatchNorm": (
        {"client": FedAvg(seeded(batch_norm_net))},
        r"but got 1.running_mean, 1.running_var.*: use GroupNorm, or FedBN",
    ),
    "states without replacement": (
        {"client": Ditto(seeded(mlp)), "sampler": Uniform(3)},
        r"Poisson for Ditto, whose clients keep states \(personal\), but got cohorts of fixed size",
    ),
    "states of optimizers without replacement": (
        {
            "client": FedAvg(seeded(mlp), optimizer=partial(torch.optim.Adam, lr=0.1)),
            "sampler": Uniform(3),
            "engine": EngineOptions("one_by_one", keep_optimizer_state=True),
        },
        r"Poisson for FedAvg, whose clients keep states \(global.optimizer\), but got",
    ),
    "no round": (
        {"privacy": private(stop_at_epsilon=0.01)},
        r"privacy.stop_at_epsilon` to allow one round, which costs ε = .*, but got 0.01: set a",
    ),
    "normalization": (
        {"data": shared_out(classes(SIZES), normalize="channel")},
        "`data.normalize` to be \"none\" or a pair .* but got 'channel'",
    ),
    "augmentation by earlier clients": (
        {"data": shared_out(classes(SIZES), augment=[AddedMean()])},
        "`data.augment` without a memory .* but got AddedMean, which change samples by",
    ),
    "augmentation with a generator of its own": (
        {"data": shared_out(classes(SIZES), augment=[torch.nn.Dropout(), AddedNoise()])},
        "`data.augment` without a memory .* but got Dropout, AddedNoise, which",
    ),
    "forged uploads without replacement": (
        {
            "adversary": Adversary(SignFlipping(), fraction=0.25, knowledge="own"),
            "sampler": Uniform(3),
        },
        "Poisson for SignFlipping .* may take the place of an attacker",
    ),
    "factor of the cohort": (
        {"adversary": Adversary(ALittleIsEnough(), fraction=0.25, knowledge="own")},
        "`factor` of ALittleIsEnough to be a number .* but got null",
    ),
    "factor of the cohort, combined": (
        {
            "adversary": Adversary(
                Combined([RandomLabels(), ModelReplacement()]), fraction=0.25, knowledge="own"
            )
        },
        "`factor` of ModelReplacement to be a number",
    ),
    "factor of the cohort, combined twice": (
        {
            "adversary": Adversary(
                Combined([RandomLabels(), Combined([ModelReplacement()])]),
                fraction=0.25,
                knowledge="own",
            )
        },
        "`factor` of ModelReplacement to be a number",
    ),
    "scale of the cohort": (
        {"adversary": Adversary(ConstrainedReplacement(), fraction=0.25, knowledge="own")},
        "`scale` of ConstrainedReplacement to be a number .* or `norm_bound`",
    ),
    "share of the cohort": (
        {"adversary": Adversary(FairnessAttack(), fraction=0.25, knowledge="own")},
        "`share` of FairnessAttack to be a number",
    ),
    "knowledge": ({"adversary": FORGED}, '`federation.adversary.knowledge` to be "own" for Sign'),
    "redraw": (
        {"adversary": Adversary(SignFlipping(), fraction=0.25, knowledge="own", redraw=True)},
        "`federation.adversary.redraw` to be false for SignFlipping",
    ),
    "no rounds": (
        {"privacy": private(epsilon=2.0, noise_multiplier=None), "rounds": math.inf},
        "`federation.privacy.rounds` or `trainer.max_epochs` to be given",
    ),
    "cohort": ({"sampler": Uniform(9)}, "`cohort_size` to be at most the number of clients"),
}


@pytest.mark.slow
@table_test(("settings", "words"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_theorem_is_refused_before_training(settings, words):
    with pytest.raises(ValueError, match=words):
        build(**settings)


SEEN = []


class Noting(torch.nn.Linear):
    """Appends the means of its inputs to a global list."""

    def forward(self, x):
        SEEN.append(float(x.mean()))
        return super().forward(x)


@pytest.mark.parametrize("privacy", [None, private()], ids=["plain", "private"])
def test_values_outside_of_modules_are_refused_with_privacy(privacy):
    """A later step may read them, which no trial shows."""
    federation = Federation(Poisson(0.5), privacy=privacy, seed=0)
    net, data = Noting(4, 3), shared_out(classes(SIZES))
    expected = (
        pytest.warns(UserWarning, match=r"change `.*SEEN` outside of the module\. All clients")
        if privacy is None
        else pytest.raises(ValueError, match=r"no value outside of the .* of `.*SEEN`")
    )
    with expected:
        federation.setup(FedAvg(net, optimizer=sgd(0.1)), data, "fit", settings=RunSettings())


class NotingValidations(LightningModule):
    """Appends the means of validated samples to a global list."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        SEEN.append(float(batch[0].mean()))


def test_values_outside_of_modules_that_validations_change_are_refused_with_privacy():
    federation = Federation(Poisson(0.5), privacy=private(), seed=0)
    client = FedAvg(NotingValidations(), optimizer=sgd(0.1))
    data = shared_out(classes(SIZES), val_fraction=0.3)
    words = r"Expected evaluation steps of NotingValidations to write no value .* of `.*SEEN`"
    with pytest.warns(UserWarning, match="SEEN"), pytest.raises(ValueError, match=words):
        federation.setup(client, data, "fit", settings=RunSettings())


class OwnSharesOnly(Attack):
    """Sends numbers that an attacker could tell the cohort by."""

    def forge(self, honest, own, context):
        assert len(honest) == len(own) == len(context.clients) == context.num_byzantine
        assert context.clients.equal(context.attackers)
        assert context.clients.equal(context.observed)
        with pytest.raises(ValueError, match=r"samples of Byzantine clients alone .* client 7"):
            context.samples(7)
        for client in (0, 1, 2):  # attacker 2 is outside of the cohort
            assert len(context.samples(client).inputs)
        return torch.ones_like(own)


def test_attackers_know_only_themselves_of_the_cohort():
    """Otherwise one benign client would change all of their uploads."""
    adversary = Adversary(OwnSharesOnly(), ids=[0, 1, 2], knowledge="own")
    updates = []
    for cohort in ((0, 1, 5), (0, 1)):
        federation, optimizer = build(adversary=adversary)
        set_cohort(federation, *cohort)
        updates.append(run(federation, optimizer)[0])
    assert 0 < float((updates[0] - updates[1]).norm()) <= 0.05 / 4 * (1 + 1e-9)


ALLOWED = {
    "FedBN": {"client": FedBN(seeded(batch_norm_net)), "data": shared_out(classes([8] * 8))},
    "states without amplification": {
        "client": Ditto(seeded(mlp)),
        "sampler": Uniform(3),
        "privacy": private(amplification=False),
    },
    "no states": {"sampler": Uniform(3)},
    "own knowledge": {"adversary": Adversary(SignFlipping(), fraction=0.25, knowledge="own")},
    "poisoned labels": {"adversary": Adversary(RandomLabels(), fraction=0.25, redraw=True)},
    "public normalization": {"data": shared_out(classes(SIZES), normalize=[0.5, 0.5])},
    "random augmentation": {"data": shared_out(classes(SIZES), augment=[torch.nn.Dropout()])},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", ALLOWED.values(), ids=ALLOWED)
def test_what_has_a_theorem_runs(settings):
    federation, optimizer = build(**settings)
    assert run(federation, optimizer)[1]["privacy/epsilon"] > 0


def test_large_delta_gives_a_warning_with_the_number():
    with pytest.warns(UserWarning, match=r"`federation.privacy.delta` = 0.2 is not below 1 / 8"):
        build(privacy=private(delta=0.2))


def test_correlated_noise_needs_a_sampler_with_that_separation():
    correlated = private(min_separation=4)
    for sampler in (Poisson(0.5), Uniform(3), All(), Cyclic(3)):
        with pytest.raises(ValueError, match=r"`federation.privacy.min_separation` to be at most"):
            build(privacy=correlated, sampler=sampler)
    federation, _ = build(privacy=correlated, sampler=Cyclic(4))
    assert [federation.draw_cohort(round).tolist() for round in (0, 3, 4)] == [
        [0, 4],
        [3, 7],
        [0, 4],
    ]


def test_correlated_noise_of_the_rounds_and_after_a_resume():
    correlated = private(min_separation=3, clip_norm=1e-9)
    federation, optimizer = build(privacy=correlated, sampler=Cyclic(4))
    updates = [run(federation, optimizer, round)[0] * 2 / 1e-9 for round in range(5)]
    numel = len(updates[0])
    noise = torch.stack([normal_row(key(0, "privacy noise", t), numel) for t in range(5)])
    c = torch.eye(5, dtype=torch.float64)
    for place, coefficient in ((1, 0.5), (2, 0.375)):
        c += coefficient * torch.ones(5 - place, dtype=torch.float64).diag(-place)
    rows = torch.linalg.solve_triangular(c, noise, upper=False)
    for update, row in zip(updates, rows):  # an upload adds at most 1 to the norm
        assert float((update - row).norm()) <= 2.1
    resumed, optimizer = build(privacy=correlated, sampler=Cyclic(4))
    resumed.session.rounds.privacy.rounds = 4
    update = run(resumed, optimizer, 4)[0] * 2 / 1e-9
    assert float((update - rows[4]).norm()) <= 2.1


def test_clients_that_take_turns_cost_less():
    cyclic, optimizer = build(sampler=Cyclic(4))
    every, other = build(sampler=All())
    for round in range(4):
        report, expected = run(cyclic, optimizer, round)[1], run(every, other, round)[1]
        if round == 0:
            first = expected["privacy/epsilon"]
        assert report["privacy/epsilon"] == first
    assert run(cyclic, optimizer, 4)[1]["privacy/epsilon"] > first
