"""An error in an algorithm's method names the round, the clients and the local step."""

import pytest
import torch
from small_federations import Only, classes, mlp, run_rounds, sections, seeded, sgd, shared_out

from pl_fed import EngineOptions, Federation
from pl_fed.attacks import Attack
from pl_fed.clients import FedAvg, Finetuning
from pl_fed.devices import note_devices

SIZES = [9, 4, 6, 11, 5, 8, 7]


class Fails(FedAvg):
    """Fails in the second round: in a local step, or in a hook of client 3."""

    def __init__(self, net, hook, **kwargs):
        super().__init__(net, **kwargs)
        self.hook, self.armed = hook, False

    def begin(self, client):
        if self.armed and self.hook == "begin" and (client.ids == 3).any():
            raise RuntimeError("broken")

    def training_step(self, batch, batch_idx):
        if self.armed and self.hook == "training_step" and (batch_idx == 2) is True:
            raise RuntimeError("broken")
        return self.loss("global", batch)

    def end_round(self, client):
        if self.armed and self.hook == "end_round" and (client.ids == 3).any():
            raise RuntimeError("broken")
        return super().end_round(client)


def collect_notes(hook, sampler, **settings):
    """Return the notes of the error that ends the second round."""
    client = Fails(seeded(mlp), hook, optimizer=sgd(0.1), local_steps=3)
    federation = Federation(sampler, seed=0, **sections(**settings))
    federation.setup(client, shared_out(classes(SIZES)), "fit")
    optimizer = client.train().configure_optimizers()
    federation.run_round(0, optimizer)
    client.armed = True
    with pytest.raises(RuntimeError, match="broken") as caught:
        federation.run_round(1, optimizer)
    return caught.value.__notes__


@pytest.mark.slow
def test_note_of_one_by_one_names_client_and_step():
    notes = collect_notes("training_step", Only(3, 5), engine="one_by_one")
    assert notes == ["In round 1, client 3, local step 2."]


@pytest.mark.slow
def test_note_of_stacked_names_client_and_step():
    """The chunk runs once more, one by one: the error may be the stack's."""
    (note,) = collect_notes("training_step", Only(3, 5, 1), engine="stacked", chunk_size=2)
    assert note in [f"In round 1, client {client}, local step 2." for client in (1, 3, 5)]


class BadData(Attack):
    """Fails in the second round: an error that compiling the step does not meet."""

    def poison(self, batch, context):
        if context.round == 1:
            raise RuntimeError("broken")
        return batch


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one_compiled", "stacked_compiled"])
def test_note_of_a_compiled_engine_names_the_client(uncompiled, engine):
    client = FedAvg(seeded(mlp), optimizer=sgd(0.1), local_steps=1)
    settings = {"sampler": Only(3, 5), "engine": engine, "attack": BadData(), "ids": [3]}
    with pytest.raises(RuntimeError, match="broken") as caught:
        run_rounds(client, shared_out(classes(SIZES)), **settings)
    assert caught.value.__notes__ == ["In round 1, client 3."]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
@pytest.mark.parametrize("hook", ["begin", "end_round"])
def test_note_of_an_error_in_a_hook_names_the_hook(engine, hook):
    notes = collect_notes(hook, Only(3, 5), engine=engine, chunk_size=1)
    assert notes == [f"In round 1, client 3, `{hook}`."]


class FailsToAdapt(Finetuning):
    """Fails in its adaptation."""

    def adaptation_step(self, batch, batch_idx):
        raise RuntimeError("broken")


def test_note_of_an_error_in_the_adaptation_names_the_adaptation():
    client = FailsToAdapt(seeded(mlp), finetune_steps=1)
    federation = Federation(Only(0), seed=0, engine=EngineOptions("one_by_one", chunk_size=1))
    federation.setup(client, shared_out(classes(SIZES), val_fraction=0.3), "fit")
    with pytest.raises(RuntimeError, match="broken") as caught:
        federation.evaluate("val", torch.tensor([4]))
    (note,) = caught.value.__notes__
    assert note == "In the adaptation before an evaluation, client 4, local step 0."


class OnTwoDevices(FedAvg):
    """Makes a tensor elsewhere at the end of a round."""

    def end_round(self, client):
        return super().end_round(client) + torch.ones(1, device="meta")


def test_error_about_two_devices_in_a_hook_has_a_remedy():
    client = OnTwoDevices(seeded(mlp), optimizer=sgd(0.1), local_steps=1)
    federation = Federation(Only(3), seed=0, engine=EngineOptions("one_by_one"))
    federation.setup(client, shared_out(classes(SIZES)), "fit")
    with pytest.raises(RuntimeError, match="device") as caught:
        federation.run_round(0, client.train().configure_optimizers())
    place, remedy = caught.value.__notes__
    assert "`end_round`." in place
    assert "device=x.device" in remedy


def test_note_of_an_error_about_two_devices_has_a_remedy():
    with pytest.raises(RuntimeError, match="device") as caught:
        torch.ones(2) + torch.ones(2, device="meta")
    note_devices(caught.value)
    (note,) = caught.value.__notes__
    assert "such as torch.zeros(3, device=x.device)" in note
    other = torch.OutOfMemoryError("CUDA out of memory")
    note_devices(other)
    assert not hasattr(other, "__notes__")
