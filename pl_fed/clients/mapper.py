"""MAPPER: the best of several mixtures of a client's local model and the global model.

Y. Mansour, M. Mohri, J. Ro and A. T. Suresh. "Three approaches for personalization with
applications to federated learning". arXiv 2002.10619 (section 5, model interpolation).

In each round client k minimises f_k(λ v + (1 − λ) w^t) over its own v, for each of a few λ. It
takes the λ and the v with the lowest loss. Then it minimises f_k(λ v + (1 − λ) w) over w, and sends
the change of w. Its personal model is the mixture.

The computation here: a candidate of λ is the mixture u = λ v + (1 − λ) w^t itself. A step of SGD on
v is a step on u with λ² times its gradient, and v follows from u at the end. Each candidate has its
own w, trained by f_k(u + (1 − λ)(w − w^t)). The client sends the change of the chosen candidate's
w.

Departs from the paper:

- v and w alternate at each minibatch; in the paper the training of v precedes that of w.
- The client's validation data choose λ, not its training data. Clients without validation data take
  the middle λ.
- The mixture is one of parameters, not of outputs, as in the reference code of Ditto's baseline
  "mapper".

As here, clients keep v from round to round in that code. (It sends the last client's change only,
and takes a single step on w.)
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from pl_fed.arguments import check_instances
from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Model, ModelRows
from pl_fed.types import Batch


class Mapper(Client):
    """MAPPER: each client's personal model is λ v_k + (1 − λ) w, with the best λ of a list.

    The best λ has the lowest loss on the client's validation data.

    Args:
        net: The net that clients train: see :class:`Client`.
        lams: The candidates of λ, each in (0, 1]: 1 trains local models. Each λ trains two models.
            Only SGD, with or without momentum, moves the mixtures as it would move v. Weight decay
            shortens each mixture and each w; a term of F_k would act otherwise.
        local_steps: Minibatch steps on each model in a round; or give ``local_epochs``.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If ``lams`` is empty, or has a repeated λ or a λ out of range.

    Example:
        >>> client = Mapper(nn.Linear(4, 2), lams=[0.5])
        >>> client.trained, client.evaluated
        (('personal_0', 'central_0'), ('global', 'personal'))
    """

    def __init__(
        self, net: nn.Module, lams: Sequence[float] = (0.25, 0.5, 0.75), **kwargs: Any
    ) -> None:
        check_instances(Sequence, lams=lams)
        if not lams or len(set(lams)) < len(lams) or not all(0 < lam <= 1 for lam in lams):
            raise ValueError(
                f"Expected argument `lams` to be distinct numbers in (0, 1] but got {lams}."
            )
        self.mixtures = tuple(f"personal_{place}" for place in range(len(lams)))
        self.centrals = tuple(f"central_{place}" for place in range(len(lams)))
        mixture = Model(kept=False, evaluated=False, validated=True)
        models = {
            "global": Model(trained=False),
            **dict.fromkeys(self.mixtures, mixture),
            **dict.fromkeys(self.centrals, Model(kept=False, evaluated=False)),
            "personal": Model(trained=False, kept=False),
        }
        super().__init__(net, models=models, **kwargs)
        self.lams = tuple(lams)
        self.add_state("local", self.initial_row)  # v_k
        self.add_state("choice", len(lams) // 2)  # the position of the chosen λ

    def begin(self, client: ClientRound) -> None:
        """Mix the candidates and the personal model; each w begins at w^t with its statistics."""
        v, w = client.states["local"], client.broadcast.parameters
        for name, lam in zip(self.mixtures, self.lams):
            client.models[name].parameters = lam * v + (1 - lam) * w
        for name in self.centrals:
            client.models[name].statistics[:] = client.broadcast.statistics
        client.models["personal"] = self._choose(client, self.mixtures)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return Σ over λ of λ² f_k(u) + f_k(u + (1 − λ)(w − w^t)); the second term moves w."""
        centre = self.tensors("broadcast")
        losses = []
        for mixture, central, lam in zip(self.mixtures, self.centrals, self.lams):
            u, w = self.parameters_of(mixture), self.parameters_of(central)
            mixed = {name: u[name].detach() + (1 - lam) * (w[name] - centre[name]) for name in u}
            losses.append(lam**2 * self.loss(mixture, batch))
            losses.append(self.loss_at(central, mixed, batch))
        return sum(losses[1:], losses[0])

    def end_round(self, client: ClientRound) -> Tensor | None:
        """Choose λ, keep its v, and upload the change of its w."""
        w = client.broadcast.parameters
        best = client.best_by_validation(self.mixtures, otherwise=len(self.lams) // 2)
        client.states["choice"] = best[:, None].to(client.states["choice"])
        lam = w.new_tensor(self.lams)[best[:, None]]
        mixture = self._choose(client, self.mixtures).parameters
        client.states["local"] = (mixture - (1 - lam) * w) / lam
        central = self._choose(client, self.centrals)
        client.global_statistics = central.statistics
        return central.parameters - w

    def _choose(self, client: ClientRound, names: Sequence[str]) -> ModelRows:
        """Return the model of each client's chosen λ."""
        choice = client.states["choice"][:, 0].long()
        return ModelRows.choose([client.models[name] for name in names], choice)
