"""A user's own classes are tried before training: a checkpoint has to hold all that they keep."""

import random
import warnings

import numpy as np
import pytest
import torch
from small_federations import classes, mlp, seeded, sgd, shared_out

from pl_fed import Adversary, Federation
from pl_fed.aggregators import Aggregator
from pl_fed.attacks import Attack, Combined, RandomLabels
from pl_fed.clients import Client, FedAvg, Model, Objective
from pl_fed.preflight.net_trial import _warn_of_memory_and_draws
from pl_fed.rounds.byzantine_clients import ByzantineClients
from pl_fed.samplers import All, Uniform
from pl_fed.types import Batch, ClientContext, RoundContext


class Own(FedAvg):
    """FedAvg with a state, a counter and a cache."""

    def __init__(self, end_round=lambda self, upload: upload):
        super().__init__(seeded(mlp), optimizer=sgd(0.1))
        self.add_state("sum", self.zero_row)
        self.rounds, self.cache, self.seen, self.change = 0, None, {}, end_round

    def end_round(self, client):
        return self.change(self, super().end_round(client))


class Count(Own):
    def end_round(self, client):
        self.rounds += 1
        return super().end_round(client) / self.rounds


class PerClient(Own):
    def end_round(self, client):
        upload = super().end_round(client)
        for number, row in zip(client.ids.tolist(), upload):
            row += self.seen.get(number, 0.0)
            self.seen[number] = row.clone()
        return upload


class Preparing(Client):
    """Counts rounds in the hook after a preparation."""

    def __init__(self):
        models = {"global": Model(), "ready": Model(trained=False, kept=False)}
        super().__init__(seeded(mlp), models=models, optimizer=sgd(0.1))
        self.add_state("sum", self.zero_row)
        self.preparation = Objective(self.prepare_step, {"ready": Model()}, sgd(0.1))
        self.rounds = 0

    def prepare_step(self, batch, batch_idx):
        return self.loss("ready", batch)

    def training_step(self, batch, batch_idx):
        return self.loss("global", batch)

    def end_preparation(self, client):
        self.rounds += 1
        client.states["sum"] += self.rounds


class LossKeeping(Own):
    """Keeps a loss with noise of a step, which engines seed, and a count for a log."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + torch.rand(())

    def end_round(self, client):
        self.rounds += 1
        client.states["sum"] += client.step_means["loss"][:, None]
        return super().end_round(client)


class Declared(Own):
    def begin(self, client):
        super().begin(client)
        self.cache = client.broadcast.parameters.norm()
        self.rounds += 1  # a log that nothing reads

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.cache * (1 + self.current_epoch)

    def end_round(self, client):
        upload = super().end_round(client)
        client.states["sum"] += upload
        return upload + client.states["sum"]


class Last(Aggregator):
    """Half of the last result, kept in an attribute, or in the memory."""

    def __init__(self, declared):
        super().__init__()
        if declared:
            self.add_memory("last")
        else:
            self.last = torch.empty(0)

    def max_byzantine(self, num_uploads):
        return 0

    def forward(self, uploads, weights, context):
        merged = uploads.mean(0) + (self.last / 2 if len(self.last) else 0)
        self.last = merged.clone()
        return merged


class Growing(Attack):
    """Its factor grows from round to round."""

    def __init__(self):
        self.factor = 1.0

    def forge(self, honest, own, context):
        self.factor += 1
        return own * self.factor


class Saved(Growing):
    def state_dict(self):
        return {"factor": self.factor}

    def load_state_dict(self, state):
        self.factor = state["factor"]


def set_up(client=None, *arguments, **options):
    client = client or FedAvg(seeded(mlp), optimizer=sgd(0.1))
    Federation(All(), *arguments, seed=0, **options).setup(
        client, shared_out(classes([3, 6])), "fit"
    )


@pytest.mark.parametrize(("kind", "name"), [(Count, "rounds"), (PerClient, "seen")])
def test_hooks_that_keep_values_in_attributes_are_refused(kind, name):
    expected = f"`end_round` of {kind.__name__} to give the same .* by `{name}`: .*add_state"
    with pytest.raises(ValueError, match=expected):
        set_up(kind())


def test_hooks_of_a_preparation_that_keep_values_in_attributes_are_refused():
    with pytest.raises(ValueError, match=r"to give the same .* by `rounds`: .*add_state"):
        set_up(Preparing())


def draw_by_torch(_, upload):
    return upload + torch.randn_like(upload)


def draw_by_python_and_numpy(_, upload):
    return upload * (random.random() + np.random.rand())  # noqa: NPY002


@pytest.mark.parametrize("draw", [draw_by_torch, draw_by_python_and_numpy])
def test_a_warning_tells_of_hooks_that_draw_without_a_key(draw):
    with pytest.warns(match="`begin` or `end_round` of Own draws from a global generator"):
        set_up(Own(draw))


@pytest.mark.slow
def test_draws_of_a_step_are_no_draws_of_the_hooks(recwarn):
    set_up(LossKeeping())
    assert not [warned for warned in recwarn if "draws" in str(warned.message)]


def scale_all(_, upload):
    return upload / upload.norm()


def center(_, upload):
    return upload - upload.mean(0)


def scale_each(_, upload):
    return upload / upload.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("change", [scale_all, center])
def test_uploads_that_read_other_clients_of_a_chunk_are_refused(change):
    """They depended on the number of clients in a chunk, and on other clients' data."""
    expected = "`end_round` of Own to compute the upload, states and proposals .* row by row"
    with pytest.raises(ValueError, match=expected):
        set_up(Own(change))


def test_uploads_of_own_rows_are_accepted():
    set_up(Own(scale_each))


def test_declared_states_caches_and_counters_of_a_log_are_accepted(recwarn):
    set_up(Declared(), Last(declared=True))
    assert not [str(w.message) for w in recwarn if "draws from" in str(w.message)]


def test_memory_of_an_aggregator_in_an_attribute_is_refused():
    with pytest.raises(ValueError, match="by `add_memory` but Last merges otherwise"):
        set_up(None, Last(declared=False))


def forge(attack, round):
    byzantine, mine = ByzantineClients(Adversary(attack, ids=[0])), torch.tensor([True, False])
    byzantine.setup(2, 3, seed=0)
    context = RoundContext(round=round, clients=torch.arange(2))
    return byzantine.forge(torch.ones(2, 3), mine, ~mine, context, None)[0].tolist()


def test_memory_of_an_attack_in_an_attribute_is_refused():
    with pytest.raises(ValueError, match="by `state_dict` but Growing forges otherwise"):
        forge(Growing(), 0)
    saved = Saved()
    assert forge(saved, 0) == [2.0, 2.0, 2.0], "the attack itself is called once"
    assert saved.factor == 2.0


class Noise(Attack):
    def forge(self, honest, own, context):
        return torch.rand_like(own) + np.random.rand()  # noqa: NPY002


class NoisyMean(Aggregator):
    def max_byzantine(self, num_uploads):
        return 0

    def forward(self, uploads, weights, context):
        return uploads.mean(0) + torch.rand(uploads.shape[1])


@pytest.mark.parametrize("attack", [Noise(), Combined([RandomLabels(), Noise()])])
def test_draws_of_own_attacks_have_the_key_of_the_round(attack):
    torch.rand(1)  # an earlier draw changes nothing
    first, again = forge(attack, 1), forge(attack, 1)
    assert first == again != forge(attack, 2)


def test_draws_of_own_aggregators_have_the_key_of_the_round():
    def merge(round):
        torch.rand(1)
        return NoisyMean()(torch.zeros(2, 3), torch.ones(2), RoundContext(round=round)).tolist()

    state = torch.get_rng_state()
    assert NoisyMean()(torch.zeros(2, 3), torch.ones(2), RoundContext()).tolist()
    assert torch.equal(torch.get_rng_state(), state)
    assert merge(1) == merge(1) != merge(2)


class Projecting(FedAvg):
    """A projection beside the models, which no optimizer trains."""

    def __init__(self):
        super().__init__(seeded(mlp), optimizer=sgd(0.1))
        self.projection = torch.nn.Linear(3, 3)


class Tempered(torch.nn.CrossEntropyLoss):
    def __init__(self):
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.ones(()))


def test_a_warning_names_parameters_that_no_model_contains():
    with pytest.warns(match="No model of Projecting contains `projection.weight`, `projection.b"):
        set_up(Projecting())
    with pytest.warns(match="No model of FedAvg contains `criterion.temperature`, which keep"):
        set_up(FedAvg(seeded(mlp), optimizer=sgd(0.1), criterion=Tempered()))


class Turning(Uniform):
    """Draws one client after the other by a counter."""

    calls = 0

    def sample(self, num_clients, sizes, generator):
        self.calls += 1
        return torch.tensor([self.calls % num_clients])


def set_up_cohorts(sampler, sizes):
    federation = Federation(sampler, seed=0)
    client = FedAvg(seeded(mlp), optimizer=sgd(0.1))
    federation.setup(client, shared_out(classes(sizes)), "fit")
    return federation.session.rounds


def test_a_warning_tells_of_a_sampler_that_keeps_values():
    rounds = set_up_cohorts(Turning(1), [3, 6])
    with pytest.warns(match="Turning keeps values from one draw to the next, which a resumed run"):
        rounds.draw_cohort(0)


class Drawing(Uniform):
    first = (0,)

    def draw_round(self, round, num_clients, sizes, generator):
        return torch.randperm(num_clients)[:1] if round else torch.tensor(self.first)


def test_draws_of_a_sampler_from_a_global_generator_have_the_key_of_the_round():
    rounds = set_up_cohorts(Drawing(1), [3, 6, 3, 3, 3])

    def draw():
        rounds.forget_cohorts()
        return [rounds.draw_cohort(round).item() for round in range(1, 9)]

    assert draw() == draw()
    assert len({*draw()}) > 1


@pytest.mark.parametrize("drawn", [(0, 0), (0, 2), (-1, 0)])
def test_cohorts_of_a_round_are_checked(drawn):
    class Wrong(Drawing):
        first = drawn

    with pytest.raises(ValueError, match="`sampler` to draw 2 different ids of 0 to 1"):
        set_up_cohorts(Wrong(2), [3, 6]).draw_cohort(0)


class Shifting(Attack):
    """Shifts the classes by a count of its calls, or by draws, or by a table that it makes once."""

    poisons = True
    calls, table = 0, None

    def __init__(self, by):
        self.by = by

    def poison(self, batch, context):
        self.calls += self.by == "calls"
        self.table = torch.ones_like(batch.targets) if self.by == "table" else None
        shift = torch.randint_like(batch.targets, 3) if self.by == "draws" else self.calls
        return batch._replace(targets=(batch.targets + shift) % 3)


def test_attack_on_data_with_a_memory_or_draws_of_its_own_gets_a_warning():
    batch = Batch(torch.zeros(6, 4), torch.arange(6) % 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for by in ("calls", "draws", "table"):
            attack = Shifting(by)
            _warn_of_memory_and_draws(attack, batch, ClientContext(0, 0, 0, 3))
            assert attack.calls == 0, "a copy is tried"
    assert [str(w.message).partition(",")[0] for w in caught] == [
        "`poison` of Shifting keeps values from one call to the next",
        "`poison` of Shifting draws from a global generator",
    ]


class Counting(torch.nn.Module):
    """Shifts inputs by a count of its calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.calls


@pytest.mark.slow
def test_augmentation_with_a_memory_gets_a_warning(recwarn):
    """A resumed run, and other engines, would give clients other samples without a word."""
    for modules in ([torch.nn.Dropout()], [torch.nn.Dropout(), Counting()]):
        data = shared_out(classes([8, 8]), augment=modules)
        client = FedAvg(seeded(mlp), optimizer=sgd(0.1))
        Federation(All(), seed=0).setup(client, data, "fit")
    texts = [str(w.message) for w in recwarn if "`data.augment`" in str(w.message)]
    assert [text.partition(" changes")[0] for text in texts] == [
        "Dropout, Counting of `data.augment`"
    ]
