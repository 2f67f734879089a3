"""Partitioners: data splits over the clients of a federation."""

from pl_fed.partitioners.base import Partitioner as Partitioner
from pl_fed.partitioners.by_owner import ByOwner as ByOwner
from pl_fed.partitioners.dirichlet import Dirichlet as Dirichlet
from pl_fed.partitioners.ditto_fashion import DittoFashion as DittoFashion
from pl_fed.partitioners.flwr_datasets import FlwrDatasets as FlwrDatasets
from pl_fed.partitioners.hybrid import Hybrid as Hybrid
from pl_fed.partitioners.iid import IID as IID
from pl_fed.partitioners.quantity import Quantity as Quantity
from pl_fed.partitioners.shards import Shards as Shards
