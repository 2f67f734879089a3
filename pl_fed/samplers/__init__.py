"""Samplers: classes that draw the cohort, the clients that take part in a round."""

from pl_fed.samplers.all_clients import All as All
from pl_fed.samplers.base import Sampler as Sampler
from pl_fed.samplers.by_size import BySize as BySize
from pl_fed.samplers.cyclic import Cyclic as Cyclic
from pl_fed.samplers.fixed_cohort import FixedCohort as FixedCohort
from pl_fed.samplers.poisson import Poisson as Poisson
from pl_fed.samplers.uniform import Uniform as Uniform
