"""Unequal clients in rounds: the plan of each round, and the simulated clock of the run."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pl_fed.systems import ClientProfiles, LinkBytes, RoundPlan, Systems, plan_round


class SystemsClock:
    """Systems clock: plans rounds of unequal clients, and adds up their simulated times.

    A plan is known before its round, because all times are simulated. So clients that drop out or
    are late are never trained: they keep the states that they had before the round.

    Args:
        settings: The section ``federation.systems``.
        profiles: The numbers of all clients.
        draw: Returns the ids of the drawn clients of a round, int64 [drawn].
        count_steps: Returns the planned number of local steps of each client, by trained model.
        count_bytes: Returns the bytes that a client sends and receives in a round.

    Attributes:
        seconds: The simulated time of all completed rounds; the checkpoint has it.
    """

    def __init__(
        self,
        settings: Systems,
        profiles: ClientProfiles,
        draw: Callable[[int], Tensor],
        count_steps: Callable[[Tensor], Mapping[str, list[int]]],
        count_bytes: Callable[[], LinkBytes],
    ) -> None:
        self.settings = settings
        self.profiles = profiles
        self.draw = draw
        self.count_steps = count_steps
        self.count_bytes = count_bytes
        self.seconds = 0.0
        self._plans: dict[int, RoundPlan] = {}  # of the last two rounds: the next one is read ahead

    def plan(self, round: int) -> RoundPlan:
        """Return the plan of a round, the same in every process."""
        if round not in self._plans:
            drawn = self.draw(round)
            counts = [*self.count_steps(drawn).values()]
            steps = torch.tensor(counts, dtype=torch.int64).amax(0)  # models share their steps
            plan = plan_round(self.settings, self.profiles, drawn, steps, self.count_bytes(), round)
            self._plans = dict([*self._plans.items()][-1:]) | {round: plan}
        return self._plans[round]

    def forget_plans(self) -> None:
        """Make the plans of the next rounds again."""
        self._plans = {}

    def limit_steps(
        self, clients: Tensor, counts: Mapping[str, list[int]], round: int
    ) -> dict[str, list[int]]:
        """Return numbers of local steps, with at most those that fit into the round.

        Args:
            clients: Ids of participants, int64 [clients].
            counts: The number of steps of each client, by trained model.
            round: The round, from 0.
        """
        limits = self.plan(round).limits_of(clients)
        return {model: [*map(min, numbers, limits)] for model, numbers in counts.items()}

    def end_round(self, round: int) -> dict[str, float]:
        """Move the clock to the end of a round, and return the numbers of the round for the log."""
        plan = self.plan(round)
        self.seconds += plan.round_seconds
        return {"systems/seconds": self.seconds, **plan.report()}

    def count_receivers(self, round: int) -> int:
        """Return the number of clients that receive the model, also without a taken upload."""
        return int(self.plan(round).started.count_nonzero())
