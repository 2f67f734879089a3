"""Facts about the steps of a LightningModule, found in a trial before training."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModuleFacts:
    """Module facts: the names that the steps of a LightningModule log, and the mode that they need.

    Attributes:
        measures: The names of the logged metrics of evaluations, and whether larger values are
            better (``None`` if unknown).
        logged_names: The metric of each logged name, by stage.
        logged_losses: The parts, of ``val`` and ``test``, whose step returns one loss and logs
            another: the logged one counts.
        loss_parts: The parts, of ``val`` and ``test``, whose evaluation step gives a loss.
        step_names: The names that ``training_step`` logs; ``None`` before the trial.
        needs_training_mode: Whether ``training_step`` fails in evaluation mode, as that of a net
            with auxiliary outputs does.
        changes_batch: Whether ``training_step`` changes the tensors of its batch in place: each
            step gets a copy.
        shared_values: The names of values outside of the module that evaluations change.
    """

    measures: Mapping[str, bool | None] = field(default_factory=dict)
    logged_names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    logged_losses: frozenset[str] = frozenset()
    loss_parts: frozenset[str] = frozenset(("val", "test"))
    step_names: tuple[str, ...] | None = None
    needs_training_mode: bool = False
    changes_batch: bool = False
    shared_values: tuple[str, ...] = ()
