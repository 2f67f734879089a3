"""The paths of saved checkpoints, after the folder of a run was moved, renamed or named anew."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")


class MovedFolder(Callback):
    """Moved folder: a resumed run knows its best checkpoints under the present path of its folder.

    A ``ModelCheckpoint`` saves the path of its folder. Under another path, also of the same folder,
    Lightning would drop the scores of the rounds before, and choose among later rounds only. If the
    loaded checkpoint lies in the present folder of a ``ModelCheckpoint``, this is the saved folder.

    Checkpoints have the paths as the user writes the run's folder: those of a relative folder are
    the same on every machine.

    Args:
        run_dir: The absolute path of the run's folder.
        written: The same folder as the user writes it.
    """

    def __init__(self, run_dir: Path, written: Path) -> None:
        self.run_dir, self.written = run_dir, written

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the folder in the states of checkpoint callbacks as the user does."""
        states = checkpoint.get("callbacks") or {}
        for callback in trainer.checkpoint_callbacks:
            state = states.get(callback.state_key)
            folder = getattr(callback, "dirpath", None)
            if state is not None and folder and Path(folder).is_relative_to(self.run_dir):
                written = self.written / Path(folder).relative_to(self.run_dir)
                states[callback.state_key] = _rename_folder(state, str(written))

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Replace the saved folder in the states of checkpoint callbacks, before they load them."""
        loaded = Path(trainer.strategy.broadcast(trainer.ckpt_path) or "").resolve()
        states = checkpoint.get("callbacks") or {}
        for callback in trainer.checkpoint_callbacks:
            state = states.get(callback.state_key)
            if not isinstance(callback, ModelCheckpoint) or state is None or not callback.dirpath:
                continue
            folder = Path(callback.dirpath).resolve()
            if folder in (loaded.parent, Path(state.get("dirpath", "")).resolve()):
                states[callback.state_key] = _rename_folder(state, str(callback.dirpath))


def _rename_folder(state: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return the state of a ``ModelCheckpoint`` with another path of its folder."""
    saved = state.get("dirpath", folder)

    def rename(path: str) -> str:
        """Return the path of a file; one outside of the saved folder stays."""
        is_inside = bool(path) and Path(path).is_relative_to(saved)
        return str(Path(folder) / Path(path).relative_to(saved)) if is_inside else path

    paths = {name: rename(state[name]) for name in _PATHS if name in state}
    best = {rename(path): score for path, score in state.get("best_k_models", {}).items()}
    return {**state, **paths, "best_k_models": best, "dirpath": folder}
