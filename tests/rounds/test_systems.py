"""Rounds of unequal clients: against numpy, over engines and chunks, and across a resume."""

import numpy as np
import pytest
import torch
from further_cases import mark_further, mark_if
from small_federations import (
    HalfSquares,
    Point,
    classes,
    mlp,
    points,
    run_rounds,
    seeded,
    sgd,
    shared_out,
)

import pl_fed
from pl_fed import DifferentialPrivacy, Federation, Systems
from pl_fed.aggregators import Krum
from pl_fed.clients import FLAME, Ditto, FedAvg, FedNova, FedProx, FedRep, Scaffold
from pl_fed.lightning.trainer import Trainer
from pl_fed.samplers import All, Poisson, Uniform
from pl_fed.systems import LogNormal

SIZES = [7, 3, 10, 2, 6, 12]
UNEQUAL = Systems(
    speed=LogNormal(10.0, 1.0),
    upload=LogNormal(3000.0, 0.5),
    availability=0.8,
    dropout=0.1,
    jitter=0.3,
    deadline=0.6,
    policy="partial",
)


def write_trace(folder, rows):
    path = folder / "trace.csv"
    columns = ("client", "round", "speed", "upload", "download", "availability", "dropout")
    lines = [",".join(columns), *(",".join(map(repr, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "policy", "kind"),
    [
        mark_if((e + p + k) % 2 > 0, engine, policy, kind)
        for e, engine in enumerate(["one_by_one", "stacked"])
        for p, policy in enumerate(["wait", "drop", "partial"])
        for k, kind in enumerate([FedAvg, FedNova])
    ],
)
def test_run_equals_a_simulation_in_numpy(tmp_path, kind, policy, engine):
    """Six clients estimate points by full gradients; a drawn trace changes in every round."""
    draw, rounds, planned, lr = np.random.default_rng(3), 5, 12, 0.2
    observed = (8 * draw.normal(size=6)).round() / 8  # exact in float32, as `points` makes them
    shape = (rounds, 6)
    speed, up, down = (draw.lognormal(m, 0.7, shape) for m in (2.0, 4.5, 5.0))
    answers, drops = draw.uniform(size=shape) < 0.8, draw.uniform(size=shape) < 0.15
    rows = [
        (k, t, *(float(array[t, k]) for array in (speed, up, down, answers, drops)))
        for t in range(rounds)
        for k in range(6)
    ]
    deadline = None if policy == "wait" else 1.2
    systems = Systems(
        trace=write_trace(tmp_path, rows), deadline=deadline, policy=policy, take_first=4
    )
    client = kind(Point(start=1.0), optimizer=sgd(lr), criterion=HalfSquares(), local_steps=planned)
    data = shared_out(points(*[[float(y)] for y in observed]))
    result = run_rounds(client, data, rounds, engine=engine, chunk_size=2, systems=systems)

    w, clock, num_bytes = 1.0, 0.0, 8 * (2 if kind is FedNova else 1)
    left_out = 0
    for t, report in enumerate(result.reports):
        arrivals, late = [], 0
        for k in range(6):
            if not answers[t, k] or drops[t, k]:
                continue
            transfer, steps = num_bytes / down[t, k] + num_bytes / up[t, k], planned
            if policy == "partial":
                steps = min(planned, max(0, int(np.floor((1.2 - transfer) * speed[t, k]))))
            seconds = transfer + steps / speed[t, k]
            if not steps or (policy == "drop" and seconds > 1.2):
                late += 1
            else:
                arrivals.append((seconds, k, steps))
        taken = sorted(arrivals)[:4]
        length = max((seconds for seconds, _, _ in taken), default=0.0)
        clock += 1.2 if late and len(taken) < 4 else length
        if taken:
            tau = np.array([steps for _, _, steps in taken])
            ends = np.array([observed[k] for _, k, _ in taken])
            changes = (1 - (1 - lr) ** tau) * (ends - w)
            factors = tau.mean() / tau if kind is FedNova else 1.0
            w += float((factors * changes).mean())
        left_out += late
        assert float(report["systems/seconds"]) == pytest.approx(clock, rel=1e-10)
        assert report["train/cohort"] == len(taken)
        assert report["train/upload_bytes"] == len(taken) * num_bytes
        assert report["train/download_bytes"] == answers[t].sum() * num_bytes
        assert report["systems/late"] == late
        assert bool(report.get("train/small_cohort")) == (not taken)
    assert float(result.w) == pytest.approx(w, rel=1e-10)
    assert bool(left_out) == (policy != "wait"), "the case has late clients"


def build(kind, **options):
    return kind(seeded(mlp), optimizer=sgd(0.1), local_epochs=2, **options)


@pytest.mark.parametrize(
    "kind",
    mark_further([FedAvg, FedNova, Ditto, FedRep, Scaffold, FLAME], [FedAvg, Ditto, FedRep]),
)
@pytest.mark.slow
def test_engines_and_chunks_agree(kind):
    data = shared_out(classes(SIZES))
    runs = [
        run_rounds(build(kind), data, 4, engine=engine, chunk_size=size, systems=UNEQUAL)
        for engine, size in (("one_by_one", 1), ("stacked", 2), ("stacked", None))
    ]
    numbers = [name for name in runs[0].reports[0] if name.startswith("systems/")]
    assert len(numbers) == 7
    for run in runs[1:]:
        assert runs[0].distance(run) < 1e-11
        for first, other in zip(runs[0].reports, run.reports):
            assert [first[name] for name in numbers] == [other[name] for name in numbers]
    means = [report["systems/mean_steps"] for report in runs[0].reports]
    assert min(means) < 6, "the deadline limits the steps"


@pytest.mark.parametrize("kind", [FedAvg, Ditto, FLAME])
@pytest.mark.slow
def test_equal_clients_on_a_clock_have_the_bits_of_a_run_without_one(kind):
    data = shared_out(classes(SIZES))
    plain, timed = (
        run_rounds(build(kind), data, 3, engine="stacked", systems=systems)
        for systems in (None, Systems(speed=LogNormal(1.0)))
    )
    assert plain.distance(timed) == 0.0
    assert timed.reports[-1]["systems/seconds"] > 0
    assert not [name for name in plain.reports[0] if name.startswith("systems/")]


@pytest.mark.parametrize("kind", [FedProx, FedNova])
def test_partial_work_keeps_clients_that_a_deadline_would_drop(kind):
    data = shared_out(classes(SIZES))
    options = {"speed": LogNormal(10.0, 1.0), "deadline": 0.3}
    cohorts = {}
    for policy in ("drop", "partial"):
        run = run_rounds(build(kind), data, 3, systems=Systems(policy=policy, **options))
        cohorts[policy] = [int(report["train/cohort"]) for report in run.reports]
    assert sum(cohorts["drop"]) < sum(cohorts["partial"])


def test_states_of_late_clients_and_of_dropped_ones_stay_as_before():
    data = shared_out(classes(SIZES))
    speeds = Systems(speed=LogNormal(10.0, 1.0), deadline=0.4, policy="drop")
    run = run_rounds(build(Ditto), data, 1, systems=speeds)
    late = int(run.reports[0]["systems/late"])
    start = build(Ditto).double().row("personal").data
    is_untouched = (run.states["personal"] == start).all(1)
    assert 0 < late < 6
    assert int(is_untouched.sum()) == late


@pytest.mark.slow
def test_scaffolds_control_stays_the_mean_of_the_clients_controls():
    data = shared_out(classes(SIZES))
    run = run_rounds(build(Scaffold), data, 4, engine="stacked", systems=UNEQUAL)
    mean = run.states["own_control"].mean(0)
    torch.testing.assert_close(run.server_states["control"], mean, rtol=0, atol=1e-14)


@pytest.mark.slow
def test_flames_global_model_stays_the_mean_of_all_kept_rows():
    """A dropped client keeps its row, and the server keeps it in the mean."""
    data = shared_out(classes(SIZES))
    client = build(FLAME)
    run = run_rounds(client, data, 4, engine="stacked", systems=UNEQUAL)
    rows = run.states["local"] + run.states["dual"] / client.rho
    torch.testing.assert_close(run.w, rows.mean(0), rtol=0, atol=1e-12)


def test_rounds_in_which_nobody_finishes_make_no_step():
    data = shared_out(classes(SIZES))
    systems = Systems(speed=1e-3, deadline=1.0, policy="drop")
    run = run_rounds(build(Ditto), data, 3, engine="stacked", systems=systems)
    assert torch.equal(run.w, build(Ditto).double().row("global").data)
    assert [report["train/small_cohort"] for report in run.reports] == [1.0] * 3
    assert [report["systems/seconds"] for report in run.reports] == [1.0, 2.0, 3.0]
    nobody = run_rounds(build(Ditto), data, 2, systems=Systems(availability=0.0))
    assert [report["systems/dropped"] for report in nobody.reports] == [6.0] * 2
    assert nobody.reports[-1]["systems/seconds"] == 0.0


def test_cohorts_too_small_for_the_aggregator_are_skipped():
    data = shared_out(classes(SIZES))
    systems = Systems(availability=0.3)
    run = run_rounds(build(FedAvg), data, 6, systems=systems, aggregator=Krum())
    sizes = [int(report["train/cohort"]) for report in run.reports]
    skipped = [bool(report.get("train/small_cohort")) for report in run.reports]
    assert skipped == [size < 3 for size in sizes]
    assert len(set(skipped)) == 2


class StepsOfItsOwn(FedAvg):
    """An algorithm whose `begin` asks for more steps than the plan."""

    def begin(self, client):
        super().begin(client)
        if client.steps:
            client.steps["global"] = client.steps["global"] + 100


def test_steps_that_begin_sets_keep_to_the_deadline():
    data = shared_out(points(*[[0.0]] * 3))
    ends = []
    for kind in (FedAvg, StepsOfItsOwn):
        client = kind(Point(start=1.0), optimizer=sgd(0.2), criterion=HalfSquares(), local_steps=9)
        systems = Systems(speed=5.0, deadline=1.0, policy="partial")
        ends.append(float(run_rounds(client, data, 1, systems=systems).w))
    assert ends == [pytest.approx(0.8**5, abs=1e-12)] * 2


@pytest.mark.slow
def test_a_clock_without_a_deadline_changes_no_steps():
    data = shared_out(points(*[[0.0]] * 3))
    client = StepsOfItsOwn(
        Point(start=1.0), optimizer=sgd(0.2), criterion=HalfSquares(), local_steps=2
    )
    alone = run_rounds(client, data, 1).w
    for systems in (Systems(speed=5.0), Systems(speed=5.0, deadline=1000.0, policy="partial")):
        assert torch.equal(run_rounds(client, data, 1, systems=systems).w, alone)


def test_more_uploads_than_drawn_clients_are_refused():
    data, systems = shared_out(classes(SIZES)), Systems(take_first=5)
    with pytest.raises(
        ValueError, match=r"`federation\.systems\.take_first` .* drawn clients, 4, but"
    ):
        run_rounds(build(FedAvg), data, sampler=Uniform(4), systems=systems)
    with pytest.raises(ValueError, match="`cohort_size`"):
        run_rounds(build(FedAvg), data, sampler=Uniform(9), systems=systems)
    run = run_rounds(build(FedAvg), data, 2, sampler=All(), systems=systems)
    assert [report["systems/surplus"] for report in run.reports] == [1.0, 1.0]


def test_a_section_of_another_type_is_refused():
    with pytest.raises(TypeError, match="`systems` to be an object of a subclass of Systems but"):
        Federation(systems={"speed": 3})


def fit(folder, rounds, resumes=None, kind=Ditto):
    federation = Federation(Uniform(4), systems=UNEQUAL, seed=0)
    trainer = Trainer(
        federation,
        default_root_dir=folder,
        run_dir=folder / "run",
        accelerator="cpu",
        max_epochs=rounds,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(build(kind), shared_out(classes(SIZES), val_fraction=0.2), ckpt_path=resumes)
    return trainer


@pytest.mark.parametrize("kind", [Ditto, FedNova])
@pytest.mark.slow
def test_clock_and_cohorts_continue_after_a_resume(tmp_path, kind):
    whole = fit(tmp_path / "whole", 5, kind=kind)
    fit(tmp_path / "stopped", 2, kind=kind)
    path = tmp_path / "stopped" / "run" / "checkpoints" / "last.ckpt"
    resumed = fit(tmp_path / "resumed", 5, resumes=path, kind=kind)
    rows = [trainer.federation.client.row("global").data for trainer in (whole, resumed)]
    assert torch.equal(*rows)
    for name in ("seconds", "round_seconds", "participants", "late"):
        metric = f"systems/{name}"
        assert whole.callback_metrics[metric] == resumed.callback_metrics[metric]
    clocks = [trainer.federation.session.rounds.systems.seconds for trainer in (whole, resumed)]
    assert clocks[0] == clocks[1] > 0


def run_privately(systems, **options):
    pytest.importorskip("dp_accounting")
    privacy = DifferentialPrivacy(clip_norm=0.1, noise_multiplier=1.0, delta=0.01, noise_seed=0)
    data = shared_out(classes(SIZES))
    return run_rounds(
        build(FedAvg), data, 3, sampler=Poisson(0.8), privacy=privacy, systems=systems, **options
    )


def test_privacy_refuses_uploads_that_replace_each_other():
    with pytest.raises(
        ValueError, match=r"`federation\.systems\.take_first` to be null for `feder"
    ):
        run_privately(Systems(take_first=2))


@pytest.mark.slow
def test_private_rounds_keep_their_denominator_and_noise_if_clients_are_late():
    """A late client is a zero upload: ε is that of a run in which all clients answer."""
    late = run_privately(Systems(speed=1e-3, deadline=1.0, policy="drop"))
    plain = run_privately(None)
    assert [r["train/cohort"] for r in late.reports] == [0.0] * 3
    assert late.reports[-1]["privacy/epsilon"] == plain.reports[-1]["privacy/epsilon"]
    assert all(float(report["train/update_norm"]) > 0 for report in late.reports), "noise alone"


def test_systems_is_a_public_name():
    assert pl_fed.Systems is Systems
    assert pl_fed.systems.LogNormal is LogNormal
