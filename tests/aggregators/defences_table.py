"""The table of all aggregators and pre-aggregators: promises, memory, needs, and reports.

Every cell is found by the class itself: by its attributes, or by a round of random uploads.

``PYTHONPATH=.:tests:tests/aggregators python tests/aggregators/defences_table.py`` writes the table
into ``pl_fed/aggregators/README.md``.
"""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from contract_suite import find_configurations
from group_counts import make_group_counts
from torch import nn

import pl_fed.aggregators
from pl_fed.aggregators import Aggregator, Chain, DeepSight, Median, PreAggregator
from pl_fed.nets.rows import RowLayout
from pl_fed.preflight.privacy_rules import describe_unfit_aggregator
from pl_fed.types import RoundContext

PAGE = Path(__file__).parents[2] / "pl_fed" / "aggregators" / "README.md"
BEGIN, END = "<!-- the table of defences begins -->", "<!-- the table of defences ends -->"
HEAD = ("bounded", "in range", "memory", "slices", "sums", "privacy", "needs", "reports")
UPLOADS, CLIENTS, INPUTS, CLASSES = 13, 53, 5, 3
NUMEL = (INPUTS + 1) * CLASSES
ROUNDS = 15  # more than the window of any memory
FIELDS = {  # words of the column "needs" -> the round's context without that field
    "model": {"broadcast": torch.empty(0)},
    "layout": {"layout": None},
    "net": {"net": None},
    "server's data": {"root": torch.empty(0)},
    "start losses": {"start_losses": torch.empty(0)},
    "group counts": {"group_counts": torch.empty(0)},
}


def make_uploads():
    """Return uploads of several lengths, signs and directions, [UPLOADS, NUMEL]."""
    draw = torch.Generator().manual_seed(0)
    uploads = torch.randn(UPLOADS, NUMEL, generator=draw) + 1
    uploads[:2] *= torch.tensor([[-40.0], [20.0]])
    return uploads


def make_context(note=lambda *_: None):
    net = nn.Linear(INPUTS, CLASSES)
    return RoundContext(
        num_byzantine=2,
        clients=torch.arange(UPLOADS),
        losses=torch.linspace(1.0, 2.0, UPLOADS),
        start_losses=torch.linspace(1.0, 2.0, UPLOADS),
        group_counts=make_group_counts(UPLOADS),
        broadcast=torch.linspace(1.0, -1.0, NUMEL),
        root=torch.ones(NUMEL),
        num_clients=CLIENTS,
        num_rounds=9,
        layout=RowLayout.from_parameters(net),
        net=lambda update=None: net,
        inputs=torch.empty(0, INPUTS),
        note=note,
    )


def make(kind):
    """Return an object with the defaults; DeepSight with few random inputs, which say no less."""
    return kind(num_inputs=20) if kind is DeepSight else kind()


def run(kind, context):
    """Run one round, and return the object."""
    stage = make(kind)
    stage(make_uploads(), torch.arange(1, UPLOADS + 1), context)
    return stage


def find_needs(kind):
    """Return the fields of the context without which the class raises an error."""
    needs = []
    for word, field in FIELDS.items():
        try:
            run(kind, replace(make_context(), **field))
        except (ValueError, TypeError):
            needs.append(word)
    return ", ".join(needs) or "–"


def find_reports(kind):
    """Return the words that the class notes in a round."""
    words = []
    run(kind, make_context(note=lambda word, _: words.append(word)))
    return ", ".join(f"`{word}`" for word in sorted(set(words))) or "–"


def find_memory(kind):
    """Return the numbers that the class keeps between rounds, by n, d and all clients K.

    A class that remembers clients keeps a row of each client that took part, so K rows at last.
    """
    stage, context = make(kind), make_context()
    for round in range(ROUNDS):
        moved = replace(context, round=round, broadcast=context.broadcast + round**2 / 100)
        stage(make_uploads() * (1 + round / 10), torch.arange(1, UPLOADS + 1), moved)
    rows = "K" if getattr(stage, "remembers_clients", False) else "n"
    names = {UPLOADS: rows, CLIENTS: "K", NUMEL: "d"}
    tensors = [t for t in stage.state_dict().values() if t.numel()]
    counts = Counter()
    for tensor in tensors:
        symbols = " ".join(names[size] for size in tensor.shape if size in names)
        counts[symbols] += math.prod(size for size in tensor.shape if size not in names)
    terms = (f"{n if n > 1 or not symbols else ''} {symbols}" for symbols, n in counts.items())
    return " + ".join(term.strip() for term in terms) or "–"


def find_privacy(aggregator):
    """Return the noisy values that an aggregator may merge with ``federation.privacy``."""
    if describe_unfit_aggregator(aggregator) is None:
        return "one sum"
    return "–" if describe_unfit_aggregator(aggregator, 8) else "buckets"


def answer(condition):
    return "yes" if condition else "–"


def describe_aggregator(kind):
    """Return the cells of an aggregator."""
    stage = kind()
    return [
        f"{stage.breakdown(20)} of 20",
        f"{stage.max_byzantine(20)} of 20",
        find_memory(kind),
        answer(stage.shards),
        answer(stage.mass(torch.ones(2)) is not None),
        find_privacy(stage),
        find_needs(kind),
        find_reports(kind),
    ]


def describe_pre_aggregator(kind):
    """Return the cells of a pre-aggregator, with the median behind it for the promises."""
    stage = kind()
    chain = Chain([stage], Median())
    return [
        f"{chain.breakdown(20)} of 20",
        f"{chain.max_byzantine(20)} of 20",
        find_memory(kind),
        answer(stage.shards),
        "–",
        find_privacy(chain),
        find_needs(kind),
        find_reports(kind),
    ]


def make_table():
    """Return the two tables in Markdown."""
    lines = []
    for base, title, describe in (
        (Aggregator, "aggregator", describe_aggregator),
        (PreAggregator, "pre-aggregator, with `Median` behind", describe_pre_aggregator),
    ):
        pairs = find_configurations(pl_fed.aggregators, base, {})
        kinds = sorted({kind for kind, _ in pairs if kind is not Chain}, key=lambda k: k.__name__)
        lines += [f"| {' | '.join([title, *HEAD])} |", "|---" * (1 + len(HEAD)) + "|"]
        lines += [f"| {' | '.join([f'`{kind.__name__}`', *describe(kind)])} |" for kind in kinds]
        lines.append("")
    return "\n".join(lines).strip()


def read_table():
    """Return the table of the page."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


def write_table():
    """Replace the table of the page."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, after = text.partition(BEGIN)
    tail = after.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}\n\n{make_table()}\n\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    write_table()
