"""The file format of peft: a client's adapters for a body that is stored once."""

from pathlib import Path

from torch import nn

from pl_fed.exports.file_format import Format
from pl_fed.models import LoRA


class PeftAdapter(Format):
    """Peft adapter: a folder with ``adapter_model.safetensors`` and ``adapter_config.json``.

    Load it by ``peft.PeftModel.from_pretrained(body, folder)``, where ``body`` is the model without
    adapters: ``base`` of :class:`pl_fed.models.LoRA`.
    """

    suffix = ""
    package = "peft"
    extra = "lora"
    takes_trees = True

    def write(self, net: nn.Module, path: Path) -> None:
        """Write the folder.

        Raises:
            ValueError: If the net has no adapters, or training has changed the body.
        """
        if not isinstance(net, LoRA):
            raise ValueError(
                "Expected a net of pl_fed.models.LoRA for format peft but got"
                f" {type(net).__name__}: use `--format state_dict`."
            )
        if net.body_changes:
            raise ValueError(
                "Expected a body that training leaves unchanged for format peft but got the exact"
                " average of FedExLoRA, which is part of the body: use `--format state_dict`."
            )
        net.model.save_pretrained(str(path))
