"""FLAME's theory (Zhu et al., arXiv 2407.16397, section V, appendices A and B), as it is trained.

On federated least squares. Where the paper is not exact, its intention is tested:

- f_i (appendix B) lacks a square; (144) has b + λ² for (b + λ)² in its last term; (132) has 1/m
  where (134) has α_i.
- (17) bounds ‖α_i (∇f_i + λ (θ_i − w_i))‖², but the step from (55) to (56) needs the bound on the
  norm without α_i (or α_i ≥ 1/2): Lemma 1 is tested with ε_i / α_i² in the place of ε_i.
- Proposition 2: the bound on q for global models, under same-value and Gaussian attacks, lacks
  θ_bᵀ θ_b in the second term of its denominator, as (154) shows; under sign-flipping, σ²/(b m)
  stands for σ²/(b N) in (157) and (159), and S_a for S_b in (161).
- Proposition 3 says that FLAME's losses vary less than Ditto's for any clients. Its proof has the
  sign of (177) wrong (the variance is convex in q), and supposes at its end that all θ_i are of
  equal length: then it is true, and the variance is q² times Ditto's. Else it may be larger; a
  counterexample is tested, too. (173) has a fourth power for a second one.
- λ → ∞ (section IV-E): FLAME's solutions go to FedADMM's; its rounds do not, as it takes O(λ) of
  them.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from dense_admm import LeastSquares
from every_state import after, after_each_round
from further_cases import covering, mark_further, mark_if
from small_federations import HalfSquares, reals, sgd, shared_out
from torch import nn

from pl_fed.attacks import Attack
from pl_fed.clients import FLAME, Ditto, FedADMM
from pl_fed.random import generator
from pl_fed.samplers import All, Uniform

SIZES = [8, 3, 12, 5, 7]


def linear(inputs=3, outputs=1):
    net = nn.Linear(inputs, outputs, bias=False).double()
    nn.init.zeros_(net.weight)
    return net


def flame(problem, lam, rho, kind=FLAME, steps=3, rate=None, **options):
    options |= {"lam": lam} if kind is FLAME else {}
    return kind(
        linear(len(problem.estimates[0])),
        rho=rho,
        optimizer=sgd(rate or 1 / (problem.smoothness + lam)),
        criterion=HalfSquares(),
        local_steps=steps,
        **options,
    )


def make_data(problem):
    return shared_out(problem.arrays, batch_size=1000)


def error(result, expected):
    """The largest difference, relative to the largest number."""
    return float(np.abs(result.numpy() - expected).max() / np.abs(expected).max())


# Solutions: (135), (136), (137)

UNEQUAL = [0.5, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "rho", "cohort_size", "rounds"),
    [
        ("uniform", 0.05, 5, 105),  # rho < lam alpha
        mark_if(True, "uniform", 0.2, 5, 95),  # rho = lam / m
        mark_if(True, "samples", 0.05, 5, 95),
        ("samples", 0.2, 3, 150),
    ],
)
def test_rounds_converge_to_solution_135(weights, rho, cohort_size, rounds):
    """One axis at a time: tests of the client hold every round to Algorithm 1 for all pairs."""
    problem = LeastSquares.drawn(SIZES)
    if weights == "uniform":  # the paper's own formula, once
        inverses = [np.linalg.inv(h + np.eye(3)) for h in problem.hessians]
        matrix = np.eye(3) - sum(inverses) / 5
        pieces = zip(inverses, problem.hessians, problem.estimates)
        w = np.linalg.solve(matrix, sum(v @ h @ e for v, h, e in pieces) / 5)
        np.testing.assert_allclose(problem.solution(1.0)[0], w, rtol=1e-10)
    client = flame(problem, 1.0, rho, weights=weights)
    result = after(client, make_data(problem), rounds, sampler=Uniform(cohort_size))
    w, theta = problem.solution(1.0, weights)
    assert error(result["w"], w) < 1e-6
    assert error(result["personal"], theta) < 1e-6
    assert error(result["local"], np.tile(w, (5, 1))) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lam", "rounds", "b"),
    [
        pytest.param(0.5, 55, UNEQUAL, id="0.5-55-unequal"),
        mark_if(True, 0.5, 55, [2.0] * 5, id="0.5-55-equal"),
        mark_if(True, 2.0, 75, UNEQUAL, id="2.0-75-unequal"),
        pytest.param(2.0, 75, [2.0] * 5, id="2.0-75-equal"),
    ],
)
def test_rounds_converge_to_solution_136(b, lam, rounds):
    """And to (137) where all b_i are equal: the mean of the θ̂_i."""
    problem = LeastSquares.drawn(SIZES, b=b)
    result = after(flame(problem, lam, lam / 4), make_data(problem), rounds)
    b, estimates = np.array(b)[:, None], problem.estimates
    w = (b * estimates / (b + lam)).sum(0) / (b / (b + lam)).sum()
    assert error(result["w"], w) < 1e-6
    assert error(result["personal"], (b * estimates + lam * w) / (b + lam)) < 1e-6
    assert (error(result["w"], estimates.mean(0)) < 1e-6) == (len(set(b.flatten())) == 1)


@pytest.mark.slow
def test_error_falls_linearly():
    """Theorem 4 b) (for least squares, the exponent is 1/2): by about the same factor a round."""
    problem = LeastSquares.drawn(SIZES)
    w, theta = problem.solution(1.0)
    errors = []
    for state in after_each_round(flame(problem, 1.0, 0.4), make_data(problem), 60):
        gaps = state["w"].numpy() - w, state["personal"].numpy() - theta
        errors.append(math.sqrt(sum(np.square(gap).sum() for gap in gaps)))
    ratios = [later / sooner for sooner, later in pairwise(errors)][10:]
    assert max(ratios) < 0.9
    assert max(ratios) - min(ratios) < 0.015
    assert errors[-1] < 2e-3 * errors[0]


# Lemma 1


@pytest.mark.slow
@pytest.mark.parametrize("cohort_size", mark_further([5, 2], [5]))
def test_lyapunov_function_decreases(cohort_size):
    """Lemma 1: L̃(P^t) − L̃(P^(t+1)) ≥ D_1 ΔΓ^(t+1), with inexact θ_i and some of the clients."""
    lam, rho, alpha, decay = 0.14, 0.112, 0.2, 0.7
    problem = LeastSquares.drawn(SIZES, b=[0.01, 0.02, 0.03, 0.04, 0.05], noise=0.1)
    smooth, a = problem.smoothness, lam * alpha
    slack = (a + rho) / 2 - a**2 * (1 + rho) / rho**2
    divisor = (1 / rho**2 - 1) * a**2 - (smooth * alpha + rho) / 2
    assert min(slack, rho - a, divisor) > 0, "the conditions of Lemma 1"
    iota = alpha**2 / (divisor * (1 - decay))
    client = flame(problem, lam, rho, tolerance=1e-4, decay=decay, steps=10, smoothness=smooth)

    def lyapunov(state):
        total = iota * float(state["tolerance"].sum()) / alpha**2
        w = state["w"].numpy()
        for i in range(5):
            theta, local, dual = (state[n][i].numpy() for n in ("personal", "local", "dual"))
            total += alpha * (problem.loss(i, theta) + lam / 2 * np.square(theta - local).sum())
            total += dual @ (local - w) + rho / 2 * np.square(local - w).sum()
        return total

    zeros = torch.zeros(5, 3, dtype=torch.float64)
    states = [dict.fromkeys(("personal", "local", "dual"), zeros)]
    states[0] |= {"w": zeros[0], "tolerance": torch.full((5, 1), 1e-4, dtype=torch.float64)}
    states += after_each_round(client, make_data(problem), 25, sampler=Uniform(cohort_size))
    for before, state in pairwise(states):
        moved = {n: (state[n] - before[n]).square().sum() for n in ("personal", "local", "w")}
        gamma = float(moved["personal"] + moved["local"] + 5 * moved["w"])
        assert lyapunov(before) - lyapunov(state) >= min(rho / 2, slack) * gamma > 0
    for i in state["cohort"].tolist():  # and (17) holds, an assumption of the lemma
        slope = problem.gradient(i, state["personal"][i].numpy())
        slope += lam * (state["personal"][i] - before["local"][i]).numpy()
        assert np.square(alpha * slope).sum() <= float(state["tolerance"][i])


# The limit of FedADMM


@pytest.mark.slow
def test_solutions_converge_to_those_of_fedadmm_for_large_lambda():
    """Twice the λ, about half the distance: O(1/λ). Personal models go to the global one, too."""
    problem = LeastSquares.drawn([8, 8, 12, 6, 7], b=[0.6, 0.8, 1.0, 1.4, 2.0])
    limit = after(flame(problem, 0, 0.2, FedADMM, rate=1.5), make_data(problem), 25)["w"]
    gaps, spreads = [], []
    for lam, rounds in ((2.0, 30), (4.0, 38), (8.0, 50)):
        result = after(flame(problem, lam, 0.25, steps=2), make_data(problem), rounds)
        gaps.append(float((result["w"] - limit).abs().max()))
        spreads.append(float((result["personal"] - result["w"]).abs().max()))
        assert gaps[-1] < 0.4 / lam
    for distances in (gaps, spreads):
        for larger, smaller in pairwise(distances):
            assert 0.5 < smaller / larger < 0.65


# One round from zero: appendix B


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize(("lam", "rho"), [(1.0, 0.1), (0.5, 0.3), (2.0, 0.7)])
def test_messages_of_the_first_round_equal_the_closed_form(weights, lam, rho):
    """u_i = 2 λ α_i / (λ α_i + ρ) · b / (b + λ) · θ̂_i, the θ_i being exact."""
    problem = LeastSquares.drawn(SIZES, b=[1.5] * 5)
    result = after(flame(problem, lam, rho, weights=weights, steps=1), make_data(problem), 1)
    a = lam * problem.alpha(weights)[:, None]
    u = 2 * a / (a + rho) * 1.5 / (1.5 + lam) * problem.estimates
    assert error(result["local"] + result["dual"] / rho, u) < 1e-6
    assert error(result["w"], u.mean(0)) < 1e-6


# Robustness and fairness: Propositions 2 and 3

CLIENTS, MALICIOUS, D, N = 10, 3, 4, 8
B, LAM, RHO, SIGMA, GAMMA, PROBLEMS = 2.0, 1.2, 0.2, 2.0, 0.5, 4000
BENIGN = CLIENTS - MALICIOUS
Q = 2 * LAM / CLIENTS / (LAM / CLIENTS + RHO) * B / (B + LAM)


class Forged(Attack):
    """The three attacks of section V-D, on a row of independent problems of D numbers each."""

    def __init__(self, kind):
        self.kind = kind

    def forge(self, honest, own, context):
        draw = generator(context.seed, self.kind, context.round)
        size = (len(own), own.shape[1] // D, D if self.kind == "Gaussian" else 1)
        p = GAMMA * torch.randn(size, generator=draw, dtype=own.dtype)
        if self.kind == "sign-flipping":
            return (-p.abs() * own.unflatten(1, (-1, D))).flatten(1)
        return p.expand(-1, -1, D).flatten(1)


def train(truths, problems=1, sigma=0.0, kind=FLAME, attack=None):
    """w after one round from zero, and the personal models θ = (b θ̂ + λ w) / (b + λ) by it.

    Clients observe so many independent problems, of the same truths [clients, D].
    """
    draw = torch.Generator().manual_seed(7)
    clients = len(truths)
    x = torch.linalg.qr(torch.randn(clients, N, D, generator=draw, dtype=torch.float64)).Q
    x = x * math.sqrt(N * B)
    noise = torch.randn(clients, N, problems, generator=draw, dtype=torch.float64)
    y = (x @ truths[:, :, None]) + sigma * noise
    arrays = reals(x.flatten(0, 1), y.flatten(0, 1), torch.arange(clients).repeat_interleave(N))
    arguments = {"criterion": HalfSquares(), "local_steps": 1, "lam": LAM}
    net, both = linear(D, problems), 1 / (B + LAM)
    if kind is FLAME:
        arguments |= {"rho": RHO, "pull_to": "broadcast", "optimizer": sgd(both)}
    else:
        arguments |= {"personal_lr": both, "optimizer": sgd(1 / B)}
    bad = list(range(BENIGN, CLIENTS)) if attack else None
    settings = {"sampler": All(), "attack": attack, "ids": bad}
    first, second = after_each_round(kind(net, **arguments), shared_out(arrays, 100), 2, **settings)
    return first["w"].view(problems, D), second["personal"].view(clients, problems, D)


def average_losses(truths, models, sigma):
    """f_i of (139) and (140), [clients], for models [(clients,) problems, D]."""
    gaps = (models - truths[:, None]).square().sum(-1).mean(-1)
    return sigma**2 / 2 + B / 2 * gaps


def losses_in_theory(q, truths, attack):
    """Average test losses on benign clients, of the global and the personal models.

    (148) and (151), (161) and (165); for Gaussian attacks as for same-value ones.
    """
    good, bad = truths[:BENIGN], truths[BENIGN:]
    noise = SIGMA**2 / (B * N)
    shift, forged = good.sum(0) / CLIENTS, MALICIOUS * D * GAMMA**2
    if attack == "sign-flipping":
        shift = shift - math.sqrt(2 / math.pi) * GAMMA * bad.sum(0) / CLIENTS
        lengths = bad.square().sum()
        forged = (math.pi - 2) / math.pi * GAMMA**2 * lengths + MALICIOUS * GAMMA**2 * D * noise
        forged = q**2 * forged
    away = (q * shift - good).square().sum(1).mean()
    spread = (BENIGN * q**2 * D * noise + forged) / CLIENTS**2
    personal = (B**2 + 2 * B * q * LAM / CLIENTS) * D * noise + LAM**2 * spread
    personal = B / 2 * (personal + LAM**2 * away) / (B + LAM) ** 2
    return [float(SIGMA**2 / 2 + loss) for loss in (B / 2 * (spread + away), personal)]


def least_q(truths, attack, index):
    """Return the q with the least loss; the loss is a parabola in q."""
    at = [losses_in_theory(q, truths, attack)[index] for q in (0.0, 0.5, 1.0)]
    curve = 2 * (at[2] - 2 * at[1] + at[0])
    return -(at[2] - at[0] - curve) / (2 * curve)


def draw_truths(length):
    """Return ten vectors; the mean over benign clients has about this length."""
    draw = torch.Generator().manual_seed(3)
    spread = 0.1 * torch.randn(CLIENTS, D, generator=draw, dtype=torch.float64)
    return length / math.sqrt(D) + spread - spread[:BENIGN].mean(0)


ATTACKS = ["same-value", "Gaussian", "sign-flipping"]
NEAR, FAR = draw_truths(0.2), draw_truths(2.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truths", "attack"),
    covering([NEAR, FAR], ATTACKS),
    ids=[f"{place}-{attack}" for place in ("near zero", "far from zero") for attack in ATTACKS],
)
def test_losses_equal_proposition_2(attack, truths):
    """Losses are those of theory; FLAME's are less than Ditto's where q is large enough for it."""
    result = {}
    for kind, q in ((FLAME, Q), (Ditto, 1.0)):
        w, theta = train(truths, PROBLEMS, SIGMA, kind, Forged(attack))
        pair = [
            average_losses(truths, models_of_kind, SIGMA)[:BENIGN].mean()
            for models_of_kind in (w, theta)
        ]
        expected = losses_in_theory(q, truths, attack)
        for actual, reference in zip(pair, expected, strict=True):
            assert float(actual) == pytest.approx(reference, rel=0.01)
            floor = SIGMA**2 / 2
            assert float(actual) - floor == pytest.approx(reference - floor, rel=0.04)
        result[kind] = pair
    for index in (0, 1):
        if least_q(truths, attack, index) <= Q:
            assert result[FLAME][index] <= result[Ditto][index]
    assert least_q(NEAR, attack, 0) <= Q
    assert least_q(NEAR, attack, 1) <= Q
    if truths is FAR:
        assert least_q(truths, attack, 0) > 1
        assert result[FLAME][0] > result[Ditto][0]


@pytest.mark.parametrize("truths", [NEAR, FAR], ids=["near zero", "far from zero"])
def test_bounds_of_proposition_2_hold(truths):
    """As (154) and (155) give them: the first has θ_bᵀ θ_b in its denominator."""
    m, mb, length = CLIENTS, BENIGN, float(truths[:BENIGN].mean(0).square().sum())
    noise = D * SIGMA**2
    globally = m * N * B * length / (noise + mb * N * B * length)
    assert least_q(truths, "Gaussian", 0) == pytest.approx(globally)
    above = m * B * (mb * N * LAM * length - noise)
    personally = above / (noise * mb * LAM + mb**2 * N * B * LAM * length)
    assert least_q(truths, "Gaussian", 1) == pytest.approx(personally)


def variances(truths):
    """Of the losses over the clients: FLAME's, and Ditto's, each of w and of the θ_i."""
    return [
        [float(average_losses(truths, parameters, 0.0).var(correction=0)) for parameters in models]
        for models in (train(truths), train(truths, kind=Ditto))
    ]


@pytest.mark.slow
def test_proposition_3_holds_for_clients_of_equal_length():
    """Noise adds the same to all losses, (170) and (171): none is needed. The ratio is q²."""
    truths = 1.0 + torch.randn(6, D, generator=torch.Generator().manual_seed(0)).double()
    truths = 3.0 * truths / truths.norm(dim=1, keepdim=True)
    a = LAM / 6
    q = 2 * a / (a + RHO) * B / (B + LAM)
    assert q < 1
    for less, more in zip(*variances(truths), strict=True):
        assert less < more
        assert less / more == pytest.approx(q**2, rel=1e-4)


@pytest.mark.slow
def test_proposition_3_fails_for_clients_of_unequal_length():
    """θ_1 = 1/5, θ_2 = 2: their mean is as far from both, and q times it is not.

    The losses of w differ by b/2 (θ_1² − θ_2² − 2 q θ (θ_1 − θ_2)) = 3.96 (q − 1), q = 15/16; those
    of the θ_i by that times (λ / (b + λ))². The variance is a quarter of the square.
    """
    truths = torch.zeros(2, D, dtype=torch.float64)
    truths[:, 0] = torch.tensor([0.2, 2.0])
    flames, dittos = variances(truths)
    half = 3.96 / 16 / 2
    assert flames == pytest.approx([half**2, half**2 * (LAM / (B + LAM)) ** 4], rel=1e-4)
    assert max(dittos) < 1e-9
