"""The root update of FLTrust: the server trains the global model on its own data."""

from dataclasses import replace

import torch
from torch import Tensor

from pl_fed.clients.contract import ClientRound, Objective, model_of_group
from pl_fed.clients.local_rates import list_local_rates
from pl_fed.clients.model_guard import restore_models
from pl_fed.data.batches import Batches
from pl_fed.data.client_data import Part
from pl_fed.engine.base import Chunk
from pl_fed.engine.one_by_one import OneByOne
from pl_fed.random import key
from pl_fed.rounds.client_states import ClientStates, read_frozen_values
from pl_fed.types import Batch


class RootTraining:
    """Root training: trains the global model on the server's own data like a client of FedAvg.

    For every algorithm, the objective is the plain loss of the global model, with the clients'
    values of frozen parameters (``Client.frozen_values``). Local steps, optimizer and the round's
    optimizer options are the clients': in FedRep those of the body (``Client.root_work``). The
    update has the form of an upload: it is 0 in the parts that clients keep, such as FedPer's
    heads. Otherwise uploads of the body would be scaled to the length of body and head.

    Source: X. Cao, M. Fang, J. Liu and N. Z. Gong, "FLTrust: Byzantine-robust Federated Learning
    via Trust Bootstrapping", NDSS 2021, arXiv 2012.13995, Algorithm 2.

    Args:
        states: The data of the federation and the server's states; ``data.root`` is the server's.
        seed: The seed of the federation.
    """

    def __init__(self, states: ClientStates, seed: int) -> None:
        self.states = states
        self.settings = states.settings.local
        self.seed = key(seed, "root")
        self.client = states.client
        self._model, work = self.client.root_work
        model = replace(self.client.objective.models[self._model], work=work)
        self.objective = Objective(self._step, {"global": model}, self.client.optimizer)

    def _step(self, batch: Batch, batch_idx: int) -> Tensor:
        client = self.client
        if not client.frozen_parameters:
            return client.loss("global", batch)
        first = client.tensors("broadcast")
        frozen = {name: first[name] for name in client.frozen_parameters}
        return client.loss_at("global", {**client.parameters_of("global"), **frozen}, batch)

    def run(self, round: int, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return the change of the global model by the local steps, [numel], in each process.

        Args:
            round: The round, from 0.
            optimizer: The clients' optimizer, with this round's options.
        """
        client, data, rule = self.client, self.states.data, self.states.rule
        root_data = replace(data, train=Part.from_pieces([data.root]))
        steps = self.objective.count_steps(rule, [len(data.root)])
        server = torch.tensor([0])  # the server is the only client of the root data
        augment = self.states.augment
        batches = Batches(
            root_data, server, steps["global"], rule, self.seed, round, augment=augment
        )
        server_states = self.states.server_states
        broadcast = client.model_rows("global").clone()
        views = client.row("global").layout.views(broadcast.parameters)
        for name, tensor in read_frozen_values(client, root_data, 0, server_states).items():
            views[name].copy_(tensor)
        size = broadcast.parameters.new_tensor([[len(data.root)]])
        start = ClientRound(server.to(size.device), size, torch.zeros_like(size), broadcast)
        start.models["global"] = broadcast.expand(1)
        place = "round {round}, the server's training on its root data"
        own_optimizer = self._build_optimizer(optimizer)
        rates = list_local_rates(client.local_schedule, own_optimizer, steps, round)
        chunk = Chunk(server, self.objective, batches, steps, start, place=place, rates=rates)
        with restore_models(client, ["global"]):
            OneByOne(self.settings).run(client, own_optimizer, chunk)
        update = start.models["global"].parameters - broadcast.parameters
        return client.restrict_rows(update)[0]

    def _build_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return an optimizer with the options of the clients' trained model."""
        parameters = {"global": list(self.client.row("global").tensors.values())}
        root_optimizer = self.objective.build_optimizer(parameters)
        groups = [g for g in optimizer.param_groups if model_of_group(g) == self._model]
        for root_group, group in zip(root_optimizer.param_groups, groups, strict=True):
            root_group.update({k: v for k, v in group.items() if k not in ("params", "name")})
        return root_optimizer
