"""FLAME: personal and global models by the alternating direction method of multipliers.

S. Zhu, J. Zeng, S. Wang, Y. Sun, X. Li, Y. Yao and Z. Peng. "On ADMM in heterogeneous federated
learning: Personalization, robustness, and fairness". arXiv 2407.16397.

The problem (9): min Σ_i α_i (f_i(θ_i) + λ/2 ‖θ_i − w_i‖²) such that w_i = w for all i. Algorithm 1,
for each client of the cohort of round t::

    θ_i ← θ_i − η (∇f_i(θ_i) + λ (θ_i − w_i))        H passes, from its own θ_i       (11), line 12
    w_i ← (λ α_i θ_i + ρ w − π_i) / (λ α_i + ρ)                                       (12), line 14
    π_i ← π_i + ρ (w_i − w)                                                           (13), line 15
    u_i ← w_i + π_i / ρ                                                               line 16

w is the mean of the u_i of all clients (14). The start is θ_i = w_i = u_i = w^0 and π_i = 0.
Therefore π_i = λ α_i (θ_i − w_i) at all times (Lemma 3). This follows from (12) and (13) alone,
for any computation of θ_i. If ρ = λ α_i for all i, as in the paper's comparisons, u_i is θ_i, and w
is the mean of the θ_i.

Departs from the paper: as in the reference code, the server merges at the end of a round instead of
at the beginning of the next.

Options give the reference code's variants:

- ``pull_to="broadcast"`` pulls θ_i to w^t instead of to the client's own w_i^t. With ρ = λ α_i this
  is mean-regularised multi-task learning, and pFedMe with a server step η λ = 1.
- The optimizer's ``momentum`` of 0.5 and ``weight_decay`` of 0.01 are the reference code's momentum
  and additional term 0.01 θ_i.
- ``lagged_global`` evaluates the global model of the previous round.

Only the reference code updates w_i and π_i after each of the H local epochs; for H = 1 there is no
difference.

Corrections of slips in the paper: θ_i^(t+1) is the last iterate (line 13 takes the previous one);
line 11 means ∇f_i. The bound in (17) is on the squared norm of α_i (∇f_i + λ (θ_i − w_i)), as in
the paper, although the step (55)-(56) in the proof of Lemma 1 needs it without α_i.
"""

from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from pl_fed.arguments import check_choice, check_interval, check_positive
from pl_fed.clients.admm import ADMM
from pl_fed.clients.contract import ClientRound, Model, ModelRows
from pl_fed.data.client_data import ClientData
from pl_fed.types import Batch, Population


class FLAME(ADMM):
    """FLAME (Algorithm 1): θ_i is the model ``personal``; :class:`ADMM` describes the upload.

    Args:
        net: The net that clients train: see :class:`Client`.
        lam: λ > 0, the strength of the pull.
        rho: The penalty ρ > 0.
        weights: The α_i: ``"uniform"``, 1 / clients, or ``"samples"``, a client's share of all
            training samples. The server's mean is uniform in both cases (14).
        pull_to: ``"own"`` pulls θ_i to the client's own w_i, as in the paper; ``"broadcast"``
            pulls it to w^t, as in the reference code.
        tolerance: ε^0 > 0 of (17): θ_i stops once ‖α_i (∇f_i(θ_i) + λ (θ_i − w_i))‖² is at most
            ε_i. ε_i begins at ε^0. The client multiplies it by ``decay`` before the first step of
            each of its rounds. The gradient is that of the current minibatch; it equals ∇f_i if a
            batch contains all of a client's data. The local work is the upper limit;
            ``train/solved`` is the share of steps after the stop. A tolerance costs a second
            gradient in each step. ``None`` does all of the local work.
        decay: υ in (0, 1) of (18), the same for all clients.
        smoothness: The Lipschitz constant L of the ∇f_i. With it, pl_fed checks the conditions of
            Theorem 1 on ρ, λ and α_i, and warns of violated conditions. ``None`` checks nothing.
        lagged_global: Whether to evaluate also the w^t of the previous round, as the model
            ``lagged_global``. Its running statistics are the current ones.
        local_steps: Minibatch steps on θ_i in a round; or give ``local_epochs``.
        local_epochs: H, the passes over the client's data in a round; 1 if neither is given.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If an argument is out of range. With a ``tolerance``, also if the net has
            running statistics (BatchNorm), or the optimizer is not SGD without momentum and weight
            decay: others move a model without a gradient.

    Example:
        >>> sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.01)
        >>> client = FLAME(nn.Linear(4, 2), lam=1.0, rho=0.1, optimizer=sgd, local_epochs=2)
        >>> client.trained, client.evaluated
        (('personal',), ('global', 'personal'))
        >>> list(client.state_defaults())  # θ_i, w_i and π_i
        ['personal', 'local', 'dual', 'personal.statistics']
    """

    def __init__(
        self,
        net: nn.Module,
        lam: float = 1.0,
        rho: float = 0.1,
        weights: Literal["uniform", "samples"] = "uniform",
        pull_to: Literal["own", "broadcast"] = "own",
        tolerance: float | None = None,
        decay: float = 0.9,
        smoothness: float | None = None,
        lagged_global: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, rho, weights, **kwargs)
        check_positive(lam=lam)
        if tolerance is not None:
            check_positive(tolerance=tolerance)
        if smoothness is not None:
            check_positive(smoothness=smoothness)
        check_interval("(0, 1)", decay=decay)
        check_choice(("own", "broadcast"), pull_to=pull_to)
        if tolerance is not None:
            self.refuse_running_statistics("`tolerance` needs a second gradient in each step")
            self.single_batch_reason = "`tolerance` bounds the gradient of each minibatch"
        self.lam = lam
        self.centre = "local" if pull_to == "own" else "broadcast"
        self.tolerance = tolerance
        self.decay = decay
        self.smoothness = smoothness
        self.lagged_global = lagged_global
        self.add_state("local", self.initial_row)  # w_i
        self.add_state("dual", self.zero_row)  # π_i
        if tolerance is not None:
            self.add_state("tolerance", tolerance)  # ε_i
        if lagged_global:
            lagged = Model(trained=False, kept=False)
            self.set_models(
                {
                    "global": self.models["global"],
                    "lagged_global": lagged,
                    "personal": self.models["personal"],
                }
            )
            self.add_server_state("lagged", self.initial_row)  # w^t of the previous round

    def begin(self, client: ClientRound) -> None:
        """Fill in the global model of the previous round, if it is evaluated."""
        if self.lagged_global:
            lagged = client.server_states["lagged"].expand(len(client), -1)
            statistics = client.models["lagged_global"].statistics
            client.models["lagged_global"] = ModelRows(lagged, statistics)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | dict[str, Tensor]:
        """Return f_i(θ_i) + λ/2 ‖θ_i − w_i‖² on the minibatch."""
        loss = self.loss("personal", batch)
        loss = loss + self.lam / 2 * self.squared_distance("personal", self.centre)
        if self.tolerance is None:
            return loss
        solved = self._solve(batch).to(loss.dtype)
        value = loss.detach()
        return {"loss": value + (1 - solved) * (loss - value), "solved": solved}

    def _solve(self, batch: Batch) -> Tensor:
        """Return whether (17) is fulfilled, a bool scalar."""
        at = {name: tensor.detach() for name, tensor in self.parameters_of("personal").items()}
        slopes = self.gradient_at("personal", at, batch)
        centre = self.tensors(self.centre)
        gradients = [slopes[name] + self.lam * (at[name] - centre[name]) for name in at]
        square = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        alpha, tolerance = self.alpha(self.read("samples")), self.read("tolerance")
        return (alpha.square() * square <= self.decay * tolerance).squeeze()

    def end_round(self, client: ClientRound) -> Tensor:
        """Update w_i and π_i, and upload u_i."""
        w, theta = client.broadcast.parameters, client.models["personal"].parameters
        if self.tolerance is not None:
            client.states["tolerance"] = self.decay * client.states["tolerance"]
        if self.lagged_global:
            client.proposals["lagged"] = w.expand_as(theta)
        stiffness = self.lam * self.alpha(client.samples)
        return self.update_in_closed_form(client, theta, w, stiffness)

    def check(self, data: ClientData, population: Population) -> None:
        """Refuse an optimizer that a tolerance cannot stop; warn of violations of Theorem 1.

        Raises:
            ValueError: If there is a tolerance, and the optimizer moves a model without a gradient.
        """
        if self.tolerance is not None:
            self._refuse_moving_optimizers()
        if self.smoothness is not None:
            self._check_theorem(data.train.sizes, self.smoothness)

    def _refuse_moving_optimizers(self) -> None:
        """Refuse a local optimizer that moves a model without a gradient."""
        self.refuse_mixed_options("a tolerance stops models", "momentum", "weight_decay")
        optimizer = self.objective.build_optimizer(self.trained_parameters)
        options = optimizer.param_groups[0]
        is_sgd = type(optimizer) is torch.optim.SGD
        if not is_sgd or options["momentum"] or options["weight_decay"]:
            raise ValueError(
                "Expected argument `optimizer` to build torch.optim.SGD without momentum and weight"
                " decay, because a model must stop when it reaches `tolerance`, but got"
                f" {type(optimizer).__name__} with momentum {options.get('momentum', 'of its own')}"
                f" and weight decay {options.get('weight_decay', 'of its own')}."
            )

    def _check_theorem(self, sizes: Tensor, smoothness: float) -> None:
        """Warn of the first α_i that violates a condition of Theorem 1."""
        for alpha in self.alpha(sizes.unique().double()).unique().tolist():
            violated = find_violated_conditions(self.lam, self.rho, alpha, smoothness)
            if violated:
                rank_zero_warn(
                    f"Theorem 1 does not cover FLAME with lam = {self.lam:g}, rho = {self.rho:g},"
                    f" alpha = {alpha:g} and smoothness = {smoothness:g}: it requires"
                    f" {', and '.join(violated)}."
                )
                return


def find_violated_conditions(lam: float, rho: float, alpha: float, smoothness: float) -> list[str]:
    """Return the violated conditions of Theorem 1 (and Lemma 1), with their values.

    Example:
        >>> find_violated_conditions(lam=0.28, rho=0.112, alpha=0.1, smoothness=0.1)
        []
        >>> find_violated_conditions(lam=1.0, rho=0.1, alpha=0.1, smoothness=0.1)[0]
        'λ²α²(1 + ρ)/ρ² − (λα + ρ)/2 < 0, but it is 1'
    """
    stiffness = lam * alpha
    descent = stiffness**2 * (1 + rho) / rho**2 - (stiffness + rho) / 2
    error = (1 - rho**2) / rho**2 * stiffness**2 - (smoothness * alpha + rho) / 2
    violated = []
    if not descent < 0:
        violated.append(f"λ²α²(1 + ρ)/ρ² − (λα + ρ)/2 < 0, but it is {descent:.4g}")
    if not rho >= stiffness:
        violated.append(f"ρ ≥ λα, but λα is {stiffness:.4g}")
    if not error > 0:
        violated.append(f"(1 − ρ²)/ρ² λ²α² − (Lα + ρ)/2 > 0, but it is {error:.4g}")
    return violated
