"""A prepared step belongs to the values that its trace has read."""

from torch import nn

from pl_fed.clients import FedAvg
from pl_fed.engine.tracing import plain_attributes


def test_another_module_or_attribute_needs_another_trace():
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Dropout(0.5))
    client = FedAvg(net)
    before = list(plain_attributes(client))
    assert list(plain_attributes(client)) == before
    client.global_model[1] = nn.Sigmoid()
    replaced = list(plain_attributes(client))
    assert replaced != before
    client.global_model[2].p = 0.1
    assert list(plain_attributes(client)) != replaced
