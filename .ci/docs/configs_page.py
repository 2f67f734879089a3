"""Write configs/README.md: a line for each config, from the comment at its top.

python .ci/docs/configs_page.py
"""

import re
from collections.abc import Iterable
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "configs" / "README.md"
TEMPLATE = Path(__file__).with_name("configs_page.md")  # the page without its tables
SHORTEST = 75  # characters of a summary
GROUPS = {
    "data": "Data: begin with one of these",
    "algorithm": "Algorithms: on top of a data config",
    "server": "Server optimizers and aggregators: on top of an algorithm",
    "attack": "Attacks and corrupted data: on top of any config",
    "other": "Other layers",
}


def comment_of(config: Path) -> str:
    """Return the comment below a config's commands, as one line."""
    lines = config.read_text().splitlines()
    begin = lines.index("#")  # an empty line below the commands
    end = next(place for place, line in enumerate(lines) if not line.startswith("#"))
    return " ".join(line.removeprefix("#").strip() for line in lines[begin:end]).strip()


def summary_of(config: Path) -> str:
    """Return the first sentences of a config's comment: at least so many characters."""
    text = comment_of(config).replace(", on top of any other config", "")
    sentences = re.split(r"(?<!et al\.)(?<=\.) (?=[A-Z{0-9])", text)
    summary = sentences.pop(0)
    while sentences and len(summary) < SHORTEST:
        summary = f"{summary} {sentences.pop(0)}"
    return summary.removesuffix(":")


def group_of(config: Path) -> str:
    """Return the group of a config, from the sections that it has."""
    sections = yaml.safe_load(config.read_text())
    if "dataset" in sections.get("data", {}):
        return "data"
    if "model" in sections:
        return "algorithm"
    federation = sections.get("federation", {})
    if "adversary" in federation:
        return "attack"
    return "server" if {"aggregator", "server_optimizer"} & {*federation} else "other"


def table(configs: Iterable[Path]) -> str:
    """Return the configs and their summaries as a Markdown table."""
    lines = [f"| [`{c.name}`]({c.name}) | {summary_of(c)} |\n" for c in configs]
    return "| config | content |\n|---|---|\n" + "".join(lines)


def page() -> str:
    """Return the whole page."""
    configs = sorted(PAGE.parent.glob("*.yaml"))
    tables = [
        f"## {title}\n\n{table(c for c in configs if group_of(c) == group)}"
        for group, title in GROUPS.items()
    ]
    return TEMPLATE.read_text().replace("{tables}\n", "\n".join(tables))


if __name__ == "__main__":
    PAGE.write_text(page())
