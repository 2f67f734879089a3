"""Copies of a net have their own weights: without torch.compile, or with a refusal."""

import copy
import warnings

import pytest
import torch
from small_federations import classes, mlp, run_tried_rounds, seeded, sgd, shared_out
from tables import table_test
from torch import nn
from torch.nn.utils import parametrizations, prune

from pl_fed.clients import Ditto, FedAvg
from pl_fed.nets.copies import find_own_function, remove_compilation


class Net(nn.Module):
    """Two layers of torch, and a method of its own."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.encode(x))

    def encode(self, x):
        return self.body(x)


def compile_root(net):
    return torch.compile(net)


def compile_child(net):
    net.body = torch.compile(net.body)
    return net


def compile_shared_child(net):
    net.body = net.alias = torch.compile(net.body)
    return net


def compile_own_method(net):
    net.encode = torch.compile(net.encode)
    return net


def compile_method_of_torch(net):
    net.body.forward = torch.compile(net.body.forward)
    return net


def compile_method_under_another_name(net):
    net.encode = torch.compile(net.body.forward)
    return net


def compile_in_place(net):
    net.head.compile()
    return net


@table_test(
    "wrap, part",
    [
        (compile_root, "Net"),
        (compile_child, "body"),
        (compile_shared_child, "body`, `alias"),
        (compile_own_method, "encode"),
        (compile_method_of_torch, "body.forward"),
        (compile_method_under_another_name, "encode"),
        (compile_in_place, "head.forward"),
    ],
)
@pytest.mark.slow
def test_copies_compute_with_their_own_weights(wrap, part):
    net = Net()
    plain = copy.deepcopy(net)
    with pytest.warns(UserWarning, match=f"takes `{part}` of Net without torch.compile"):
        net = remove_compilation(wrap(net))
    assert {*plain.state_dict()} <= {*net.state_dict()}
    twin, x = copy.deepcopy(net), torch.randn(5, 3)
    torch.testing.assert_close(net(x), plain(x), rtol=0, atol=0)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    torch.testing.assert_close(twin(x), torch.zeros(5, 2), rtol=0, atol=0)
    torch.testing.assert_close(net(x), plain(x), rtol=0, atol=0)


@pytest.mark.slow
def test_client_takes_a_compiled_net_apart():
    with pytest.warns(UserWarning, match="without torch.compile"):
        client = Ditto(compile_method_of_torch(Net()), lam=0.1)
    with torch.no_grad():
        for parameter in client.personal_model.parameters():
            parameter.zero_()
    assert client.personal_model(torch.ones(1, 3)).abs().sum() == 0
    assert client.global_model(torch.ones(1, 3)).abs().sum() > 0


def test_other_nets_stay_without_a_warning():
    net = Net()
    net.encode_twice = lambda x: net.encode(x)
    attributes = {**vars(net)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert remove_compilation(net) is net
    assert vars(net) == attributes


class Functions(nn.Module):
    """Has functions in attributes."""

    def __init__(self, attribute):
        super().__init__()
        self.layer, self.metric = nn.Linear(3, 2), nn.Flatten()
        attribute(self)


def keep_self(net):
    net.run = lambda x: net.layer(x)


def keep_layer_in_list(net):
    layer = net.layer
    net.steps = [torch.relu, lambda x: layer(x)]


def keep_method(net):
    method = net.layer.forward
    net.run = lambda x: method(x)


def keep_in_another_function(net):
    def inner(x):
        return net.layer(x)

    net.run = lambda x: inner(x)


def keep_as_default(net):
    net.run = lambda x, layer=net.layer: layer(x)


def keep_list_of_weights(net):
    weights = [*net.parameters()]
    net.run = lambda: sum(weight.square().sum() for weight in weights)


def keep_in_hook(net):
    net.layer.register_forward_hook(lambda module, inputs, output: net.layer.weight.sum())


@table_test(
    "attribute, path",
    [
        (keep_self, "run"),
        (keep_layer_in_list, "steps"),
        (keep_method, "run"),
        (keep_in_another_function, "run"),
        (keep_as_default, "run"),
        (keep_list_of_weights, "run"),
        (keep_in_hook, "layer._forward_hooks"),
    ],
)
def test_functions_that_keep_the_net_are_refused_for_personal_models(attribute, path):
    with pytest.raises(ValueError, match=f"but got `{path}` of Functions, a function that keeps"):
        Ditto(Functions(attribute), lam=0.1)
    FedAvg(Functions(attribute))  # trains no copy


def keep_nothing(net):
    scale = 2.0
    net.run = lambda x: scale * x


def keep_a_module_without_weights(net):
    metric = net.metric
    net.run = lambda x: metric(x)


def keep_bound_method(net):
    net.run = net.layer.forward


class Renewing(nn.Linear):
    """A layer whose copies have their own function, as metrics of torchmetrics do."""

    def __init__(self):
        super().__init__(3, 2)
        self.__setstate__(vars(self))

    def __getstate__(self):
        return {name: value for name, value in super().__getstate__().items() if name != "run"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.run = lambda x: self(x)


def keep_function_out_of_copies(net):
    net.renewing = Renewing()


@table_test(
    "attribute",
    [keep_function_out_of_copies, keep_nothing, keep_a_module_without_weights, keep_bound_method],
)
def test_other_functions_are_taken(attribute):
    net = Functions(attribute)
    assert find_own_function(net) is None
    assert find_own_function(copy.deepcopy(net)) is None
    Ditto(net, lam=0.1)


def test_parametrized_nets_are_copied():
    net = parametrizations.weight_norm(nn.Linear(3, 2))
    client = Ditto(nn.Sequential(net), lam=0.1)
    names = [name for name, _ in client.personal_model.named_parameters()]
    assert names == ["0.bias", *(f"0.parametrizations.weight.original{part}" for part in (0, 1))]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
@pytest.mark.slow
def test_weight_norm_by_a_hook_equals_the_parametrization(engine):
    data, outcomes = shared_out(classes([8, 8, 8])), []
    for normalize in (nn.utils.weight_norm, parametrizations.weight_norm):
        net = seeded(mlp)
        normalize(net[0])
        client = Ditto(net, lam=0.1, optimizer=sgd(0.1))
        outcomes.append(run_tried_rounds(client, data, engine=engine))
    assert outcomes[0].distance(outcomes[1]) < 1e-10


def test_pruned_nets_are_trained_within_their_mask():
    net = seeded(mlp)
    prune.l1_unstructured(net[0], "weight", 0.5)
    mask, before = net[0].weight_mask, net[0].weight_orig.detach().clone()
    client = Ditto(net, lam=0.1, optimizer=sgd(0.1))
    outcome = run_tried_rounds(client, shared_out(classes([8, 8, 8])))
    after = client.row("global").layout.views(outcome.w)["0.weight_orig"]
    assert torch.equal((after != before.double()), mask.bool())
