"""Data sets, and the split of their samples over clients."""

from pl_fed.data.augmentation import KeyedAugmentation as KeyedAugmentation
from pl_fed.data.augmentation import RandomFlip as RandomFlip
from pl_fed.data.augmentation import RandomShift as RandomShift
from pl_fed.data.celeba import CelebA as CelebA
from pl_fed.data.client_folder import ClientFolder as ClientFolder
from pl_fed.data.diabetes import Diabetes as Diabetes
from pl_fed.data.digits import Digits as Digits
from pl_fed.data.femnist import FEMNIST as FEMNIST
from pl_fed.data.hugging_face import HuggingFace as HuggingFace
from pl_fed.data.image_folder import ImageFolder as ImageFolder
from pl_fed.data.images import CIFAR10 as CIFAR10
from pl_fed.data.images import MNIST as MNIST
from pl_fed.data.images import FashionMNIST as FashionMNIST
from pl_fed.data.lightning_data import LightningData as LightningData
from pl_fed.data.mnist_writers import MNISTWriters as MNISTWriters
from pl_fed.data.module import FederatedData as FederatedData
from pl_fed.data.npy_folder import NpyFolder as NpyFolder
from pl_fed.data.npz import Npz as Npz
from pl_fed.data.shakespeare import Shakespeare as Shakespeare
from pl_fed.data.source import Arrays as Arrays
from pl_fed.data.source import DataSource as DataSource
from pl_fed.data.table import Table as Table
from pl_fed.data.torch_dataset import TorchDataset as TorchDataset
from pl_fed.data.vehicle import Vehicle as Vehicle
