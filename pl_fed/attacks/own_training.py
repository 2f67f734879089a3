"""The own training of attackers: they train the global model in their own way.

Each attacker of the cohort starts at the broadcast w^t, and trains with momentum SGD on its own
samples::

    minimise (1 / n) Σ CE(w; x, y)
    Δ_k ← w_k − w^t

The loss is the cross-entropy of the net's outputs, also if the run has another criterion:
attackers know the net, not the run.

The upload is a change of the global model, as that of FedAvg, Ditto, pFedMe and others. Where
clients keep parts to themselves (FedRep, FedPer, FedBN), each attacker keeps own parts as well. It
trains the shared parts under these, and its upload is 0 there. FedBABU's head, which nobody trains,
stays as it is, and so does pFedFDA's, which follows from the server's moments and the attacker's
classes as for clients. ADMM's clients send w_k + π_k / ρ: with all clients in the cohort, the
attacker's π_k is then 0. With partial participation, they send the change of it times cohort /
clients, and a forged change stays in the global model. Lp-Proj's rows are no models, and pl_fed
refuses it.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_integers, check_nonnegative, check_positive
from pl_fed.attacks.base import Attack
from pl_fed.nets.rows import frozen_modules, trainable_parameters
from pl_fed.random import fork_torch_rng, generator, key
from pl_fed.types import Batch, ClientContext, RoundContext


@dataclass
class AttackerTraining:
    """Attacker training: the model, the samples and the progress of one attacker in a round.

    Attributes:
        client: Id of the attacker.
        net: Its model; at first w^t with the attacker's own parts.
        clean: Its training samples, without a trigger. Their ids are their positions.
        context: The round.
        num_classes: The number of classes: the outputs of the net.
        parameters: The trainable parameters of ``net`` by name, in the order of an upload.
        start: The parameters before training, [d].
        sent: A mask of the parameters that clients send, bool [d].
        step: Number of finished steps.
        ends_pass: Whether the present step is the last one of a pass over the samples.
    """

    client: int
    net: nn.Module
    clean: Batch
    context: RoundContext
    num_classes: int
    parameters: Mapping[str, nn.Parameter]
    start: Tensor
    sent: Tensor
    step: int = 0
    ends_pass: bool = field(default=False)

    @property
    def row(self) -> Tensor:
        """The present parameters, [d]; gradients flow through it."""
        return torch.cat([parameter.flatten() for parameter in self.parameters.values()])

    def write_row(self, row: Tensor) -> None:
        """Set the parameters to a row, [d]."""
        with torch.no_grad():
            position = 0
            for parameter in self.parameters.values():
                part = row[position : position + parameter.numel()]
                parameter.copy_(part.view_as(parameter))
                position += parameter.numel()

    @property
    def client_context(self) -> ClientContext:
        """The context of the attacker's data poisoning."""
        context = self.context
        return ClientContext(
            context.seed, context.round, self.client, self.num_classes, context.byzantine
        )


def list_trained(net: nn.Module, context: RoundContext) -> list[nn.Parameter]:
    """Return the parameters that clients train: all but frozen ones, such as FedBABU's head."""
    parameters = trainable_parameters(net).items()
    return [parameter for name, parameter in parameters if name not in context.frozen]


class OwnTraining(Attack):
    """Own training: attackers train the global model themselves; a base class.

    A subclass defines :meth:`poison_samples`, and overrides some of these methods:
    :meth:`prepare_round`, :meth:`begin_training`, :meth:`loss`, :meth:`change_gradients`,
    :meth:`end_step`, :meth:`make_upload`.

    Running statistics belong to the attacker's copy of the net, which trains in training mode.
    Attackers send those of honest training.

    Args:
        epochs: Passes of an attacker over its samples, at least 1.
        steps: Minibatch steps instead of passes; ``None`` takes ``epochs``.
        batch_size: Largest number of samples in a minibatch. The minibatches of a pass are as
            equal as possible.
        lr: Learning rate of SGD, above 0.
        momentum: Momentum of SGD, at least 0.
        weight_decay: Weight decay of SGD, at least 0.

    Shape:
        - ``honest``: [h, d]; not read.
        - ``own``: [b, d]; the upload of an attacker without samples.
        - output: [b, d].

    Raises:
        TypeError: If an argument is no number.
        ValueError: If an argument is out of range; on use, if the net does not return a score for
            each class.
    """

    trains = True

    def __init__(
        self,
        epochs: int = 5,
        steps: int | None = None,
        batch_size: int = 32,
        lr: float = 0.05,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        check_integers(1, epochs=epochs, batch_size=batch_size)
        if steps is not None:
            check_integers(1, steps=steps)
        check_positive(lr=lr)
        check_nonnegative(momentum=momentum, weight_decay=weight_decay)
        self.epochs = epochs
        self.steps = steps
        self.batch_size = batch_size
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self._own_parts: dict[str, Tensor] = {}  # by "<client>/<name of the tensor>"

    def try_training(self, net: nn.Module, batch: Batch, context: ClientContext) -> None:
        """Refuse a net without scores of the classes."""
        check_scores(self, net(batch.inputs))

    # Hooks of subclasses

    def prepare_round(self, attackers: list[int], context: RoundContext) -> None:
        """Prepare a round before any attacker trains; by default nothing.

        Args:
            attackers: Ids of the attackers with samples, at least one, ascending.
            context: The round.
        """

    @abstractmethod
    def poison_samples(self, training: AttackerTraining) -> Batch:
        """Return the samples that an attacker trains on, made of ``training.clean``."""

    def begin_training(self, training: AttackerTraining) -> None:
        """Prepare the training of one attacker; by default nothing."""

    def loss(self, training: AttackerTraining, batch: Batch) -> Tensor:
        """Return the loss of a minibatch, a scalar; by default the mean cross-entropy."""
        return cross_entropy(training.net, batch)

    def change_gradients(self, training: AttackerTraining) -> None:
        """Change the gradients of ``training.parameters`` before a step; by default nothing."""

    def end_step(self, training: AttackerTraining) -> None:
        """Change the model after a step, for example by a projection; by default nothing."""

    def make_upload(self, training: AttackerTraining, update: Tensor) -> Tensor:
        """Return an attacker's upload from its change of w^t, 0 at parameters that stay unsent.

        Args:
            training: The finished training.
            update: w_k − w^t, [d].
        """
        return update

    # Training

    def forge(self, honest: Tensor, own: Tensor, context: RoundContext) -> Tensor:
        """Return the changes of w^t by the attackers' training."""
        ids = self.attacker_ids(own, context)
        rows = own.clone()
        with torch.inference_mode(False), torch.enable_grad():
            nonempty = [client for client in sorted(ids) if self.read_samples(client, context)]
            if nonempty:
                self.prepare_round(nonempty, context)
            for client in nonempty:
                upload = self._train(self.open_training(client, context))
                if upload.shape != own.shape[1:]:
                    raise ValueError(
                        f"Expected uploads of {own.shape[1]} numbers, the trainable parameters of"
                        f" the net, for {type(self).__name__} but the net has {len(upload)}."
                    )
                rows[ids.index(client)] = upload.to(rows)
        return rows

    def open_training(self, client: int, context: RoundContext) -> AttackerTraining:
        """Return the state of an attacker before its training: w^t with the attacker's own parts.

        Raises:
            ValueError: If the context has no net or no samples, or the net returns no scores.
        """
        clean = self.read_samples(client, context)
        if clean is None or context.net is None:
            raise ValueError(
                "Expected `context.net` and the samples of a client with samples for"
                f" {type(self).__name__} but got none."
            )
        net = context.net()
        parameters = trainable_parameters(net)
        sent = torch.ones(sum(p.numel() for p in parameters.values()), dtype=torch.bool)
        sent[context.unsent.cpu()] = False
        self._load_own_parts(client, net, sent, parameters)
        with torch.no_grad():
            for name, values in context.frozen_values(client).items():
                parameters[name].copy_(values)
        with torch.no_grad():
            num_classes = check_scores(self, net(clean.inputs[:1])).shape[1]
        start = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
        sent = sent.to(start.device)
        return AttackerTraining(client, net, clean, context, num_classes, parameters, start, sent)

    def read_samples(self, client: int, context: RoundContext) -> Batch | None:
        """Return an attacker's samples with their positions as ids; ``None`` without samples."""
        if context.samples is None:
            raise ValueError(
                f"Expected `context.samples` to be given for {type(self).__name__} but got None."
            )
        batch = context.samples(client)
        if not batch.size:
            return None
        # other clients' samples change the ids, but not the positions
        return batch._replace(samples=torch.arange(batch.size, device=batch.device))

    def read_batches(self, clients: Sequence[int], context: RoundContext) -> list[Batch]:
        """Return the training samples of the clients that have samples."""
        batches = [self.read_samples(client, context) for client in clients]
        return [batch for batch in batches if batch is not None]

    def read_inputs(self, clients: Sequence[int], context: RoundContext) -> list[Tensor]:
        """Return the inputs of the training samples of clients that have samples."""
        return [batch.inputs for batch in self.read_batches(clients, context)]

    def _train(self, training: AttackerTraining) -> Tensor:
        """Train one attacker, store its own parts, and return its upload, [d]."""
        context, device = training.context, training.start.device
        with fork_torch_rng(device) as seed:  # for dropout
            seed(key(context.seed, "training attack", context.round, training.client))
            poisoned = self.poison_samples(training)
            self.begin_training(training)
            optimizer = torch.optim.SGD(
                training.parameters.values(),
                lr=self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
            )
            enter_training_mode(training.net)
            for batch in self._draw_minibatches(poisoned, training):
                optimizer.zero_grad(set_to_none=True)
                torch.autograd.backward(self.loss(training, batch))
                self.change_gradients(training)
                for name in context.frozen:
                    training.parameters[name].grad = None  # the optimizer leaves it alone
                optimizer.step()
                self.end_step(training)
                training.step += 1
            training.net.eval()
        update = training.row.detach() - training.start
        self._save_own_parts(training)
        return self.make_upload(training, torch.where(training.sent, update, 0)).detach()

    def _draw_minibatches(self, batch: Batch, training: AttackerTraining) -> Iterator[Batch]:
        """Yield minibatches of an attacker's samples in random order."""
        seed, round, client = training.context.seed, training.context.round, training.client
        num_batches = count_minibatches(batch.size, self.batch_size)
        steps = self.epochs * num_batches if self.steps is None else self.steps
        for step in range(steps):
            number, position = divmod(step, num_batches)
            if not position:
                draw = generator(seed, "training attack", round, client, number)
                parts = draw_minibatches(batch.size, self.batch_size, draw)
            training.ends_pass = position == num_batches - 1 or step == steps - 1
            yield select_samples(batch, parts[position])

    # The attackers' own parts

    def _load_own_parts(
        self, client: int, net: nn.Module, sent: Tensor, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        """Put the parts that an attacker keeps to itself into a net."""
        for name, tensor in _find_own_parts(net, sent, parameters).items():
            part = self._own_parts.get(f"{client}/{name}")
            if part is not None:
                with torch.no_grad():
                    tensor.copy_(part)

    def _save_own_parts(self, training: AttackerTraining) -> None:
        """Store the parts that an attacker keeps to itself, for its next round."""
        parts = _find_own_parts(training.net, training.sent.cpu(), training.parameters)
        for name, tensor in parts.items():
            self._own_parts[f"{training.client}/{name}"] = tensor.detach().clone()

    def state_dict(self) -> dict[str, Any]:
        """Return the attackers' own parts."""
        return {"own_parts": dict(self._own_parts)} if self._own_parts else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the attackers' own parts."""
        self._own_parts = dict(state.get("own_parts", {}))
        if names := [name for name in state if name != "own_parts"]:
            raise ValueError(
                f"Expected a checkpoint with the state of {type(self).__name__} but got"
                f" {', '.join(names)}: resume with the attack of the checkpoint."
            )


def cross_entropy(net: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of a net on a batch, a scalar."""
    return nn.functional.cross_entropy(net(batch.inputs), batch.targets)


def select_samples(batch: Batch, positions: Tensor) -> Batch:
    """Return samples of a batch by their positions, int64; all its fields are tensors."""
    at = positions.to(batch.device)
    return Batch(*(None if entry is None else entry[at] for entry in batch))


def count_minibatches(num_samples: int, batch_size: int) -> int:
    """Return the number of minibatches of a pass.

    Example:
        >>> count_minibatches(65, batch_size=32)
        3
    """
    return -(-num_samples // batch_size)


def draw_minibatches(num_samples: int, batch_size: int, draw: torch.Generator) -> list[Tensor]:
    """Return the minibatches of a pass in random order: positions of samples, int64 each.

    Args:
        num_samples: The number of samples.
        batch_size: The largest number of samples in a minibatch.
        draw: The random generator.

    Example:
        >>> draw = torch.Generator().manual_seed(0)
        >>> [len(positions) for positions in draw_minibatches(5, 2, draw)]
        [2, 2, 1]
    """
    order = torch.randperm(num_samples, generator=draw)
    return list(order.tensor_split(count_minibatches(num_samples, batch_size)))


def flat_gradient(
    loss: Tensor, parameters: Sequence[nn.Parameter], create_graph: bool = False
) -> Tensor:
    """Return the gradient of a loss by all parameters, [d]; 0 for unused ones.

    Args:
        loss: A scalar.
        parameters: The parameters, in the order of the result.
        create_graph: Whether gradients can flow through the result.
    """
    gradients = torch.autograd.grad(
        loss, parameters, create_graph=create_graph, materialize_grads=True
    )
    return torch.cat([gradient.flatten() for gradient in gradients])


def measure_range(inputs: Sequence[Tensor]) -> tuple[float, float]:
    """Return the smallest and the largest number in some tensors, at least one."""
    return min(float(x.min()) for x in inputs), max(float(x.max()) for x in inputs)


def enter_training_mode(net: nn.Module) -> None:
    """Set a net to training mode; entirely frozen submodules stay in evaluation mode."""
    net.train()
    for module in frozen_modules(net):
        module.eval()


def check_scores(attack: Attack, outputs: object) -> Tensor:
    """Return the outputs of a net.

    Raises:
        ValueError: If they are not a score for each sample and class, [batch, classes].
    """
    if isinstance(outputs, Tensor) and outputs.dim() == 2 and outputs.is_floating_point():
        return outputs
    shape = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    raise ValueError(
        "Expected `model.net` to return a tensor of scores [batch, classes] for the attack"
        f" {type(attack).__name__}, which trains it with a cross-entropy, but got {shape}: use an"
        " attack on data, such as Backdoor."
    )


def _find_own_parts(
    net: nn.Module, sent: Tensor, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return the tensors of a net that a client keeps to itself, by name.

    These are the unsent parameters, and the buffers of their modules.

    Args:
        net: The net.
        sent: A mask of the parameters that clients send, bool [d].
        parameters: The trainable parameters, in the order of the mask.
    """
    parts: dict[str, Tensor] = {}
    if bool(sent.all()):
        return parts
    position = 0
    for name, parameter in parameters.items():
        is_sent = sent[position : position + parameter.numel()]
        if not bool(is_sent.all()):
            parts[name] = parameter
        position += parameter.numel()
    modules = {name.rpartition(".")[0] for name in parts}
    buffers = dict(net.named_buffers()).items()
    return parts | {name: part for name, part in buffers if name.rpartition(".")[0] in modules}
