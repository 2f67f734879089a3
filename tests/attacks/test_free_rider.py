"""Free riders: the numbers of the papers' formulas, and the memory of each attacker."""

import numpy as np
import pytest
import torch
from small_federations import classes, mlp, run_rounds, seeded, sgd, shared_out
from tables import table_test

from pl_fed.attacks import FreeRider
from pl_fed.clients import FedAvg
from pl_fed.random import key, normal_row
from pl_fed.types import RoundContext

G = [[1.0, 2.0, 3.0, 4.0], [0.9, 2.2, 2.9, 4.4], [1.0, 2.5, 3.0, 5.0], [1.5, 2.0, 3.0, 4.0]]


def send(attack, w, round=0, attackers=(4,), center=0):
    context = RoundContext(
        seed=3,
        round=round,
        center=center,
        attackers=torch.tensor(attackers),
        broadcast=torch.tensor(w, dtype=torch.float64),
    )
    own = torch.full((len(attackers), len(w)), torch.nan, dtype=torch.float64)
    return attack.forge(own[:0], own, context).numpy()


def test_plain_free_riders_send_no_change_and_need_no_broadcast():
    own = torch.ones(2, 3)
    forged = FreeRider("plain").forge(own, own, RoundContext(attackers=torch.arange(2)))
    assert torch.equal(forged, torch.zeros(2, 3))


def test_delta_is_the_change_since_the_last_own_round():
    attack = FreeRider("delta")
    np.testing.assert_array_equal(send(attack, G[0]), [[0.0] * 4])
    np.testing.assert_allclose(send(attack, G[1]), [[-0.1, 0.2, -0.1, 0.4]], atol=1e-12)
    rows = send(attack, G[3], attackers=(7, 4))  # client 7 is new; client 4 missed a round
    np.testing.assert_allclose(rows, [[0.0] * 4, np.subtract(G[3], G[1])], atol=1e-12)


def test_models_of_several_centers_are_not_compared():
    attack = FreeRider("delta")
    send(attack, G[0], center=0)
    np.testing.assert_array_equal(send(attack, G[3], center=1), [[0.0] * 4])
    resumed = FreeRider("delta")
    resumed.load_state_dict(attack.state_dict())
    for each in (attack, resumed):
        rows = send(each, G[1], center=0)
        np.testing.assert_allclose(rows, [np.subtract(G[1], G[0])], atol=1e-12)


def noise(round, client, numbers=4):
    return normal_row(key(3, "free-rider", round, client), numbers).numpy()


def test_advanced_free_riders_add_noise_to_the_change():
    attack = FreeRider("advanced", std=0.01)
    np.testing.assert_array_equal(send(attack, G[0]), [[0.0] * 4])
    expected = np.subtract(G[1], G[0]) + 0.01 * noise(1, 4)
    np.testing.assert_allclose(send(attack, G[1], round=1), [expected], atol=1e-12)


def test_scale_of_the_noise_equals_the_worked_example():
    assert FreeRider(scale=3.0, gamma=1.0).noise_scale(4, 0.2) == pytest.approx(0.15)
    exponential = FreeRider(scale=3.0, gamma=0.5, decay="exponential")
    assert exponential.noise_scale(3, 0.2) == pytest.approx(0.6 * np.exp(-1.0))


@pytest.mark.parametrize("decay", ["power", "exponential"])
@pytest.mark.parametrize(("scale", "gamma"), [(1.0, 0.5), (3.0, 2.0)])
def test_disguised_uploads_equal_the_papers_code_in_numpy(decay, scale, gamma):
    """σ is 0.001, then fixed to 0.2; t is 1, 1, 2, 3."""
    attack, sigma, t = FreeRider("noise", scale, gamma, decay), 1e-3, 1
    for round, w in enumerate(G):
        if round == 1:
            sigma = np.mean(np.abs(np.subtract(G[1], G[0])))
        if round > 1:
            t = round
        phi = scale * sigma * (t**-gamma if decay == "power" else np.exp(-(t - 1) * gamma))
        expected = phi * noise(round, 4)
        np.testing.assert_allclose(send(attack, w, round), [expected], rtol=1e-9, atol=0)
    assert sigma == pytest.approx(0.2)


def assert_second_noise_has_the_scale(sigma, **sent):
    """Check a rider's second upload, after one change of the global model."""
    attack = FreeRider("noise")
    for round, w in enumerate(G[:2]):
        context = RoundContext(
            seed=3,
            round=round,
            attackers=torch.tensor([4]),
            broadcast=torch.tensor(w, dtype=torch.float64),
            **sent,
        )
        own = torch.zeros(1, 4, dtype=torch.float64)
        forged = attack.forge(own[:0], own, context)
    np.testing.assert_allclose(forged[0], sigma * noise(1, 4), rtol=1e-12)


def test_scale_of_the_noise_is_that_of_the_sent_parameters():
    assert_second_noise_has_the_scale((0.1 + 0.2) / 2, unsent=torch.tensor([2, 3]))


def test_scale_of_the_noise_is_that_of_the_short_rows_of_a_projection():
    assert_second_noise_has_the_scale(
        abs(-0.1 + 0.2 - 0.1 + 0.4) / 2, project=lambda rows: rows.sum(-1, keepdim=True) / 2
    )


def test_noise_has_the_documented_standard_deviation():
    attack = FreeRider("noise", scale=2.0)
    rows = send(attack, [0.0] * 50_000, attackers=(1, 2))
    assert rows.std() == pytest.approx(2e-3, rel=0.02)
    assert abs(np.corrcoef(rows)[0, 1]) < 0.02, "attackers draw independently"


@table_test("disguise", ["noise", "delta", "advanced"])
def test_restored_state_goes_on_with_the_same_uploads(disguise):
    for stop in (0, 1, 2, 3):
        attack, resumed = FreeRider(disguise), FreeRider(disguise)
        for round in range(stop):
            send(attack, G[round], round, attackers=(4, 9))
        resumed.load_state_dict(attack.state_dict())
        for round in range(stop, 4):
            rows = [send(a, G[round], round, attackers=(4, 9)) for a in (attack, resumed)]
            np.testing.assert_array_equal(*rows)


def test_state_of_another_attack_is_refused():
    with pytest.raises(ValueError, match="with the state of FreeRider but got 'total'"):
        FreeRider().load_state_dict({"total": 1.0})


def test_slices_without_a_broadcast_are_refused():
    context = RoundContext(attackers=torch.tensor([4]))
    with pytest.raises(ValueError, match=r"`context.broadcast` to be the global model, 2 numbers"):
        FreeRider().forge(torch.zeros(1, 2), torch.zeros(1, 2), context)


@table_test(
    "arguments, name",
    [({"disguise": "none"}, "disguise"), ({"scale": -1.0}, "scale"), ({"decay": "no"}, "decay")],
)
def test_arguments_out_of_range_are_refused(arguments, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        FreeRider(**arguments)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_delta_repeats_the_change_of_the_last_round(engine):
    """w^2 = w^1 + (u_0 + u_2 + w^1 − w^0) / 3, where u_k are the honest updates at w^1."""
    data, client = shared_out(classes([9, 5, 12])), FedAvg(seeded(mlp), optimizer=sgd(0.1))

    def fit(rounds, attack, **settings):
        return run_rounds(
            client, data, rounds=rounds, engine=engine, attack=attack, ids=[1], **settings
        ).w

    start = torch.nn.utils.parameters_to_vector(seeded(mlp).double().parameters()).detach()
    first = fit(1, FreeRider("delta"))
    second = fit(2, FreeRider("delta"))
    without = fit(2, FreeRider("plain"))
    torch.testing.assert_close(second - without, (first - start) / 3, rtol=0, atol=1e-12)
