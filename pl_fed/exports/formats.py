"""File formats of nets: state dict, ``torch.export`` program, ONNX, Lightning, adapters of peft."""

import importlib.util
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from pl_fed.arguments import check_choice
from pl_fed.exports.file_format import Format, write_at_once
from pl_fed.exports.lightning_checkpoint import LightningCheckpoint
from pl_fed.exports.peft_adapter import PeftAdapter
from pl_fed.text import quote


class StateDict(Format):
    """State dict: the net's tensors by name, for the net's class.

    Load it by ``torch.load(path, weights_only=True)``.
    """

    suffix = ".pt"
    takes_trees = True

    def write(self, net: nn.Module, path: Path) -> None:
        """Write the state dict."""
        write_at_once(partial(torch.save, net.state_dict()), path)


class Safetensors(Format):
    """Safetensors: the net's tensors by name, in a file that cannot run code.

    Load it by ``safetensors.torch.load_model(net, path)``. Tensors that share memory are stored
    once.
    """

    suffix = ".safetensors"
    package = "safetensors"
    takes_trees = True

    def write(self, net: nn.Module, path: Path) -> None:
        """Write the tensors.

        Raises:
            ValueError: If the net's state has other values, as by ``get_extra_state``.
        """
        from safetensors.torch import save_model  # only this format needs the package

        others = [name for name, value in net.state_dict().items() if not isinstance(value, Tensor)]
        if others:
            raise ValueError(
                "Expected argument `format` to be one for a state with more than tensors but got"
                f" 'safetensors' and {quote(others)} of {type(net).__name__}: use state_dict or"
                " lightning."
            )
        save_model(net, str(path))


class TorchExport(Format):
    """``torch.export`` program: the net for any number of samples, without its class.

    Load it by ``torch.export.load(path)``. The first net is traced; further nets only replace its
    tensors.
    """

    suffix = ".pt2"

    def __init__(self, example: Tensor) -> None:
        super().__init__(example)
        self._program: ExportedProgram | None = None

    def write(self, net: nn.Module, path: Path) -> None:
        """Write the program."""
        if self._program is None:
            self._program = _trace(torch.export.export, "torch_export", net, self.example)
            self._program.example_inputs = None  # else the file has these samples of clients
        tensors = net.state_dict()
        with torch.no_grad():
            for name, tensor in self._program.state_dict.items():
                tensor.copy_(tensors[name])
        write_at_once(partial(torch.export.save, self._program), path)


class Onnx(Format):
    """ONNX: the net for any number of samples, with input ``inputs`` and output ``outputs``."""

    suffix = ".onnx"
    package = "onnxscript"

    def write(self, net: nn.Module, path: Path) -> None:
        """Write the net in one file."""
        program = _trace(
            torch.onnx.export,
            "onnx",
            net,
            self.example,
            dynamo=True,
            verbose=False,
            input_names=["inputs"],
            output_names=["outputs"],
        )
        program.save(path, external_data=False)


FORMATS: dict[str, type[Format]] = {
    "state_dict": StateDict,
    "safetensors": Safetensors,
    "lightning": LightningCheckpoint,
    "torch_export": TorchExport,
    "onnx": Onnx,
    "peft": PeftAdapter,
}
"""The formats by their names on the command line."""


def check_formats(names: Iterable[str]) -> None:
    """Check the names of formats, and that their packages are installed.

    Args:
        names: Names of formats.

    Raises:
        ModuleNotFoundError: If a package is not installed.
        ValueError: If a name is not in :data:`FORMATS`.
    """
    for name in names:
        check_choice(FORMATS, format=name)
        package = FORMATS[name].package
        if package is not None and importlib.util.find_spec(package) is None:
            extra = FORMATS[name].extra or name
            raise ModuleNotFoundError(
                f"Expected the package {package} to be installed for format {name} but it is"
                f' missing: run pip install "pl_fed[{extra}]", or choose another `format`.'
            )


def _trace(export: Any, name: str, net: nn.Module, example: Tensor, **options: Any) -> Any:
    """Call a torch export function; raise one sentence if it fails."""
    owner = next(kind for kind in type(net).__mro__ if "forward" in vars(kind))
    if owner.__name__ in ("Module", "LightningModule"):  # theirs takes anything, and fails
        raise ValueError(
            f"Expected {type(net).__name__} to have a `forward` for `format` {name} but got none:"
            " define it, or add `--format state_dict`."
        )
    shapes = ({0: Dim("batch", min=1)},)
    try:
        return export(net, (example,), dynamic_shapes=shapes, **options)
    except Exception as error:  # a net's forward may raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"Expected argument `format` to be one that supports {type(net).__name__} but got"
            f" {name!r} ({reason}): use state_dict, which supports all nets."
        ) from error
