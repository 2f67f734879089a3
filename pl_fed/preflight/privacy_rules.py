"""Refusals of privacy: releases of clients' data that no theorem covers, before training.

Everything that leaves a client is in one of three classes: the clipped upload, a value that stays
with the client, or a value that this file refuses. ``tests/privacy/test_release_matrix.py`` makes
the table of all algorithms, aggregators and options.
"""

import torch

from pl_fed.aggregators import Aggregator, Chain, Mean
from pl_fed.attacks import (
    ALittleIsEnough,
    Attack,
    ConstrainedReplacement,
    FairnessAttack,
    ModelReplacement,
)
from pl_fed.attacks.adversary import Adversary
from pl_fed.clients.base import CONSTANT_BUFFER, Client
from pl_fed.data.module import FederatedData
from pl_fed.data.shared_quantities import describe_shared_quantity
from pl_fed.preflight.memory_trial import augmentation_remembers, name_augmentation
from pl_fed.preflight.trial import Trial
from pl_fed.privacy import DifferentialPrivacy, Participation
from pl_fed.samplers import All, Cyclic, Poisson, Sampler, Uniform
from pl_fed.systems import Systems

_FOR = "for `federation.privacy`"
_FOR_BUCKETS = "for `federation.privacy.buckets`"


def check_privacy(
    settings: DifferentialPrivacy,
    datamodule: FederatedData,
    sampler: Sampler,
    aggregator: Aggregator,
    adversary: Adversary,
    systems: Systems | None,
    trial: Trial,
) -> None:
    """Refuse a federation with a release that the accounting does not cover.

    Args:
        settings: The section ``federation.privacy``.
        datamodule: The data.
        sampler: Draws the cohorts.
        aggregator: The server's aggregator, with the pre-aggregators.
        adversary: The Byzantine clients and their attack.
        systems: The clients' speed and availability; ``None`` for equal clients.
        trial: The algorithm and its samples.

    Raises:
        ValueError: If a release is not covered; with the first such release and a remedy.
    """
    client, num_clients = trial.client, datamodule.clients.num_clients
    participation = find_participation(settings, sampler, num_clients)
    is_without_replacement = participation.kind == "without_replacement"
    refusals = (
        describe_unfit_aggregator(aggregator, settings.buckets),
        describe_unfit_buckets(settings.buckets, sampler.size_of_cohort(num_clients)),
        describe_unfit_algorithm(client),
        describe_unfit_states(client, is_without_replacement),
        describe_shared_quantity(datamodule, _FOR),
        describe_unfit_adversary(adversary, is_without_replacement),
        describe_unfit_systems(systems),
        describe_unfit_augmentation(trial),
    )
    for refusal in refusals:
        if refusal is not None:
            raise ValueError(refusal)


def find_participation(
    settings: DifferentialPrivacy, sampler: Sampler, num_clients: int
) -> Participation:
    """Return the participation of clients, in the simulated federation if there is one.

    Raises:
        ValueError: If the draws of the sampler depend on the clients' data or are unknown, or the
            mechanism needs another sampler.
    """
    name = type(sampler).__name__
    if type(sampler) not in (Poisson, Uniform, All, Cyclic):
        raise ValueError(
            "Expected argument `federation.sampler` to be Poisson, Uniform, Cyclic or All of"
            f" pl_fed.samplers {_FOR} but got {name}: there is no accounting for its draws; use"
            " Poisson."
        )
    separation = sampler.min_separation(num_clients)
    if settings.min_separation is not None and settings.min_separation > separation:
        raise ValueError(
            "Expected argument `federation.privacy.min_separation` to be at most"
            f" {separation} for {name}, because a client may take part again after {separation}"
            f" rounds, but got {settings.min_separation}: use pl_fed.samplers.Cyclic with as many"
            " groups."
        )
    clients = settings.population or num_clients
    cohort = float(settings.noise_cohort_size or sampler.size_of_cohort(num_clients))
    if isinstance(sampler, Poisson) and not settings.is_simulated:
        cohort = sampler.rate * num_clients
    if settings.min_separation is not None:
        return Participation("banded", clients, cohort, settings.min_separation)
    if not settings.amplification or isinstance(sampler, All | Cyclic):
        return Participation("any", clients, cohort, separation)
    if isinstance(sampler, Poisson):
        return Participation("poisson", clients, cohort)
    return Participation("without_replacement", clients, cohort)


def describe_unfit_aggregator(aggregator: Aggregator, buckets: int | None = None) -> str | None:
    """Return the reason against an aggregator, or ``None`` if its result is private.

    Args:
        aggregator: The server's aggregator, with the pre-aggregators.
        buckets: The number of noisy sums; ``None`` for one sum.
    """
    if buckets is None:
        return _describe_unfit_for_one_sum(aggregator)
    return _describe_unfit_for_buckets(aggregator, buckets)


def _describe_unfit_for_one_sum(aggregator: Aggregator) -> str | None:
    """Return the reason against an aggregator, or ``None`` for the uniform mean.

    The sensitivity is known for the sum of clipped uploads. A rule that compares uploads, or reads
    losses or sample counts, may change by more if one client changes.
    """
    if type(aggregator) is Mean:
        return _describe_unfit_weights(aggregator)
    if isinstance(aggregator, Chain):
        return (
            f"Expected no `federation.pre_aggregators` {_FOR}, because"
            " `federation.privacy.clip_norm` clips the uploads, but got some: remove them, or set"
            " `federation.privacy.buckets`."
        )
    remedy = "; set `federation.privacy.buckets` to merge noisy sums of clients by it"
    reads_more = (
        aggregator.needs_start_losses
        or aggregator.needs_group_counts
        or aggregator.needs_root
        or aggregator.needs_net
    )
    if reads_more or aggregator.remembers_clients:
        remedy = ""  # such an aggregator is refused for buckets, too
    return (
        f"Expected argument `federation.aggregator` to be pl_fed.aggregators.Mean {_FOR} but got"
        f" {type(aggregator).__name__}: no bound is known for its change by one client's"
        f" upload{remedy}."
    )


def _describe_unfit_for_buckets(aggregator: Aggregator, buckets: int) -> str | None:
    """Return the reason against an aggregator of noisy sums, or ``None``.

    It receives released values only, and none of the clients' losses and sample counts. So every
    aggregator is private; those that need the missing values, or would waste noise, are refused.
    """
    name = type(aggregator.final_aggregator).__name__
    released = f"Expected an aggregator that reads noisy sums only {_FOR_BUCKETS} but got {name}"
    if aggregator.needs_start_losses or aggregator.needs_group_counts:
        reads = "losses" if aggregator.needs_start_losses else "samples by group"
        return f"{released}, which reads the clients' {reads}: use, for example, Median."
    if aggregator.needs_root:
        return (
            f"{released}, which reads the samples that `data.root_samples` takes from the clients:"
            " use, for example, Median."
        )
    if aggregator.remembers_clients:
        return (
            f"{released}, which remembers the uploads of each client, but the members of a sum"
            " change in each round: use, for example, Median."
        )
    if aggregator.needs_net:
        return f"{released}, which inspects the clients' models: use, for example, Median."
    if refusal := _describe_unfit_weights(aggregator.final_aggregator):
        return refusal
    if aggregator.mass(torch.ones(buckets)) is not None:
        return (
            f"Expected an aggregator other than a mean {_FOR_BUCKETS} but got {name}: the mean of"
            f" {buckets} noisy sums is that of one sum with √{buckets} times the noise; use, for"
            " example, Median, or set `federation.privacy.buckets` to null."
        )
    return None


def _describe_unfit_weights(aggregator: Aggregator) -> str | None:
    """Return the reason against weights by samples, or ``None`` without them."""
    weighting = getattr(aggregator, "weighting", "uniform")
    if weighting == "uniform":
        return None
    return (
        f"Expected argument `weighting` of {type(aggregator).__name__} to be 'uniform' {_FOR} but"
        f" got {weighting!r}: the numbers of samples are clients' data."
    )


def describe_unfit_buckets(buckets: int | None, cohort: int) -> str | None:
    """Return the reason against the number of buckets, or ``None``.

    Args:
        buckets: The number of noisy sums; ``None`` for one sum.
        cohort: The expected number of clients in a cohort.
    """
    if buckets is None or buckets <= cohort:
        return None
    return (
        "Expected argument `federation.privacy.buckets` to be at most the expected cohort of"
        f" {cohort} clients but got {buckets}: set a smaller number, or larger cohorts."
    )


def describe_unfit_algorithm(client: Client) -> str | None:
    """Return the first release of an algorithm besides the upload, or ``None`` without any."""
    name = type(client).__name__
    if not client.sends_uploads:
        return (
            f"Expected an algorithm that sends uploads {_FOR} but got {name}, which sends nothing:"
            " remove `federation.privacy`, as nothing leaves a client."
        )
    if client.has_server_states or type(client).receive is not Client.receive:
        states = ", ".join(client.server_state_defaults()) or "by `receive`"
        return (
            f"Expected an algorithm that sends clipped uploads only {_FOR} but got {name}, whose"
            f" server also keeps states of clients ({states}): use, for example, Ditto or FedRep."
        )
    if getattr(client, "weights", "uniform") == "samples":
        return (
            f"Expected argument `weights` of {name} to be 'uniform' {_FOR} but got 'samples': the"
            " total number of samples is clients' data."
        )
    statistics = client.statistics("global").layout
    if statistics.numel > len(getattr(client, "own_statistics", ())):
        return (
            f"Expected a net without running statistics {_FOR}, because the server would average"
            f" them without noise, but got {', '.join(statistics.names)}: use GroupNorm, or FedBN,"
            f" whose clients keep them, and {CONSTANT_BUFFER}."
        )
    return None


def describe_unfit_states(client: Client, is_without_replacement: bool) -> str | None:
    """Return the reason against clients' states with cohorts of fixed size, or ``None``.

    With Poisson sampling the coins of the other clients are independent of this client's coins, and
    so are their states, given the released models. With cohorts of fixed size a client's place in
    an earlier cohort changes the states of others, and the amplification theorem for one round does
    not compose.

    Args:
        client: The algorithm.
        is_without_replacement: Whether the accounting uses amplification by cohorts of fixed size.
    """
    states = [name for name, row in client.store_defaults().items() if row.numel()]
    if not states or not is_without_replacement:
        return None
    return (
        f"Expected the sampler pl_fed.samplers.Poisson for {type(client).__name__}, whose clients"
        f" keep states ({', '.join(states)}), but got cohorts of fixed size, for which"
        " amplification is proven only without states: use Poisson, or set"
        " `federation.privacy.amplification` to false."
    )


def describe_unfit_augmentation(trial: Trial) -> str | None:
    """Return the reason against modules of ``data.augment`` with a memory, or ``None``.

    Args:
        trial: The algorithm and its samples.
    """
    if not augmentation_remembers(trial):
        return None
    return (
        f"Expected modules of `data.augment` without a memory {_FOR} but got"
        f" {name_augmentation(trial)}, which change samples by those of earlier calls, from other"
        " clients: keep no values between calls, and draw from the global generators of torch,"
        " NumPy or Python."
    )


def describe_unfit_systems(systems: Systems | None) -> str | None:
    """Return the reason against unequal clients, or ``None``.

    A client that drops out, is late or does fewer steps depends on its own data and coins alone. It
    adds a clipped upload or nothing to the sum, and the denominator is fixed. The accounting of a
    run in which all drawn clients answer covers it. With the first uploads alone, a fast client
    would replace the upload of another one.
    """
    if systems is None or systems.take_first is None:
        return None
    return (
        f"Expected argument `federation.systems.take_first` to be null {_FOR} but got"
        f" {systems.take_first}: a client would decide by its speed whether the upload of another"
        " client counts, and the accounting has no bound for that; set"
        " `federation.systems.deadline` alone."
    )


def describe_unfit_adversary(adversary: Adversary, is_without_replacement: bool) -> str | None:
    """Return the reason against an attack that depends on benign clients, or ``None``.

    Args:
        adversary: The Byzantine clients and their attack.
        is_without_replacement: Whether the accounting uses amplification by cohorts of fixed size.
            Its neighbours may swap a benign client for an attacker, and attackers that combine
            their uploads would then all change them.
    """
    if adversary.attack is None or not adversary.attack.forges:
        return None
    name = type(adversary.attack).__name__
    if adversary.knowledge != "own":
        return (
            'Expected argument `federation.adversary.knowledge` to be "own" for'
            f' {name} and `federation.privacy` but got "{adversary.knowledge}": an attacker who'
            " sees benign uploads needs no released model, and its upload would depend on them."
        )
    if adversary.redraw:
        return (
            f"Expected argument `federation.adversary.redraw` to be false for {name} and"
            " `federation.privacy` but got true: a benign client of a round would be an attacker of"
            " another, and attackers may combine their uploads."
        )
    if is_without_replacement:
        return (
            f"Expected the sampler pl_fed.samplers.Poisson for {name} and `federation.privacy`,"
            " because attackers may combine their uploads, but got cohorts of fixed size, in which"
            " one client may take the place of an attacker: use Poisson, or set"
            " `federation.privacy.amplification` to false."
        )
    for attack in adversary.attack.list_parts():
        if argument := _find_argument_of_the_cohort(attack):
            instead = ", or `norm_bound`" if argument == "scale" else ""
            return (
                f"Expected argument `{argument}` of {type(attack).__name__} to be a number {_FOR}"
                " but got null, which computes it from the size of the cohort: attackers do not"
                f" know it; set a number{instead}."
            )
    return None


def _find_argument_of_the_cohort(attack: Attack) -> str | None:
    """Return the argument that an attack computes from the size of the cohort, or ``None``."""
    if isinstance(attack, ALittleIsEnough | ModelReplacement) and attack.factor is None:
        return "factor"
    if isinstance(attack, ConstrainedReplacement):
        return "scale" if attack.scale is None and attack.norm_bound is None else None
    return "share" if isinstance(attack, FairnessAttack) and attack.share is None else None
