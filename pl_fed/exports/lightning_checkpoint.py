"""The file format of Lightning: a checkpoint of the user's own LightningModule."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningModule
from torch import nn

from pl_fed.exports.file_format import Format, write_at_once


class LightningCheckpoint(Format):
    """Lightning checkpoint: the state dict and the hyperparameters of a LightningModule.

    Load it by ``<class>.load_from_checkpoint(path)``, or evaluate it by ``Trainer.test(module,
    ckpt_path=path)``. It has no optimizer state, so a fit starts from it, but does not resume.
    """

    suffix = ".ckpt"
    takes_trees = True

    def write(self, net: nn.Module, path: Path) -> None:
        """Write the checkpoint.

        Raises:
            ValueError: If the net is no LightningModule.
        """
        if not isinstance(net, LightningModule):
            raise ValueError(
                "Expected a net that is a LightningModule for format lightning but got"
                f" {type(net).__name__}: use `--format state_dict` or safetensors."
            )
        content: dict[str, Any] = {
            "epoch": 0,
            "global_step": 0,
            "pytorch-lightning_version": lightning.__version__,
            "state_dict": net.state_dict(),
        }
        if net.hparams:
            content[net.CHECKPOINT_HYPER_PARAMS_KEY] = dict(net.hparams)
            content[net.CHECKPOINT_HYPER_PARAMS_NAME] = net._hparams_name
        net.on_save_checkpoint(content)
        write_at_once(partial(torch.save, content), path)
