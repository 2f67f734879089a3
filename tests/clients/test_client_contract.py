"""What every algorithm keeps to, over all that a walk through the package finds.

A new client is covered before its author writes a test. One that cannot be made from a net alone,
or that is to be tried with other arguments too, is named in the table.
"""

import copy
import functools
import importlib
import inspect
import math
import pkgutil
import re
from dataclasses import replace

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer
from small_federations import Cohorts, Only, classes, run_rounds, seeded, sgd, shared_out
from torch import nn

import pl_fed.clients
from pl_fed import EngineOptions, Federation
from pl_fed.aggregators import QFFL, FedMGDA, Krum, Median, Term, TiltedMean, TrimmedMean
from pl_fed.attacks import RandomLabels
from pl_fed.clients import Client
from pl_fed.engine.base import as_outputs
from pl_fed.engine.step_function import StepFunction
from pl_fed.samplers import All, Uniform
from pl_fed.types import Batch, Population

ARGUMENTS = {
    "APFL": [{}, {"alpha": 0.3, "alpha_lr": 0.1}],
    "Ditto": [
        {},
        {"lam": 0.3, "personal_steps": 3, "personal_lr": 0.05},
        {"regularizer": "fisher", "lam": 5.0, "global_mu": 0.1},
        {"regularizer": "kl"},
    ],
    "DittoChoice": [{}, {"lams": [0.1, 0.5], "lam": 0.5, "regularizer": "kl"}],
    "DittoGreedy": [{}, {"lams": [0.1, 0.5], "lam": 0.5, "min_validation": 1}],
    "FedPer": [{}, {"own": ["0.weight", "1"]}],
    "FedRep": [{}, {"own": ["0", "4.bias"], "head_steps": 3}, {"own": []}],
    "FedBN": [{}, {"own": ["1.bias"]}],
    "Finetuning": [
        {},
        {"lam": 0.5, "finetune_steps": 3, "finetune_lr": 0.05},
        {"finetune_epochs": 2, "regularizer": "fisher", "lam": 5.0},
    ],
    "L2SGD": [{"lam": 0.5}, {"lam": 100.0}],
    "Mapper": [{}, {"lams": [0.5, 0.9]}],
    "MeanRegularized": [{"lam": 0.5}, {"mean": "cohort"}],
    "Mocha": [{}, {"lam": 0.003, "decay": 0.1, "epsilon": 0.1, "sigma": 2.0}],
    "PerFedAvg": [
        {},
        {"hessian": "exact", "local_steps": 4},
        {"hessian": "none", "adaptation_lr": 0.2, "local_steps": 4},
    ],
    "Scaffold": [{"optimizer": sgd(0.1)}, {"optimizer": sgd(0.1), "control": "start"}],
    "FLAME": [
        {},
        {"lam": 0.3, "weights": "samples", "pull_to": "broadcast", "lagged_global": True},
        {"rho": 0.5, "weights": "samples", "tolerance": 1e-3, "optimizer": sgd(0.1)},
    ],
    "FedADMM": [{}, {"rho": 0.3, "weights": "samples"}],
    "LpProj": [{"dimensions": 7}, {"dimensions": 60, "weights": "samples"}],
    "PFedMe": [{}, {"lam": 2.0, "personal_steps": 2, "personal_lr": 0.1}],
    "PFedMeEpochs": [{}, {"lam": 0.5, "eta": 2.0}],
    "FedTilt": [
        {},
        {"tau": 2.0, "lam": 5.0, "mu": 0.3, "personal_lr": 0.05},
        {"tau": 1.0, "lam": -0.5},
        {"tau": math.inf},
    ],
}
HELD = {  # models that an objective holds in place on purpose, as other numbers, in some steps
    "APFL": dict.fromkeys((0, 3), ("global",)),  # it is mixed into what the other is trained by
    "Mapper": dict.fromkeys((0, 3), ("personal_0", "personal_1", "personal_2")),  # likewise
    "FedRep": {0: ("personal",)},  # it is the head's turn
    "Scaffold": {0: ("slope",), 3: ("slope",)},  # it sums up gradients at w^t
}
BY_HAND = {"PerFedAvg", "PFedMe"}  # gives gradients that are not those of the loss that it reports
SPLITS = {"PerFedAvg"}  # its minibatches into parts, so that their order counts
TAKES_TURNS = {"FedRep"}  # parts of its models are trained in some of the steps, others never
SIZES = [7, 3, 10, 1]


def named(arguments):
    return [name if callable(value) else value for name, value in arguments.items()]


def found():
    for entry in pkgutil.walk_packages(pl_fed.clients.__path__, "pl_fed.clients."):
        for name, member in vars(importlib.import_module(entry.name)).items():
            own = inspect.isclass(member) and member.__module__ == entry.name
            if own and issubclass(member, Client) and not inspect.isabstract(member):
                for arguments in ARGUMENTS.get(name, [{}]):
                    said = [value for value in arguments.values() if not callable(value)]
                    yield pytest.param(member, arguments, id=f"{name}{said}")


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


def round_of(client, clients=3):
    """The start of a round of clients that have been in one before."""
    client.population = Population(clients, clients, 5 * clients)
    draw = torch.Generator().manual_seed(3)

    def moved(row):
        return row + 0.1 * torch.randn(row.shape, generator=draw, dtype=row.dtype)

    new = client.new_round(clients, samples=5, steps=2)
    new.broadcast.parameters = moved(new.broadcast.parameters)
    new.validation_samples.fill_(5)
    moving = [name for name in new.states if not name.endswith(".statistics")]
    new.states |= {name: moved(new.states[name]) for name in moving}
    new.server_states = {name: moved(row) for name, row in new.server_states.items()}
    if client.reads_validation:
        new.validation_inputs = moved(torch.zeros(clients, 5 * 4, dtype=torch.float64))
        new.validation_targets = (torch.arange(5) % 3).repeat(clients, 1)
    return client.run_begin(new)


def ready(kind, arguments):
    """A client in the middle of a round, whose models have moved; and its rows."""
    client = make(kind, arguments).double().train()
    draw = torch.Generator().manual_seed(4)
    rows = round_of(client).client_rows(0)
    for model in ("global", "personal"):
        row = client.row(model).data
        row += 0.1 * torch.randn(len(row), generator=draw, dtype=row.dtype)
    client.draws.start(11)
    return client, rows


def batch(size=5, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=draw, dtype=torch.float64)
    return Batch(x, torch.randint(3, (size,), generator=draw), None, torch.arange(size))


def loss_of(client, rows, batch, training_step=None):
    """The loss at the beginning of a step, and the gradients of all parameters."""
    client.zero_grad()
    client.draws.start(11)
    with client.reading(rows):
        outputs = (training_step or client.training_step)(batch, 0)
    loss = outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in client.named_parameters()}


def test_the_walk_finds_the_clients():
    assert {param.values[0].__name__ for param in ALL} >= {"FedAvg", "Local", "Ditto"}


@every
def test_it_says_what_it_trains(kind, arguments):
    client = make(kind, arguments)
    assert client.trained == client.objective.trained
    assert set(client.trained) <= set(client.models)
    assert len(client.trained) == len(set(client.trained)) > 0


def command_line_arguments(kind):
    """The names of the arguments that the command line accepts for a class."""
    return set(ArgumentParser().add_class_arguments(kind))


def test_docstrings_list_every_argument_that_users_set():
    kinds = [member for member in vars(pl_fed.clients).values() if inspect.isclass(member)]
    for kind in filter(lambda kind: issubclass(kind, Client), kinds):
        arguments = kind.__doc__.split("Args:")[1].split("Raises:")[0]
        listed = set(re.findall(r"^        (\w+): \S", arguments, flags=re.MULTILINE))
        assert command_line_arguments(kind) - listed == set(), kind
        assert {"net", "optimizer", "local_steps", "task"} <= command_line_arguments(kind), kind


def test_docstrings_have_an_example():
    for kind in dict.fromkeys(param.values[0] for param in ALL):
        assert kind.training_step.__doc__, kind
        assert "\n    Example:\n        >>> " in kind.__doc__, kind


@every
def test_the_gradient_falls_on_what_it_trains(kind, arguments):
    client, rows = ready(kind, arguments)
    loss, gradients = loss_of(client, rows, batch())
    assert loss.shape == ()
    assert loss.isfinite()
    for name, gradient in gradients.items():
        model = name.partition("_model.")[0]
        if kind.__name__ in TAKES_TURNS:
            assert gradient is None or model in client.trained, name
        else:
            assert (gradient is not None) == (model in client.trained), name
            assert gradient is None or gradient.any(), name


@pytest.mark.slow
@every
def test_the_gradient_is_that_of_finite_differences(kind, arguments):
    if kind.__name__ in BY_HAND:
        pytest.skip("its own tests have it")
    for step in (0, 3):
        check_gradient(kind, arguments, step)


def check_gradient(kind, arguments, step):
    """Check the gradient of one local step against finite differences."""
    client, rows = ready(kind, arguments)
    objective, given = StepFunction(client, client.objective), batch()
    held = HELD.get(kind.__name__, {}).get(step, ()) if len(client.trained) > 1 else ()
    leaves = {
        (model, name): p.detach().clone().requires_grad_(model not in held)
        for model in client.trained
        for name, p in client.parameters_of(model).items()
    }

    def loss(*tensors):
        models = {model: {} for model in client.trained}
        for (model, name), tensor in zip(leaves, tensors, strict=True):
            models[model][name] = tensor
        return objective(models, given, step, 11, rows)["loss"]

    assert any(leaf.requires_grad for leaf in leaves.values())
    assert torch.autograd.gradcheck(loss, tuple(leaves.values()), rtol=1e-6, atol=1e-7)


@every
def test_training_step_is_pure(kind, arguments):
    """Nothing but gradients changes: no parameter, no buffer, no row, no random state."""
    client, rows = ready(kind, arguments)
    before = copy.deepcopy(client.state_dict())
    rows_before = {name: row.clone() for name, row in rows.items()}
    given = batch()
    x, y = given.inputs.clone(), given.targets.clone()
    state = torch.get_rng_state()
    first, gradients = loss_of(client, rows, given)
    gradients = {name: None if g is None else g.clone() for name, g in gradients.items()}
    again, others = loss_of(client, rows, given)
    assert torch.equal(first, again)
    for name, gradient in gradients.items():
        assert gradient is None or torch.equal(gradient, others[name])
    for name, value in client.state_dict().items():
        assert torch.equal(value, before[name])
    for name, row in rows.items():
        assert torch.equal(row, rows_before[name])
    assert torch.equal(given.inputs, x)
    assert torch.equal(given.targets, y)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
@every
def test_padding_behind_the_mask_changes_nothing(kind, arguments):
    for garbage in (0.0, -1e3, 1e6):
        check_padding(kind, arguments, garbage)


def check_padding(kind, arguments, garbage):
    """Check that samples behind the mask change neither the loss nor a gradient."""
    client, rows = ready(kind, arguments)
    plain = batch(5)
    expected, gradients = loss_of(client, rows, plain)
    gradients = {name: None if g is None else g.clone() for name, g in gradients.items()}
    x = torch.cat([plain.inputs, torch.full((3, 4), garbage, dtype=torch.float64)])
    y = torch.cat([plain.targets, torch.tensor([0, 2, 2])])
    padded = Batch(x, y, torch.arange(8) < 5, torch.arange(8))
    loss, others = loss_of(client, rows, padded)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients.items():
        if gradient is not None:
            torch.testing.assert_close(others[name], gradient, rtol=1e-10, atol=1e-12)


@every
def test_the_adaptation_is_pure_and_padding_changes_nothing_in_it(kind, arguments):
    client, rows = ready(kind, arguments)
    if client.adaptation is None:
        pytest.skip("adapts nothing")
    step, plain = client.adaptation.step, batch(5)
    before = copy.deepcopy(client.state_dict())
    expected, gradients = loss_of(client, rows, plain, step)
    gradients = {name: g.clone() for name, g in gradients.items() if g is not None}
    assert {name.split("_model.")[0] for name in gradients} == {"personal"}
    x = torch.cat([plain.inputs, torch.full((3, 4), 1e3, dtype=torch.float64)])
    y = torch.cat([plain.targets, torch.tensor([0, 2, 2])])
    padded = Batch(x, y, torch.arange(8) < 5, torch.arange(8))
    loss, others = loss_of(client, rows, padded, step)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-10, atol=1e-12)
    assert all(torch.equal(value, before[n]) for n, value in client.state_dict().items())


@every
def test_a_client_with_nothing_left_has_a_finite_loss(kind, arguments):
    client, rows = ready(kind, arguments)
    given = batch(3)._replace(mask=torch.zeros(3, dtype=torch.bool))
    loss, gradients = loss_of(client, rows, given)
    assert loss.isfinite()
    assert all(g is None or g.isfinite().all() for g in gradients.values())


@pytest.mark.slow
@every
@each_engine
def test_it_trains_and_uploads_finite_numbers(kind, arguments, engine):
    client = make(kind, arguments)
    outcome = run_rounds(client, shared_out(classes(SIZES)), rounds=3, engine=engine)
    for report in outcome.reports:
        assert report["train/loss"].isfinite()
        assert report["train/rejected"] == 0
    assert outcome.w.isfinite().all()
    if "global" in client.trained:
        assert not torch.equal(outcome.w, client.row("global").data.double())
    if "personal" in client.trained:
        assert outcome.v.isfinite().all()
    if any(len(row) for row in client.state_defaults().values()) and "personal" in client.trained:
        assert len(outcome.v.unique(dim=0)) == len(SIZES)
    losses = [float(report["train/loss"]) for report in outcome.reports]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [each for each in ALL if "global" in make(*each.values).evaluated],
)
def test_a_global_model_that_is_evaluated_has_statistics_of_the_data(kind, arguments):
    """Also where no step trains it: else it normalizes by those of before the first round."""
    net = seeded(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)))
    arrays = classes([8, 12])
    arrays.inputs[:] = arrays.inputs * 2 + 3
    data, settings = shared_out(arrays), {"optimizer": sgd(0.01), "local_steps": 2}
    try:
        client = kind(net, **{**settings, **arguments})
    except ValueError as refusal:
        assert "to have no running statistics but got" in str(refusal)  # noqa: PT017
        return
    found = run_rounds(client, data, rounds=4).w_statistics
    start = torch.cat([torch.zeros(4), torch.ones(4)]).double()
    there = torch.cat([data.clients.inputs.mean(0), data.clients.inputs.var(0)]).double()
    assert (found - there).norm() < 0.8 * (start - there).norm()


@pytest.mark.slow
@every
def test_the_engines_agree(kind, arguments):
    client, data = make(kind, arguments), shared_out(classes(SIZES))
    first = run_rounds(client, data, rounds=3, sampler=Uniform(3))
    for engine, chunk_size in (("one_by_one", 1), ("stacked", None), ("stacked", 2)):
        settings = {"engine": engine, "chunk_size": chunk_size, "sampler": Uniform(3)}
        assert first.distance(run_rounds(client, data, rounds=3, **settings)) < 1e-10


@every
def test_the_end_of_a_round_gives_rows_and_leaves_the_broadcast_alone(kind, arguments):
    client, rows = ready(kind, arguments)
    with client.reading(rows):
        outputs = as_outputs(client.training_step(batch(), 0))
    client = make(kind, arguments).double()
    numel = client.row("global").layout.numel
    end = round_of(client)
    draw = torch.Generator().manual_seed(5)
    for model in client.trained:
        end.models[model] = end.models[model].clone()
        end.models[model].parameters = torch.randn(3, numel, generator=draw, dtype=torch.float64)
    for model in client.validated:
        end.validation_losses[model] = torch.rand(3, generator=draw, dtype=torch.float64)
    end.step_means = {name: value.detach().repeat(3) for name, value in outputs.items()}
    broadcast = end.broadcast.parameters.clone()
    upload, kept = client.run_end_round(end)
    assert torch.equal(end.broadcast.parameters, broadcast)
    defaults, server_defaults = client.state_defaults(), client.server_state_defaults()
    assert {name: row.shape for name, row in kept.items()} == {
        name: (3, len(row)) for name, row in defaults.items()
    }
    assert set(end.proposals) <= set(server_defaults)
    for name, row in end.proposals.items():
        assert row.shape == (3, len(server_defaults[name]))
    if upload is not None:
        assert upload.shape == (3, numel)
        assert upload.isfinite().all()


@every
def test_states_are_rows_and_the_same_at_every_call(kind, arguments):
    client = make(kind, arguments)
    first, second = client.state_defaults(), client.state_defaults()
    if set(client.trained) - {"global"}:
        assert first or client.server_state_defaults()
    for name, row in first.items():
        assert row.dim() == 1
        assert torch.equal(row, second[name])


@pytest.mark.slow
@every
def test_states_survive_a_stop(kind, arguments, tmp_path):
    """Three rounds are one round, a checkpoint taken into a new federation, and two rounds."""
    data = shared_out(classes(SIZES))

    def begin():
        client = make(kind, arguments).double()
        federation = Federation(Uniform(2), engine=EngineOptions("one_by_one"), seed=0)
        federation.setup(client, data, "fit")
        client.train()
        return client, federation, client.configure_optimizers()

    def rows(client, federation):
        everyone = torch.arange(len(SIZES))
        names = sorted(federation.store.defaults)
        kept = [federation.store.read(name, everyone) for name in names]
        return [client.row("global").data, *kept, *federation.server_states.values()]

    client, federation, optimizer = begin()
    federation.run_round(0, optimizer)
    torch.save((client.state_dict(), federation.state_dict()), tmp_path / "saved")
    for round in (1, 2):
        federation.run_round(round, optimizer)
    expected = rows(client, federation)

    saved = torch.load(tmp_path / "saved", weights_only=True)
    client, federation, optimizer = begin()
    client.load_state_dict(saved[0])
    federation.load_state_dict(saved[1])
    for round in (1, 2):
        federation.run_round(round, optimizer)
    for found, wanted in zip(rows(client, federation), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.slow
@every
def test_a_client_does_not_depend_on_those_beside_it(kind, arguments):
    """What client 0 keeps after a round is the same, whoever else takes part."""
    client, data = make(kind, arguments), shared_out(classes(SIZES))
    together = run_rounds(client, data, rounds=1)
    names = [name for name, rows in together.states.items() if rows.numel()]
    if not names:
        pytest.skip("keeps nothing")
    changed = classes(SIZES)
    changed.inputs[SIZES[0] :] += 1.0
    apart = run_rounds(client, shared_out(changed), rounds=1)
    for name in names:
        assert torch.equal(together.states[name][0], apart.states[name][0]), name
    assert any(not together.states[n][1].equal(apart.states[n][1]) for n in names)


@pytest.mark.slow
@every
@each_engine
def test_a_client_that_takes_no_part_keeps_what_it_has(kind, arguments, engine):
    """To the bit; and whoever takes part keeps something else."""
    client, data = make(kind, arguments), shared_out(classes(SIZES))
    before, after = (
        run_rounds(client, data, rounds, engine=engine, sampler=Cohorts((0, 1, 3), (0, 1, 2)))
        for rounds in (1, 2)
    )
    names = [name for name, rows in before.states.items() if rows.numel()]
    for name in names:
        assert torch.equal(before.states[name][3], after.states[name][3]), name
    for k in (0, 1, 2) if names else ():
        assert any(not before.states[n][k].equal(after.states[n][k]) for n in names)


@pytest.mark.slow
@every
def test_the_order_of_the_clients_does_not_matter(kind, arguments):
    """Ids and data permuted together permute the results; of full batches, as draws go by id."""
    if kind.__name__ in SPLITS:
        pytest.skip("what it takes to be a part goes by id, too")
    for cohort in (None, (0, 2)):
        check_permutation(kind, arguments, cohort)


def check_permutation(kind, arguments, cohort):
    """Check a cohort, or all clients, against the same with other ids."""
    order = torch.tensor([2, 0, 3, 1])
    arrays = classes(SIZES)
    other = replace(arrays, client=order.argsort()[arrays.client])
    settings = {"optimizer": sgd(0.1, momentum=0.5), "local_steps": 3, **arguments}
    client = kind(seeded(smooth), **settings)

    def run(arrays, clients):
        sampler = All() if clients is None else Only(*sorted(clients))
        return run_rounds(client, shared_out(arrays, batch_size=10), rounds=3, sampler=sampler)

    there = cohort and [int(order.argsort()[k]) for k in cohort]
    first, second = run(arrays, cohort), run(other, there)
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-9)
    close(second.w, first.w)
    if len(first.v):
        close(second.v, first.v[order])
    for name, rows in first.states.items():
        close(second.states[name], rows[order])
    for one, two in zip(first.reports, second.reports, strict=True):
        close(one["train/loss"], two["train/loss"])


def smooth():
    """The net without dropout, whose draws go by the client's id."""
    parts = list(net())
    return nn.Sequential(*parts[:3], nn.Identity(), parts[4])


@every
def test_optimizers_that_need_a_closure_are_refused_before_training(kind, arguments):
    client = make(kind, arguments, optimizer=lambda params: torch.optim.LBFGS(params, lr=1.0))
    with pytest.raises(ValueError, match=r"Expected argument `optimizer` .* but got LBFGS"):
        client.configure_optimizers()


@every
def test_a_criterion_that_is_no_mean_is_refused(kind, arguments):
    sums = [nn.CrossEntropyLoss(reduction=reduction) for reduction in ("sum", "none")]
    for criterion in (*sums, nn.Identity()):
        with pytest.raises(ValueError, match=r"Expected argument `criterion` .* but got"):
            make(kind, arguments, criterion=criterion)


@every
def test_a_number_that_must_be_given_is_not_none(kind, arguments):
    for parameter in inspect.signature(kind.__init__).parameters.values():
        if parameter.annotation is float:
            with pytest.raises((TypeError, ValueError), match=r"got None|NoneType"):
                make(kind, {**arguments, parameter.name: None})


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
    assert [group["name"] for group in groups] == list(client.trained)
    for group in groups:
        expected = [p for p in client.model(group["name"]).parameters() if p.requires_grad]
        assert all(a is b for a, b in zip(group["params"], expected, strict=True))


class Forged(RandomLabels):
    """Poisons the labels, and turns the uploads round."""

    def forge(self, honest, own, context):
        """Give the opposite of the own uploads, larger."""
        return -10 * own


@pytest.mark.slow
@every
def test_it_goes_with_any_aggregator_under_attack(kind, arguments):
    client = make(kind, arguments)
    data = shared_out(classes([9, 8, 12, 10, 7, 11]))
    for aggregator in (Median, TrimmedMean, Krum, Term, QFFL, FedMGDA, TiltedMean):
        settings = {"aggregator": aggregator(), "attack": Forged(), "ids": [2]}
        outcome = run_rounds(client, data, rounds=2, sampler=Uniform(5), **settings)
        assert outcome.w.isfinite().all(), aggregator
        assert outcome.v.isfinite().all(), aggregator
        assert {float(report["train/rejected"]) for report in outcome.reports} == {0.0}
