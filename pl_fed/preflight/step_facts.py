"""Facts about local steps: their changes besides the parameters that they train."""

from dataclasses import dataclass

from pl_fed.clients.kept_parts import STOP


@dataclass(frozen=True)
class StepFacts:
    """Step facts: names of all that local steps change besides the parameters that they train.

    Attributes:
        net: The class of the net.
        frozen_parameters: Frozen parameters that a step changes or replaces.
        replaced_parameters: Trained parameters that a step replaces by other tensors.
        toggled: Parameters whose ``requires_grad`` a step changes.
        reshaped_buffers: Buffers that a step gives another shape.
        counters: Saved buffers, integers or infinite at first, that a step changes and that no row
            contains.
        attributes: Attributes that carry values from one client to the next.
        scratch: Attributes that a step changes, and that carry nothing to the next client.
        outside: Values of classes, files and functions that a step changes without an effect on
            another client's numbers.
        shared: Those of them that are not equal for a client with another client before it.
        reset_buffers: Buffers that no row contains, which begin anew with every client.
        moved_parameters: Parameters that a step moves in memory, by ``.data = ...``.
        optimizer_options: Options of the trainer's optimizer that a step changes.
        draws_globally: Whether steps draw from the global generators of Python or NumPy.
        reads_optimizer: Whether steps read the trainer's optimizer or schedule.
        leaks: Whether a client's numbers depend on the client before it for another reason.
    """

    net: str = ""
    frozen_parameters: tuple[str, ...] = ()
    replaced_parameters: tuple[str, ...] = ()
    toggled: tuple[str, ...] = ()
    reshaped_buffers: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    scratch: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    reset_buffers: tuple[str, ...] = ()
    moved_parameters: tuple[str, ...] = ()
    optimizer_options: tuple[str, ...] = ()
    draws_globally: bool = False
    reads_optimizer: bool = False
    leaks: bool = False

    @property
    def modes(self) -> tuple[str, ...]:
        """The modules that a step leaves in another mode."""
        return tuple(name for name in self.attributes if name.rpartition(".")[2] == "training")

    @property
    def stops(self) -> tuple[str, ...]:
        """The trainer's attribute that ends the fit, if a step sets it."""
        return tuple(name for name in self.attributes if name == STOP)
