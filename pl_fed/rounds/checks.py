"""What is checked before training, and after each round."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from pl_fed.aggregators import Aggregator
from pl_fed.attacks import Attack
from pl_fed.attacks.base import poisoned
from pl_fed.clients.base import Client
from pl_fed.data.batches import BatchRule
from pl_fed.data.client_data import ClientData
from pl_fed.data.module import FederatedData
from pl_fed.engine.choice import STACKED
from pl_fed.engine.features import features_of, keeps_features
from pl_fed.functional.arguments import check_finite_options, check_not_differentiable
from pl_fed.functional.losses import averages_samples
from pl_fed.functional.modes import evaluation_mode
from pl_fed.functional.random import seeded_torch
from pl_fed.functional.rows import trainable_parameters
from pl_fed.rounds.trained_cohort import UploadStatus
from pl_fed.types import Batch, ClientContext, RoundContext


class NonFiniteLossError(RuntimeError):
    """The losses or the models of too many benign clients became NaN or infinite."""


@contextmanager
def explain_log() -> Iterator[None]:
    """Say what to do instead of ``self.log`` in ``training_step``."""
    try:
        yield
    except MisconfigurationException as error:
        if "self.log" not in str(error):
            raise
        raise ValueError(
            "Expected `training_step` to return what it logs, as a dict with `loss` and scalars,"
            " but got a call of `self.log`: many clients may be trained at once."
        ) from error


def check_net(
    client: Client, data: ClientData, augment: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Build the local optimizer, and try models, net and criterion, these on two samples.

    Args:
        client: The algorithm.
        data: The clients' data.
        augment: Changes the inputs of each minibatch.

    Raises:
        ValueError: If the net is of half precision, the optimizer refuses its options, models or
            states do not fit together, the inputs cannot be augmented, the net does not take them,
            its output does not fit the classes, or the criterion does not take output and targets.

    ``client.averages_samples`` is set: whether the criterion is the mean of losses of samples.
    """
    dtype = client.row("global").data.dtype
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(
            "Expected argument `net` to have parameters of float32 or float64 but got"
            f" {dtype}: small steps would be lost in them. The trainer's precision `bf16-mixed`"
            " computes in less."
        )
    leaves: dict[str, list[Tensor]] = {
        name: list(trainable_parameters(client.model(name)).values()) for name in client.trained
    }
    optimizer = _tried(
        "Expected argument `optimizer` to build a local optimizer but that",
        lambda: client.objective.build_optimizer(leaves),
    )
    check_finite_options(optimizer=optimizer)
    check_not_differentiable(optimizer=optimizer)
    client.state_defaults()  # says so if one is no row
    client.server_state_defaults()
    _run_net(client, data, augment)


def check_features(client: Client, datamodule: FederatedData) -> None:
    """Refuse to keep features that are not those of a frozen body, or are not what is trained on.

    Raises:
        ValueError: If inputs are augmented, or two samples' features need a gradient or give other
            outputs than the samples themselves.
    """
    net, data = client.global_model, datamodule.clients
    if not keeps_features(net):
        return
    name = type(net).__name__
    if datamodule.augment is not None:
        raise ValueError(
            f"Expected argument `augment` to be left out where {name} keeps features but got"
            f" {datamodule.augment}: features are computed once, of inputs that are not augmented."
        )
    x = _first_samples(client, data).x
    with evaluation_mode(client):
        expected = f"Expected `features` of {name}, whose `keep_features` is True, to take inputs"
        features = _tried(f"{expected} but that", lambda: features_of(net, x))
        if features.requires_grad:
            raise ValueError(
                f"Expected `features` of {name}, whose `keep_features` is True, to need frozen"
                " parameters only but got some that are trained: set requires_grad=False on them."
            )
        expected = f"Expected {name}, whose `keep_features` is True, to take features as it does"
        outputs = _tried(f"{expected} inputs but that", lambda: net(features))
        if not torch.allclose(outputs, net(x), rtol=1e-3, atol=1e-5):
            raise ValueError(f"{expected} inputs but got other outputs for them.")


def check_attacks(client: Client, data: ClientData, attacks: Iterable[Attack]) -> None:
    """Refuse attacks that the net or the data does not fit.

    Raises:
        ValueError: If one needs inputs where the net keeps features, or classes where there are
            none.
    """
    net = client.global_model
    for attack in attacks:
        name = type(attack).__name__
        if attack.needs_inputs and keeps_features(net):
            raise ValueError(
                f"Expected `keep_features` of {type(net).__name__} to be False for {name}, which"
                " changes inputs, but got True: features are computed once."
            )
        if attack.triggers and not data.num_classes:
            raise ValueError(
                f"Expected the data to have classes for {name}, which wants one of them to be"
                " predicted, but got real-valued targets."
            )


def try_attacks(client: Client, data: ClientData, attacks: Iterable[Attack]) -> None:
    """Try attacks on data on two samples: what they refuse, they refuse before training begins."""
    net, batch = client.global_model, _first_samples(client, data)
    if keeps_features(net):
        with torch.no_grad(), evaluation_mode(client):
            batch = batch._replace(x=features_of(net, batch.x))
    someone = ClientContext(seed=0, round=0, client=0, num_classes=data.num_classes)
    for attack in attacks:
        poisoned(batch, [attack], someone)
        attack.trigger(batch)


def _first_samples(client: Client, data: ClientData) -> Batch:
    """Return two or three samples that are trained on, where the net is and as it takes them.

    Their number is not that of the classes: a criterion that compares [2, 2] outputs with [2]
    class ids, each with each, would go unnoticed.
    """
    return _samples(client, data, data.train.index[: 3 if data.num_classes == 2 else 2])


def _samples(client: Client, data: ClientData, index: Tensor) -> Batch:
    """Return samples by their ids, where the net is and as it takes them."""
    example = next(client.global_model.parameters())
    x, y = data.x[index].to(example.device, example.dtype), _targets(client, data.y[index])
    index = index.to(example.device)
    return Batch(x, y, samples=index, visits=torch.zeros_like(index))


def _targets(client: Client, y: Tensor) -> Tensor:
    """Return targets where the net is, real-valued ones in its precision."""
    example = next(client.global_model.parameters())
    return y.to(example.device, example.dtype if y.is_floating_point() else y.dtype)


def _run_net(client: Client, data: ClientData, augment: Callable[[Tensor], Tensor] | None) -> None:
    net, mode = client.global_model, client.training
    name, criterion = type(net).__name__, type(client.criterion).__name__
    x, y = _first_samples(client, data)[:2]
    client.eval()
    try:
        with torch.no_grad():
            if augment is not None:
                with seeded_torch(x.device):
                    shape = list(x.shape)
                    x = _tried(
                        f"Expected argument `augment` to take inputs of shape {shape} but that",
                        lambda: augment(x),
                    )
            outputs = _tried(
                f"Expected argument `net` to take inputs of shape {list(x.shape[1:])} ({x.dtype})"
                f" but {name}",
                lambda: net(x),
                remedies=_OF_INPUTS,
            )
            _check_outputs(outputs, len(y), data.num_classes)
            _check_probabilities(client.criterion, data.y)
            loss = _tried(
                f"Expected argument `criterion` to take outputs of shape {list(outputs.shape)} and"
                f" targets of shape {list(y.shape)} ({y.dtype}"
                f"{', where class ids are integers' if y.is_floating_point() else ''}) but"
                f" {criterion}",
                lambda: client.criterion(outputs, y),
                remedies=_OF_TARGETS,
            )
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise ValueError(
                    "Expected argument `criterion` to give one number, the loss of a batch, but"
                    f" {criterion} gave {got}."
                )
            _check_alignment(client, outputs, y)
            with seeded_torch(x.device):
                client.averages_samples = _averages_samples(client, data, outputs)
    finally:
        client.train(mode)


_OF_INPUTS = {
    "'indices'": ": inputs come as floating-point numbers, and an embedding takes x.long()",
}
_OF_TARGETS = {
    "Long": ": real-valued targets become class ids by targets.long() in the criterion",
}

_TRIED_SAMPLES, _TRIED_BATCH = 512, 16
_TRIED_NUMBERS = 1 << 22  # of outputs, for all the samples


def _averages_samples(client: Client, data: ClientData, outputs: Tensor) -> bool:
    """Return whether the criterion is, on real targets, the mean of one loss for each sample.

    The targets are those of samples of as many clients as possible, and the ones that have the
    smallest and the largest numbers, as codes for missing values are.

    Args:
        client: The algorithm.
        data: The clients' data.
        outputs: What the model, as it is, makes of a few samples.
    """
    index, numel = data.train.index, max(1, outputs[0].numel())
    most = min(_TRIED_SAMPLES, max(2, _TRIED_NUMBERS // numel), len(index))
    values = data.y.flatten(1) if data.y.dim() > 1 else data.y[:, None]
    extreme = torch.stack([values.amin(1).argmin(), values.amax(1).argmax()])
    spread = index[torch.linspace(0, len(index) - 1, most).long()]
    targets = _targets(client, data.y[torch.cat([extreme, spread])])
    size = min(_TRIED_BATCH, max(2, _TRIED_NUMBERS // numel))
    return all(
        averages_samples(
            client.criterion,
            client.sample_criterion,
            outputs[torch.arange(len(some), device=outputs.device) % len(outputs)],
            some,
        )
        for some in targets.split(size)
    )


def _check_probabilities(criterion: nn.Module, targets: Tensor) -> None:
    """Refuse real-valued targets of a cross entropy that are no probabilities of classes."""
    if not isinstance(criterion, nn.CrossEntropyLoss) or not targets.is_floating_point():
        return
    if targets.dim() == 1:  # which it does not take
        return
    if targets.shape[1] > 1:
        total = targets.sum(1)
        if bool((targets >= 0).all()) and torch.allclose(total, torch.ones_like(total), atol=1e-3):
            return
    raise ValueError(
        "Expected argument `criterion` to be a loss of real-valued targets, as torch.nn.MSELoss or"
        " torch.nn.BCEWithLogitsLoss, but got CrossEntropyLoss, and targets that are no"
        " probabilities of classes."
    )


def _tried(
    expected: str, call: Callable[[], Any], remedies: Mapping[str, str] | None = None
) -> Any:
    """Call a function; where it fails, say what was expected.

    Args:
        expected: How the sentence begins.
        call: The function.
        remedies: What ends the sentence where certain words are in the error's message.
    """
    try:
        return call()
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        for words, remedy in (remedies or {}).items():
            if words in reason:
                reason = f"{reason.rstrip('.')}{remedy}."
        raise ValueError(f"{expected} failed: {reason}") from error


def _check_outputs(outputs: object, samples: int, num_classes: int) -> None:
    if not isinstance(outputs, Tensor):
        raise ValueError(
            f"Expected argument `net` to give a tensor but got {type(outputs).__name__}."
        )
    if num_classes and list(outputs.shape) != [samples, num_classes]:
        raise ValueError(
            f"Expected argument `net` to give one number for each of the {num_classes} classes,"
            f" shape [batch, {num_classes}], but got {list(outputs.shape)} for {samples} samples:"
            f" the data's labels go up to {num_classes - 1}."
        )


def _check_alignment(client: Client, outputs: Tensor, targets: Tensor) -> None:
    """Refuse a criterion that compares what a sample gives with the targets of others."""
    if outputs.dim() == targets.dim() or not targets.is_floating_point():
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says the same, in other words
        try:
            losses = client.sample_criterion(outputs, targets)
            aligned = torch.broadcast_shapes(outputs.shape, targets.shape)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
            return  # what the criterion gives for a batch counts
    if isinstance(losses, Tensor) and losses.dim() > 1 and losses.shape == aligned:
        raise ValueError(
            f"Expected argument `net` to give outputs of the targets' shape {list(targets.shape)}"
            f" but got {list(outputs.shape)}, of which {type(client.criterion).__name__} would"
            " compare each with all targets: give the targets as many dimensions, [samples, 1]"
            " for one number each."
        )


def check_engine(client: Client, rule: BatchRule, data: ClientData, engine: str) -> None:
    """Say what a criterion of batches means; refuse an engine that cannot call it on them.

    Args:
        client: The algorithm.
        rule: How samples become minibatches.
        data: The clients' data.
        engine: The engine that is asked for.

    Raises:
        ValueError: If clients are to be stacked, and their minibatches are of several sizes.
    """
    if client.averages_samples:
        return
    name = type(client.criterion).__name__
    if engine in STACKED and not rule.is_uniform(data.train.sizes):
        raise ValueError(
            "Expected argument `federation.engine.name` to be one_by_one, one_by_one_compiled or"
            f" auto for {name}, which is not the mean of one loss for each sample and so takes no"
            f" padding, but got {engine}, where minibatches are of several sizes: `drop_last` makes"
            f" those of clients with at least `batch_size` ({rule.batch_size}) samples alike."
        )
    rank_zero_info(
        f"{name} is not the mean of one loss for each sample: it is called on minibatches without"
        " padding, and on all of a client's samples together for the losses that are logged."
    )


def check_mean(client: Client, aggregator: Aggregator, adds: bool) -> None:
    """Refuse, or warn of, what keeps the global model from being the mean that it is to be.

    Args:
        client: The algorithm.
        aggregator: The server's.
        adds: Whether the server adds what it gives to the model, and does nothing else.

    Raises:
        ValueError: If the mean is one by samples.
    """
    if client.mean_of != "clients":
        return
    name = type(client).__name__
    last = aggregator.last
    weighting = getattr(last, "weighting", "uniform")
    if weighting != "uniform":
        raise ValueError(
            f"Expected argument `weighting` of {type(last).__name__} to be 'uniform' for {name},"
            f" whose server takes the plain mean of what clients send, but got {weighting!r}."
        )
    if not adds:
        rank_zero_warn(
            f"The global model of {name} is the mean of what all clients keep only if"
            " `server_optimizer` is SGD with learning rate 1 and nothing else: with another it is"
            " a variant of the algorithm."
        )


def check_aggregator(aggregator: Aggregator, context: RoundContext) -> None:
    """Let an aggregator merge a few random numbers of each client of a cohort.

    Args:
        aggregator: What is tried: one that remembers nothing.
        context: As in a round.

    Raises:
        ValueError: If they are too few for it, or its arguments are none for so many.
    """
    n, draw = len(context.clients), torch.Generator().manual_seed(0)
    losses, root = torch.rand(n, generator=draw), torch.randn(64, generator=draw)
    context = replace(context, losses=losses, start_losses=losses, root=root, broadcast=root)
    try:
        aggregator(torch.randn(n, 64, generator=draw), torch.ones(n, dtype=torch.int64), context)
    except Exception as error:  # one that wants the real uploads will have them
        if isinstance(error, ValueError) and str(error).startswith("Expected argument"):
            raise


def check_broken(
    sent: Tensor, benign: Tensor, losses: Tensor, clients: Tensor, round: int, most: float
) -> int:
    """Stop a run in which too many of a round's benign clients have diverged, or send what is none.

    Args:
        sent: What came of each client of the cohort, int8 [cohort]: see :class:`UploadStatus`.
        benign: Which of them are benign, bool [cohort].
        losses: Their losses [cohort].
        clients: Their ids [cohort].
        round: The round.
        most: The largest share of the benign ones that may be broken.

    Returns:
        How many of the benign ones are broken.

    Raises:
        NonFiniteLossError: With the round, the client and the likely cause.
    """
    sent = sent.cpu()
    broken = (sent != UploadStatus.VALID) & benign
    number = int(broken.sum())
    if number > most * int(benign.sum()):
        first = int(broken.nonzero()[0])
        loss = float(losses[first])
        what = "a model with NaN or infinity" if math.isfinite(loss) else f"a loss of {loss}"
        cause = (
            "as a rule the learning rate is too high (or λ times it is above 2), or the inputs are"
            " not normalised"
        )
        expected = "finite losses"
        if int(sent[first]) == UploadStatus.MALFORMED:
            expected = "uploads and states of real numbers, as long as the model and its states"
            what = "some of another kind or length, or no upload"
            cause = (
                "`end_round` is to return what the local steps changed, a floating-point tensor"
                " [clients, numbers] on the model's device, and to keep states' dtypes and lengths"
            )
        others = f", as did {number - 1} more of {int(benign.sum())}" if number > 1 else ""
        raise NonFiniteLossError(
            f"Expected {expected} but in round {round} client {int(clients[first])} got"
            f" {what}{others}: {cause}; a checkpoint of an earlier round is left as it is."
        )
    return number
