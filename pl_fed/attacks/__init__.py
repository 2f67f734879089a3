"""Attacks of Byzantine clients on their training data and their uploads."""

from pl_fed.attacks.a3fl import A3FL as A3FL
from pl_fed.attacks.a_little_is_enough import ALittleIsEnough as ALittleIsEnough
from pl_fed.attacks.adaptive_attack import AdaptiveAttack as AdaptiveAttack
from pl_fed.attacks.backdoor import Backdoor as Backdoor
from pl_fed.attacks.bad_pfl import BadPFL as BadPFL
from pl_fed.attacks.base import Attack as Attack
from pl_fed.attacks.canaries import Canaries as Canaries
from pl_fed.attacks.combined import Combined as Combined
from pl_fed.attacks.constrained_replacement import (
    ConstrainedReplacement as ConstrainedReplacement,
)
from pl_fed.attacks.distributed_backdoor import DistributedBackdoor as DistributedBackdoor
from pl_fed.attacks.edge_case_backdoor import EdgeCaseBackdoor as EdgeCaseBackdoor
from pl_fed.attacks.edge_case_backdoor import SampleSource as SampleSource
from pl_fed.attacks.fairness_attack import FairnessAttack as FairnessAttack
from pl_fed.attacks.fang import Fang as Fang
from pl_fed.attacks.flipped_labels import FlippedLabels as FlippedLabels
from pl_fed.attacks.flipped_pairs import FlippedPairs as FlippedPairs
from pl_fed.attacks.free_rider import FreeRider as FreeRider
from pl_fed.attacks.gaussian_noise import GaussianNoise as GaussianNoise
from pl_fed.attacks.inner_product_manipulation import (
    InnerProductManipulation as InnerProductManipulation,
)
from pl_fed.attacks.large_loss import LargeLoss as LargeLoss
from pl_fed.attacks.learned_stamp import LearnedStamp as LearnedStamp
from pl_fed.attacks.line_attack import LineAttack as LineAttack
from pl_fed.attacks.mimic import Mimic as Mimic
from pl_fed.attacks.min_max import MinMax as MinMax
from pl_fed.attacks.min_sum import MinSum as MinSum
from pl_fed.attacks.model_replacement import ModelReplacement as ModelReplacement
from pl_fed.attacks.neurotoxin import Neurotoxin as Neurotoxin
from pl_fed.attacks.outliers import Outliers as Outliers
from pl_fed.attacks.own_training import AttackerTraining as AttackerTraining
from pl_fed.attacks.own_training import OwnTraining as OwnTraining
from pl_fed.attacks.pfedba import PFedBA as PFedBA
from pl_fed.attacks.projected_backdoor import ProjectedBackdoor as ProjectedBackdoor
from pl_fed.attacks.random_labels import RandomLabels as RandomLabels
from pl_fed.attacks.random_updates import RandomUpdates as RandomUpdates
from pl_fed.attacks.same_value import SameValue as SameValue
from pl_fed.attacks.semantic_backdoor import SemanticBackdoor as SemanticBackdoor
from pl_fed.attacks.sign_flipping import SignFlipping as SignFlipping
from pl_fed.attacks.training_attack import TrainingAttack as TrainingAttack
from pl_fed.attacks.trigger_attack import TriggerAttack as TriggerAttack
from pl_fed.attacks.trigger_generator import TriggerGenerator as TriggerGenerator
