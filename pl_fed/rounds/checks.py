"""Checks before training, and of each round's broken uploads."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from pl_fed.aggregators import Aggregator, Mean
from pl_fed.arguments import check_finite_options, check_not_differentiable
from pl_fed.attacks import Attack
from pl_fed.attacks.base import apply_attacks
from pl_fed.clients.base import Client
from pl_fed.clients.kept_parts import restore_values
from pl_fed.clients.module_optimizer import ModuleOptimizer
from pl_fed.data.batches import BatchRule
from pl_fed.data.client_data import ClientData, integers_to_floats
from pl_fed.data.module import FederatedData
from pl_fed.engine.choice import STACKED
from pl_fed.evaluation.client_measures import local_metrics
from pl_fed.metrics.client_metrics import TAKEN_NAMES
from pl_fed.metrics.named import metric_arguments
from pl_fed.nets.modes import evaluation_mode
from pl_fed.nets.rows import trainable_parameters
from pl_fed.random import fork_all_generators, fork_torch_rng
from pl_fed.rounds.explanations import call_or_explain
from pl_fed.rounds.features import compute_features, keeps_features
from pl_fed.rounds.module_trial import try_steps
from pl_fed.rounds.trained_cohort import UploadStatus
from pl_fed.tasks import LightningTask
from pl_fed.text import first_line
from pl_fed.trees import Tree, count_samples, describe, leaves, select
from pl_fed.types import Batch, ClientContext, RoundContext

_SPREAD = 64  # samples of a trial of evaluation steps


class NonFiniteLossError(RuntimeError):
    """Non-finite loss: too many benign clients have a loss or a model with NaN or infinity."""


@contextmanager
def explain_log() -> Iterator[None]:
    """Replace Lightning's error about ``self.log`` in ``training_step`` by one with a remedy."""
    try:
        yield
    except MisconfigurationException as error:
        if "self.log" not in str(error):
            raise
        raise ValueError(
            "Expected `training_step` to return the values to log, in a dict with `loss` and other"
            " scalars, but got a call of `self.log`: pl_fed may train many clients at once."
        ) from error


def check_net(
    client: Client, data: ClientData, augment: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Build the local optimizer, check the models, and try net and criterion on a few samples.

    It sets three attributes of the client: ``task``, if none is given; ``takes_integers``, whether
    the net takes integer inputs; and ``task.averages_samples``, whether the task's loss is the mean
    of the samples' losses.

    Args:
        client: The algorithm.
        data: The clients' data.
        augment: Changes the inputs of each minibatch.

    Raises:
        ValueError: If the net has half precision, the optimizer refuses its options, models or
            states do not fit together, the inputs cannot be augmented, the net refuses the inputs,
            its output does not fit the classes, or the criterion refuses outputs and targets.
    """
    dtype = client.row("global").data.dtype
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(
            "Expected argument `net` to have parameters of float32 or float64 but got"
            f" {dtype}: small steps would be lost in them. To compute in lower precision, set the"
            " trainer's precision to bf16-mixed."
        )
    leaves = _list_leaves(client)
    optimizer = call_or_explain(
        "Expected argument `optimizer` to build a local optimizer but that",
        lambda: client.objective.build_optimizer(leaves),
        explains_own=not isinstance(client.objective.optimizer, ModuleOptimizer),
    )
    check_finite_options(optimizer=optimizer)
    check_not_differentiable(optimizer=optimizer)
    client.state_defaults()  # refuses a default that is not a row
    client.server_state_defaults()
    _run_net(client, data, augment)


def check_validation_loss(client: Client, monitor: str | None) -> None:
    """Refuse an algorithm that chooses by validation losses if an evaluation gives none.

    Args:
        client: The algorithm.
        monitor: The setting ``federation.monitor``; a metric replaces the loss.

    Raises:
        ValueError: If the evaluation steps of a LightningModule have no loss.
    """
    if not client.validated or monitor is not None or client.task.has_loss("val"):
        return
    raise ValueError(
        f"Expected `validation_step` of {type(client.global_model).__name__} to return or log a"
        f" loss for {type(client).__name__}, which chooses models by it, but it does neither: log"
        " `val_loss`, or set `federation.monitor` to one of its metrics."
    )


def check_kept_optimizers(client: Client) -> None:
    """Refuse to keep the states of local optimizers if there are none or they fit no row.

    Raises:
        ValueError: If clients keep these states, and the optimizer has none, or other values than
            tensors and numbers for each parameter, or no step without a closure.
    """
    if not client.keeps_optimizer_state:
        return
    layouts = call_or_explain(
        "Expected a local optimizer that steps from gradients alone for"
        " `federation.engine.keep_optimizer_state: true` but that",
        lambda: client.optimizer_layouts,
        explains_own=False,
    )
    if not layouts:
        optimizer = client.objective.build_optimizer(_list_leaves(client))
        raise ValueError(
            "Expected a local optimizer with a state, such as Adam or SGD with momentum, for"
            f" `federation.engine.keep_optimizer_state: true` but {type(client).__name__} has"
            f" {type(optimizer).__name__} without one: set false."
        )


def _list_leaves(client: Client) -> dict[str, list[Tensor]]:
    """Return the trainable parameters of each trained model."""
    return {
        name: list(trainable_parameters(client.model(name)).values()) for name in client.trained
    }


def check_features(client: Client, datamodule: FederatedData) -> None:
    """Refuse a net that keeps features if training on features would differ.

    Raises:
        ValueError: If inputs are augmented, the features of two samples need a gradient, or the net
            has other outputs for these features than for the samples.
    """
    net, data = client.global_model, datamodule.clients
    if not keeps_features(net):
        return
    name = type(net).__name__
    if datamodule.augment is not None:
        raise ValueError(
            f"Expected no argument `augment` for {name}, which keeps features, but got"
            f" {datamodule.augment}: features are computed once, from inputs without augmentation."
        )
    if data.redraw is not None:
        raise ValueError(
            f"Expected samples that are drawn once for {name}, which keeps features, but got a data"
            " set that draws at random: set `data.dataset.redraw` to false, or `keep_features` of"
            " the net."
        )
    x = _first_samples(client, data).inputs
    if not isinstance(x, Tensor):
        raise ValueError(
            f"Expected inputs of one tensor for {name} with `keep_features` = True but got"
            f" {describe(x)}."
        )
    with evaluation_mode(client), restore_values(client):
        expected = f"Expected `features` of {name} with `keep_features` = True to take inputs"
        features = call_or_explain(f"{expected} but that", lambda: compute_features(net, x))
        if features.requires_grad:
            raise ValueError(
                f"Expected `features` of {name} with `keep_features` = True to use frozen"
                " parameters only but got trainable ones: set requires_grad=False on them."
            )
        expected = (
            f"Expected {name} with `keep_features` = True to take features in place of inputs"
        )
        outputs = call_or_explain(f"{expected} but that", lambda: net(features))
        if not torch.allclose(outputs, net(x), rtol=1e-3, atol=1e-5):
            raise ValueError(f"{expected} but got other outputs for features than for inputs.")


def check_attacks(client: Client, data: ClientData, attacks: Iterable[Attack]) -> None:
    """Refuse attacks that do not fit the algorithm, the net or the data.

    Raises:
        ValueError: If an attack forges uploads and the algorithm needs their plain mean; if it
            needs inputs of real numbers and the net keeps features or the data has other inputs; or
            if it needs classes and the data has none.
    """
    net = client.global_model
    for attack in attacks:
        name = type(attack).__name__
        if attack.forges and client.needs_plain_mean:
            raise ValueError(
                "Expected `federation.adversary.attack` to leave uploads unchanged for"
                f" {type(client).__name__}, whose server undoes forged uploads, but got {name}: use"
                " an attack on data, such as RandomLabels, or FedAvg."
            )
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
        if attack.triggers and not client.count_classes(data):
            raise ValueError(
                f"Expected the data to have classes for {name}, because its trigger stands for one"
                f" of them, but got the task {type(client.task).__name__} without classes."
            )


def try_attacks(client: Client, data: ClientData, attacks: Iterable[Attack]) -> None:
    """Try attacks on a few samples, so that their errors appear before training."""
    net, batch = client.global_model, _first_samples(client, data)
    if keeps_features(net):
        with torch.no_grad(), evaluation_mode(client), restore_values(client):
            batch = batch._replace(inputs=compute_features(net, batch.inputs))
    context = ClientContext(seed=0, round=0, client=0, num_classes=data.num_classes)
    for attack in attacks:
        apply_attacks(batch, [attack], context)
        attack.trigger(batch)


def _first_samples(client: Client, data: ClientData, count: int = 2) -> Batch:
    """Return a few training samples, on the net's device and in its input format.

    Their number differs from the number of classes. Otherwise a criterion that broadcasts [2, 2]
    outputs against [2] class ids would raise no error.
    """
    count += data.num_classes == count
    return _load_samples(client, data, data.train.index[:count])


def _spread_samples(client: Client, data: ClientData, part: str) -> Batch:
    """Return some samples of a part, spread over all clients; training samples if it has none."""
    index = data.part(part).index
    index = index if len(index) else data.train.index
    return _load_samples(client, data, index[:: -(-len(index) // _SPREAD)])


def _load_samples(client: Client, data: ClientData, index: Tensor) -> Batch:
    """Return samples on the net's device and in its input format."""
    batch = place_batch(client, data.batch(index))
    index = index.to(batch.device)
    return batch._replace(samples=index, visits=torch.zeros_like(index))


def place_batch(client: Client, batch: Batch) -> Batch:
    """Return a batch on the net's device and in its input format."""
    dtype = client.row("global").data.dtype
    inputs = batch.inputs if client.takes_integers else integers_to_floats(batch.inputs, dtype)
    return batch._replace(inputs=client.place(inputs), targets=client.place(batch.targets))


def _run_net(client: Client, data: ClientData, augment: Callable[[Tree], Tree] | None) -> None:
    """Try net, task, loss and metrics on a few samples, in evaluation mode."""
    mode = client.training
    client.choose_task(data.targets, data.num_classes)
    client.takes_integers = True
    client.eval()
    try:
        with torch.no_grad(), fork_all_generators(), restore_values(client):
            if isinstance(client.task, LightningTask):
                _run_steps(client, client.task, data, augment)
                return
            client.task.check_inputs(data.inputs)
            outputs, targets = _compute_outputs(client, data, augment)
            client.task.check_targets(data.targets, data.num_classes)
            client.task.check_outputs(outputs, targets, data.num_classes)
            loss = _try_loss(client, outputs, targets)
            if augment is None:
                inputs = _first_samples(client, data).inputs
                client.task.check_loss(client.global_model, inputs, targets, loss)
            _try_metrics(client, outputs, targets)
            with fork_torch_rng(client.device):
                client.task.averages_samples = _averages_samples(client, data, outputs)
    finally:
        client.train(mode)


def _run_steps(
    client: Client,
    task: LightningTask,
    data: ClientData,
    augment: Callable[[Tree], Tree] | None,
) -> None:
    """Try the steps of a LightningModule, and further metrics, on a few samples."""
    task.entries = data.entries
    try_steps(
        client,
        task,
        lambda: _first_samples(client, data, count=7),  # no step unpacks 7 outputs
        lambda part: _spread_samples(client, data, part),
        client.objective.build_optimizer(_list_leaves(client)),
        augment,
    )
    if task.further_metrics:
        net, batch = client.global_model, _spread_samples(client, data, "val")
        outputs = call_or_explain(
            f"Expected `predict_step` of {type(net).__name__} to take the batches of"
            " `validation_step`, since `federation.metrics` reads its predictions, but that",
            lambda: task.predict_batch(net, batch),
            explains_own=False,
        )
        _try_metrics(client, outputs, batch.targets)


def _compute_outputs(
    client: Client, data: ClientData, augment: Callable[[Tree], Tree] | None
) -> tuple[Tree, Tree]:
    """Return the net's outputs for a few samples, and their targets.

    If the net refuses integer inputs, they become floating-point numbers.
    """
    batch = _first_samples(client, data)
    if not all(leaf.is_floating_point() for leaf in leaves(batch.inputs)):
        try:
            return _predict(client, batch, augment), batch.targets
        except ValueError:
            client.takes_integers = False
            batch = _first_samples(client, data)
    return _predict(client, batch, augment), batch.targets


def _predict(client: Client, batch: Batch, augment: Callable[[Tree], Tree] | None) -> Tree:
    """Return the net's outputs for a batch, augmented if ``augment`` is set."""
    net, inputs = client.global_model, batch.inputs
    if augment is not None:
        with fork_torch_rng(batch.device):
            shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves(inputs))
            inputs = call_or_explain(
                f"Expected argument `augment` to take inputs of shape {shapes} but that",
                lambda: augment(inputs),
            )
    return call_or_explain(
        f"Expected argument `net` to take inputs of shape {describe(inputs)} but"
        f" {type(net).__name__}",
        lambda: client.task.predict(net, inputs),
        remedies=_INPUT_REMEDIES,
    )


def _try_loss(client: Client, outputs: Tree, targets: Tree) -> Tensor:
    """Return the loss; refuse a criterion that fails, or does not return one number."""
    is_real = isinstance(targets, Tensor) and targets.is_floating_point()
    loss = call_or_explain(
        f"Expected argument `criterion` to take outputs of shape {_shapes(outputs)} and targets of"
        f" shape {_shapes(targets)} ({', '.join(str(leaf.dtype) for leaf in leaves(targets))}"
        f"{', where class ids are integers' if is_real else ''}) but {client.task.name}",
        lambda: client.task.batch_loss(outputs, targets),
        remedies=_TARGET_REMEDIES,
    )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            "Expected argument `criterion` to give one number, the loss of a batch, but"
            f" {client.task.name} gave {got}."
        )
    return loss


def _try_metrics(client: Client, outputs: Tree, targets: Tree) -> None:
    """Refuse metrics that fail for outputs and targets, or have a reserved name."""
    name = type(client.task).__name__
    for key, metric in local_metrics(client.task, client.device).items():
        if not key.isidentifier() or key in TAKEN_NAMES:
            raise ValueError(
                f"Expected the metrics of the task {name} to have names other than"
                f" {', '.join(TAKEN_NAMES)} but got {key!r}."
            )
        call_or_explain(
            f"Expected the metric `{key}` of the task {name} to take outputs of shape"
            f" {_shapes(outputs)} and targets of shape {_shapes(targets)} but that",
            lambda: metric.update(  # noqa: B023
                *metric_arguments(metric, *client.task.metric_inputs(outputs, targets))  # noqa: B023
            ),
        )
        _check_single_number(key, metric)


def _check_single_number(name: str, metric: Any) -> None:
    """Refuse a metric with several numbers as value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = metric.compute()
        except (RuntimeError, ValueError, IndexError):  # undefined for a few samples
            return
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"Expected the metric `{name}` to give one number for a client but got {shape}: set,"
            " for example, its argument `average: macro`."
        )


def _shapes(tree: Tree) -> str:
    return ", ".join(str(list(leaf.shape)) for leaf in leaves(tree))


_INPUT_REMEDIES = {
    "'indices'": ": inputs are floating-point numbers, so call an embedding with x.long()",
}
_TARGET_REMEDIES = {
    "Long": ": to use real-valued targets as class ids, call targets.long() in the criterion",
}

_MAX_SAMPLES, _BATCH = 512, 16
_MAX_NUMBERS = 1 << 22  # numbers in the outputs of all samples


def _averages_samples(client: Client, data: ClientData, outputs: Tree) -> bool:
    """Return whether the loss of a batch is the mean of one loss for each sample, on real targets.

    The test uses targets of as many clients as possible. It also uses the targets with the smallest
    and the largest numbers, which may be codes for missing values.

    Args:
        client: The algorithm.
        data: The clients' data.
        outputs: Outputs of the current model for a few samples.
    """
    index, num_outputs = data.train.index, count_samples(outputs)
    numel = max(1, sum(leaf[0].numel() for leaf in leaves(outputs)))
    num_samples = min(_MAX_SAMPLES, max(2, _MAX_NUMBERS // numel), len(index))
    values = [leaf[:, None].flatten(1) for leaf in leaves(data.targets)]
    extreme = torch.stack(
        [position for v in values for position in (v.amin(1).argmin(), v.amax(1).argmax())]
    )
    spread = index[torch.linspace(0, len(index) - 1, num_samples).long()]
    targets = client.place(select(data.targets, torch.cat([extreme, spread])))
    size = min(_BATCH, max(2, _MAX_NUMBERS // numel))
    for begin in range(0, count_samples(targets), size):
        batch_targets = select(targets, slice(begin, begin + size))
        positions = torch.arange(count_samples(batch_targets), device=client.device) % num_outputs
        if not client.task.is_sample_mean(select(outputs, positions), batch_targets):
            return False
    return True


def check_engine(client: Client, rule: BatchRule, data: ClientData, engine: str) -> None:
    """Inform about a criterion that is defined for whole batches only; refuse an unfit engine.

    Args:
        client: The algorithm.
        rule: How samples become minibatches.
        data: The clients' data.
        engine: The requested engine.

    Raises:
        ValueError: If such a criterion meets an engine that stacks clients, and minibatches of
            several sizes.
    """
    if client.averages_samples:
        return
    name = client.task.name
    if engine in STACKED and not rule.is_uniform(data.train.sizes):
        raise ValueError(
            "Expected argument `federation.engine.name` to be one_by_one, one_by_one_compiled or"
            f" auto for {name}, which is not the mean of one loss for each sample and so takes no"
            f" padding, but got {engine} and minibatches of several sizes: `drop_last` gives"
            f" clients with at least `batch_size` ({rule.batch_size}) samples equal minibatches."
        )
    if client.task.runs_steps:  # no user expects otherwise
        return
    rank_zero_info(
        f"{name} is not the mean of one loss for each sample: pl_fed calls it on minibatches"
        " without padding, and on all samples of a client together for the logged losses."
    )


def check_mean(client: Client, aggregator: Aggregator, only_adds: bool) -> None:
    """Refuse or warn if the global model is not the mean over clients that the algorithm defines.

    Args:
        client: The algorithm.
        aggregator: The server's aggregator.
        only_adds: Whether the server only adds the merged update to the global model.

    Raises:
        ValueError: If the aggregator weights clients by samples; or if the algorithm needs a plain
            mean, and the aggregator or the server optimizer makes it another one.
    """
    name, last = type(client).__name__, aggregator.final_aggregator
    if client.needs_plain_mean:
        _check_plain_mean(name, aggregator, only_adds)
    if client.mean_of != "clients":
        return
    weighting = getattr(last, "weighting", "uniform")
    if weighting != "uniform":
        raise ValueError(
            f"Expected argument `weighting` of {type(last).__name__} to be 'uniform' for {name},"
            f" because its server takes the unweighted mean of uploads, but got {weighting!r}."
        )
    if not only_adds:
        rank_zero_warn(
            f"The global model of {name} is the mean over all clients only if `server_optimizer` is"
            " plain SGD with learning rate 1: another optimizer makes it a variant of the"
            " algorithm."
        )


def _check_plain_mean(name: str, aggregator: Aggregator, only_adds: bool) -> None:
    """Refuse another merge than adding the mean with equal weights; ``name`` is the algorithm's."""
    if type(aggregator) is not Mean or aggregator.weighting != "uniform":
        got = type(aggregator).__name__
        if isinstance(aggregator, Mean):
            got = f"{got}(weighting={aggregator.weighting!r})"
        raise ValueError(
            f"Expected `federation.aggregator` to be Mean(weighting='uniform') for {name}, whose"
            f" mean is exact only then, but got {got}: change it, or use FedAvg."
        )
    if not only_adds:
        raise ValueError(
            "Expected `federation.server_optimizer` to be plain SGD with learning rate 1 for"
            f" {name}, whose mean is exact only then, but got another: remove it, or use FedAvg."
        )


def check_aggregator(aggregator: Aggregator, context: RoundContext) -> None:
    """Try an aggregator on short random uploads of a cohort.

    Args:
        aggregator: An aggregator without memory of any round.
        context: The context of a round.

    Raises:
        ValueError: If the aggregator or its arguments do not fit the number of clients.
    """
    n, draw = len(context.clients), torch.Generator().manual_seed(0)
    losses, root = torch.rand(n, generator=draw), torch.randn(64, generator=draw)
    context = replace(context, losses=losses, start_losses=losses, root=root, broadcast=root)
    try:
        aggregator(torch.randn(n, 64, generator=draw), torch.ones(n, dtype=torch.int64), context)
    except Exception as error:  # some aggregators work on real uploads only
        if isinstance(error, ValueError) and str(error).startswith("Expected argument"):
            raise


def describe_client_error(errors: Mapping[int, Exception]) -> str:
    """Return the first exception of this process's clients in words, with the place in its note."""
    if not errors:
        return "in another process, which names it"
    client, error = next(iter(errors.items()))
    notes = [note.rstrip(".") for note in getattr(error, "__notes__", [])]
    place = notes[-1] if notes else f"In client {client}"
    return f"{place}: {type(error).__name__}: {first_line(error)}"


def check_broken_share(
    status: Tensor,
    benign: Tensor,
    losses: Tensor,
    clients: Tensor,
    round: int,
    max_rejected: float,
    errors: Mapping[int, Exception] | None = None,
) -> int:
    """Stop a run if too many of a round's benign clients are broken.

    Args:
        status: The :class:`UploadStatus` of each client, int8 [cohort].
        benign: A mask of the benign clients, bool [cohort].
        losses: The clients' training losses, [cohort].
        clients: The clients' ids, int64 [cohort].
        round: The round.
        max_rejected: The largest share of the benign clients that may be broken, in [0, 1].
        errors: The exceptions of this process's clients, by id.

    Returns:
        The number of broken benign clients.

    Raises:
        NonFiniteLossError: If too many are broken; with the round, a client and the likely cause.
    """
    status = status.cpu()
    broken = (status != UploadStatus.VALID) & benign
    num_broken, num_benign = int(broken.sum()), int(benign.sum())
    if num_broken > max_rejected * num_benign:
        first = int(broken.nonzero()[0])
        loss = float(losses[first])
        expected = "finite losses"
        got = "a model with NaN or infinity" if math.isfinite(loss) else f"a loss of {loss}"
        cause = (
            "as a rule the learning rate is too high (or λ times it is above 2), or the inputs are"
            " not normalised"
        )
        if int(status[first]) == UploadStatus.MALFORMED:
            expected = "uploads and states of real numbers, as long as the model and its states"
            got = "rows of another kind or length, or no upload"
            cause = (
                "return the change by the local steps from `end_round`, a floating-point tensor"
                " [clients, numbers] on the model's device, and keep the dtypes and lengths of"
                " states"
            )
        if int(status[first]) == UploadStatus.FAILED:
            expected, got = "local work without an exception", "one"
            error = (errors or {}).get(int(clients[first]))
            cause = describe_client_error({int(clients[first]): error} if error else {})
        others = f", as did {num_broken - 1} more of {num_benign}" if num_broken > 1 else ""
        raise NonFiniteLossError(
            f"Expected {expected} but in round {round} client {int(clients[first])} got"
            f" {got}{others}: {cause}; checkpoints of earlier rounds are unchanged."
        )
    return num_broken
