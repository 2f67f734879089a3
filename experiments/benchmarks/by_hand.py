"""Federation by hand, as for a single experiment: FedAvg, and personal models for Ditto."""

import torch
from cases import LAM, LR, Case
from torch import Tensor, distributed, nn
from torch.nn import functional as F  # noqa: N812 (as everyone calls it)

from pl_fed.data.client_data import ClientData


class ByHand:
    """Federation by hand: gathers minibatches by index and builds an optimizer per client, only.

    With several processes, each trains its share of the clients, and the updates are reduced.

    Args:
        case: The federation to run; all its clients take part.
        data: The clients' data, on the device.
    """

    def __init__(self, case: Case, data: ClientData) -> None:
        self.case, self.x, self.y = case, data.inputs, data.targets
        self.rank, self.world = 0, 1
        if distributed.is_initialized():
            self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        self.clients = range(self.rank, case.clients, self.world)
        self.owned = {client: data.train.samples(client) for client in self.clients}
        torch.manual_seed(0)
        self.model, self.personal = (case.build().to(data.inputs.device) for _ in range(2))
        self.leaves, self.own = (
            trainable_parameters(self.model),
            trainable_parameters(self.personal),
        )
        self.server = [leaf.detach().clone() for leaf in self.leaves]
        self.kept: dict[int, list[Tensor]] = {}

    def round(self) -> None:
        """Run one round."""
        total = [torch.zeros_like(value) for value in self.server]
        for client in self.clients:
            self.train(client)
            with torch.no_grad():
                for update, leaf, value in zip(total, self.leaves, self.server):
                    update.add_(leaf).sub_(value)
        if self.world > 1:
            flat = torch.cat([update.flatten() for update in total])
            distributed.all_reduce(flat)
            parts = flat.split([value.numel() for value in self.server])
            total = [part.view_as(value) for part, value in zip(parts, self.server)]
        for value, update in zip(self.server, total):
            value.add_(update, alpha=1 / self.case.clients)

    def train(self, client: int) -> None:
        """Run one client's local steps."""
        batch_size, ditto = self.case.batch_size, self.case.ditto
        samples = self.owned[client]
        order = samples[torch.randperm(len(samples), device=samples.device)]
        load(self.leaves, self.server)
        optimizer = torch.optim.SGD(self.leaves, lr=LR)
        if ditto:
            load(self.own, self.kept.get(client, self.server))
            own_optimizer = torch.optim.SGD(self.own, lr=LR)
        for begin in range(0, self.case.steps * batch_size, batch_size):
            index = order[begin : begin + batch_size]
            x, y = self.x.index_select(0, index), self.y.index_select(0, index)
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(self.model(x), y).backward()
            optimizer.step()
            if ditto:
                own_optimizer.zero_grad(set_to_none=True)
                F.cross_entropy(self.personal(x), y).backward()
                self.pull()
                own_optimizer.step()
        if ditto:
            self.kept[client] = [leaf.detach().clone() for leaf in self.own]

    @torch.no_grad()
    def pull(self) -> None:
        """Add λ (v − w^t) to the gradient."""
        for leaf, centre in zip(self.own, self.server):
            leaf.grad.add_(leaf, alpha=LAM).sub_(centre, alpha=LAM)


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@torch.no_grad()
def load(leaves: list[nn.Parameter], values: list[Tensor]) -> None:
    for leaf, value in zip(leaves, values):
        leaf.copy_(value)
