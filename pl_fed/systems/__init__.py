"""Unequal clients: speed, bandwidth and availability, deadlines, and a simulated clock."""

from pl_fed.systems.base import Distribution as Distribution
from pl_fed.systems.constant import Constant as Constant
from pl_fed.systems.log_normal import LogNormal as LogNormal
from pl_fed.systems.plan import LinkBytes as LinkBytes
from pl_fed.systems.plan import RoundPlan as RoundPlan
from pl_fed.systems.plan import plan_round as plan_round
from pl_fed.systems.profiles import ClientProfiles as ClientProfiles
from pl_fed.systems.quantiles import Quantiles as Quantiles
from pl_fed.systems.settings import Systems as Systems
from pl_fed.systems.trace import Trace as Trace
from pl_fed.systems.uniform_range import UniformRange as UniformRange
