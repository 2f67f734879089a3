"""Local work as anybody would write it: modules, torch's optimizers, and one client at a time."""

import copy
import itertools

import torch
from torch.nn import functional as F  # noqa: N812


def minibatches(data, k, batch_size):
    """A client's minibatches in its own order, pass after pass, for ever."""
    index = data.clients.train.samples(k)
    x, y = data.clients.inputs[index].double(), data.clients.targets[index]
    return itertools.cycle(list(zip(x.split(batch_size), y.split(batch_size))))


def per_pass(data, k, batch_size):
    return -(-len(data.clients.train.samples(k)) // batch_size)


def trained(net, batches, steps, which, optimizer):
    """A copy of a net after so many steps on the parameters whose names ``which`` takes."""
    net = copy.deepcopy(net).train()
    chosen = [p for name, p in net.named_parameters() if which(name)]
    if not chosen:
        return net
    optimizer = optimizer(chosen)
    for x, y in itertools.islice(batches, steps):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def mixed(shared, own, is_own):
    """One net's tensors, and another's where they are own."""
    net = copy.deepcopy(shared)
    both = {n: own[n] if is_own(n) else t for n, t in net.state_dict().items()}
    net.load_state_dict(both)
    return net


def mean_of(nets, before, is_own):
    """The mean of what is not own; the rest as it was before. Counters are no model."""
    states = [net.state_dict() for net in nets]
    net = copy.deepcopy(before)
    net.load_state_dict(
        {
            name: tensor
            if is_own(name) or not tensor.is_floating_point()
            else torch.stack([state[name] for state in states]).mean(0)
            for name, tensor in before.state_dict().items()
        }
    )
    return net


def row(net, which=lambda name: True):
    """Parameters, one behind the other."""
    return torch.cat([p.detach().flatten() for n, p in net.named_parameters() if which(n)])


def statistics(net, which=lambda name: True):
    """Running statistics, one behind the other."""
    found = [b.flatten() for n, b in net.named_buffers() if which(n) and b.is_floating_point()]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.float64)
