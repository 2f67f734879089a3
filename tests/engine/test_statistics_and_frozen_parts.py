"""Running statistics are part of a model; frozen parts are shared, and never change."""

import copy

import pytest
import torch
from further_cases import mark_further
from small_federations import Cohorts, Only, classes, mlp, run_rounds, seeded, sgd, shared_out
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from pl_fed import EngineOptions, Federation
from pl_fed.aggregators import Mean
from pl_fed.clients import Ditto, FedAvg, FedPer, Local, Mapper
from pl_fed.samplers import All


def batch_norm_net(momentum=0.1):
    return seeded(lambda: nn.Sequential(nn.BatchNorm1d(4, momentum=momentum), nn.Linear(4, 3)))


def batch_statistics(x):
    """Return BatchNorm's statistics of one minibatch, as a row."""
    return torch.cat([x.mean(0), x.var(0)]).double()


START = torch.cat([torch.zeros(4), torch.ones(4)]).double()


def test_one_step_updates_the_statistics_by_the_momentum():
    data = shared_out(classes([5]), batch_size=5)
    client = FedAvg(batch_norm_net(), optimizer=sgd(), local_steps=1)
    outcome = run_rounds(client, data, rounds=1)
    expected = 0.9 * START + 0.1 * batch_statistics(data.clients.inputs)
    torch.testing.assert_close(outcome.w_statistics, expected)


def test_statistics_of_the_server_are_the_mean_over_the_clients():
    arrays = classes([5, 3, 8])
    data = shared_out(arrays, batch_size=8)
    client = FedAvg(batch_norm_net(), optimizer=sgd(), local_steps=1)
    rows = [
        0.9 * START + 0.1 * batch_statistics(arrays.inputs[arrays.client == k]) for k in range(3)
    ]
    outcome = run_rounds(client, data, rounds=1)
    torch.testing.assert_close(outcome.w_statistics, torch.stack(rows).mean(0))
    rows = [
        0.9 * outcome.w_statistics + 0.1 * batch_statistics(arrays.inputs[arrays.client == k])
        for k in range(3)
    ]
    outcome = run_rounds(client, data, rounds=2)
    torch.testing.assert_close(outcome.w_statistics, torch.stack(rows).mean(0))


def test_personal_statistics_belong_to_the_client():
    arrays = classes([5, 3, 8])
    client = Ditto(batch_norm_net(), optimizer=sgd(), local_steps=1)
    outcome = run_rounds(client, shared_out(arrays, batch_size=8), rounds=2)
    for k in range(3):
        batch = batch_statistics(arrays.inputs[arrays.client == k])
        expected = 0.9 * (0.9 * START + 0.1 * batch) + 0.1 * batch
        torch.testing.assert_close(outcome.v_statistics[k], expected)


def test_statistics_of_a_client_outside_the_cohort_stay_constant():
    client = Ditto(batch_norm_net(), optimizer=sgd(), local_steps=1)
    data = shared_out(classes([5, 3, 8]), batch_size=8)
    outcome = run_rounds(client, data, rounds=2, sampler=Only(0, 2))
    assert torch.equal(outcome.v_statistics[1], START)
    assert not torch.equal(outcome.v_statistics[2], START)


def test_model_and_its_statistics_stay_constant_after_its_last_step():
    """With s = 1 step on v and r = 4 steps on w, v sees one minibatch."""
    data = shared_out(classes([6, 6]), batch_size=3)
    many = Ditto(batch_norm_net(), optimizer=sgd(), local_steps=4, personal_steps=1)
    one = Ditto(batch_norm_net(), optimizer=sgd(), local_steps=1)
    after_many, after_one = (run_rounds(client, data, rounds=1) for client in (many, one))
    assert torch.equal(after_many.v_statistics, after_one.v_statistics)
    assert torch.equal(after_many.v, after_one.v)
    assert not torch.equal(after_many.w_statistics, after_one.w_statistics)


@pytest.mark.parametrize("model", ["global", "personal"])
def test_rows_stay_tied_to_a_model_that_is_moved_to_another_device(model):
    """After each stage on a GPU, Lightning's move keeps parameters and exchanges buffers."""
    client = Ditto(batch_norm_net())
    for row in (client.row, client.statistics):
        assert not (row(model).data == 7).any()
    client._apply(torch.clone)
    for row in (client.row, client.statistics):
        row(model).data.fill_(7)
    net = client.model(model)
    assert all((p == 7).all() for p in net.parameters())
    assert all((net[0].get_buffer(name) == 7).all() for name in ("running_mean", "running_var"))


def test_model_of_a_client_is_equal_after_a_move():
    client, data = Local(batch_norm_net(), optimizer=sgd()), shared_out(classes([4, 8]))
    federation = Federation(All(), seed=0, engine=EngineOptions("one_by_one"))
    federation.setup(client, data, "fit")
    federation.run_round(0, client.configure_optimizers())
    before = federation.model_of(1).state_dict()
    client._apply(torch.clone)
    after = federation.model_of(1).state_dict()
    assert not torch.equal(before["0.running_mean"], START[:4].float())
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


def test_cumulative_average_is_over_the_minibatches_of_the_client():
    """With momentum None, BatchNorm's count of minibatches is one of the statistics."""
    arrays = classes([10, 5, 15])
    client = Ditto(batch_norm_net(momentum=None), optimizer=sgd(), local_epochs=1)
    data = shared_out(arrays, batch_size=5)
    outcome = run_rounds(client, data, rounds=1, shuffle=False)
    expected = [
        torch.stack([batch_statistics(batch) for batch in data.clients.inputs[own].split(5)]).mean(
            0
        )
        for own in map(data.clients.train.samples, range(3))
    ]
    torch.testing.assert_close(outcome.v_statistics[:, :-1], torch.stack(expected))
    torch.testing.assert_close(outcome.w_statistics[:-1], torch.stack(expected).mean(0))
    assert outcome.v_statistics[:, -1].tolist() == [2, 1, 3]
    assert float(outcome.w_statistics[-1]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [1, 2])
def test_cumulative_average_does_not_depend_on_chunks_or_other_clients(chunk_size):
    client = Local(batch_norm_net(momentum=None), optimizer=sgd(), local_epochs=2)
    data = shared_out(classes([7, 5, 9]), batch_size=5)
    first = run_rounds(client, data)
    assert first.distance(run_rounds(client, data, chunk_size=chunk_size)) == 0
    alone = run_rounds(client, data, sampler=Only(2))
    assert torch.equal(first.v_statistics[2], alone.v_statistics[2])


class Constant(nn.Module):
    """A net with a constant buffer in its state dict."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.1307, 0.3081, 0.7, 1e-7]))
        self.net = mlp()

    def forward(self, x):
        return self.net(x - self.mean)


class Divided(nn.Linear):
    """A linear layer with a saved buffer that no step changes."""

    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("temperature", torch.tensor(1.0))

    def forward(self, x):
        return super().forward(x) / self.temperature


class Unlike(FedPer):
    """Clients begin with different buffers."""

    def begin(self, client):
        super().begin(client)
        client.models["personal"].statistics += client.ids[:, None]


@pytest.mark.filterwarnings("ignore:Clients are run one by one from round 0 on")
@pytest.mark.parametrize("kind", [FedPer, Unlike])
def test_stacked_steps_read_the_buffers_of_the_clients(kind):
    """As after a callback that changes a buffer of the global model."""
    data = shared_out(classes([6, 6, 6]), batch_size=3)
    client = kind(seeded(Divided), own=[], optimizer=sgd(1.0))
    client.global_model.temperature.fill_(4.0)
    outcomes = [run_rounds(client, data, engine=engine) for engine in ("one_by_one", "stacked")]
    assert outcomes[0].distance(outcomes[1]) < 1e-15


def test_constant_buffers_stay_bit_equal():
    client = FedAvg(Constant(), optimizer=sgd(), local_steps=1)
    sizes = [5] * 7
    outcome = run_rounds(client, shared_out(classes(sizes)), rounds=5, dtype=torch.float32)
    assert torch.equal(outcome.w_statistics, client.global_model.mean)


# Frozen parts


@pytest.fixture(scope="module")
def resnet():
    """Return a shallow untrained ResNet for transfer learning: only the head is trained."""
    net = seeded(lambda: ResNet(BasicBlock, [1, 1, 1, 1]))
    net.requires_grad_(False)
    net.fc = nn.Linear(512, 3)
    return net


def test_rows_of_a_frozen_resnet_contain_only_its_head(resnet):
    client = Ditto(copy.deepcopy(resnet))
    assert client.row("global").layout.numel == client.row("personal").layout.numel == 512 * 3 + 3
    assert client.statistics("global").layout.numel == 0


def test_both_models_share_the_frozen_tensors(resnet):
    client = Ditto(copy.deepcopy(resnet))
    w, v = client.global_model, client.personal_model
    tensors = [*w.named_parameters(), *w.named_buffers()]
    personal = dict([*v.named_parameters(), *v.named_buffers()])
    for name, tensor in tensors:
        assert (personal[name] is tensor) == (not name.startswith("fc")), name
    assert w.layer1 is v.layer1
    assert w.fc is not v.fc


@pytest.mark.slow
@pytest.mark.parametrize("engine", mark_further(["one_by_one", "stacked"], ["one_by_one"]))
def test_frozen_resnet_never_changes(resnet, engine):
    client = Ditto(copy.deepcopy(resnet), optimizer=sgd(0.1), local_steps=2)
    before = {name: value.clone() for name, value in client.state_dict().items()}
    federation = Federation(All(), engine=EngineOptions(engine), seed=0)
    federation.setup(client, shared_out(classes([4, 3], (3, 16, 16))), "fit")
    client.train()
    batch_norms = [m for m in client.modules() if isinstance(m, nn.BatchNorm2d)]
    assert batch_norms
    assert not any(layer.training for layer in batch_norms)
    federation.run_round(0, client.configure_optimizers())
    moved = {name for name, value in client.state_dict().items() if not value.equal(before[name])}
    assert moved == {"global_model.fc.weight", "global_model.fc.bias"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", mark_further([FedAvg, Ditto], [FedAvg]))
def test_eager_engines_agree_for_a_frozen_resnet(resnet, kind):
    client = kind(copy.deepcopy(resnet), optimizer=sgd(0.1), local_steps=2)
    data = shared_out(classes([4, 3], (3, 16, 16)))
    first = run_rounds(client, data, rounds=1)
    assert first.distance(run_rounds(client, data, rounds=1, engine="stacked")) < 1e-10


def test_frozen_batch_norm_without_parameters_keeps_its_statistics():
    body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    net = nn.Sequential(body.requires_grad_(False), nn.Linear(4, 3))
    client = Ditto(net, optimizer=sgd(0.1), local_steps=2)
    assert client.statistics("personal").layout.numel == 0
    before = body[1].running_mean.clone()
    federation = Federation(All(), engine=EngineOptions("one_by_one"), seed=0)
    federation.setup(client, shared_out(classes([5, 5])), "fit")
    client.train()
    federation.run_round(0, client.configure_optimizers())
    assert torch.equal(client.global_model[0][1].running_mean, before)
    assert client.global_model[0] is client.personal_model[0]


def test_tied_weights_stay_tied():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    net[2].weight = net[0].weight
    client = Ditto(net, optimizer=sgd(0.1), local_steps=2)
    assert client.row("global").layout.numel == 4 * 4 + 4 + 4 + 15
    federation = Federation(All(), engine=EngineOptions("one_by_one"), seed=0)
    federation.setup(client, shared_out(classes([5, 5])), "fit")
    client.train()
    federation.run_round(0, client.configure_optimizers())
    for model in (client.global_model, client.personal_model):
        assert model[2].weight is model[0].weight


def test_mean_by_samples_weights_statistics_by_samples():
    arrays = classes([5, 3, 8])
    data = shared_out(arrays, batch_size=8)
    client = FedAvg(batch_norm_net(), optimizer=sgd(), local_steps=1)
    rows = [
        0.9 * START + 0.1 * batch_statistics(arrays.inputs[arrays.client == k]) for k in range(3)
    ]
    outcome = run_rounds(client, data, rounds=1, aggregator=Mean("samples"))
    expected = (5 * rows[0] + 3 * rows[1] + 8 * rows[2]) / 16
    torch.testing.assert_close(outcome.w_statistics, expected)


@pytest.mark.parametrize(("weighting", "weights"), [("samples", (5, 8)), ("uniform", (1, 1))])
def test_mean_of_statistics_excludes_a_client_with_a_broken_upload(weighting, weights):
    """The upload of client 1 is broken: neither its statistics nor its weight count."""

    class Diverging(FedAvg):
        def end_round(self, client):
            uploads = super().end_round(client)
            return uploads.where(client.ids[:, None] != 1, torch.nan)

    arrays = classes([5, 3, 8])
    client = Diverging(batch_norm_net(), optimizer=sgd(), local_steps=1)
    settings = {"aggregator": Mean(weighting), "max_rejected": 1.0, "chunk_size": 2}
    with pytest.warns(UserWarning, match="left out"):
        outcome = run_rounds(client, shared_out(arrays, batch_size=8), rounds=1, **settings)
    rows = [0.9 * START + 0.1 * batch_statistics(arrays.inputs[arrays.client == k]) for k in (0, 2)]
    expected = (weights[0] * rows[0] + weights[1] * rows[1]) / sum(weights)
    torch.testing.assert_close(outcome.w_statistics, expected)


@pytest.mark.slow
def test_mapper_starts_every_global_model_with_the_statistics_of_the_server():
    """Client 1 takes part in the second round only."""
    arrays = classes([6, 6])
    data = shared_out(arrays, batch_size=6)
    client = Mapper(batch_norm_net(), (0.5,), optimizer=sgd(), local_steps=1)
    first, second = (batch_statistics(arrays.inputs[arrays.client == k]) for k in (0, 1))
    outcome = run_rounds(client, data, rounds=2, sampler=Cohorts((0,), (1,)))
    expected = 0.9 * (0.9 * START + 0.1 * first) + 0.1 * second
    torch.testing.assert_close(outcome.w_statistics, expected)
    again = run_rounds(
        Mapper(batch_norm_net(), (0.5,), optimizer=sgd(), local_steps=1),
        data,
        rounds=3,
        sampler=Cohorts((0,), (1,), (0,)),
    )
    torch.testing.assert_close(again.w_statistics, 0.9 * expected + 0.1 * first)


class Centred(nn.Module):
    """A net that subtracts a running mean, a buffer outside of its state dict."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.last(x - self.mean)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "one_by_one_compiled"])
def test_buffer_outside_the_state_dict_is_not_passed_to_other_clients(engine, uncompiled):
    client, data = Local(seeded(Centred), optimizer=sgd(0.1)), shared_out(classes([9, 7, 5]))
    both, alone = (
        run_rounds(client, data, rounds=2, sampler=Only(*cohort), engine=engine)
        for cohort in ((0, 1), (1,))
    )
    assert torch.equal(both.v[1], alone.v[1])


class Ticking(nn.Module):
    """A net that returns the number of its forward passes in training mode, a saved buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("ticks", torch.tensor(0.0))

    def forward(self, x):
        if self.training:
            self.ticks.add_(1)
        return self.weight + self.ticks.clone() + 0 * x.sum(1, keepdim=True)


class Watching(Ditto):
    """A client whose steps report the outputs of the global model."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            weight = self.parameters_of("global")["weight"]
            seen = (self.outputs_of("global", batch) - weight).mean()
        return {"loss": loss, "seen": seen}


@pytest.mark.parametrize("engine", ["one_by_one", "one_by_one_compiled"])
def test_steps_of_other_models_read_a_completed_model_as_it_was(engine, uncompiled):
    """The global model takes one step of three: two calls in it, and two in each later step."""
    client = Watching(Ticking(), optimizer=sgd(), local_steps=1, personal_steps=3)
    data = shared_out(classes([4]))
    report = run_rounds(client, data, rounds=1, engine=engine).reports[0]
    assert float(report["train/seen"]) == pytest.approx((2 + 4 + 4) / 3)
