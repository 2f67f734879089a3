"""The rule of ``auto``: the engine for a net, a cohort and the length of a run.

The rule reads facts of the config and of the device's kind, and no clock. The same config therefore
runs by the same engine, with the same numbers bit for bit. The measurements behind the numbers
below are in ``experiments/benchmarks/engines.md``.
"""

from dataclasses import dataclass

from torch import nn

from pl_fed.clients.base import Client
from pl_fed.clients.contract import Objective
from pl_fed.engine.options import EngineName

_MIN_STACK = 8  # clients; in a smaller stack, vmap's cost for each operation is not shared enough
_MIN_STACKED_STEPS = 2_000  # local steps of clients in a run; below, trying a stack does not pay
_MAX_STACKED_NUMBERS = 131_072  # trained numbers of a client, above which a stack leaves the caches
_MIN_COMPILED_STEPS = 120_000  # local steps of clients in a run; below, compiling does not pay off
_MIN_COMPILED_STACK = 5  # clients; a compiled stack calls fewer kernels than its clients in turn
_MAX_COMPILED_NUMBERS = 524_288  # trained numbers of a client in a compiled stack
_MAX_COMPILED_LAYERS = 16  # layers with parameters; more may compile for minutes
_MIN_COMPILED_CONVOLUTION_STEPS = 30_000  # a step of a net with convolutions takes longer
_MAX_COMPILED_CONVOLUTIONS = 8  # layers with parameters, of a net with convolutions

CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
"""The layers whose stacks are slow on a CPU."""


@dataclass(frozen=True)
class WorkFacts:
    """Work facts: the facts on which the choice of an engine depends.

    Attributes:
        device: The kind of device, such as ``"cpu"``.
        stack: The number of clients in a stack; 1 if clients cannot be stacked.
        numbers: The numbers that a client trains, over all trained models.
        layers: The number of layers with parameters, over all trained models.
        convolves: Whether a trained model has convolutions.
        steps: The number of local steps of all clients in the run, in this process.
    """

    device: str
    stack: int
    numbers: int
    layers: int
    convolves: bool
    steps: float

    @classmethod
    def collect(cls, client: Client, objective: Objective, stack: int, steps: float) -> "WorkFacts":
        """Return the facts of an algorithm.

        Args:
            client: The algorithm.
            objective: The objective of its local steps.
            stack: The number of clients in a stack; 1 if clients cannot be stacked.
            steps: The number of local steps of all clients in the run, in this process.
        """
        models = [client.model(model) for model in objective.trained]
        modules = [module for model in models for module in model.modules()]
        return cls(
            device=client.device.type,
            stack=stack,
            numbers=sum(client.row(model).layout.numel for model in objective.trained),
            layers=sum(bool(module._parameters) for module in modules),
            convolves=any(isinstance(module, CONVOLUTIONS) for module in modules),
            steps=steps,
        )


def choose_engine(facts: WorkFacts) -> EngineName:
    """Return the engine that is expected to be fastest.

    On a GPU, a step launches as many kernels for a stack as for one client, and the launches are
    the cost of small nets: stacks win by the number of clients. On a CPU, a stack shares the cost
    of an operation, but its tensors leave the caches. Convolutions of a stack are slow there.
    Compiling takes seconds, and minutes for deep nets, so only long runs of shallow nets compile.

    Example:
        >>> facts = WorkFacts("cpu", stack=10, numbers=7850, layers=1, convolves=False, steps=1e4)
        >>> choose_engine(facts)
        'stacked'
    """
    if facts.device != "cpu":
        return "stacked" if facts.stack > 1 else "one_by_one"
    if facts.convolves:
        is_long = facts.steps >= _MIN_COMPILED_CONVOLUTION_STEPS
        compiles = is_long and facts.layers <= _MAX_COMPILED_CONVOLUTIONS
        return "one_by_one_compiled" if compiles else "one_by_one"
    if facts.steps >= _MIN_COMPILED_STEPS and facts.layers <= _MAX_COMPILED_LAYERS:
        is_wide = facts.stack >= _MIN_COMPILED_STACK
        stacks = is_wide and facts.numbers <= _MAX_COMPILED_NUMBERS
        return "stacked_compiled" if stacks else "one_by_one_compiled"
    stacks = facts.stack >= _MIN_STACK and facts.numbers <= _MAX_STACKED_NUMBERS
    return "stacked" if stacks and facts.steps >= _MIN_STACKED_STEPS else "one_by_one"


def trains_convolutions(net: nn.Module) -> bool:
    """Return whether a net has trainable convolutions.

    With separate weights for each client, convolutions under vmap on a CPU take up to twice the
    time.
    """
    convolutions = (layer for layer in net.modules() if isinstance(layer, CONVOLUTIONS))
    return any(layer.weight.requires_grad for layer in convolutions)
