"""FedROD: one body for a generic head and for each client's own head, which is added to it.

H.-Y. Chen and W.-L. Chao. "On bridging generic and personalized federated learning for image
classification". ICLR 2022. arXiv 2107.00778. The variant with linear own heads.

The net is a body θ with features f and a generic head g; client k keeps a head p_k. With n_c the
client's training samples of class c and cross entropy CE, a step minimises two losses::

    CE(g(f) + ln n_c, y)          in θ and g: balanced softmax, without the absent classes (ln 0)
    CE(g(f) + p_k(f), y)          in p_k alone: f and g(f) are detached

The server averages θ and g. The global model predicts by g(f), the personal one by g(f) + p_k(f).

Departs from the paper and from published code; the authors have published none:

- p_k is added to the parameters of the head, and the personal model is an ordinary net: for a
  linear head, g(f) + p_k(f). For another head, the outputs at the sum are not the sum of outputs.
- p_k begins at 0, and thus a client's personal model at the global one. PFLlib begins at g.
- The personal model has the current broadcast θ and g, also for clients that did not take part,
  as in PFLlib.
- n_c counts all training samples. PFLlib counts those of one pass without its last, smaller batch.
- Running statistics of an own head are the client's own.
- A class that a minibatch has and n_c has not, as by an attack on labels, counts as one sample.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.clients.base import Client
from pl_fed.clients.contract import ClientRound, Model
from pl_fed.clients.fedper import belongs
from pl_fed.clients.heads import find_head
from pl_fed.data.client_data import ClientData
from pl_fed.nets.rows import RowLayout, trainable_parameters
from pl_fed.types import Batch, Population


class FedROD(Client):
    """FedROD: a global model trained by balanced softmax, and an own head on top of its head.

    Args:
        net: The net that clients train: see :class:`Client`. Its outputs must be those of its head.
        head: The name of the module that turns features into logits, such as ``"layers.5"``.
            ``None`` is the last module with trainable parameters.
        **kwargs: The other arguments of :class:`Client`.

    Raises:
        ValueError: If the net has no module ``head``. Before training, if the data have no class
            ids, or the criterion has no finite value without a class (label smoothing has none).

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        >>> client = FedROD(net)
        >>> client.trained, client.evaluated
        (('global', 'personal'), ('global', 'personal'))
        >>> client.state_defaults()["own"].shape  # 5 * 3 weights and 3 biases
        torch.Size([18])
    """

    reads_class_counts = True

    head_positions: Tensor
    head_statistics: Tensor

    def __init__(self, net: nn.Module, head: str | None = None, **kwargs: Any) -> None:
        models = {"global": Model(), "personal": Model(kept=False)}
        super().__init__(net, models=models, **kwargs)
        self.head = find_head(trainable_parameters(net), head)
        layout = RowLayout.from_parameters(net)
        self.head_names = [n for n in layout.names if not self.head or belongs(n, [self.head])]
        head_positions = layout.positions(*self.head_names)
        self.register_buffer("head_positions", head_positions, persistent=False)
        buffers = RowLayout.from_buffers(net)
        names = [n for n in buffers.names if not self.head or belongs(n, [self.head])]
        self.register_buffer("head_statistics", buffers.positions(*names), persistent=False)
        self.add_state("own", self._initial_own_head)

    def _initial_own_head(self) -> Tensor:
        return self.zero_row()[self.head_positions]

    def check(self, data: ClientData, population: Population) -> None:
        """Refuse a criterion that is infinite if another class than the target is absent."""
        logits = self.initial_row().new_full((1, self.count_classes(data)), -torch.inf)
        logits[:, 0] = 0
        loss = self.sample_losses(logits, logits.new_zeros(1, dtype=torch.int64))
        if not loss.isfinite().all():
            raise ValueError(
                "Expected argument `criterion` to be a cross entropy without label smoothing for"
                f" {type(self).__name__} but got {self.task.name}, with a loss of {loss.item()} if"
                " a client lacks a class: balanced softmax gives this class the probability 0."
            )

    def begin(self, client: ClientRound) -> None:
        """Begin with p_k in a round; an evaluation gets θ and g + p_k."""
        start = client.broadcast.expand(len(client)).clone()
        own = client.states["own"]
        if not client.steps:
            own = start.parameters[:, self.head_positions] + own
        start.parameters[:, self.head_positions] = own
        last = client.models["personal"].statistics
        start.statistics[:, self.head_statistics] = last[:, self.head_statistics]
        client.models["personal"] = start

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the loss of θ and g, plus that of p_k, on the minibatch."""
        features = self.features_of("global", batch)
        logits = self.head_of("global", features)
        balanced = self.mean_loss(logits + self._log_counts(batch), batch)
        generic, own = self.parameters_of("global"), self.parameters_of("personal")
        head = {name: generic[name].detach() + own[name] for name in self.head_names}
        personal_logits = self.head_of("personal", features.detach(), head)
        personal = self.mean_loss(personal_logits, batch)
        return {"loss": balanced + personal, "balanced": balanced, "personal": personal}

    def _log_counts(self, batch: Batch) -> Tensor:
        """Return ln n_c for each sample, [batch, classes]; its own class counts at least once."""
        counts = self.read("class_counts")
        classes = torch.arange(len(counts), device=batch.device)
        return counts.maximum((batch.targets[:, None] == classes).to(counts)).log()

    def end_round(self, client: ClientRound) -> Tensor | None:
        """Keep p_k, and send the change of θ and g."""
        client.states["own"] = client.models["personal"].parameters[:, self.head_positions]
        return super().end_round(client)
