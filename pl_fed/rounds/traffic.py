"""The bytes that clients send and receive."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pl_fed.aggregators import Aggregator
from pl_fed.clients.base import Client
from pl_fed.rounds.upload_channel import UploadChannel


class Traffic:
    """Traffic: counts the bytes of uploads and downloads, in a round and in all rounds.

    A client receives the shared parameters, their running statistics and the server's states. It
    sends an upload, compressed or not, and its proposals of statistics and states. Every client of
    a cohort counts, also a Byzantine or a broken one. With ``federation.systems``, clients that
    drop out or are late count as downloads only. Headers, encryption and the integers of a
    cohort's organisation do not count.

    Args:
        client: The algorithm.
        aggregator: The server's aggregator, with pre-aggregators that may shorten uploads.
        channel: Compresses the uploads; ``None`` without compression.

    Attributes:
        up: The bytes that all clients sent so far.
        down: The bytes that all clients received so far.
    """

    def __init__(
        self, client: Client, aggregator: Aggregator, channel: UploadChannel | None
    ) -> None:
        self.client = client
        self.aggregator = aggregator
        self.channel = channel
        self.up = 0
        self.down = 0
        self._client_bytes: dict[int, tuple[int, int]] = {}  # by the bytes of a number

    @property
    def client_bytes(self) -> tuple[int, int]:
        """The bytes that one client sends and receives in a round."""
        client, size = self.client, self.client.row("global").data.element_size()
        if size not in self._client_bytes:
            numbers, layout = client.upload_numbers, client.sent_layout
            upload = numbers if layout is None else min(numbers, layout.numel)
            others = numbers - upload  # running statistics and proposals, sent in full
            if self.channel is None:
                sent = size * (self.aggregator.sent_numbers(upload) + others)
            else:
                others += client.exact_numbers
                sent = self.channel.count_bytes(size) + size * others
            self._client_bytes[size] = sent, size * client.download_numbers
        return self._client_bytes[size]

    def count_round(self, senders: int, receivers: int) -> dict[str, Tensor | float]:
        """Count a round, and return its numbers for the log.

        Args:
            senders: The number of clients whose uploads the server takes.
            receivers: The number of clients that receive the model.
        """
        sent, received = self.client_bytes
        self.up += senders * sent
        self.down += receivers * received
        up, down = torch.tensor([float(self.up), float(self.down)], dtype=torch.float64).unbind()
        return {
            "train/upload_bytes": float(senders * sent),
            "train/download_bytes": float(receivers * received),
            "bytes/up": up,
            "bytes/down": down,
        }

    def state_dict(self) -> dict[str, int]:
        """Return the bytes so far, for a checkpoint."""
        return {"up": self.up, "down": self.down}

    def load_state_dict(self, state: Mapping[str, int] | None) -> None:
        """Continue the bytes of a checkpoint; a checkpoint of an earlier version has none."""
        self.up, self.down = (0, 0) if state is None else (int(state["up"]), int(state["down"]))
