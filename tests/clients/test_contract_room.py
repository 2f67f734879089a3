"""Small clients that users could write: correct, and equal under all engines.

pl_fed ships none of them, but larger ones like them (Per-FedAvg, Ditto's choice of λ, ADMM,
tilted losses, FedPer, FedRep, FedBN), as short as a user would write them.
"""

import copy
import functools
import warnings

import pytest
import torch
from equal_trials import trials_skipped
from exhaustive import exhaustive_but, exhaustive_for
from small_federations import (
    HalfSquares,
    Only,
    Point,
    classes,
    mlp,
    points,
    seeded,
    sgd,
    shared_out,
)
from tables import table_test
from torch import nn
from torch.nn import functional as F  # noqa: N812

import pl_fed
from pl_fed import EngineOptions, Federation
from pl_fed.clients import Client, Ditto, FedAvg
from pl_fed.clients.contract import Model, ModelRows
from pl_fed.data.batches import LocalWork
from pl_fed.samplers import All, Uniform

SIZES = [7, 3, 10, 2]  # batches of 4: partial ones, fewer than one, two halves of one sample each
EVERYONE = torch.arange(4)


class Meta(Client):
    """Per-FedAvg: the loss after a step of one half of the batch, on the other half."""

    alpha = 0.3

    def training_step(self, batch, batch_idx):
        first, second = batch.part(slice(0, None, 2)), batch.part(slice(1, None, 2))
        at = self.parameters_of("global")
        gradient = self.gradient_at("global", at, first)
        step = {name: at[name] - self.alpha * gradient[name] for name in at}
        return self.loss_at("global", step, second)


class Candidates(Client):
    """Ditto with several λ at once, each with a model and a learning rate of its own.

    The personal model is the candidate that did best on the client's validation data.
    """

    def __init__(self, net, lams=(0.0, 0.5, 2.0), lrs=(0.1, 0.05, 0.2), **kwargs):
        names = [f"personal_{i}" for i in range(len(lams))]
        self.lams = dict(zip(names, lams))
        models = {
            "global": Model(),
            **{name: Model(lr=lr, validated=True) for name, lr in zip(names, lrs)},
            "personal": Model(trained=False, kept=False),
        }
        super().__init__(net, models=models, **kwargs)
        self.add_state("choice", 0)

    def training_step(self, batch, batch_idx):
        loss = self.loss("global", batch)
        for name, lam in self.lams.items():
            loss = loss + self.loss(name, batch) + lam / 2 * self.squared_distance(name)
        return loss

    def begin(self, client):
        candidates = [client.models[name] for name in self.lams]
        choice = client.states["choice"][:, 0].long()
        client.models["personal"] = ModelRows.choose(candidates, choice)

    def end_round(self, client):
        best = client.best_by_validation(tuple(self.lams), otherwise=0)
        client.states["choice"] = best[:, None].to(client.states["choice"])
        return super().end_round(client)


class ADMM(Client):
    """θ by gradient steps with a pull to w_i; w_i, π_i and u_i in closed form after them.

    The server's model is the mean of u_i over ALL clients, absent clients included: a client
    uploads the change of u_i, and the server's learning rate is the cohort's share of the clients.
    """

    lam, rho = 0.7, 0.4

    def __init__(self, net, **kwargs):
        super().__init__(net, models={"personal": Model()}, **kwargs)
        self.add_state("w", self.initial_row)
        self.add_state("pi", self.zero_row)
        self.add_state("u", self.initial_row)

    def training_step(self, batch, batch_idx):
        return self.loss("personal", batch) + self.lam / 2 * self.squared_distance("personal", "w")

    def end_round(self, client):
        w, theta = client.broadcast.parameters, client.models["personal"].parameters
        pi, before = client.states["pi"], client.states["u"]
        own = (self.rho * w - pi + self.lam * theta) / (self.rho + self.lam)
        pi = pi + self.rho * (own - w)
        client.states |= {"w": own, "pi": pi, "u": own + pi / self.rho}
        return client.states["u"] - before


class SendsModels(ADMM):
    """The same, where only the cohort's u_i count: their mean is the server's next model."""

    def end_round(self, client):
        super().end_round(client)
        return client.states["u"] - client.broadcast.parameters


class Tilted(Client):
    """A tilted mean over the classes that are in the batch, each with its mean loss."""

    tilt = 2.0

    def training_step(self, batch, batch_idx):
        outputs = self.global_model(batch.inputs)
        losses = self.sample_losses(outputs, batch.targets)
        member = batch.targets[:, None] == torch.arange(outputs.shape[1], device=outputs.device)
        if batch.mask is not None:
            member = member & batch.mask[:, None]
        counts = member.sum(0)
        means = torch.where(member, losses[:, None], 0).sum(0) / counts.clamp(min=1)
        exponents = torch.where(counts > 0, self.tilt * means, -1e30)
        number = (counts > 0).sum().clamp(min=1).to(losses.dtype)
        tilted = (exponents.logsumexp(0) - number.log()) / self.tilt
        return torch.where(counts.sum() > 0, tilted, 0)


class OwnParts(Client):
    """FedPer: the head is a client's own, the body the server's. A client keeps the head only."""

    def __init__(self, net, own=("2",), **kwargs):
        models = {"global": Model(trained=False), "personal": Model(kept=False)}
        super().__init__(net, models=models, **kwargs)
        self.own = self.row("personal").layout.positions(*own)
        self.add_state("own", lambda: self.initial_row()[self.own])

    def begin(self, client):
        client.models["personal"].parameters[:, self.own] = client.states["own"]

    def training_step(self, batch, batch_idx):
        return self.loss("personal", batch)

    def end_round(self, client):
        personal = client.models["personal"].parameters
        client.states["own"] = personal[:, self.own]
        upload = personal - client.broadcast.parameters
        upload[:, self.own] = 0
        return upload


class Alternating(OwnParts):
    """FedRep: the first two steps move the head, the others the body."""

    def training_step(self, batch, batch_idx):
        moves = ("2.weight", "2.bias") if batch_idx < 2 else ("0.weight", "0.bias")
        at = self.parameters_of("personal")
        live = {name: p if name in moves else p.detach() for name, p in at.items()}
        return self.loss_at("personal", live, batch)


class SharedStatistics(OwnParts):
    """The body's running statistics are the server's too."""

    def begin(self, client):
        super().begin(client)
        client.models["personal"].statistics[:] = client.broadcast.statistics

    def end_round(self, client):
        client.global_statistics = client.models["personal"].statistics
        return super().end_round(client)


class TwoPulls(Client):
    """A pull to the broadcast and one to where the client was a round ago."""

    def __init__(self, net, **kwargs):
        super().__init__(net, models={"global": Model(), "personal": Model()}, **kwargs)
        self.add_state("before", self.initial_row)

    def training_step(self, batch, batch_idx):
        pulls = 0.4 * self.squared_distance("personal", to="broadcast")
        pulls = pulls + 0.3 * self.squared_distance("personal", to="before")
        return self.loss("global", batch) + self.loss("personal", batch) + pulls

    def end_round(self, client):
        client.states["before"] = client.models["personal"].parameters.clone()
        return super().end_round(client)


ALL = [Meta, Candidates, ADMM, SendsModels, Tilted, OwnParts, Alternating, TwoPulls]


def make_data(sizes=SIZES, batch_size=4, **fractions):
    return shared_out(classes(sizes, seed=2), batch_size=batch_size, **fractions)


def run(client, data, rounds=2, engine="one_by_one", chunk_size=None, sampler=None, lr=1.0):
    """Run rounds on a copy; return w, all states and the sums of all metrics."""
    client = copy.deepcopy(client).double()
    server = functools.partial(torch.optim.SGD, lr=lr)
    federation = Federation(
        sampler or All(),
        engine=EngineOptions(engine, chunk_size=chunk_size),
        seed=0,
        server_optimizer=server,
    )
    with trials_skipped():
        federation.setup(client, data, "fit")
    client.train()
    optimizer = client.configure_optimizers()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Clients are run one by one")
        for round in range(rounds):
            federation.run_round(round, optimizer)
    client_ids = torch.arange(data.clients.num_clients)
    result = {"broadcast": client.row("global").data.clone()}
    for name in federation.store.defaults:
        result[name] = federation.store.read(name, client_ids)
    client.eval()
    federation.session.evaluation.evaluator.runner.stacked = engine == "stacked"
    with torch.no_grad():
        federation.evaluate("val", client_ids)
    for model, metrics in federation.metrics("val").items():
        result[f"{model} correct"] = metrics.correct.double()
        result[f"{model} loss"] = metrics.loss_sum
    return result


def largest_difference(first, second):
    assert set(first) == set(second)
    return max(
        float((first[k] - second[k]).abs().max()) if first[k].numel() else 0.0 for k in first
    )


@exhaustive_for("SendsModels", "OwnParts")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_one_by_one_and_stacked_in_any_chunks_agree(kind):
    client = kind(seeded(mlp), optimizer=sgd(0.1, momentum=0.5), local_epochs=2)
    data = make_data([9, 5, 12, 4], val_fraction=0.3)
    first = run(client, data, rounds=2, sampler=Uniform(3))
    assert all(value.isfinite().all() for value in first.values())
    for engine, chunk_size in (("one_by_one", 1), ("stacked", None), ("stacked", 2)):
        again = run(client, data, 2, engine, chunk_size, Uniform(3))
        assert largest_difference(first, again) < 1e-10
    assert largest_difference(first, run(client, data, rounds=1, sampler=Uniform(3))) > 1e-4


@exhaustive_for("Meta", "SendsModels", "Tilted", "OwnParts", "TwoPulls", "ADMM")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_trainer_fits_stops_resumes_and_tests_the_client(kind, tmp_path):
    """A stopped and resumed run equals an uninterrupted run."""
    module = make_data([12, 9, 15, 11], val_fraction=0.3, test_fraction=0.3)
    results = []
    for stop in (None, 1):
        for epochs in (stop, 3):
            if epochs is None:
                continue
            client = kind(seeded(mlp), optimizer=sgd(0.1), local_epochs=1)
            path = "last" if stop and epochs == 3 else None
            trainer = pl_fed.Trainer(
                Federation(Uniform(3), seed=0),
                run_dir=tmp_path / str(stop),
                max_epochs=epochs,
                precision="64-true",
                accelerator="cpu",
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(client, module, ckpt_path=path)
        (metrics,) = trainer.test(client, module, verbose=False)
        tables = trainer.predict(client, module)
        results.append((metrics, torch.cat([t["prediction"] for tables in tables for t in tables])))
    for model in client.evaluated:
        assert f"test/{model}/accuracy" in results[0][0]
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


# Each against a computation of its own


def test_second_order_gradients_equal_those_by_the_hessian():
    """One step: w − η mean over k of (I − α ∇²F₁(w)) ∇F₂(w − α ∇F₁(w))."""
    sizes = [4, 3, 2]
    data = make_data(sizes)
    client = Meta(seeded(lambda: nn.Linear(4, 3)), optimizer=sgd(0.2), local_steps=1)
    w = client.double().row("global").data.clone()
    before = w.clone()
    x, y = data.clients.inputs.double(), data.clients.targets
    federation = Federation(All(), engine=EngineOptions("one_by_one"), seed=0)
    federation.setup(client, data, "fit")
    samples_by_step = {}
    original = Meta.training_step

    def record_step(self, batch, batch_idx):
        samples_by_step[len(samples_by_step)] = batch.samples
        return original(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Meta, "training_step", record_step)
        federation.run_round(0, client.train().configure_optimizers())
    step = torch.zeros_like(w)
    for samples in samples_by_step.values():
        first, second = samples[0::2], samples[1::2]

        def loss(w, index):
            return F.cross_entropy(x[index] @ w[:12].view(3, 4).T + w[12:], y[index])

        hessian = torch.autograd.functional.hessian(lambda w, i=first: loss(w, i), w)
        gradient = torch.autograd.functional.jacobian(lambda w, i=first: loss(w, i), w)
        there = w - Meta.alpha * gradient
        outer = torch.autograd.functional.jacobian(lambda w, i=second: loss(w, i), there)
        step += (torch.eye(15) - Meta.alpha * hessian) @ outer / len(sizes)
    assert len(samples_by_step) == 3
    torch.testing.assert_close(client.row("global").data, before - 0.2 * step, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_each_candidate_equals_ditto_with_its_lambda_and_learning_rate():
    data = make_data()
    candidates = run(Candidates(seeded(mlp), optimizer=sgd(0.1), local_epochs=2), data)
    for i, (lam, lr) in enumerate(zip((0.0, 0.5, 2.0), (0.1, 0.05, 0.2))):
        ditto = Ditto(seeded(mlp), lam, lr, optimizer=sgd(0.1), local_epochs=2)
        alone = run(ditto, data)
        torch.testing.assert_close(candidates[f"personal_{i}"], alone["personal"])
        torch.testing.assert_close(candidates["broadcast"], alone["broadcast"])


@exhaustive_but("one_by_one")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_the_candidate_with_the_lowest_validation_loss_is_the_personal_model(engine):
    data = make_data([12, 9, 15, 2], val_fraction=0.2)
    assert data.clients.val.sizes.tolist()[3] == 0
    client = Candidates(
        seeded(lambda: nn.Sequential(mlp(), nn.Dropout(0.5))), optimizer=sgd(0.3), local_epochs=4
    )
    outcome = run(client, data, engine=engine)
    losses = torch.stack([outcome[f"personal_{i} loss"] for i in range(3)], 1)
    assert outcome["choice"][:, 0].tolist() == losses.argmin(1).tolist()
    assert len(outcome["choice"].unique()) > 1
    assert torch.equal(outcome["personal loss"], losses.amin(1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ADMM, SendsModels])
def test_closed_forms_after_the_local_work(kind):
    """The loss is ½ (θ − y)²; the second client takes no part in the first round."""
    y = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
    data = points([1.0], [-2.0], [4.0])
    theta, own, pi, u, w = [torch.zeros(3, dtype=torch.float64) for _ in range(4)] + [
        torch.zeros(())
    ]
    client = kind(Point().double(), criterion=HalfSquares(), optimizer=sgd(0.1), local_steps=2)
    module = shared_out(data)
    federation = Federation(
        Only(0, 2),
        seed=0,
        engine=EngineOptions("stacked"),
        server_optimizer=functools.partial(torch.optim.SGD, lr=2 / 3 if kind is ADMM else 1.0),
    )
    federation.setup(client, module, "fit")
    for round, cohort in enumerate([[0, 2], [1, 2]]):
        federation.sampler.clients = cohort
        federation.run_round(round, client.train().configure_optimizers())
        k = torch.tensor(cohort)
        for _ in range(2):
            theta[k] -= 0.1 * (theta[k] - y[k] + 0.7 * (theta[k] - own[k]))
        own[k] = (0.4 * w - pi[k] + 0.7 * theta[k]) / 1.1
        pi[k] += 0.4 * (own[k] - w)
        u[k] = own[k] + pi[k] / 0.4
        w = u.mean() if kind is ADMM else u[k].mean()
        assert float(client.row("global").data) == pytest.approx(float(w), abs=1e-12)
    assert federation.store.read("pi", torch.arange(3))[:, 0].tolist() == pytest.approx(pi.tolist())


def test_losses_per_class_equal_a_loop_over_the_classes():
    client = Tilted(seeded(mlp)).double()
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 4, generator=draw, dtype=torch.float64), torch.tensor([2, 0, 0, 2, 2, 1])
    mask = torch.tensor([True] * 5 + [False])
    losses = F.cross_entropy(client.global_model(x), y, reduction="none")
    means = torch.stack([losses[:5][y[:5] == label].mean() for label in (0, 2)])
    expected = (2.0 * means).exp().mean().log() / 2.0
    for batch in (pl_fed.types.Batch(x, y, mask), pl_fed.types.Batch(x[:5], y[:5])):
        torch.testing.assert_close(client.training_step(batch, 0), expected)


def simulate_fedper(steps, trained_layers):
    """Run two rounds of FedPer on full batches; a step trains ``trained_layers(step)``."""
    arrays = classes(SIZES, seed=2)
    server = seeded(mlp).double()
    heads = [copy.deepcopy(server[2].state_dict()) for _ in SIZES]
    for _ in range(2):
        bodies = []
        for k, head in enumerate(heads):
            net = copy.deepcopy(server)
            net[2].load_state_dict(head)
            x, y = arrays.inputs[arrays.client == k].double(), arrays.targets[arrays.client == k]
            for step in range(steps):
                parameters = [p for layer in trained_layers(step) for p in net[layer].parameters()]
                gradients = torch.autograd.grad(F.cross_entropy(net(x), y), parameters)
                with torch.no_grad():
                    for p, g in zip(parameters, gradients):
                        p -= 0.1 * g
            heads[k] = copy.deepcopy(net[2].state_dict())
            bodies.append(net[0].state_dict())
        mean = {n: torch.stack([body[n] for body in bodies]).mean(0) for n in bodies[0]}
        server[0].load_state_dict(mean)
    return server, heads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "trained_layers"),
    [(OwnParts, lambda step: (0, 2)), (Alternating, lambda step: (2,) if step < 2 else (0,))],
)
def test_shared_body_and_personal_heads_equal_a_plain_loop(kind, trained_layers):
    client = kind(seeded(mlp), optimizer=sgd(0.1), local_steps=3)
    outcome = run(client, make_data(batch_size=10))
    server, heads = simulate_fedper(3, trained_layers)
    assert outcome["own"].shape == (4, 5 * 3 + 3)
    for row, head in zip(outcome["own"], heads, strict=True):
        expected = torch.cat([head["weight"].flatten(), head["bias"]])
        torch.testing.assert_close(row, expected)
    expected = nn.utils.parameters_to_vector(server.parameters())
    torch.testing.assert_close(outcome["broadcast"], expected)


def test_a_shared_body_is_evaluated_under_each_clients_own_head():
    """The body being the server's of now, not that of the client's last round."""
    data = make_data([9, 5, 12, 4], val_fraction=0.4)
    outcome = run(OwnParts(seeded(mlp), optimizer=sgd(0.5), local_epochs=3), data, sampler=Only(0))
    for k in EVERYONE.tolist():
        row = torch.cat([outcome["broadcast"][:25], outcome["own"][k]])
        net = mlp().double()
        nn.utils.vector_to_parameters(row, net.parameters())
        index = data.clients.val.samples(k)
        outputs = net(data.clients.inputs[index].double())
        loss = F.cross_entropy(outputs, data.clients.targets[index], reduction="sum").detach()
        torch.testing.assert_close(outcome["personal loss"][k], loss)
        assert float(outcome["global loss"][k]) != pytest.approx(float(loss), abs=1e-4) or k != 0


def batch_norm_net():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@pytest.mark.slow
def test_personal_norm_layers_have_personal_statistics():
    """FedBN: the statistics stay with the client unless an algorithm shares them."""
    data = make_data([8, 6, 12, 4])
    client = OwnParts(seeded(batch_norm_net), own=("1",), optimizer=sgd(0.1), local_epochs=2)
    result = run(client, data)
    assert result["own"].shape == (4, 10)
    assert len(result["own"].unique(dim=0)) == len(result["personal.statistics"].unique(dim=0)) == 4
    assert largest_difference(result, run(client, data, chunk_size=1)) == 0


def test_running_statistics_of_a_shared_body_are_the_mean_over_the_clients():
    data = make_data([8, 6, 12, 4])
    settings = {"optimizer": sgd(0.0), "local_steps": 1}
    client = SharedStatistics(seeded(batch_norm_net), **settings).double()
    federation = Federation(All(), engine=EngineOptions("one_by_one"), seed=0)
    federation.setup(client, data, "fit")
    optimizer = client.train().configure_optimizers()
    start = client.statistics("global").data.clone()
    federation.run_round(0, optimizer)
    first = federation.store.read("personal.statistics", EVERYONE)
    torch.testing.assert_close(client.statistics("global").data, first.mean(0))
    federation.run_round(1, optimizer)
    second = federation.store.read("personal.statistics", EVERYONE)
    assert not torch.equal(first.mean(0), start)
    assert not torch.equal(second, first)
    torch.testing.assert_close(client.statistics("global").data, second.mean(0))


def test_two_pulls_have_two_centres():
    """One point: v moves by η (v − y + 0.8 (v − w) + 0.6 (v − before))."""
    client = TwoPulls(Point().double(), criterion=HalfSquares(), optimizer=sgd(0.1), local_steps=2)
    outcome = run(client, shared_out(points([3.0])), rounds=2)
    w = v = before = 0.0
    for _ in range(2):
        local_w = w
        for _ in range(2):
            local_w -= 0.1 * (local_w - 3.0)
            v -= 0.1 * ((v - 3.0) + 0.8 * (v - w) + 0.6 * (v - before))
        w, before = local_w, v
    assert float(outcome["personal"]) == pytest.approx(v, abs=1e-12)
    assert float(outcome["broadcast"]) == pytest.approx(w, abs=1e-12)


class Reporting(Client):
    """Records step means and the number of validation samples at the end of a round."""

    def __init__(self, net, **kwargs):
        super().__init__(net, **kwargs)
        self.add_state("observed", torch.zeros(3))

    def training_step(self, batch, batch_idx):
        loss = self.loss("global", batch)
        return {"loss": loss, "step": torch.ones_like(loss.detach()) * batch_idx}

    def end_round(self, client):
        means, observed = client.step_means, client.states["observed"]
        numbers = (means["loss"], means["step"], client.validation_samples[:, 0])
        client.states["observed"] = torch.stack([number.to(observed) for number in numbers], 1)
        return super().end_round(client)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_end_round_reads_the_means_of_the_steps(engine):
    """The mean over each client's own steps: 0, 1, 2, ... of them."""
    data = make_data([9, 5, 12, 2], val_fraction=0.3)
    client = Reporting(seeded(mlp), optimizer=sgd(0.1), local_epochs=2)
    observed = run(client, data, engine=engine)["observed"]
    steps = [2 * -(-n // 4) for n in data.clients.train.sizes.tolist()]
    assert observed[:, 1].tolist() == [(n - 1) / 2 for n in steps]
    assert observed[:, 2].tolist() == data.clients.val.sizes.tolist()
    assert len(set(steps)) > 1
    assert observed[:, 0].gt(0).all()


class Counted(Client):
    """Moves by 1 in its steps up to the one given by its id, whatever the learning rate."""

    def __init__(self, net, **kwargs):
        models = {"global": Model(), "personal": Model(work=LocalWork(3), lr=0.25)}
        super().__init__(net, models=models, **kwargs)

    def begin(self, client):
        self.observed = client.ids, client.steps.get("personal"), client.lr.get("personal")

    def training_step(self, batch, batch_idx):
        moves = (batch_idx < self.read("client")[0]) & (batch_idx < self.read("personal.steps")[0])
        way = torch.where(moves, -self.personal_model.value.sum() / self.read("personal.lr")[0], 0)
        return way + self.loss("global", batch)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked", "stacked_compiled"])
def test_a_client_knows_its_id_its_steps_and_its_learning_rate(uncompiled, engine):
    """Of both rounds: the rate is halved in the second, and the rows follow it."""
    data = shared_out(points([1.0] * 9, [0.0], [0.0] * 9, [0.0], [0.0] * 9))
    client = Counted(Point().double(), criterion=HalfSquares(), optimizer=sgd(0.5))
    federation = Federation(Only(0, 1, 2, 4), seed=0, engine=EngineOptions(engine, chunk_size=2))
    federation.setup(client, data, "fit")
    optimizer = client.train().configure_optimizers()
    for round in range(2):
        federation.run_round(round, optimizer)
        ids, steps, lr = client.observed
        assert ids.dtype == torch.int64
        assert steps.tolist() == [[3], [3]]
        assert lr.tolist() == [0.25 / 2**round]
        for group in optimizer.param_groups:
            group["lr"] /= 2
    moved = federation.store.read("personal", torch.arange(5)).flatten()
    assert moved.tolist() == [0.0, 2.0, 4.0, 0.0, 6.0]  # 3 steps at most
    federation.evaluate("val", torch.arange(5))
    federation.session.states.begin(torch.arange(5))
    assert client.observed[0].tolist() == [0, 1, 2, 3, 4]
    assert client.observed[1:] == (None, None)


# Error messages


def test_undeclared_model_is_refused():
    client = Candidates(seeded(mlp))
    assert set(client.models) == {"global", "personal", "personal_0", "personal_1", "personal_2"}
    with pytest.raises(ValueError, match=r"Expected a model.s name, one of global, .* got .w."):
        client.model("w")


def test_unknown_part_is_refused():
    with pytest.raises(ValueError, match=r"`parts` to name some of 0.weight, .* but got '7'"):
        OwnParts(seeded(mlp), own=("7",))


class ShortModel(OwnParts):
    def begin(self, client):
        client.models["personal"].parameters = client.states["own"]


class LongState(OwnParts):
    def end_round(self, client):
        upload = super().end_round(client)
        client.states["own"] = client.models["personal"].parameters
        return upload


class UnknownModel(OwnParts):
    def training_step(self, batch, batch_idx):
        return self.loss("hybrid", batch)


@table_test(
    ("kind", "match"),
    [
        (
            ShortModel,
            r"`begin` to leave the parameters of model `personal` of .*1, 43.* got .*1, 18",
        ),
        (LongState, r"`end_round` to leave state `own` of shape \[1, 18\] for one .* got .*1, 43"),
        (UnknownModel, r"Expected a model's name, one of global, personal, but got 'hybrid'"),
    ],
)
def test_models_and_states_of_a_wrong_length_are_refused_before_training(kind, match):
    with pytest.raises(ValueError, match=match):
        Federation(All(), seed=0).setup(kind(seeded(mlp)), make_data(), "fit")


class Compared(FedAvg):
    """FedAvg that keeps the validation losses of two models that no step trains."""

    def __init__(self, net, **kwargs):
        super().__init__(net, **kwargs)
        candidate = Model(trained=False, evaluated=False, validated=True)
        self.set_models({**self.models, "old": candidate, "shifted": candidate})
        self.add_state("losses", torch.zeros(2))

    def begin(self, client):
        super().begin(client)
        client.models["shifted"].parameters += 1.0

    def end_round(self, client):
        losses = client.validation_losses
        client.states["losses"] = torch.stack([losses["old"], losses["shifted"]], 1)
        return super().end_round(client)


@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_models_that_no_step_trains_are_validated(engine):
    """Points at 2 and 4 and a model at 0: their losses are half of the squared distances."""
    client = Compared(Point().double(), criterion=HalfSquares(), optimizer=sgd(0.5), local_steps=1)
    data = shared_out(points([2.0] * 4, [4.0] * 4), val_fraction=0.5)
    federation = Federation(All(), engine=EngineOptions(engine), seed=0)
    federation.setup(client, data, "fit")
    federation.run_round(0, client.configure_optimizers())
    losses = federation.store.read("losses", torch.arange(2))
    assert losses.tolist() == [[2.0, 0.5], [8.0, 4.5]]
