"""Write configs/README.md: a line for each config, from the comment at its top.

python .ci/docs/configs_page.py
"""

import re
from collections.abc import Iterable
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "configs" / "README.md"
SHORTEST = 75  # characters of a summary
GROUPS = {
    "data": "Data: start with one of these",
    "algorithm": "Algorithms: on top of a data config",
    "server": "Server optimizers and aggregators: on top of an algorithm",
    "attack": "Attacks and corrupted data: on top of any config",
    "other": "Other layers",
}
HEAD = """# Configs

Each config begins with the command that runs it. Configs are layers: later ones win, and the command line
wins over all of them.

```bash
python -m pl_fed fit --config configs/fashion_mnist.yaml --config configs/ditto.yaml
python -m pl_fed fit --config configs/fashion_mnist.yaml --config configs/fedavg.yaml \\
    --config configs/label_poisoning.yaml --federation.aggregator Median
python -m pl_fed fit --config configs/quickstart.yaml --model.lam 1 --data.batch_size 20 \\
    --federation.server_optimizer Adam --federation.server_optimizer.lr 0.01
python -m pl_fed fit --config configs/quickstart.yaml --print_config   # prints every value
python -m pl_fed fit --help
```

- **Class names.** A class of pl_fed needs its name only: `--federation.aggregator Median`. Any other class needs
  its path: `--model.net my_net.MyNet`. Python searches the current folder, and you register nothing.
- **Replaced classes.** When you replace a class, pl_fed keeps the arguments that the new class also accepts.
  Example: `--data.partitioner DittoFashion` keeps `classes_per_client: 2` of the quickstart's `Shards`.
- **Lists.** `+=` adds an element: `--federation.pre_aggregators+=Clipping`.
- **Data sets.** `PL_FED_DATA` is the folder of your data sets. Most data sets can also be downloaded, with
  `--data.dataset.download true`. Each config says which files it needs.
- **Combinations.** Algorithms, attacks, aggregators, data splits and engines combine freely. pl_fed refuses an
  unsupported combination with an error before training.

"""
FOOT = """## Sweeps

`wandb sweep configs/sweeps/ditto_lambda.yaml` starts a sweep of validation accuracy; `flame_rho.yaml` and
`fedtilt_tilts.yaml` are others. Runs of a sweep are online, unless `WANDB_MODE` says otherwise.

*`python .ci/docs/configs_page.py` writes this page from the configs.*
"""


def comment_of(config: Path) -> str:
    """Return the comment below a config's command, as one line."""
    lines = config.read_text().splitlines()
    end = next(place for place, line in enumerate(lines) if not line.startswith("#"))
    return " ".join(line.removeprefix("#").strip() for line in lines[1:end]).strip()


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
    parts = [
        f"## {title}\n\n{table(c for c in configs if group_of(c) == group)}\n"
        for group, title in GROUPS.items()
    ]
    return HEAD + "".join(parts) + FOOT


if __name__ == "__main__":
    PAGE.write_text(page())
