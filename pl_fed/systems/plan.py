"""The plan of a round: the uploads that arrive, the steps that fit, and the simulated time.

The server takes the first uploads of more clients than it needs (K. Bonawitz et al., "Towards
federated learning at scale: System design", MLSys 2019, arXiv 1902.01046, section 2.2), or partial
work by a deadline (T. Li et al., "Federated optimization in heterogeneous networks", MLSys 2020,
arXiv 1812.06127, section 5.2).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pl_fed.systems.profiles import ClientProfiles
from pl_fed.systems.settings import Systems


@dataclass(frozen=True)
class LinkBytes:
    """Link bytes: the bytes that a client sends and receives in a round."""

    upload: int
    download: int


_ROUNDING = 1e-9  # of the deadline: a rounding error is no delay
_NO_LIMIT = 2**53


@dataclass(frozen=True)
class RoundPlan:
    """Round plan: the clients of a round, their steps and their times. All tensors are on the CPU.

    Attributes:
        drawn: Ids of the drawn clients, int64 [drawn].
        started: Whether a client answers, bool [drawn].
        finished: Whether a client's upload is sent, bool [drawn].
        late: Whether a client misses the deadline, bool [drawn].
        taken: Whether the server takes a client's upload, bool [drawn].
        steps: The local steps that the times are those of, int64 [drawn].
        limits: The most local steps that fit into the round, int64 [drawn].
        seconds: The time of each client's upload after the start of the round, float64 [drawn].
        round_seconds: The length of the round.
    """

    drawn: Tensor
    started: Tensor
    finished: Tensor
    late: Tensor
    taken: Tensor
    steps: Tensor
    limits: Tensor
    seconds: Tensor
    round_seconds: float

    @property
    def participants(self) -> Tensor:
        """The ids of the clients with an upload that the server takes, int64 [participants]."""
        return self.drawn[self.taken]

    def limits_of(self, clients: Tensor) -> list[int]:
        """Return the largest numbers of local steps of some drawn clients."""
        limits = dict(zip(self.drawn.tolist(), self.limits.tolist()))
        return [limits[client] for client in clients.tolist()]

    def report(self) -> dict[str, float]:
        """Return the numbers of the round for the log."""
        steps = self.steps[self.taken]
        return {
            "systems/round_seconds": self.round_seconds,
            "systems/participants": float(len(steps)),
            "systems/dropped": float((~self.finished).count_nonzero()),
            "systems/late": float(self.late.count_nonzero()),
            "systems/surplus": float((self.finished & ~self.late & ~self.taken).count_nonzero()),
            "systems/mean_steps": float(steps.double().mean()) if len(steps) else math.nan,
        }


def plan_round(
    settings: Systems,
    profiles: ClientProfiles,
    drawn: Tensor,
    steps: Tensor,
    link: LinkBytes,
    round: int,
) -> RoundPlan:
    """Return the plan of a round. It depends on the arguments alone.

    Client k with K_k planned steps takes D / download_k + K_k / speed_k + U / upload_k seconds.

    Args:
        settings: The section.
        profiles: The numbers of all clients.
        drawn: Ids of the drawn clients, int64 [drawn].
        steps: K, the planned numbers of local steps, int64 [drawn].
        link: The bytes U and D of a client.
        round: The round, from 0.
    """
    numbers = profiles.select(drawn, round)
    started = profiles.draw_coins("availability", drawn, round) < numbers["availability"]
    drops_out = profiles.draw_coins("dropout", drawn, round) < numbers["dropout"]
    finished = started & ~drops_out
    transfer = torch.zeros(len(drawn), dtype=torch.float64)
    for column, size in (("download", link.download), ("upload", link.upload)):
        if column in numbers:
            transfer = transfer + size / numbers[column]
    deadline = math.inf if settings.deadline is None else settings.deadline
    latest = deadline * (1 + _ROUNDING)
    limits, fitting = torch.full_like(steps, _NO_LIMIT), steps
    if settings.policy == "partial":
        most = ((latest - transfer) * numbers["speed"]).floor()
        limits = most.clamp(0, _NO_LIMIT).long()
        fitting = torch.minimum(steps, limits)
    seconds = transfer + fitting / numbers["speed"]
    misses = seconds > latest
    if settings.policy == "partial":
        misses = (transfer > latest) | ((fitting == 0) & (steps > 0))
        seconds = seconds.clamp(max=deadline).where(~misses, seconds)
    late = finished & misses
    taken = finished & ~misses
    is_full = False
    if settings.take_first is not None:
        places = taken.nonzero().flatten()
        # a draw orders equal times, as of clients with one speed; else it would be the ids
        order = profiles.draw_coins("arrival", drawn, round)[places].argsort(stable=True)
        order = order[seconds[places[order]].argsort(stable=True)]
        first = places[order[: settings.take_first]]
        is_full = len(first) == settings.take_first
        taken = torch.zeros_like(taken)
        taken[first] = True
    length = float(seconds[taken].max()) if bool(taken.any()) else 0.0
    if bool(late.any()) and not is_full:
        length = deadline  # the server waits for late clients until then
    return RoundPlan(drawn, started, finished, late, taken, fitting, limits, seconds, length)
