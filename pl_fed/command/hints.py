"""Hints of the command line: a second line that shows the remedy of a frequent mistake."""

import difflib
import inspect
import pydoc
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pl_fed.command.listing import ROOMS
from pl_fed.command.messages import SUBCOMMANDS, escape_invisible, summarize
from pl_fed.command.program import program_name
from pl_fed.command.shipped_configs import find_configs

_QUICKSTART = "quickstart"

# Names of other programs, in lower case without separators → the option of pl_fed.
_OPTIONS = {
    "trainer.max_epochs": "communicationrounds epochs globalepochs globalrounds maxrounds nrounds"
    " numrounds rounds",
    "model.local_epochs": "localepoch localepochs numlocalepochs",
    "model.local_steps": "localiterations localsteps numlocalsteps",
    "model.optimizer.lr": "learningrate locallearningrate locallr lr",
    "federation.server_optimizer.lr": "globallr serverlearningrate serverlr",
    "federation.sampler.cohort_size": "clientsperround cohort cohortsize fractionfit joinratio"
    " participation samplerate",
    "federation.aggregator": "aggregation aggregationrule defence defense gar",
    "federation.adversary.attack": "attack attacktype byzantineattack",
    "federation.adversary.fraction": "byzantine byzantineclients byzantinefraction malicious"
    " numbyzantine nummalicious",
    "data.num_clients": "clients nclients numclients numusers",
    "data.batch_size": "batchsize localbatchsize",
    "data.dataset": "dataset datasetname",
    "data.partitioner": "alpha dirichlet partition partitioner split",
    "model": "algo algorithm client method",
    "model.net": "arch architecture net network",
    "seed_everything": "randomseed seed seeds",
    "trainer.accelerator": "cuda device gpu",
    "trainer.devices": "devices gpus ngpus numgpus",
    "trainer.default_root_dir": "logdir outdir output outputdir savedir",
}
_SECTION_CLASSES = {
    "data": "pl_fed.data.FederatedData",
    "federation": "pl_fed.federation.Federation",
    "trainer": "lightning.pytorch.Trainer",
}
_SYNONYMS = {synonym: path for path, names in _OPTIONS.items() for synonym in names.split()}

_NO_SECTION = re.compile(
    r"Expected argument (`data\.dataset`|`model`)( and `model`)? to be set but got none"
)
_NO_FILE = re.compile(r"Expected argument `config` to be a file but found none at '?(.+?)'?\.$")
_NO_OPTION = re.compile(r"Expected only options that --help lists but got --?([\w.]+)")
_NO_COMMAND = re.compile(r"Expected a subcommand, one of .+, but got '(.+)'\.$")
_NO_FRACTION = re.compile(r"`federation\.adversary\.fraction` .* but got (\d+(?:\.\d+)?)\b")
_SMALL_COHORT = re.compile(
    r"Expected argument `federation\.sampler\.cohort_size` to be (at least|more than) (\d+)"
)
_FEW_UPLOADS_AT_START = re.compile(
    r"Expected argument `uploads` to have (?P<least>(?:at least|more than) \d+) rows"
    r"(?P<reason>.*?),? but got (?P<got>\d+)"
)
_NO_CLASS = re.compile(r"Expected argument `([\w.]+)` to be the path of a class but got \w+\.$")
_NO_ACCELERATOR = re.compile(r"Expected argument `trainer\.accelerator` to be available here")


def format_error(message: str, arguments: Any = ()) -> str:
    r"""Return the lines that the command line prints for an error.

    Args:
        message: The error message.
        arguments: The command line without the program's name.

    Example:
        >>> print(format_error("Expected argument `model.init_args.lam` to be >= 0."), end="")
        error: Expected argument `model.lam` to be >= 0.
    """
    text = re.sub(r"`[\w.]+`", lambda path: path[0].replace(".init_args.", "."), message)
    hint = find_hint(text, arguments if isinstance(arguments, list) else ())
    lines = [f"error: {text}", *([f"hint: {hint}"] if hint else [])]
    return "".join(f"{escape_invisible(line)}\n" for line in lines)


def find_hint(message: str, arguments: Sequence[str] = ()) -> str | None:
    """Return a hint for an error message, or ``None``.

    Args:
        message: The error message.
        arguments: The command line without the program's name.

    Example:
        >>> find_hint("Expected only options that --help lists but got --trainer.rounds 10.")
        'a run has --trainer.max_epochs rounds'
    """
    if match := _NO_SECTION.match(message):
        return _suggest_config(match[1].strip("`").split(".")[0], arguments)
    if match := _NO_FILE.match(message):
        return _suggest_file(Path(match[1]), arguments)
    if (match := _NO_OPTION.match(message)) and "(did you mean" not in message:
        return _suggest_option(match[1])
    if match := _NO_COMMAND.match(message):
        return _suggest_command(match[1], arguments)
    if (match := _NO_FRACTION.search(message)) and 1 < float(match[1]) <= 100:
        percent = float(match[1])
        return f"for {percent:g} %, set --federation.adversary.fraction {percent / 100:g}"
    if match := _SMALL_COHORT.search(message):
        least = int(match[2]) + (match[1] == "more than")
        return f"set --federation.sampler.cohort_size to {least} or more"
    if _NO_ACCELERATOR.match(message):
        return "set --trainer.accelerator cpu"
    if (match := _NO_CLASS.match(message)) and "(did you mean" not in message:
        kinds = [kind for kind, room in ROOMS.items() if room.option.split()[0] == f"--{match[1]}"]
        return f"`{program_name()} list {kinds[0]}` lists the classes" if kinds else None
    return None


def name_config_path(message: str, config: Mapping[str, Any]) -> str:
    """Name an argument in a message by its path in the config, if there is only one such path.

    Classes know the names of their arguments, but not their own place in the config.

    Args:
        message: The message of a class, such as "Expected argument `lam` to be …".
        config: The config, as nested dictionaries.

    Example:
        >>> name_config_path("Expected argument `lam` to be >= 0.", {"model": {"lam": -1}})
        'Expected argument `model.lam` to be >= 0.'
    """
    if message.startswith("Does not validate"):  # a tree of jsonargparse around the message
        sentence = summarize(message)
        message = sentence if sentence.startswith("Expected argument") else message
    match = re.match(r"Expected argument `(\w+)`", message)
    if match is None or match[1] in config:
        return message
    if few := _FEW_UPLOADS_AT_START.match(message):
        return _name_cohort_size(message, few, config)
    paths = {path for path in _config_paths(config) if path.split(".")[-1] == match[1]}
    if len(paths) != 1:
        return message
    return message.replace(f"`{match[1]}`", f"`{paths.pop()}`", 1)


def _name_cohort_size(message: str, few: re.Match[str], config: Mapping[str, Any]) -> str:
    """Name the size of the cohort in a message about too few uploads, if it is their number."""
    sampler = (config.get("federation") or {}).get("sampler") or {}
    arguments = sampler.get("init_args") or {}
    if arguments.get("cohort_size", -1) not in (None, int(few["got"])):
        return message
    size = f"Expected argument `federation.sampler.cohort_size` to be {few['least']}"
    return message.replace(few[0], f"{size}{few['reason']} but got {few['got']}", 1)


def _config_paths(config: object, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all values, as on the command line: without ``init_args``."""
    if not isinstance(config, Mapping):
        return
    for name, value in config.items():
        path = prefix if name == "init_args" else f"{prefix}.{name}".lstrip(".")
        if name not in ("init_args", "class_path"):
            yield path
        yield from _config_paths(value, path)


def _suggest_config(section: str, arguments: Sequence[str]) -> str:
    """Suggest the config of a run, or the command of a config that is one layer of several."""
    configs = find_configs()
    for name in _list_values(arguments, "--ckpt_path"):
        for folder in (Path(name), Path(name).parent.parent):  # a run, or a file in checkpoints/
            if (folder / "config.yaml").is_file():
                config = shlex.quote(str(folder / "config.yaml"))
                return f"put the config of the run first: --config {config}"
    for name in _list_values(arguments, "--config", "-c"):
        path = Path(name)
        try:
            text = (path if path.is_file() else configs[name]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, KeyError):
            continue
        command = text.split("\n", 1)[0].removeprefix("# python -m pl_fed ")
        if not command.startswith("#") and command.count("--config") > 1:
            if not path.is_file():  # a name: the other layers have names, too
                command = re.sub(r"\bconfigs/(\w+)\.yaml", r"\1", command)
            return f"{name} is one of several layers: run {program_name()} {command}"
    return f"put a config with the section {section} first, for example --config {_QUICKSTART}"


def _list_values(arguments: Sequence[str], *names: str) -> Iterator[str]:
    """Yield the values of an option, by each of its names."""
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if argument in names:
            yield from arguments[position + 1 : position + 2]
        elif equals and name in names:
            yield value


def _suggest_file(path: Path, arguments: Sequence[str]) -> str:
    """Suggest a config with a similar name, by its path or, if a name was typed, by its name."""
    folders = (Path("configs"), path.parent)
    files = {
        file.stem: str(_relative(file))
        for folder in folders
        for file in folder.glob("*.yaml")
        if file.is_file()
    }
    names = {name: name for name in find_configs()}
    typed = {*_list_values(arguments, "--config", "-c")}
    texts = files | names if path.name in typed else names | files
    similar = difflib.get_close_matches(path.stem, texts, n=1)
    if not similar:
        return f"`{program_name()} list configs` lists the names of configs"
    return f"did you mean {texts[similar[0]]}?"


def _relative(path: Path) -> Path:
    """Return a path relative to the current folder, if it lies in it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _suggest_option(name: str) -> str | None:
    """Suggest the option for a name of another program, or an option with a similar name."""
    path = _SYNONYMS.get(re.sub(r"[_.-]", "", name.rsplit(".", 1)[-1]).lower())
    if path == "trainer.max_epochs":
        return "a run has --trainer.max_epochs rounds"
    section, _, option = name.partition(".")
    if path is None and section in _SECTION_CLASSES:
        kind: Any = pydoc.locate(_SECTION_CLASSES[section])
        options = inspect.signature(kind).parameters
        similar = difflib.get_close_matches(option, options, n=1)
        path = f"{section}.{similar[0]}" if similar else None
    return f"did you mean --{path}?" if path else None


def _suggest_command(name: str, arguments: Sequence[str]) -> str:
    """Suggest a similar subcommand, or ``fit`` with the same arguments."""
    similar = [*difflib.get_close_matches(name, SUBCOMMANDS, n=1), "fit"][0]
    following = [*arguments[1:]] if list(arguments[:1]) == [name] else []
    return f"did you mean {program_name()} {shlex.join([similar, *following])}?"
