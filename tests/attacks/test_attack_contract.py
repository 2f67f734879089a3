"""Laws that every attack keeps; a walk through the package finds the attacks."""

import copy
import pickle
from dataclasses import replace
from itertools import cycle
from unittest import mock

import pytest
import torch
from contract_suite import find_configurations, one_test
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pl_fed.attacks
from pl_fed.aggregators import Krum, Mean, Median, TrimmedMean
from pl_fed.attacks import (
    AdaptiveAttack,
    Attack,
    ModelReplacement,
    RandomLabels,
    SignFlipping,
    trigger_generator,
)
from pl_fed.data.source import Arrays
from pl_fed.nets.rows import RowLayout
from pl_fed.types import Batch, ClientContext, RoundContext


class Pool:
    """A data source of 20 images of 4×4 pixels."""

    def load(self):
        images = torch.rand(20, 1, 4, 4, generator=torch.Generator().manual_seed(1))
        return Arrays(images, torch.zeros(20, dtype=torch.int64), num_classes=1)


ARGUMENTS = {
    "AdaptiveAttack": [
        {"trials": 7},
        {"direction": "unit", "objective": "acceptance", "trials": 7},
    ],
    "ALittleIsEnough": [{}, {"factor": 1.5}, {"factor": "search", "trials": 7}],
    "Combined": [{"attacks": [RandomLabels(), ModelReplacement(), SignFlipping()]}],
    "DistributedBackdoor": [{"target": 3, "size": 1}, {"target": 0, "size": 1, "gap": 0}],
    "EdgeCaseBackdoor": [{"target": 3, "pool": Pool()}],
    "FlippedPairs": [{"pairs": {3: 5}}, {"pairs": {1: 2, 2: 1}, "samples": 0.5}],
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
    "SemanticBackdoor": [
        {"target": 3},
        {"target": 0, "source": 2, "samples": 1.0},
        {"target": 5, "change": "invert"},
    ],
    "FreeRider": [
        *({"disguise": disguise} for disguise in ("plain", "noise", "delta", "advanced")),
        {"decay": "exponential", "gamma": 0.5},
    ],
    "GaussianNoise": [{}, {"samples": 1.0, "std": 0.1}],
    "Outliers": [{}, {"samples": 1.0, "pixels": 0.5, "low": -1.0, "high": 2.0}],
    "RandomLabels": [{}, {"redraw": True}, {"redraw": "access"}],
}
CLIENT = ClientContext(seed=3, round=4, client=5, num_classes=10, attackers=(2, 4, 5))
TRAINED = {"steps": 2, "batch_size": 8}
ARGUMENTS |= {
    "A3FL": [{**TRAINED, "target": 3, "trigger_epochs": 2, "size": 2}],
    "BadPFL": [{**TRAINED, "target": 3, "generator_steps": 2}],
    "ConstrainedReplacement": [TRAINED, {**TRAINED, "norm_bound": 2.0, "constraint": "cosine"}],
    "FairnessAttack": [
        TRAINED,
        {**TRAINED, "classes": [3], "samples": 0.5, "prediction": "observed", "share": 0.3},
    ],
    "PFedBA": [{**TRAINED, "target": 3, "trigger_epochs": 2, "loss_steps": 3, "size": 2}],
    "ProjectedBackdoor": [TRAINED, {**TRAINED, "norm": "linf", "radius": 0.1}],
    "Neurotoxin": [TRAINED, {**TRAINED, "mask": "observed"}, {**TRAINED, "per_tensor": True}],
    "TrainingAttack": [TRAINED],
}
D = 5


CONFIGURATIONS = [
    pair for pair in find_configurations(pl_fed.attacks, Attack, ARGUMENTS) if pair[0] is not Attack
]
all_attacks = one_test(CONFIGURATIONS)


@pytest.fixture(autouse=True, scope="module")
def small_generators():
    """Let the generator of Bad-PFL have few channels: its steps took half the time of all."""
    with mock.patch.object(trigger_generator, "_CHANNELS", (4, 4, 4, 4)):
        yield


def samples(n=40):
    draws = torch.Generator().manual_seed(n)
    return Batch(
        inputs=torch.rand(n, 1, 4, 4, generator=draws),
        targets=torch.randint(10, (n,), generator=draws),
        mask=torch.rand(n, generator=draws) < 0.8,
        samples=torch.randperm(1000, generator=draws)[:n],
        visits=torch.randint(3, (n,), generator=draws),
    )


class ScaledPixels(nn.Module):
    """Scaled pixels: a net with D parameters, whose scores are the first pixels times these."""

    def __init__(self, row):
        super().__init__()
        self.scale = nn.Parameter(row.detach().clone())

    def forward(self, x):
        return x.flatten(1)[:, :10] * self.scale.repeat(2)


def uploads(n, dtype=torch.float32):
    return torch.randn(n, D, generator=torch.Generator().manual_seed(n)).to(dtype)


def context(benign, own, aggregator=None, **changes):
    """Return a round with full knowledge: benign clients 0, 1, ..., attackers 100, ..."""
    num_benign, num_own, aggregator = len(benign), len(own), aggregator or Median()
    benign_ids, attackers = torch.arange(num_benign), 100 + torch.arange(num_own)
    base = RoundContext(
        seed=3,
        round=4,
        num_byzantine=num_own,
        clients=torch.cat([benign_ids, attackers]),
        losses=torch.ones(num_benign + num_own),
    )

    def merged(rows, reject=lambda _: None):
        valid = rows.isfinite().all(1)  # the server leaves out broken uploads
        valid_context = base.select(torch.cat([torch.ones(num_benign, dtype=torch.bool), valid]))
        weights = torch.ones(num_benign + int(valid.sum()))
        silent = replace(valid_context, reject=reject)
        return aggregator(torch.cat([benign, rows[valid]]), weights, silent)

    broadcast = torch.linspace(-1, 1, D).to(own.dtype)
    knowledge = {
        "byzantine": tuple(range(100, 100 + num_own)),
        "layout": RowLayout.from_parameters(ScaledPixels(broadcast)),
        "net": lambda: ScaledPixels(broadcast.float()).eval(),
        "samples": lambda client: samples(20 + client % 3),
        "attackers": attackers,
        "observed": benign_ids,
        "broadcast": broadcast,
        "simulate_merge": merged,
    }
    return replace(base, **{**knowledge, **changes})


def forge(attack, benign, own, **changes):
    return attack.forge(benign, own, context(benign, own, **changes))


def select(batch, rows):
    return Batch(*(None if field is None else field[rows] for field in batch))


def equal(first, second):
    return all(
        torch.equal(left_tensor, right_tensor) for left_tensor, right_tensor in zip(first, second)
    )


def test_walk_finds_the_attacks():
    assert {kind.__name__ for kind, _ in CONFIGURATIONS} >= {"RandomLabels", "Fang"}


def draws(number):
    """Return the settings of a test of so many draws, the same in every run."""
    return settings(max_examples=number, deadline=None, derandomize=True, database=None)


cut_batches = given(cuts=st.lists(st.integers(0, 40), max_size=4), seed=st.integers(0, 100))


@pytest.mark.exhaustive
@pytest.mark.slow
@draws(15)
@cut_batches
@all_attacks
def test_poisoned_samples_do_not_depend_on_their_batch(kind, arguments, cuts, seed):
    check_batches(kind, arguments, cuts, seed)


@pytest.mark.slow
@draws(4)
@cut_batches
@all_attacks
def test_poisoned_samples_of_few_draws_do_not_depend_on_their_batch(kind, arguments, cuts, seed):
    check_batches(kind, arguments, cuts, seed)


def check_batches(kind, arguments, cuts, seed):
    """Check that parts of a batch are poisoned as the whole batch is."""
    attack, batch = kind(**arguments), samples()
    together = attack.poison(batch, CLIENT)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    for rows in order.tensor_split(sorted(cuts)):
        assert equal(attack.poison(select(batch, rows), CLIENT), select(together, rows))


@all_attacks
def test_poisoned_batch_keeps_shapes_dtypes_mask_and_ids(kind, arguments):
    batch = samples()
    poisoned = kind(**arguments).poison(batch, CLIENT)
    for before, after in zip(batch, poisoned):
        assert after.shape == before.shape
        assert after.dtype == before.dtype
    assert torch.equal(poisoned.mask, batch.mask)
    assert torch.equal(poisoned.samples, batch.samples)
    assert torch.equal(poisoned.visits, batch.visits)


@all_attacks
def test_flags_match_the_changes_by_the_attack(kind, arguments):
    attack, batch, own = kind(**arguments), samples(), uploads(3)
    poisons = not equal(attack.poison(batch, CLIENT), batch)
    forges = not torch.equal(forge(attack, uploads(4), own), own)
    losses = torch.ones(3)
    forges_losses = not torch.equal(attack.forge_losses(losses, RoundContext()), losses)
    assert attack.forges_losses == forges_losses
    forges |= forges_losses
    assert poisons or forges
    assert (attack.poisons, attack.forges) == (poisons, forges)


@all_attacks
def test_input_is_not_changed(kind, arguments):
    attack, batch, benign, own = kind(**arguments), samples(), uploads(4), uploads(2)
    attack.poison(batch, CLIENT)
    round_context = context(benign, own)
    attack.forge(benign, own, round_context)
    assert equal(batch, samples())
    assert torch.equal(benign, uploads(4))
    assert torch.equal(own, uploads(2))
    for name in ("clients", "attackers", "observed", "broadcast"):
        assert torch.equal(getattr(round_context, name), getattr(context(benign, own), name)), name


@all_attacks
@pytest.mark.slow
def test_attack_depends_on_its_saved_state_only_and_keeps_the_global_generator(kind, arguments):
    before = torch.get_rng_state()
    used = kind(**arguments)
    for client in range(3):
        used.poison(samples(), ClientContext(3, 0, client, 10))
        forge(used, 9 * uploads(5), uploads(2), round=client)
    fresh, state = kind(**arguments), used.state_dict()
    fresh.load_state_dict(state)
    assert equal(used.poison(samples(), CLIENT), fresh.poison(samples(), CLIENT))
    assert torch.equal(forge(used, uploads(4), uploads(2)), forge(fresh, uploads(4), uploads(2)))
    assert torch.equal(torch.get_rng_state(), before)


DTYPES = [torch.float32, torch.float64, torch.bfloat16]


NUMBERS = [(4, 2), (0, 3), (0, 1), (3, 0), (1, 1), (1, 4), (2, 1), (7, 3)]  # benign, own


@all_attacks
@pytest.mark.slow
def test_forged_uploads_are_finite_with_shape_and_dtype_of_the_own_uploads(kind, arguments):
    place = CONFIGURATIONS.index((kind, arguments))  # each attack has all numbers and all types
    for (benign, own), dtype in zip(NUMBERS, cycle(DTYPES[place % 3 :] + DTYPES[: place % 3])):
        rows = forge(kind(**arguments), uploads(benign, dtype), uploads(own, dtype))
        assert rows.shape == (own, D), (dtype, benign)
        assert rows.dtype == dtype, (benign, own)
        assert rows.isfinite().all(), (dtype, benign, own)


@all_attacks
@pytest.mark.slow
def test_half_precision_is_computed_in_float32(kind, arguments):
    attack = kind(**arguments)
    benign, own = uploads(6, torch.bfloat16), uploads(3, torch.bfloat16)
    if attack.needs_simulation:  # rounding may lead its search for the factor elsewhere
        assert forge(attack, benign, own).isfinite().all()
        return
    for aggregator_known in (True, False):
        knowledge = {} if aggregator_known else {"simulate_merge": None}
        wide = forge(copy.deepcopy(attack), benign.float(), own.float(), **knowledge)
        narrow = forge(copy.deepcopy(attack), benign, own, **knowledge)
        torch.testing.assert_close(narrow, wide.to(torch.bfloat16), rtol=1e-2, atol=1e-2)


@pytest.mark.exhaustive
@pytest.mark.slow
@draws(6)
@given(seed=st.integers(0, 1000), know_all=st.booleans())
@all_attacks
def test_forged_rows_follow_the_ids_in_any_order_of_clients(kind, arguments, seed, know_all):
    check_order(kind, arguments, seed, know_all)


@pytest.mark.slow
@all_attacks
def test_forged_rows_follow_the_ids_in_one_order_of_clients(kind, arguments):
    for know_all in (True, False):
        check_order(kind, arguments, seed=1, know_all=know_all)


def check_order(kind, arguments, seed, know_all):
    """Check that each attacker sends the same row wherever it is in the round."""
    attack = kind(**arguments)
    if attack.needs_simulation and not know_all:
        return
    benign, own = uploads(6, torch.float64), uploads(3, torch.float64)
    round_context = context(benign, own, **({} if know_all else {"simulate_merge": None}))
    draws = torch.Generator().manual_seed(seed)
    to, frm = torch.randperm(3, generator=draws), torch.randperm(6, generator=draws)
    back, simulate_merge = to.argsort(), round_context.simulate_merge
    moved = replace(
        round_context,
        attackers=round_context.attackers[to],
        observed=round_context.observed[frm],
        clients=round_context.clients[torch.randperm(9, generator=draws)],
        simulate_merge=simulate_merge
        and (lambda rows, **options: simulate_merge(rows[back], **options)),
    )
    twin = copy.deepcopy(attack)  # an attack with a state changes it
    rows = attack.forge(benign, own, round_context)
    again = twin.forge(benign[frm], own[to], moved)
    torch.testing.assert_close(again, rows[to], rtol=1e-7, atol=1e-9)


@all_attacks
def test_attackers_without_known_uploads_use_their_own(kind, arguments):
    """Broken uploads of attackers do not change the others'."""
    attack, own = kind(**arguments), uploads(3)
    own[1] = torch.nan
    rows = forge(attack, uploads(0), own, aggregator=Mean())
    assert rows.shape == own.shape
    assert rows[[0, 2]].isfinite().all()


@all_attacks
def test_attackers_without_any_finite_upload_return_their_shape(kind, arguments):
    own = torch.full((2, D), torch.nan)
    assert forge(kind(**arguments), uploads(0), own).shape == (2, D)


@all_attacks
@pytest.mark.slow
def test_forged_uploads_are_finite_for_equal_benign_uploads(kind, arguments):
    for value in (0.0, 1e-30, 1e15):
        same_rows = torch.full((5, D), value)
        rows = forge(kind(**arguments), same_rows, same_rows[:2])
        assert rows.isfinite().all(), value


@all_attacks
@pytest.mark.slow
def test_every_aggregator_merges_forged_uploads_to_a_finite_row(kind, arguments):
    attack, benign, own = kind(**arguments), uploads(6), uploads(2)
    for defence in (Mean(), Median(), TrimmedMean(1), Krum(num_byzantine=1)):
        now = context(benign, own, aggregator=defence)
        assert now.simulate_merge(attack.forge(benign, own, now)).isfinite().all(), defence


@all_attacks
def test_searching_attacks_need_the_merged_row(kind, arguments):
    searches = "search" in arguments.values() or kind is AdaptiveAttack
    assert kind(**arguments).needs_simulation == searches


@all_attacks
def test_attacks_that_change_inputs_need_inputs(kind, arguments):
    attack, batch = kind(**arguments), samples()
    changed = not torch.equal(attack.poison(batch, CLIENT).inputs, batch.inputs)
    changed |= not torch.equal(attack.trigger(batch).inputs, batch.inputs)
    assert attack.needs_inputs is changed


@one_test([(kind, arguments) for kind, arguments in CONFIGURATIONS if kind(**arguments).triggers])
def test_trigger_masks_samples_of_the_target_and_copies_the_batch(kind, arguments):
    attack, batch = kind(**arguments), samples()
    triggered = attack.trigger(batch)
    assert equal(batch, samples())
    assert triggered.inputs.shape == batch.inputs.shape
    assert triggered.targets.dtype == batch.targets.dtype
    assert not (triggered.mask & ~batch.mask).any()
    assert not (triggered.mask & (triggered.targets == batch.targets)).any(), (
        "samples that have the target label are masked"
    )
    for rows in torch.arange(40).split(7):
        assert equal(attack.trigger(select(batch, rows)), select(triggered, rows))


@all_attacks
def test_empty_batch_stays_empty(kind, arguments):
    empty = select(samples(), slice(0, 0))
    assert equal(kind(**arguments).poison(empty, CLIENT), empty)


@all_attacks
@pytest.mark.slow
def test_attacks_can_be_copied_and_pickled(kind, arguments):
    attack = kind(**arguments)
    for twin in (copy.deepcopy(attack), pickle.loads(pickle.dumps(attack))):
        assert equal(twin.poison(samples(), CLIENT), attack.poison(samples(), CLIENT))
        rows = forge(twin, uploads(4), uploads(2))
        assert torch.equal(rows, forge(kind(**arguments), uploads(4), uploads(2)))


def test_base_class_is_not_instantiated():
    with pytest.raises(TypeError, match="Expected a subclass of `Attack`"):
        Attack()


def test_both_methods_are_the_identity_by_default():
    class Idle(Attack):
        def __init__(self, argument):
            self.argument = argument

    batch, own = samples(), uploads(2)
    assert Idle(7).argument == 7
    assert equal(Idle(7).poison(batch, CLIENT), batch)
    assert torch.equal(forge(Idle(7), uploads(4), own), own)
    flags = (Idle(7).poisons, Idle(7).forges, Idle(7).triggers, Idle(7).needs_simulation)
    assert flags == (False,) * 4
