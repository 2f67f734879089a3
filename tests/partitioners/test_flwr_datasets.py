"""Partitioners of flwr-datasets: the same split as by themselves."""

import pytest
import torch
from small_federations import Given, classes

from pl_fed.data import FederatedData
from pl_fed.partitioners import FlwrDatasets

datasets = pytest.importorskip("datasets", reason="the partitioners split a datasets.Dataset")


class EveryOther:
    """A partitioner with the interface of flwr-datasets, which may not be installed."""

    def __init__(self, num_partitions, partition_by="label"):
        self.num_partitions, self._partition_by, self._dataset = num_partitions, partition_by, None

    @property
    def dataset(self):
        return self._dataset

    @dataset.setter
    def dataset(self, dataset):
        if self._dataset is not None:
            raise ValueError("once only")
        self._dataset = dataset

    def load_partition(self, partition_id):
        values = self.dataset[self._partition_by]
        keys = [k for k in range(len(values)) if values[k] % self.num_partitions == partition_id]
        return self.dataset.select(keys[::-1])


def test_partitions_become_clients_again_and_again():
    labels, partitioner = torch.tensor([0, 1, 2, 3, 4, 5]), FlwrDatasets(EveryOther(2, "y"))
    for _ in range(2):
        parts = partitioner.split(labels, 2, torch.Generator())
        assert [part.tolist() for part in parts] == [[0, 2, 4], [1, 3, 5]]


def test_owners_may_be_split():
    arrays = classes([5, 7, 6, 4])
    data = FederatedData(Given(arrays), FlwrDatasets(EveryOther(2), owners=True), 2, seed=0).clients
    owners = [[int(id) for id in names] for names in data.owners]
    assert owners == [[0, 2], [1, 3]]


def test_another_number_of_clients_is_refused():
    with pytest.raises(ValueError, match=r"the 2 partitions of EveryOther but got 3: set `data"):
        FlwrDatasets(EveryOther(2)).split(torch.arange(6), 3, torch.Generator())


def test_failing_partitioner_is_named():
    partitioner = EveryOther(2)
    partitioner.dataset = datasets.Dataset.from_dict({"label": [0]})
    with pytest.raises(ValueError, match=r"Expected EveryOther to split .* ValueError\('once only"):
        FlwrDatasets(partitioner).split(torch.arange(6), 2, torch.Generator())


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match="with `load_partition`, but got int"):
        FlwrDatasets(3)


def test_partitioner_of_a_config():
    path = f"{__name__}.EveryOther"
    config = {"class_path": path, "init_args": {"num_partitions": 3}}
    assert FlwrDatasets(config).partitioner.num_partitions == 3
    with pytest.raises(ValueError, match=r"and its `init_args`, but got .*Other and TypeError"):
        FlwrDatasets({"class_path": path})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Dirichlet", "Iid", "Pathological", "Linear"])
def test_split_equals_that_of_flwr_datasets(name):
    reason = "flwr-datasets is optional, and its version 0.6.1 asks for datasets below 5"
    flwr = pytest.importorskip("flwr_datasets.partitioner", reason=reason)
    labels = torch.arange(300) % 5
    settings = {
        "Dirichlet": {"partition_by": "y", "alpha": 0.5, "min_partition_size": 3},
        "Iid": {},
        "Pathological": {"partition_by": "y", "num_classes_per_partition": 2},
        "Linear": {},
    }[name]
    own, wrapped = (getattr(flwr, f"{name}Partitioner")(4, **settings) for _ in range(2))
    own.dataset = datasets.Dataset.from_dict({"y": labels.tolist(), "id": [*range(300)]})
    parts = FlwrDatasets(wrapped).split(labels, 4, torch.Generator())
    expected = [sorted(own.load_partition(k)["id"]) for k in range(4)]
    assert [part.tolist() for part in parts] == expected
