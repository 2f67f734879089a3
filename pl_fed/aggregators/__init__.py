"""Aggregators: modules that merge the uploads of a round into one row."""

from pl_fed.aggregators.aaggff import AAggFF as AAggFF
from pl_fed.aggregators.adafed import AdaFed as AdaFed
from pl_fed.aggregators.adaptive_clipping import AdaptiveClipping as AdaptiveClipping
from pl_fed.aggregators.afl import AFL as AFL
from pl_fed.aggregators.align_ins import AlignIns as AlignIns
from pl_fed.aggregators.base import Aggregator as Aggregator
from pl_fed.aggregators.base import PreAggregator as PreAggregator
from pl_fed.aggregators.base import PreparedUploads as PreparedUploads
from pl_fed.aggregators.bucketing import Bucketing as Bucketing
from pl_fed.aggregators.bulyan import Bulyan as Bulyan
from pl_fed.aggregators.byzantine_count import ByzantineAwareAggregator as ByzantineAwareAggregator
from pl_fed.aggregators.byzantine_count import ByzantineCount as ByzantineCount
from pl_fed.aggregators.caf import CAF as CAF
from pl_fed.aggregators.centered_clipping import CenteredClipping as CenteredClipping
from pl_fed.aggregators.chain import Chain as Chain
from pl_fed.aggregators.client_memory import ClientMemory as ClientMemory
from pl_fed.aggregators.client_mixture import ClientMixture as ClientMixture
from pl_fed.aggregators.clipping import Clipping as Clipping
from pl_fed.aggregators.crfl import CRFL as CRFL
from pl_fed.aggregators.deep_sight import DeepSight as DeepSight
from pl_fed.aggregators.dnc import DnC as DnC
from pl_fed.aggregators.fairfed import FairFed as FairFed
from pl_fed.aggregators.fedfv import FedFV as FedFV
from pl_fed.aggregators.fedmgda import FedMGDA as FedMGDA
from pl_fed.aggregators.fl_detector import FLDetector as FLDetector
from pl_fed.aggregators.fltrust import FLTrust as FLTrust
from pl_fed.aggregators.foolsgold import FoolsGold as FoolsGold
from pl_fed.aggregators.freq_fed import FreqFed as FreqFed
from pl_fed.aggregators.geometric_median import GeometricMedian as GeometricMedian
from pl_fed.aggregators.k_loss import KLoss as KLoss
from pl_fed.aggregators.k_norm import KNorm as KNorm
from pl_fed.aggregators.krum import Krum as Krum
from pl_fed.aggregators.lasa import LASA as LASA
from pl_fed.aggregators.mda import MDA as MDA
from pl_fed.aggregators.mea_med import MeaMed as MeaMed
from pl_fed.aggregators.mean import Mean as Mean
from pl_fed.aggregators.mean import weights_by_samples as weights_by_samples
from pl_fed.aggregators.median import Median as Median
from pl_fed.aggregators.memory import Memory as Memory
from pl_fed.aggregators.nearest_neighbor_mixing import (
    NearestNeighborMixing as NearestNeighborMixing,
)
from pl_fed.aggregators.nguyen_flame import NguyenFlame as NguyenFlame
from pl_fed.aggregators.norm_filter import NormFilter as NormFilter
from pl_fed.aggregators.output_layer import OutputLayer as OutputLayer
from pl_fed.aggregators.q_ffl import QFFL as QFFL
from pl_fed.aggregators.rflbat import RFLBAT as RFLBAT
from pl_fed.aggregators.robust_learning_rate import RobustLearningRate as RobustLearningRate
from pl_fed.aggregators.sign_guard import SignGuard as SignGuard
from pl_fed.aggregators.smea import SMEA as SMEA
from pl_fed.aggregators.term import Term as Term
from pl_fed.aggregators.tilted_mean import TiltedMean as TiltedMean
from pl_fed.aggregators.torchjd import TorchJD as TorchJD
from pl_fed.aggregators.trimmed_mean import TrimmedMean as TrimmedMean
from pl_fed.aggregators.weak_dp import WeakDP as WeakDP
from pl_fed.aggregators.wrapper import AggregatorWrapper as AggregatorWrapper
