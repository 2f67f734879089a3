"""How a net becomes a file: its state dict, a program of ``torch.export``, or ONNX."""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from pl_fed.arguments import check_choice


class Format(ABC):
    """One kind of file. The nets that it writes are alike but for their numbers.

    Args:
        example: Inputs of a few samples, [samples, ...].
    """

    suffix: str
    """What the names of its files end in."""

    package: str | None = None
    """What must be installed beside torch."""

    def __init__(self, example: Tensor) -> None:
        self.example = example

    @abstractmethod
    def write(self, net: nn.Module, path: Path) -> None:
        """Write a net that is in evaluation mode.

        Raises:
            ValueError: If the net cannot be written in this form.
        """


class StateDict(Format):
    """The tensors by name, to be loaded into the net's class: ``torch.load(weights_only=True)``."""

    suffix = ".pt"

    def write(self, net: nn.Module, path: Path) -> None:
        """Write them."""
        torch.save(net.state_dict(), path)


class TorchExport(Format):
    """The net as a program, for any number of samples, that needs no class: ``torch.export.load``.

    It is traced once; of further nets the tensors are exchanged.
    """

    suffix = ".pt2"

    def __init__(self, example: Tensor) -> None:
        super().__init__(example)
        self._program: ExportedProgram | None = None

    def write(self, net: nn.Module, path: Path) -> None:
        """Write the program."""
        if self._program is None:
            self._program = _traced(torch.export.export, "torch_export", net, self.example)
        own = net.state_dict()
        with torch.no_grad():
            for name, tensor in self._program.state_dict.items():
                tensor.copy_(own[name])
        torch.export.save(self._program, path)


class Onnx(Format):
    """The net as ONNX, for any number of samples: from ``inputs`` to ``outputs``."""

    suffix = ".onnx"
    package = "onnxscript"

    def write(self, net: nn.Module, path: Path) -> None:
        """Write it, in one file."""
        how = {"dynamo": True, "verbose": False}
        names = {"input_names": ["inputs"], "output_names": ["outputs"]}
        found = _traced(torch.onnx.export, "onnx", net, self.example, **how, **names)
        found.save(path, external_data=False)


FORMATS: dict[str, type[Format]] = {
    "state_dict": StateDict,
    "torch_export": TorchExport,
    "onnx": Onnx,
}
"""The formats by the words that ask for them."""


def check_formats(words: Iterable[str]) -> None:
    """Refuse words that are no format, and formats that need what is not installed.

    Raises:
        ModuleNotFoundError: If a package is not there.
        ValueError: If a word is none of :data:`FORMATS`.
    """
    for word in words:
        check_choice(FORMATS, format=word)
        package = FORMATS[word].package
        if package is not None and importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(
                f"Expected the package {package} to be installed, which writes {word}, but it is"
                f' not: pip install "pl_fed[{word}]", or choose another `format`.'
            )


def _traced(trace: Any, word: str, net: nn.Module, example: Tensor, **how: Any) -> Any:
    shapes = ({0: Dim("batch", min=1)},)
    try:
        return trace(net, (example,), dynamic_shapes=shapes, **how)
    except Exception as error:  # whatever a net may do in its forward
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"Expected argument `format` to be one that {type(net).__name__} can be written in but"
            f" got {word!r}, which fails ({reason}): state_dict always works."
        ) from error
