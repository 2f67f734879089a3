"""What every attack keeps to, over all that a walk through the package finds."""

import copy
import importlib
import inspect
import pickle
import pkgutil
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_federations import said

import pl_fed.attacks
from pl_fed.aggregators import Krum, Mean, Median, TrimmedMean
from pl_fed.attacks import Attack, ModelReplacement, RandomLabels, SignFlipping
from pl_fed.types import Batch, ClientContext, RoundContext

ARGUMENTS = {
    "ALittleIsEnough": [{}, {"factor": 1.5}, {"factor": "search", "trials": 7}],
    "Combined": [{"attacks": [RandomLabels(), ModelReplacement(), SignFlipping()]}],
    "Fang": [{}, {"defence": "trimmed_mean"}, {"defence": "trimmed_mean", "on": "update"}],
    "InnerProductManipulation": [{}, {"factor": 3.0}, {"factor": "search"}],
    "Mimic": [{}, {"client": 3}],
    "MinMax": [{}, {"perturbation": "sign"}, {"perturbation": "unit"}],
    "MinSum": [{}, {"perturbation": "sign"}, {"perturbation": "unit"}],
    "ModelReplacement": [{}, {"factor": 5.0}, {"factor": "search"}],
    "RandomUpdates": [{}, {"std": 0.5}, {"std": 0.5, "on": "model"}],
    "SameValue": [{}, {"value": 3.0}, {"on": "update"}],
    "SignFlipping": [{}, *({"factor": None, "of": of} for of in ("update", "model", "broadcast"))],
    "Backdoor": [{"target": 3}, {"target": 0, "samples": 1.0, "size": 2, "corner": "top_left"}],
    "GaussianNoise": [{}, {"samples": 1.0, "std": 0.1}],
    "Outliers": [{}, {"samples": 1.0, "pixels": 0.5, "low": -1.0, "high": 2.0}],
    "RandomLabels": [{}, {"redraw": True}, {"redraw": "access"}],
}
CLIENT = ClientContext(seed=3, round=4, client=5, num_classes=10)
D = 5


def found():
    for entry in pkgutil.walk_packages(pl_fed.attacks.__path__, "pl_fed.attacks."):
        for name, member in vars(importlib.import_module(entry.name)).items():
            own = inspect.isclass(member) and member.__module__ == entry.name
            if (
                own
                and issubclass(member, Attack)
                and member is not Attack
                and not inspect.isabstract(member)
            ):
                for arguments in ARGUMENTS.get(name, [{}]):
                    yield pytest.param(member, arguments, id=said(name, arguments))


ALL = list(found())
every = pytest.mark.parametrize(("kind", "arguments"), ALL)


def samples(n=40):
    draws = torch.Generator().manual_seed(n)
    return Batch(
        inputs=torch.rand(n, 1, 4, 4, generator=draws),
        targets=torch.randint(10, (n,), generator=draws),
        mask=torch.rand(n, generator=draws) < 0.8,
        samples=torch.randperm(1000, generator=draws)[:n],
        visits=torch.randint(3, (n,), generator=draws),
    )


def uploads(n, dtype=torch.float32):
    return torch.randn(n, D, generator=torch.Generator().manual_seed(n)).to(dtype)


def context(honest, own, aggregator=None, **how):
    """A round of which attackers know all: honest clients are 0, 1, ..., attackers 100, 101, ..."""
    h, b, defence = len(honest), len(own), aggregator or Median()
    known, attackers = torch.arange(h), 100 + torch.arange(b)
    about = RoundContext(
        seed=3,
        round=4,
        num_byzantine=b,
        clients=torch.cat([known, attackers]),
        losses=torch.ones(h + b),
    )

    def merged(rows):
        whole = rows.isfinite().all(1)  # others the server leaves out
        told = about.select(torch.cat([torch.ones(h, dtype=torch.bool), whole]))
        return defence(torch.cat([honest, rows[whole]]), torch.ones(h + int(whole.sum())), told)

    broadcast = torch.linspace(-1, 1, D).to(own.dtype)
    given = {
        "attackers": attackers,
        "observed": known,
        "broadcast": broadcast,
        "simulate_merge": merged,
    }
    return replace(about, **{**given, **how})


def forged(attack, honest, own, **how):
    return attack.forge(honest, own, context(honest, own, **how))


def part(batch, rows):
    return Batch(*(None if field is None else field[rows] for field in batch))


def same(one, other):
    return all(torch.equal(mine, yours) for mine, yours in zip(one, other))


def test_the_walk_finds_the_attacks():
    assert {param.values[0].__name__ for param in ALL} >= {"RandomLabels", "Fang"}


@pytest.mark.slow
@every
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(cuts=st.lists(st.integers(0, 40), max_size=4), seed=st.integers(0, 100))
def test_the_grouping_of_the_samples_does_not_matter(kind, arguments, cuts, seed):
    attack, batch = kind(**arguments), samples()
    together = attack.poison(batch, CLIENT)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    for rows in order.tensor_split(sorted(cuts)):
        assert same(attack.poison(part(batch, rows), CLIENT), part(together, rows))


@every
def test_a_batch_keeps_its_shapes_types_mask_and_ids(kind, arguments):
    batch = samples()
    poisoned = kind(**arguments).poison(batch, CLIENT)
    for before, after in zip(batch, poisoned):
        assert after.shape == before.shape
        assert after.dtype == before.dtype
    assert torch.equal(poisoned.mask, batch.mask)
    assert torch.equal(poisoned.samples, batch.samples)
    assert torch.equal(poisoned.visits, batch.visits)


@every
def test_an_attack_attacks(kind, arguments):
    attack, batch, own = kind(**arguments), samples(), uploads(3)
    poisons = not same(attack.poison(batch, CLIENT), batch)
    forges = not torch.equal(forged(attack, uploads(4), own), own)
    assert poisons or forges
    assert (attack.poisons, attack.forges) == (poisons, forges), "what it says of itself"


@every
def test_the_input_is_not_changed(kind, arguments):
    attack, batch, honest, own = kind(**arguments), samples(), uploads(4), uploads(2)
    attack.poison(batch, CLIENT)
    told = context(honest, own)
    attack.forge(honest, own, told)
    assert same(batch, samples())
    assert torch.equal(honest, uploads(4))
    assert torch.equal(own, uploads(2))
    for name in ("clients", "attackers", "observed", "broadcast"):
        assert torch.equal(getattr(told, name), getattr(context(honest, own), name)), name


@every
def test_an_attack_has_no_memory_and_leaves_the_global_generator_alone(kind, arguments):
    before = torch.get_rng_state()
    used = kind(**arguments)
    for client in range(3):
        used.poison(samples(), ClientContext(3, 0, client, 10))
        forged(used, 9 * uploads(5), uploads(2), round=client)
    fresh = kind(**arguments)
    assert same(used.poison(samples(), CLIENT), fresh.poison(samples(), CLIENT))
    assert torch.equal(forged(used, uploads(4), uploads(2)), forged(fresh, uploads(4), uploads(2)))
    assert torch.equal(torch.get_rng_state(), before)


DTYPES = [torch.float32, torch.float64, torch.bfloat16]


NUMBERS = [(4, 2), (0, 3), (0, 1), (3, 0), (1, 1), (1, 4), (2, 1), (7, 3)]  # honest, own


@every
def test_forged_uploads_are_finite_and_of_the_shape_and_type_of_the_own(kind, arguments):
    for dtype, (honest, own) in product(DTYPES, NUMBERS):
        rows = forged(kind(**arguments), uploads(honest, dtype), uploads(own, dtype))
        assert rows.shape == (own, D), (dtype, honest)
        assert rows.dtype == dtype, (honest, own)
        assert rows.isfinite().all(), (dtype, honest, own)


@every
def test_half_precision_is_computed_in_float32(kind, arguments):
    attack = kind(**arguments)
    honest, own = uploads(6, torch.bfloat16), uploads(3, torch.bfloat16)
    if attack.needs_simulation:  # it must know the defence; rounding may lead its search elsewhere
        assert forged(attack, honest, own).isfinite().all()
        return
    for defence_known in (True, False):
        knowledge = {} if defence_known else {"simulate_merge": None}
        wide = forged(attack, honest.float(), own.float(), **knowledge)
        narrow = forged(attack, honest, own, **knowledge)
        torch.testing.assert_close(narrow, wide.to(torch.bfloat16), rtol=1e-2, atol=1e-2)


@pytest.mark.slow
@every
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 1000), know_all=st.booleans())
def test_rows_follow_the_ids_in_whatever_order_clients_come(kind, arguments, seed, know_all):
    attack = kind(**arguments)
    if attack.needs_simulation and not know_all:
        return
    honest, own = uploads(6, torch.float64), uploads(3, torch.float64)
    told = context(honest, own, **({} if know_all else {"simulate_merge": None}))
    draws = torch.Generator().manual_seed(seed)
    to, frm = torch.randperm(3, generator=draws), torch.randperm(6, generator=draws)
    back = to.argsort()
    moved = replace(
        told,
        attackers=told.attackers[to],
        observed=told.observed[frm],
        clients=told.clients[torch.randperm(9, generator=draws)],
        simulate_merge=told.simulate_merge and (lambda rows: told.simulate_merge(rows[back])),
    )
    rows = attack.forge(honest, own, told)
    again = attack.forge(honest[frm], own[to], moved)
    torch.testing.assert_close(again, rows[to], rtol=1e-7, atol=1e-9)


@every
def test_no_honest_upload_known_leaves_the_own_ones(kind, arguments):
    """Those of attackers whose own training broke are no help, and no harm to the others."""
    attack, own = kind(**arguments), uploads(3)
    own[1] = torch.nan
    rows = forged(attack, uploads(0), own, aggregator=Mean())
    assert rows.shape == own.shape
    assert rows[[0, 2]].isfinite().all()


@every
def test_nothing_finite_is_known(kind, arguments):
    own = torch.full((2, D), torch.nan)
    assert forged(kind(**arguments), uploads(0), own).shape == (2, D)


@every
def test_honest_uploads_that_are_all_the_same(kind, arguments):
    for value in (0.0, 1e-30, 1e15):
        same_rows = torch.full((5, D), value)
        rows = forged(kind(**arguments), same_rows, same_rows[:2])
        assert rows.isfinite().all(), value


@every
def test_it_goes_with_any_defence(kind, arguments):
    attack, honest, own = kind(**arguments), uploads(6), uploads(2)
    for defence in (Mean(), Median(), TrimmedMean(1), Krum(num_byzantine=1)):
        told = context(honest, own, aggregator=defence)
        assert told.simulate_merge(attack.forge(honest, own, told)).isfinite().all(), defence


@every
def test_a_search_says_so(kind, arguments):
    assert kind(**arguments).needs_simulation == ("search" in arguments.values())


@every
def test_an_attack_that_changes_inputs_says_so(kind, arguments):
    attack, batch = kind(**arguments), samples()
    changed = not torch.equal(attack.poison(batch, CLIENT).inputs, batch.inputs)
    changed |= not torch.equal(attack.trigger(batch).inputs, batch.inputs)
    assert attack.needs_inputs is changed


TRIGGERED = [param for param in ALL if param.values[0](**param.values[1]).triggers]


@pytest.mark.parametrize(("kind", "arguments"), TRIGGERED)
def test_a_trigger_shows_samples_as_others_and_leaves_the_given_alone(kind, arguments):
    attack, batch = kind(**arguments), samples()
    shown = attack.trigger(batch)
    assert same(batch, samples())
    assert shown.inputs.shape == batch.inputs.shape
    assert shown.targets.dtype == batch.targets.dtype
    assert not (shown.mask & ~batch.mask).any()
    assert not (shown.mask & (shown.targets == batch.targets)).any(), (
        "those that have the wanted label anyway"
    )
    for rows in torch.arange(40).split(7):
        assert same(attack.trigger(part(batch, rows)), part(shown, rows))


@every
def test_an_empty_batch_stays_empty(kind, arguments):
    empty = part(samples(), slice(0, 0))
    assert same(kind(**arguments).poison(empty, CLIENT), empty)


@every
def test_an_attack_can_be_copied_and_pickled(kind, arguments):
    attack = kind(**arguments)
    for twin in (copy.deepcopy(attack), pickle.loads(pickle.dumps(attack))):
        assert same(twin.poison(samples(), CLIENT), attack.poison(samples(), CLIENT))
        rows = forged(twin, uploads(4), uploads(2))
        assert torch.equal(rows, forged(attack, uploads(4), uploads(2)))


def test_the_base_class_is_not_made():
    with pytest.raises(TypeError, match="Expected a subclass of `Attack`"):
        Attack()


def test_both_methods_are_the_identity_by_default():
    class Idle(Attack):
        def __init__(self, argument):
            self.argument = argument

    batch, own = samples(), uploads(2)
    assert Idle(7).argument == 7
    assert same(Idle(7).poison(batch, CLIENT), batch)
    assert torch.equal(forged(Idle(7), uploads(4), own), own)
    said = (Idle(7).poisons, Idle(7).forges, Idle(7).triggers, Idle(7).needs_simulation)
    assert said == (False,) * 4
