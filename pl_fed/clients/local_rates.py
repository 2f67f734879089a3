"""The learning rates of a chunk's local steps, from the schedule of the local optimizer."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pl_fed.clients.contract import model_of_group
from pl_fed.devices import numbers_on
from pl_fed.optimizers import LocalSchedule


def list_local_rates(
    schedule: LocalSchedule | None,
    optimizer: torch.optim.Optimizer,
    steps: Mapping[str, Sequence[int]],
    round: int,
) -> Tensor | None:
    """Return the learning rate of each parameter group in each local step of each client.

    Args:
        schedule: The schedule of the local steps; ``None`` without one.
        optimizer: The local optimizer, with the rates of the round.
        steps: The number of local steps of each client, by trained model.
        round: The round, from 0.

    Returns:
        float64 [clients, steps, groups], where a client keeps its last rate after its last step;
        ``None`` without a schedule.
    """
    if schedule is None:
        return None
    groups = optimizer.param_groups
    columns = [steps[model_of_group(group)] for group in groups]
    length = max((max(column, default=0) for column in columns), default=0)
    rates = torch.zeros(len(columns[0]), length, len(groups), dtype=torch.float64)
    for place, (group, column) in enumerate(zip(groups, columns)):
        for count in {*column} - {0}:
            own = list(schedule.local_rates(float(group["lr"]), count, round, place))
            complete = torch.tensor(own + own[-1:] * (length - count), dtype=torch.float64)
            rates[torch.tensor([number == count for number in column]), :, place] = complete
    return rates


def find_mean_rates(
    rates: Tensor,
    optimizer: torch.optim.Optimizer,
    steps: Mapping[str, Sequence[int]],
    like: Tensor,
) -> dict[str, Tensor]:
    """Return the mean learning rate of each client over its local steps on each trained model.

    Times the number of steps, it is the sum of the rates: the length of the local path, as
    SCAFFOLD's K η, for steps of different size.

    Args:
        rates: The rates of :func:`list_local_rates`.
        optimizer: The local optimizer; a model's first parameter group counts.
        steps: The number of local steps of each client, by trained model.
        like: A tensor with the models' dtype and device.

    Returns:
        [clients, 1] for each model; the rate of the round for a client without a step.
    """
    means: dict[str, Tensor] = {}
    for place, group in enumerate(optimizer.param_groups):
        model = model_of_group(group)
        if model not in means:
            own = [
                float(rates[client, :count, place].mean()) if count else float(group["lr"])
                for client, count in enumerate(steps[model])
            ]
            means[model] = numbers_on(like, own, like.dtype)[:, None]
    return means
