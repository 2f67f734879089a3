"""What is checked before training, and after each round."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from pl_fed.aggregators import Aggregator
from pl_fed.arguments import check_finite_options, check_not_differentiable
from pl_fed.attacks import Attack
from pl_fed.attacks.base import apply_attacks
from pl_fed.clients.base import Client
from pl_fed.data.batches import BatchRule
from pl_fed.data.client_data import ClientData, integers_to_floats
from pl_fed.data.module import FederatedData
from pl_fed.engine.choice import STACKED
from pl_fed.evaluation.client_measures import local_metrics
from pl_fed.metrics.client_metrics import TAKEN_NAMES
from pl_fed.nets.modes import evaluation_mode
from pl_fed.nets.rows import trainable_parameters
from pl_fed.random import fork_torch_rng
from pl_fed.rounds.features import features_of, keeps_features
from pl_fed.rounds.trained_cohort import UploadStatus
from pl_fed.trees import Tree, describe, leaves, rows_of, select
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

    Set are the client's task, where none was given; whether the net takes integer inputs; and
    whether the task's loss is the mean of losses of samples.
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
    x = _first_samples(client, data).inputs
    if not isinstance(x, Tensor):
        raise ValueError(
            f"Expected inputs of one tensor for {name}, whose `keep_features` is True, but got"
            f" {describe(x)}."
        )
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
        first = data.batch(data.train.index[:1]).inputs
        if attack.needs_inputs and not (isinstance(first, Tensor) and first.is_floating_point()):
            raise ValueError(
                f"Expected inputs of one tensor of real numbers for {name}, which changes them, but"
                f" got {describe(first)}."
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
            batch = batch._replace(inputs=features_of(net, batch.inputs))
    someone = ClientContext(seed=0, round=0, client=0, num_classes=data.num_classes)
    for attack in attacks:
        apply_attacks(batch, [attack], someone)
        attack.trigger(batch)


def _first_samples(client: Client, data: ClientData) -> Batch:
    """Return two or three samples that are trained on, where the net is and as it takes them.

    Their number is not that of the classes: a criterion that compares [2, 2] outputs with [2]
    class ids, each with each, would go unnoticed.
    """
    return _samples(client, data, data.train.index[: 3 if data.num_classes == 2 else 2])


def _samples(client: Client, data: ClientData, index: Tensor) -> Batch:
    """Return samples by their ids, where the net is and as it takes them."""
    batch = place_batch(client, data.batch(index))
    index = index.to(batch.device)
    return batch._replace(samples=index, visits=torch.zeros_like(index))


def place_batch(client: Client, batch: Batch) -> Batch:
    """Return a batch where the net is, and as it takes it."""
    inputs = batch.inputs if client.takes_integers else integers_to_floats(batch.inputs)
    return batch._replace(inputs=client.place(inputs), targets=client.place(batch.targets))


def _run_net(client: Client, data: ClientData, augment: Callable[[Tree], Tree] | None) -> None:
    mode = client.training
    client.choose_task(data.targets, data.num_classes)
    client.takes_integers = True
    client.eval()
    try:
        with torch.no_grad():
            outputs, targets = _tried_outputs(client, data, augment)
            client.task.check_targets(data.targets, data.num_classes)
            client.task.check_outputs(outputs, targets, data.num_classes)
            _try_loss(client, outputs, targets)
            _try_metrics(client, outputs, targets)
            with fork_torch_rng(client.device):
                client.task.averages_samples = _averages_samples(client, data, outputs)
    finally:
        client.train(mode)


def _tried_outputs(
    client: Client, data: ClientData, augment: Callable[[Tree], Tree] | None
) -> tuple[Tree, Tree]:
    """Return a net's outputs for two samples, and their targets.

    Integer inputs become floating-point numbers if the net does not take them as they are.
    """
    batch = _first_samples(client, data)
    if not all(leaf.is_floating_point() for leaf in leaves(batch.inputs)):
        try:
            return _outputs(client, batch, augment), batch.targets
        except ValueError:
            client.takes_integers = False
            batch = _first_samples(client, data)
    return _outputs(client, batch, augment), batch.targets


def _outputs(client: Client, batch: Batch, augment: Callable[[Tree], Tree] | None) -> Tree:
    net, inputs = client.global_model, batch.inputs
    if augment is not None:
        with fork_torch_rng(batch.device):
            shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves(inputs))
            inputs = _tried(
                f"Expected argument `augment` to take inputs of shape {shapes} but that",
                lambda: augment(inputs),
            )
    return _tried(
        f"Expected argument `net` to take inputs of shape {describe(inputs)} but"
        f" {type(net).__name__}",
        lambda: client.task.predict(net, inputs),
        remedies=_OF_INPUTS,
    )


def _try_loss(client: Client, outputs: Tree, targets: Tree) -> None:
    """Refuse a loss that does not take outputs and targets, or is not one number."""
    real = isinstance(targets, Tensor) and targets.is_floating_point()
    loss = _tried(
        f"Expected argument `criterion` to take outputs of shape {_shapes(outputs)} and targets of"
        f" shape {_shapes(targets)} ({', '.join(str(leaf.dtype) for leaf in leaves(targets))}"
        f"{', where class ids are integers' if real else ''}) but {client.task.name}",
        lambda: client.task.batch_loss(outputs, targets),
        remedies=_OF_TARGETS,
    )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            "Expected argument `criterion` to give one number, the loss of a batch, but"
            f" {client.task.name} gave {got}."
        )


def _try_metrics(client: Client, outputs: Tree, targets: Tree) -> None:
    """Refuse metrics that do not take outputs and targets, or whose names are taken."""
    name = type(client.task).__name__
    for key, metric in local_metrics(client.task, client.device).items():
        if not key.isidentifier() or key in TAKEN_NAMES:
            raise ValueError(
                f"Expected the metrics of the task {name} to have names other than"
                f" {', '.join(TAKEN_NAMES)} but got {key!r}."
            )
        _tried(
            f"Expected the metric `{key}` of the task {name} to take outputs of shape"
            f" {_shapes(outputs)} and targets of shape {_shapes(targets)} but that",
            lambda: metric.update(*client.task.measured(outputs, targets)),  # noqa: B023
        )


def _shapes(tree: Tree) -> str:
    return ", ".join(str(list(leaf.shape)) for leaf in leaves(tree))


_OF_INPUTS = {
    "'indices'": ": inputs come as floating-point numbers, and an embedding takes x.long()",
}
_OF_TARGETS = {
    "Long": ": real-valued targets become class ids by targets.long() in the criterion",
}

_TRIED_SAMPLES, _TRIED_BATCH = 512, 16
_TRIED_NUMBERS = 1 << 22  # of outputs, for all the samples


def _averages_samples(client: Client, data: ClientData, outputs: Tree) -> bool:
    """Return whether the loss is, on real targets, the mean of one loss for each sample.

    The targets are those of samples of as many clients as possible, and the ones that have the
    smallest and the largest numbers, as codes for missing values are.

    Args:
        client: The algorithm.
        data: The clients' data.
        outputs: What the model, as it is, makes of a few samples.
    """
    index, number = data.train.index, rows_of(outputs)
    numel = max(1, sum(leaf[0].numel() for leaf in leaves(outputs)))
    most = min(_TRIED_SAMPLES, max(2, _TRIED_NUMBERS // numel), len(index))
    values = [leaf[:, None].flatten(1) for leaf in leaves(data.targets)]
    extreme = torch.stack(
        [place for v in values for place in (v.amin(1).argmin(), v.amax(1).argmax())]
    )
    spread = index[torch.linspace(0, len(index) - 1, most).long()]
    targets = client.place(select(data.targets, torch.cat([extreme, spread])))
    size = min(_TRIED_BATCH, max(2, _TRIED_NUMBERS // numel))
    total = rows_of(targets)
    for begin in range(0, total, size):
        some = select(targets, slice(begin, begin + size))
        places = torch.arange(rows_of(some), device=client.device) % number
        if not client.task.agrees(select(outputs, places), some):
            return False
    return True


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
    name = client.task.name
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
    last = aggregator.final_aggregator
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
