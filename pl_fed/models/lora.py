"""Low-rank adapters on a frozen body, by the package peft.

E. J. Hu, Y. Shen, P. Wallis, Z. Allen-Zhu, Y. Li, S. Wang, L. Wang and W. Chen. "LoRA: Low-Rank
Adaptation of Large Language Models". ICLR 2022. arXiv 2106.09685.

An adapted layer computes W x + (α / r) B A x, with a frozen W, a random A [r, inputs] and B = 0
[outputs, r] in the beginning.

Y. Sun, Z. Li, Y. Li and B. Ding. "Improving LoRA in Privacy-preserving Federated Learning". ICLR
2024. arXiv 2403.12313. In their FFA-LoRA, A is frozen and equal in all clients, so that the mean of
the B gives the mean of the products B A.
"""

import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_choice, check_integers, check_interval, check_positive
from pl_fed.models.adapter import Adapter
from pl_fed.models.hugging_face_model import HuggingFaceModel
from pl_fed.text import first_line

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ADAPTER = "default"
_TARGETS = {"distilbert": ["q_lin", "v_lin"], "camembert": ["query", "value"]}
"""The layers with queries and values in families that peft does not know."""


class LoRA(nn.Module):
    """LoRA: trainable low-rank adapters of a model whose body is frozen.

    In a federation there is one body, and each client has a row with its adapters. Clients upload
    and personalise adapters only, and stacked clients share the body.

    Needs the packages peft and transformers: ``pip install "pl_fed[lora]"``.

    Args:
        base: The model: a module, such as :class:`HuggingFaceModel`, or the folder of a pretrained
            model of transformers, or its name on the Hugging Face hub.
        r: The rank of the adapters, at least 1.
        alpha: α, the scale of the adapters; r by default.
        target_modules: Ends of the names of the adapted layers, such as ``query``. ``None`` takes
            those that peft names for the family of the model.
        layers: Numbers of the adapted blocks, from 0; ``None`` adapts all blocks. With the last
            blocks only, gradients stop there, and a step costs less.
        modules_to_save: Names of further trained modules. ``None`` takes the head of a classifier
            of transformers; ``[]`` takes none.
        dropout: Probability of dropout before the adapters, in [0, 1).
        freeze_a: Whether A is frozen (FFA-LoRA), so that the mean of adapters is exact.
        body_dtype: The precision of the body: ``float32``, ``bfloat16`` or ``float16``; ``None``
            for that of ``base``. Adapters are in float32.
        head: The head of a model that ``base`` names: see :class:`HuggingFaceModel`.
        options: Options of a model that ``base`` names, such as ``num_labels``.
        peft_options: Further arguments of ``peft.LoraConfig``, such as ``use_rslora``.

    Attributes:
        body_changes: Whether training changes the body, as in :class:`pl_fed.clients.FedExLoRA`.

    Shape:
        - input, output: those of the model.

    Raises:
        ModuleNotFoundError: If the package peft is not installed.
        ValueError: If an argument is out of range, or peft refuses the model or the names.

    Example:
        >>> import pytest
        >>> peft = pytest.importorskip("peft")
        >>> body = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))
        >>> net = LoRA(body, r=2, target_modules=["0"], modules_to_save=["1"])
        >>> sum(p.numel() for p in net.parameters() if p.requires_grad)  # 2 · (8 + 6) + 6 · 3 + 3
        49
    """

    def __init__(
        self,
        base: nn.Module | str,
        r: int = 8,
        alpha: float | None = None,
        target_modules: list[str] | None = None,
        layers: list[int] | None = None,
        modules_to_save: list[str] | None = None,
        dropout: float = 0.0,
        freeze_a: bool = False,
        body_dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        head: str = "sequence_classification",
        options: dict[str, Any] | None = None,
        peft_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_integers(1, r=r)
        check_interval("[0, 1)", dropout=dropout)
        if alpha is not None:
            check_positive(alpha=alpha)
        if body_dtype is not None:
            check_choice(_DTYPES, body_dtype=body_dtype)
        if isinstance(base, str):
            base = HuggingFaceModel(head, base, options)
        body = base.get_base_model() if isinstance(base, HuggingFaceModel) else base
        settings = {
            "r": r,
            "lora_alpha": r if alpha is None else alpha,
            "target_modules": target_modules or _find_targets(body),
            "layers_to_transform": layers,
            "modules_to_save": _find_head(body) if modules_to_save is None else modules_to_save,
            "lora_dropout": dropout,
        }
        self.model = _adapt(body, {**settings, **(peft_options or {})})
        self.freeze_a = freeze_a
        self.body_changes = False
        self.body_dtype = _DTYPES[body_dtype] if body_dtype else None
        self._set_precision()
        if freeze_a:
            for name, parameter in self.model.named_parameters():
                if ".lora_A." in name or ".lora_embedding_A." in name:
                    parameter.requires_grad_(False)

    def _set_precision(self) -> None:
        """Cast the body, and keep what clients train in float32 or wider."""
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()
            elif self.body_dtype is not None and not parameter.requires_grad:
                parameter.data = parameter.data.to(self.body_dtype)
        for module in self.model.modules():
            if type(module).__name__ == "ModulesToSaveWrapper":
                module.register_forward_pre_hook(_cast_to_trained)

    @property
    def config(self) -> Any:
        """The configuration of the model, if it has one."""
        return self.get_base_model().config

    def get_base_model(self) -> nn.Module:
        """Return the model with the adapters in its layers."""
        model: nn.Module = self.model.get_base_model()
        return model

    def adapters(self) -> dict[str, Adapter]:
        """Return the adapters of layers with one weight, by the names of the layers.

        Embeddings and attention as one layer (``torch.nn.MultiheadAttention``) are left out.
        """
        return {
            name: _describe_adapter(name, layer)
            for name, layer in self.named_modules()
            if _ADAPTER in getattr(layer, "lora_A", {})
            and isinstance(getattr(layer.get_base_layer(), "weight", None), Tensor)
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs.

        Inputs of real numbers are cast to the body's precision, but not ``labels``: they belong to
        the loss.
        """
        if self.body_dtype is not None:
            args = tuple(_cast(value, self.body_dtype) for value in args)
            for name in kwargs.keys() - {"labels"}:
                kwargs[name] = _cast(kwargs[name], self.body_dtype)
        return self.get_base_model()(*args, **kwargs)


def _adapt(body: nn.Module, settings: Mapping[str, Any]) -> Any:
    """Return a model of peft with a frozen body and trainable adapters."""
    peft = import_peft()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft transposes GPT-2's layers by itself
            return peft.get_peft_model(body, peft.LoraConfig(**settings), adapter_name=_ADAPTER)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"Expected arguments of LoRA that fit {type(body).__name__} but peft refuses them"
            f" ({first_line(error).split('. ')[0]}): set `target_modules` to names of its linear"
            " layers, and `layers` to numbers of its blocks."
        ) from error


def _find_targets(body: nn.Module) -> list[str] | None:
    """Return the queries and values of a family that peft does not know; otherwise ``None``."""
    return _TARGETS.get(getattr(getattr(body, "config", None), "model_type", ""))


def _find_head(body: nn.Module) -> list[str] | None:
    """Return the names of a classifier's modules outside its body; ``None`` for other models."""
    names = [kind.__name__ for kind in type(body).__mro__]
    if not any(name.endswith(("SequenceClassification", "TokenClassification")) for name in names):
        return None
    prefix = getattr(body, "base_model_prefix", "")
    children = dict(body.named_children())
    return [name for name, child in children.items() if name != prefix and list(child.parameters())]


def _describe_adapter(name: str, layer: Any) -> Adapter:
    """Return the adapter of a layer of peft."""
    parts = {part: f"{name}.{part}.{_ADAPTER}.weight" for part in ("lora_A", "lora_B")}
    a, b = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
    weight = layer.get_base_layer().weight
    return Adapter(
        weight=weight,
        a=a,
        b=b,
        name_a=parts["lora_A"],
        name_b=parts["lora_B"],
        scale=float(layer.scaling[_ADAPTER]),
        transposed=bool(getattr(layer, "fan_in_fan_out", False)),
        is_plain=weight.dim() == 2 and not getattr(layer, "lora_variant", {}),
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_real = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_real else value


def _cast_to_trained(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cast the inputs of a further trained module to the precision of its parameters."""
    copies: Any = module.modules_to_save
    dtype = next(copies.parameters()).dtype
    return tuple(_cast(value, dtype) for value in args)


def import_peft() -> Any:
    """Return the package peft.

    Raises:
        ModuleNotFoundError: If it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ModuleNotFoundError(
            "Expected the package peft to be installed but it is not: run `pip install"
            ' "pl_fed[lora]"`.'
        ) from error
    return peft
