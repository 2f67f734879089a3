"""Own batches: a step gets what the data set's collate function makes of its client's samples."""

import copy
import json
import os
import re
import warnings
from dataclasses import dataclass
from itertools import chain

import lightning
import pytest
import torch
from further_cases import mark_others
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from small_federations import seeded
from tables import table_test
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, default_collate
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

import pl_fed
from pl_fed import Adversary, EngineOptions, Federation
from pl_fed.attacks import RandomLabels
from pl_fed.clients import Ditto, FedAvg, FedTilt
from pl_fed.data import FederatedData, LightningData, TorchDataset
from pl_fed.exports import Export, Request
from pl_fed.partitioners import Shards
from pl_fed.samplers import All
from pl_fed.tasks import OwnBatches
from pl_fed.tasks.batch_workers import BatchWorkers

CLIENTS, SAMPLES = 3, 36
pytestmark = pytest.mark.usefixtures("temporary_working_folder")


def fit(module, source, algorithm=FedAvg, rounds=3, folder=None, federation=None, **settings):
    """Fit and test a module on a data source; return the algorithm, its trainer and the metrics."""
    options = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    checkpoint = settings.pop("ckpt_path", None)
    trainer_settings = {"precision": settings.pop("precision", "32-true")}
    trainer_settings |= {"callbacks": settings.pop("callbacks", [])}
    data = FederatedData(source, seed=0, **{"batch_size": 4, **settings})
    federation = federation or Federation(All(), engine=EngineOptions("one_by_one"), seed=0)
    trainer = pl_fed.Trainer(
        federation, max_epochs=rounds, logger=False, run_dir=folder, **options, **trainer_settings
    )
    client = algorithm(module, local_epochs=2)
    trainer.fit(client, data, ckpt_path=checkpoint)
    return client, trainer, trainer.test(client, data, verbose=False)[0]


@dataclass
class Set:
    """A set of points, or several joined ones; it moves by its own method."""

    points: torch.Tensor
    label: torch.Tensor
    place: torch.Tensor | None = None

    def to(self, *arguments, **options):
        return Set(
            *(None if t is None else t.to(*arguments, **options) for t in vars(self).values())
        )


class Sets(Dataset):
    """Sets of one to four points; the label tells on which side their mean is."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        points = torch.randn(1 + index % 4, 2, generator=draw, dtype=torch.float64)
        return Set(points, (points.mean() > 0).long())


def join_sets(sets):
    place = torch.cat([torch.full((len(s.points),), i) for i, s in enumerate(sets)])
    return Set(torch.cat([s.points for s in sets]), torch.stack([s.label for s in sets]), place)


class SetNet(LightningModule):
    """Classifies sets by the mean of their points' features."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 4), nn.Linear(4, 2)
        self.double()

    def forward(self, batch):
        features = self.inner(batch.points).tanh()
        sums = features.new_zeros(len(batch.label), 4).index_add(0, batch.place, features)
        return self.outer(sums)

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self(batch), batch.label)

    def validation_step(self, batch, batch_idx):
        right = (self(batch).argmax(1) == batch.label).double()
        self.log("val_loss", functional.cross_entropy(self(batch), batch.label))
        self.log("val_acc", right.mean())

    def test_step(self, batch, batch_idx):
        self.log("test_acc", (self(batch).argmax(1) == batch.label).double().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


OWNERS = [index % CLIENTS for index in range(SAMPLES)]


def average_by_hand(module, rounds):
    """FedAvg with one step a round on all samples of each client."""
    data, w = Sets(), copy.deepcopy(module.state_dict())
    batches = [join_sets([data[i] for i in range(k, SAMPLES, CLIENTS)]) for k in range(CLIENTS)]
    for _ in range(rounds):
        models = []
        for batch in batches:
            model = copy.deepcopy(module)
            model.load_state_dict(w)
            model.training_step(batch, 0).backward()
            models.append({n: p.detach() - 0.1 * p.grad for n, p in model.named_parameters()})
        w = {name: torch.stack([model[name] for model in models]).mean(0) for name in w}
    return torch.cat([row.flatten() for row in w.values()])


def test_a_dict_of_unnamed_entries_without_rows_is_an_own_batch():
    """It asked for the names of inputs and target, and own batches need none."""

    def join(sets):
        return {"set": [s.points for s in sets], "side": torch.stack([s.label for s in sets])}

    def join_labels(sets):
        return dict.fromkeys(["a", "b"], torch.stack([s.label for s in sets]))

    assert isinstance(
        TorchDataset(Sets(), client=OWNERS, collate_fn=join).load().entries, OwnBatches
    )
    with pytest.raises(ValueError, match="name them by `inputs` and `target`"):
        TorchDataset(Sets(), client=OWNERS, collate_fn=join_labels).load()


@pytest.mark.slow
def test_batches_of_another_type_equal_fedavg_by_hand(tmp_path):
    module = seeded(SetNet)
    expected = average_by_hand(copy.deepcopy(module), 3)
    source = TorchDataset(Sets(), client=OWNERS, collate_fn=join_sets)
    options = {"batch_size": SAMPLES, "val_fraction": 0.0, "test_fraction": 0.0}
    data = FederatedData(source, seed=0, **options)
    trainer = pl_fed.Trainer(
        Federation(All(), model_selection=None), max_epochs=3, logger=False, run_dir=tmp_path,
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    client = FedAvg(module, local_epochs=1)
    trainer.fit(client, data)
    torch.testing.assert_close(client.row("global").data, expected, rtol=0, atol=1e-12)


class Pairs(Dataset):
    """Samples of tensors; they may have noise."""

    def __init__(self, noise=0.0):
        self.noise = noise

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x = torch.randn(3, generator=torch.Generator().manual_seed(index))
        return x + self.noise * torch.randn(3) if self.noise else x, int(x.sum() > 0)


class PairNet(LightningModule):
    """Records the batches of its training steps."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 2))

    def training_step(self, batch, batch_idx):
        BATCHES.append(batch)
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", functional.cross_entropy(self.net(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test_acc", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())


BATCHES = []


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.slow
def test_stream_is_that_of_stacked_tensors(tmp_path, noise):
    """Batches bit for bit; weights but for rounding, as tensors lie elsewhere in memory."""
    streams, outcomes = {}, {}
    for batches in ("own", None):
        BATCHES.clear()
        source = TorchDataset(Pairs(noise), client=OWNERS, batches=batches)
        client, trainer, metrics = fit(seeded(PairNet), source, folder=tmp_path / f"{batches}")
        streams[batches], outcomes[batches] = [*BATCHES], (client.row("global").data, metrics)
    steps = 3 * 2 * sum(-(-size // 4) for size in trainer.datamodule.clients.train.sizes.tolist())
    trained = (streams[kind][-steps - 2 : -2] for kind in ("own", None))  # the last are trials
    for own, stacked in zip(*trained, strict=True):
        assert torch.equal(own[0], stacked[0])
        assert torch.equal(own[1], stacked[1])
    (own, metrics), (stacked, expected) = outcomes["own"], outcomes[None]
    torch.testing.assert_close(own, stacked, rtol=0, atol=1e-6)
    assert metrics == pytest.approx(expected)


@pytest.mark.slow
def test_resumed_run_equals_an_uninterrupted_one(tmp_path):
    source = TorchDataset(Sets(), client=OWNERS, collate_fn=join_sets)
    whole, _, metrics = fit(seeded(SetNet), source, Ditto, 4, tmp_path / "whole")
    _, trainer, _ = fit(seeded(SetNet), source, Ditto, 2, tmp_path / "part")
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed, _, again = fit(
        seeded(SetNet), source, Ditto, 4, tmp_path / "rest", ckpt_path=tmp_path / "two.ckpt"
    )
    assert torch.equal(whole.row("global").data, resumed.row("global").data)
    assert metrics == again


class Counted(Sets):
    def __init__(self):
        self.reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


def test_samples_of_a_step_are_read_once_for_all_its_models():
    data = Counted()
    batches = OwnBatches(data, join_sets)
    rows = batches.rows()[:4]
    first, second = batches.join(rows, None), batches.join(rows, None)
    assert data.reads == 4
    assert first is not second
    assert torch.equal(first.points, second.points)


def double(samples):
    for sample in samples:
        sample.points *= 2
    return join_sets(samples)


@pytest.mark.parametrize(("collate", "factor"), [(list, 1), (double, 2)])
def test_samples_that_a_step_changes_are_whole_for_its_next_model(collate, factor):
    data = Counted()
    batches = OwnBatches(data, collate)
    rows = batches.rows()[1:2]
    for _ in range(3):
        batch = batches.join(rows, None)
        points = batch[0].points if collate is list else batch.points
        assert torch.equal(points, Sets()[1].points * factor)
        points += 1
    assert data.reads == 1


def test_samples_that_are_none_get_a_warning():
    def join(samples):
        return [sample for sample in samples if sample is not None]

    batches = OwnBatches([1.0, None, 3.0], join)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert batches.join(batches.rows()[[0, 2]], None) == [1.0, 3.0]
    with pytest.warns(UserWarning, match=r"list has samples that are None\. If `collate_fn`"):
        assert batches.join(batches.rows()[[0, 1]], None) == [1.0]


def test_samples_without_copies_are_read_for_each_model():
    class Locked(Counted):
        def __getitem__(self, index):
            return [super().__getitem__(index).points, (k for k in range(3))]

    data = Locked()
    batches = OwnBatches(data, list)
    for reads in (1, 2):
        ((points, _),) = batches.join(batches.rows()[1:2], None)
        assert torch.equal(points, Sets()[1].points)
        points += 1
        assert data.reads == reads


def test_data_set_is_not_read_before_steps_ask_for_it():
    data = Counted()
    arrays = TorchDataset(data, client=OWNERS, collate_fn=join_sets, batches="own").load()
    assert data.reads <= 4 * 16  # to find random draws
    assert arrays.inputs.shape == (SAMPLES, 2)


@table_test(
    "labels",
    [
        [index % 2 for index in range(SAMPLES)],
        lambda sample: int(sample["site"]) % 2,
        "kind",
    ],
    ids=["list", "function", "key"],
)
def test_partitioners_read_labels_and_owners_of_samples(labels):
    samples = [{"site": i % CLIENTS, "kind": i % 2, "box": [0.0] * (i % 5)} for i in range(SAMPLES)]
    options = {"collate_fn": list, "batches": "own"}
    if labels == [index % 2 for index in range(SAMPLES)] or labels == "kind":
        data = FederatedData(
            TorchDataset(samples, labels=labels, **options), Shards(1), 2, val_fraction=0.0, seed=0
        )
        train = data.clients.train
        kinds = [{samples[i]["kind"] for i in train.samples(k).tolist()} for k in range(2)]
        assert sorted(map(len, kinds)) == [1, 1]
    for sample in samples:
        sample["name"] = "ab"[sample["kind"]]
    named = TorchDataset(samples, labels="name", **options).load()
    assert named.labels.tolist() == [index % 2 for index in range(SAMPLES)]
    for source in (
        TorchDataset(samples, client="site", labels=labels, **options),
        TorchDataset(samples, client_fn=lambda sample: sample["site"], labels=labels, **options),
    ):
        train = FederatedData(source, val_fraction=0.0, seed=0).clients.train
        for client in range(CLIENTS):
            assert {samples[i]["site"] for i in train.samples(client).tolist()} == {client}


class Predicting(SetNet):
    """Predicts a dict for each set, as a detector does for each image."""

    def predict_step(self, batch, batch_idx):
        return [{"side": output.argmax(), "points": batch.points} for output in self(batch)]


class PredictingNothing(SetNet):
    def predict_step(self, batch, batch_idx):
        return self(batch).argmax(1).sum()[None]


class RefusingBatches(SetNet):
    """Refuses the batch in ``forward``, as Lightning's own ``predict_step`` calls it."""

    def forward(self, batch):
        if self.trainer.predicting:
            raise TypeError("expected points")
        return super().forward(batch)


@pytest.mark.slow
def test_predictions_may_be_a_list_with_an_entry_for_each_sample(tmp_path):
    source = TorchDataset(Sets(), client=OWNERS, collate_fn=join_sets)
    client, trainer, _ = fit(seeded(Predicting), source, rounds=1, folder=tmp_path)
    (tables,) = trainer.predict(client, trainer.datamodule)
    for table in tables:
        samples = table["sample"].tolist()
        assert len(table["prediction"]) == len(samples) > 1
        assert "target" not in table  # only the step knows it
        for sample, prediction in zip(samples, table["prediction"], strict=True):
            single = join_sets([Sets()[sample]])
            side = client.global_model(single).argmax()
            assert prediction["side"] == side
    client = FedAvg(seeded(PredictingNothing))
    with pytest.raises(ValueError, match="Expected `predict_step` to return tensors with a row"):
        trainer.predict(client, trainer.datamodule)
    client = FedAvg(seeded(RefusingBatches))
    with pytest.raises(ValueError, match=r"RefusingBatches to have .* or to take its batches, but"):
        trainer.predict(client, trainer.datamodule)


def test_an_export_has_no_shape_of_batches_of_any_type(tmp_path):
    """It had that of positions of samples, with which a net was traced."""
    source = TorchDataset(Sets(), client=OWNERS, collate_fn=join_sets)
    client, trainer, _ = fit(seeded(SetNet), source, rounds=1, folder=tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    for word in ("torch_export", "state_dict"):
        request = Request(checkpoint, (), True, "personal", (word,), tmp_path / word, (), ())
        export = Export(trainer.federation, request, torch.tensor([], dtype=torch.int64), client)
        if word == "torch_export":
            with pytest.raises(ValueError, match=r"one tensor .* but got batches of any"):
                export.write()
            continue
        manifest = json.loads((export.write() / "manifest.json").read_text())
        assert "shape" not in manifest["inputs"]


class Hooked(SetNet):
    """Notes the batch hooks, which run as in Lightning."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.calls = ["before"]
        return batch

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.calls = [*self.calls, "transfer"]
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        assert isinstance(batch, Set)
        assert self.calls == ["before", "transfer"]
        self.calls = []
        return batch


@pytest.mark.slow
def test_batch_hooks_run_in_lightnings_order(tmp_path):
    module = seeded(Hooked)
    module.calls = []
    source = TorchDataset(Sets(), client=OWNERS, collate_fn=join_sets)
    *_, metrics = fit(module, source, rounds=1, folder=tmp_path)
    assert 0 <= metrics["test/global/acc"] <= 1


@pytest.mark.slow
def test_batches_take_the_type_of_the_module(tmp_path):
    source = TorchDataset(Pairs(), client=OWNERS, batches="own")
    BATCHES.clear()
    fit(seeded(PairNet), source, rounds=1, folder=tmp_path, precision="64-true")
    assert {batch[0].dtype for batch in BATCHES} == {torch.float64}
    assert {batch[1].dtype for batch in BATCHES} == {torch.int64}


class TransferringModule(LightningDataModule):
    """Has the batch hooks of Lightning; those of a data module replace the module's."""

    def train_dataloader(self):
        return DataLoader(Sets(), batch_size=4, collate_fn=join_sets, num_workers=2)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return Set(2 * batch.points, batch.label, batch.place)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return Set(batch.points + 1, batch.label, batch.place)


class Recording(SetNet):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        raise AssertionError("the data module's hook replaces this one")

    def forward(self, batch):
        SEEN.append(batch)
        return super().forward(batch)


SEEN = []


@pytest.mark.slow
def test_batch_hooks_of_a_data_module_replace_those_of_the_module(tmp_path):
    source = LightningData(TransferringModule(), client=OWNERS, num_workers=0)
    SEEN.clear()
    _, trainer, _ = fit(seeded(Recording), source, rounds=1, folder=tmp_path)
    batch = SEEN[-1]  # of the test
    data, test = Sets(), trainer.datamodule.clients.test
    own = join_sets([data[i] for i in test.samples(CLIENTS - 1).tolist()[-len(batch.label) :]])
    assert torch.equal(batch.points, 2 * own.points + 1)


class Parts(LightningDataModule):
    """Each part has a collate function of its own, as the loaders of PyTorch Geometric have."""

    def build(self, seed):
        return DataLoader(Sets(), 4, collate_fn=lambda sets: (seed, join_sets(sets)))

    def train_dataloader(self):
        return self.build("train")

    def val_dataloader(self):
        return self.build("val")

    def test_dataloader(self):
        return self.build("test")


def test_pooled_samples_with_several_collate_functions_are_reported():
    class Others(Parts):
        def test_dataloader(self):
            return DataLoader(Sets(), 4, collate_fn=join_sets)

    def load(module, **settings):
        return FederatedData(LightningData(module, client=OWNERS * 3), **settings).clients

    with pytest.warns(UserWarning, match="parts of LightningData have several `collate_fn`, and"):
        load(Others(), split="own")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(Others())
        load(Parts(), split="own")


class Parted(SetNet):
    """Notes which function has joined each batch."""

    def training_step(self, batch, batch_idx):
        assert batch[0] == "train"
        return super().training_step(batch[1], batch_idx)

    def validation_step(self, batch, batch_idx):
        assert batch[0] == "val"
        super().validation_step(batch[1], batch_idx)

    def test_step(self, batch, batch_idx):
        assert batch[0] == "test"
        super().test_step(batch[1], batch_idx)


@pytest.mark.slow
def test_each_part_is_joined_by_its_own_function(tmp_path):
    source = LightningData(Parts(), client=[*OWNERS] * 3)
    *_, metrics = fit(seeded(Parted), source, rounds=1, folder=tmp_path)
    assert 0 <= metrics["test/global/acc"] <= 1


class SetModule(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Sets(), batch_size=4, collate_fn=join_sets)

    def test_dataloader(self):
        return DataLoader(Sets(), batch_size=4, collate_fn=join_sets)


@pytest.mark.slow
def test_data_module_with_batches_of_another_type(tmp_path):
    source = LightningData(SetModule(), client=[*OWNERS, *OWNERS])
    _, trainer, metrics = fit(seeded(SetNet), source, rounds=1, folder=tmp_path)
    assert trainer.datamodule.clients.own_batches is not None
    assert 0 <= metrics["test/global/acc"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["stacked", "one_by_one_compiled", "auto"])
def test_engines_that_need_tensors_say_so(engine):
    source = TorchDataset(Sets(), client=OWNERS, collate_fn=join_sets)
    federation = Federation(All(), engine=EngineOptions(engine), seed=0)
    with warnings.catch_warnings(record=True) as caught:
        client, *_ = fit(seeded(SetNet), source, rounds=1, federation=federation)
    told = [w for w in caught if re.search("cannot be (stacked|compiled)", str(w.message))]
    assert len(told) == (engine != "auto")
    expected, *_ = fit(seeded(SetNet), source, rounds=1)
    torch.testing.assert_close(client.row("global").data, expected.row("global").data)


@table_test(
    "changes, match",
    [
        ({"module": nn.Linear(2, 2)}, "Expected argument `collate_fn` to return tensors"),
        ({"augment": [nn.Identity()]}, "Expected argument `augment` to be left out for inputs"),
        ({"normalize": "channel"}, "Expected argument `normalize` to be left out for inputs"),
        ({"algorithm": FedTilt}, "FedTilt tilts sample losses"),
        ({"attack": RandomLabels()}, "tensors for the attack RandomLabels"),
        ({"metrics": [MulticlassAccuracy(2)]}, "tensors for `federation.metrics`"),
    ],
)
def test_what_needs_tensors_is_refused_by_name(changes, match):
    changes = dict(changes)
    module, algorithm = changes.pop("module", SetNet()), changes.pop("algorithm", FedAvg)
    attack = changes.pop("attack", None)
    adversary = Adversary(attack, fraction=0.4) if attack else Adversary()
    federation = Federation(All(), adversary=adversary, metrics=changes.pop("metrics", None))
    source = TorchDataset(Sets(), client=OWNERS, collate_fn=join_sets)
    with pytest.raises((ValueError, TypeError), match=match):
        fit(module, source, algorithm, 1, None, federation, **changes)


@table_test(
    "arguments, match",
    [
        ({"labels": [0, 1]}, "to give an integer, or a text, for each of 36"),
        ({"labels": "kind"}, "Expected argument `labels` to be the key or position"),
        ({"client": [0, 1]}, "Expected argument `client` to give an owner for each of 36"),
        ({"batches": "mine"}, "Expected argument `batches`"),
        ({"collate_fn": default_collate}, "collate_fn"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, match):
    with pytest.raises((ValueError, TypeError), match=match):
        TorchDataset(
            Sets(), **{"client": OWNERS, "collate_fn": join_sets, "batches": "own", **arguments}
        ).load()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "noise"), mark_others([(FedAvg, 0.0), (Ditto, 0.1)], (FedAvg, 0.0))
)
def test_workers_that_read_ahead_change_no_number(tmp_path, algorithm, noise, monkeypatch):
    taken, take = [], BatchWorkers.take

    def count(workers, samples):
        batch = take(workers, samples)
        taken.append(batch is not None)
        return batch

    monkeypatch.setattr(BatchWorkers, "take", count)
    outcomes = {}
    for number in (0, 2):
        source = TorchDataset(
            Pairs(noise), client=OWNERS, batches="own", num_workers=number, redraw=noise > 0
        )
        client, trainer, metrics = fit(
            seeded(PairNet), source, algorithm, 2, tmp_path / f"{number}"
        )
        outcomes[number] = client.row("global").data, metrics
        assert number or not any(taken)
    assert torch.equal(outcomes[0][0], outcomes[2][0])
    assert outcomes[0][1] == outcomes[2][1]
    data = trainer.datamodule.clients
    train, val, test = (
        sum(-(-size // 4) for size in part.sizes.tolist())
        for part in (data.train, data.val, data.test)
    )
    models = len(client.trained)
    assert sum(taken) >= models * (2 * 2 * train + 2 * val + test), "all but the trials"


@pytest.mark.slow
def test_workers_end_with_a_fit_also_after_an_error(tmp_path):
    source = TorchDataset(Pairs(0.0), client=OWNERS, batches="own", num_workers=1)
    pools, start = [], BatchWorkers._start_pool

    def note(workers):
        pools.append(start(workers))
        return pools[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BatchWorkers, "_start_pool", note)
        fit(seeded(PairNet), source, FedAvg, 1, tmp_path)
        assert len({*map(id, pools)}) == 2, "one for the fit, and one for the test"
        error = LambdaCallback(on_train_batch_end=lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fit(seeded(PairNet), source, FedAvg, 1, tmp_path / "error", callbacks=[error])
    assert len({*map(id, pools)}) == 3
    for pool in pools:
        with pytest.raises(RuntimeError, match="after shutdown"):
            pool.submit(int)


def test_workers_are_those_of_the_training_dataloader():
    loaded = LightningData(TransferringModule(), client=OWNERS).load()
    assert loaded.entries._workers.num_workers == 2
    loaded = LightningData(TransferringModule(), client=OWNERS, num_workers=1).load()
    assert loaded.entries._workers.num_workers == 1


class Fragile(Sets):
    """A sample cannot be read."""

    def __getitem__(self, index):
        if index == 3:
            raise OSError("no such image")
        return super().__getitem__(index)


class Deadly(Sets):
    """A sample ends its process."""

    def __getitem__(self, index):
        if index == 3:
            os._exit(1)
        return super().__getitem__(index)


def read_ahead(batches, positions):
    rows = batches.rows()
    batches.read_ahead(lambda: (rows[[position]] for position in positions))
    return [batches.join(rows[[position]], None).label for position in positions]


@pytest.mark.slow
def test_error_of_a_worker_is_that_of_the_data_set():
    batches = OwnBatches(Fragile(), join_sets, num_workers=1)
    with pytest.raises(OSError, match="no such image") as caught:
        read_ahead(batches, range(6))
    assert caught.value.__notes__ == ["pl_fed read samples [3] of Fragile."]
    assert len(read_ahead(batches, [4, 5])) == 2, "workers go on"


@pytest.mark.slow
def test_lost_worker_has_a_sentence():
    batches = OwnBatches(Deadly(), join_sets, num_workers=1)
    with pytest.raises(RuntimeError, match="num_workers` to go on but one has ended"):
        read_ahead(batches, range(6))


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["begin", "take"])
def test_worker_lost_before_the_next_batch_is_asked_for_has_the_sentence(calls):
    batches = OwnBatches(Sets(), join_sets, num_workers=1)
    rows = batches.rows()
    batches.read_ahead(lambda: iter(rows[:6].split(1)))
    batches.join(rows[[0]], None)
    pool = batches._workers._pool
    (worker,) = pool._processes.values()
    worker.kill()
    pool._executor_manager_thread.join()  # the pool knows
    reads = {
        "begin": lambda: read_ahead(batches, range(6)),
        "take": lambda: [batches.join(rows[[position]], None) for position in range(1, 6)],
    }
    with pytest.raises(RuntimeError, match="num_workers` to go on but one has ended"):
        reads[calls]()
    assert len(read_ahead(batches, range(2))) == 2, "new workers"


@pytest.mark.slow
def test_batch_in_another_order_is_read_here():
    batches, rows = OwnBatches(Sets(), join_sets, num_workers=1), OwnBatches(Sets(), list).rows()
    batches.read_ahead(lambda: iter(rows[:6].split(1)))
    for position in (0, 4, 1, 2):
        points = batches.join(rows[[position]], None).points
        assert torch.equal(points, Sets()[position].points)


class WrongStep(SetNet):
    def training_step(self, batch, batch_idx):
        return batch.mask.sum()


@table_test(
    "module, data, match",
    [
        (
            WrongStep,
            Sets,
            r"has no attribute 'mask' \(test_own_batches.py:\d+: return batch.mask.sum",
        ),
        (
            SetNet,
            Fragile,
            r"OSError: no such image \(sample 3; test_own_batches.py:\d+: raise OSErr",
        ),
    ],
)
def test_errors_before_training_name_the_sample_and_the_line(tmp_path, module, data, match):
    source = TorchDataset(
        data(), client_fn=lambda sample: int(sample.label), collate_fn=join_sets, batches="own"
    )
    with pytest.raises(ValueError, match=match):
        fit(module(), source, rounds=1, folder=tmp_path)


@table_test("step, samples", [("training_step", 7), ("validation_step", 8)])
def test_errors_of_a_step_before_training_name_the_client(tmp_path, step, samples):
    module = type("Wrong", (SetNet,), {step: WrongStep.training_step})
    source = TorchDataset(
        Sets(), client_fn=lambda sample: int(sample.label), collate_fn=join_sets, batches="own"
    )
    with pytest.raises(ValueError, match=step) as caught:
        fit(module(), source, rounds=1, folder=tmp_path)
    (note,) = caught.value.__notes__
    positions, clients = re.fullmatch(
        r"In the trial before the first round, samples \[(.*)\] of clients? (.*)\.", note
    ).groups()
    positions = [int(position) for position in positions.split(", ")]
    assert len(positions) <= samples
    labels = {int(Sets()[position].label) for position in positions}
    assert clients == ", ".join(map(str, sorted(labels)))


class Adaptive(SetNet):
    def __init__(self, momentum=None):
        super().__init__()
        self.momentum = momentum

    def configure_optimizers(self):
        if self.momentum is None:
            return torch.optim.Adam(self.parameters(), lr=0.05)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)


@table_test("momentum, precision", [(None, 64), (0.9, 64), (None, 32), (0.9, 32)])
@pytest.mark.slow
def test_one_client_has_the_bits_of_a_lightning_fit(tmp_path, momentum, precision):
    """Three rounds of an epoch, beside a fit on the same minibatches."""
    steps = []

    def join(sets):
        steps.append([sample.index for sample in sets])
        return cast(sets)

    def cast(sets):
        joined = join_sets(sets)
        joined.points = joined.points.to(torch.float64 if precision == 64 else torch.float32)
        return joined

    class Indexed(Sets):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            sample.index = index
            return sample

    net = seeded(lambda: Adaptive(momentum))
    net = net if precision == 64 else net.float()
    plain = copy.deepcopy(net)
    source = TorchDataset(Indexed(), client=[0] * SAMPLES, collate_fn=join, batches="own")
    data = FederatedData(source, seed=0, batch_size=4, val_fraction=0.0, test_fraction=0.0)
    engine = EngineOptions("one_by_one", keep_optimizer_state=True)
    options = {
        "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False,
        "logger": False, "limit_val_batches": 0,
    }  # fmt: skip
    client = FedAvg(net, local_epochs=1)
    pl_fed.Trainer(
        Federation(engine=engine, model_selection=None),
        max_epochs=3,
        run_dir=tmp_path / f"{momentum} {precision}",
        precision=f"{precision}-true",
        **options,
    ).fit(client, data)
    loader = DataLoader(Sets(), batch_sampler=steps[-27:], collate_fn=cast)
    lightning.Trainer(
        max_epochs=1, enable_checkpointing=False, default_root_dir=tmp_path, **options
    ).fit(plain, loader)
    for name, parameter in plain.named_parameters():
        assert torch.equal(client.row("global").tensors[name], parameter.detach())
    assert sorted(chain(*steps[-27:-18])) == [*range(SAMPLES)]


class Dictionary(Metric):
    """Counts points; a dict of results, as of a detector's mean average precision."""

    higher_is_better = False

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, sets):
        self.total += sum(len(points) for points in sets)

    def compute(self):
        return {"points": self.total, "half": self.total / 2}


class Counting(SetNet):
    """Logs entries of a metric with lists as inputs."""

    def __init__(self):
        super().__init__()
        self.count = Dictionary()

    def test_step(self, batch, batch_idx):
        self.count.update([batch.points[batch.place == i] for i in range(len(batch.label))])

    def on_test_epoch_end(self):
        results = self.count.compute()
        self.log("test_points", results["points"])
        self.log("test_half", results["half"] * 1)


@pytest.mark.slow
def test_entry_of_a_metric_s_results_has_its_direction(tmp_path):
    source = TorchDataset(Sets(), client=OWNERS, collate_fn=join_sets)
    _, trainer, metrics = fit(seeded(Counting), source, rounds=1, folder=tmp_path)
    test = trainer.datamodule.clients.test
    counts = [sum(len(Sets()[i].points) for i in test.samples(k).tolist()) for k in range(CLIENTS)]
    assert metrics["test/global/points"] == pytest.approx(sum(counts) / CLIENTS)
    assert metrics["test/global/points_worst10"] == max(counts), "lower is better"
    assert "test/global/half_worst10" not in metrics, "computed from an entry: unknown"


@pytest.mark.slow
def test_mean_average_precision_of_clients(tmp_path):
    pytest.importorskip("pycocotools")
    from torchmetrics.detection import MeanAveragePrecision

    class Boxes(Dataset):
        def __len__(self):
            return SAMPLES

        def __getitem__(self, index):
            corner = torch.rand(1 + index % 3, 2, generator=torch.Generator().manual_seed(index))
            return torch.cat([corner, corner + 1], 1)

    class Detector(LightningModule):
        """Finds the boxes of a client's samples; those of others are moved."""

        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(2))
            self.map = MeanAveragePrecision()

        def training_step(self, batch, batch_idx):
            return sum((boxes[:, :2] - self.shift).square().mean() for boxes in batch)

        def test_step(self, batch, batch_idx):
            labels = [torch.zeros(len(boxes), dtype=torch.int64) for boxes in batch]
            found = [
                {"boxes": boxes, "scores": torch.ones(len(boxes)), "labels": label}
                for boxes, label in zip(batch, labels)
            ]
            true = [{"boxes": boxes, "labels": label} for boxes, label in zip(batch, labels)]
            self.map.update(found, true)

        def on_test_epoch_end(self):
            results = self.map.compute()
            self.log_dict({"test_map": results["map"], "test_map_75": results["map_75"]})

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    source = TorchDataset(Boxes(), client=OWNERS, collate_fn=list)
    *_, metrics = fit(seeded(Detector), source, rounds=1, folder=tmp_path)
    for name in ("map", "map_75"):
        for suffix in ("", "_worst10", "_best10"):
            assert metrics[f"test/global/{name}{suffix}"] == pytest.approx(1)
        assert metrics[f"test/global/{name}_std"] == pytest.approx(0, abs=1e-6)


class Drawn(Dataset):
    """A user with a drawn item in training, and with a list of items in other parts."""

    def __init__(self, ranks):
        self.ranks = ranks

    def __len__(self):
        return 6

    def __getitem__(self, index):
        items = {"items": torch.arange(4)} if self.ranks else {"item": int(torch.randint(9, ()))}
        return {"user": index % 3, **items}


def test_parts_of_several_structures_may_be_drawn_at_random():
    arguments = {"client": "user", "val": Drawn(True), "test": Drawn(True)}
    batches = TorchDataset(Drawn(False), **arguments, batches="own").load().entries
    rows = batches.rows()
    assert [*batches.join(rows[:2], None)] == ["user", "item"]
    assert batches.join(rows[6:8], None)["items"].shape == (2, 4)
    with pytest.raises(ValueError, match=r"without 'item' .* the same keys, or set `batches` to"):
        TorchDataset(Drawn(False), **arguments, target="user").load()
