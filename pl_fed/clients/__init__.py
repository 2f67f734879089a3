"""The algorithms, one file each: what a client computes, keeps and sends."""

from pl_fed.clients.base import Client as Client
from pl_fed.clients.ditto import Ditto as Ditto
from pl_fed.clients.fedavg import FedAvg as FedAvg
from pl_fed.clients.fedtilt import FedTilt as FedTilt
from pl_fed.clients.local import Local as Local
