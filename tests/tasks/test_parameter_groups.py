"""A LightningModule's optimizer with several parameter groups, beside plain Lightning fits."""

import copy

import lightning
import pytest
import torch
from exhaustive import exhaustive_but
from lit_federations import float32, numbers, set_up, table, trainer_of
from lit_modules import LitAutoencoder, LitTable
from small_federations import run_tried_rounds, seeded, shared_out
from tables import table_test
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pl_fed.aggregators import FLTrust
from pl_fed.clients import FLAME, L2SGD, Ditto, DittoGreedy, FedAvg, PFedMe, Scaffold
from pl_fed.engine import Clipping


def decay_groups(module):
    """Weights with weight decay, biases without, and a slower body; groups take turns in a row."""
    named = [*module.named_parameters()]
    biases = [p for name, p in named if name.endswith("bias")]
    body = [p for name, p in named if name == "body.0.weight"]
    rest = [p for name, p in named if name == "head.weight"]
    return [
        {"params": rest, "weight_decay": 0.2},
        {"params": biases, "weight_decay": 0.0},
        {"params": body, "weight_decay": 0.1, "lr": 0.005},
    ]


class LitAdamW(LitTable):
    """Three groups, and a schedule of epochs with a function for each group."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(decay_groups(self), lr=0.02)
        factors = [lambda t: 1 / (1 + t), lambda t: 0.5**t, lambda t: 1.0]
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, factors)]


class LitSGD(LitTable):
    """Three groups with momenta of their own, and a schedule of one function."""

    def configure_optimizers(self):
        groups = decay_groups(self)
        groups[1]["momentum"] = 0.5
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


MODULES = pytest.mark.parametrize("make", [LitAdamW, LitSGD])


def fit_plainly(module, data, epochs, folder, clip=None):
    """Fit a module on client 0 by Lightning, without shuffling, and return its parameters."""
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        gradient_clip_val=clip,
    )  # fmt: skip
    inputs, targets, *_ = data.clients.to(torch.device("cpu"), torch.float64).training_samples(0)
    trainer.fit(module, DataLoader(TensorDataset(inputs, targets), batch_size=4))
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@exhaustive_but("LitAdamW-None", "LitSGD-0.05")
@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.05])
@MODULES
def test_fit_of_one_client_equals_a_lightning_fit(make, clip, tmp_path):
    net, data, epochs = seeded(make).double(), shared_out(table([12])), 3
    plain = fit_plainly(copy.deepcopy(net), data, epochs, tmp_path, clip)
    for engine in ("one_by_one", "stacked"):
        outcome = run_tried_rounds(
            FedAvg(net), data, rounds=epochs, shuffle=False, keep_optimizer_state=True,
            engine=engine, clipping=None if clip is None else Clipping(clip),
        )  # fmt: skip
        torch.testing.assert_close(outcome.w, plain, rtol=0, atol=1e-12)


@exhaustive_but("LitAdamW")
@pytest.mark.slow
@MODULES
def test_engines_agree_for_parameter_groups(make, uncompiled):
    data, client = shared_out(table()), Ditto(seeded(make), local_epochs=2, personal_epochs=1)
    one_by_one = run_tried_rounds(client, data)
    for engine in ("stacked", "one_by_one_compiled", "stacked_compiled"):
        assert one_by_one.distance(run_tried_rounds(client, data, engine=engine)) < 1e-12
    assert len(uncompiled) >= 2, "both compiled engines have traced the steps"


def test_every_model_has_the_groups_of_the_module():
    client = Ditto(LitAdamW(), personal_lr=0.3)
    optimizer = client.objective.build_optimizer(client.trained_parameters)
    groups = optimizer.param_groups
    names = [f"{model}.{place}" for model in ("global", "personal") for place in range(3)]
    assert [group["name"] for group in groups] == names
    assert [group["weight_decay"] for group in groups] == [0.2, 0.0, 0.1] * 2
    assert [group["lr"] for group in groups] == [0.02, 0.02, 0.005, 0.3, 0.3, 0.3]
    w = client.global_model
    shapes = [[*map(id, group["params"])] for group in groups[:3]]
    assert shapes == [
        [id(w.head.weight)], [id(w.body[0].bias), id(w.head.bias)], [id(w.body[0].weight)]
    ]  # fmt: skip


def test_group_without_trainable_parameters_is_left_out():
    net = LitSGD()
    net.head.weight.requires_grad_(False)  # the first of the groups
    client = FedAvg(net)
    optimizer = client.objective.build_optimizer(client.trained_parameters)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.5, 0.9]
    schedule = client.build_schedule(optimizer)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.0025]


@pytest.mark.slow
def test_resumed_fit_with_groups_and_a_schedule_is_bit_equal(tmp_path):
    arrays = float32(table())
    _, complete, data = set_up(LitAdamW, arrays, tmp_path=tmp_path / "all", rounds=4)
    first, _, _ = set_up(LitAdamW, arrays, tmp_path=tmp_path / "half", rounds=2)
    path = tmp_path / "half.ckpt"
    first.save_checkpoint(path)
    resumed = Ditto(seeded(LitAdamW, seed=1))
    trainer_of(tmp_path / "rest", 4).fit(resumed, data, ckpt_path=path)
    assert torch.equal(resumed.row("global").data, complete.row("global").data)
    rates = [[group["lr"] for group in c.optimizers().param_groups] for c in (resumed, complete)]
    assert rates[0] == rates[1] == [0.02 / 5, 0.02 / 16, 0.005] * 2


def test_server_trains_its_root_data_with_the_groups():
    updates = []

    class Watched(FLTrust):
        def forward(self, uploads, weights, context):
            updates.append(context.root)
            return super().forward(uploads, weights, context)

    class LitTwoRates(LitAutoencoder):
        def configure_optimizers(self):
            groups = [{"params": self.encoder.parameters(), "lr": 0.0}]
            return torch.optim.SGD([*groups, {"params": self.decoder.parameters()}], lr=0.3)

    net = seeded(LitTwoRates)
    data = shared_out(numbers([8, 8]), root_samples=4)
    run_tried_rounds(FedAvg(net), data, rounds=1, aggregator=Watched())
    encoder = sum(p.numel() for p in net.encoder.parameters())
    assert (updates[-1][:encoder] == 0).all()
    assert (updates[-1][encoder:] != 0).any()


class LitPlain(LitTable):
    """Two groups of SGD whose options differ in one name."""

    def configure_optimizers(self):
        own = {"params": self.head.parameters(), **self.options}
        return torch.optim.SGD([{"params": self.body.parameters()}, own], lr=0.1)


def refuse(algorithm, **options):
    net = LitPlain()
    net.options = options
    return run_tried_rounds(algorithm(net), shared_out(table()))


REFUSED = {
    "L2SGD": (lambda: refuse(L2SGD, lr=0.2), "one `lr` .* the penalty depends on η, but got 0.1, "),
    "DittoGreedy": (lambda: refuse(DittoGreedy, lr=0.2), "one `lr` .* rate of v, but got 0.1, 0.2"),
    "Scaffold": (lambda: refuse(Scaffold, momentum=0.9), "one `momentum` .* but got 0, 0.9: set"),
    "PFedMe": (lambda: refuse(PFedMe, weight_decay=0.1), "one `weight_decay` .* but got 0, 0.1: "),
    "FLAME": (
        lambda: refuse(lambda net: FLAME(net, tolerance=0.1), weight_decay=0.1),
        "one `weight_decay` .* tolerance stops models, but got 0, 0.1: set `model.optimizer`",
    ),
}


@pytest.mark.slow
@table_test(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_algorithm_that_needs_one_option_refuses_groups_that_differ(call, words):
    with pytest.raises(ValueError, match=f"^Expected a local optimizer with {words}"):
        call()


@pytest.mark.slow
def test_algorithms_accept_groups_whose_other_options_differ():
    assert refuse(L2SGD, weight_decay=0.1).reports
    assert refuse(Scaffold, foreach=True).reports
