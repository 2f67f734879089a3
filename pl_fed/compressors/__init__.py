"""Compressors: codecs that shorten the uploads on their way to the server."""

from pl_fed.compressors.base import Compressor as Compressor
from pl_fed.compressors.base import Sending as Sending
from pl_fed.compressors.natural import NaturalCompression as NaturalCompression
from pl_fed.compressors.power_sgd import PowerSGD as PowerSGD
from pl_fed.compressors.qsgd import QSGD as QSGD
from pl_fed.compressors.random_k import RandomK as RandomK
from pl_fed.compressors.sign_sgd import SignSGD as SignSGD
from pl_fed.compressors.top_k import TopK as TopK
