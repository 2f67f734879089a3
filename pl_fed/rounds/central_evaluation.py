"""The evaluation of the global model on the server's own samples."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pl_fed.attacks import Attack
from pl_fed.clients.features import place_data
from pl_fed.data.client_data import ClientData
from pl_fed.evaluation.evaluator import Evaluator
from pl_fed.evaluation.monitor import Tables
from pl_fed.functional.fairness import class_std
from pl_fed.rounds.byzantine_clients import ByzantineClients
from pl_fed.rounds.client_states import ClientStates
from pl_fed.rounds.triggered_data import TriggeredData


class CentralEvaluation:
    """Central evaluation: measures the global model on the server's own samples.

    Every process measures all samples, so that metrics that are no means, such as the AUROC, are
    those of all samples.

    Args:
        central: The server's samples, as loaded (``FederatedData.central_data``).
        states: The clients' data, which may share the tensors of samples.
        byzantine_clients: The Byzantine clients, whose attack may have a trigger.
        evaluator: Runs the global model.
    """

    def __init__(
        self,
        central: ClientData,
        states: ClientStates,
        byzantine_clients: ByzantineClients,
        evaluator: Evaluator,
    ) -> None:
        self.central = central
        self.states = states
        self.client = states.client
        self.byzantine_clients = byzantine_clients
        self.evaluator = evaluator
        self.settings = states.settings
        self._data: ClientData | None = None
        self._clients_data: ClientData | None = None  # beside which the samples were placed
        self._triggered = TriggeredData()

    @property
    def data(self) -> ClientData:
        """The server's samples, on the device of the models and in their precision."""
        clients = self.states.data
        if self._data is None or self._clients_data is not clients:
            with torch.inference_mode(False), self.settings.autocast():
                if self.central.inputs is self.states.loaded.inputs:
                    shared = replace(
                        self.central,
                        inputs=clients.inputs,
                        targets=clients.targets,
                        mapped=clients.mapped,
                        keeps_integers=clients.keeps_integers,
                    )
                    self._data = shared.to(clients.device, clients.dtype)
                else:
                    self._data = place_data(self.client, self.central)
            self._clients_data, self._triggered = clients, TriggeredData()
        return self._data

    def names(self, part: str) -> list[str]:
        """Return the names of the metrics of ``"val"`` or ``"test"``; none without samples."""
        if not len(self.central.part(part).index):
            return []
        classes = self.client.count_classes(self.central)
        return [
            *(["accuracy"] if classes else []),
            *(["loss"] if self.client.task.has_loss(part) else []),
            *(["class_std"] if classes else []),
            *self.client.task.metric_directions(),
            *(["backdoor_success"] if self.byzantine_clients.triggers else []),
        ]

    def is_own(self, part: str) -> bool:
        """Return whether no client has a sample of the server's part of the data."""
        clients = self.states.loaded
        if self.central.fingerprint != clients.fingerprint:
            return True
        samples = self.central.part(part).index
        others = torch.cat([clients.part(name).index for name in ("train", "val", "test")])
        others = others if clients.ids is None else clients.ids[others]
        return not bool(torch.isin(samples, others).any())

    def measure(self, part: str) -> Mapping[str, Tensor]:
        """Return the metrics of the global model, float64 scalars on the CPU.

        Args:
            part: ``"val"`` or ``"test"``.

        Returns:
            ``accuracy`` and ``class_std``, the standard deviation of the classes' accuracies, if
            targets are class ids; the mean ``loss``, NaN if no sample counts in it; each metric of
            the task, over all samples at once, NaN where it is undefined; and with a backdoor its
            success on samples with the trigger. Empty without samples.
        """
        names = self.names(part)
        if not names:
            return {}
        table = self._compute_table(self.data, part)
        samples = table.samples.sum().double()
        numbers = {
            "accuracy": table.correct.sum() / samples,
            "loss": table.loss.sum() / samples,
            "class_std": class_std(table.correct, table.samples)[0],
        }
        numbers |= dict(zip(self.client.task.metric_directions(), table.measures[0]))
        attack = self.byzantine_clients.attack
        if attack is not None and attack.triggers:
            numbers["backdoor_success"] = self._measure_backdoor(part, attack)
        return {name: numbers[name].double().cpu() for name in names}

    def _measure_backdoor(self, part: str, attack: Attack) -> Tensor:
        """Return the share of the samples with a trigger in the attacker's class; NaN without."""
        data = self.data  # first: samples on another device end the triggered ones
        table = self._compute_table(self._triggered.apply(data, part, attack), part)
        return table.correct.sum().double() / table.samples.sum()

    def _compute_table(self, data: ClientData, part: str) -> Tables:
        server = torch.zeros(1, dtype=torch.int64)
        with self.settings.autocast():
            return self.evaluator.tables(data, part, server, ["global"])["global"]
