"""The plan of a round against a simulation in plain Python."""

import math

import numpy as np
import pytest
import torch

from pl_fed.systems import ClientProfiles, LinkBytes, Systems, plan_round

LINK = LinkBytes(upload=3_000, download=5_000)


class GivenProfiles(ClientProfiles):
    """Profiles with given numbers and coins."""

    def __init__(self, numbers, coins):
        self.numbers = {name: torch.tensor(values) for name, values in numbers.items()}
        self.coins = {name: torch.tensor(values) for name, values in coins.items()}

    def select(self, clients, round):
        return {name: values[clients] for name, values in self.numbers.items()}

    def draw_coins(self, purpose, clients, round):
        return self.coins[purpose][clients]


def simulate(settings, numbers, coins, drawn, steps):
    """Return the steps of the clients whose uploads count, the counts, and the round's seconds."""
    deadline = math.inf if settings.deadline is None else settings.deadline
    arrivals, dropped, late = [], 0, 0
    for client, planned in zip(drawn, steps):
        speed, up, down = (numbers[name][client] for name in ("speed", "upload", "download"))
        answers = coins["availability"][client] < numbers["availability"][client]
        if not answers or coins["dropout"][client] < numbers["dropout"][client]:
            dropped += 1
            continue
        transfer, done = LINK.download / down + LINK.upload / up, planned
        if settings.policy == "partial":
            while done and transfer + done / speed > deadline * (1 + 1e-12):
                done -= 1
        time = transfer + done / speed
        if time > deadline * (1 + 1e-12) or (planned and not done):
            late += 1
        else:
            arrivals.append((time, client, done))
    first = sorted(arrivals)[: settings.take_first]
    is_full = settings.take_first is not None and len(first) == settings.take_first
    seconds = max((time for time, _, _ in first), default=0.0)
    if late and not is_full:
        seconds = deadline
    taken = {client: done for _, client, done in first}
    return taken, dropped, late, len(arrivals) - len(first), seconds


@pytest.mark.parametrize("policy", ["wait", "drop", "partial"])
@pytest.mark.parametrize("take_first", [None, 1, 6])
def test_plan_equals_a_simulation_in_plain_python(policy, take_first):
    draw = np.random.default_rng(7)
    kinds = set()
    for _ in range(60):
        size = int(draw.integers(1, 25))
        numbers = {
            "speed": draw.lognormal(2, 1, 30),
            "upload": draw.lognormal(8, 1, 30),
            "download": draw.lognormal(9, 1, 30),
            "availability": draw.uniform(0.3, 1, 30),
            "dropout": draw.uniform(0, 0.4, 30),
        }
        coins = {name: draw.uniform(size=30) for name in ("availability", "dropout", "arrival")}
        deadline = None if policy == "wait" else float(draw.uniform(0.5, 12))
        settings = Systems(deadline=deadline, policy=policy, take_first=take_first)
        drawn = draw.permutation(30)[:size]
        steps = draw.integers(0, 60, size)
        plan = plan_round(
            settings,
            GivenProfiles(numbers, coins),
            torch.tensor(drawn),
            torch.tensor(steps),
            LINK,
            0,
        )
        taken, dropped, late, surplus, seconds = simulate(
            settings, numbers, coins, drawn.tolist(), steps.tolist()
        )
        participants = plan.participants
        assert dict(zip(participants.tolist(), plan.steps[plan.taken].tolist())) == taken
        report = plan.report()
        assert report["systems/participants"] == len(taken)
        assert report["systems/dropped"] == dropped
        assert report["systems/late"] == late
        assert report["systems/surplus"] == surplus
        assert report["systems/round_seconds"] == pytest.approx(seconds, rel=1e-10)
        assert len(taken) + dropped + late + surplus == size
        if taken:
            mean = sum(taken.values()) / len(taken)
            assert report["systems/mean_steps"] == pytest.approx(mean, rel=1e-10)
        kinds |= {name for name, count in (("late", late), ("surplus", surplus)) if count}
    assert ("late" in kinds) == (policy != "wait"), "the cases have late clients"
    assert ("surplus" in kinds) == (take_first is not None), "the cases have surplus clients"


def test_a_draw_in_each_round_orders_uploads_of_the_same_time():
    settings, everyone = Systems(take_first=2), torch.arange(4)
    profiles = ClientProfiles(settings, 4, (), seed=0)
    counts = torch.zeros(4, dtype=torch.int64)
    for round in range(100):
        steps = torch.tensor([5, 5, 5, 4])  # client 3 is always the first
        counts[plan_round(settings, profiles, everyone, steps, LINK, round).participants] += 1
    assert counts[3] == 100
    assert counts[:3].min() > 20


def one_client(policy="partial", deadline=2.0, speed=10.0, steps=30, **options):
    settings = Systems(speed=speed, deadline=deadline, policy=policy, **options)
    profiles = ClientProfiles(settings, 1, (), seed=0)
    return plan_round(settings, profiles, torch.tensor([0]), torch.tensor([steps]), LINK, 0)


def test_partial_work_fills_the_deadline():
    plan = one_client()
    assert plan.steps.tolist() == [20]
    assert plan.round_seconds == 2.0
    assert one_client(steps=7).round_seconds == pytest.approx(0.7)


@pytest.mark.parametrize("policy", ["drop", "partial"])
@pytest.mark.parametrize("steps", [29, 57])
def test_steps_that_fit_exactly_are_done(policy, steps):
    settings = Systems(speed=100.0, deadline=steps / 100, policy=policy)
    profiles = ClientProfiles(settings, 1, (), seed=0)
    plan = plan_round(settings, profiles, torch.tensor([0]), torch.tensor([steps]), LINK, 0)
    assert plan.participants.tolist() == [0]
    assert plan.steps.tolist() == [steps]


def test_only_a_deadline_limits_the_steps():
    assert one_client(steps=7).limits_of(torch.tensor([0])) == [20]
    settings = Systems(speed=10.0)
    profiles = ClientProfiles(settings, 1, (), seed=0)
    plan = plan_round(settings, profiles, torch.tensor([0]), torch.tensor([7]), LINK, 0)
    assert plan.limits_of(torch.tensor([0]))[0] > 10**9


def test_a_client_without_a_fitting_step_is_late():
    plan = one_client(speed=0.1)
    assert plan.participants.tolist() == []
    assert plan.late.tolist() == [True]
    assert plan.round_seconds == 2.0, "the server waits until the deadline"


def test_a_client_without_samples_takes_part_with_no_step():
    plan = one_client(steps=0)
    assert plan.participants.tolist() == [0]
    assert plan.steps.tolist() == [0]


def test_a_slow_link_makes_a_client_late():
    assert one_client(upload=1_000).late.tolist() == [True]
    assert one_client(upload=3_000).steps.tolist() == [10]


def test_an_empty_cohort_takes_no_time():
    settings = Systems()
    nobody = torch.empty(0, dtype=torch.int64)
    plan = plan_round(settings, ClientProfiles(settings, 3, (), 0), nobody, nobody, LINK, 0)
    assert plan.round_seconds == 0.0
    assert math.isnan(plan.report()["systems/mean_steps"])


def test_coins_and_numbers_depend_on_seed_round_and_client_alone():
    settings = Systems(speed=10.0, availability=0.5, jitter=0.5)
    profiles = ClientProfiles(settings, 50, (), seed=1)
    everyone = torch.arange(50)
    coins = profiles.draw_coins("availability", everyone, 4)
    some = torch.tensor([31, 2, 17])
    assert torch.equal(profiles.draw_coins("availability", some, 4), coins[some])
    assert not torch.equal(profiles.draw_coins("availability", everyone, 5), coins)
    assert not torch.equal(profiles.draw_coins("dropout", everyone, 4), coins)
    speeds = profiles.select(everyone, 4)["speed"]
    assert torch.equal(ClientProfiles(settings, 50, (), 1).select(some, 4)["speed"], speeds[some])
    assert not torch.equal(ClientProfiles(settings, 50, (), 2).select(everyone, 4)["speed"], speeds)
    assert not torch.equal(profiles.select(everyone, 5)["speed"], speeds)
