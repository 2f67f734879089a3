"""A share of a data set, clients with classes of graded sizes, and a table of these classes."""

import csv
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from pl_fed.arguments import check_integers
from pl_fed.data import Arrays, DataSource
from pl_fed.partitioners import Partitioner
from pl_fed.random import generator


class Share(DataSource):
    """Random share of a data set, the same share of each official part.

    Args:
        dataset: Source of the samples.
        share: Fraction of the samples, in (0, 1].
        seed: Seed of the draw.
    """

    def __init__(self, dataset: DataSource, share: float, seed: int = 0) -> None:
        self.dataset = dataset
        self.share = share
        self.seed = seed

    def load(self) -> Arrays:
        """Return the samples."""
        arrays = self.dataset.load()
        order = torch.randperm(len(arrays), generator=generator(self.seed, "share"))
        parts = torch.zeros(len(arrays)) if arrays.split is None else arrays.split[order]
        pieces = [order[parts == part] for part in parts.unique()]
        index = torch.cat([piece[: round(self.share * len(piece))] for piece in pieces])
        split = None if arrays.split is None else arrays.split[index]
        client = None if arrays.client is None else arrays.client[index]
        return Arrays(
            arrays.inputs[index], arrays.targets[index], client, split, arrays.num_classes
        )


class Graded(Partitioner):
    """Graded partitioner: the sizes of a client's classes are in a geometric series.

    The largest class of a client has ``ratio`` times as many samples as its smallest one. A group
    has as many clients as there are classes; in it, every class has each rank once. All training
    samples are used. A client is tested on all official test samples of its classes.

    Args:
        classes_per_client: Number of classes of a client, at least 2.
        ratio: Size of a client's largest class divided by that of its smallest one, at least 1.

    Shape:
        labels: class ids [n]; the number of clients must be a multiple of that of classes.
    """

    needs_official = "classes_per_client"

    def __init__(self, classes_per_client: int = 5, ratio: float = 10.0) -> None:
        check_integers(2, classes_per_client=classes_per_client)
        if not 1 <= ratio < float("inf"):
            raise ValueError(f"Expected argument `ratio` to be at least 1 but got {ratio}.")
        self.classes_per_client = classes_per_client
        self.ratio = ratio

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """Return the samples of each client."""
        classes = labels.unique()
        if num_clients % len(classes) or self.classes_per_client > len(classes):
            raise ValueError(
                f"Expected argument `num_clients` to be a multiple of the {len(classes)} classes,"
                f" and `classes_per_client` to be at most as many, but got {num_clients} and"
                f" {self.classes_per_client}."
            )
        groups = num_clients // len(classes)
        ranks = torch.arange(self.classes_per_client)
        shares = self.ratio ** -(ranks / (self.classes_per_client - 1))
        ends = (shares.cumsum(0) / shares.sum())[:-1]
        orders = [torch.randperm(len(classes), generator=generator) for _ in range(groups)]
        clients: list[list[Tensor]] = [[] for _ in range(num_clients)]
        for number, label in enumerate(classes):
            pool = (labels == label).nonzero().flatten()
            pool = pool[torch.randperm(len(pool), generator=generator)]
            for group, (order, part) in enumerate(zip(orders, pool.tensor_split(groups))):
                place = int((order == number).nonzero())
                cuts = (ends * len(part)).round().int().tolist()
                for rank, samples in enumerate(part.tensor_split(cuts)):
                    client = group * len(classes) + (place - rank) % len(classes)
                    clients[client].append(samples)
        return [torch.cat(parts).sort().values for parts in clients]

    def split_matching(
        self, labels: Tensor, test_labels: Tensor, num_clients: int, generator: torch.Generator
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the clients' training samples, and all test samples of their classes."""
        train = self.split(labels, num_clients, generator)
        test = [torch.isin(test_labels, labels[part].unique()).nonzero() for part in train]
        return train, [part.flatten() for part in test]


class TrainClasses(Callback):
    """Train classes: writes the number of each client's training samples of each class.

    The columns of train_classes.csv in the run's folder are ``client``, ``class`` and ``samples``.
    """

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the table."""
        data = trainer.federation.data
        with (Path(trainer.run_dir) / "train_classes.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["client", "class", "samples"])
            for client in range(data.num_clients):
                counts = torch.bincount(data.targets[data.train.samples(client)])
                writer.writerows([client, k, n] for k, n in enumerate(counts.tolist()) if n)
