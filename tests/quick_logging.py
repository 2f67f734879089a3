"""A shorter way for logged values that are where they belong: a fifth of the time of a small fit.

Lightning moves each logged value to its device at every log and at every end, also if it is there,
and copies all settings of the value for it.
"""

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric


def leave_logged_values():
    """Let Lightning move logged tensors only to another device."""
    move = _ResultMetric.to

    def move_if_elsewhere(metric, *arguments, **options):
        device = options.get("device", arguments[0] if arguments else None)
        own = [value.device for value in vars(metric).values() if isinstance(value, torch.Tensor)]
        if metric.is_tensor and device is not None and set(own) <= {torch.device(device)}:
            return metric
        return move(metric, *arguments, **options)

    if move.__name__ != "move_if_elsewhere":
        _ResultMetric.to = move_if_elsewhere
