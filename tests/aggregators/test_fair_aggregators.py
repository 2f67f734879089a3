"""The aggregators that are fair to clients: closed forms, the papers' formulas, and real rounds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from small_federations import Only, classes, mlp, run_rounds, seeded, sgd, shared_out
from tables import table_test
from torch.nn import functional as F  # noqa: N812
from torch.testing import assert_close

from pl_fed import Adversary, EngineOptions, Federation
from pl_fed.aggregators import QFFL, FedMGDA, Mean, Term, TiltedMean
from pl_fed.attacks import RandomLabels
from pl_fed.clients import FedAvg
from pl_fed.samplers import All, Uniform
from pl_fed.types import Batch, ClientContext, RoundContext

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def random_uploads(n, d=5, seed=0, shift=0.0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=draw, dtype=torch.float64) + shift


def context(losses):
    losses = torch.as_tensor(losses, dtype=torch.float64)
    return RoundContext(clients=torch.arange(len(losses)), start_losses=losses)


def merge(aggregator, uploads, losses=None):
    losses = torch.ones(len(uploads)) if losses is None else losses
    return aggregator(uploads, torch.arange(1, len(uploads) + 1), context(losses))


upload_tables = st.builds(
    random_uploads, st.integers(1, 8), st.integers(1, 6), st.integers(0, 999), st.floats(-3, 3)
)

tilt_values = st.floats(0.01, 5) | st.floats(-5, -0.01)


@quick
@given(upload_tables)
@pytest.mark.slow
def test_zero_tilt_equals_the_mean_bit_for_bit(uploads):
    expected = merge(Mean(), uploads)
    for aggregator in (TiltedMean(q=0.0), Term(t=0.0), QFFL(q=0.0)):
        assert torch.equal(merge(aggregator, uploads), expected)
        assert torch.equal(merge(aggregator, uploads.float()), merge(Mean(), uploads.float()))
        assert aggregator.mass(torch.ones(3)) == 3
    for aggregator in (TiltedMean(q=1.0), Term(t=1.0), QFFL(q=1.0), FedMGDA(0.0)):
        assert aggregator.mass(torch.ones(3)) is None


@quick
@given(upload_tables, st.lists(st.floats(0, 10), min_size=8, max_size=8), st.sampled_from([1, -1]))
@pytest.mark.slow
def test_small_tilts_are_nearly_the_mean(uploads, losses, sign):
    losses, expected = torch.tensor(losses[: len(uploads)]), merge(Mean(), uploads)
    for aggregator in (TiltedMean(q=sign * 1e-9), Term(t=sign * 1e-9)):
        assert_close(merge(aggregator, uploads, losses), expected, rtol=0, atol=1e-6)
    assert_close(merge(QFFL(q=1e-9), uploads, losses + 0.1), expected, rtol=0, atol=1e-5)


# FedTilt's server


@quick
@given(upload_tables, st.just(0.0) | tilt_values, st.integers(1, 4), st.floats(0.05, 0.5))
@pytest.mark.slow
def test_tilted_mean_equals_gradient_descent_on_the_tilted_distance(uploads, q, steps, lr):
    """By autograd, on equation 10 with its distances in units of their mean at w^t."""
    unit = uploads.square().sum(1).mean()
    w = torch.zeros(uploads.shape[1], dtype=torch.float64, requires_grad=True)
    for _ in range(steps):
        distances = (w - uploads).square().sum(1)
        tilt = q / unit
        objective = distances.mean()
        if q:
            most = (tilt * distances).max().detach()
            objective = ((tilt * distances - most).exp().mean().log() + most) / tilt
        (gradient,) = torch.autograd.grad(objective, w)
        w = (w - lr * gradient).detach().requires_grad_()
    result = merge(TiltedMean(q, steps, lr), uploads)
    assert_close(result, w.detach(), rtol=1e-9, atol=1e-11)


def test_tilted_mean_equals_a_hand_computed_example():
    """Squared distances 1 and 3, their mean 2: weights e^{q/2} and e^{3q/2}."""
    uploads = torch.tensor([[1.0, 0.0], [0.0, math.sqrt(3)]], dtype=torch.float64)
    q = 2 * math.log(2)
    assert merge(TiltedMean(q), uploads).tolist() == pytest.approx([1 / 5, 4 / 5 * math.sqrt(3)])
    half = merge(TiltedMean(q, lr=0.25), uploads)
    assert half.tolist() == pytest.approx([1 / 10, 2 / 5 * math.sqrt(3)])
    assert merge(TiltedMean(steps=2, lr=0.25), uploads)[0].item() == pytest.approx(3 / 8)


def test_infinite_server_tilts_select_the_farthest_and_the_nearest_upload():
    uploads = torch.tensor([[3.0, 0.0], [0.0, 5.0], [-1.0, 1.0]], dtype=torch.float64)
    assert torch.equal(merge(TiltedMean(math.inf), uploads), uploads[1])
    assert torch.equal(merge(TiltedMean(-math.inf), uploads), uploads[2])
    assert_close(merge(TiltedMean(500.0), uploads), uploads[1])
    assert_close(merge(TiltedMean(-500.0), uploads), uploads[2])
    assert_close(merge(TiltedMean(math.inf), -uploads.repeat(2, 1)), -uploads[1])


@pytest.mark.slow
def test_many_small_steps_end_at_the_midpoint_of_the_farthest_uploads():
    """The result is the centre of the smallest ball; two points are the ends of a diameter."""
    uploads = torch.tensor([[4.0, 1.0], [-2.0, 1.0], [1.0, 2.0], [0.0, 1.0]], dtype=torch.float64)
    centre = merge(TiltedMean(math.inf, steps=5_000, lr=4e-3), uploads)
    assert_close(centre, torch.tensor([1.0, 1.0], dtype=torch.float64), rtol=0, atol=0.03)


@pytest.mark.parametrize("length", [1e-25, 1e-3, 1e6, 1e25])
def test_length_of_updates_does_not_saturate_the_tilt(length):
    uploads = random_uploads(6, 1000)
    expected = merge(TiltedMean(3.0, steps=2), uploads) * length
    assert_close(merge(TiltedMean(3.0, steps=2), uploads * length), expected)
    narrow = merge(TiltedMean(3.0, steps=2), (uploads * length).float()).double()
    assert_close(narrow / length, expected / length, rtol=1e-4, atol=1e-4)


def test_equal_uploads_are_merged_to_that_upload():
    assert torch.equal(merge(TiltedMean(5.0), torch.zeros(3, 4)), torch.zeros(4))


# By losses


@pytest.mark.slow
@quick
@given(upload_tables, st.floats(-3, 3), st.integers(0, 99))
def test_term_equals_its_formula(uploads, t, seed):
    losses = 3 * torch.rand(len(uploads), generator=torch.Generator().manual_seed(seed)).double()
    powers = (t * losses).exp()
    expected = powers / powers.sum() @ uploads
    assert_close(merge(Term(t), uploads, losses), expected, rtol=1e-10, atol=1e-12)


def test_term_does_not_overflow_and_reaches_its_limits():
    uploads, losses = random_uploads(4), [9990.0, 1e4, 2.0, 1e4]
    worst = uploads[[1, 3]].mean(0)
    for t in (200.0, 1e6, math.inf):
        assert_close(merge(Term(t), uploads, losses), worst)
        assert_close(merge(Term(-t), uploads, losses), uploads[2])


def test_afl_puts_all_weight_on_the_worst_client():
    uploads = random_uploads(3)
    assert torch.equal(merge(Term(math.inf), uploads, [0.5, 0.9, 0.7]), uploads[1])


@quick
@given(upload_tables, st.floats(0.01, 6), st.floats(0.1, 100), st.integers(0, 99))
@pytest.mark.slow
def test_q_ffl_equals_its_formula(uploads, q, lipschitz, seed):
    """Algorithm 2, in the paper's signs."""
    draw = torch.Generator().manual_seed(seed)
    losses = 0.1 + 3 * torch.rand(len(uploads), generator=draw, dtype=torch.float64)
    delta_w = -lipschitz * uploads
    delta = losses[:, None] ** q * delta_w
    h = q * losses ** (q - 1) * delta_w.square().sum(1) + lipschitz * losses**q
    expected = -delta.sum(0) / h.sum()
    assert_close(merge(QFFL(q, lipschitz), uploads, losses), expected, rtol=1e-10, atol=1e-14)


def test_q_ffl_with_losses_of_any_size():
    uploads = random_uploads(4)
    for losses in ([0.0, 1.0, 2.0, 0.0], [1e4, 1e3, 1.0, 1e-8], [0.0] * 4):
        for q in (0.1, 1.0, 5.0, 300.0):
            assert merge(QFFL(q), uploads, losses).isfinite().all()
    expected = uploads[1] / (1 + 300 * uploads[1].square().sum() / 1e4)
    assert_close(merge(QFFL(300.0), uploads, [1.0, 1e4, 2.0, 0.0]), expected)


@table_test("aggregator", [Term(), QFFL()])
@table_test("losses", [[], [1.0], [1.0, math.nan], [math.inf, 1.0]], ids=str)
def test_losses_of_a_wrong_shape_are_refused(aggregator, losses):
    name = type(aggregator).__name__
    match = rf"one for each of the 2 uploads, for {name} but got \["
    with pytest.raises(ValueError, match=match):
        merge(aggregator, random_uploads(2), losses)


def test_negative_losses_are_refused_by_q_ffl():
    with pytest.raises(ValueError, match=r"at least 0 for QFFL, .* but got \[1.0, -0.5\]"):
        merge(QFFL(), random_uploads(2), [1.0, -0.5])


# FedMGDA+


@quick
@given(upload_tables)
@pytest.mark.slow
def test_fedmgda_with_epsilon_zero_equals_the_mean_of_the_directions(uploads):
    expected = F.normalize(uploads).mean(0)
    assert_close(merge(FedMGDA(0.0), uploads), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tiny", [1e-30, 1e-42, 0.0])
def test_tiny_upload_does_not_stop_fedmgda(tiny):
    uploads = torch.tensor([[1.0, 0.0], [0.0, 1.0], [tiny, 0.0]])
    result = merge(FedMGDA(0.1), uploads)
    assert 0 < result.norm() <= 1 + 1e-6


@pytest.mark.slow
@quick
@given(upload_tables, st.sampled_from([0.05, 0.1, 0.5, 1.0, math.inf]))
def test_fedmgda_equals_scipy(uploads, epsilon):
    directions = F.normalize(uploads).numpy()
    n = len(directions)
    solution = minimize(
        lambda x: float(((x @ directions) ** 2).sum()),
        [1 / n] * n,
        jac=lambda x: 2 * directions @ (x @ directions),
        bounds=[(max(0.0, 1 / n - epsilon), min(1.0, 1 / n + epsilon))] * n,
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    expected = torch.from_numpy(solution.x @ directions)
    assert_close(merge(FedMGDA(epsilon), uploads), expected, rtol=0, atol=1e-5)


def test_fedmgda_equals_a_hand_computed_example():
    """Directions e₁, e₂, e₂: weights of one half each, or as near as 1/3 ± ε allows."""
    uploads = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 4.0]], dtype=torch.float64)
    assert merge(FedMGDA(1.0), uploads).tolist() == pytest.approx([0.5, 0.5])
    assert merge(FedMGDA(0.1), uploads).tolist() == pytest.approx([1 / 3 + 0.1, 2 / 3 - 0.1])


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("length", [1e-30, 1e-3, 1e30])
def test_fedmgda_reads_directions_only(epsilon, length):
    uploads = random_uploads(5, 40, shift=0.5)
    expected = merge(FedMGDA(epsilon), uploads)
    lengths = length * torch.arange(1.0, 6.0, dtype=torch.float64)
    assert_close(merge(FedMGDA(epsilon), uploads * lengths[:, None]), expected)
    narrow = merge(FedMGDA(epsilon), (uploads * length).float())
    assert_close(narrow, expected.float(), rtol=1e-4, atol=1e-5)


def test_an_upload_of_zero_has_no_direction():
    uploads = torch.tensor([[0.0, 0.0], [3.0, 0.0]], dtype=torch.float64)
    assert merge(FedMGDA(0.0), uploads).tolist() == [0.5, 0.0]
    assert merge(FedMGDA(1.0), uploads).norm() < 1e-14
    assert merge(FedMGDA(0.1), torch.zeros(3, 2)).tolist() == [0.0, 0.0]


def test_fedmgda_lowers_the_loss_of_every_client():
    """The mean direction raises the loss of one client."""
    uploads = torch.tensor([[1.0, 0.2], [1.0, 0.3], [1.0, 0.1], [-0.9, 1.0]], dtype=torch.float64)
    assert (F.normalize(uploads) @ merge(FedMGDA(0.0), uploads) < 0).any()
    assert (F.normalize(uploads) @ merge(FedMGDA(1.0), uploads) > 0).all()


@table_test(
    ("kind", "arguments"),
    [
        (TiltedMean, {"q": math.nan}),
        (TiltedMean, {"steps": 0}),
        (TiltedMean, {"lr": 0.0}),
        (TiltedMean, {"lr": math.inf}),
        (Term, {"t": math.nan}),
        (QFFL, {"q": -0.1}),
        (QFFL, {"q": math.inf}),
        (QFFL, {"lipschitz": 0.0}),
        (FedMGDA, {"epsilon": -0.1}),
        (FedMGDA, {"epsilon": math.nan}),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(kind, arguments):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=rf"Expected argument `{name}` to be .* but got {value}\."):
        kind(**arguments)


# In rounds

SIZES = [7, 3, 10, 2]


class Watched(Term):
    """Keeps its last uploads and context."""

    def forward(self, uploads, weights, context):
        self.last_call = (uploads.clone(), context)
        return super().forward(uploads, weights, context)


def client(lr=0.2):
    return FedAvg(seeded(mlp), optimizer=sgd(lr), local_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
@pytest.mark.parametrize("redraw", [False, True])
def test_weights_use_the_loss_of_the_broadcast_on_the_labels_of_each_client(engine, redraw):
    """Byzantine clients use their poisoned labels; the reference loops over clients and samples."""
    arrays, attack = classes(SIZES), RandomLabels(redraw=redraw)
    data, algorithm = shared_out(arrays), client().double()
    federation = Federation(
        Only(3, 0, 2),
        Watched(2.0),
        adversary=Adversary(attack=attack, ids=[0, 3]),
        engine=EngineOptions(engine, chunk_size=2),
        seed=5,
    )
    federation.setup(algorithm, data, "fit")
    optimizer = algorithm.train().configure_optimizers()
    for round in range(2):
        before = [p.detach().clone() for p in algorithm.global_model.parameters()]
        expected = []
        for k in (3, 0, 2):
            index = data.clients.train.samples(k)
            batch = Batch(
                data.clients.inputs[index].double(), data.clients.targets[index], None, index
            )
            if k != 2:
                batch = attack.poison(batch, ClientContext(5, round, k, 3))
                assert not torch.equal(batch.targets, data.clients.targets[index])
            expected.append(
                F.cross_entropy(algorithm.global_model(batch.inputs), batch.targets).item()
            )
        w = torch.cat([p.flatten() for p in before])
        federation.run_round(round, optimizer)
        uploads, context = federation.server.aggregator.last_call
        assert context.clients.tolist() == [3, 0, 2]
        assert context.start_losses.tolist() == pytest.approx(expected, abs=1e-12)
        powers = (2 * torch.tensor(expected, dtype=torch.float64)).exp()
        step = powers / powers.sum() @ uploads
        assert_close(algorithm.row("global").data, w + step, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_zero_tilt_equals_fedavg_exactly(engine):
    data = shared_out(classes(SIZES))
    settings = {"rounds": 3, "sampler": Uniform(3), "engine": engine}
    expected = run_rounds(client(), data, aggregator=Mean(), **settings)
    for aggregator in (TiltedMean(0.0), Term(0.0), QFFL(0.0)):
        assert torch.equal(
            run_rounds(client(), data, aggregator=aggregator, **settings).w, expected.w
        )


def test_step_of_term_equals_gradient_descent_on_the_tilted_loss():
    """w − η ∇ (1/t) log mean_k e^{t F_k(w)}, with full batches and one local step."""
    arrays, t = classes(SIZES), 3.0
    net = seeded(mlp).double()
    parts = [arrays.client == k for k in range(4)]
    own = [
        F.cross_entropy(net(arrays.inputs[part].double()), arrays.targets[part]) for part in parts
    ]
    objective = (t * torch.stack(own)).exp().mean().log() / t
    gradients = torch.autograd.grad(objective, list(net.parameters()))
    expected = torch.cat([(p - 0.2 * g).flatten() for p, g in zip(net.parameters(), gradients)])
    algorithm = FedAvg(seeded(mlp), optimizer=sgd(0.2), local_steps=1)
    outcome = run_rounds(algorithm, shared_out(arrays, batch_size=10), 1, aggregator=Term(t))
    assert_close(outcome.w, expected.detach(), rtol=0, atol=1e-12)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("aggregator", [Term(20.0), QFFL(5.0, lipschitz=5.0), FedMGDA(1.0)])
def test_fair_aggregators_lower_the_worst_loss_of_the_mean(aggregator):
    """The client with inverted labels has a lower loss than under the mean."""
    arrays = classes([10, 10, 10, 10], num_classes=2)
    y = (arrays.inputs[:, 0] > 0).long()
    arrays.targets[:] = torch.where(arrays.client == 3, 1 - y, y)

    def losses(aggregator, rounds=40):
        outcome = run_rounds(
            FedAvg(seeded(lambda: mlp(num_classes=2)), optimizer=sgd(0.2), local_steps=1),
            shared_out(arrays, batch_size=10), rounds, sampler=All(), aggregator=aggregator,
        )  # fmt: skip
        net = seeded(lambda: mlp(num_classes=2)).double()
        torch.nn.utils.vector_to_parameters(outcome.w, net.parameters())
        own = [
            F.cross_entropy(
                net(arrays.inputs[arrays.client == k].double()), arrays.targets[arrays.client == k]
            )
            for k in range(4)
        ]
        return torch.stack(own).detach()

    assert losses(aggregator).max() < 0.8 * losses(Mean()).max()
