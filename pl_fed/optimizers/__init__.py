"""Server optimizers that torch.optim does not contain."""

from pl_fed.optimizers.yogi import Yogi as Yogi
