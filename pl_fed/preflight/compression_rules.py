"""Refusals of compression: uploads that a codec would spoil; one sentence for each."""

from pl_fed.aggregators import Aggregator
from pl_fed.clients.base import Client
from pl_fed.compressors import Compressor

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
