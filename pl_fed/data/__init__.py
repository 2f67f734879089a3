"""Data sets, and their samples shared out over clients."""

from pl_fed.data.digits import Digits as Digits
from pl_fed.data.images import CIFAR10 as CIFAR10
from pl_fed.data.images import MNIST as MNIST
from pl_fed.data.images import FashionMNIST as FashionMNIST
from pl_fed.data.module import FederatedData as FederatedData
from pl_fed.data.npz import Npz as Npz
from pl_fed.data.source import Arrays as Arrays
from pl_fed.data.source import DataSource as DataSource
