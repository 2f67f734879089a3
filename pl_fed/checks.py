"""What is checked before training, and after each round."""

import math

import torch
from torch import Tensor

from pl_fed.clients.base import Client
from pl_fed.data.client_data import ClientData
from pl_fed.functional.random import generator


class NonFiniteLossError(RuntimeError):
    """The loss or the model of a benign client became NaN or infinite."""


def draw_byzantine(byzantine: float | list[int], num_clients: int, seed: int) -> Tensor:
    """Return which clients are byzantine, bool [clients].

    Args:
        byzantine: A fraction of the clients (rounded down), drawn by the seed, or their ids.
        num_clients: Number of clients.
        seed: The seed of the federation.

    Raises:
        ValueError: If an id is not a client's.

    Example:
        >>> draw_byzantine([1], num_clients=3, seed=0)
        tensor([False,  True, False])
    """
    chosen = torch.zeros(num_clients, dtype=torch.bool)
    if isinstance(byzantine, int | float):
        count = math.floor(byzantine * num_clients + 1e-9)
        order = torch.randperm(num_clients, generator=generator(seed, "byzantine"))
        chosen[order[:count]] = True
        return chosen
    unknown = [k for k in byzantine if not 0 <= k < num_clients]
    if unknown:
        raise ValueError(
            f"Expected argument `byzantine` to be client ids from 0 to {num_clients - 1} but got"
            f" {unknown}."
        )
    chosen[byzantine] = True
    return chosen


def check_net(client: Client, data: ClientData) -> None:
    """Run the net once on two samples.

    Raises:
        ValueError: If it does not take the inputs, or its output does not fit the classes.
    """
    net, mode = client.global_model, client.training
    index = data.train.index[:2]
    example = next(net.parameters())
    client.eval()
    try:
        with torch.no_grad():
            outputs = net(data.x[index].to(example.device, example.dtype))
    except (RuntimeError, ValueError, IndexError) as error:
        raise ValueError(
            f"Expected argument `net` to take inputs of shape {list(data.x.shape[1:])} but"
            f" {type(net).__name__} failed: {error}"
        ) from error
    finally:
        client.train(mode)
    shape = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if data.num_classes and shape != [len(index), data.num_classes]:
        raise ValueError(
            f"Expected argument `net` to give one number for each of the {data.num_classes}"
            f" classes, shape [batch, {data.num_classes}], but got {shape} for {len(index)}"
            " samples."
        )


def check_finite(
    clients: Tensor, losses: Tensor, rows: list[Tensor], is_byzantine: Tensor, round: int
) -> None:
    """Stop a run in which a benign client has diverged.

    Args:
        clients: Ids [clients].
        losses: Their losses [clients].
        rows: Models or uploads [clients, numel].
        is_byzantine: Which of all clients may diverge as they like.
        round: The round.

    Raises:
        NonFiniteLossError: With the round, the client and the likely cause.
    """
    finite = losses.isfinite()
    for each in rows:
        finite = finite & each.isfinite().all(dim=1)
    broken = ~finite.cpu() & ~is_byzantine[clients]
    if broken.any():
        loss = float(losses[broken.to(losses.device)][0])
        raise NonFiniteLossError(
            f"Expected finite losses but in round {round} client {int(clients[broken][0])} got a"
            f" loss of {loss}, or a model with NaN: as a rule the learning rate is too high (or λ"
            " times it is above 2), or the inputs are not normalised. The checkpoint of the last"
            " good round is kept."
        )
