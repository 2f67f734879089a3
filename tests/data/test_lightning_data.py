"""The data sets of a LightningDataModule, as the parts of a federation."""

import logging
import sys
import warnings

import pytest
import torch
from lightning import LightningDataModule, LightningModule
from tables import table_test
from test_torch_dataset import Augmented, Pairs, Stream, Texts, collate
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import pl_fed
from pl_fed.clients import FedAvg
from pl_fed.data import FederatedData, LightningData
from pl_fed.partitioners import IID, Dirichlet
from pl_fed.samplers import All


class Module(LightningDataModule):
    """As they are written: attributes in setup, by stage; a random split."""

    def __init__(self, **loader):
        super().__init__()
        self.loader = {"batch_size": 8, **loader}
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(stage)
        if stage == "fit":
            draw = torch.Generator().manual_seed(0)
            self.train, self.val = random_split(Pairs(100, 1), [0.8, 0.2], draw)
        if stage == "test":
            self.test = Pairs(30, 2)

    def train_dataloader(self):
        return DataLoader(self.train, shuffle=True, drop_last=True, **self.loader)

    def val_dataloader(self):
        return DataLoader(self.val, **self.loader)

    def test_dataloader(self):
        return DataLoader(self.test, **self.loader)


def test_dataloaders_are_the_official_parts():
    module = Module()
    source = LightningData(module, client="sites")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrays = source.load()
    assert module.calls == ["prepare_data", "fit", "test"]
    assert arrays.split.tolist() == [0] * 80 + [1] * 20 + [2] * 30
    train, test = Pairs(100, 1), Pairs(30, 2)
    index = [*module.train.indices, *module.val.indices]
    assert torch.equal(arrays.inputs, torch.cat([train.x[index], test.x]))
    assert torch.equal(arrays.targets, torch.cat([train.y[index], test.y]))
    owners = [train.sites[k] for k in index] + test.sites
    assert [arrays.owner_name(int(id)) for id in arrays.client] == owners
    clients = FederatedData(source, seed=0).clients  # the official split by default
    assert clients.test.sizes.sum() == 30
    assert clients.num_clients == 7


@pytest.mark.slow
def test_evaluations_drop_no_sample(caplog):
    module = Module(batch_size=8)
    module.val_dataloader = lambda: DataLoader(module.val, batch_size=8, drop_last=True)
    with caplog.at_level(logging.INFO):
        source = LightningData(module, client="sites")
        assert source.load().split.tolist().count(1) == 20
    assert "pl_fed evaluates all samples of `val_dataloader` of Module, although" in caplog.text
    assert "samples of `test_dataloader`" not in caplog.text
    assert source.evaluation_sizes == {"val": 8, "test": 8}


@pytest.mark.slow
def test_evaluation_steps_get_batches_of_the_own_dataloaders(tmp_path):
    class Sizes(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            return self.layer.weight.sum()

        def validation_step(self, batch, batch_idx):
            self.log("val_size", float(len(batch[0])), batch_size=1)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Parts(LightningDataModule):
        def train_dataloader(self):
            return DataLoader([(torch.ones(1), 0)] * 4, batch_size=4)

        def val_dataloader(self):
            return DataLoader([(torch.ones(1), 0)] * 5, batch_size=2)

        def test_dataloader(self):
            return DataLoader([(torch.ones(1), 0)] * 5, batch_size=5)

    federation = pl_fed.Federation(All())
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    trainer = pl_fed.Trainer(federation, run_dir=tmp_path, max_epochs=1, **options)
    client, data = FedAvg(Sizes()), FederatedData(LightningData(Parts()), IID(), 1)
    trainer.fit(client, data)
    assert trainer.callback_metrics["val/global/size"] == pytest.approx((2 + 2 + 1) / 3)
    assert trainer.test(client, data, verbose=False)[0]["test/global/size"] == 5


def test_a_partitioner_keeps_the_official_test_samples():
    clients = FederatedData(LightningData(Module()), Dirichlet(1.0), 3, seed=0).clients
    assert sorted(clients.test.index.tolist()) == [*range(100, 130)]


def test_texts_with_a_collate_fn_or_padding():
    class Text(LightningDataModule):
        def __init__(self, **loader):
            super().__init__()
            self.loader = loader

        def train_dataloader(self):
            return DataLoader(Texts(40), **self.loader)

        def test_dataloader(self):
            return DataLoader(Texts(12), **self.loader)

    a = LightningData(Text(collate_fn=collate), client="user").load()
    b = LightningData(Text(), "user", inputs=["ids", "mask"], padding=0).load()
    assert torch.equal(a.inputs[0], b.inputs["ids"])
    assert torch.equal(a.inputs[0], collate([Texts()[k] for k in (*range(40), *range(12))])[0][0])
    assert torch.equal(a.client, b.client)
    assert a.names == b.names


class WithSampler(Module):
    def __init__(self, build):
        super().__init__()
        self.build = build

    def train_dataloader(self):
        return DataLoader(self.train, 8, sampler=self.build(self.train))


def test_subset_sampler_selects_samples():
    index = [5, 3, 8]
    arrays = LightningData(WithSampler(lambda _: SubsetRandomSampler(index))).load()
    assert arrays.split.tolist() == [0] * 3 + [1] * 20 + [2] * 30
    module = WithSampler(None)
    sampler = BatchSampler(SubsetRandomSampler(index), 2, False)
    module.train_dataloader = lambda: DataLoader(module.train, batch_sampler=sampler)
    assert LightningData(module).load().split.tolist() == arrays.split.tolist()


def test_another_sampler_is_ignored_with_a_warning():
    module = WithSampler(lambda data: WeightedRandomSampler([1.0] * len(data), 10))
    words = r"ignores the sampler WeightedRandomSampler of `train_dataloader` of W.*\.data\.Subset"
    with pytest.warns(UserWarning, match=words):
        assert len(LightningData(module).load()) == 130

    class Own(BatchSampler):
        pass

    module.train_dataloader = lambda: DataLoader(
        module.train, batch_sampler=Own(SequentialSampler(module.train), 4, False)
    )
    with pytest.warns(UserWarning, match="ignores the sampler Own of `train_dataloader`"):
        assert len(LightningData(module).load()) == 130
    sampler = WeightedRandomSampler([1.0] * len(module.train), 10)
    for batches in (
        BatchSampler(sampler, 4, False),
        BatchSampler(SequentialSampler([3]), 4, False),
    ):
        module.train_dataloader = lambda b=batches: DataLoader(module.train, batch_sampler=b)
        words = f"ignores the sampler {type(batches.sampler).__name__} of `train_dataloader`"
        with pytest.warns(UserWarning, match=words):
            assert len(LightningData(module).load()) == 130
    module.train_dataloader = lambda: DataLoader(
        module.train, batch_sampler=BatchSampler(RandomSampler(module.train), 4, False)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LightningData(module).load()


def test_random_training_data_and_batch_hooks():
    class Random(Module):
        def train_dataloader(self):
            return DataLoader(Augmented(lambda: torch.rand(()), 50))

        def val_dataloader(self):
            return DataLoader(Augmented(lambda: 0.0, 50))

        def test_dataloader(self):
            return DataLoader(Augmented(lambda: 0.0, 50))

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

    with pytest.warns(UserWarning, match="does not call `on_after_batch_transfer` of Random"):
        arrays = LightningData(Random()).load()
    one, other = (arrays.redraw([7, 57], [draw, draw])[0] for draw in (1, 2))
    assert not torch.equal(one[0], other[0])
    assert torch.equal(one[1], arrays.inputs[57])  # of the validation part, without draws
    with pytest.warns(UserWarning, match="does not call"):
        assert LightningData(Random(), redraw=False).load().redraw is None


@table_test(
    ("hooks", "error", "words"),
    [
        ({"train_dataloader": None}, ValueError, "to have a `train_dataloader` but got Bad"),
        (
            {"val_dataloader": lambda self: [DataLoader(self.val)] * 2},
            TypeError,
            "`val_dataloader` of Bad to return one DataLoader but got list: join",
        ),
        (
            {"test_dataloader": lambda self: DataLoader(Stream(), batch_size=2)},
            TypeError,
            "`dataset` to be a map-style data set, .* but got Stream",
        ),
        (
            {"test_dataloader": lambda self: DataLoader(self.test, batch_size=None)},
            TypeError,
            "of single samples but got one with batch_size=None",
        ),
        (
            {"setup": lambda self, stage: self.trainer.world_size},
            ValueError,
            "`setup` of Bad to run without a Trainer but got Attr.*: read `self.trainer",
        ),
        (
            {"test_dataloader": lambda self: DataLoader(self.test, collate_fn=list)},
            ValueError,
            "one `collate_fn` but `test_dataloader` has another than `train_dataloader`",
        ),
    ],
)
def test_unsuitable_modules_are_refused(hooks, error, words):
    if hooks.get("train_dataloader", hooks) is None:
        bad = type("Bad", (LightningDataModule,), {})()
    else:
        bad = type("Bad", (Module,), hooks)()
    with pytest.raises(error, match=f"^Expected .*{words}") as failed:
        LightningData(bad).load()
    assert str(failed.value).endswith(".")


def test_invalid_settings_are_refused():
    with pytest.raises(TypeError, match=r"`datamodule` to be an object .* of LightningDataModule"):
        LightningData(Pairs())
    with pytest.raises(ValueError, match="`client` to be left out with `client_fn`"):
        LightningData(Module(), client=0, client_fn=len)
    with pytest.raises(ValueError, match="`padding` to be left out with `collate_fn`"):
        LightningData(Module(collate_fn=list), padding=0).load()
    with pytest.raises(TypeError, match=r"got Module: pass pl_fed.data.LightningData\(dataset\)"):
        FederatedData(Module())


def test_error_of_a_plain_data_module_names_the_wrapper(tmp_path):
    federation = pl_fed.Federation(pl_fed.samplers.All(), seed=0)
    trainer = pl_fed.Trainer(federation, run_dir=tmp_path, accelerator="cpu")
    words = r"a FederatedData but got Module: pass FederatedData\(pl_fed.data.LightningData\("
    with pytest.raises(TypeError, match=words):
        trainer.fit(pl_fed.clients.FedAvg(pl_fed.models.MLP(4, [3], 3)), Module())


@pytest.mark.slow
def test_data_module_from_a_config(tmp_path, monkeypatch):
    from pl_fed.command.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_module.py").write_text(
        "import torch\n"
        "from lightning import LightningDataModule\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "class Blobs(LightningDataModule):\n"
        "    def __init__(self, count: int = 10, batch_size: int = 4):\n"
        "        super().__init__()\n"
        "        self.save_hyperparameters()\n"
        "    def setup(self, stage):\n"
        "        k = torch.arange(self.hparams.count)\n"
        "        self.data = TensorDataset(torch.randn(len(k), 4), k % 3, k % 2)\n"
        "    def train_dataloader(self):\n"
        "        return DataLoader(self.data, self.hparams.batch_size, shuffle=True)\n"
        "    test_dataloader = train_dataloader\n"
    )
    arguments = "fit --model pl_fed.clients.FedAvg --model.net pl_fed.models.MLP"
    arguments += " --model.net.in_features 4 --model.net.hidden [3] --model.net.num_classes 2"
    arguments += " --data.dataset pl_fed.data.LightningData"
    arguments += " --data.dataset.datamodule my_module.Blobs --data.dataset.datamodule.count 60"
    arguments += " --data.dataset.client 1 --federation.sampler pl_fed.samplers.All"
    arguments += " --trainer.max_epochs 1 --trainer.accelerator cpu"
    main(arguments.split())
    (table,) = tmp_path.glob("runs/*/per_client.csv")
    lines = table.read_text().splitlines()
    assert [line.split(",")[1] for line in lines[1:]] == ["0", "1", "2"]
    sys.modules.pop("my_module")


def test_batch_size_and_drop_last_are_those_of_the_training_dataloader():
    data = FederatedData(LightningData(Module(), client="sites"))
    assert (data.batch_size, data.drop_last) == (8, True)
    data = FederatedData(LightningData(Module(), client="sites"), batch_size=3, drop_last=False)
    assert (data.batch_size, data.drop_last) == (3, False)
    data = FederatedData(LightningData(Module(), client="sites"), drop_last=False)
    assert (data.batch_size, data.drop_last) == (8, False)


@pytest.mark.filterwarnings("ignore:pl_fed ignores the sampler")
def test_smallest_batch_is_at_most_the_size_of_the_training_dataloader():
    data = FederatedData(LightningData(Module(batch_size=16), client="sites"), min_batch=16)
    assert (data.batch_size, data.min_batch) == (16, 16)
    with pytest.raises(ValueError, match="`min_batch` to be at most 8 but got 9"):
        _ = FederatedData(LightningData(Module(), client="sites"), min_batch=9).clients
    with pytest.raises(ValueError, match="`min_batch` to be at most 3 but got 9"):
        FederatedData(LightningData(Module(), client="sites"), batch_size=3, min_batch=9)


def test_batch_size_of_a_batch_sampler():
    class Sampled(LightningDataModule):
        def train_dataloader(self):
            pairs = Pairs(20, 1)
            return DataLoader(pairs, batch_sampler=self.sampler(RandomSampler(pairs)))

    class Batches(BatchSampler):
        """A batch sampler of one's own."""

    class Lists:
        """A batch sampler without a batch size."""

        def __init__(self, sampler):
            self.sampler = sampler

        def __iter__(self):
            yield list(self.sampler)

    for sampler, expected in (
        (lambda s: BatchSampler(s, 6, True), (6, True)),
        (lambda s: Batches(s, 4, False), (4, False)),
        (Lists, (10, False)),
    ):
        module = Sampled()
        module.sampler = sampler
        data = FederatedData(LightningData(module, client="sites"))
        assert (data.batch_size, data.drop_last) == expected


NUMBERS = TensorDataset(torch.arange(100.0), torch.arange(100) % 2)


class SplitsInSetup(LightningDataModule):
    """Draws a split whenever `setup` is called, without a generator of its own."""

    def setup(self, stage):
        self.parts = random_split(NUMBERS, [60, 20, 20])

    def train_dataloader(self):
        return DataLoader(self.parts[0])

    def val_dataloader(self):
        return [DataLoader(self.parts[1])]

    def test_dataloader(self):
        return DataLoader(self.parts[2])


class SplitsInDataloaders(SplitsInSetup):
    """Draws the split in each dataloader."""

    def setup(self, stage):
        pass

    def train_dataloader(self):
        return DataLoader(random_split(NUMBERS, [80, 20])[0])

    def val_dataloader(self):
        return None

    def test_dataloader(self):
        return DataLoader(random_split(NUMBERS, [80, 20])[1])


@pytest.mark.parametrize("module", [SplitsInSetup, SplitsInDataloaders])
def test_random_split_is_the_same_in_each_call_and_after_any_other_draw(module, caplog):
    loaded = []
    for draws in range(2):
        torch.rand(draws)  # such as those of another net
        state = torch.get_rng_state()
        arrays = LightningData(module()).load()
        assert torch.equal(torch.get_rng_state(), state)
        assert sorted(arrays.inputs.tolist()) == [*range(100)]
        loaded.append(arrays.inputs)
    assert torch.equal(*loaded)
    assert f"{module.__name__} draws another split in each hook" in caplog.text


def test_split_follows_the_global_seed(monkeypatch):
    class Seeded(SplitsInSetup):
        def setup(self, stage):
            if stage == "fit":
                super().setup(stage)

    for seed in (1, 2):
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        train = random_split(NUMBERS, [60, 20, 20], torch.Generator().manual_seed(seed))[0]
        assert LightningData(Seeded()).load().inputs[:60].tolist() == train.indices


def test_training_samples_in_other_parts_are_reported():
    parts = ConcatDataset([Subset(NUMBERS, [5, 6]), Subset(Subset(NUMBERS, [9, 8, 7]), [2, 1])])
    module = LightningDataModule.from_datasets(parts, None, Subset(NUMBERS, range(8, 20)))
    with pytest.warns(UserWarning, match="1 of 12 test samples of LightningDataModule are train"):
        LightningData(module).load()


def test_random_sampler_that_repeats_samples_is_reported():
    class Repeats(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(NUMBERS, sampler=RandomSampler(NUMBERS, replacement=True))

    with pytest.warns(UserWarning, match="ignores the sampler RandomSampler of `train_dataloader`"):
        LightningData(Repeats()).load()


@pytest.mark.parametrize("shuffle", [False, True])
def test_order_of_the_training_dataloader_is_reported_if_it_is_fixed(shuffle, caplog):
    class Ordered(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(NUMBERS, batch_size=10, shuffle=shuffle)

    LightningData(Ordered()).load()
    assert ("pl_fed shuffles the training samples of Ordered" in caplog.text) == (not shuffle)
