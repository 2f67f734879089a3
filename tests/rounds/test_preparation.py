"""The preparation of a round: local training between ``begin`` and the local steps."""

import pytest
import torch
from small_federations import (
    HalfSquares,
    Point,
    points,
    run_rounds,
    run_tried_rounds,
    sgd,
    shared_out,
)
from tables import table_test

from pl_fed.attacks import Attack
from pl_fed.clients import Client, Model, Objective


class Aligned(Client):
    """Aligned: a preparation moves the personal model, from which the local steps start.

    With the loss ½ (v − y)², learning rate 0.5 and one sample y, s steps halve v − y s times.
    """

    prepared = ("personal",)

    def __init__(self, net, **kwargs):
        models = {"global": Model(trained=False), "personal": Model(kept=False)}
        super().__init__(net, models=models, criterion=HalfSquares(), **kwargs)
        self.add_state("start", 0.0)
        self.add_state("prepared_start", 0.0)
        models = {name: Model() for name in self.prepared}
        self.preparation = Objective(self.preparation_step, models, sgd(0.5))

    def begin(self, client):
        client.states["start"] = client.models["personal"].parameters.clone()
        if client.preparation_steps:
            self.set_steps(client)

    def set_steps(self, client):
        client.preparation_steps["personal"] = 1 + client.ids[:, None]

    def preparation_step(self, batch, batch_idx):
        return self.loss("personal", batch)

    def end_preparation(self, client):
        client.states["prepared_start"] = client.models["personal"].parameters

    def training_step(self, batch, batch_idx):
        return self.loss("personal", batch)

    def end_round(self, client):
        return client.models["personal"].parameters - client.broadcast.parameters


def run(kind=Aligned, runs=run_rounds, **settings):
    client = kind(Point(), optimizer=sgd(0.5), local_steps=1)
    data = shared_out(points([8.0], [16.0], [32.0]), batch_size=1)
    return runs(client, data, **{"rounds": 1, **settings})


@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_local_steps_start_at_the_prepared_model(engine, chunk_size):
    """Client k takes k + 1 steps of the preparation: v − y is halved k + 1 times, and once more."""
    outcome = run(engine=engine, chunk_size=chunk_size)
    assert outcome.states["start"].tolist() == [[0.0]] * 3
    assert outcome.states["prepared_start"].tolist() == [[4.0], [12.0], [28.0]]
    assert outcome.w.item() == pytest.approx((6 + 14 + 30) / 3)
    assert outcome.v.flatten().tolist() == [outcome.w.item()] * 3  # an evaluation has none


def test_clients_may_skip_the_preparation():
    class Skipping(Aligned):
        def set_steps(self, client):
            client.preparation_steps["personal"] = (client.ids[:, None] == 1).long()

    outcome = run(Skipping, engine="stacked")
    assert outcome.states["prepared_start"].tolist() == [[0.0], [8.0], [0.0]]


@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_the_only_client_with_a_preparation_reads_its_own_validation_samples(engine):
    class Validating(Aligned):
        reads_validation = True

        def set_steps(self, client):
            client.preparation_steps["personal"] = (client.ids[:, None] == 1).long()

        def preparation_step(self, batch, batch_idx):
            return self.loss("personal", self.validation_batch(batch))

    data = shared_out(points(*[2 * [y] for y in (8.0, 16.0, 32.0)]), batch_size=1, val_fraction=0.5)
    client = Validating(Point(), optimizer=sgd(0.5), local_steps=1)
    outcome = run_rounds(client, data, rounds=1, engine=engine)
    assert outcome.states["prepared_start"].tolist() == [[0.0], [8.0], [0.0]]

    class Absent(Aligned):
        def set_steps(self, client):
            client.preparation_steps["personal"] = 0 * client.preparation_steps["personal"]

    assert run(Absent).states["prepared_start"].tolist() == [[0.0]] * 3


def test_planned_work_is_that_of_the_objective():
    class Planned(Aligned):
        def set_steps(self, client):
            assert client.preparation_steps["personal"].tolist() == [[1], [1], [1]]

    assert run(Planned).states["prepared_start"].tolist() == [[4.0], [8.0], [16.0]]


class Shifted(Attack):
    """Shifted: changes the targets of Byzantine clients."""

    def poison(self, batch, context):
        return batch._replace(targets=batch.targets + 64)


def test_byzantine_clients_prepare_on_poisoned_data():
    outcome = run(attack=Shifted(), ids=[1])
    assert outcome.states["prepared_start"].tolist() == [[4.0], [60.0], [28.0]]


def test_an_error_names_the_stage_the_round_the_client_and_the_step():
    class Failing(Aligned):
        def preparation_step(self, batch, batch_idx):
            if batch_idx == 1:
                raise RuntimeError("out of ink")
            return self.loss("personal", batch)

    with pytest.raises(RuntimeError, match="out of ink") as error:
        run(Failing)
    assert "In the preparation of round 0, client 1, local step 1." in error.value.__notes__


def test_a_client_that_fails_in_its_preparation_is_left_out():
    class Failing(Aligned):
        def preparation_step(self, batch, batch_idx):
            if int(self.read("client")[0]) == 2:
                raise RuntimeError("out of ink")
            return self.loss("personal", batch)

    with pytest.warns(UserWarning, match="left out the uploads"):
        outcome = run(Failing, on_client_error="leave_out", max_rejected=0.5)
    assert outcome.w.item() == pytest.approx((6 + 14) / 2)
    assert outcome.states["prepared_start"].tolist() == [[4.0], [12.0], [0.0]]


def set_steps_to(steps):
    def set_steps(self, client):
        client.preparation_steps["personal"] = steps

    return set_steps


@table_test(
    "members, match",
    [
        ({"prepared": ("global",)}, r"other than global \(personal\) but got global"),
        (
            {"set_steps": set_steps_to(torch.ones(3, 1))},
            r"`client.preparation_steps\['personal'\]` to integers of shape .* got float32 \[3,",
        ),
        ({"set_steps": set_steps_to(-torch.ones(3, 1).long())}, "at least 0, but got -1"),
        (
            {"end_preparation": lambda self, client: client.steps["personal"].zero_()},
            r"`end_preparation` to leave `client.steps\['personal'\]` as it is",
        ),
    ],
)
def test_mistakes_of_an_author_are_refused(members, match):
    kind = type("Mistaken", (Aligned,), members)
    with pytest.raises(ValueError, match=match):
        run(kind)


def test_the_trial_before_training_runs_the_preparation():
    class Wrong(Aligned):
        def preparation_step(self, batch, batch_idx):
            return {"accuracy": self.loss("personal", batch)}

    with pytest.raises(TypeError, match="to return a loss, or a dict with the tensor `loss`"):
        run(Wrong, run_tried_rounds, rounds=0)
