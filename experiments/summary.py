"""Tables of two pages: the papers' figures that agree with ours, and all algorithms.

python -m experiments.summary
"""

import re
from pathlib import Path

from experiments.ditto import page as ditto
from experiments.fashion_mnist import studies as fashion_mnist
from experiments.fedtilt import summary as fedtilt
from experiments.flame import page as flame
from experiments.papers import markdown

HERE = Path(__file__).parent
BLOCK = re.compile(r"<!-- (\w+) -->\n(.*?)<!-- /\1 -->", re.DOTALL)


def tabulate_papers() -> str:
    """Return the table of the numbers of agreeing figures, and the table of the main figures."""
    tables = [*flame.summarize(), *ditto.summarize(), *fedtilt.summarize()]
    head = ["", "figures in the band", "seeds", "runs", "hours of one core", "command"]
    counts = markdown(head, [table.cells() for table in tables])
    main = [
        [name, *table.figures[key].cells(table.digits)]
        for table in tables
        for key, name in table.main.items()
    ]
    return f"\n{counts}\n{markdown(['', 'the paper', 'pl_fed', 'difference'], main)}\n"


def make_texts() -> dict[Path, dict[str, str]]:
    """Return the texts between ``<!-- name -->`` and ``<!-- /name -->``, by page and name."""
    algorithms = fashion_mnist.tabulate_main_models(fashion_mnist.read_results())
    return {
        HERE / "README.md": {"papers": tabulate_papers()},
        HERE / "fashion_mnist" / "README.md": {"algorithms": f"\n{algorithms}\n"},
    }


def main() -> None:
    """Write the tables into the pages."""
    for page, blocks in make_texts().items():
        parts = BLOCK.split(page.read_text())  # text, name, block, text, ...
        for place in range(1, len(parts), 3):
            name = parts[place]
            parts[place : place + 2] = [f"<!-- {name} -->\n{blocks[name]}<!-- /{name} -->", ""]
        page.write_text("".join(parts))


if __name__ == "__main__":
    main()
