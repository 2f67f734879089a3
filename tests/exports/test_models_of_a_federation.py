"""Models of a federation in Python: only those that the algorithm evaluates."""

from dataclasses import replace

import pytest
import torch
from personal_models import trained, validated_by_training
from small_federations import classes, mlp, seeded, sgd, shared_out

from pl_fed.clients import IFCA, Ditto, FedAvg, FedRep, Local
from pl_fed.distributed.processes import Processes


@pytest.mark.parametrize(
    ("algorithm", "options", "missing", "evaluated"),
    [
        (Local, {}, "global", "personal"),  # the server trains nothing
        (IFCA, {"clusters": 2}, "global", "personal"),  # the server has other models
        (FedRep, {"own": ["2"]}, "global", "personal"),  # nobody trains the head of w
        (FedAvg, {}, "personal", "global"),
    ],
)
def test_model_that_is_not_evaluated_is_refused(algorithm, options, missing, evaluated):
    """The global model of such algorithms is, at least in part, that of the first round."""
    data = validated_by_training(shared_out(classes([8, 9])))
    client = algorithm(seeded(mlp), optimizer=sgd(0.1), local_epochs=1, **options)
    federation = trained(client, data, 1).federation
    with pytest.raises(
        ValueError,
        match=f"`model` to be one of {evaluated} but got '{missing}', which {algorithm.__name__}",
    ):
        federation.model_of(0, missing)
    assert federation.model_of(0, evaluated)(data.clients.inputs.double()).shape == (17, 3)


def test_model_of_a_client_at_home_in_another_process_is_refused():
    """Its states are in that process, and would be those of an untrained client here."""
    data = validated_by_training(shared_out(classes([8, 9, 7]), held_out_clients=1 / 3))
    client = Ditto(seeded(mlp), optimizer=sgd(0.1), local_epochs=1)
    federation = trained(client, data, 1).federation
    states = federation.session.states
    expected = federation.model_of(0).state_dict()
    states.settings = replace(states.settings, processes=Processes(rank=0, size=2))
    elsewhere = "client of process 0 of 2 but got 1, whose model is in process 1: .* `pl_fed.load"
    with pytest.raises(ValueError, match=elsewhere):
        federation.model_of(1)
    with pytest.raises(ValueError, match=elsewhere):
        federation.measure("val", torch.arange(2), ["global", "personal"])
    got = federation.model_of(0).state_dict()
    assert all(torch.equal(got[name], row) for name, row in expected.items())
    federation.model_of(1, "global")
    assert federation.measure("val", torch.arange(2), ["global"])
    for rank in range(2):
        states.settings = replace(states.settings, processes=Processes(rank=rank, size=2))
        with pytest.raises(ValueError, match="got 2, a held-out client, whose model all 2 proc"):
            federation.model_of(2)
