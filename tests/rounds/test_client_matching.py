"""A checkpoint continues with other clients: matched by owners, new, missing, and grown."""

import copy

import pytest
import torch
from further_cases import mark_further
from small_federations import Given, Only, classes, mlp, sections, seeded, sgd

import pl_fed
from pl_fed import Federation
from pl_fed.aggregators import AFL, FoolsGold, Mean
from pl_fed.clients import FLAME, Ditto, FedAvg, FedRep, Finetuning, Mocha, Scaffold
from pl_fed.data import FederatedData
from pl_fed.data.source import Arrays
from pl_fed.partitioners import IID
from pl_fed.privacy import DifferentialPrivacy
from pl_fed.rounds.client_matching import ClientMatching, ClientRecords
from pl_fed.samplers import All, Poisson, Uniform

NAMES = ["ann", "bob", "cy", "dan", "eve", "fay"]
SIZES = [12, 9, 15, 11, 14, 10]
FULL = classes(SIZES)
PLAIN = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def data_of(*names, batch_size=100, fewer=None, **settings):
    """Return the data of some owners, in their order; of some, only the first samples."""
    pieces, owners = [], []
    for name in names:
        own = (FULL.client == NAMES.index(name)).nonzero().flatten()
        own = own[: (fewer or {}).get(name, len(own))]
        pieces.append(own)
        owners += [len(pieces) - 1] * len(own)
    index = torch.cat(pieces)
    arrays = Arrays(
        FULL.inputs[index],
        FULL.targets[index],
        torch.tensor(owners),
        num_classes=3,
        names=list(names),
    )
    settings = {"test_fraction": 0.3, "val_fraction": 0.2, "seed": 0, **settings}
    return FederatedData(Given(arrays), batch_size=batch_size, **settings)


def make(kind=Ditto, **arguments):
    return kind(seeded(mlp), optimizer=sgd(0.1), **arguments)


def fit(folder, client, data, rounds, ckpt_path=None, sampler=None, precision="64-true", **more):
    federation = Federation(
        sampler or All(),
        match_clients=True,
        **sections(**{"seed": 0, "engine": "one_by_one", **more}),
    )
    trainer = pl_fed.Trainer(
        federation, run_dir=folder, max_epochs=rounds, precision=precision, **PLAIN
    )
    trainer.fit(client, data, ckpt_path=ckpt_path)
    return trainer, folder / "checkpoints" / "last.ckpt"


def rows(trainer, name="personal"):
    store = trainer.federation.store
    return store.read(name, torch.arange(store.num_clients))


def outcome(trainer, client, data):
    """Return all that there is at the end: metrics, models and states."""
    (metrics,) = trainer.test(client, data, verbose=False)
    states = {name: rows(trainer, name) for name in trainer.federation.store.defaults}
    return {**metrics, **states, "w": client.row("global").data.clone()}


def assert_equal(first, second, tolerance=0.0):
    assert first.keys() == second.keys()
    for name in first:
        one, other = (torch.as_tensor(each[name]) for each in (first, second))
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance, msg=name)


@pytest.mark.slow
def test_matched_clients_keep_their_rows_and_new_ones_get_the_global_model(tmp_path):
    """The order of the owners is another one, too: names match, and not numbers."""
    before, last = fit(tmp_path / "a", make(), data_of("bob", "cy", "ann"), 2)
    kept, client = rows(before), make()
    w = before.lightning_module.row("global").data.clone()
    with pytest.warns(UserWarning, match="divided anew"):
        after, _ = fit(tmp_path / "b", client, data_of("ann", "dan", "bob", "cy"), 2, last)
    assert torch.equal(rows(after), torch.stack([kept[2], w, kept[0], kept[1]]))
    assert after.federation.participation.tolist() == [2, 0, 2, 2]
    assert torch.equal(client.row("global").data, w)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Ditto, FedRep, Finetuning])
def test_evaluation_of_new_clients_by_hand(tmp_path, kind):
    """A new client's personal model is the global one, or what the algorithm makes of it."""
    precision = "32-true"
    data = data_of("ann", "bob", "cy", stable_cut=True)
    _, last = fit(tmp_path / "a", make(kind), data, 2, precision=precision)
    client, data = make(kind), data_of("ann", "bob", "cy", "dan", stable_cut=True)
    federation = Federation(All(), seed=0, match_clients=True)
    trainer = pl_fed.Trainer(federation, run_dir=tmp_path / "b", precision=precision, **PLAIN)
    trainer.test(client, data, last, verbose=False)
    personal, net = federation.model_of(3), copy.deepcopy(client.global_model)
    if kind is Finetuning:
        samples = federation.data.training_samples(3)
        loss = torch.nn.functional.cross_entropy(net(samples.inputs), samples.targets)
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
    for parameter, expected in zip(personal.parameters(), net.parameters()):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", mark_further([Ditto, Scaffold], [Scaffold]))
def test_continued_run_resumes_bit_by_bit(tmp_path, kind):
    """Stopped and resumed after the change of clients, a run has the bits of one without a stop."""
    few, more = (
        (lambda: data_of(*NAMES[:4], batch_size=4, stable_cut=True)),
        (lambda: data_of(*NAMES[1:], batch_size=4, stable_cut=True)),
    )
    _, last = fit(tmp_path / "a", make(kind), few(), 2, sampler=Uniform(3))
    client = make(kind)
    whole, _ = fit(tmp_path / "whole", client, more(), 5, last, sampler=Uniform(3))
    expected = outcome(whole, client, more())
    _, stopped = fit(tmp_path / "b", make(kind), more(), 3, last, sampler=Uniform(3))
    client = make(kind)
    resumed, _ = fit(tmp_path / "c", client, more(), 5, stopped, sampler=Uniform(3))
    assert_equal(expected, outcome(resumed, client, more()))
    for engine in ("stacked", "one_by_one"):
        client = make(kind)
        other, _ = fit(
            tmp_path / engine, client, more(), 5, last, sampler=Uniform(3), engine=engine
        )
        assert_equal(expected, outcome(other, client, more()), 1e-10)


@pytest.mark.slow
def test_same_clients_resume_as_without_matching(tmp_path):
    _, last = fit(tmp_path / "a", make(), data_of(*NAMES), 2)
    client = make()
    matched = outcome(
        fit(tmp_path / "b", client, data_of(*NAMES), 4, last)[0], client, data_of(*NAMES)
    )
    client = make()
    whole = outcome(fit(tmp_path / "c", client, data_of(*NAMES), 4)[0], client, data_of(*NAMES))
    assert_equal(matched, whole)


@pytest.mark.slow
def test_missing_clients_stay_in_checkpoints_and_return(tmp_path):
    """Two leave; one of them is missing in two runs and a plain resume, and has its row again."""
    arguments = {"stable_cut": True}
    first, last = fit(tmp_path / "a", make(), data_of(*NAMES[:4], **arguments), 2)
    kept = rows(first)
    _, last = fit(tmp_path / "b", make(), data_of("ann", "cy", **arguments), 3, last)
    _, last = fit(tmp_path / "c", make(), data_of("ann", "cy", **arguments), 4, last)
    third, _ = fit(tmp_path / "d", make(), data_of("ann", "cy", "bob", **arguments), 4, last)
    assert torch.equal(rows(third)[2], kept[1])
    assert third.federation.participation.tolist() == [4, 4, 2]
    only_ann = {"sampler": Only(0)}
    data = data_of("ann", "cy", "bob", **arguments)
    _, last = fit(tmp_path / "e", make(), data, 5, last, **only_ann)
    fourth, _ = fit(tmp_path / "f", make(), data_of(*NAMES[:4], **arguments), 5, last)
    assert torch.equal(rows(fourth)[[1, 3]], kept[[1, 3]])
    assert "absent" not in fourth.federation.state_dict()


@pytest.mark.slow
def test_mean_of_states_is_that_of_present_clients(tmp_path):
    """SCAFFOLD's c is the mean of the clients' c_k, also after some come, go and return."""
    arguments = {"stable_cut": True}
    client = make(Scaffold)
    last = None
    for number, names in enumerate((NAMES[:4], NAMES[2:5], NAMES)):
        data = data_of(*names, **arguments)
        trainer, path = fit(tmp_path / f"{number}", make(Scaffold), data, 2 * number + 2, last)
        control = trainer.federation.server_states["control"]
        torch.testing.assert_close(
            control, rows(trainer, "own_control").mean(0), rtol=0, atol=1e-12
        )
        last = path
    trainer, _ = fit(tmp_path / "end", client, data_of("ann", "fay", **arguments), 6, last)
    control = trainer.federation.server_states["control"]
    torch.testing.assert_close(control, rows(trainer, "own_control").mean(0), rtol=0, atol=1e-12)
    assert control.abs().max() > 0


@pytest.mark.slow
def test_global_model_stays_the_mean_of_all_clients_rows(tmp_path):
    """FLAME's w is the mean of all w_i + π_i / ρ; a new client adds w itself."""
    arguments = {"stable_cut": True}
    _, last = fit(tmp_path / "a", make(FLAME), data_of(*NAMES[:3], **arguments), 2)
    client = make(FLAME)
    trainer, _ = fit(
        tmp_path / "b", client, data_of(*NAMES[:5], **arguments), 5, last, sampler=Uniform(2)
    )
    u = rows(trainer, "local") + rows(trainer, "dual") / client.rho
    torch.testing.assert_close(client.row("global").data, u.mean(0), rtol=0, atol=1e-12)
    match = r"Expected data with all clients of the checkpoint for FLAME .* 2 \(ann, cy\)"
    with pytest.raises(ValueError, match=match):
        fit(tmp_path / "c", make(FLAME), data_of("bob", "dan", **arguments), 5, last)


@pytest.mark.slow
def test_other_clients_are_refused_where_nothing_matches(tmp_path):
    data = data_of("ann", "bob", "cy")
    _, last = fit(tmp_path / "a", make(), data, 1)
    trainer = pl_fed.Trainer(
        Federation(All(), seed=0), run_dir=tmp_path / "b", precision="64-true", **PLAIN
    )
    more = data_of(*NAMES[:4])
    with pytest.raises(ValueError, match=r"number of clients 4 but got one with 3\. To continue"):
        trainer.fit(make(), more, ckpt_path=last)
    refused = [
        (make(), data_of("dan", "eve"), {}, "with none of them: owners are, for example, ann"),
        (
            make(FedAvg),
            data_of("ann", "dan"),
            {},
            "Expected a checkpoint with the algorithm FedAvg",
        ),
        (
            Ditto(seeded(lambda: mlp(7)), optimizer=sgd(0.1)),
            data_of("ann", "dan"),
            {},
            "Expected a checkpoint with the net",
        ),
        (make(), data_of("ann", "dan"), {"seed": 1}, "Expected a checkpoint with the seed 1"),
    ]
    for client, other, settings, match in refused:
        with pytest.raises(ValueError, match=match):
            fit(tmp_path / "c", client, other, 2, last, **settings)
    _, last = fit(tmp_path / "m", make(Mocha), data, 1)
    match = r"same clients for Mocha but got one with 0 others and without 1 \(dan\), and"
    with pytest.raises(ValueError, match=match):
        fit(tmp_path / "n", make(Mocha), data_of(*NAMES[:4]), 2, last)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "aggregator"), [(Mocha, Mean), (FedAvg, AFL), (FedAvg, FoolsGold)]
)
def test_other_ids_are_refused_where_the_server_knows_clients_by_id(tmp_path, kind, aggregator):
    _, last = fit(tmp_path / "a", make(kind), data_of("ann", "bob"), 1, aggregator=aggregator())
    with pytest.raises(ValueError, match=r"other ids of 2 \(bob, ann\)"):
        fit(tmp_path / "b", make(kind), data_of("bob", "ann"), 2, last, aggregator=aggregator())
    if kind is FedAvg:
        first, behind = data_of("cy", "ann", "bob"), data_of("ann", "bob", "cy")
        with pytest.raises(ValueError, match=r"other ids of 3 \(cy, ann, bob\)"):
            fit(tmp_path / "c", make(kind), first, 2, last, aggregator=aggregator())
        fit(tmp_path / "d", make(kind), behind, 2, last, aggregator=aggregator())
        trainer = pl_fed.Trainer(
            Federation(All(), aggregator=aggregator(), seed=0, match_clients=True),
            run_dir=tmp_path / "e",
            precision="64-true",
            **PLAIN,
        )
        trainer.test(make(kind), first, last, verbose=False)  # merges no uploads


@pytest.mark.slow
def test_privacy_refuses_other_clients(tmp_path):
    private = {
        "sampler": Poisson(0.5),
        "privacy": DifferentialPrivacy(noise_multiplier=1.0, delta=1e-3, clip_norm=1.0),
    }
    data = data_of(*NAMES[:3])
    _, last = fit(tmp_path / "a", make(FedAvg), data, 2, precision="32-true", **private)
    more = data_of(*NAMES[:4])
    with pytest.raises(ValueError, match=r"same clients and samples with `federation\.privacy`"):
        fit(tmp_path / "b", make(FedAvg), more, 2, last, precision="32-true", **private)


def records(owners=(), digests=(), sizes=None, keeps_parts=True):
    digests = torch.tensor(digests or [0] * len(owners))
    sizes = torch.ones_like(digests) if sizes is None else torch.tensor(sizes)
    return ClientRecords([[name] for name in owners], digests, sizes, keeps_parts)


def test_records_survive_a_checkpoint():
    before = records(["a\0b", "ü", "-1"], [1, 2, 3])
    again = ClientRecords.from_state(before.state_dict())
    assert again.owners == before.owners
    assert torch.equal(again.digests, before.digests)
    with pytest.raises(ValueError, match="complete records of its clients but got KeyError"):
        ClientRecords.from_state({})


def test_clients_without_owners_match_by_id_only_with_equal_samples():
    matching = ClientMatching.find(records(digests=[5, 6, 7]), records(digests=[5, 6]))
    assert matching.places.tolist() == [0, 1]
    assert matching.missing.tolist() == [2]
    more = ClientMatching.find(records(digests=[5]), records(digests=[5, 6]))
    assert more.new.tolist() == [1]
    assert (
        "matched by id: 1. New clients, which start from the global model: 1 (1)" in more.describe()
    )
    with pytest.raises(ValueError, match=r"other samples of client 1: .* would mix up the clients"):
        ClientMatching.find(records(digests=[5, 6]), records(digests=[5, 7, 8]))
    with pytest.raises(ValueError, match="without owners"):
        ClientMatching.find(records(digests=[5, 6]), records(["a", "b"]))
    with pytest.raises(ValueError, match="several clients of a in the data"):
        ClientMatching.find(records(["a"]), records(["a", "a"]))


def test_sentence_says_who_came_left_and_grew():
    saved = records(["a", "b", "c"], [1, 2, 3], [4, 4, 4])
    present = records(["b", "c", "d"], [2, 9, 9], [4, 7, 5])
    matching = ClientMatching.find(saved, present)
    assert matching.describe() == (
        "Clients of the checkpoint, matched by owner: 2. New clients, which start from the global"
        " model: 1 (d). Missing clients, whose states stay in later checkpoints: 1 (a). Matched"
        " clients with other samples or parts: 1 (c), with +3 samples."
    )
    assert matching.warn_of_parts() is None
    redrawn = ClientMatching.find(records(["c"], [3], [4], keeps_parts=False), present)
    assert "divided anew" in redrawn.warn_of_parts()


def test_partitions_by_labels_of_other_numbers_of_clients_mix_up_clients():
    arrays = Arrays(FULL.inputs, FULL.targets, num_classes=3)
    data = [FederatedData(Given(arrays), IID(), number, seed=0).clients for number in (4, 5)]
    with pytest.raises(ValueError, match="would mix up the clients"):
        ClientMatching.find(*map(ClientRecords.collect, data))
    again = FederatedData(Given(arrays), IID(), 4, seed=0).clients
    matching = ClientMatching.find(ClientRecords.collect(data[0]), ClientRecords.collect(again))
    assert not len(matching.changed)


def test_records_do_not_depend_on_other_clients():
    alone, beside = (
        ClientRecords.collect(data_of(*names, stable_cut=True).clients)
        for names in (["cy"], ["ann", "cy"])
    )
    assert torch.equal(alone.digests, beside.digests[1:])
    cut_by_number = ClientRecords.collect(data_of("ann", "cy").clients)
    assert not torch.equal(alone.digests, cut_by_number.digests[1:])
