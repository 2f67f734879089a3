"""The algorithms, one file each: what a client computes, keeps and sends."""

from pl_fed.clients.admm import ADMM as ADMM
from pl_fed.clients.base import Client as Client
from pl_fed.clients.ditto import Ditto as Ditto
from pl_fed.clients.fedadmm import FedADMM as FedADMM
from pl_fed.clients.fedavg import FedAvg as FedAvg
from pl_fed.clients.flame import FLAME as FLAME
from pl_fed.clients.local import Local as Local
from pl_fed.clients.lp_proj import LpProj as LpProj
from pl_fed.clients.pfedme import PFedMe as PFedMe
from pl_fed.clients.pfedme_epochs import PFedMeEpochs as PFedMeEpochs
