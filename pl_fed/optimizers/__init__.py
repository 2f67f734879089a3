"""Optimizers that torch.optim does not contain, and schedules over local steps."""

from pl_fed.optimizers.box_sgd import BoxSGD as BoxSGD
from pl_fed.optimizers.local_cosine import LocalCosine as LocalCosine
from pl_fed.optimizers.local_one_cycle import LocalOneCycle as LocalOneCycle
from pl_fed.optimizers.local_schedule import LocalSchedule as LocalSchedule
from pl_fed.optimizers.yogi import Yogi as Yogi
