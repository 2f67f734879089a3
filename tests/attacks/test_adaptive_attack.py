"""The adaptive attack: its acceptance region, its furthest aggregate, a second implementation."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_federations import classes, mlp, run_rounds, seeded, sgd, shared_out
from tables import table_test

import pl_fed
from pl_fed.aggregators import (
    Bulyan,
    CenteredClipping,
    DnC,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    SignGuard,
    TrimmedMean,
)
from pl_fed.attacks import AdaptiveAttack, Attack, InnerProductManipulation, MinMax, MinSum
from pl_fed.clients import FedAvg
from pl_fed.functional.search import largest_accepted
from pl_fed.types import RoundContext

SHEET = torch.tensor([[1, 0], [1.2, 0.2], [0.8, 0.1], [1, 0.3]], dtype=torch.float64)


def make_context(honest, b, aggregator):
    """Return a round in which attackers 100, 101, ... know everything."""
    ids, attackers = torch.arange(len(honest)), 100 + torch.arange(b)
    base = RoundContext(num_byzantine=b, clients=torch.cat([ids, attackers]))
    base = replace(base, losses=torch.ones(len(base.clients)))

    def merge(rows, reject=lambda _: None):
        uploads = torch.cat([honest, rows])
        memory = copy.deepcopy(aggregator)
        return memory(uploads, torch.ones(len(uploads)), replace(base, reject=reject))

    return replace(base, attackers=attackers, observed=ids, simulate_merge=merge)


def harm(attack, honest, b, aggregator):
    context = make_context(honest, b, aggregator)
    forged = attack.forge(honest, torch.zeros(b, honest.shape[1]).to(honest), context)
    return float((context.simulate_merge(forged) - honest.mean(0)).norm())


def drawn_rows(seed, n=9, d=6):
    draws = torch.Generator().manual_seed(seed)
    return 1 + torch.randn(n, d, generator=draws, dtype=torch.float64)


# The authors' search


def search_by_halving(passes, start, tolerance=1e-5):
    """The loop of the authors' notebooks."""
    lamda, step, fail = start, start, 0.0
    trials = 0
    while abs(fail - lamda) > tolerance:
        trials += 1
        if passes(lamda):
            fail, lamda = lamda, lamda + step / 2
        else:
            lamda = lamda - step / 2
        step = step / 2
    return fail, trials


def trimmed_mean_with_numpy(rows):
    return np.sort(rows, axis=0)[1:-1].mean(0)


def test_search_by_halving_gives_the_value_of_the_papers_code_for_the_trimmed_mean():
    """It passes where the aggregate is further from the mean than in the previous trial."""
    honest = SHEET.numpy()
    mean = honest.mean(0)
    direction = -mean / np.linalg.norm(mean)

    def passes_in(memory):
        def passes(lam):
            rows = np.vstack([honest, mean + lam * direction])
            distance = np.linalg.norm(trimmed_mean_with_numpy(rows) - mean)
            previous, memory[0] = memory[0], distance
            return distance > previous

        return passes

    expected, trials = search_by_halving(passes_in([-1]), 10.0)
    assert trials == 20
    assert largest_accepted(passes_in([-1]), 10.0, 20) == expected == 10.0
    np.testing.assert_allclose(mean + 10 * direction, [-8.889364, -1.333405], atol=1e-6)


@pytest.mark.parametrize("objective", ["auto", "deviation"])
def test_aggregate_of_the_trimmed_mean_is_that_of_the_papers_code(objective):
    context = make_context(SHEET, 1, TrimmedMean(1))
    forged = AdaptiveAttack("unit", objective).forge(SHEET, torch.zeros(1, 2).double(), context)
    expected = torch.tensor([2.8 / 3, 0.1], dtype=torch.float64)
    torch.testing.assert_close(context.simulate_merge(forged), expected, rtol=0, atol=1e-14)


def select_by_krum(rows, f, number):
    """Return the rows that multi-Krum selects, in numpy."""
    squares = ((rows[:, None] - rows[None]) ** 2).sum(2)
    neighbours = np.sort(squares, axis=1)[:, 1 : len(rows) - f - 1]
    return set(np.argsort(neighbours.sum(1), kind="stable")[:number].tolist())


@table_test("direction", ["unit", "sign", "std"])
@table_test("number", [1, 2, 5])
@pytest.mark.slow
def test_largest_accepted_factor_equals_the_papers_loop_in_numpy(direction, number):
    """All forged rows are among the selected ones; with one selected, there is one attacker."""
    b = min(number, 2)
    for seed in range(6):
        honest = drawn_rows(seed)
        rows, mean = honest.numpy(), honest.numpy().mean(0)
        p = {"unit": -mean / np.linalg.norm(mean), "sign": -np.sign(mean), "std": -rows.std(0)}

        def passes(lam, rows=rows, mean=mean, p=p[direction]):
            uploads = np.vstack([rows, *[mean + lam * p] * b])
            selected = select_by_krum(uploads, b, number)
            return len(selected & set(range(len(rows), len(uploads)))) == b

        expected, _ = search_by_halving(passes, 3.0, tolerance=3.0 / 2**20)
        context = make_context(honest, b, Krum(num_selected=number))
        attack = AdaptiveAttack(direction, "acceptance", trials=20)
        forged = attack.forge(honest, torch.zeros(b, 6).double(), context)
        np.testing.assert_allclose(
            forged, [mean + expected * p[direction]] * b, rtol=0, atol=1e-14, err_msg=str(seed)
        )


def test_krum_accepts_two_attackers_if_it_selects_one_of_them():
    honest = drawn_rows(0)
    rows, mean = honest.numpy(), honest.numpy().mean(0)
    direction = -mean / np.linalg.norm(mean)

    def passes(lam):
        uploads = np.vstack([rows, *[mean + lam * direction] * 2])
        return min(select_by_krum(uploads, 2, 1)) >= len(rows)

    expected, _ = search_by_halving(passes, 3.0, tolerance=3.0 / 2**20)
    assert expected > 0.1
    attack = AdaptiveAttack("unit", "acceptance")
    forged = attack.forge(honest, torch.zeros(2, 6).double(), make_context(honest, 2, Krum()))
    np.testing.assert_allclose(forged, [mean + expected * direction] * 2, rtol=0, atol=1e-14)


# Worst cases

DEFENCES = [
    Mean(),
    Median(),
    TrimmedMean(),
    GeometricMedian(),
    CenteredClipping(),
    Krum(),
    Krum(num_selected=4),
    Bulyan(),
    SignGuard(),
    DnC(),
]


@pytest.mark.exhaustive
@pytest.mark.slow
@table_test("defence", DEFENCES, ids=lambda defence: repr(defence))
def test_worst_direction_and_both_objectives_do_most_harm(defence):
    check_worst_harm(defence)


@pytest.mark.slow
@table_test("defence", [Median(), Krum(num_selected=4)], ids=lambda defence: repr(defence))
def test_worst_direction_does_most_harm_to_two_defences(defence):
    check_worst_harm(defence)


def check_worst_harm(defence):
    """Compare the harm with that of each direction and objective, and of other attacks."""
    honest = drawn_rows(0, n=11)
    worst = harm(AdaptiveAttack(), honest, 2, defence)
    for direction in ("unit", "sign", "std"):
        for objective in ("acceptance", "deviation"):
            other = harm(AdaptiveAttack(direction, objective), honest, 2, defence)
            assert worst >= other - 1e-9, (direction, objective)
    search = harm(InnerProductManipulation(factor="search"), honest, 2, defence)
    agnostic = [harm(attack, honest, 2, defence) for attack in (MinMax(), MinSum())]
    assert worst > 0.5 * max(search, *agnostic)


@pytest.mark.slow
def test_selecting_rules_leave_out_no_forged_upload():
    for defence in (Krum(num_selected=4), Bulyan(), SignGuard()):
        honest, parts = drawn_rows(3, n=11), []
        context = make_context(honest, 2, defence)
        attack = AdaptiveAttack(objective="acceptance")
        forged = attack.forge(honest, torch.zeros(2, 6).double(), context)
        context.simulate_merge(forged, reject=parts.append)
        rejected = torch.cat(parts).tolist()
        assert set(rejected) & {100, 101} == set(), defence
        assert len(rejected) > 0, "so the check is not empty"


def test_a_defence_that_fails_far_away_is_searched_nearby():
    honest = drawn_rows(1)
    context = make_context(honest, 1, Mean())

    def fails(rows, reject=None):
        if float((rows[0] - honest.mean(0)).norm()) > 2.5:
            raise ValueError("too far")
        return context.simulate_merge(rows)

    limited = replace(context, simulate_merge=fails)
    forged = AdaptiveAttack("unit").forge(honest, torch.zeros(1, 6).double(), limited)
    assert 2.4 < float((forged[0] - honest.mean(0)).norm()) <= 2.5


# Refusals, and rounds


@table_test(
    "arguments, name",
    [
        ({"direction": "up"}, "direction"),
        ({"objective": "most"}, "objective"),
        ({"trials": 0}, "trials"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        AdaptiveAttack(**arguments)


def test_attackers_need_to_know_the_defence():
    with pytest.raises(ValueError, match=r'`federation.adversary.knowledge` to be "all"'):
        pl_fed.Adversary(AdaptiveAttack(), fraction=0.2, knowledge="own")
    with pytest.raises(ValueError, match=r"`context.simulate_merge` to be given"):
        AdaptiveAttack().forge(SHEET, torch.zeros(1, 2), RoundContext())


class Probe(Attack):
    """Sends its own uploads times a factor, and keeps the simulated rejections."""

    rejected: tuple = ()

    def forge(self, honest, own, context):
        context.simulate_merge(own)  # without an interest in rejections
        context.simulate_merge(-9 * own, reject=lambda ids: self.rejected.append(ids.tolist()))
        return -9 * own


@pytest.mark.slow
def test_simulated_rejections_are_those_of_the_round():
    last, attack = {}, Probe()
    attack.rejected = []

    class Watched(Krum):
        def forward(self, uploads, weights, context):
            def reject(ids):
                last[context.round] = ids.tolist()
                context.reject(ids)

            return super().forward(uploads, weights, replace(context, reject=reject))

    data, client = shared_out(classes([9, 5, 12, 8, 7])), FedAvg(seeded(mlp), optimizer=sgd(0.1))
    run_rounds(client, data, rounds=2, attack=attack, ids=[1], aggregator=Watched(num_selected=2))
    assert attack.rejected == [last[0], last[1]], "the server merges after the simulations"
    assert all(1 in ids and len(ids) == 3 for ids in attack.rejected), "of five"
