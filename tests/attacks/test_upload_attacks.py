"""Attacks on uploads: small numbers by hand, statistics of draws, and numpy by the papers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from exhaustive import exhaustive_but
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import halfnorm, kstest, norm
from tables import table_test

from pl_fed.aggregators import Krum, Mean, Median, TrimmedMean
from pl_fed.attacks import (
    ALittleIsEnough,
    Attack,
    Combined,
    Fang,
    FlippedLabels,
    InnerProductManipulation,
    Mimic,
    MinMax,
    MinSum,
    ModelReplacement,
    RandomLabels,
    RandomUpdates,
    SameValue,
    SignFlipping,
)
from pl_fed.attacks.a_little_is_enough import largest_quantile
from pl_fed.types import Batch, ClientContext, RoundContext


def table(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def make_context(attackers, d=1, **fields):
    """Return the context of a round with these attackers and a global model of ones."""
    defaults = {
        "attackers": torch.as_tensor(attackers),
        "broadcast": torch.ones(d, dtype=torch.float64),
    }
    return RoundContext(seed=1, round=2, **{**defaults, **fields})


def omniscient_context(honest, number, defence=None, expected=None):
    """Return the context of a round with attackers that know benign uploads and defence."""
    n = len(honest) + number
    clients = torch.arange(n)
    byzantine = number if expected is None else expected
    about = RoundContext(seed=1, round=2, num_byzantine=byzantine, clients=clients)
    broadcast = torch.linspace(-2, 2, honest.shape[1], dtype=torch.float64)

    def merge(rows):
        return (defence or Mean())(torch.cat([honest, rows]), torch.ones(n), about)

    roles = {"observed": clients[: len(honest)], "attackers": clients[len(honest) :]}
    return replace(about, **roles, broadcast=broadcast, simulate_merge=merge)


def normal(n, d, seed=0, shift=0.3):
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=draws, dtype=torch.float64) + shift


NOBODY = torch.empty(0, 1, dtype=torch.float64)

# A number times a direction


def test_model_replacement_uses_the_number_of_clients_in_the_cohort():
    own, context = table([1, -2], [0.5, 4]), make_context([3, 7], clients=torch.arange(10))
    assert ModelReplacement().forge(own, own, context).tolist() == [[10, -20], [5, 40]]
    assert ModelReplacement(factor=3.0).forge(own, own, context).tolist() == [[3, -6], [1.5, 12]]


def test_one_attacker_of_ten_replaces_the_global_model():
    """Bagdasaryan et al.: if the others' updates cancel out, the mean is the attacker's update."""
    honest = torch.cat([table([1, 2], [-1, -2]), torch.zeros(7, 2)])
    own, context = table([3, 5]), make_context([9], clients=torch.arange(10))
    forged = ModelReplacement().forge(honest, own, context)
    assert torch.cat([honest, forged]).mean(0).tolist() == [3, 5]


def test_sign_flipping_flips_update_model_or_broadcast():
    own, context = table([2, -3]), make_context([5], d=2)
    # sent: w + upload, where w is 1, 1
    assert SignFlipping().forge(own, own, context).tolist() == [[-2, 3]]
    assert SignFlipping(4.0).forge(own, own, context).tolist() == [[-8, 12]]
    model = SignFlipping(2.0, of="model").forge(own, own, context) + 1
    assert model.tolist() == [[-6, 4]], "−2 (w + update)"
    model = SignFlipping(2.0, of="broadcast").forge(own, own, context) + 1
    assert model.tolist() == [[-2, -2]], "−2 w"


@exhaustive_but("arguments1-*")
@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "std"), [({}, 0.1**0.5), ({"std": 1.0}, 1.0)])
def test_sign_flipping_draws_a_factor_for_each_attacker(arguments, std):
    many = torch.arange(2000)
    own = torch.full((2000, 3), 2.0, dtype=torch.float64)
    attack = SignFlipping(factor=None, **arguments)
    factors = attack.forge(own, own, make_context(many)) / -2
    assert torch.equal(factors, factors[:, :1].expand(-1, 3)), "one for all coordinates"
    assert kstest(factors[:, 0].numpy(), halfnorm(scale=std).cdf).pvalue > 0.001
    later = attack.forge(own, own, replace(make_context(many), round=3)) / -2
    assert abs(np.corrcoef(factors[:, 0], later[:, 0])[0, 1]) < 0.06


def test_inner_product_manipulation_equals_a_hand_computed_example():
    honest, own = table([1, 5], [3, -1]), table([0, 0], [9, 9])
    forged = InnerProductManipulation(0.5).forge(honest, own, make_context([1, 2]))
    assert forged.tolist() == [[-1, -1], [-1, -1]]


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_inner_product_manipulation_reverses_the_mean_beyond_the_ratio(epsilon):
    """Xie et al.: n − q benign and q forged uploads have the mean (n − q − ε q) / n of the mean."""
    honest, own = normal(6, 4), torch.zeros(2, 4).double()
    forged = InnerProductManipulation(epsilon).forge(honest, own, make_context([6, 7]))
    together = torch.cat([honest, forged]).mean(0)
    torch.testing.assert_close(together, (6 - 2 * epsilon) / 8 * honest.mean(0))


def test_a_little_is_enough_equals_a_hand_computed_example():
    honest, own = table([1, 5], [3, -1], [5, 2]), table([0, 0])
    forged = ALittleIsEnough(factor=1.5).forge(honest, own, make_context([4]))
    sigma = math.sqrt(8 / 3), math.sqrt(6)  # of 1, 3, 5 and of 5, −1, 2, by three
    assert forged[0].tolist() == pytest.approx([3 - 1.5 * sigma[0], 2 - 1.5 * sigma[1]])


@pytest.mark.parametrize(
    ("clients", "attackers", "share"),
    [
        (50, 24, 24 / 26),  # s = 2
        (10, 4, 4 / 6),  # s = 2
        (25, 5, 12 / 20),  # s = 8
        (11, 5, 5 / 6),  # s = 1
        (10, 2, 4 / 8),  # s = 4: φ(z) < a half has no z above 0
        (10, 1, 0.5),
        (10, 5, 4 / 5),  # s = 1
        (10, 7, 2 / 3),  # the majority already: s = 1
        (10, 9, 0.5),
        (10, 10, 0.5),
        (0, 0, 0.5),
    ],
)
def test_default_factor_of_a_little_is_enough_equals_the_paper(clients, attackers, share):
    assert largest_quantile(clients, attackers) == pytest.approx(norm.ppf(share), abs=1e-12)
    honest, own = table([1], [3]), torch.zeros(attackers, 1).double()
    context = make_context(list(range(attackers)), clients=torch.arange(clients))
    forged = ALittleIsEnough().forge(honest, own, context)
    assert forged.flatten().tolist() == pytest.approx([2 - norm.ppf(share)] * attackers)


@table_test("attack", [ALittleIsEnough, InnerProductManipulation, SignFlipping])
@table_test("factor", ["most", math.nan, math.inf, True])
def test_invalid_factor_is_refused(attack, factor):
    with pytest.raises(ValueError, match=r"`factor` to be a finite number.* but got"):
        attack(factor=factor)


def test_factor_of_inner_product_manipulation_is_required():
    with pytest.raises(ValueError, match='a finite number or "search" but got None'):
        InnerProductManipulation(None)
    assert ALittleIsEnough(None).factor is None


# Searched for


def test_search_against_krum_stops_at_the_largest_selected_factor():
    """Krum picks the forged uploads up to a distance: they are to go as far, and no further."""
    honest, own = normal(8, 3), torch.zeros(3, 3).double()
    context = omniscient_context(honest, 3, Krum())
    mean = honest.mean(0)
    forged = InnerProductManipulation("search", trials=40).forge(honest, own, context)
    factor = float(-(forged[0] @ mean) / (mean @ mean))
    assert torch.equal(context.simulate_merge(forged), forged[0]), "it is picked"
    further = InnerProductManipulation(factor * 1.001).forge(honest, own, context)
    assert not torch.equal(context.simulate_merge(further), further[0]), "it would not be"


@pytest.mark.parametrize("defence", [Mean(), Median(), TrimmedMean(2)])
@pytest.mark.parametrize(
    "attack", [InnerProductManipulation, ALittleIsEnough, SignFlipping, ModelReplacement]
)
def test_search_does_more_harm_than_nearby_factors(attack, defence):
    honest, own = normal(8, 3), normal(2, 3, seed=5)
    context = omniscient_context(honest, 2, defence)

    def harm(factor):
        forged = attack(factor, trials=6).forge(honest, own, context)
        return float((context.simulate_merge(forged) - honest.mean(0)).norm())

    assert harm("search") >= max(harm(factor) for factor in (0.0, 1.0, 2.0, 4.0))


def test_search_against_the_mean_doubles_to_the_limit():
    honest, own = normal(8, 3), torch.zeros(2, 3).double()
    forged = InnerProductManipulation("search", trials=12).forge(
        honest, own, omniscient_context(honest, 2)
    )
    torch.testing.assert_close(forged[0], -(2**10) * honest.mean(0))


@table_test("broken", [math.nan, math.inf])
def test_factor_refused_by_the_defence_does_no_harm(broken):
    honest, own = normal(5, 3), torch.zeros(2, 3).double()
    mean = honest.mean(0)

    def merge_or_refuse(rows):
        factor = float(-(rows[0] @ mean) / (mean @ mean))
        if factor > 3:
            raise ValueError("too long")
        return torch.full((3,), broken) if factor > 2.5 else mean + factor

    context = replace(omniscient_context(honest, 2), simulate_merge=merge_or_refuse)
    forged = InnerProductManipulation("search", trials=50).forge(honest, own, context)
    torch.testing.assert_close(forged[0], -2.5 * mean, rtol=1e-6, atol=0)
    failing = replace(context, simulate_merge=lambda rows: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # no refusal, but an error
        InnerProductManipulation("search").forge(honest, own, failing)


def test_search_needs_a_simulated_merge():
    with pytest.raises(
        ValueError, match=r"`context.simulate_merge` to be given, .* of InnerProduct"
    ):
        InnerProductManipulation("search").forge(table([1]), table([1]), make_context([4]))


# As far as others are


def bisect(holds):
    """Return the largest γ within the bound, by bisection."""
    low, high = 0.0, 1.0
    while holds(high):
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def perturbation(name, rows):
    mean = rows.mean(0)
    perturbations = {"std": rows.std(0, ddof=1), "sign": np.sign(mean), "unit": mean}
    return -perturbations[name] / (np.linalg.norm(mean) if name == "unit" else 1)


def paper_min_max(name, rows):
    mean, p = rows.mean(0), perturbation(name, rows)
    bound = max(np.linalg.norm(a - b) for a in rows for b in rows)

    def holds(gamma):
        return max(np.linalg.norm(mean + gamma * p - x) for x in rows) <= bound

    return mean + bisect(holds) * p


def paper_min_sum(name, rows):
    mean, p = rows.mean(0), perturbation(name, rows)
    bound = max(sum(np.linalg.norm(a - b) ** 2 for b in rows) for a in rows)

    def holds(gamma):
        return sum(np.linalg.norm(mean + gamma * p - x) ** 2 for x in rows) <= bound

    return mean + bisect(holds) * p


UPLOADS = {
    "random": normal(7, 5),
    "two": normal(2, 5),
    "one far off": normal(6, 5) * torch.tensor([1e4, 1, 1, 1, 1, 1]).double()[:, None],
    "far from 0": normal(6, 5) + 1e3,
    "skewed": normal(9, 30).exp() ** 3,
    "about 0": normal(9, 4, shift=0.0),
    "one coordinate": normal(9, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["std", "sign", "unit"])
@pytest.mark.parametrize("case", UPLOADS)
@pytest.mark.parametrize(("attack", "paper"), [(MinMax, paper_min_max), (MinSum, paper_min_sum)])
def test_largest_gamma_equals_the_bisection_of_the_paper(attack, paper, case, name):
    honest = UPLOADS[case]
    forged = attack(name).forge(honest, torch.zeros_like(honest[:2]), make_context([20, 21]))
    expected = paper(name, honest.numpy())
    scale = np.abs(honest.numpy()).max()
    np.testing.assert_allclose(forged[0], expected, rtol=1e-8, atol=1e-8 * scale)
    assert torch.equal(forged[0], forged[1])


def test_min_max_and_min_sum_equal_a_hand_computed_example():
    honest, own = table([1], [2], [6]), table([0])
    # mean 3; furthest apart 5: not further than 5 from 6, so 1
    assert MinMax().forge(honest, own, make_context([4])).item() == pytest.approx(1)
    # sums of squares: 26, 17, 41 at most; 9 + 1 + 1... 3 γ² + 14 = 41
    assert MinSum().forge(honest, own, make_context([4])).item() == pytest.approx(0)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(2, 8),
    d=st.integers(1, 20),
    name=st.sampled_from(["std", "sign", "unit"]),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
)
def test_min_max_keeps_to_its_bound_and_reaches_it(seed, n, d, name, scale):
    honest = scale * normal(n, d, seed)
    forged = MinMax(name).forge(honest, honest[:1], make_context([20]))
    furthest = torch.cdist(forged, honest, compute_mode="donot_use_mm_for_euclid_dist").max()
    bound = torch.cdist(honest, honest, compute_mode="donot_use_mm_for_euclid_dist").max()
    assert float(furthest) == pytest.approx(float(bound), rel=1e-6)


def test_unknown_perturbation_is_refused():
    with pytest.raises(ValueError, match="`perturbation` to be 'std', 'sign' or 'unit' but got"):
        MinMax("mean")


# Copied


def test_mimic_copies_the_client_of_the_argument():
    honest, own = table([1, 0], [2, 0], [3, 0]), table([0, 0], [0, 0])
    context = make_context([8, 9], observed=torch.tensor([5, 0, 2]))
    assert Mimic(0).forge(honest, own, context).tolist() == [[2, 0], [2, 0]]
    assert Mimic(2).forge(honest, own, context).tolist() == [[3, 0], [3, 0]]
    assert Mimic(7).forge(honest, own, context).tolist() == [[3, 0], [3, 0]], "not in the cohort"


@pytest.mark.parametrize("case", UPLOADS)
def test_mimic_copies_the_farthest_client_along_the_first_principal_direction(case):
    honest = UPLOADS[case]
    gaps = honest.numpy() - honest.numpy().mean(0)
    direction = np.linalg.svd(gaps)[2][0]
    best = np.abs(honest.numpy() @ direction).argmax()
    forged = Mimic().forge(
        honest, honest[:1], make_context([20], observed=torch.arange(len(honest)))
    )
    assert torch.equal(forged[0], honest[best])


def test_mimic_breaks_ties_by_the_smallest_client_id():
    honest, own = table([-4], [4], [-4], [4]), table([0])
    for ids, expected in (([3, 1, 2, 5], 4), ([3, 4, 2, 5], -4)):
        forged = Mimic().forge(honest, own, make_context([9], observed=torch.tensor(ids)))
        assert forged.item() == expected


def test_mimic_without_honest_uploads_copies_an_attacker():
    own = table([1], [torch.nan], [5])
    assert Mimic(4).forge(NOBODY, own, make_context([4, 6, 8])).flatten().tolist() == [1] * 3
    assert Mimic(6).forge(NOBODY, own, make_context([4, 6, 8])).flatten().tolist() == [5] * 3, (
        "6 is broken"
    )


def test_mimic_needs_ids():
    message = r"`context.observed` to be the ids of 2 clients for Mimic but got \[\]"
    with pytest.raises(ValueError, match=message):
        Mimic().forge(table([1], [2]), table([1]), make_context([4]))


# Against Krum


def krum_scores(rows, byzantine):
    """Blanchard et al., in numpy."""
    n = len(rows)
    scores = []
    for i in range(n):
        distances = sorted(np.sum((rows[i] - rows[j]) ** 2) for j in range(n) if j != i)
        scores.append(sum(distances[: max(1, n - byzantine - 2)]))
    return np.array(scores)


def against_krum(honest, copies, byzantine):
    """λ by halving, every trial being a whole Krum; None if it falls below the smallest."""
    signs = np.sign(honest.mean(0))
    neighbours = max(1, len(honest) + copies - byzantine - 2)
    lowest = np.inf
    for i in range(len(honest)):
        distances = sorted(np.sum((honest[i] - x) ** 2) for j, x in enumerate(honest) if j != i)
        lowest = min(lowest, sum(distances[:neighbours]))
    share = lowest / max(1, neighbours - copies + 1)
    lam = np.linalg.norm(honest, axis=1).max() + np.sqrt(share)
    lam /= np.sqrt(np.abs(signs).sum())
    while lam >= 1e-5:
        scores = krum_scores(np.vstack([honest, [-lam * signs] * copies]), byzantine)
        if scores[len(honest) :].min() < scores[: len(honest)].min():
            return -lam * signs
        lam /= 2
    return None


@pytest.mark.slow
@pytest.mark.parametrize("case", UPLOADS)
@pytest.mark.parametrize(("number", "expected"), [(1, 1), (2, 2), (3, 1), (2, 3)])
def test_fang_against_krum_with_full_knowledge_equals_the_paper(case, number, expected):
    honest = UPLOADS[case]
    context = omniscient_context(honest, number, expected=expected)
    forged = Fang().forge(honest, torch.zeros_like(honest[:1]).expand(number, -1), context)
    expected_row = against_krum(honest.numpy(), number, expected)
    if expected_row is None:
        assert forged.abs().max() < 1e-5
    else:
        np.testing.assert_allclose(forged, np.tile(expected_row, (number, 1)), rtol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_krum_selects_the_upload_of_fang(seed):
    honest, own = normal(8, 6, seed), torch.zeros(3, 6).double()
    context = omniscient_context(honest, 3, Krum())
    forged = Fang().forge(honest, own, context)
    assert torch.equal(context.simulate_merge(forged), forged[0])
    assert bool((forged[0] * honest.mean(0) < 0).all()), "against the mean in each coordinate"


@pytest.mark.parametrize("number", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("seed", range(3))
def test_fang_against_krum_with_partial_knowledge_adds_simulated_attackers(number, seed):
    own = normal(number, 6, seed)
    expected_row = next(
        (
            candidate_row
            for copies in range(1, number + 1)
            if (candidate_row := against_krum(own.numpy(), copies, copies)) is not None
        ),
        None,
    )
    forged = Fang().forge(own, own, make_context(list(range(number)), d=6))
    if expected_row is None:
        assert forged.abs().max() < 1e-5
    else:
        np.testing.assert_allclose(forged[0], expected_row, rtol=1e-9)


def test_fang_against_krum_equals_a_hand_computed_example():
    honest = table([1], [2], [4])
    # two of five attack, one is expected: 2 neighbours; honest scores 1 + 9, 1 + 4, 4 + 9
    # λ_0 = 4 + √5; the forged score is 0 + (1 + λ)², below 5 for λ < √5 − 1 = 1.236
    # 6.236, 3.118, 1.559, 0.779
    forged = Fang().forge(honest, table([0], [0]), omniscient_context(honest, 2, expected=1))
    assert forged.flatten().tolist() == pytest.approx([-(4 + math.sqrt(5)) / 8] * 2)
    # one of four: 1 neighbour, honest scores 1, λ_0 = 4 + √1; (1 + λ)² is never below 1
    forged = Fang().forge(honest, table([0]), omniscient_context(honest, 1))
    assert forged.item() == pytest.approx(-5 / 2**19)
    assert 5 / 2**19 < 1e-5 < 5 / 2**18


def test_fang_against_krum_with_equal_uploads_copies_the_upload():
    honest = table([1, 0], [-1, 0], [0, 0])
    assert Fang().forge(honest, table([3, 3]), omniscient_context(honest, 1)).tolist() == [[0, 0]]


def test_mimic_copies_a_client_if_the_mean_of_honest_uploads_overflows():
    honest, context = torch.tensor([[2e38], [3e38], [0.1]]), RoundContext(observed=torch.arange(3))
    assert torch.equal(Mimic().forge(honest, torch.zeros(1, 1), context), honest[1:2])


def test_search_against_krum_ends_if_the_mean_of_honest_uploads_overflows(monkeypatch):
    trials = iter(range(2000))
    monkeypatch.setattr("pl_fed.attacks.fang._krum_picks_forged", lambda *_: next(trials) < 0)
    honest = torch.tensor([[2e38], [2e38], [0.1]])
    forged = Fang().forge(honest, torch.zeros(1, 1), omniscient_context(honest, 1))
    assert not forged.isfinite().any()  # a broken upload


# Against the trimmed mean and the median


@pytest.mark.parametrize("on", ["update", "model"])
def test_fang_against_the_trimmed_mean_draws_beyond_the_honest_range(on):
    honest, own = normal(5, 4000), torch.zeros(3, 4000).double()
    context = omniscient_context(honest, 3)
    forged = Fang("trimmed_mean", on=on).forge(honest, own, context).numpy()
    start = context.broadcast.numpy() if on == "model" else 0.0
    observed_models, sent = honest.numpy() + start, forged + start
    low, high, rises = observed_models.min(0), observed_models.max(0), honest.numpy().mean(0) > 0
    beyond_low = np.where(low > 0, low / 2, 2 * low)
    beyond_high = np.where(high > 0, 2 * high, high / 2)
    near, far = np.where(rises, low, high), np.where(rises, beyond_low, beyond_high)
    shares = (sent - near) / (far - near)
    assert shares.min() >= -1e-9
    assert shares.max() <= 1 + 1e-9
    for quadrant in (
        rises & (near > 0),
        rises & (near < 0),
        ~rises & (near > 0),
        ~rises & (near < 0),
    ):
        assert quadrant.sum() > 30, "each of the four cases"
        assert kstest(shares[:, quadrant].ravel(), "uniform").pvalue > 0.001
    assert abs(np.corrcoef(shares)[np.triu_indices(3, 1)]).max() < 0.06, "each draws by itself"


def test_fang_against_the_trimmed_mean_with_partial_knowledge_draws_from_the_range_of_the_paper():
    own = normal(6, 4000)
    forged = Fang("trimmed_mean").forge(own, own, make_context(list(range(6)), d=4000)).numpy()
    mean, std = own.numpy().mean(0), own.numpy().std(0)
    shares = (forged - mean) / std * np.where(mean > 0, -1, 1) - 3
    assert kstest(shares.ravel(), "uniform").pvalue > 0.001


@pytest.mark.parametrize("defence", [Median(), TrimmedMean()])
def test_fang_draws_a_median_to_the_edge_of_the_honest_range(defence):
    honest, own = normal(5, 30), torch.zeros(4, 30).double()
    context = omniscient_context(honest, 4, defence)
    merged = context.simulate_merge(Fang("trimmed_mean").forge(honest, own, context))
    rises = honest.mean(0) > 0
    torch.testing.assert_close(merged, torch.where(rises, honest.amin(0), honest.amax(0)))


# Drawn


def forge_without_uploads(attack, clients, d, **fields):
    return attack.forge(
        NOBODY, torch.zeros(len(clients), d).double(), make_context(clients, d, **fields)
    )


@pytest.mark.parametrize("std", [0.1**0.5, 2.0])
@pytest.mark.parametrize("on", ["update", "model"])
def test_random_updates_are_normal(std, on):
    numbers = forge_without_uploads(RandomUpdates(std, on), list(range(5)), 20_000).numpy()
    numbers = numbers + (1 if on == "model" else 0)  # the broadcast model is 1 everywhere
    for row in numbers:
        assert kstest(row, norm(scale=std).cdf).pvalue > 0.001
        assert row.mean() == pytest.approx(0, abs=5 * std / 20_000**0.5)
        assert row.std() == pytest.approx(std, rel=0.03)
    correlations = np.corrcoef(numbers)[np.triu_indices(5, 1)]
    assert abs(correlations).max() < 0.035, "each draws by itself"


@pytest.mark.parametrize("on", ["update", "model"])
def test_random_updates_have_the_deviation_of_the_replaced_uploads(on):
    own = normal(2, 20_000) * torch.tensor([[1.0], [7.0]]).double()
    context = make_context([4, 5], d=20_000, broadcast=torch.linspace(-9, 9, 20_000).double())
    forged = RandomUpdates(on=on).forge(own, own, context)
    start = context.broadcast if on == "model" else 0
    np.testing.assert_allclose((forged + start).std(1), (own + start).std(1), rtol=0.03)
    standard_updates = RandomUpdates(std=1.0, on=on).forge(own, own, context) + start
    expected = standard_updates * (own + start).numpy().std(1, keepdims=True)
    torch.testing.assert_close(forged + start, expected, rtol=1e-6, atol=1e-6)


def test_draws_are_new_in_each_round_and_for_each_seed():
    attack = RandomUpdates(std=1.0)
    first = forge_without_uploads(attack, [3], 50)
    assert torch.equal(first, forge_without_uploads(attack, [3], 50))
    for change in ({"round": 5}, {"seed": 9}):
        context = replace(make_context([3], 50), **change)
        other = attack.forge(NOBODY, torch.zeros(1, 50).double(), context)
        assert (other != first).float().mean() > 0.9


@exhaustive_but("arguments1-*")
@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "std"), [({}, 0.1**0.5), ({"std": 0.01}, 0.01)])
def test_the_same_value_is_drawn_for_each_attacker(arguments, std):
    sent = forge_without_uploads(SameValue(**arguments), list(range(2000)), 3).numpy() + 1  # w is 1
    np.testing.assert_allclose(sent, sent[:, :1].repeat(3, axis=1), atol=1e-12)
    assert kstest(sent[:, 0], norm(scale=std).cdf).pvalue > 0.001


def test_same_value_equals_the_argument():
    assert forge_without_uploads(SameValue(100.0), [2, 5], 2).tolist() == [[99, 99], [99, 99]]
    assert forge_without_uploads(SameValue(-3.0, on="update"), [2], 2).tolist() == [[-3, -3]]


def test_spread_of_random_updates_is_that_of_the_sent_parameters():
    own = torch.tensor([[1.0, 3.0, 0.0, 0.0]], dtype=torch.float64)
    context = make_context([0], d=4, unsent=torch.tensor([2, 3]))
    forged = RandomUpdates().forge(own, own, context)
    standard = RandomUpdates(std=1.0).forge(own, own, context)
    torch.testing.assert_close(forged, standard)  # of 1 and 3; of all, it is 1.22


@pytest.mark.parametrize("attack", [RandomUpdates(), SameValue(), SignFlipping(None)])
def test_draws_need_ids(attack):
    own = table([1], [2])
    message = rf"`context.attackers` to be the ids of the 2 attackers for {type(attack).__name__}"
    with pytest.raises(ValueError, match=message):
        attack.forge(own, own, make_context([4]))


@table_test(
    ("construct", "argument"),
    [
        (lambda: RandomUpdates(std=-1.0), "std"),
        (lambda: RandomUpdates(on="both"), "on"),
        (lambda: SameValue(std=-1.0), "std"),
        (lambda: SameValue(value=math.inf), "value"),
        (lambda: SameValue(on="model "), "on"),
        (lambda: SignFlipping(std=math.nan), "std"),
        (lambda: SignFlipping(of="own"), "of"),
        (lambda: Mimic(-1), "client"),
        (lambda: Fang("median"), "defence"),
        (lambda: Fang(on="both"), "on"),
        (lambda: ALittleIsEnough(trials=0), "trials"),
        (lambda: Combined([]), "attacks"),
        (lambda: Combined(["SignFlipping"]), "attacks"),
    ],
)
def test_invalid_arguments_are_refused(construct, argument):
    with pytest.raises(ValueError, match=rf"Expected argument `{argument}` to be .* but got"):
        construct()


# Several at once


class Shift(Attack):
    """Adds to labels and uploads."""

    def __init__(self, by):
        self.by = by

    def poison(self, batch, context):
        return batch._replace(targets=batch.targets + self.by)

    def trigger(self, batch):
        return batch._replace(inputs=batch.inputs * self.by + 1)

    def forge(self, honest, own, context):
        return own + honest.sum() * self.by


def test_combined_applies_attacks_in_order():
    batch = Batch(torch.ones(2, 1), torch.tensor([0, 3]), samples=torch.arange(2))
    attack = Combined([Shift(1), FlippedLabels(), ModelReplacement(10.0), Shift(-1)])
    client = ClientContext(seed=0, round=0, client=1, num_classes=10)
    assert attack.poison(batch, client).targets.tolist() == [7, 4]  # 9 − (0 + 1) − 1
    forged = attack.forge(table([2], [3]), table([1]), make_context([4]))
    assert forged.tolist() == [[55]]  # 10 · (1 + 5) − 5
    assert Combined([Shift(2), Shift(3)]).trigger(batch).inputs.flatten().tolist() == [10, 10]


def test_combined_has_the_flags_of_its_attacks():
    labels, flipping = RandomLabels(), SignFlipping()

    def flags(*attacks):
        attack = Combined(list(attacks))
        return attack.poisons, attack.forges, attack.triggers, attack.needs_simulation

    assert flags(labels) == (True, False, False, False)
    assert flags(flipping) == (False, True, False, False)
    assert flags(labels, flipping) == (True, True, False, False)
    assert flags(labels, Shift(1)) == (True, True, True, False)
    assert flags(labels, ALittleIsEnough("search")) == (True, True, False, True)
    assert flags(Combined([flipping]), labels) == (True, True, False, False)


def test_dittos_attacks_combine_random_labels_with_a_second_attack():
    batch = Batch(torch.zeros(20, 1), torch.zeros(20).long(), samples=torch.arange(20))
    client = ClientContext(seed=0, round=0, client=1, num_classes=10)
    labels, own, context = (
        RandomLabels(),
        normal(2, 6),
        make_context([3, 4], clients=torch.arange(10)),
    )
    for attack in (RandomUpdates(), ModelReplacement()):
        both = Combined([labels, attack])
        assert torch.equal(both.poison(batch, client).targets, labels.poison(batch, client).targets)
        assert torch.equal(both.forge(own, own, context), attack.forge(own, own, context))
