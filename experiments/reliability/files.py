"""Broken files: each command reads a run with a broken file, or ends with one sentence."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import yaml

from experiments.reliability.commands import Command
from experiments.reliability.configs import base_config

FILES = (
    *("config.yaml", "metrics.csv", "per_client.csv", "per_client_validation.csv"),
    *("per_class.csv", "summary.json", "engine.json", "checkpoints/last.ckpt"),
)
FIT = ["fit", "--config", "base.yaml"]
COMMANDS: dict[str, list[str]] = {
    "report": ["report", "runs", "--out", "page"],
    "test": ["test", "--config", "base.yaml", "--ckpt_path", "last"],
    "resume": [*FIT, "--ckpt_path", "last", "--trainer.max_epochs", "2"],
}


def _flip(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(max(1, len(content)))
    return content[:place] + bytes([draw.randrange(256)]) + content[place + 1 :]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "cut off": lambda content, draw: content[: draw.randrange(max(1, len(content)))],
    "another byte": _flip,
    "empty": lambda _, __: b"",
    "zeros": lambda content, _: bytes(len(content)),
    "text": lambda _, __: "é, nonsense {[\n".encode(),
    "random bytes": lambda _, draw: draw.randbytes(200),
    "twice": lambda content, _: content * 2,
    "last half": lambda content, _: content[len(content) // 2 :],
}


def run(draw: random.Random, folder: Path) -> tuple[str, str]:
    """Return a damaged file and a command, and the command's fault."""
    name, command_name = draw.choice(FILES), draw.choice(list(COMMANDS))
    damage_name, damage = draw.choice(list(DAMAGES.items()))
    shutil.copytree(_finished_run(folder), folder, dirs_exist_ok=True)
    (path,) = folder.glob(f"runs/*/{name}")
    path.write_bytes(damage(path.read_bytes(), draw))
    command = Command(COMMANDS[command_name], folder)
    command.wait()
    return f"{name}, {damage_name}, {command_name}", command.fault()


def _finished_run(folder: Path) -> Path:
    """Return a folder with a finished run; it is run once per campaign."""
    place = folder.parent / "references" / "finished"
    if not (place / "done").is_file():
        place.mkdir(parents=True, exist_ok=True)
        (place / "base.yaml").write_text(yaml.safe_dump(base_config("Ditto")), encoding="utf-8")
        if (command := Command(FIT, place)).wait() != 0:
            raise RuntimeError(f"The run ended with {command.status}: {command.output}")
        (place / "done").touch()
    return place
