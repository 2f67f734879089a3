"""The description of a study: its axes, seeds and options, read from a YAML file."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from pl_fed.command.config_files import read_text as read_file
from pl_fed.command.config_files import reason
from pl_fed.studies.axes import Axis, read_axes
from pl_fed.studies.best_round import BestRound, read_best_round
from pl_fed.studies.changes import Change, read_change
from pl_fed.studies.plans import Comparison, Tuning, read_comparison, read_tuning
from pl_fed.studies.readers import (
    StudyError,
    read_flag,
    read_integer,
    read_list,
    read_mapping,
    read_text,
    refuse,
)
from pl_fed.studies.remote_pool import Remote, read_remote
from pl_fed.studies.selection import Selection, read_selection
from pl_fed.studies.yaml_texts import load_study

KEYS = ("name", "base", "axes", "seeds", "leave_out", "tune", "compare", "options")
EXTENDS = "extends"
"""The key of a study file that names the file whose content it changes."""

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")
_MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class Options:
    """Options: how a study runs.

    Attributes:
        folder: The folder of the study; ``None`` is ``runs/<name>``.
        workers: The number of processes that run cells; ``None`` is the number of cores.
        keep_checkpoints: Whether finished cells keep their checkpoints.
        runs_per_worker: The number of runs of a process; then a fresh one takes its place, so that
            its memory does not grow without bound.
        runs_per_gpu: The number of workers for each graphics card of this machine.
        best: The choice of the tested round, the same for all cells; ``None``
            tests the last round. It changes results.
        on: The engine that runs cells on other machines; ``None`` runs them on this one.
        recorded: A table of results; its cells count as done, though they have no folder.
    """

    folder: str | None = None
    workers: int | None = None
    keep_checkpoints: bool = False
    runs_per_worker: int = 50
    runs_per_gpu: int = 1
    best: BestRound | None = None
    on: Remote | None = None
    recorded: str | None = None


@dataclass(frozen=True)
class StudySpec:
    """Study specification: a study as its author describes it, checked.

    Attributes:
        name: The name; letters, digits, ``_``, ``.`` and ``-``.
        base: The config that all cells share.
        axes: The axes.
        seeds: The seeds, each from 0 to 2^32 - 1.
        leave_out: Selections of cells that the study does not run.
        tune: The tuning; ``None`` without one.
        compare: The tests of the report; ``None`` without any.
        options: How the study runs.
    """

    name: str
    base: Change
    axes: tuple[Axis, ...] = ()
    seeds: tuple[int, ...] = (0,)
    leave_out: tuple[Selection, ...] = ()
    tune: Tuning | None = None
    compare: Comparison | None = None
    options: Options = field(default_factory=Options)

    @property
    def folder(self) -> Path:
        """The folder of the study: an absolute path for the current folder, to have a name."""
        folder = Path(self.options.folder or Path("runs") / self.name)
        return folder if folder.name else folder.absolute()


def read_spec_file(path: str | Path) -> StudySpec:
    """Return the study in a YAML file.

    Args:
        path: The file.

    Raises:
        StudyError: If the file cannot be read, or describes no study.
    """
    return read_spec(_read_content(Path(path)))


def _read_content(path: Path, children: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the content of a study file, over that of the file which it extends.

    Its keys replace those of the other file; its axes are added, or replace axes of the same name.

    Args:
        path: The file.
        children: The files that extend it.
    """
    if not path.is_file():
        raise StudyError(
            f"Expected argument `{'extends' if children else 'study'}` to be a YAML file but found"
            f" none at '{path.absolute()}'."
        )
    try:
        value = load_study(read_file(path))
    except yaml.YAMLError as error:
        raise StudyError(
            f"Expected argument `study` to be a file of YAML but got {path}: {reason(error)}."
        ) from None
    if not isinstance(value, dict):
        raise StudyError(
            f"Expected argument `study` to be a file with the keys {', '.join((*KEYS, EXTENDS))}"
            f" but got {path}, which has none."
        )
    if EXTENDS not in value:
        return value
    parent = path.parent / read_text(EXTENDS, value.pop(EXTENDS))
    chain = (*children, path.resolve())
    if parent.resolve() in chain:
        refuse(EXTENDS, "name another file, which does not extend this one", str(parent))
    content = _read_content(parent, chain)
    axes = {"axes": read_mapping("axes", value["axes"])} if "axes" in value else {}
    if axes:
        axes = {"axes": {**read_mapping("axes", content.get("axes", {})), **axes["axes"]}}
    return {**content, **value, **axes}


def read_spec(value: Mapping[str, Any]) -> StudySpec:
    """Return the study that a mapping describes.

    Args:
        value: The content of a study file.

    Raises:
        StudyError: If the mapping describes no study.
    """
    content = read_mapping("", value, KEYS)
    name = read_text("name", content.get("name"))
    if not _NAME.fullmatch(name):
        refuse("name", "have only letters, digits, _, . and -", name)
    if "base" not in content:
        refuse("base", "be names of configs, such as [quickstart]", None)
    axes = read_axes(content.get("axes"))
    return StudySpec(
        name=name,
        base=read_change("base", content["base"]),
        axes=axes,
        seeds=_read_seeds(content.get("seeds", 1)),
        leave_out=_read_leave_out(content.get("leave_out"), axes),
        tune=read_tuning(content.get("tune"), axes),
        compare=read_comparison(content.get("compare"), axes),
        options=_read_options(content.get("options")),
    )


def _read_seeds(value: Any) -> tuple[int, ...]:
    """Return the seeds 0, 1, … of a number of seeds, or the seeds of a list."""
    if not isinstance(value, list | tuple):
        return tuple(range(read_integer("seeds", value, 1)))
    seeds = [read_integer("seeds", seed, 0) for seed in read_list("seeds", value)]
    for place, seed in enumerate(seeds):
        if seed > _MAX_SEED:
            refuse("seeds", f"be integers of at most {_MAX_SEED}", seed)
        if seed in seeds[:place]:
            refuse("seeds", "have each seed once", seed)
    return tuple(seeds)


def _read_leave_out(value: Any, axes: tuple[Axis, ...]) -> tuple[Selection, ...]:
    items = [] if value is None else list(value) if isinstance(value, list) else [value]
    selections = []
    for place, item in enumerate(items):
        path = f"leave_out[{place}]"
        selection = read_selection(path, item, axes)
        if not selection.labels:
            refuse(path, "name at least one axis", item)
        selections.append(selection)
    return tuple(selections)


def _read_options(value: Any) -> Options:
    default = Options()
    options = read_mapping("options", value, [item.name for item in fields(default)])
    if options.get("on") is not None and "runs_per_gpu" in options:
        remedy = "set the number of cards of a run for the engine, such as options.on.ray.gpus"
        refuse(
            "options.runs_per_gpu",
            "be left out beside `options.on`",
            options["runs_per_gpu"],
            remedy,
        )
    folder, workers = options.get("folder"), options.get("workers")
    recorded = options.get("recorded")
    return Options(
        folder=None if folder is None else read_text("options.folder", folder),
        workers=None if workers is None else read_integer("options.workers", workers, 1),
        keep_checkpoints=read_flag(
            "options.keep_checkpoints", options.get("keep_checkpoints", default.keep_checkpoints)
        ),
        runs_per_worker=read_integer(
            "options.runs_per_worker", options.get("runs_per_worker", default.runs_per_worker), 1
        ),
        runs_per_gpu=read_integer(
            "options.runs_per_gpu", options.get("runs_per_gpu", default.runs_per_gpu), 1
        ),
        best=read_best_round("options.best", options.get("best")),
        on=read_remote("options.on", options.get("on")),
        recorded=None if recorded is None else read_text("options.recorded", recorded),
    )
