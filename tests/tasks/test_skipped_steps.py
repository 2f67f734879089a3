"""``training_step`` may return ``None``: the step is skipped, as in Lightning."""

import pytest
import torch
from small_federations import classes, run_tried_rounds, seeded, shared_out
from stateful_modules import Stateful

from pl_fed.clients import Ditto, FedAvg, Scaffold

SIZES = [8, 12, 4]


class SkipsLargeLosses(Stateful):
    """Skips a step by a branch on its data, and counts the others in a buffer."""

    threshold = 1.2

    def keep(self):
        self.register_buffer("taken", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if float(loss.detach()) > self.threshold:
            return None
        self.taken += 1
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, weight_decay=0.1)


class SkipsAll(SkipsLargeLosses):
    threshold = -1.0


class SkipsEverySecond(Stateful):
    def training_step(self, batch, batch_idx):
        return None if batch_idx % 2 else self.loss(batch)


def data():
    return shared_out(classes(SIZES), batch_size=4, seed=0)


def run_by_hand(module, federated, rounds):
    """FedAvg with the loop of Lightning: a step that returns None moves nothing."""
    clients, skipped = federated.clients, 0
    net = seeded(module).double()
    means = []
    for _ in range(rounds):
        start = [p.detach().clone() for p in net.parameters()]
        uploads, client_means = [], []
        for client in range(len(SIZES)):
            for parameter, value in zip(net.parameters(), start):
                parameter.data.copy_(value)
            optimizer = net.configure_optimizers()
            index = clients.train.samples(client)
            losses = []
            for step, samples in enumerate(index.split(4)):
                batch = clients.batch(samples)
                loss = net.training_step((batch.inputs.double(), batch.targets), step)
                if loss is None:
                    skipped += 1
                    continue
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            uploads.append([p.detach().clone() for p in net.parameters()])
            client_means += [sum(losses) / len(losses)] if losses else []
        for parameter, *values in zip(net.parameters(), *uploads):
            parameter.data.copy_(torch.stack(values).mean(0))
        means.append(sum(client_means) / len(client_means))
    return net, means, skipped


@pytest.mark.parametrize("module", [SkipsLargeLosses, SkipsEverySecond])
@pytest.mark.slow
def test_skipped_steps_equal_the_loop_of_lightning(module):
    federated = data()
    net, means, skipped = run_by_hand(module, federated, rounds=3)
    assert 0 < skipped < 3 * 6
    client = FedAvg(seeded(module))
    outcome = run_tried_rounds(client, federated, rounds=3, shuffle=False)
    expected = torch.cat([p.detach().flatten() for p in net.parameters()])
    torch.testing.assert_close(outcome.w, expected, rtol=0, atol=1e-12)
    assert [float(report["train/loss"]) for report in outcome.reports] == pytest.approx(means)
    assert all(report["train/rejected"] == 0 for report in outcome.reports)


def test_client_that_skips_all_steps_uploads_no_change():
    outcome = run_tried_rounds(Ditto(seeded(SkipsAll)), data(), rounds=2)
    start = FedAvg(seeded(SkipsAll)).row("global").data.double()
    assert torch.equal(outcome.w, start)
    assert torch.equal(outcome.v, start.expand(3, -1))
    assert all("train/loss" not in report for report in outcome.reports)


def test_algorithms_read_the_number_of_taken_steps():
    class Counting(Scaffold):
        taken = ()

        def end_round(self, client):
            Counting.taken = client.steps["global"].flatten().tolist()
            return super().end_round(client)

    client = Counting(
        seeded(SkipsEverySecond), optimizer=lambda p: torch.optim.SGD(p, 0.1), local_epochs=1
    )
    run_tried_rounds(client, data(), rounds=1, shuffle=False)
    assert Counting.taken == [1, 2, 1], "of 2, 3 and 1 steps"


@pytest.mark.slow
def test_stack_falls_back_to_one_by_one_for_a_branch_on_data():
    with pytest.warns(UserWarning, match="stack"):
        stacked = run_tried_rounds(FedAvg(seeded(SkipsLargeLosses)), data(), engine="stacked")
    one = run_tried_rounds(FedAvg(seeded(SkipsLargeLosses)), data())
    assert stacked.distance(one) == 0


@pytest.mark.slow
def test_stack_falls_back_to_one_by_one_for_a_later_step_that_returns_none():
    with pytest.warns(UserWarning, match="round 0 on, as the engine stacked failed: .*None"):
        stacked = run_tried_rounds(FedAvg(seeded(SkipsEverySecond)), data(), engine="stacked")
    one = run_tried_rounds(FedAvg(seeded(SkipsEverySecond)), data())
    assert stacked.distance(one) == 0


def test_step_without_a_loss_is_said_before_training():
    with pytest.warns(UserWarning, match="`training_step` of SkipsAll returned None for the first"):
        run_tried_rounds(FedAvg(seeded(SkipsAll)), data(), rounds=1)
