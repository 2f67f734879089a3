"""A Hugging Face model from a folder of pretrained weights, or from a configuration."""

from pathlib import Path
from typing import Any, Literal

from torch import nn

from pl_fed.arguments import check_choice
from pl_fed.text import first_line

AUTO_CLASSES = {
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "image_classification": "AutoModelForImageClassification",
}
"""The automatic class of transformers for each head."""


class HuggingFaceModel(nn.Module):
    """Hugging Face model: a model of the package transformers, for a config file.

    Clients have the task :class:`pl_fed.tasks.HuggingFace` by default. Attention dropout draws from
    torch's own generator, so that clients with it run one by one: set it to 0 in ``options`` to
    stack clients.

    Needs the package transformers: ``pip install "pl_fed[lora]"``.

    Args:
        head: The head: one of ``AUTO_CLASSES``.
        pretrained: The folder of a pretrained model (``model.save_pretrained``), or its name on the
            Hugging Face hub, which downloads it. ``None`` (on the command line also ``none`` and
            ``null``) gives random weights by ``options``.
        options: Options of the model's configuration, such as ``num_labels``. Without
            ``pretrained`` they must have ``model_type``, for example ``bert``.
        attention: The implementation of attention: ``sdpa`` or ``eager``; ``None`` for the model's.

    Raises:
        ModuleNotFoundError: If the package transformers is not installed.
        ValueError: If the head is unknown, or no such model can be built.

    Example:
        >>> import pytest
        >>> transformers = pytest.importorskip("transformers")
        >>> size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> options = {"model_type": "bert", "vocab_size": 9, "intermediate_size": 8, **size}
        >>> net = HuggingFaceModel(options={**options, "num_labels": 3})
        >>> type(net.model).__name__, net.config.num_labels
        ('BertForSequenceClassification', 3)
    """

    def __init__(
        self,
        head: str = "sequence_classification",
        pretrained: str | None = None,
        options: dict[str, Any] | None = None,
        attention: Literal["sdpa", "eager"] | None = None,
    ) -> None:
        super().__init__()
        check_choice(AUTO_CLASSES, head=head)
        folder = None if str(pretrained).lower() in ("none", "null") else pretrained
        self.model = _build(head, folder, dict(options or {}), attention)

    @property
    def config(self) -> Any:
        """The configuration of the model."""
        return self.model.config

    def get_base_model(self) -> nn.Module:
        """Return the model."""
        return self.model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs."""
        return self.model(*args, **kwargs)


def _build(
    head: str, pretrained: str | None, options: dict[str, Any], attention: str | None
) -> nn.Module:
    """Return a pretrained model, or one with random weights."""
    transformers = import_transformers()
    auto = getattr(transformers, AUTO_CLASSES[head])
    if attention is not None:
        options["attn_implementation"] = attention
    if pretrained is None and "model_type" not in options:
        raise ValueError(
            "Expected argument `options` to have `model_type`, for example bert, for a model"
            f" without `pretrained` but got {', '.join(options) or 'nothing'}."
        )
    try:
        if pretrained is not None:
            model: nn.Module = auto.from_pretrained(_find_folder(pretrained), **options)
        else:
            implementation = options.pop("attn_implementation", None)
            config = transformers.AutoConfig.for_model(**options)
            model = auto.from_config(config, attn_implementation=implementation)
    except (ValueError, TypeError, OSError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(
            "Expected arguments `pretrained` and `options` to describe a model of transformers with"
            f" the head {head} but got {pretrained or options.get('model_type')}"
            f" ({first_line(error).rstrip('.')}): name a folder with a pretrained model, or options"
            " that fit its weights."
        ) from error
    return model


def _find_folder(pretrained: str) -> str:
    """Return the folder of a pretrained model; a name of the hub unchanged."""
    folder = Path(pretrained).expanduser()
    return str(folder) if folder.is_dir() else pretrained


def import_transformers() -> Any:
    """Return the package transformers.

    Raises:
        ModuleNotFoundError: If it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ModuleNotFoundError(
            "Expected the package transformers to be installed but it is not: run `pip install"
            ' "pl_fed[lora]"`.'
        ) from error
    return transformers
