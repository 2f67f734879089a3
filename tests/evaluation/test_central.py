"""The server's own validation and test samples, beside those of the clients."""

import functools

import pytest
import torch
from by_hand import row as flat_row
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from small_federations import Given, classes, mlp, seeded
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.testing import assert_close
from torchmetrics.classification import MulticlassAUROC
from torchvision.transforms.v2 import Lambda

import pl_fed
from pl_fed.attacks import Backdoor
from pl_fed.attacks.adversary import Adversary
from pl_fed.clients import Ditto, FedAvg, Local
from pl_fed.data import FederatedData, Table, TorchDataset
from pl_fed.data.source import TEST, TRAIN, VAL, Arrays
from pl_fed.partitioners import IID
from pl_fed.samplers import Poisson
from pl_fed.skews import Skew

SIZES = [20, 15, 25]
SGD = functools.partial(torch.optim.SGD, lr=0.2)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*The number of training batches"),
]


def parted(parts=(TRAIN, TRAIN, TRAIN, TEST), **changes):
    """Random samples of three owners, of which each has the official parts in turn."""
    arrays = classes(SIZES)
    split = torch.tensor(parts).repeat(len(arrays))[: len(arrays)]
    return Arrays(
        **{
            "inputs": arrays.inputs,
            "targets": arrays.targets,
            "client": arrays.client,
            "split": split,
            "num_classes": 3,
            **changes,
        }
    )


def unparted(number=30, seed=5, **changes):
    arrays = classes([number], seed=seed)
    own = {"inputs": arrays.inputs, "targets": arrays.targets, "num_classes": 3}
    return Arrays(**{**own, **changes})


def data_of(arrays=None, central="official", **options):
    return FederatedData(
        Given(parted() if arrays is None else arrays),
        **{"central": central, "batch_size": 4, "seed": 0, **options},
    )


def fit(folder, data, client=None, rounds=2, callbacks=(), federation=None, **options):
    trainer = pl_fed.Trainer(
        pl_fed.Federation(seed=0, **(federation or {})),
        run_dir=folder / "run",
        accelerator="cpu",
        max_epochs=rounds,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **{"precision": "64-true", **options},
    )
    trainer.fit(client or FedAvg(seeded(mlp), optimizer=SGD, local_steps=3), data)
    return trainer


def central_numbers(trainer, part):
    prefix = f"{part}/central/"
    numbers = trainer.callback_metrics
    return {n.removeprefix(prefix): float(v) for n, v in numbers.items() if n.startswith(prefix)}


def placed(trainer):
    """The server's samples in the precision of the models."""
    return trainer.federation.session.central.data


def samples_of(data, part):
    """The positions in the data set of a part's samples, of all clients."""
    return set(data.clients.part(part).index.tolist())


# The samples


@pytest.mark.parametrize("split", [None, "official", "own"])
def test_server_has_the_official_test_samples(split):
    data, arrays = data_of(split=split, val_fraction=0.2), parted()
    official = set((arrays.split == TEST).nonzero().flatten().tolist())
    central = data.central_data
    assert central.num_clients == 1
    assert set(central.test.index.tolist()) == official
    tests = samples_of(data, "test")
    assert tests.isdisjoint(official) if split == "own" else tests == official


@pytest.mark.parametrize("split", [None, "own"])
def test_missing_validation_part_is_drawn_from_training_samples(split):
    data, arrays = data_of(split=split, val_fraction=0.2), parted()
    val = set(data.central_data.val.index.tolist())
    training = (arrays.split == TRAIN).nonzero().flatten().tolist()
    assert val < set(training)
    assert len(val) == round(0.2 * len(training))
    for part in ("train", "val", "test"):
        assert samples_of(data, part).isdisjoint(val)
    again = data_of(split=split, val_fraction=0.2).central_data.val.index
    assert again.tolist() == data.central_data.val.index.tolist()


def test_official_validation_part_is_the_servers():
    arrays = parted((TRAIN, VAL, TRAIN, TEST))
    data = data_of(arrays)
    official = (arrays.split == VAL).nonzero().flatten()
    assert data.central_data.val.index.tolist() == official.tolist()
    assert samples_of(data, "train") | samples_of(data, "val") | samples_of(data, "test") == set(
        range(len(arrays))
    )


def test_own_source_is_divided_in_the_proportion_of_the_fractions():
    data = data_of(central=Given(unparted(30)), split="own", val_fraction=0.1, test_fraction=0.2)
    central = data.central_data
    val, test = central.val.index.tolist(), central.test.index.tolist()
    assert (len(val), len(test)) == (10, 20)
    assert sorted(val + test) == list(range(30))


def test_own_source_keeps_its_official_parts():
    split = torch.tensor([TEST, TRAIN, VAL]).repeat(10)
    central = data_of(central=Given(unparted(30, split=split))).central_data
    assert central.test.index.tolist() == list(range(0, 30, 3))
    assert central.val.index.tolist() == list(range(2, 30, 3))
    assert central.train.index.tolist() == []


def test_inputs_are_prepared_by_the_numbers_of_training_samples():
    own = unparted(30)
    data = data_of(central=Given(own), normalize="channel", transforms=[Lambda(lambda x: 3 * x)])
    training = parted().inputs[data.clients.train.index] * 3
    expected = (own.inputs * 3 - training.mean(0)) / training.std(0, correction=0)
    assert_close(data.central_data.inputs, expected, rtol=1e-4, atol=1e-5)


class Shifted(Skew):
    """Adds the client's number to its inputs."""

    def change(self, x, client, num_clients, seed):
        return x + 100 * (client + 1)


def test_skew_changes_no_central_sample():
    arrays = parted()
    data = data_of(arrays, skew=Shifted())
    central = data.central_data
    assert_close(central.inputs[central.test.index], arrays.inputs[arrays.split == TEST])
    assert data.clients.inputs[data.clients.test.index].min() > 50


NO_TEST = r"train and test parts for `data.central: official` but got Given with 45 training and 0"
REFUSALS = {
    "no test part": (dict(arrays=parted((TRAIN, TRAIN, TRAIN, VAL))), NO_TEST),
    "no parts": (dict(arrays=classes(SIZES)), "`data.central: official` but got Given with 0"),
    "another name": (dict(central="offical"), '`central` to be "official", a data source or Non'),
    "no source": (dict(central=3), "`central` to be an object of a subclass of DataSource but got"),
    "other inputs": (
        dict(central=Given(unparted(9, inputs=torch.zeros(9, 5)))),
        r"`data.central` to have inputs like those of the clients, \[4\] \(torch.float32\) for a ",
    ),
    "other targets": (
        dict(central=Given(unparted(9, targets=torch.zeros(9), num_classes=0))),
        "`data.central` to have targets like those of the clients",
    ),
    "more classes": (
        dict(central=Given(unparted(9, num_classes=5))),
        "`data.central` to have class ids below 3, the number of the clients' classes, but got 4",
    ),
    "other names of classes": (
        dict(
            arrays=parted(class_names=("a", "b", "c")),
            central=Given(unparted(9, class_names=("b", "a", "c"))),
        ),
        r"the clients' classes \['a', 'b', 'c'\] in this order but got \['b', 'a', 'c'\]",
    ),
    "nothing to divide": (
        dict(central=Given(unparted(9)), val_fraction=0.0, test_fraction=0.0),
        "`data.central` to have official val or test samples, or",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    options, message = REFUSALS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        _ = data_of(**options).central_data


class Numbered(Given):
    """A source that numbers its categories by its own samples."""

    def list_shared_quantities(self):
        return {"categories": "null, which sorts all values"}


def test_source_with_numbers_of_its_own_samples_is_refused():
    message = r"`data.central.categories` to be set, .* but got null, which sorts all values"
    with pytest.raises(ValueError, match=message):
        _ = data_of(central=Numbered(unparted(9))).central_data


def test_own_source_may_have_real_numbers_of_another_precision():
    inputs = {dtype: parted().inputs.to(dtype) for dtype in (torch.float32, torch.float64)}
    for own, others in (inputs.values(), reversed(inputs.values())):
        central = Given(unparted(60, inputs=own))
        assert len(data_of(parted(inputs=others), central=central).central_data.inputs) == 60


def test_tables_with_columns_in_another_order_or_with_other_ids_are_refused(tmp_path):
    pytest.importorskip("pyarrow")

    def source(name, header="age,weight,job,ill", **settings):
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join([header, *("4,5,cook,0", "6,7,nurse,1") * 10]))
        categories = {"ill": [0, 1], "job": ["cook", "nurse"]}
        return Table(str(path), "ill", ids=["job"], **{"categories": categories, **settings})

    def build(**central):
        return FederatedData(source("a"), IID(), 2, central=source("b", **central)).central_data

    header = "weight,age,job,ill"
    with pytest.raises(ValueError, match=r"inputs, age, weight, job, in .* but got weight, age, j"):
        build(header=header)
    ordered = build(header=header, inputs=["age", "weight"]).inputs[0]
    assert ordered[:2].tolist() == [[5, 4], [7, 6]]
    categories = {"ill": [0, 1], "job": ["nurse", "cook"]}
    with pytest.raises(ValueError, match=r"number the values of 'job' like .* 'nurse' for 'cook'"):
        build(categories=categories)
    assert len(build().inputs[0]) == 20


# The metrics


@pytest.mark.slow
def test_metrics_are_those_of_the_global_model_on_all_central_samples(tmp_path):
    data, auroc = data_of(), MulticlassAUROC(3)
    trainer = fit(tmp_path, data, federation={"metrics": [auroc]})
    validated = central_numbers(trainer, "val")
    trainer.test(trainer.lightning_module, data, verbose=False)
    tested = central_numbers(trainer, "test")
    model, central = trainer.federation.client.model("global").eval(), placed(trainer)
    for part, got in (("val", validated), ("test", tested)):
        index = central.part(part).index
        targets = central.targets[index]
        with torch.no_grad():
            outputs = model(central.inputs[index])
        is_correct = (outputs.argmax(1) == targets).double()
        by_class = torch.stack([is_correct[targets == c].mean() for c in range(3)])
        expected = {
            "accuracy": is_correct.mean(),
            "loss": F.cross_entropy(outputs, targets),
            "class_std": by_class.std(correction=0),
            "multiclass_auroc": MulticlassAUROC(3)(outputs.softmax(1), targets),
        }
        assert got.keys() == expected.keys()
        assert got == pytest.approx({n: float(v) for n, v in expected.items()}, rel=1e-6)


@pytest.mark.slow
def test_training_is_the_same_with_and_without_own_central_samples(tmp_path):
    rows = []
    for name, central in (("with", Given(unparted())), ("without", None)):
        data = data_of(central=central)
        trainer = fit(tmp_path / name, data, Ditto(seeded(mlp), optimizer=SGD, local_steps=3))
        rows.append(flat_row(trainer.federation.client.model("global")))
    assert torch.equal(*rows)


def test_callbacks_may_monitor_central_metrics_without_validation_data_of_clients(tmp_path):
    arrays = parted()
    central = Given(unparted(30, split=torch.tensor([VAL, TEST]).repeat(15)))
    data = data_of(arrays, central=central, val_fraction=0.0)
    best = ModelCheckpoint(tmp_path, monitor="val/central/loss", filename="best")
    stop = EarlyStopping("val/central/loss", mode="min", patience=1, min_delta=10.0)
    trainer = fit(tmp_path, data, rounds=9, callbacks=[best, stop])
    assert trainer.current_epoch == 2  # no round improves by 10
    assert best.best_model_score is not None
    assert not any(name.startswith("val/global") for name in trainer.callback_metrics)


def test_wrong_names_are_still_refused(tmp_path):
    stop = EarlyStopping("val/central/acuracy", mode="max")
    with pytest.raises(ValueError, match="val/central/accuracy"):
        fit(tmp_path, data_of(), callbacks=[stop])


def test_algorithm_without_a_global_model_has_no_central_metrics(tmp_path, capfd):
    trainer = fit(tmp_path, data_of(), Local(seeded(mlp), optimizer=SGD, local_steps=1))
    assert central_numbers(trainer, "val") == {}
    assert trainer.federation.session.central is None


@pytest.mark.slow
def test_backdoor_is_measured_on_central_samples(tmp_path):
    arrays = parted(inputs=torch.rand(sum(SIZES), 1, 4, 4))
    backdoor = Backdoor(1, size=2)
    net = functools.partial(seeded, lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)))
    trainer = fit(
        tmp_path,
        data := data_of(arrays),
        FedAvg(net(), optimizer=SGD, local_steps=3),
        federation={"adversary": Adversary(backdoor, ids=[0])},
    )
    trainer.test(trainer.lightning_module, data, verbose=False)
    central = placed(trainer)
    poisoned = backdoor.trigger(central.batch(central.test.index))
    outputs = trainer.federation.client.model("global")(poisoned.inputs)
    success = (outputs.argmax(1) == 1)[poisoned.mask].double().mean()
    got = central_numbers(trainer, "test")["backdoor_success"]
    assert got == pytest.approx(float(success))


class Steps(LightningModule):
    """Logs its own metrics."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def training_step(self, batch, batch_idx):
        inputs, targets = self.read(batch)
        return F.cross_entropy(self.net(inputs), targets)

    def validation_step(self, batch, batch_idx):
        inputs, targets = self.read(batch)
        self.log("val_acc", (self.net(inputs).argmax(1) == targets).float().mean())

    def test_step(self, batch, batch_idx):
        inputs, targets = self.read(batch)
        self.log("test_acc", (self.net(inputs).argmax(1) == targets).float().mean())

    def read(self, batch):
        return batch


class ListSteps(Steps):
    """Takes batches of lists."""

    def read(self, batch):
        return torch.stack(batch[0]), torch.tensor(batch[1])


def data_of_lists(central):
    arrays = parted()
    samples = [*zip(arrays.inputs.double(), arrays.targets.tolist(), strict=True)]
    parts = [[s for s, p in zip(samples, arrays.split, strict=True) if p == n] for n in (0, 2)]
    owners = [arrays.client[arrays.split == n].tolist() for n in (0, 2)]
    source = TorchDataset(
        parts[0],
        test=parts[1],
        client=owners[0] + owners[1],
        collate_fn=lambda samples: [*zip(*samples, strict=True)],
    )
    return FederatedData(source, central=central, batch_size=4, seed=0)


@pytest.mark.slow
def test_steps_of_a_module_log_central_metrics(tmp_path):
    data = data_of()
    trainer = fit(tmp_path, data, FedAvg(seeded(Steps), optimizer=SGD, local_steps=3))
    central, model = placed(trainer), trainer.federation.client.model("global")
    index = central.val.index
    is_correct = model.net(central.inputs[index]).argmax(1) == central.targets[index]
    assert central_numbers(trainer, "val")["acc"] == pytest.approx(float(is_correct.float().mean()))


@pytest.mark.slow
def test_batches_of_the_data_set_itself_give_central_metrics(tmp_path):
    data = data_of_lists("official")
    trainer = fit(tmp_path, data, FedAvg(seeded(ListSteps), optimizer=SGD, local_steps=3))
    arrays, index = parted(), data.central_data.test.index
    assert len(index) == int((arrays.split == TEST).sum())
    trainer.test(trainer.lightning_module, data, verbose=False)
    model = trainer.federation.client.model("global")
    is_test = arrays.split == TEST
    is_correct = model.net(arrays.inputs[is_test].double()).argmax(1) == arrays.targets[is_test]
    assert central_numbers(trainer, "test")["acc"] == pytest.approx(
        float(is_correct.float().mean())
    )


def test_own_source_is_refused_beside_batches_of_the_data_set_itself():
    with pytest.raises(ValueError, match=r"`data\.central` to be official for data whose"):
        _ = data_of_lists(Given(unparted(9))).central_data


# Privacy


PRIVACY = {"clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-2, "noise_seed": 0}


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.slow
def test_privacy_lets_callbacks_monitor_what_only_the_server_has(is_shared, tmp_path):
    pytest.importorskip("dp_accounting")
    central = "official" if is_shared else Given(unparted(30))
    federation = {
        "privacy": pl_fed.DifferentialPrivacy(**PRIVACY),
        "sampler": Poisson(0.5),
    }
    stop = EarlyStopping("val/central/accuracy", mode="max")
    arrays = parted((TRAIN, VAL, TRAIN, TEST))
    data = data_of(arrays, central=central, partitioner=IID(), num_clients=3)
    if not is_shared:
        fit(tmp_path, data, callbacks=[stop], federation=federation)
        return
    with pytest.raises(ValueError, match="but got val/central/accuracy: the choice would be relea"):
        fit(tmp_path, data, callbacks=[stop], federation=federation)


def test_privacy_refuses_central_samples_drawn_from_those_of_clients(tmp_path):
    pytest.importorskip("dp_accounting")
    federation = {"privacy": pl_fed.DifferentialPrivacy(**PRIVACY), "sampler": Poisson(0.5)}
    data = data_of(partitioner=IID(), num_clients=3)
    with pytest.raises(ValueError, match=r"`data\.central` to be a data source of its own, or off"):
        fit(tmp_path, data, federation=federation)
