"""Models of a federation in Python: only those that the algorithm evaluates."""

import pytest
from personal_models import trained, validated_by_training
from small_federations import classes, mlp, seeded, sgd, shared_out

from pl_fed.clients import IFCA, FedAvg, FedRep, Local


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
