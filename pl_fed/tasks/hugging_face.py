"""The task of a Hugging Face model: its own loss on its own kind of batches."""

import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pl_fed.arguments import check_choice
from pl_fed.nets.calls import Net
from pl_fed.tasks.attention_masks import additive_mask, is_causal, takes_additive_masks
from pl_fed.tasks.base import Task, as_floats
from pl_fed.tasks.classification import Classification
from pl_fed.tasks.language_modelling import LanguageModelling
from pl_fed.tasks.multi_label import MultiLabel
from pl_fed.tasks.regression import Regression
from pl_fed.tasks.token_classification import TokenClassification
from pl_fed.trees import Tree, describe

Problem = Literal[
    "single_label_classification",
    "multi_label_classification",
    "regression",
    "token_classification",
    "causal_language_modelling",
    "masked_language_modelling",
]

PROBLEMS: tuple[str, ...] = (
    *("single_label_classification", "multi_label_classification", "regression"),
    *("token_classification", "causal_language_modelling", "masked_language_modelling"),
)
"""The kinds of learning problems whose losses exist for each sample."""

_HEADS = {
    "ForSequenceClassification": "classification",
    "ForImageClassification": "classification",
    "ForAudioClassification": "classification",
    "ForTokenClassification": "token_classification",
    "ForCausalLM": "causal_language_modelling",
    "LMHeadModel": "causal_language_modelling",
    "ForMaskedLM": "masked_language_modelling",
}
"""The problem of a model, by the end of its class's name."""


class HuggingFace(Task):
    """Hugging Face task: a model of the package transformers, with its own loss.

    Clients with such a model as net have this task by default. Inputs are a dict of the model's
    arguments, for example ``input_ids`` and ``attention_mask``. Targets are its ``labels``. The
    model's head and its ``config.problem_type`` choose the loss and the metrics:

    - classification: cross entropy, accuracy and its spread over classes;
    - several labels: binary cross entropy, ``f1``, ``recall`` and ``label_accuracy``;
    - regression (``num_labels=1``): squared error, ``mae``, ``rmse`` and ``r2``;
    - classes of tokens: cross entropy, ``token_accuracy`` and ``token_f1``;
    - causal and masked language models: cross entropy, ``perplexity`` and ``token_accuracy``.

    pl_fed computes the losses of single samples from the model's logits. Before training, it
    compares their mean with the model's own loss. In the model families of
    ``pl_fed.tasks.attention_masks``, masks become additive masks [batch, 1, queries, keys], so
    that clients can be stacked. Clients with other models run one by one if ``torch.vmap`` does not
    support them.

    Args:
        problem: One of ``PROBLEMS``; ``None`` takes that of the model.
        ignore_index: Target of tokens that do not count, as padding.

    Attributes:
        problem: The problem; empty before :meth:`read_net`.

    Raises:
        ValueError: If ``problem`` is unknown.
    """

    def __init__(self, problem: Problem | None = None, ignore_index: int = -100) -> None:
        if problem is not None:
            check_choice(PROBLEMS, problem=problem)
        self._chosen = problem
        self.problem: str = problem or ""
        self.ignore_index = ignore_index
        self._config: Any = None
        self._main_input = "input_ids"
        self._adds_tokens = False
        self._model_name = "a Hugging Face model"
        self._head: Task = Classification()

    @property
    def name(self) -> str:
        """The name of the task's loss in messages."""
        return f"the loss of {self._model_name}"

    def read_net(self, net: nn.Module) -> None:
        """Take the problem, the number of labels and the kind of masks from a net.

        Args:
            net: A Hugging Face model, or a module with one as ``get_base_model()``.

        Raises:
            ValueError: If the net has no such model, or its head has a loss for whole batches only.
        """
        model = find_model(net)
        if model is None:
            raise ValueError(
                "Expected argument `net` to be a model of transformers for the task HuggingFace but"
                f" got {type(net).__name__}: name, for example, pl_fed.models.HuggingFaceModel."
            )
        self._config, self._main_input = model.config, model.main_input_name
        self._model_name = type(model).__name__
        adapter = getattr(net, "active_peft_config", None)  # of a model of peft
        self._adds_tokens = bool(getattr(adapter, "is_prompt_learning", False))
        self.problem = self._chosen or _read_problem(model)
        self._head = self._build_head(int(self._config.num_labels))

    def _build_head(self, num_labels: int) -> Task:
        """Return the task of the model's outputs."""
        match self.problem:
            case "single_label_classification":
                return Classification()
            case "multi_label_classification":
                return MultiLabel()
            case "regression":
                return Regression()
            case "token_classification":
                return TokenClassification(num_labels, self.ignore_index)
        shifts = self.problem == "causal_language_modelling"
        return LanguageModelling(self.ignore_index, shift=shifts)

    # Outputs

    def predict(self, net: Callable[..., Any], inputs: Tree) -> Tensor:
        """Return the model's logits, [batch, ...].

        Args:
            net: The net.
            inputs: The model's arguments by name, [batch, ...] each, or its main input alone.
        """
        arguments = inputs if isinstance(inputs, dict) else {self._main_input: inputs}
        logits: Tensor = net(**self._prepare(net, arguments)).logits
        return logits

    def _prepare(self, net: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the model's arguments with an additive mask, if the model takes one.

        A model of peft that puts trained tokens before the text lengthens the mask by itself.
        """
        ids = arguments.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            return arguments
        mask = arguments.get("attention_mask")
        if self._adds_tokens or not takes_additive_masks(self._config, ids.shape[1]):
            return arguments
        if mask is not None and mask.dim() != 2:
            return arguments
        causal = is_causal(self._config)
        mask = torch.ones_like(ids) if mask is None else mask
        dtype = _read_score_dtype(net)
        is_sdpa = getattr(self._config, "_attn_implementation", None) == "sdpa"
        mask = additive_mask(mask, causal, dtype, is_sdpa)
        arguments = {**arguments, "attention_mask": mask}
        return {**arguments, "use_cache": False} if causal else arguments

    def _match(self, outputs: Tensor, targets: Tree) -> Tensor:
        """Return logits in the targets' shape if there is one number for each sample."""
        single = self.problem == "regression" and outputs.dim() == 2 and targets.dim() == 1
        return outputs.squeeze(1) if single else outputs

    def losses(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return the loss of each sample, [batch], times its weight if samples have weights."""
        return self._head.losses(self._match(as_floats(outputs), targets), targets)

    def weights(self, targets: Tree) -> Tensor | None:
        """Return each sample's share of tokens that count; ``None`` without sequences of labels."""
        return self._head.weights(targets)

    def batch_loss(self, outputs: Tree, targets: Tree) -> Tensor:
        """Return the model's loss for a batch."""
        return self._head.batch_loss(self._match(as_floats(outputs), targets), targets)

    # Evaluation

    def num_classes(self, data_classes: int) -> int:
        """Return the data's number of classes in classification, and 0 otherwise."""
        return self._head.num_classes(data_classes)

    def metrics(self) -> Any:
        """Return the metrics of the problem by name."""
        return self._head.metrics()

    def metric_inputs(self, outputs: Tree, targets: Tree) -> tuple[Any, Any]:
        """Return the arguments of the metrics."""
        return self._head.metric_inputs(self._match(as_floats(outputs), targets), targets)

    def predictions(self, outputs: Tree) -> dict[str, Tensor]:
        """Return the predictions of the problem, such as classes."""
        return self._head.predictions(outputs)

    # Checks before training

    def check_targets(self, targets: Tree, data_classes: int) -> None:
        """Refuse labels that do not fit the model's problem."""
        expected = f"Expected the labels to fit the problem {self.problem} of {self._model_name}"
        try:
            self._head.check_targets(targets, data_classes)
        except ValueError as error:
            raise ValueError(
                f"{expected} but got {describe(targets)}: set `model.init_args.task` to"
                " pl_fed.tasks.HuggingFace with another `problem`, or change the labels."
            ) from error

    def check_outputs(self, outputs: Tree, targets: Tree, data_classes: int) -> None:
        """Refuse a model with another number of labels than the data's classes."""
        if self.problem == "single_label_classification" and outputs.shape[1:] != (data_classes,):
            raise ValueError(
                f"Expected {self._model_name} to have {data_classes} labels, one for each class of"
                f" the data, but got {list(outputs.shape[1:])}: set `num_labels` of the model to"
                f" {data_classes}."
            )
        self._head.check_outputs(self._match(outputs, targets), targets, data_classes)

    def check_inputs(self, inputs: Tree) -> None:
        """Refuse token ids beyond the model's vocabulary."""
        ids = inputs.get("input_ids") if isinstance(inputs, dict) else None
        size = getattr(self._config, "vocab_size", None)
        if not isinstance(ids, Tensor) or not size or ids.is_floating_point():
            return
        if int(ids.min()) < 0 or int(ids.max()) >= size:
            raise ValueError(
                f"Expected token ids from 0 to {size - 1}, the vocabulary of {self._model_name},"
                f" but got {int(ids.min())} to {int(ids.max())}: use the model's own tokenizer."
            )

    def check_loss(self, net: nn.Module, inputs: Tree, targets: Tree, loss: Tensor) -> None:
        """Refuse a model whose own loss differs from the task's.

        Args:
            net: The net.
            inputs: The inputs of a few samples.
            targets: The targets of these samples.
            loss: The task's loss for these samples.

        Raises:
            ValueError: If the losses differ, as with an auxiliary loss of the model.
        """
        arguments = inputs if isinstance(inputs, dict) else {self._main_input: inputs}
        problem_type = getattr(self._config, "problem_type", None)
        try:
            self._config.problem_type = self.problem if self.problem in PROBLEMS[:3] else None
            own_loss = net(**arguments, labels=targets).loss  # with the model's own masks
        finally:
            self._config.problem_type = problem_type
        if own_loss is None or _are_close(own_loss, loss, net):
            return
        raise ValueError(
            f"Expected {self._model_name} to have the loss of {self.problem}, {float(loss):.5g} for"
            f" the first samples, but its own loss is {float(own_loss):.5g}: write a"
            " LightningModule with this loss as `training_step`."
        )


def find_model(net: nn.Module) -> Any:
    """Return the Hugging Face model that a net is or holds as ``get_base_model()``, or ``None``."""
    # not `transformers`, which others import without its models: to read its class takes a second
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:  # then no such model exists
        return None
    if isinstance(net, modeling.PreTrainedModel):
        return net
    get_base_model = getattr(net, "get_base_model", None)
    model = get_base_model() if callable(get_base_model) else None
    return model if isinstance(model, modeling.PreTrainedModel) else None


def _read_problem(model: Any) -> str:
    """Return the problem of a model by its head, its number of labels and its configuration."""
    names = [kind.__name__ for kind in type(model).__mro__]
    heads = (head for name in names for end, head in _HEADS.items() if name.endswith(end))
    head = next(heads, None)
    if head is None:
        raise ValueError(
            f"Expected a model of transformers with one of the heads {', '.join(_HEADS)} but got"
            f" {names[0]}: write a LightningModule whose `training_step` returns"
            " `self.model(**batch).loss`, or set `problem` of pl_fed.tasks.HuggingFace."
        )
    if head != "classification":
        return head
    by_labels = "regression" if model.config.num_labels == 1 else "single_label_classification"
    return str(getattr(model.config, "problem_type", None) or by_labels)


def _read_score_dtype(net: Any) -> torch.dtype:
    """Return the dtype of the scores to which a mask is added."""
    model = find_model(net.module if isinstance(net, Net) else net)
    dtype: torch.dtype = model.get_input_embeddings().weight.dtype
    return dtype


def _are_close(own_loss: Tensor, loss: Tensor, net: nn.Module) -> bool:
    """Return whether two losses of a net agree in the lowest precision of its parameters."""
    floats = (parameter for parameter in net.parameters() if parameter.is_floating_point())
    dtypes = {own_loss.dtype, *(parameter.dtype for parameter in floats)}
    tolerance = max(1e-3, *(4 * torch.finfo(dtype).eps for dtype in dtypes))
    return torch.allclose(own_loss.double(), loss.double(), tolerance, 1e-5, equal_nan=True)
