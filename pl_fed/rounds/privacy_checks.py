"""Refusals of privacy: releases of clients' data that no theorem covers, before training.

Everything that leaves a client is in one of three classes: the clipped upload, a value that stays
with the client, or a value that this file refuses. ``tests/privacy/test_release_matrix.py`` makes
the table of all algorithms, aggregators and options.
"""

from pl_fed.aggregators import Aggregator, Mean
from pl_fed.clients.base import Client
from pl_fed.data.module import FederatedData
from pl_fed.privacy import DifferentialPrivacy
from pl_fed.rounds.adversary import Adversary
from pl_fed.rounds.privacy import RoundPrivacy, find_participation
from pl_fed.samplers import Sampler

_FOR = "for `federation.privacy`"


def check_privacy(
    settings: DifferentialPrivacy,
    client: Client,
    datamodule: FederatedData,
    sampler: Sampler,
    aggregator: Aggregator,
    adversary: Adversary,
) -> None:
    """Refuse a federation with a release that the accounting does not cover.

    Args:
        settings: The section ``federation.privacy``.
        client: The algorithm.
        datamodule: The data.
        sampler: Draws the cohorts.
        aggregator: The server's aggregator, with the pre-aggregators.
        adversary: The Byzantine clients and their attack.

    Raises:
        ValueError: If a release is not covered; with the first such release and a remedy.
    """
    num_clients = datamodule.clients.num_clients
    participation = find_participation(settings, sampler, num_clients)
    refusals = (
        refuse_aggregator(aggregator),
        refuse_algorithm(client),
        refuse_states(client, participation.kind == "without_replacement"),
        refuse_data(datamodule),
        refuse_adversary(adversary),
    )
    for refusal in refusals:
        if refusal is not None:
            raise ValueError(refusal)


def refuse_aggregator(aggregator: Aggregator) -> str | None:
    """Return the reason against an aggregator, or ``None`` for the uniform mean.

    The sensitivity is known for the sum of clipped uploads. A rule that compares uploads, or reads
    losses or sample counts, may change by more if one client changes.
    """
    if type(aggregator) is Mean:
        if aggregator.weighting == "uniform":
            return None
        return (
            f"Expected argument `weighting` of Mean to be 'uniform' {_FOR} but got"
            f" {aggregator.weighting!r}: the numbers of samples are clients' data."
        )
    if aggregator.final_aggregator is not aggregator:
        return (
            f"Expected no `federation.pre_aggregators` {_FOR}, because"
            " `federation.privacy.clip_norm` clips the uploads, but got some: remove them."
        )
    return (
        f"Expected argument `federation.aggregator` to be pl_fed.aggregators.Mean {_FOR} but got"
        f" {type(aggregator).__name__}: no bound is known for its change by one client's upload."
    )


def refuse_algorithm(client: Client) -> str | None:
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
            " whose clients keep them."
        )
    return None


def refuse_states(client: Client, is_without_replacement: bool) -> str | None:
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


def refuse_data(datamodule: FederatedData) -> str | None:
    """Return the first quantity that the data module computes from all clients, or ``None``."""
    if datamodule.normalize in ("channel", "feature"):
        return (
            f'Expected argument `data.normalize` to be "none" or a pair [mean, std] {_FOR}, because'
            f" the statistics of all clients' samples are not private, but got"
            f" {datamodule.normalize!r}: give public numbers, for example [0.5, 0.5]."
        )
    return None


def refuse_adversary(adversary: Adversary) -> str | None:
    """Return the reason against an attack that sees unprotected uploads of others, or ``None``."""
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
    return None


def check_nothing_spent(privacy: RoundPrivacy) -> None:
    """Refuse to begin the budget of a federation again, for another client or other data.

    The new rounds would have the noise of the rounds before, and the difference of two releases
    with equal noise is not private.

    Raises:
        ValueError: If rounds have spent budget.
    """
    if privacy.rounds:
        raise ValueError(
            f"Expected a new Federation {_FOR}, with a seed of its own, for another client or other"
            f" data, but got one that has spent ε = {privacy.epsilon():.4g} in {privacy.rounds}"
            " rounds: the new rounds would have their noise. On the same clients' data, the budgets"
            " of both runs add up."
        )
