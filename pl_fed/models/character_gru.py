"""A recurrent language model of characters, as for LEAF's Shakespeare."""

from torch import Tensor, nn

from pl_fed.arguments import check_integers


class CharacterGRU(nn.Module):
    """Character GRU: an embedding, gated recurrent layers, and logits of the next character.

    S. Caldas et al. ("LEAF: A benchmark for federated settings", arXiv 1812.01097) train two layers
    of 256 LSTM units on an embedding of dimension 8. This net has GRU units, and predicts the next
    character at every position, not only at the last one.

    Args:
        vocabulary: Number of characters, at least 1.
        embedding: Numbers in the embedding of a character, at least 1.
        hidden: Units of a recurrent layer, at least 1.
        layers: Number of recurrent layers, at least 1.

    Shape:
        ids of characters, int64 [batch, length] → logits [batch, length, vocabulary].

    Raises:
        ValueError: If an argument is below 1.

    Example:
        >>> import torch
        >>> CharacterGRU(65)(torch.zeros(2, 7, dtype=torch.int64)).shape
        torch.Size([2, 7, 65])
    """

    def __init__(
        self, vocabulary: int, embedding: int = 8, hidden: int = 128, layers: int = 1
    ) -> None:
        super().__init__()
        check_integers(1, vocabulary=vocabulary, embedding=embedding, hidden=hidden, layers=layers)
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.recurrent = nn.GRU(embedding, hidden, layers, batch_first=True)
        self.last = nn.Linear(hidden, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next characters."""
        states, _ = self.recurrent(self.embedding(ids))
        logits: Tensor = self.last(states)
        return logits
