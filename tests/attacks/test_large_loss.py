"""Forged losses: what the server weighs, what a simulation weighs, and attacks in a row."""

import pytest
import torch
from small_federations import Only, classes, mlp, run_rounds, seeded, sgd, shared_out
from tables import table_test

from pl_fed.aggregators import QFFL, KLoss, Mean, Term
from pl_fed.attacks import Attack, Combined, LargeLoss, SignFlipping
from pl_fed.clients import FedAvg
from pl_fed.rounds.broken_clients import NonFiniteLossError
from pl_fed.types import RoundContext


def fit(attack=None, **settings):
    data, client = shared_out(classes([9, 5, 12, 7])), FedAvg(seeded(mlp), optimizer=sgd(0.1))
    if attack is not None:
        settings = {"attack": attack, "ids": [1], **settings}
    return run_rounds(client, data, rounds=1, **settings).w


def start():
    return torch.nn.utils.parameters_to_vector(seeded(mlp).double().parameters()).detach()


@pytest.mark.slow
@table_test("engine", ["one_by_one", "stacked"])
def test_term_gives_the_weight_of_all_clients_to_the_largest_loss(engine):
    alone = fit(sampler=Only(1), engine=engine)
    w = fit(LargeLoss(1000.0), aggregator=Term(5.0), engine=engine)
    torch.testing.assert_close(w, alone, rtol=0, atol=1e-12)
    honest = fit(SignFlipping(), start_round=9, aggregator=Term(5.0), engine=engine)
    assert (honest - alone).norm() > 0.1 * (alone - start()).norm()


@pytest.mark.slow
def test_mean_reads_no_losses():
    assert torch.equal(fit(LargeLoss(1000.0)), fit())


@pytest.mark.slow
def test_reported_losses_are_those_of_the_formula():
    """The server merges with F_1 times 7; the other losses and the order stay."""
    seen = []

    class Recorded(QFFL):
        def forward(self, uploads, weights, context):
            seen.append(context.start_losses.clone())
            return super().forward(uploads, weights, context)

    fit(LargeLoss(7.0), aggregator=Recorded())
    forged = seen[-1]
    fit(SignFlipping(), start_round=9, aggregator=Recorded())
    honest = seen[-1]
    expected = honest * torch.tensor([1.0, 7.0, 1.0, 1.0], dtype=honest.dtype)
    torch.testing.assert_close(forged, expected, rtol=1e-12, atol=0)


@pytest.mark.slow
def test_small_losses_evade_an_aggregator_that_leaves_out_large_ones():
    rejected = []

    class Recorded(KLoss):
        def forward(self, uploads, weights, context):
            order = context.start_losses.argsort()
            rejected.append(int(context.clients[order[-1].cpu()]))
            return super().forward(uploads, weights, context)

    fit(LargeLoss(50.0), aggregator=Recorded())
    assert rejected[-1] == 1
    fit(LargeLoss(0.01), aggregator=Recorded())
    assert rejected[-1] != 1


@pytest.mark.slow
def test_simulated_merges_weigh_the_forged_losses():
    updates = []

    class Simulating(Attack):
        def forge(self, honest, own, context):
            updates.append(context.simulate_merge(own))
            return own

        needs_simulation = True

    w = fit(Combined([LargeLoss(1000.0), Simulating()]), aggregator=Term(5.0))
    torch.testing.assert_close(updates[-1], w - start(), rtol=0, atol=1e-12)


class Reporting(Attack):
    """Reports one number as the loss."""

    needs_simulation = True

    def __init__(self, loss):
        self.loss, self.updates = loss, []

    def forge_losses(self, losses, context):
        return torch.full_like(losses, self.loss)

    def forge(self, honest, own, context):
        self.updates.append(context.simulate_merge(own))
        return own


@pytest.mark.parametrize("loss", [torch.nan, torch.inf])
def test_attacker_without_a_finite_loss_is_left_out_and_the_run_goes_on(loss):
    others = fit(sampler=Only(0, 2, 3), aggregator=Term(5.0))
    attack = Reporting(loss)
    torch.testing.assert_close(fit(attack, aggregator=Term(5.0)), others, rtol=0, atol=1e-12)
    torch.testing.assert_close(attack.updates[-1], others - start(), rtol=0, atol=1e-12)
    assert torch.equal(fit(Reporting(loss)), fit())  # the mean reads no losses


def test_client_without_a_finite_loss_is_left_out_and_the_run_goes_on():
    """Its NaN lies in a sample that its only step does not draw."""
    data = shared_out(classes([9, 5, 12, 7]))
    data.clients.inputs[data.clients.train.samples(1)[-1]] = torch.nan
    client = FedAvg(seeded(mlp), optimizer=sgd(0.1), local_steps=1)
    settings = {"aggregator": Term(5.0), "rounds": 1, "shuffle": False}
    outcome = run_rounds(client, data, **settings)
    others = run_rounds(client, data, sampler=Only(0, 2, 3), **settings)
    torch.testing.assert_close(outcome.w, others.w, rtol=0, atol=1e-12)
    assert outcome.reports[0]["train/rejected"] == 1
    with pytest.raises(NonFiniteLossError, match="in round 0 client 1 got a loss of nan"):
        run_rounds(client, data, max_rejected=0.0, **settings)
    assert run_rounds(client, data, rounds=1, shuffle=False).reports[0]["train/rejected"] == 0


def test_attacks_in_a_row_multiply_and_uploads_stay():
    both, own = Combined([LargeLoss(2.0), LargeLoss(3.0)]), torch.ones(1, 2)
    assert both.forge_losses(torch.tensor([0.5]), RoundContext()).tolist() == [3.0]
    assert torch.equal(both.forge(own, own, RoundContext()), own)
    assert (both.forges, both.forges_losses, both.poisons) == (True, True, False)
    assert not SignFlipping().forges_losses


@pytest.mark.slow
def test_losses_of_another_shape_are_refused():
    class Wrong(Attack):
        def forge_losses(self, losses, context):
            return losses.sum()

    with pytest.raises(ValueError, match=r"`forge_losses` of Wrong .* shape \[1\] but got \[\]"):
        fit(Wrong(), aggregator=Mean())


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf")])
def test_factor_is_positive_and_finite(factor):
    with pytest.raises(ValueError, match="`factor`"):
        LargeLoss(factor)
