"""The pretend device: torch's device ``cuda:0`` on a machine without a GPU.

``install()`` replaces the device for the remaining life of a process, so tests run it in processes
of their own (``run_on_device.py``). The memory and the kernels are the CPU's. The device refuses
what CUDA refuses: tensors of several devices, generators of the CPU, ``numpy()``. It counts
launches and synchronisations: see :func:`counting`.

Not simulated: asynchrony and streams, CUDA's own numbers (atomics, TF32, cuDNN), a lack of memory,
NCCL (gloo stands in), and inductor's code for CUDA (the traced graph runs uncompiled).
"""

import collections
import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

SOURCE = Path(__file__).with_name("pretend_device.cpp")
ROOMS = [  # the folders of the modules that `device_cases` imports
    str(SOURCE.parents[1] / room)
    for room in (
        *("", "devices", "aggregators", "attacks", "compressors", "engine", "models", "samplers"),
        "tasks",
    )
]
TOTAL_BYTES, FREE_BYTES = 80 << 30, 79 << 30

extension = None
waits = collections.Counter()


def missing_tool():
    """Return why this machine cannot build the device; an empty text if it can."""
    if not torch.backends.cuda.is_built():
        return "the installed torch has no CUDA operators: install a wheel with CUDA"
    if not (shutil.which("ninja") or (Path(sys.executable).parent / "ninja").exists()):
        return "ninja is missing: pip install ninja"
    if not shutil.which(os.environ.get("CXX", "g++")):
        return "no C++ compiler: install g++ or set CXX"
    return ""


def build():
    """Build the extension, once for each version of source, torch and Python; return the module.

    The folder lies outside the source tree. A lock lets concurrent processes share it.
    """
    from torch.utils import cpp_extension

    versions = f"{torch.__version__} {sys.version} {sys.executable}".encode()
    key = hashlib.sha256(SOURCE.read_bytes() + versions).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"pl_fed_pretend_device_{os.getuid()}" / key
    folder.mkdir(parents=True, exist_ok=True)
    beside_python = str(Path(sys.executable).parent)  # where pip puts ninja
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), beside_python])
    with (folder / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)  # torch's own, left by a killed process
        return cpp_extension.load(
            "pretend_device",
            [str(SOURCE)],
            build_directory=str(folder),
            extra_cflags=["-O1"],
            with_cuda=False,
        )


def install():
    """Replace the device ``cuda`` of this process; call it before ``pl_fed`` is imported."""
    global extension
    if extension is not None:
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    from pl_fed.lazy_imports import quick_imports

    with quick_imports():  # as the command line does: a third of the time
        import lightning.pytorch  # noqa: F401
    import torchvision  # noqa: F401 (it collects functions of torch.cuda)

    extension = build()
    extension.install(scalar_operators())
    extension.on_wait(_record_wait)
    torch.backends.cudnn.enabled = False
    for kind in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
    _replace_cuda_module()
    _replace_storages()
    _replace_communication()
    _keep_graphs_uncompiled()


@contextlib.contextmanager
def counting():
    """Count launches and synchronisations inside the context.

    Yields:
        A namespace whose ``launches`` (by operator) and ``waits`` (by reason and line of pl_fed)
        are filled in at the end.
    """
    counts = SimpleNamespace(launches={}, waits={})
    extension.reset()
    waits.clear()
    extension.count(True)
    try:
        yield counts
    finally:
        extension.count(False)
        counts.launches, counts.waits = dict(extension.launches()), dict(waits)


def scalar_operators():
    """Return the operators that take 0-d CPU tensors, by torch's own list of operators."""
    import torchgen
    import yaml

    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries = {
        entry["func"].split("(")[0].strip(): entry
        for entry in yaml.load(path.read_text(), Loader=loader)
    }

    def takes_scalars(entry):
        inherits = entry.get("structured_inherits") == "TensorIteratorBase"
        if inherits or entry.get("device_check") == "NoCheck":
            return True
        delegate = entries.get(entry.get("structured_delegate"))
        return delegate is not None and takes_scalars(delegate)

    return [f"aten::{name}" for name, entry in entries.items() if takes_scalars(entry)]


def _record_wait(reason):
    # a thread of autograd may have no other frame
    place, frame = "outside pl_fed", sys._getframe().f_back
    while frame is not None:  # traceback.extract_stack would read all files
        _, found, path = frame.f_code.co_filename.rpartition("/pl_fed/")
        if found:
            place = f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
            break
        frame = frame.f_back
    waits[reason, place] += 1


def _do_nothing(*_, **__):
    return None


def _return(value):
    return lambda *_, **__: value


class _Stream:
    """A stream of a device that is never behind."""

    def __init__(self, *_, **__):
        self.device, self.device_index, self.cuda_stream = torch.device("cuda", 0), 0, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def record_event(self, *_):
        return self

    synchronize = wait_stream = wait_event = _do_nothing


class _Device(contextlib.nullcontext):
    """``torch.cuda.device``: there is one device only."""

    def __init__(self, *_):
        super().__init__()


def _wait_for_device(*_):
    if not extension.refuses_to_wait():
        extension.wait("torch.cuda.synchronize")


def _cuda_functions():
    """Return the functions of ``torch.cuda`` that would call the driver, by name."""
    properties = SimpleNamespace(
        name="Pretend device",
        major=9,
        minor=0,
        total_memory=TOTAL_BYTES,
        multi_processor_count=132,
        warp_size=32,
        is_integrated=0,
    )
    functions = {
        "is_available": _return(True),
        "is_initialized": _return(True),
        "device_count": _return(1),
        "current_device": _return(0),
        "_get_device_index": _return(0),
        "_exchange_device": _return(0),
        "_maybe_exchange_device": _return(0),
        "_is_in_bad_fork": _return(False),
        "is_current_stream_capturing": _return(False),
        "is_bf16_supported": _return(True),
        "get_device_name": _return(properties.name),
        "get_device_capability": _return((9, 0)),
        "get_device_properties": _return(properties),
        "mem_get_info": _return((FREE_BYTES, TOTAL_BYTES)),
        "memory_stats": lambda *_: {},
        "synchronize": _wait_for_device,
        "manual_seed": lambda seed: extension.seed(int(seed)),
        "manual_seed_all": lambda seed: extension.seed(int(seed)),
        "get_rng_state": lambda *_: extension.get_state(),
        "get_rng_state_all": lambda *_: [extension.get_state()],
        "set_rng_state": lambda state, *_: extension.set_state(state.cpu()),
        "set_rng_state_all": lambda states: extension.set_state(states[0]),
        "set_sync_debug_mode": lambda mode: extension.refuse_to_wait(mode in ("error", 2)),
        "get_sync_debug_mode": lambda: 2 * extension.refuses_to_wait(),
        "current_stream": lambda *_: _Stream(),
        "stream": lambda _: contextlib.nullcontext(),
        "device": _Device,
        "Stream": _Stream,
    }
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        functions[name] = _return(0)
    for name in ("_lazy_init", "init", "set_device", "empty_cache", "seed", "seed_all"):
        functions[name] = _do_nothing
    for name in ("reset_peak_memory_stats", "reset_max_memory_allocated"):
        functions[name] = _do_nothing
    return functions


def _replace_cuda_module():
    import lightning.fabric.accelerators.cuda as fabric
    import lightning.pytorch.accelerators.cuda as lightning
    import torch.cuda.memory
    import torch.cuda.random

    for name, function in _cuda_functions().items():
        setattr(torch.cuda, name, function)
        for module in (torch.cuda.memory, torch.cuda.random):
            if hasattr(module, name):
                setattr(module, name, function)
    for module in (fabric, lightning):
        module._check_cuda_matmul_precision = _do_nothing


def _replace_storages():
    """Let storages of the device be copied, saved and loaded."""
    plain_clone = torch.UntypedStorage.clone

    def copy_to_device(storage):
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cuda")
        if storage.nbytes():
            source = torch.tensor([], dtype=torch.uint8, device=storage.device)
            copy.copy_(source.set_(storage))
        return copy.untyped_storage()

    def restore(storage, location):
        return copy_to_device(storage) if str(location).startswith("cuda") else None

    def clone(storage):
        return copy_to_device(storage) if storage.device.type == "cuda" else plain_clone(storage)

    torch.UntypedStorage.clone = clone
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # its memory is the CPU's in any case
    tag = lambda storage: "cuda:0" if storage.device.type == "cuda" else None  # noqa: E731
    torch.serialization.register_package(1, tag, restore)


def _replace_communication():
    """Let gloo take tensors of the device, which it copies through the driver otherwise."""
    import torch.distributed as dist
    from lightning.pytorch.strategies import DDPStrategy

    def through_cpu(collective):
        @functools.wraps(collective)
        def run(*args, **kwargs):
            copies = []

            def move(value):
                if isinstance(value, list):
                    return [move(entry) for entry in value]
                if not isinstance(value, torch.Tensor) or not value.is_cuda:
                    return value
                copies.append((value, value.cpu()))
                return copies[-1][1]

            kwargs = {name: move(value) for name, value in kwargs.items()}
            result = collective(*map(move, args), **kwargs)
            for tensor, copy in copies:
                tensor.copy_(copy)
            return result

        return run

    collectives = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce")
    collectives += ("all_gather_single",) if hasattr(dist, "all_gather_single") else ()
    for name in (*collectives, "all_to_all_single", "reduce_scatter_tensor"):
        setattr(dist, name, through_cpu(getattr(dist, name)))
    dist._broadcast_coalesced = lambda group, tensors, size, src=0: [
        dist.broadcast(tensor, src) for tensor in tensors
    ]
    barrier = dist.barrier
    dist.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group=group)
    DDPStrategy.configure_ddp = _do_nothing  # pl_fed drops DDP's wrapper


def _keep_graphs_uncompiled():
    """Run the traced graphs of compiled engines as they are: nothing compiles for this device."""
    from torch.fx.experimental import proxy_tensor

    from pl_fed import torch_internals
    from pl_fed.engine import compiled, step

    for module in (compiled, torch_internals):
        module.compile_graph = lambda graph, *_, **__: graph
    trace, extract = step.trace, proxy_tensor.extract_val

    def trace_without_shapes(*arguments, **options):
        """Trace; the shapes that a trace notes, half of its work, are for the compiler alone."""
        proxy_tensor.extract_val = _do_nothing
        try:
            return trace(*arguments, **options)
        finally:
            proxy_tensor.extract_val = extract

    step.trace = compiled.trace = trace_without_shapes
