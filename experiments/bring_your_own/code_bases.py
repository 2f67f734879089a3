"""The code bases of this folder, and the lines that federate each of them."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

_IID = ("--data.partitioner IID", "--data.num_clients 6")


@dataclass(frozen=True)
class CodeBase:
    """Code base: a LightningModule with its data module, and its lines of a federation.

    Attributes:
        file: The file with both classes.
        name: The end of the names of both classes.
        metric: The metric that the module logs.
        options: Options of the command besides those that name both classes.
    """

    file: str
    name: str
    metric: str
    options: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """The options that federate the code base."""
        place = f"{__package__}.{self.file}"
        net, data = f"{place}.Lit{self.name}", f"{place}.{self.name}Data"
        return [f"--model.net {net}", f"--data.dataset.datamodule {data}", *self.options]

    def build(self) -> tuple[Any, Any]:
        """Return a new module and its data module."""
        file = import_module(f"{__package__}.{self.file}")
        return getattr(file, f"Lit{self.name}")(), getattr(file, f"{self.name}Data")()


CODE_BASES = {
    base.file: base
    for base in (
        CodeBase("images", "Images", "acc", _IID),
        CodeBase("tabular", "Tabular", "auroc", ("--data.dataset.client hospital",)),
        CodeBase("regression", "Regression", "mae", _IID),
        CodeBase(
            "segmentation",
            "Segmentation",
            "iou",
            ("--data.dataset.client camera", "--data.dataset.target mask"),
        ),
        CodeBase("language", "Language", "ppl", ("--data.dataset.client language",)),
        CodeBase("multi_label", "MultiLabel", "map", _IID),
        CodeBase("autoencoder", "Autoencoder", "mse", _IID),
        CodeBase("contrastive", "Contrastive", "top1", _IID),
        CodeBase("forecasting", "Forecasting", "mae", ("--data.dataset.client sensors",)),
        CodeBase("hugging_face", "HuggingFace", "f1", ("--data.dataset.client shop",)),
        CodeBase("timm_net", "Timm", "acc", _IID),
        CodeBase(
            "graphs",
            "Graphs",
            "acc",
            ("--data.dataset.client laboratory", "--data.dataset.target ring"),
        ),
        CodeBase(
            "detection",
            "Detection",
            "iou",
            ("--data.dataset.client cameras", "--federation.higher_is_better [iou]"),
        ),
        CodeBase("molecules", "Molecules", "acc", ("--data.dataset.client laboratories",)),
        CodeBase("point_sets", "PointSets", "acc", ("--data.dataset.client site",)),
        CodeBase(
            "sentences",
            "Sentences",
            "acc",
            ("--data.dataset.client paper", "--data.dataset.batches own"),
        ),
        CodeBase(
            "volumes",
            "Volumes",
            "recall",
            (
                f"--data.dataset.client_fn {__package__}.volumes.read_scanner",
                "--federation.higher_is_better [recall]",
            ),
        ),
    )
}
