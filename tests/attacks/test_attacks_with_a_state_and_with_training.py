"""The contract leaves room for attacks that remember rounds, and for those that train a model."""

import pytest
import torch
from small_federations import Only, classes, mlp, run_rounds, seeded, sgd, shared_out
from torch import nn

import pl_fed
from pl_fed.attacks import A3FL, Attack, Combined, FreeRider, SignFlipping
from pl_fed.clients import Ditto, FedAvg
from pl_fed.samplers import All


class Momentum(Attack):
    """Uploads the negative sum of the honest means of all rounds so far."""

    def __init__(self):
        self.total = torch.zeros(())

    def forge(self, honest, own, context):
        self.total = self.total + honest.mean(0)
        return -self.total.expand_as(own)

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


def make_trainer(attack, folder, rounds):
    federation = pl_fed.Federation(
        All(), adversary=pl_fed.Adversary(attack=attack, ids=[1]), seed=0
    )
    return pl_fed.Trainer(
        federation,
        run_dir=folder,
        max_epochs=rounds,
        accelerator="cpu",
        precision="64-true",
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.mark.slow
def test_resumed_run_restores_the_state_of_the_attack_bit_for_bit(tmp_path):
    def fit(name, attack, rounds, checkpoint=None):
        client = Ditto(seeded(mlp), optimizer=sgd(0.1))
        trainer = make_trainer(attack, tmp_path / name, rounds)
        trainer.fit(client, shared_out(classes([9, 5, 12])), ckpt_path=checkpoint)
        return client.row("global").data, attack.total

    expected, total = fit("whole", Momentum(), 4)
    fit("begun", Momentum(), 2)
    checkpoint = tmp_path / "begun" / "checkpoints" / "last.ckpt"
    resumed, resumed_total = fit("resumed", Momentum(), 4, checkpoint)
    assert torch.equal(resumed, expected)
    assert torch.equal(resumed_total, total)
    with pytest.raises(
        ValueError, match=r"without a state of SignFlipping, which keeps none, .* total"
    ):
        fit("other", SignFlipping(), 4, checkpoint)


def make_a3fl():
    return A3FL(target=1, samples=1.0, size=1, steps=2, trigger_epochs=1, trigger_lr=0.2)


def flat_mlp():
    return nn.Sequential(nn.Flatten(), *mlp())


@pytest.mark.parametrize("make", [Momentum, lambda: FreeRider("delta"), make_a3fl])
@pytest.mark.parametrize("combines", [False, True])
def test_attack_begins_each_run_without_the_state_of_the_last_one(make, combines):
    attack, data = make(), shared_out(classes([9, 5, 12], shape=(1, 2, 2)))
    client = FedAvg(seeded(flat_mlp), optimizer=sgd(0.1))
    runs = [
        run_rounds(client, data, attack=Combined([attack]) if combines else attack, ids=[1])
        for _ in range(2)
    ]
    assert torch.equal(runs[0].w, runs[1].w)


class TrainedBackwards(Attack):
    """Takes a step of gradient ascent on all of its own data, from the broadcast."""

    def forge(self, honest, own, context):
        uploads = []
        for attacker in context.attackers.tolist():
            net, batch = context.net(), context.samples(attacker)
            with torch.enable_grad():
                loss = nn.functional.cross_entropy(net(batch.inputs), batch.targets)
                gradients = torch.autograd.grad(loss, list(net.parameters()))
            uploads.append(torch.cat([gradient.flatten() for gradient in gradients]))
        return 0.5 * torch.stack(uploads)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_attacker_can_train_the_model_on_its_data(engine):
    data, client = shared_out(classes([9, 5, 12])), FedAvg(seeded(mlp), optimizer=sgd(0.1))
    settings = {"rounds": 1, "engine": engine, "ids": [1]}
    outcome = run_rounds(client, data, attack=TrainedBackwards(), **settings)
    honest = run_rounds(client, data, attack=SignFlipping(), **settings, start_round=9)
    net = seeded(mlp).double()
    index = data.clients.train.samples(1)
    x, y = data.clients.inputs[index].double(), data.clients.targets[index]
    gradients = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
    ascent = 0.5 * torch.cat([gradient.flatten() for gradient in gradients])
    own = 3 * (honest.w - outcome.w) + ascent  # the upload that the attacker replaced
    descent = run_rounds(client, data, rounds=1, engine=engine, sampler=Only(1))
    start = nn.utils.parameters_to_vector(net.parameters()).detach()
    torch.testing.assert_close(own, descent.w - start, rtol=0, atol=1e-12)
