"""Attention masks of transformers as additive masks, which ``torch.vmap`` supports."""

from typing import Any

import torch
from torch import Tensor

_BLOCKED = torch.finfo(torch.float16).min
"""Added to the score of a blocked key. It fits every precision, and its softmax is exactly 0."""

ENCODERS = (
    *("albert", "bert", "camembert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta"),
)
"""``config.model_type`` of the encoders that take additive masks: each token sees all others."""

DECODERS = ("gemma", "gpt2", "gpt_neox", "llama", "mistral", "phi", "qwen2", "qwen3")
"""``config.model_type`` of the decoders that take additive masks: a token sees earlier ones."""


def takes_additive_masks(config: Any, length: int) -> bool:
    """Return whether a model takes additive masks for sequences of a length.

    Args:
        config: The configuration of a Hugging Face model.
        length: Number of tokens of a sequence.
    """
    if config.model_type not in (*ENCODERS, *DECODERS):
        return False
    window = getattr(config, "sliding_window", None)
    return not window or length <= window


def is_causal(config: Any) -> bool:
    """Return whether a token of the model sees only the tokens before it."""
    return config.model_type in DECODERS or bool(getattr(config, "is_decoder", False))


def additive_mask(
    attention_mask: Tensor, causal: bool, dtype: torch.dtype, is_sdpa: bool = False
) -> Tensor:
    """Return an attention mask as numbers to add to the scores, [batch, 1, queries, keys].

    Args:
        attention_mask: 1 for tokens and 0 for padding, [batch, length].
        causal: Whether a query sees only the keys before it and its own.
        dtype: The dtype of the scores.
        is_sdpa: Whether torch's ``scaled_dot_product_attention`` reads the mask. A query without
            any visible key, as of padding on the left, then gets −∞ for all keys, and the output 0.
            Otherwise it sees all keys alike. Both are as in transformers.

    Example:
        >>> additive_mask(torch.tensor([[1, 0]]), causal=False, dtype=torch.float32)[0, 0]
        tensor([[     0., -65504.],
                [     0., -65504.]])
    """
    length = attention_mask.shape[1]
    visible = attention_mask[:, None, None, :].bool().expand(-1, 1, length, -1)
    if causal:
        ones = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device)
        visible = visible & ones.tril()
    blocked = torch.full((), _BLOCKED, dtype=dtype, device=attention_mask.device)
    mask = torch.where(visible, torch.zeros_like(blocked), blocked)
    lowest = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)  # absorbs any score
    return mask.masked_fill(~visible.any(-1, keepdim=True), -torch.inf if is_sdpa else lowest)
