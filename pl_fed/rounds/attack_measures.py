"""Measures of an attack in a round: is it detected, and does it look like a benign upload?

Detection compares the uploads that the aggregator reports by
:meth:`~pl_fed.types.RoundContext.reject_rows` with the attackers of the round. Stealth compares the
attackers' uploads u_a with the benign ones u_i, with the benign mean m and spread s::

    attack_distance = mean_a ‖u_a − m‖ / s,  s² = mean_i ‖u_i − m‖²
    attack_cosine = mean_a ⟨u_a, m⟩ / (‖u_a‖ ‖m‖)

A distance near 1 and a cosine near that of benign uploads leave a defence little to hold on to.
"""

import math

import torch
from torch import Tensor

from pl_fed.distributed.work_share import WorkShare
from pl_fed.functional.aggregation import row_norm, weighted_sum


class AttackMeasures:
    """Attack measures: detection and stealth of the attackers' uploads in one round."""

    def __init__(self) -> None:
        self._flagged: set[int] | None = None  # None: the aggregator reports no uploads
        self._attackers: set[int] = set()
        self._sums: list[Tensor] = []  # of distances and of cosines, [2]

    def flag(self, clients: Tensor) -> None:
        """Add clients whose uploads the aggregator rejects, int64; an empty tensor counts."""
        self._flagged = (self._flagged or set()) | set(clients.tolist())

    def add(self, share: WorkShare, rows: Tensor, attackers: Tensor, benign: Tensor) -> None:
        """Measure the attackers' uploads among those that an aggregator merges.

        Every process must call this method. Nothing is measured without attackers.

        Args:
            share: The distribution of the uploads over the processes.
            rows: The uploads of this process's clients, [clients, numel].
            attackers: A mask of the attackers of the round, bool [cohort].
            benign: A mask of the benign clients, bool [cohort].
        """
        if not attackers.any():
            return
        self._attackers |= set(share.cohort[attackers].tolist())
        num_benign = int(benign.count_nonzero())
        shares = share.select_own(benign).to(rows.device) / max(1, num_benign)
        mean = share.processes.sum(weighted_sum(rows, shares))
        sums = rows.new_zeros(3, dtype=torch.float64)
        mean_norm = row_norm(mean).double()
        for row, forged, honest in zip(
            rows, share.select_own(attackers).tolist(), share.select_own(benign).tolist()
        ):
            if not forged and not honest:
                continue
            distance = row_norm(row.to(mean) - mean).double()
            if honest:
                sums[0] += distance.square() / num_benign
            else:
                norms = row_norm(row).double() * mean_norm
                sums[1] += distance
                sums[2] += torch.dot(row.to(mean), mean).double() / norms  # 0 / 0 is NaN
        variance, distances, cosines = share.processes.sum(sums)
        spread = variance.sqrt() if num_benign else variance.new_tensor(math.nan)
        self._sums.append(torch.stack([distances / spread, cosines]))

    def report(self) -> dict[str, Tensor | float]:
        """Return the numbers of the round; empty without an attacker's upload.

        Detection is left out if the aggregator reports no rejected uploads at all. Precision is NaN
        if it rejects none.
        """
        count = len(self._attackers)
        if not count:
            return {}
        distance, cosine = torch.stack(self._sums).sum(0) / count
        report: dict[str, Tensor | float] = {"attack_distance": distance, "attack_cosine": cosine}
        if self._flagged is not None:
            hits, flagged = len(self._flagged & self._attackers), len(self._flagged)
            report |= {
                "attackers": float(count),
                "flagged": float(flagged),
                "flagged_attackers": float(hits),
                "detection_precision": hits / flagged if flagged else math.nan,
                "detection_recall": hits / count,
            }
        return {f"train/{name}": number for name, number in report.items()}
