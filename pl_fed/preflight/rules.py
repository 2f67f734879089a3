"""Rules over an algorithm, its data and the federation's settings; one sentence for each."""

from collections.abc import Iterable

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from pl_fed.aggregators import Aggregator, Chain, Mean
from pl_fed.attacks import Attack, LargeLoss
from pl_fed.clients.base import Client
from pl_fed.clients.features import keeps_features
from pl_fed.data.batches import BatchRule
from pl_fed.data.client_data import ClientData
from pl_fed.engine.choice import STACKED
from pl_fed.trees import describe, leaves
from pl_fed.types import SampleEntries


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


def check_class_counts(client: Client, data: ClientData) -> None:
    """Refuse data without class ids for an algorithm that reads numbers of samples by class.

    Raises:
        ValueError: If the task is no classification.
    """
    if client.reads_class_counts and not client.count_classes(data):
        raise ValueError(
            f"Expected one class id for each sample for {type(client).__name__}, which reads the"
            f" clients' numbers of samples by class, but got the task {client.task.name}: use an"
            " algorithm for any task, such as Ditto or FedPer."
        )


def check_votes(client: Client, data: ClientData) -> None:
    """Refuse votes of noisy copies without a global model, or for a net without class scores.

    Raises:
        ValueError: If the algorithm evaluates no global model, the task is no classification, or
            the net has steps of its own.
    """
    if "global" not in client.evaluated:
        raise ValueError(
            f"Expected `federation.smoothing` to be null for {type(client).__name__}, which"
            " evaluates no global model: its noisy copies are those that vote."
        )
    if client.task.runs_steps or not client.count_classes(data):
        raise ValueError(
            "Expected `federation.smoothing` to be null for a net without one class for each"
            f" sample (task {client.task.name}): only classes can be voted for."
        )


def check_predict(client: Client) -> None:
    """Refuse a net with evaluation steps for an algorithm that predicts by more than a net.

    Raises:
        ValueError: If the algorithm overrides ``predict``, and the net has steps of its own.
    """
    if not client.predicts_by_net:
        client.refuse_module_steps("predicts by more than a net")


def check_own_batches(client: Client, data: ClientData, attacks: Iterable[Attack]) -> None:
    """Refuse a need of samples as tensors for data with batches of its own.

    Raises:
        ValueError: If the net has no steps, or keeps features; if metrics of the federation, the
            algorithm's own validation samples or an attack on data need tensors.
    """
    batches, net = data.own_batches, client.global_model
    if batches is None:
        return
    name = type(net).__name__
    if not client.task.runs_steps:
        if batches.reason:
            raise ValueError(batches.reason)
        raise ValueError(
            "Expected a LightningModule with a `training_step` for `data.dataset.batches: own`,"
            f" whose batches only its steps can read, but got {name}: leave `batches` out."
        )
    needs = {
        "`keep_features` of the net": keeps_features(net),
        "`federation.metrics`": bool(client.task.further_metrics),
        f"{type(client).__name__}, which reads validation samples,": client.reads_validation,
        **{
            f"the attack {type(attack).__name__}": attack.poisons or attack.trains
            for attack in attacks
        },
    }
    if unmet := [need for need, is_set in needs.items() if is_set]:
        raise ValueError(
            f"Expected samples that are tensors for {unmet[0]} but got batches that the data set's"
            " `collate_fn` makes: leave it out, log metrics in the module's"
            " steps, or let `collate_fn` return tensors with a row for each sample."
        )


def warn_of_scaled_images(client: Client, data: ClientData) -> None:
    """Warn that the steps of a LightningModule get images in [0, 1] that a data set has as uint8.

    In a Lightning fit, these steps get uint8, and divide by 255 themselves. Targets of integers are
    not scaled, also if they are the images, as those of an autoencoder.
    """
    if not (client.task.runs_steps and data.scales_images):
        return
    shapes = [leaf.shape for leaf in leaves(data.inputs) if leaf.dim() > 1]
    targets = [leaf for leaf in leaves(data.targets) if not leaf.is_floating_point()]
    are_images = any(leaf.shape in shapes for leaf in targets)
    if are_images:
        rank_zero_warn(
            "pl_fed scales the uint8 inputs of the data set to [0, 1] for the steps of"
            f" {type(client.global_model).__name__}, but not its integer targets of the same shape:"
            " divide the targets alone by 255, or let the data set return real numbers for both."
        )
    elif isinstance(data.entries, SampleEntries):
        rank_zero_warn(
            "pl_fed scales the uint8 inputs of the data set to [0, 1] for the steps of"
            f" {type(client.global_model).__name__}: leave out their division by 255, or let the"
            " data set return real numbers."
        )


def check_attacks(client: Client, data: ClientData, attacks: Iterable[Attack]) -> None:
    """Refuse attacks that do not fit the algorithm, the net or the data.

    Raises:
        ValueError: If an attack forges uploads and the algorithm needs their plain mean; if it
            trains models and uploads are no changes of them; if it needs inputs of real numbers and
            the net keeps features or the data has other inputs; or if it needs classes and the data
            has none.
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
        if attack.trains and client.sent_layout is None:
            raise ValueError(
                f"Expected an algorithm with uploads of model parameters for {name}, whose"
                f" attackers train the global model, but got {type(client).__name__}: use an attack"
                " on data, such as Backdoor, or another algorithm."
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
        if attack.triggers and not client.task.num_classes(data.num_classes):
            remedy = "use an attack without a trigger, such as SignFlipping"
            if client.task.runs_steps:
                remedy += ", or as `model.net` the net without the steps of the LightningModule"
            raise ValueError(
                f"Expected the task to have classes for {name}, because its trigger stands for one"
                f" of them, but got the task {type(client.task).__name__} without classes:"
                f" {remedy}."
            )


def check_engine(client: Client, rule: BatchRule, data: ClientData, engine: str) -> None:
    """Inform about a criterion that is defined for whole batches only; refuse an unfit engine.

    Args:
        client: The algorithm.
        rule: The split of samples into minibatches.
        data: The clients' data.
        engine: The requested engine.

    Raises:
        ValueError: If such a criterion meets an engine that stacks clients, and minibatches of
            several sizes.
    """
    if client.averages_samples:
        return
    name, needs_tensors = client.task.name, engine in STACKED and data.own_batches is None
    if needs_tensors and not rule.is_uniform(data.train.sizes):
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


def check_accumulation(client: Client, batches_per_step: int) -> None:
    """Refuse accumulated gradients for an algorithm whose step belongs to one minibatch.

    Args:
        client: The algorithm.
        batches_per_step: The setting ``trainer.accumulate_grad_batches``.

    Raises:
        ValueError: If several minibatches would make up a step.
    """
    if batches_per_step > 1 and client.single_batch_reason:
        raise ValueError(
            "Expected trainer argument `accumulate_grad_batches` to be 1 for"
            f" {type(client).__name__} but got {batches_per_step}: {client.single_batch_reason}."
            " Use a larger `data.batch_size`."
        )


def check_local_schedule(client: Client, batches_per_step: int) -> None:
    """Refuse a schedule over local steps where a step needs one rate, or several minibatches.

    Args:
        client: The algorithm.
        batches_per_step: The setting ``trainer.accumulate_grad_batches``.

    Raises:
        ValueError: If the schedule has no meaning.
    """
    if client.local_schedule is None:
        return
    name = client.local_schedule.name
    if client.reads_rates:
        raise ValueError(
            f"Expected argument `model.lr_scheduler` to be a schedule of rounds for"
            f" {type(client).__name__}, whose steps need one learning rate, but got {name}, which"
            " changes it in each local step: remove it."
        )
    if batches_per_step > 1:
        raise ValueError(
            f"Expected trainer argument `accumulate_grad_batches` to be 1 for {name}, which gives"
            f" each minibatch its learning rate, but got {batches_per_step}: use a larger"
            " `data.batch_size`."
        )


def check_held_out_clients(client: Client, held_out: ClientData | None) -> None:
    """Refuse held-out clients for an algorithm that has no model for a client without a round.

    Args:
        client: The algorithm.
        held_out: The data of the held-out clients, or ``None`` without any.

    Raises:
        ValueError: If there are held-out clients, and they would have no model.
    """
    if held_out is not None and client.new_client_reason:
        raise ValueError(
            f"Expected argument `data.held_out_clients` to be left out for {type(client).__name__}"
            f" but got {held_out.num_clients} held-out clients: {client.new_client_reason}."
        )


def check_mean(client: Client, aggregator: Aggregator, only_adds: bool) -> None:
    """Refuse or warn if the global model is not the mean over clients that the algorithm defines.

    Args:
        client: The algorithm.
        aggregator: The server's aggregator.
        only_adds: Whether the server only adds the merged update to the global model.

    Raises:
        ValueError: If the aggregator weights clients by samples; or if the algorithm needs a plain
            mean or step, and the aggregator or the server optimizer makes it another one.
    """
    name, last = type(client).__name__, aggregator.final_aggregator
    if client.needs_plain_mean:
        _check_plain_mean(name, aggregator, only_adds)
    if client.needs_plain_step and not only_adds:
        reason = "whose server is a part of the algorithm"
        raise _server_step_error(name, reason, "use another algorithm")
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
        raise _server_step_error(name, "whose mean is exact only then", "use FedAvg")


def _server_step_error(name: str, reason: str, remedy: str) -> ValueError:
    """Return the exception for a server that does more than add the merged update.

    Args:
        name: The algorithm or the aggregator that needs this step.
        reason: The reason, as a clause about it.
        remedy: Another remedy than to remove the optimizer.
    """
    return ValueError(
        "Expected `federation.server_optimizer` to be plain SGD with learning rate 1 for"
        f" {name}, {reason}, but got another: remove it, or {remedy}."
    )


def check_upload_factors(client: Client, aggregator: Aggregator) -> None:
    """Refuse an aggregator with weights of its own for an algorithm that scales uploads.

    Args:
        client: The algorithm.
        aggregator: The server's aggregator.

    Raises:
        ValueError: If the factors of the uploads depend on weights that come later.
    """
    if (client.normalizer or client.weigher) and aggregator.weighs_clients:
        raise ValueError(
            "Expected `federation.aggregator` to be one without weights of its own for"
            f" {type(client).__name__}, which scales uploads before their weights are known, but"
            f" got {type(aggregator.final_aggregator).__name__}: use, for example, Mean."
        )


def check_compared_parts(client: Client, aggregator: Aggregator) -> None:
    """Refuse an aggregator that compares only parts of uploads that clients keep to themselves.

    Uploads are 0 there, so that all clients would be alike.

    Args:
        client: The algorithm.
        aggregator: The server's aggregator.

    Raises:
        ValueError: With the remedy.
    """
    unsent = client.unsent_positions
    for stage in aggregator.modules():
        if not isinstance(stage, Aggregator) or not len(unsent):
            continue
        compared = stage.list_compared_positions(client.row("global").layout)
        if compared is not None and torch.isin(compared, unsent).all():
            raise ValueError(
                "Expected `federation.aggregator` to compare parameters that clients of"
                f" {type(client).__name__} send but got {type(stage).__name__} on a layer that they"
                " keep to themselves: let it compare all parameters, or layers that are sent."
            )


def warn_of_untrained_parts(client: Client, aggregator: Aggregator) -> None:
    """Warn if an aggregator reads results of a global model with parts that clients keep.

    Args:
        client: The algorithm.
        aggregator: The server's aggregator.
    """
    reads_results = aggregator.needs_start_losses or aggregator.needs_group_counts
    if reads_results and len(client.unsent_positions):
        rank_zero_warn(
            f"{type(aggregator.final_aggregator).__name__} reads the results of the global model on"
            f" the clients' data, but {type(client).__name__} never trains the parts of it that"
            " clients keep: the results are those of their first values."
        )


def warn_of_unread_losses(attack: Attack | None, aggregator: Aggregator) -> None:
    """Warn of an attack that only forges losses if the server reads none.

    Args:
        attack: The attack on uploads, if there is one.
        aggregator: The server's aggregator.
    """
    if isinstance(attack, LargeLoss) and not aggregator.needs_start_losses:
        rank_zero_warn(
            f"The attack LargeLoss changes nothing, because {type(aggregator).__name__} reads no"
            " losses: take an aggregator such as QFFL or Term, or combine it with another attack by"
            " `Combined`."
        )


def check_server_step(aggregator: Aggregator, only_adds: bool) -> None:
    """Refuse a server optimizer that changes the update of an aggregator that sets the model.

    Args:
        aggregator: The server's aggregator.
        only_adds: Whether the server only adds the merged update to the global model.

    Raises:
        ValueError: If the aggregator sets the model, and the server does more than add.
    """
    if aggregator.sets_model and not only_adds:
        setter = aggregator.then if isinstance(aggregator, Chain) else aggregator
        reason = "whose update leads to the model that it has chosen"
        raise _server_step_error(
            type(setter).__name__, reason, "use another `federation.aggregator`"
        )


def check_group_counts(client: Client, data: ClientData, aggregator: Aggregator) -> None:
    """Refuse data without groups or classes for an aggregator that reads counts by group.

    Args:
        client: The algorithm.
        data: The clients' data.
        aggregator: The server's aggregator.

    Raises:
        ValueError: If there are no groups, or the predictions are no classes that pl_fed reads.
    """
    if not aggregator.needs_group_counts:
        return
    name = type(aggregator.final_aggregator).__name__
    if not data.group_names:
        raise ValueError(
            f"Expected data with a group of each sample for {name}, which compares groups, but got"
            " none: set `group` of the data set, for example of Table or CelebA, or use another"
            " `federation.aggregator`."
        )
    if not _reads_classes(client, data):
        raise ValueError(
            f"Expected a task of pl_fed with one class for each sample for {name}, which counts"
            f" predicted classes by group, but got {type(client.task).__name__}: use another"
            " `federation.aggregator`."
        )


def _reads_classes(client: Client, data: ClientData) -> bool:
    """Return whether pl_fed itself reads a predicted class for each sample."""
    return bool(client.count_classes(data)) and not client.task.runs_steps


def describe_unused_groups(client: Client, data: ClientData) -> str | None:
    """Return a sentence if evaluations cannot measure the groups of the data; else ``None``."""
    if not data.group_names or _reads_classes(client, data):
        return None
    return (
        f"Gaps between the groups {', '.join(data.group_names)} are not measured: they need a task"
        f" of pl_fed with one class for each sample, and {type(client.task).__name__} is another."
    )


def check_samples(
    data: ClientData, aggregator: Aggregator, evaluate_clients: int | float | None
) -> None:
    """Refuse settings that need samples that the data lack.

    Args:
        data: The clients' data.
        aggregator: The server's aggregator.
        evaluate_clients: The setting ``federation.evaluate_clients``.

    Raises:
        ValueError: If a sample of the validated clients would be empty, or the server has no
            samples for its own update.
    """
    if evaluate_clients is not None and not data.val.sizes.any():
        raise ValueError(
            "Expected the data to have validation samples for `federation.evaluate_clients` but"
            " got none: set `data.val_fraction`, for example `0.1`, or leave the option out."
        )
    if aggregator.needs_root and not len(data.root):
        raise ValueError(
            "Expected argument `root_samples` of the data to be above 0 for an aggregator that"
            " compares uploads with the server's own update, as FLTrust does, but got 0."
        )
