"""Refusals of compression: uploads that a codec would spoil; one sentence for each."""

import copy

import torch
from lightning.pytorch.utilities import rank_zero_warn

from pl_fed.aggregators import Aggregator
from pl_fed.clients.base import Client
from pl_fed.compressors import Compressor
from pl_fed.nets.fingerprints import is_by_user
from pl_fed.nets.rows import RowLayout
from pl_fed.random import fork_all_generators, key, normal_row
from pl_fed.trees import are_equal

_FOR = "for `federation.compression`"


def check_compression(compressor: Compressor, client: Client, aggregator: Aggregator) -> None:
    """Refuse a codec that does not fit the algorithm or the aggregator.

    Args:
        compressor: The codec, ``federation.compression``.
        client: The algorithm.
        aggregator: The server's aggregator, with the pre-aggregators.

    Raises:
        ValueError: If clients send no parameters or other rows, the algorithm needs exact uploads,
            the error of the codec would stay, count twice or move another model, an argument is
            too large for the net, or a pre-aggregator compresses, too.
    """
    name = type(client).__name__
    if not client.sends_uploads:
        raise ValueError(
            f"Expected an algorithm that sends uploads {_FOR} but got {name}, which sends nothing:"
            " remove `federation.compression`."
        )
    layout = client.sent_layout
    if layout is None or not layout.numel:
        raise ValueError(
            f"Expected an algorithm that sends parameters {_FOR} but got {name}, which sends"
            f" {'a projection of them' if layout is None else 'none'}: remove"
            " `federation.compression`, or use, for example, FedAvg."
        )
    if client.shared_numbers < layout.numel:
        raise ValueError(
            f"Expected `sent_layout` of {name} to have at most the {client.shared_numbers} numbers"
            f" of `shared_numbers` {_FOR} but got {layout.numel}: override both, or remove"
            " `federation.compression`."
        )
    if client.needs_plain_mean:
        raise ValueError(
            f"Expected an algorithm with inexact uploads {_FOR} but got {name}, whose server needs"
            " their exact mean: remove `federation.compression`, or use FedAvg."
        )
    if client.mean_of == "clients":
        _check_mean_of_clients(compressor, client)
    if client.num_centers and compressor.error_feedback:
        raise ValueError(
            f"Expected a codec without error feedback {_FOR} of {name}, whose server keeps several"
            f" models, but got {type(compressor).__name__} with it: what a client left out for one"
            " model would move another one, or a model that skips the round; use, for example,"
            " QSGD, or TopK with `error_feedback` false."
        )
    compressor.check(layout)
    if aggregator.sent_numbers(layout.numel) != layout.numel:
        raise ValueError(
            f"Expected pre-aggregators that do not shorten uploads {_FOR} but got one that does:"
            " remove one of the two."
        )


def warn_of_codec_memory(compressor: Compressor, layout: RowLayout) -> None:
    """Warn if a codec of the user's class sends equal rows in another way at the second time.

    Errors are ignored: those of the first round appear there.

    Args:
        compressor: The codec, ``federation.compression``.
        layout: The layout of an upload.
    """
    if not is_by_user(compressor):
        return
    row = normal_row(key(0, "codec trial"), layout.numel)[None].float()
    keys, sent = torch.zeros(1, 1, dtype=torch.int64), []
    lengths = compressor.memory_lengths(layout).items()
    try:
        copied = copy.deepcopy(compressor)
        with fork_all_generators() as seed:
            for _ in range(2):
                seed(key(0, "codec trial"))
                memory = {name: torch.zeros(1, length) for name, length in lengths}
                sent.append(copied.send(row, layout, keys, memory)[0])
    except Exception:
        return
    if not are_equal(sent[:1], sent[1:]):
        rank_zero_warn(
            f"{type(compressor).__name__} of `federation.compression` keeps values from one upload"
            " to the next, which a resumed run lacks, and which mix the clients: keep the rows of"
            " each client in `sending.memory`, whose lengths `memory_lengths` gives."
        )


def _check_mean_of_clients(compressor: Compressor, client: Client) -> None:
    """Refuse error feedback for uploads of models, and its absence for uploads of changes."""
    name, codec = type(client).__name__, type(compressor).__name__
    uploads_changes = client.uploads_changes or not client.population.is_full
    if uploads_changes and not compressor.error_feedback:
        raise ValueError(
            f"Expected a codec with error feedback {_FOR} of {name}, whose uploads are changes of"
            f" the clients' rows here, but got {codec} without it: its errors would stay in the"
            " global model; use, for example, TopK, or PowerSGD."
        )
    if not uploads_changes and compressor.error_feedback:
        raise ValueError(
            f"Expected a codec without error feedback {_FOR} of {name} with all clients in each"
            " round, whose next upload contains again what the codec leaves out, but got"
            f" {codec} with it, which would count twice: use, for example, QSGD, or TopK with"
            " `error_feedback` false."
        )
