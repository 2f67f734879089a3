"""Data of several kinds, and federations of LightningModules on them."""

import torch
from small_federations import seeded, shared_out

import pl_fed
from pl_fed.clients import Ditto
from pl_fed.data import Arrays
from pl_fed.samplers import All

SIZES = [8, 8, 8]


def owners(sizes):
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(samples, classes, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(classes, (samples,), generator=generator)


def images(sizes=SIZES):
    n = sum(sizes)
    return Arrays(draw(n, 1, 6, 6), labels(n, 3), owners(sizes), num_classes=3)


def table(sizes=SIZES):
    n = sum(sizes)
    return Arrays(draw(n, 4), labels(n, 2), owners(sizes), num_classes=2)


def numbers(sizes=SIZES):
    n = sum(sizes)
    return Arrays(draw(n, 4), draw(n, 1, seed=2), owners(sizes))


def sentences(sizes=SIZES):
    n, generator = sum(sizes), torch.Generator().manual_seed(0)
    ids = torch.randint(1, 11, (n, 6), generator=generator)
    lengths = torch.randint(2, 7, (n, 1), generator=generator)
    mask = (torch.arange(6) < lengths).long()
    targets = torch.where(mask.bool(), ids.roll(-1, 1), -100)
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    return Arrays(batch, {"labels": targets}, owners(sizes))


def set_up(make, arrays, algorithm=Ditto, tmp_path=None, rounds=1, federation=None, **settings):
    """Fit, and return the trainer, the client and the data."""
    client = algorithm(seeded(make), **settings)
    data = shared_out(arrays, val_fraction=0.25, test_fraction=0.25)
    trainer = trainer_of(tmp_path, rounds, federation)
    trainer.fit(client, data)
    return trainer, client, data


def trainer_of(folder, rounds, federation=None):
    return pl_fed.Trainer(
        federation or pl_fed.Federation(All(), seed=0), run_dir=folder, max_epochs=rounds,
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def float32(arrays):
    x, y = (t.float() if t.is_floating_point() else t for t in (arrays.inputs, arrays.targets))
    return Arrays(x, y, arrays.client, num_classes=arrays.num_classes)
