"""DittoChoice: Ditto with a choice of λ by each client's validation data, at the end of a round.

T. Li, S. Hu, A. Beirami and V. Smith. "Ditto: Fair and robust federated learning through
personalization". ICML 2021. arXiv 2012.04221. Appendix D.2: each device takes the best of three λ
on its own validation data.

- The λ are {0.05, 0.1, 0.2} under strong attacks (model replacement, or more than half of the
  devices), and {0.1, 1, 2} otherwise.
- A device with fewer than 4 validation samples takes 0.1 under strong attacks, and 1 otherwise.
- The paper does not mention devices with 4 or 5 samples; here they choose.

In all rounds, each client trains a candidate of the personal model for each λ. Its personal model
is the candidate with the lowest loss on its validation data at the end of its last round. The paper
states neither the time nor the measure of the choice. Its reference code chooses λ at each local
step, as :class:`pl_fed.clients.DittoGreedy` does.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from pl_fed.arguments import check_instances, check_integers, check_nonnegative
from pl_fed.clients.contract import ClientRound, Model, ModelRows
from pl_fed.clients.ditto import Ditto


class DittoChoice(Ditto):
    """DittoChoice: Ditto with one personal model for each λ; each client takes the best of them.

    The best model has the lowest validation loss. Clients keep the models of all λ: memory and
    local work on personal models are those of Ditto, times the number of λ.

    Args:
        net: The net that clients train: see :class:`Client`.
        lams: The candidates of λ, each ≥ 0; the paper's are {0.1, 1, 2}, and {0.05, 0.1, 0.2}
            under strong attacks.
        lam: λ of clients with too few validation samples, one of ``lams``; 1 in the paper, and
            0.1 under strong attacks.
        min_validation: Validation samples that a client needs to choose λ, ≥ 1; 4 in the paper.
        personal_lr: Learning rate of v; the optimizer's by default.
        personal_steps: s, the minibatch steps on each v in a round; as many as on w by default.
        personal_epochs: The work on v in passes over the client's data, instead of
            ``personal_steps``.
        regularizer: The distance of the pull: ``"l2"``, ``"fisher"`` or ``"kl"``; see
            :class:`Pulled`.
        global_mu: μ ≥ 0 of FedProx for the global model: adds μ/2 ‖w − w^t‖² to w's own loss.
        local_steps: r, the minibatch steps on w in a round; or give ``local_epochs``.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If ``lams`` is empty, or has a repeated, negative or infinite λ; if ``lam`` is
            none of them, or ``min_validation`` is below 1.

    Example:
        >>> client = DittoChoice(nn.Linear(4, 2), lams=[0.1, 1.0], lam=1.0)
        >>> client.trained, client.evaluated
        (('global', 'personal_0', 'personal_1'), ('global', 'personal'))
    """

    def __init__(
        self,
        net: nn.Module,
        lams: Sequence[float] = (0.1, 1.0, 2.0),
        lam: float = 1.0,
        min_validation: int = 4,
        **kwargs: Any,
    ) -> None:
        check_integers(1, min_validation=min_validation)
        check_lams(lams)
        if lam not in lams:
            raise ValueError(f"Expected argument `lam` to be one of {lams} but got {lam}.")
        super().__init__(net, lam, **kwargs)
        self.candidates = tuple(f"personal_{place}" for place in range(len(lams)))
        self.candidate_lams = tuple(lams)
        self.min_validation = min_validation
        self._fallback = self.candidate_lams.index(lam)
        candidate = replace(self.models["personal"], evaluated=False, validated=True)
        self.set_models(
            {
                "global": self.models["global"],
                **dict.fromkeys(self.candidates, candidate),
                "personal": Model(trained=False, kept=False),
            }
        )
        self.add_state("choice", self._fallback)  # the chosen candidate

    def lams(self) -> dict[str, float]:
        """Return the λ of each candidate, by the candidate's name."""
        return dict(zip(self.candidates, self.candidate_lams))

    def begin(self, client: ClientRound) -> None:
        """Make the chosen candidate the personal model."""
        candidates = [client.models[name] for name in self.candidates]
        client.models["personal"] = ModelRows.choose(
            candidates, client.states["choice"][:, 0].long()
        )

    def end_round(self, client: ClientRound) -> Tensor | None:
        """Choose a candidate, and upload w_k − w^t."""
        best = client.best_by_validation(self.candidates, self._fallback, self.min_validation)
        client.states["choice"] = best[:, None].to(client.states["choice"])
        return super().end_round(client)


def check_lams(lams: Sequence[float]) -> None:
    """Refuse candidates of λ that are not distinct, nonnegative, finite numbers.

    Raises:
        TypeError: If ``lams`` is no sequence.
        ValueError: If ``lams`` is empty, or has a repeated, negative or infinite λ.
    """
    check_instances(Sequence, lams=lams)
    for lam in lams:
        check_nonnegative(lams=lam)
    if not lams or len(set(lams)) < len(lams):
        raise ValueError(f"Expected argument `lams` to be distinct numbers but got {lams}.")
