"""An algorithm is tried on one client before training, which changes nothing."""

import copy
import threading

import pytest
import torch
from small_federations import classes, mlp, seeded, sgd, shared_out
from torch import nn

from pl_fed import Federation
from pl_fed.clients import Client, DittoGreedy, FedAvg, Local
from pl_fed.clients.contract import Model
from pl_fed.samplers import All

SIZES = [1, 2, 6]  # the client that is tried has one sample only


class Tried(FedAvg):
    """FedAvg with one hook exchanged, and a state."""

    def __init__(self, net, **hooks):
        super().__init__(net, optimizer=sgd(0.1))
        self.add_state("own", torch.zeros(2))
        self.add_server_state("shared", torch.zeros(2))
        self.hooks = hooks

    def begin(self, client):
        self.hooks.get("begin", lambda *_: None)(self, client)

    def training_step(self, batch, batch_idx):
        loss = self.loss("global", batch)
        return self.hooks.get("training_step", lambda *_: loss)(self, batch)

    def end_round(self, client):
        upload = super().end_round(client)
        return self.hooks.get("end_round", lambda *_: upload)(self, client)


def make_data(**options):
    return shared_out(classes(SIZES), **options)


def set_up(client, stage="fit", **options):
    federation = Federation(All(), seed=0)
    federation.setup(client, make_data(**options), stage)
    return federation


def make_hook(name, attribute, value):
    """A hook that leaves a wrong row."""

    def hook(self, client):
        getattr(client, attribute)[name] = value
        return client.models["global"].parameters - client.broadcast.parameters

    return hook


WRONG = {
    "a state that is not declared": (
        "begin",
        lambda self, client: client.states.update(samples=torch.zeros(1, 2)),
        ValueError,
        r"`begin` to write states that are declared \(own\) but got 'samples': declare it by add_s",
    ),
    "a state that is declared nowhere at the end": (
        "end_round",
        make_hook("other", "states", torch.zeros(1, 2)),
        ValueError,
        r"`end_round` to write states that are declared \(own\) but got 'other': declare it by add",
    ),
    "a model that begins elsewhere but is not declared": (
        "begin",
        lambda self, client: client.models.update(personal=client.broadcast.expand(1)),
        ValueError,
        r"`begin` to write models that are declared \(global\) but got 'personal': declare it by m",
    ),
    "an extra row that hides the number of samples": (
        "begin",
        lambda self, client: client.extra.update(samples=torch.zeros(1, 1)),
        ValueError,
        r"`begin` to add extra rows under names other than .*samples.* but got 'samples': choose",
    ),
    "an extra row that hides a state": (
        "begin",
        lambda self, client: client.extra.update(own=torch.zeros(1, 2)),
        ValueError,
        r"`begin` to add extra rows under names other than .*own, shared\) but got 'own': choose",
    ),
    "a row that is not declared": (
        "training_step",
        lambda self, batch: self.read("owm").sum(),
        ValueError,
        r"row of the round \(.*own, shared.*\) but got 'owm': declare a state by add_state",
    ),
    "a model that is not declared": (
        "training_step",
        lambda self, batch: self.loss("personnal", batch),
        ValueError,
        "Expected a model's name, one of global, personal, but got 'personnal'",
    ),
    "no loss": (
        "training_step",
        lambda self, batch: {"accuracy": batch.inputs.sum()},
        TypeError,
        "Expected `training_step` to return a loss, or a dict with the tensor `loss`, but got dict",
    ),
    "a loss of each sample": (
        "training_step",
        lambda self, batch: self.sample_losses(
            self.global_model(batch.inputs[[0, 0]]), batch.targets[[0, 0]]
        ),
        ValueError,
        r"Expected `training_step` to return scalars but got shape \[2\] for `loss`",
    ),
    "nothing is returned": (
        "end_round",
        lambda self, client: None,
        TypeError,
        r"`end_round` to return uploads, a tensor \[clients, numel\], but got NoneType: return sup",
    ),
    "a dict is returned": (
        "end_round",
        lambda self, client: {},
        TypeError,
        "`end_round` to return uploads, .* but got dict",
    ),
    "the upload of one client": (
        "end_round",
        lambda self, client: client.models["global"].parameters[0],
        ValueError,
        r"`end_round` to leave uploads of shape \[1, 43\] for one client but got shape \[43\]",
    ),
    "a state of another length": (
        "end_round",
        make_hook("own", "states", torch.zeros(1, 3)),
        ValueError,
        r"`end_round` to leave state `own` of shape \[1, 2\] for one client but got shape \[1, 3\]",
    ),
    "a proposal of another length": (
        "end_round",
        make_hook("shared", "proposals", torch.zeros(1, 3)),
        ValueError,
        r"`end_round` to leave the proposal of `shared` of shape \[1, 2\] .* got shape \[1, 3\]",
    ),
    "a learning rate": (
        "begin",
        lambda self, client: client.lr.update({"global": client.lr["global"] * 0}),
        ValueError,
        r"`begin` to leave `client.lr\['global'\]` as it is .*: the optimizer has",
    ),
    "a learning rate in place": (
        "begin",
        lambda self, client: client.lr["global"].mul_(0),
        ValueError,
        r"`begin` to leave `client.lr\['global'\]` as it is .*: the optimizer has",
    ),
    "another broadcast": (
        "begin",
        lambda self, client: client.broadcast.parameters.add_(1),
        ValueError,
        r"`begin` to leave `client.broadcast.parameters` as it is .*: all clients share",
    ),
    "the start of the global model": (
        "begin",
        lambda self, client: client.models.update({"global": client.broadcast.expand(1)}),
        ValueError,
        r"`begin` to leave `client.models\['global'\]` as it is .*: it begins each round",
    ),
    "the server's state": (
        "end_round",
        lambda self, client: client.server_states["shared"].add_(1),
        ValueError,
        r"`end_round` to leave `client.server_states\['shared'\]` as it is .*: only the server",
    ),
    "steps after the steps": (
        "end_round",
        lambda self, client: client.steps["global"].add_(1),
        ValueError,
        r"`end_round` to leave `client.steps\['global'\]` as it is .*: it is read in `begin` alone",
    ),
    "half a step": (
        "begin",
        lambda self, client: client.steps.update({"global": client.steps["global"] * 0.5}),
        ValueError,
        r"`client.steps\['global'\]` to integers of shape .* got float32 \[1, 1\]: round",
    ),
    "steps of one for all": (
        "begin",
        lambda self, client: client.steps.update({"global": torch.tensor([3, 4])}),
        ValueError,
        r"`client.steps\['global'\]` to integers of shape .* got int64 \[2\]: round",
    ),
    "fewer steps than none": (
        "begin",
        lambda self, client: client.steps["global"].fill_(-1),
        ValueError,
        r"`client.steps\['global'\]` to integers of shape \[clients, 1\], at least 0, but got -1",
    ),
    "steps of a model that is not trained": (
        "begin",
        lambda self, client: client.steps.update({"personal": client.steps["global"]}),
        ValueError,
        r"`begin` to leave `client.steps` for the trained models .* got global, personal",
    ),
    "a proposal of what is not declared": (
        "end_round",
        make_hook("own", "proposals", torch.zeros(1, 2)),
        ValueError,
        r"Expected `end_round` to propose server states \(shared\) but got 'own': declare it by",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_mistake_is_raised_before_training(name):
    hook, wrong, error, match = WRONG[name]
    with pytest.raises(error, match=match) as caught:
        set_up(Tried(seeded(mlp), **{hook: wrong}))
    assert caught.value.__notes__ == [f"In the trial before the first round, client 0, `{hook}`."]


def test_other_errors_of_an_algorithm_are_deferred_to_the_first_round():
    """It may need what only a fit gives it, such as an attribute set by a hook of Lightning's."""
    set_up(Tried(seeded(mlp), begin=lambda *_: {}["missing"]))


def test_only_a_fit_has_a_trial():
    set_up(Tried(seeded(mlp), begin=lambda *_: 1 / 0), "validate")


def test_client_without_an_upload_passes_the_trial():
    client = Local(seeded(mlp))
    client.end_round = lambda client: None
    set_up(client)


def batch_norm_dropout_net():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))


class Draws(Client):
    """Draws from torch's own generator, and notes each of its calls."""

    def __init__(self, net, **kwargs):
        super().__init__(net, models={"global": Model(), "personal": Model()}, **kwargs)
        self.calls = []

    def begin(self, client):
        client.models["personal"].parameters += torch.randn_like(client.broadcast.parameters)
        self.calls.append("begin")

    def training_step(self, batch, batch_idx):
        self.calls.append("training_step")
        for buffer in self.global_model.buffers():
            buffer += 1
        return self.loss("global", batch) + self.loss("personal", batch) + torch.rand(())


def test_trial_changes_nothing():
    client = Draws(seeded(batch_norm_dropout_net), optimizer=sgd(0.1)).train()
    before = copy.deepcopy(client.state_dict())
    state, key = torch.get_rng_state(), client.draws.key
    federation = set_up(client, val_fraction=0.3, min_batch=2)
    for name, tensor in client.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(torch.get_rng_state(), state)
    assert client.draws.key == key
    assert client.calls == []
    assert client.training
    assert all(module.training for module in client.modules())
    assert all(parameter.grad is None for parameter in client.parameters())
    assert federation.store.is_empty
    with pytest.raises(ValueError, match="none outside of a round"):
        client.read("broadcast")


@pytest.mark.slow
def test_trial_provides_validation_data():
    client = DittoGreedy(seeded(mlp), optimizer=sgd(0.1))
    set_up(client, val_fraction=0.4)
    set_up(client)


def test_client_that_cannot_be_copied_has_no_trial():
    client = Tried(seeded(mlp), begin=lambda *_: 1 / 0)
    client.lock = threading.Lock()
    set_up(client)


class Crop(nn.Module):
    """Leaves two of the inputs."""

    def forward(self, x):
        return x[:, :2]


def test_trial_augments_inputs_as_in_training():
    client = FedAvg(seeded(lambda: mlp(inputs=2)), optimizer=sgd(0.1))
    set_up(client, augment=[Crop()])


def test_batch_that_is_unpacked_is_told_with_its_fields():
    class Unpacks(FedAvg):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return self.criterion(self.global_model(x), y)

    words = r"`batch.inputs`, `batch.targets` and .* 5 fields, but got .*: x, y = batch"
    with pytest.raises(ValueError, match=words):
        set_up(Unpacks(seeded(mlp)))
