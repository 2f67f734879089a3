"""Outputs of an algorithm in evaluations and predictions, in place of those of a net."""

import pytest
import torch
from lit_modules import LitTable
from small_federations import classes, mlp, seeded, sgd, shared_out

import pl_fed
from pl_fed import EngineOptions, Federation
from pl_fed.clients import Client
from pl_fed.clients.contract import Model

SIZES = [12, 5, 20, 9]


class Shifted(Client):
    """FedAvg with a personal model: w, and logits that read a client's counts and mean features."""

    reads_class_counts = True

    def __init__(self, net, **kwargs):
        models = {"global": Model(), "personal": Model(trained=False, kept=False)}
        super().__init__(net, models=models, **kwargs)

    def begin(self, client):
        sums = self.own_sums(client, lambda b: (b.inputs * b.mask[:, None]).sum(0))
        client.extra["mean"] = sums / client.samples
        client.models["personal"].parameters = client.broadcast.parameters + client.ids[:, None]

    def training_step(self, batch, batch_idx):
        return self.loss("global", batch)

    def predict(self, model, batch):
        assert model == "personal"
        shift = (self.read("class_counts") + 1).log() + self.read("mean").sum()
        return self.outputs_of(model, batch) * self.read("mean")[:3] + shift


def outputs_by_hand(client, data, k, part):
    """Return targets and outputs of a client, with its net alone."""
    train, own = data.train.samples(k), data.part(part).samples(k)
    mean = data.inputs[train].double().mean(0)
    counts = data.targets[train].bincount(minlength=3)
    net = seeded(mlp).double()
    with torch.no_grad():
        row = client.row("global").data + k
        torch.nn.utils.vector_to_parameters(row, net.parameters())
        outputs = net(data.inputs[own].double()) * mean[:3] + (counts + 1).log() + mean.sum()
    return data.targets[own], outputs


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.slow
def test_metrics_and_predictions_read_the_outputs_of_the_algorithm(tmp_path, stacked):
    fractions = {"val_fraction": 0.2, "test_fraction": 0.4}
    datamodule = shared_out(classes(SIZES, seed=3), **fractions)
    trainer = pl_fed.Trainer(
        Federation(seed=0, engine=EngineOptions("stacked" if stacked else "one_by_one")),
        run_dir=tmp_path / "run",
        accelerator="cpu",
        precision="64-true",
        max_epochs=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    client = Shifted(seeded(mlp), optimizer=sgd(0.1))
    trainer.fit(client, datamodule)
    federation, data = trainer.federation, datamodule.clients
    federation.session.evaluation.evaluator.runner.stacked = stacked
    trainer.test(client, datamodule, verbose=False)
    metrics = federation.metrics("test")["personal"]
    predictions = federation.predict(torch.arange(4))
    assert torch.cat([p["prediction"] for p in predictions]).unique().numel() > 1
    for k in range(4):
        y, outputs = outputs_by_hand(client, data, k, "test")
        expected = torch.nn.functional.cross_entropy(outputs, y, reduction="sum")
        torch.testing.assert_close(metrics.loss_sum[k].cpu(), expected)
        assert int(metrics.correct[k].sum()) == int((outputs.argmax(1) == y).sum())
        assert predictions[k]["prediction"].tolist() == outputs.argmax(1).tolist()
        probability = outputs.softmax(1).amax(1)
        torch.testing.assert_close(predictions[k]["probability"].double(), probability)


def test_the_global_model_predicts_by_its_net():
    """Its server knows no client: a client's shift does not change its loss."""
    data = shared_out(classes(SIZES, seed=3), val_fraction=0.4)
    client = Shifted(seeded(mlp), optimizer=sgd(0.1)).double()
    federation = Federation(seed=0)
    federation.setup(client, data, "fit")
    client.eval()
    with torch.no_grad():
        federation.evaluate("val", torch.arange(4))
        metrics = federation.metrics("val")["global"]
        for k in range(4):
            own = data.clients.val.samples(k)
            outputs = client.global_model(data.clients.inputs[own].double())
            targets = data.clients.targets[own]
            loss = torch.nn.functional.cross_entropy(outputs, targets, reduction="sum")
            torch.testing.assert_close(metrics.loss_sum[k], loss)


class Doubled(Client):
    def training_step(self, batch, batch_idx):
        return self.loss("global", batch)

    def predict(self, model, batch):
        return 2 * self.outputs_of(model, batch)


def test_a_net_with_evaluation_steps_is_refused():
    data = shared_out(classes(SIZES, num_classes=2))
    with pytest.raises(ValueError, match=r"without steps of its own for Doubled, .* got LitTable"):
        Federation(seed=0).setup(Doubled(seeded(LitTable), optimizer=sgd()), data, "fit")
