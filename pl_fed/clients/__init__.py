"""The algorithms, one file each: what a client computes, keeps and sends."""

from pl_fed.clients.admm import ADMM as ADMM
from pl_fed.clients.apfl import APFL as APFL
from pl_fed.clients.base import Client as Client
from pl_fed.clients.ditto import Ditto as Ditto
from pl_fed.clients.ditto_choice import DittoChoice as DittoChoice
from pl_fed.clients.ditto_greedy import DittoGreedy as DittoGreedy
from pl_fed.clients.fedadmm import FedADMM as FedADMM
from pl_fed.clients.fedavg import FedAvg as FedAvg
from pl_fed.clients.fedbn import FedBN as FedBN
from pl_fed.clients.fedper import FedPer as FedPer
from pl_fed.clients.fedprox import FedProx as FedProx
from pl_fed.clients.fedrep import FedRep as FedRep
from pl_fed.clients.fedtilt import FedTilt as FedTilt
from pl_fed.clients.finetuning import Finetuning as Finetuning
from pl_fed.clients.flame import FLAME as FLAME
from pl_fed.clients.l2sgd import L2SGD as L2SGD
from pl_fed.clients.local import Local as Local
from pl_fed.clients.lp_proj import LpProj as LpProj
from pl_fed.clients.mapper import Mapper as Mapper
from pl_fed.clients.mean_regularized import MeanRegularized as MeanRegularized
from pl_fed.clients.mocha import Mocha as Mocha
from pl_fed.clients.per_fedavg import PerFedAvg as PerFedAvg
from pl_fed.clients.pfedme import PFedMe as PFedMe
from pl_fed.clients.pfedme_epochs import PFedMeEpochs as PFedMeEpochs
from pl_fed.clients.pulled import Pulled as Pulled
from pl_fed.clients.scaffold import Scaffold as Scaffold
