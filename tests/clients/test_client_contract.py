"""What every algorithm keeps to, over all that a walk through the package finds.

A new client is covered before its author writes a test. One that cannot be made from a net alone,
or that is to be tried with other arguments too, is named in the table.
"""

import copy
import importlib
import inspect
import math
import pkgutil

import pytest
import torch
from lightning.pytorch import Trainer
from small_federations import classes, run_rounds, seeded, sgd, shared_out
from torch import nn

import pl_fed.clients
from pl_fed import Federation
from pl_fed.clients import Client
from pl_fed.samplers import Uniform
from pl_fed.types import Batch

ARGUMENTS = {
    "Ditto": [{}, {"lam": 0.3, "personal_steps": 3, "personal_lr": 0.05}],
    "FedTilt": [
        {},
        {"tau": 2.0, "lam": 5.0, "mu": 0.3, "personal_lr": 0.05},
        {"tau": 1.0, "lam": -0.5},
        {"tau": math.inf},
    ],
}
SIZES = [7, 3, 10, 1]


def found():
    for entry in pkgutil.walk_packages(pl_fed.clients.__path__, "pl_fed.clients."):
        for name, member in vars(importlib.import_module(entry.name)).items():
            own = inspect.isclass(member) and member.__module__ == entry.name
            if own and issubclass(member, Client) and not inspect.isabstract(member):
                for arguments in ARGUMENTS.get(name, [{}]):
                    yield pytest.param(member, arguments, id=f"{name}{list(arguments.values())}")


ALL = list(found())
every = pytest.mark.parametrize(("kind", "arguments"), ALL)
each_engine = pytest.mark.parametrize("engine", ["one_by_one", "stacked"])


def net():
    return nn.Sequential(
        nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3)
    )


def make(kind, arguments, **kwargs):
    settings = {"optimizer": sgd(0.1, momentum=0.5), "local_steps": 2, **arguments, **kwargs}
    return kind(seeded(net), **settings)


def ready(kind, arguments):
    """A client in the middle of a round: models that have moved, and centres to be pulled to."""
    client = make(kind, arguments).double().train()
    draw = torch.Generator().manual_seed(3)
    rows = {"broadcast": client.row("global").data.clone(), **client.states()}
    for model in ("global", "personal"):
        row = client.row(model).data
        row += 0.1 * torch.randn(len(row), generator=draw, dtype=row.dtype)
    client.centres = {name: row for name, row in rows.items() if name not in client.trains}
    client.draws.start(11)
    return client


def batch(size=5, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=draw, dtype=torch.float64)
    return Batch(x, torch.randint(3, (size,), generator=draw), None, torch.arange(size))


def loss_of(client, batch):
    """The loss at the beginning of a step, and the gradients of all parameters."""
    client.zero_grad()
    client.draws.start(11)
    outputs = client.training_step(batch, 0)
    loss = outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in client.named_parameters()}


def test_the_walk_finds_the_clients():
    assert {param.values[0].__name__ for param in ALL} >= {"FedAvg", "Local", "Ditto"}


@every
def test_it_says_what_it_trains(kind, arguments):
    trains = make(kind, arguments).trains
    assert isinstance(trains, tuple)
    assert set(trains) <= set(make(kind, arguments).models)
    assert len(trains) == len(set(trains)) > 0


@every
def test_its_docstring_says_where_it_comes_from_and_what_it_takes(kind, arguments):
    assert kind.__doc__
    assert "Args:" in kind.__doc__
    assert kind.training_step.__doc__


@every
def test_the_gradient_falls_on_what_it_trains(kind, arguments):
    client = ready(kind, arguments)
    loss, gradients = loss_of(client, batch())
    assert loss.shape == ()
    assert loss.isfinite()
    for name, gradient in gradients.items():
        model = name.split("_")[0]
        assert (gradient is not None) == (model in client.trains), name
        assert gradient is None or gradient.any(), name


@every
def test_training_step_is_pure(kind, arguments):
    """Nothing but gradients changes: no parameter, no buffer, no centre, no random state."""
    client = ready(kind, arguments)
    before = copy.deepcopy(client.state_dict())
    centres = {name: row.clone() for name, row in client.centres.items()}
    given = batch()
    x, y = given.x.clone(), given.y.clone()
    state = torch.get_rng_state()
    first, gradients = loss_of(client, given)
    gradients = {name: None if g is None else g.clone() for name, g in gradients.items()}
    again, others = loss_of(client, given)
    assert torch.equal(first, again)
    for name, gradient in gradients.items():
        assert gradient is None or torch.equal(gradient, others[name])
    for name, value in client.state_dict().items():
        assert torch.equal(value, before[name])
    for name, row in client.centres.items():
        assert torch.equal(row, centres[name])
    assert torch.equal(given.x, x)
    assert torch.equal(given.y, y)
    assert torch.equal(torch.get_rng_state(), state)


@every
@pytest.mark.parametrize("garbage", [0.0, -1e3, 1e6])
def test_padding_behind_the_mask_changes_nothing(kind, arguments, garbage):
    client = ready(kind, arguments)
    plain = batch(5)
    expected, gradients = loss_of(client, plain)
    gradients = {name: None if g is None else g.clone() for name, g in gradients.items()}
    x = torch.cat([plain.x, torch.full((3, 4), garbage, dtype=torch.float64)])
    y = torch.cat([plain.y, torch.tensor([0, 2, 2])])
    padded = Batch(x, y, torch.arange(8) < 5, torch.arange(8))
    loss, others = loss_of(client, padded)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients.items():
        if gradient is not None:
            torch.testing.assert_close(others[name], gradient, rtol=1e-10, atol=1e-12)


@every
def test_a_client_with_nothing_left_has_a_finite_loss(kind, arguments):
    client = ready(kind, arguments)
    given = batch(3)._replace(mask=torch.zeros(3, dtype=torch.bool))
    loss, gradients = loss_of(client, given)
    assert loss.isfinite()
    assert all(g is None or g.isfinite().all() for g in gradients.values())


@every
@each_engine
def test_it_trains_and_uploads_finite_numbers(kind, arguments, engine):
    client = make(kind, arguments)
    outcome = run_rounds(client, shared_out(classes(SIZES)), rounds=3, engine=engine)
    for report in outcome.reports:
        assert report["train/loss"].isfinite()
        assert report["train/rejected"] == 0
    assert outcome.w.isfinite().all()
    if "global" in client.trains:
        assert not torch.equal(outcome.w, client.row("global").data.double())
    if "personal" in client.trains:
        assert outcome.v.isfinite().all()
        assert len(outcome.v.unique(dim=0)) == len(SIZES)
    losses = [float(report["train/loss"]) for report in outcome.reports]
    assert losses[-1] < losses[0]


@every
def test_the_engines_agree(kind, arguments):
    client, data = make(kind, arguments), shared_out(classes(SIZES))
    first = run_rounds(client, data, rounds=3, sampler=Uniform(3))
    for engine, chunk_size in (("one_by_one", 1), ("stacked", None), ("stacked", 2)):
        settings = {"engine": engine, "chunk_size": chunk_size, "sampler": Uniform(3)}
        assert first.distance(run_rounds(client, data, rounds=3, **settings)) < 1e-10


@every
def test_the_end_of_a_round_gives_rows_and_leaves_the_broadcast_alone(kind, arguments):
    client = ready(kind, arguments)
    numel = client.row("global").layout.numel
    rows = {"broadcast": torch.randn(numel, dtype=torch.float64)}
    names = {*client.trains, *client.states()}
    rows |= {name: torch.randn(3, numel, dtype=torch.float64) for name in sorted(names)}
    broadcast = rows["broadcast"].clone()
    upload = client.end_round(rows)
    assert torch.equal(rows["broadcast"], broadcast)
    if upload is not None:
        assert upload.shape == (3, numel)
        assert upload.isfinite().all()


@every
def test_states_are_rows_and_the_same_at_every_call(kind, arguments):
    client = make(kind, arguments)
    first, second = client.states(), client.states()
    assert ("personal" in first) == ("personal" in client.trains)
    for name, row in first.items():
        assert row.dim() == 1
        assert torch.equal(row, second[name])


@every
def test_states_survive_a_stop(kind, arguments):
    """Three rounds are one round, a checkpoint taken into a new federation, and two rounds."""
    data = shared_out(classes(SIZES))

    def begin():
        client = make(kind, arguments).double()
        federation = Federation(Uniform(2), engine="one_by_one", seed=0)
        federation.setup(client, data, "fit")
        client.train()
        return client, federation, client.configure_optimizers()

    def rows(client, federation):
        everyone = torch.arange(len(SIZES))
        names = sorted(federation.store.defaults)
        return [client.row("global").data, *(federation.store.read(n, everyone) for n in names)]

    client, federation, optimizer = begin()
    federation.run_round(0, optimizer)
    saved = copy.deepcopy((client.state_dict(), federation.state_dict()))
    for round in (1, 2):
        federation.run_round(round, optimizer)
    expected = rows(client, federation)

    client, federation, optimizer = begin()
    client.load_state_dict(saved[0])
    federation.load_state_dict(saved[1])
    for round in (1, 2):
        federation.run_round(round, optimizer)
    for found, wanted in zip(rows(client, federation), expected, strict=True):
        assert torch.equal(found, wanted)


@every
def test_a_client_does_not_depend_on_those_beside_it(kind, arguments):
    """What client 0 keeps after a round is the same, whoever else takes part."""
    client, data = make(kind, arguments), shared_out(classes(SIZES))
    if "personal" not in client.trains:
        pytest.skip("keeps nothing")
    together = run_rounds(client, data, rounds=1)
    changed = classes(SIZES)
    changed.x[SIZES[0] :] += 1.0
    apart = run_rounds(client, shared_out(changed), rounds=1)
    assert torch.equal(together.v[0], apart.v[0])
    assert not torch.equal(together.v[1], apart.v[1])


@every
def test_optimizers_that_need_a_closure_are_refused_before_training(kind, arguments):
    client = make(kind, arguments, optimizer=lambda params: torch.optim.LBFGS(params, lr=1.0))
    with pytest.raises(ValueError, match=r"Expected argument `optimizer` .* but got LBFGS"):
        client.configure_optimizers()


@every
@pytest.mark.parametrize("reduction", ["sum", "none", None])
def test_a_criterion_that_is_no_mean_is_refused(kind, arguments, reduction):
    criterion = nn.Identity() if reduction is None else nn.CrossEntropyLoss(reduction=reduction)
    with pytest.raises(ValueError, match=r"Expected argument `criterion` .* but got"):
        make(kind, arguments, criterion=criterion)


@every
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_round_without_a_trainer_is_refused_with_a_sentence(kind, arguments):
    client = make(kind, arguments)
    trainer = Trainer(logger=False, enable_checkpointing=False, barebones=True, max_epochs=1)
    with pytest.raises(TypeError, match=r"fitted by `pl_fed.Trainer\(federation=...\)` but got"):
        trainer.fit(client, [torch.zeros(1)])


@every
def test_all_optimizers_group_by_model(kind, arguments):
    client = make(kind, arguments)
    groups = client.configure_optimizers().param_groups
    assert [group["name"] for group in groups] == list(client.trains)
    for group in groups:
        expected = [p for p in client.model(group["name"]).parameters() if p.requires_grad]
        assert all(a is b for a, b in zip(group["params"], expected, strict=True))
