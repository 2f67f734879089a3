"""Free riders: clients that send an upload without any training.

Y. Fraboni, R. Vidal and M. Lorenzi, "Free-rider Attacks on Model Aggregation in Federated
Learning", AISTATS 2021, arXiv 2006.11901 (plain and disguised free riders)::

    plain:      Δ_k = 0
    disguised:  Δ_k ~ N(0, φ(t)²) for each coordinate,   φ(t) = c σ t^(−γ)  or  c σ e^(−γ (t − 1))

t is 1 in the first two rounds, and then the number of the round from 0. σ is the mean over the
coordinates of |w^1 − w^0|, of the first two models that the attacker receives. Before the second
one, σ is 0.001.

J. Lin, M. Du and J. Liu, "Free-riders in Federated Learning: Attacks and Defenses", arXiv
1911.12560 (delta weights, also with noise)::

    delta:     Δ_k = w^t − w^{t'},               t' = the last round in which k received a model
    advanced:  Δ_k = w^t − w^{t'} + N(0, s²)

A free rider wants the final model, and does not want to harm it. Compare the accuracy with that of
a run without the attack; whether a defence detects the free riders is the other question.

Departs from the papers: every free rider counts its own rounds, so that t is the number of its
earlier participations. With client sampling, a free rider knows the models of these rounds only.
If there are several global models, it counts and compares the rounds of each by itself.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pl_fed.arguments import check_choice, check_nonnegative
from pl_fed.attacks.base import Attack
from pl_fed.functional.aggregation import merging_dtype
from pl_fed.random import key, normal_row
from pl_fed.types import RoundContext

Disguise = Literal["plain", "noise", "delta", "advanced"]
Decay = Literal["power", "exponential"]
_FIRST_SIGMA = 1e-3


class FreeRider(Attack):
    """Free rider: sends no change, noise, or the last change of the global model.

    The uploads do not depend on the attackers' data. pl_fed still trains the attackers, and the
    attack ignores the result.

    Args:
        disguise: ``"plain"`` sends 0; ``"noise"`` sends noise that decays; ``"delta"`` sends the
            change of the global model since the attacker's last round; ``"advanced"`` adds noise to
            that change.
        scale: c ≥ 0, the factor of the noise of ``"noise"``.
        gamma: γ ≥ 0, the speed of its decay; the paper takes 0.5, 1 and 2.
        decay: The form of φ: ``"power"`` for t^(−γ), ``"exponential"`` for e^(−γ (t − 1)).
        std: s ≥ 0, the standard deviation of the noise of ``"advanced"``.

    Shape:
        - ``own``: [b, d]; only its shape counts.
        - ``context.broadcast``: [d], except for ``"plain"``.
        - output: [b, d].

    Raises:
        ValueError: If an argument is out of range; on :meth:`forge`, if ``context.broadcast`` does
            not have the uploads' length.

    Example:
        >>> attack, own = FreeRider("delta"), torch.zeros(1, 2)
        >>> for w in ([1.0, 2.0], [0.5, 2.5]):
        ...     attackers, broadcast = torch.tensor([4]), torch.tensor(w)
        ...     context = RoundContext(attackers=attackers, broadcast=broadcast)
        ...     print(attack.forge(own, own, context))
        tensor([[0., 0.]])
        tensor([[-0.5000,  0.5000]])
    """

    def __init__(
        self,
        disguise: Disguise = "noise",
        scale: float = 1.0,
        gamma: float = 1.0,
        decay: Decay = "power",
        std: float = 1e-3,
    ) -> None:
        check_choice(get_args(Disguise), disguise=disguise)
        check_nonnegative(scale=scale, gamma=gamma, std=std)
        check_choice(get_args(Decay), decay=decay)
        self.disguise = disguise
        self.scale = scale
        self.gamma = gamma
        self.decay = decay
        self.std = std
        # by attacker and center
        self._received: dict[tuple[int, int], Tensor] = {}  # the last broadcast
        self._sigmas: dict[tuple[int, int], float] = {}
        self._participations: dict[tuple[int, int], int] = {}

    def forge(self, honest: Tensor, own: Tensor, context: RoundContext) -> Tensor:
        """Return uploads without training, and remember the broadcast for each attacker."""
        forged = torch.zeros_like(own)
        if self.disguise == "plain":
            return forged
        dtype = merging_dtype(own)
        broadcast = context.broadcast.detach().to(own.device, dtype)
        if broadcast.shape != own.shape[1:]:
            raise ValueError(
                f"Expected `context.broadcast` to be the global model, {own.shape[1]} numbers, for"
                f" FreeRider but got shape {list(broadcast.shape)}."
            )
        for row, client in zip(forged, self.attacker_ids(own, context)):
            rider = client, context.center
            received = self._received.get(rider)
            change = None if received is None else broadcast - received.to(broadcast)
            rides = self._participations.get(rider, 0)
            upload = torch.zeros_like(broadcast)
            std = 0.0
            if self.disguise == "noise":
                if rides == 1 and change is not None:
                    sent = context.select_sent(change)
                    self._sigmas[rider] = float(sent.double().abs().mean())
                std = self.noise_scale(rides, self._sigmas.get(rider, _FIRST_SIGMA))
            elif change is not None:
                upload, std = change, self.std if self.disguise == "advanced" else 0.0
            if std:
                draw = key(context.seed, "free-rider", context.round, client)
                upload = upload + std * normal_row(draw, len(upload)).to(upload)
            row.copy_(upload)
            self._participations[rider] = rides + 1
            if self.disguise != "noise" or rides == 0:
                self._received[rider] = broadcast.clone()
            elif rides == 1:
                del self._received[rider]  # σ is fixed
        return forged

    def noise_scale(self, rides: int, sigma: float) -> float:
        """Return φ, the standard deviation of the noise.

        Args:
            rides: Number of the attacker's earlier participations.
            sigma: σ ≥ 0.
        """
        t = max(rides, 1)
        shape = t**-self.gamma if self.decay == "power" else math.exp(-self.gamma * (t - 1))
        return self.scale * sigma * shape

    def state_dict(self) -> dict[str, Any]:
        """Return each attacker's last broadcast, σ and number of participations, by center."""
        received = {rider: row.cpu() for rider, row in self._received.items()}
        parts: dict[str, dict[tuple[int, int], Any]] = {
            "participations": self._participations,
            "sigma": self._sigmas,
            "received": received,
        }
        return {
            f"{part}.{client}.{center}": value
            for part, values in parts.items()
            for (client, center), value in values.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned.

        Raises:
            ValueError: If the state is that of another attack.
        """
        parts: dict[str, dict[tuple[int, int], Any]]
        parts = {"participations": {}, "sigma": {}, "received": {}}
        for name, value in state.items():
            part, *rider = name.split(".")
            if part not in parts:
                raise ValueError(
                    f"Expected a checkpoint with the state of FreeRider but got {name!r}: resume"
                    " with the attack of the checkpoint."
                )
            client, center = map(int, [*rider, "0"][:2])  # early checkpoints name no center
            parts[part][client, center] = value
        self._participations = parts["participations"]
        self._sigmas = parts["sigma"]
        self._received = parts["received"]
