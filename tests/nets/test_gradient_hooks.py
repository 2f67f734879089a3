"""Hooks on the gradients of parameters act in every engine, and in every model of a client."""

import copy

import pytest
import torch
from small_federations import classes, seeded, sgd, shared_out
from torch import nn

import pl_fed
from pl_fed.clients import Ditto, FedAvg
from pl_fed.nets.gradient_hooks import have_gradient_hooks
from pl_fed.samplers import All

COMPILED = ["one_by_one_compiled", "stacked_compiled"]


def clamp(parameter):
    parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))


def shrink(parameter):
    def hook(own):
        own.grad.mul_(0.1)

    parameter.register_post_accumulate_grad_hook(hook)


def net_with(register):
    net = seeded(lambda: nn.Linear(4, 3))
    for parameter in net.parameters():
        register(parameter)
    return net


def train(register, steps=2):
    """Return the mean of three nets after steps by hand, and their data."""
    data, ends = shared_out(classes([8, 8, 8]), batch_size=8), []
    for number in range(3):
        net, batch = net_with(register), data.clients.batch(data.clients.train.samples(number))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(batch.inputs), batch.targets).backward()
            optimizer.step()
        ends.append(nn.utils.parameters_to_vector(net.parameters()).detach())
    return torch.stack(ends), data


@pytest.mark.slow
@pytest.mark.parametrize("register", [clamp, shrink])
@pytest.mark.parametrize(
    "engine",
    ["one_by_one", "stacked", *(pytest.param(name, marks=pytest.mark.slow) for name in COMPILED)],
)
@pytest.mark.filterwarnings("ignore:Clients are run one by one")
@pytest.mark.filterwarnings("ignore:Local steps run eagerly")
def test_hooks_of_parameters_act_in_every_engine(tmp_path, engine, register):
    ends, data = train(register)
    federation = pl_fed.Federation(All(), engine=pl_fed.EngineOptions(engine), seed=0)
    trainer = pl_fed.Trainer(
        federation, max_epochs=1, run_dir=tmp_path, accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    client = FedAvg(net_with(register), optimizer=sgd(0.1), local_epochs=2)
    trainer.fit(client, data)
    model = nn.utils.parameters_to_vector(federation.model_of(0).parameters())
    torch.testing.assert_close(model.detach(), ends.mean(0), rtol=0, atol=1e-6)


def test_personal_models_have_the_hooks_of_the_net():
    client = Ditto(net_with(clamp))
    assert have_gradient_hooks(client.model("personal").parameters())
    copied = copy.deepcopy(client.model("global"))
    assert not have_gradient_hooks(copied.parameters()), "torch leaves them out"
