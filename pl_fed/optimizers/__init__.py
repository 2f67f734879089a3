"""Server optimizers that torch.optim lacks."""

from pl_fed.optimizers.yogi import Yogi as Yogi
