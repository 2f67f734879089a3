"""Laws that every algorithm keeps; a walk through the package finds the algorithms.

The suite covers a new client before its author writes a test. ARGUMENTS names the clients that
need more than a net, or that are tried with several arguments.
"""

import copy
import functools
import inspect
import io
import math
import re
from dataclasses import dataclass, replace

import pytest
import torch
from contract_suite import find_configurations, one_test, one_test_per_class
from equal_trials import trials_skipped
from exhaustive import exhaustive_for
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer
from small_federations import (
    Cohorts,
    VariedCohorts,
    classes,
    run_rounds,
    seeded,
    sgd,
    shared_out,
)
from torch import nn

import pl_fed.clients
from pl_fed import EngineOptions, Federation
from pl_fed.aggregators import QFFL, FedMGDA, Krum, Median, Term, TiltedMean, TrimmedMean
from pl_fed.attacks import RandomLabels
from pl_fed.clients import FLAME, Client, FedAS, FedAvg, FedNova, Local, Mocha, Scaffold
from pl_fed.engine.base import as_outputs
from pl_fed.engine.own_samples import OwnSamples
from pl_fed.engine.step_function import StepFunction
from pl_fed.samplers import Uniform
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
    "FedDBE": [{}, {"kappa": 0.0}],
    "FedDyn": [{}, {"alpha": 0.5, "weights": "samples"}],
    "FedPer": [{}, {"own": ["0.weight", "1"]}],
    "FedRep": [{}, {"own": ["0", "4.bias"], "head_steps": 3}, {"own": []}],
    "FedALA": [{"first_epochs": 2}, {"mixed": ["0.weight", "1"], "mixing_share": 0.3}],
    "FedAS": [{}, {"alignment_epochs": 2, "fisher_weights": False}],
    "FedBABU": [{"finetune_epochs": 1}, {"finetune_part": "head", "finetune_steps": 2}],
    "FedBN": [{}, {"own": ["1.bias"]}],
    "Finetuning": [
        {},
        {"lam": 0.5, "finetune_steps": 3, "finetune_lr": 0.05},
        {"finetune_epochs": 2, "regularizer": "fisher", "lam": 5.0},
    ],
    "KNNPer": [{}, {"neighbors": 2, "lams": [], "scale": 0.1}],
    "L2SGD": [{"lam": 0.5}, {"lam": 100.0}],
    "Mapper": [{}, {"lams": [0.5, 0.9]}],
    "MeanRegularized": [{"lam": 0.5}, {"mean": "cohort"}],
    "Mocha": [{}, {"lam": 0.003, "decay": 0.1, "epsilon": 0.1, "sigma": 2.0}],
    "Moon": [{}, {"mu": 5.0, "temperature": 1.0}],
    "PerFedAvg": [
        {},
        {"hessian": "exact", "local_steps": 4},
        {"hessian": "none", "adaptation_lr": 0.2, "local_steps": 4},
    ],
    "PropFair": [{}, {"ceiling": 2.5, "epsilon": 1.0}, {"ceiling": 2.0, "tail": "huber"}],
    "Scaffold": [{"optimizer": sgd(0.1)}, {"optimizer": sgd(0.1), "control": "start"}],
    "SimpleTuning": [
        {},
        {"tuning_epochs": 2, "tuning_lr": 0.1},
        {"tuning_steps": 3, "head_seed": 4},
    ],
    "FLAME": [
        {},
        {"lam": 0.3, "weights": "samples", "pull_to": "broadcast", "lagged_global": True},
        {"rho": 0.5, "weights": "samples", "tolerance": 1e-3, "optimizer": sgd(0.1)},
    ],
    "FedADMM": [{}, {"rho": 0.3, "weights": "samples"}],
    "LpProj": [{"dimensions": 7}, {"dimensions": 60, "weights": "samples"}],
    "PFedFDA": [{}, {"single_beta": True, "ridge": 0.1, "shrinkage": 0.1, "candidates": 3}],
    "PFedMe": [{}, {"lam": 2.0, "personal_steps": 2, "personal_lr": 0.1}],
    "PFedMeEpochs": [{}, {"lam": 0.5, "eta": 2.0}],
    "FedTilt": [
        {},
        {"tau": 2.0, "lam": 5.0, "mu": 0.3, "personal_lr": 0.05},
        {"tau": 1.0, "lam": -0.5},
        {"tau": math.inf},
    ],
}
UNTRAINED_INFLUENCE = {  # step -> models that change the loss, but that this step does not train
    "APFL": dict.fromkeys((0, 3), ("global",)),  # the loss of the mixture trains the other model
    "Mapper": dict.fromkeys((0, 3), ("personal_0", "personal_1", "personal_2")),  # likewise
    "FedROD": dict.fromkeys((0, 3), ("global",)),  # the own head's loss reads body and head
    "FedRep": {0: ("personal",)},  # the head is trained first
    "Scaffold": {0: ("slope",), 3: ("slope",)},  # it sums up gradients at w^t
}
OWN_GRADIENTS = {"PerFedAvg", "PFedMe"}  # their gradients are not those of the reported loss
SPLIT_MINIBATCHES = {"PerFedAvg"}  # the order of the samples in a minibatch matters
ALTERNATING = {"FedBABU", "FedROD", "FedRep", "PFedFDA"}  # a step trains only some parameters
SPLIT_CLIENTS = {"PFedFDA"}  # the order of a client's samples matters: its folds alternate
LATER_STATES = {"FedDBE"}  # its states change from the second round on
SIZES = [7, 3, 10, 1]
OWN_NETS = {"FedExLoRA"}  # needs a net with adapters: see tests/models/test_lora.py
CONFIGURATIONS = [
    pair
    for pair in find_configurations(pl_fed.clients, Client, ARGUMENTS)
    if pair[0].__name__ not in OWN_NETS
]
client_classes = one_test_per_class(CONFIGURATIONS)
all_clients = one_test(CONFIGURATIONS)


def net():
    return nn.Sequential(
        nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3)
    )


def make(kind, arguments, **kwargs):
    settings = {"optimizer": sgd(0.1, momentum=0.5), "local_steps": 2, **arguments, **kwargs}
    return kind(seeded(net), **settings)


@functools.cache
def own_data():
    """Return the data of three clients with five samples each."""
    return shared_out(classes([5, 5, 5])).clients.to(torch.device("cpu"), torch.float64)


def start_round(client):
    """Start a round of three clients that took part in an earlier round."""
    clients = 3
    client.population = Population(clients, clients, 5 * clients)
    draw = torch.Generator().manual_seed(3)

    def perturb(row):
        return row + 0.1 * torch.randn(row.shape, generator=draw, dtype=row.dtype)

    new = client.new_round(clients, samples=5, steps=2)
    new.broadcast.parameters = perturb(new.broadcast.parameters)
    new.validation_samples.fill_(5)
    rows = [name for name in new.states if not name.endswith(".statistics")]
    new.states |= {name: perturb(new.states[name]) for name in rows}
    new.server_states = {name: perturb(row) for name, row in new.server_states.items()}
    new.visit_samples = OwnSamples(client, own_data(), own_data().batch).visit
    if client.reads_class_counts:
        new.class_counts = torch.full((clients, 3), 5 / 3, dtype=torch.float64)
    if client.reads_validation:
        new.validation_inputs = perturb(torch.zeros(clients, 5 * 4, dtype=torch.float64))
        new.validation_targets = (torch.arange(5) % 3).repeat(clients, 1)
    return client.run_begin(new)


def client_in_a_round(kind, arguments):
    """Return a client in the middle of a round, after local steps, and the rows that it reads."""
    client = make(kind, arguments).double().train()
    draw = torch.Generator().manual_seed(4)
    rows = start_round(client).client_rows(0)
    for model in ("global", "personal"):
        row = client.row(model).data
        row += 0.1 * torch.randn(len(row), generator=draw, dtype=row.dtype)
    client.draws.start(11)
    return client, rows


def batch(size=5, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=draw, dtype=torch.float64)
    return Batch(x, torch.randint(3, (size,), generator=draw), None, torch.arange(size))


def differentiate(client, rows, batch, training_step=None, batch_idx=0):
    """Return the loss of a step, and the gradients of all parameters by name."""
    client.zero_grad()
    client.draws.start(11)
    with client.reading(rows):
        outputs = (training_step or client.training_step)(batch, batch_idx)
    loss = outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in client.named_parameters()}


def test_walk_finds_the_clients():
    assert {kind.__name__ for kind, _ in CONFIGURATIONS} >= {"FedAvg", "Local", "Ditto"}


@all_clients
def test_trained_models_are_the_models_of_the_objective(kind, arguments):
    client = make(kind, arguments)
    assert client.trained == client.objective.trained
    assert set(client.trained) <= set(client.models)
    assert len(client.trained) == len(set(client.trained)) > 0


def command_line_arguments(kind):
    """Return the names of the arguments that the command line accepts for a class."""
    return set(ArgumentParser().add_class_arguments(kind))


def listed_arguments(kind):
    """Return the names of the arguments that a docstring lists, or leaves to that of Client."""
    arguments = inspect.cleandoc(kind.__doc__).split("Args:")[1].split("Raises:")[0]
    listed = set(re.findall(r"^    (\w+): \S", arguments, flags=re.MULTILINE))
    refers = "**kwargs: The other arguments of :class:`Client`." in arguments
    return listed | (listed_arguments(Client) if refers else set())


@pytest.mark.slow
def test_docstrings_list_every_argument_that_users_set():
    kinds = [member for member in vars(pl_fed.clients).values() if inspect.isclass(member)]
    for kind in filter(lambda kind: issubclass(kind, Client), kinds):
        arguments = command_line_arguments(kind)
        assert arguments - listed_arguments(kind) == set(), kind
        assert {"net", "optimizer", "local_steps", "task"} <= arguments, kind


def test_docstrings_have_an_example():
    for kind in dict.fromkeys(kind for kind, _ in CONFIGURATIONS):
        assert kind.training_step.__doc__, kind
        assert "\nExample:\n    >>> " in inspect.cleandoc(kind.__doc__), kind


@client_classes
def test_only_trained_models_have_gradients(kind, arguments):
    client, rows = client_in_a_round(kind, arguments)
    loss, gradients = differentiate(client, rows, batch())
    assert loss.shape == ()
    assert loss.isfinite()
    for name, gradient in gradients.items():
        model = name.partition("_model.")[0]
        if kind.__name__ in ALTERNATING:
            assert gradient is None or model in client.trained, name
        else:
            assert (gradient is not None) == (model in client.trained), name
            assert gradient is None or gradient.any(), name


@pytest.mark.slow
@one_test_per_class(
    [pair for pair in CONFIGURATIONS if pair[0].__name__ not in OWN_GRADIENTS]  # their own tests
)
def test_gradients_equal_finite_differences(kind, arguments):
    for step in (0, 3):
        check_gradient(kind, arguments, step)


def check_gradient(kind, arguments, step, epsilon=1e-6):
    """Check the gradient of one local step against central differences.

    The client computes the gradient as it does one by one; the losses are those of a stack of
    models, each with one parameter moved.
    """
    client, rows = client_in_a_round(kind, arguments)
    start = {model: client.row(model).data.clone() for model in client.trained}
    samples = batch()
    value, _ = differentiate(client, rows, samples, batch_idx=step)
    layout, step_function = client.row("global").layout, StepFunction(client, client.objective)
    split_rows = {
        name: layout.views(row) if len(row) == layout.numel else row for name, row in rows.items()
    }

    def compute_loss(rows):
        models = {model: layout.views(row) for model, row in rows.items()}
        return step_function(models, samples._asdict(), step, 11, split_rows)["loss"]

    torch.testing.assert_close(compute_loss(start), value, rtol=1e-12, atol=1e-12)
    skipped = UNTRAINED_INFLUENCE.get(kind.__name__, {}).get(step, ())
    models = [model for model in client.trained if model not in skipped or len(start) == 1]
    assert models
    moves = epsilon * torch.eye(layout.numel, dtype=torch.float64)
    for model in models:

        def loss_after_move(move, model=model):
            return compute_loss({**start, model: start[model] + move})

        losses = torch.vmap(loss_after_move)(torch.cat([moves, -moves])).detach()
        larger, smaller = losses.chunk(2)
        parameters = client.parameters_of(model).values()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        gradient = torch.cat([gradient.flatten() for gradient in gradients])
        expected = (larger - smaller) / (2 * epsilon)
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)


@client_classes
def test_training_step_is_pure(kind, arguments):
    """A step changes gradients only: no parameter, no buffer, no row, no random state."""
    client, rows = client_in_a_round(kind, arguments)
    before = copy.deepcopy(client.state_dict())
    rows_before = {name: row.clone() for name, row in rows.items()}
    samples = batch()
    x, y = samples.inputs.clone(), samples.targets.clone()
    state = torch.get_rng_state()
    first, gradients = differentiate(client, rows, samples)
    gradients = {name: None if g is None else g.clone() for name, g in gradients.items()}
    again, repeated_gradients = differentiate(client, rows, samples)
    assert torch.equal(first, again)
    for name, gradient in gradients.items():
        assert gradient is None or torch.equal(gradient, repeated_gradients[name])
    for name, value in client.state_dict().items():
        assert torch.equal(value, before[name])
    for name, row in rows.items():
        assert torch.equal(row, rows_before[name])
    assert torch.equal(samples.inputs, x)
    assert torch.equal(samples.targets, y)
    assert torch.equal(torch.get_rng_state(), state)


def pad(samples, value):
    """Append three samples of that value behind the mask."""
    x = torch.cat([samples.inputs, torch.full((3, 4), value, dtype=torch.float64)])
    y = torch.cat([samples.targets, torch.tensor([0, 2, 2])])
    return Batch(x, y, torch.arange(8) < 5, torch.arange(8))


@pytest.mark.slow
@client_classes
def test_padding_changes_neither_loss_nor_gradients(kind, arguments):
    client, rows = client_in_a_round(kind, arguments)
    check_padding(client, rows, client.training_step, (0.0, -1e3, 1e6))


def check_padding(client, rows, step, values):
    """Check that samples behind the mask change neither the loss nor a gradient; return these."""
    expected, gradients = differentiate(client, rows, batch(5), step)
    gradients = {name: g.clone() for name, g in gradients.items() if g is not None}
    for value in values:
        loss, padded_gradients = differentiate(client, rows, pad(batch(5), value), step)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(padded_gradients[name], gradient, rtol=1e-10, atol=1e-12)
    return gradients


@client_classes
def test_adaptation_is_pure_and_ignores_padding(kind, arguments):
    client, rows = client_in_a_round(kind, arguments)
    if client.adaptation is None:
        return
    before = copy.deepcopy(client.state_dict())
    gradients = check_padding(client, rows, client.adaptation.step, (1e3,))
    assert {name.split("_model.")[0] for name in gradients} == {"personal"}
    assert all(torch.equal(value, before[n]) for n, value in client.state_dict().items())


@client_classes
def test_batch_of_padding_alone_has_a_finite_loss(kind, arguments):
    client, rows = client_in_a_round(kind, arguments)
    samples = batch(3)._replace(mask=torch.zeros(3, dtype=torch.bool))
    loss, gradients = differentiate(client, rows, samples)
    assert loss.isfinite()
    assert all(g is None or g.isfinite().all() for g in gradients.values())


@pytest.mark.slow
@one_test_per_class([pair for pair in CONFIGURATIONS if "global" in make(*pair).evaluated])
def test_evaluated_global_model_has_statistics_of_the_data(kind, arguments):
    """Also if no step trains it: otherwise it normalizes by its statistics before round 0."""
    net = seeded(lambda: nn.Sequential(nn.BatchNorm1d(4, momentum=0.5), nn.Linear(4, 3)))
    arrays = classes([8, 12])
    arrays.inputs[:] = arrays.inputs * 2 + 3
    data, settings = shared_out(arrays), {"optimizer": sgd(0.01), "local_steps": 2}
    try:
        client = kind(net, **{**settings, **arguments})
    except ValueError as refusal:
        assert "to have no running statistics but got" in str(refusal)  # noqa: PT017
        return
    statistics = run_rounds(client, data).w_statistics
    start = torch.cat([torch.zeros(4), torch.ones(4)]).double()
    expected = torch.cat([data.clients.inputs.mean(0), data.clients.inputs.var(0)]).double()
    assert (statistics - expected).norm() < 0.8 * (start - expected).norm()


def set_up(kind, arguments, *cohorts, engine="one_by_one", arrays=None):
    """Return a client, its federation and its optimizer before the first round.

    Without the trials of the client: see the test of its own hooks.
    """
    client = make(kind, arguments).double()
    federation = Federation(Cohorts(*cohorts), engine=EngineOptions(engine), seed=0)
    with trials_skipped():
        federation.setup(client, shared_out(arrays or classes(SIZES)), "fit")
    client.train()
    return client, federation, client.configure_optimizers()


def client_states(federation):
    """Return the states of all clients by name, without empty states."""
    client_ids, store = torch.arange(len(SIZES)), federation.store
    rows = {name: store.read(name, client_ids) for name in sorted(store.defaults)}
    return {name: row for name, row in rows.items() if row.numel()}


def evaluated_models(federation):
    """Return all models as they are evaluated, by name."""
    everyone = torch.arange(len(SIZES))
    losses = federation.session.evaluation.centers.measure(everyone)
    return federation.session.states.begin(everyone, center_losses=losses).models


def all_rows(client, federation):
    """Return the global model, all states, and all models as they are evaluated."""
    models = evaluated_models(federation).values()  # some are views of a state
    rows = [client.row("global").data.clone(), client.statistics("global").data.clone()]
    rows += client_states(federation).values()
    rows += [row.clone() for row in federation.server_states.values()]
    evaluated = (row for model in models for row in (model.parameters, model.statistics))
    return [*rows, *(row.clone() for row in evaluated)]


COHORTS = (0, 1, 3), (0, 1, 2), (0, 1, 3), (0, 1, 3)  # client 2 comes later


@dataclass
class OneByOneRun:
    """One-by-one run: the rounds of COHORTS, uninterrupted.

    Attributes:
        states: The states of all clients after round 0, by name.
        checkpoint: The file of the states of client and federation after round 0.
        rows: All rows after round 1.
        w: The global model's parameters after the last round.
        models: The parameters of all models after the last round, as they are evaluated.
        reports: The report of each round.
    """

    states: dict
    checkpoint: bytes
    rows: list
    w: torch.Tensor
    models: dict
    reports: list


ONE_BY_ONE_RUNS = {}


def one_by_one_run(kind, arguments):
    """Return the run of an algorithm that several tests read; it is made once."""
    key = kind, str(arguments)
    if key not in ONE_BY_ONE_RUNS:
        ONE_BY_ONE_RUNS[key] = run_one_by_one(kind, arguments)
    return ONE_BY_ONE_RUNS[key]


def run_one_by_one(kind, arguments):
    client, federation, optimizer = set_up(kind, arguments, *COHORTS)
    reports = [federation.run_round(0, optimizer)]
    states, checkpoint = client_states(federation), io.BytesIO()
    torch.save((client.state_dict(), federation.state_dict()), checkpoint)
    reports.append(federation.run_round(1, optimizer))
    check_changed_states(states, client_states(federation))
    rows = all_rows(client, federation)
    reports += [federation.run_round(round, optimizer) for round in (2, 3)]
    models = {name: model.parameters for name, model in evaluated_models(federation).items()}
    w = client.row("global").data
    return OneByOneRun(states, checkpoint.getvalue(), rows, w, models, reports)


def check_changed_states(before, after):
    """Check that round 1 has changed the states of its clients, and no number of client 3."""
    for name, rows in before.items():
        assert torch.equal(rows[3], after[name][3]), name
    for present in COHORTS[1] if before else ():
        assert any(not before[name][present].equal(after[name][present]) for name in before)


def load_states_after_round_0(checkpoint, client, federation):
    """Load the file of a :class:`OneByOneRun`: round 1 comes next."""
    client_state, federation_state = torch.load(io.BytesIO(checkpoint), weights_only=True)
    client.load_state_dict(client_state)
    federation.load_state_dict(federation_state)


@pytest.mark.slow
@client_classes
def test_training_lowers_the_loss_with_finite_uploads(kind, arguments):
    """One by one; the other engines agree with that."""
    client, run = make(kind, arguments), one_by_one_run(kind, arguments)
    for report in run.reports:
        assert report["train/loss"].isfinite()
        assert report["train/rejected"] == 0
    w, models = run.w, run.models
    assert w.isfinite().all()
    if "global" in client.trained:
        assert not torch.equal(w, client.row("global").data.double())
    if "personal" in client.trained:
        assert models["personal"].isfinite().all()
    if any(len(row) for row in client.state_defaults().values()) and "personal" in client.trained:
        assert len(models["personal"].unique(dim=0)) == len(SIZES)
    assert COHORTS[0] == COHORTS[-1]
    assert run.reports[-1]["train/loss"] < run.reports[0]["train/loss"]


@exhaustive_for("Ditto", "DittoChoice", "FLAME", "FedTilt", "Mapper", "PFedMe", "PerFedAvg")
@pytest.mark.slow
@client_classes
def test_engines_agree_and_absent_clients_keep_their_states(kind, arguments):
    """Engines agree up to rounding; an absent client keeps its states to the bit.

    In a stack of all clients of a round, and in stacks of two in the next round.
    """
    expected = one_by_one_run(kind, arguments)
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-10)
    client, federation, optimizer = set_up(kind, arguments, *COHORTS[:2], engine="stacked")
    close(federation.run_round(0, optimizer)["train/loss"], expected.reports[0]["train/loss"])
    states = client_states(federation)
    close(states, expected.states)
    federation.engine_choice.size = 2
    close(federation.run_round(1, optimizer)["train/loss"], expected.reports[1]["train/loss"])
    check_changed_states(states, client_states(federation))
    for row, expected_row in zip(all_rows(client, federation), expected.rows, strict=True):
        close(row, expected_row)


@exhaustive_for(
    "Ditto",
    "DittoChoice",
    "FLAME",
    "FedBN",
    "FedProx",
    "FedTilt",
    "Finetuning",
    "HierFedAvg",
    "KNNPer",
    "Local",
    "Mapper",
    "PerFedAvg",
    "PFedMe",
    "PropFair",
    "SimpleTuning",
    "DittoGreedy",
    "FedDBE",
    "LpProj",
    "FedBABU",
    "FedADMM",
    "FedAS",
    "Moon",
    "FedPer",
    "L2SGD",
    "PFedMeEpochs",
    "MeanRegularized",
    "FedROD",
    "IFCA",
    "FedNova",
)
@client_classes
@pytest.mark.slow
def test_own_hooks_keep_the_rule_that_rounds_check_in_those_of_users(kind, arguments):
    """After the trials before training, which accept the algorithm."""
    client = make(kind, arguments).double()
    federation = Federation(Uniform(2), engine=EngineOptions("one_by_one"), seed=0)
    federation.setup(client, shared_out(classes([7, 3, 10])), "fit")
    optimizer = client.train().configure_optimizers()
    for name in ("begin", "end_round"):
        hook = getattr(client, name)
        setattr(client, name, lambda round, hook=hook: hook(round))  # of this module, so checked
    federation.run_round(0, optimizer)


@client_classes
def test_end_of_a_round_returns_rows_and_keeps_the_broadcast(kind, arguments):
    client, rows = client_in_a_round(kind, arguments)
    with client.reading(rows):
        outputs = as_outputs(client.training_step(batch(), 0))
    client = make(kind, arguments).double()
    numel = client.row("global").layout.numel
    end = start_round(client)
    draw = torch.Generator().manual_seed(5)
    for model in client.trained:
        end.models[model] = end.models[model].clone()
        end.models[model].parameters = torch.randn(3, numel, generator=draw, dtype=torch.float64)
    for model in client.validated:
        end.validation_losses[model] = torch.rand(3, generator=draw, dtype=torch.float64)
    end.step_means = {name: value.detach().repeat(3) for name, value in outputs.items()}
    broadcast = end.broadcast.parameters.clone()
    upload, states = client.run_end_round(end)
    assert torch.equal(end.broadcast.parameters, broadcast)
    defaults, server_defaults = client.state_defaults(), client.server_state_defaults()
    assert {name: row.shape for name, row in states.items()} == {
        name: (3, len(row)) for name, row in defaults.items()
    }
    assert set(end.proposals) <= set(server_defaults)
    for name, row in end.proposals.items():
        assert row.shape == (3, len(server_defaults[name]))
    if upload is not None:
        assert upload.shape == (3, numel)
        assert upload.isfinite().all()


@all_clients
def test_default_states_are_rows_and_equal_at_every_call(kind, arguments):
    client = make(kind, arguments)
    first, second = client.state_defaults(), client.state_defaults()
    if set(client.trained) - {"global"}:
        assert first or client.server_state_defaults()
    for name, row in first.items():
        assert row.dim() == 1
        assert torch.equal(row, second[name])


@pytest.mark.slow
@client_classes
def test_resumed_rounds_equal_uninterrupted_rounds(kind, arguments):
    """Two rounds equal one round, a checkpoint that a new federation loads, and one round."""
    expected = one_by_one_run(kind, arguments)
    client, federation, optimizer = set_up(kind, arguments, COHORTS[1])
    load_states_after_round_0(expected.checkpoint, client, federation)
    federation.run_round(1, optimizer)
    for row, expected_row in zip(all_rows(client, federation), expected.rows, strict=True):
        assert torch.equal(row, expected_row)


@pytest.mark.slow
@client_classes
def test_states_of_a_client_do_not_depend_on_the_others(kind, arguments):
    """Client 0 has the same states after a round if all other clients have other data."""
    together = one_by_one_run(kind, arguments).states
    if not together:
        return
    changed = classes(SIZES)
    changed.inputs[SIZES[0] :] += 1.0
    _, federation, optimizer = set_up(kind, arguments, COHORTS[0], arrays=changed)
    federation.run_round(0, optimizer)
    apart = client_states(federation)
    for name, rows in together.items():
        assert torch.equal(rows[0], apart[name][0]), name
    changed = any(not rows[1].equal(apart[name][1]) for name, rows in together.items())
    assert changed != (kind.__name__ in LATER_STATES)


@exhaustive_for(
    "APFL",
    "Ditto",
    "DittoChoice",
    "DittoGreedy",
    "FLAME",
    "FedRep",
    "FedTilt",
    "Finetuning",
    "KNNPer",
    "Mapper",
    "Moon",
    "PFedMe",
    "PFedMeEpochs",
    "PropFair",
    "SimpleTuning",
    "FedBABU",
    "FedAS",
    "FedALA",
    "FedPer",
    "FedDBE",
    "FedADMM",
    "L2SGD",
    "FedBN",
)
@pytest.mark.slow
@one_test_per_class(
    [
        pair
        for pair in CONFIGURATIONS
        if pair[0].__name__
        not in {*SPLIT_MINIBATCHES, *SPLIT_CLIENTS, "HierFedAvg"}  # whose ids are places
    ]
)
def test_permuted_clients_permute_the_results(kind, arguments):
    """For full batches, as shuffles depend on the id; in rounds of all and of some clients."""
    order, arrays = torch.tensor([2, 0, 3, 1]), classes(SIZES)
    ids = order.argsort()
    permuted = replace(arrays, client=ids[arrays.client])
    settings = {"optimizer": sgd(0.1, momentum=0.5), "local_steps": 2, **arguments}
    client = kind(seeded(net_without_dropout), **settings)
    cohorts = [(0, 1, 2, 3), (1, 2)]
    permuted_cohorts = [sorted(ids[list(cohort)].tolist()) for cohort in cohorts]

    def run(arrays, cohorts):
        data, sampler = shared_out(arrays, batch_size=10), VariedCohorts(*cohorts)
        return run_rounds(client, data, rounds=2, sampler=sampler)

    first, second = run(arrays, cohorts), run(permuted, permuted_cohorts)
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-9)
    close(second.w, first.w)
    if len(first.v):
        close(second.v, first.v[order])
    for name, rows in first.states.items():
        close(second.states[name], rows[order])
    for report, permuted_report in zip(first.reports, second.reports, strict=True):
        close(report["train/loss"], permuted_report["train/loss"])


def net_without_dropout():
    """Return the net without dropout: dropout draws depend on the client's id."""
    layers = list(net())
    return nn.Sequential(*layers[:3], nn.Identity(), layers[4])


@all_clients
@pytest.mark.slow
def test_optimizers_with_a_closure_are_refused_before_training(kind, arguments):
    client = make(kind, arguments, optimizer=lambda params: torch.optim.LBFGS(params, lr=1.0))
    with pytest.raises(ValueError, match=r"Expected argument `optimizer` .* but got LBFGS"):
        client.configure_optimizers()


@all_clients
@pytest.mark.slow
def test_criterion_that_is_no_mean_is_refused(kind, arguments):
    sums = [nn.CrossEntropyLoss(reduction=reduction) for reduction in ("sum", "none")]
    for criterion in (*sums, nn.Identity()):
        with pytest.raises(ValueError, match=r"Expected argument `criterion` .* but got"):
            make(kind, arguments, criterion=criterion)


@all_clients
def test_none_is_refused_for_required_numbers(kind, arguments):
    for parameter in inspect.signature(kind.__init__).parameters.values():
        if parameter.annotation is float:
            with pytest.raises((TypeError, ValueError), match=r"got None|NoneType"):
                make(kind, {**arguments, parameter.name: None})


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@all_clients
@pytest.mark.slow
def test_trainer_without_a_federation_is_refused(kind, arguments):
    client = make(kind, arguments)
    trainer = Trainer(logger=False, enable_checkpointing=False, barebones=True, max_epochs=1)
    with pytest.raises(TypeError, match=r"fitted by `pl_fed.Trainer\(federation=...\)` but got"):
        trainer.fit(client, [torch.zeros(1)])


@all_clients
def test_optimizer_groups_are_the_trained_models(kind, arguments):
    client = make(kind, arguments)
    groups = client.configure_optimizers().param_groups
    assert [group["name"] for group in groups] == list(client.trained)
    for group in groups:
        expected = [p for p in client.model(group["name"]).parameters() if p.requires_grad]
        assert all(a is b for a, b in zip(group["params"], expected, strict=True))


class PoisonedAndReversed(RandomLabels):
    """Trains on random labels, and uploads -10 times the update."""

    def forge(self, honest, own, context):
        return -10 * own


def check_rounds_under_attack(kind, arguments, aggregators, sizes):
    """Check that models stay finite, and that no upload is rejected; one client is absent."""
    client, data = make(kind, arguments), shared_out(classes(sizes))
    for aggregator in aggregators:
        settings = {"aggregator": aggregator(), "attack": PoisonedAndReversed(), "ids": [2]}
        outcome = run_rounds(client, data, sampler=Uniform(len(sizes) - 1), **settings)
        assert outcome.w.isfinite().all(), aggregator
        assert outcome.v.isfinite().all(), aggregator
        assert {float(report["train/rejected"]) for report in outcome.reports} == {0.0}


@exhaustive_for(
    "Ditto",
    "DittoChoice",
    "FLAME",
    "FedRep",
    "FedTilt",
    "Finetuning",
    "Mapper",
    "Moon",
    "PFedFDA",
    "PFedMe",
    "PFedMeEpochs",
    "PerFedAvg",
    "PropFair",
    "Scaffold",
    "SimpleTuning",
    "FedALA",
    "DittoGreedy",
    "LpProj",
    "FedADMM",
    "FedDBE",
    "FedBABU",
    "FedPer",
    "FedDyn",
    "MeanRegularized",
    "FedBN",
    "L2SGD",
    "IFCA",
    "HierFedAvg",
    "FedROD",
    "FedProx",
)
@pytest.mark.slow
@client_classes
def test_attacked_clients_train_with_an_aggregator_that_reads_losses(kind, arguments):
    """An aggregator reads rows, and losses at w^t: no more depends on the algorithm.

    Algorithms that scale uploads refuse Term, whose weights they do not know.
    """
    scales_uploads = kind in (FedAS, FedNova)
    check_rounds_under_attack(kind, arguments, (QFFL if scales_uploads else Term,), [9, 8, 5, 7])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FedAvg, FLAME, Local, Mocha, Scaffold])
def test_attacked_clients_train_with_every_kind_of_aggregator(kind):
    """Clients that upload updates, messages, nothing or models, and that propose a state."""
    aggregators = (Median, TrimmedMean, Krum, QFFL, FedMGDA, TiltedMean)
    arguments = ARGUMENTS.get(kind.__name__, [{}])[0]
    check_rounds_under_attack(kind, arguments, aggregators, [9, 8, 12, 10, 7, 11])
