"""Isolation of runs that one process does in turn: settings of a run end with it."""

import gc
import locale
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_turn = threading.RLock()


def _renew_turn() -> None:
    """Give a forked process a new lock: a thread that holds the old one may not be in it."""
    global _turn
    _turn = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_turn)


@contextmanager
def take_turn() -> Iterator[None]:
    """Wait until no other thread is in such a block, and keep others out until the end of this one.

    Blocks of one thread may be nested. A run seeds torch's global generators, and its trials before
    training replace methods of the trainer's class and of users' classes for a moment. The run of
    another thread would draw under these seeds, and call these methods.
    """
    with _turn:
        yield


@contextmanager
def isolate() -> Iterator[None]:
    """Restore the settings of the process at the end of the block.

    These are the environment, the current folder, the search path of modules, filters of warnings,
    levels of logging, handlers of signals, random states, and torch's settings: default dtype,
    threads, determinism, precision of products, and gradients. Modules that a run imports stay, and
    so do changes that a user's class makes to itself.
    """
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        _restore_process(stack)
        _restore_torch(stack)
        yield
    gc.collect()


def _restore_process(stack: ExitStack) -> None:
    """Restore the settings of Python and the operating system at the end of a stack."""
    environment, folder = dict(os.environ), os.getcwd()
    stack.callback(os.chdir, folder)
    stack.callback(os.environ.update, environment)
    stack.callback(os.environ.clear)  # callbacks run in reverse order
    stack.callback(sys.path.__setitem__, slice(None), list(sys.path))
    stack.callback(sys.argv.__setitem__, slice(None), list(sys.argv))
    stack.callback(locale.setlocale, locale.LC_ALL, locale.setlocale(locale.LC_ALL))
    is_main = threading.current_thread() is threading.main_thread()
    for number in _SIGNALS if is_main else ():  # other threads may set no handler
        stack.callback(signal.signal, number, signal.getsignal(number))
    for name in ("", "lightning.pytorch", "lightning.fabric", "pl_fed", "torch"):
        logger = logging.getLogger(name)
        stack.callback(logger.setLevel, logger.level)
        stack.callback(logger.filters.__setitem__, slice(None), list(logger.filters))
    stack.callback(random.setstate, random.getstate())
    stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002
    stack.callback(np.seterr, **np.geterr())
    if gc.isenabled():
        stack.callback(gc.enable)


def _restore_torch(stack: ExitStack) -> None:
    """Restore the settings of torch at the end of a stack."""
    cudnn = torch.backends.cudnn
    for name in ("benchmark", "deterministic", "allow_tf32", "enabled"):
        stack.callback(setattr, cudnn, name, getattr(cudnn, name))
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
    stack.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    stack.callback(torch.set_rng_state, torch.get_rng_state())
