"""The table of everything that leaves a client: private as it is, or refused with a sentence.

A cell has the number of its sentence in a list below the tables. In a sentence, NAME is the class
of the row, and STATES are the states that the cell lists.

``PYTHONPATH=.:tests python tests/privacy/release_matrix.py`` writes the table into
``pl_fed/privacy/README.md``.
"""

import re
from pathlib import Path

from algorithms import ALGORITHMS, make
from contract_suite import find_configurations
from small_federations import classes, seeded, sgd, shared_out
from torch import nn

import pl_fed.aggregators
import pl_fed.samplers
from pl_fed import Adversary, DifferentialPrivacy
from pl_fed.aggregators import Aggregator, Chain, Mean, PreAggregator
from pl_fed.attacks import ALittleIsEnough, RandomLabels, SignFlipping
from pl_fed.clients import FedAvg, FedBN
from pl_fed.data import FederatedData, ImageFolder, Shakespeare, Table
from pl_fed.data.shared_quantities import describe_shared_quantity
from pl_fed.lightning.compatibility import check_private_monitors
from pl_fed.preflight.privacy_rules import (
    describe_unfit_adversary,
    describe_unfit_aggregator,
    describe_unfit_algorithm,
    describe_unfit_states,
    find_participation,
)
from pl_fed.samplers import Sampler

PAGE = Path(__file__).parents[2] / "pl_fed" / "privacy" / "README.md"
BEGIN, END = "<!-- the table of releases begins -->", "<!-- the table of releases ends -->"
OPTIONS = {  # arguments of algorithms that change what is sent
    "FLAME": [{"lagged_global": True}, {"weights": "samples"}],
    "FedDyn": [{"weights": "samples"}],
    "FedADMM": [{"weights": "samples"}],
    "LpProj": [{"weights": "samples"}],
    "MeanRegularized": [{"mean": "cohort"}],
    "Scaffold": [{"control": "start"}],
}
AGGREGATORS = {
    "Chain": [],
    "Mean": [{}, {"weighting": "samples"}],
    "CenteredClipping": [{"tau": 1.0}],
    "GeometricMedian": [{}, {"weighting": "samples"}],
    "TiltedMean": [{}, {"q": -1.0}],
}
BUCKETS = 8
FOR = "for `federation.privacy`"


def batch_norm_net():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


class Monitoring:
    """A trainer with one callback that monitors a metric."""

    def __init__(self, monitor):
        callback = type("EarlyStopping", (), {"monitor": monitor})()
        self.callbacks, self.lr_scheduler_configs = [callback], []


def try_refusal(check, *arguments):
    """Return the sentence of a refusal, or ``None``."""
    try:
        check(*arguments)
    except ValueError as error:
        return str(error)
    return None


def named(name, options):
    return name + "".join(f", {key}: {value}" for key, value in options.items())


def algorithm_rows():
    """Yield algorithms with options, their refusal, and that of cohorts of fixed size."""
    for name in ALGORITHMS:
        for options in [{}, *OPTIONS.get(name, [])]:
            client = make(name, **options)
            refusal = describe_unfit_algorithm(client)
            yield named(name, options), refusal, refusal or describe_unfit_states(client, True)
    for kind in (FedAvg, FedBN):
        client = kind(seeded(batch_norm_net), optimizer=sgd(0.1))
        refusal = describe_unfit_algorithm(client)
        yield (
            f"{kind.__name__} with BatchNorm",
            refusal,
            refusal or describe_unfit_states(client, True),
        )


def aggregator_rows():
    """Yield aggregators and pre-aggregators, their refusal, and that of buckets."""
    aggregators = {
        named(kind.__name__, options): kind(**options)
        for kind, options in find_configurations(pl_fed.aggregators, Aggregator, AGGREGATORS)
    }
    for kind, _ in find_configurations(pl_fed.aggregators, PreAggregator, {}):
        aggregators[f"pre-aggregator {kind.__name__}"] = Chain([kind()], Mean())
    for name, aggregator in aggregators.items():
        yield (
            name,
            describe_unfit_aggregator(aggregator),
            describe_unfit_aggregator(aggregator, BUCKETS),
        )


def sampler_rows():
    """Yield samplers with their refusal."""
    settings = DifferentialPrivacy(clip_norm=1.0, delta=1e-5, noise_multiplier=1.0)
    for kind, _ in find_configurations(pl_fed.samplers, Sampler, {}):
        sampler = kind()
        yield kind.__name__, try_refusal(find_participation, settings, sampler, 20)


def attack_rows():
    """Yield kinds of attacks with their refusal."""
    yield "attack on data", describe_unfit_adversary(Adversary(RandomLabels(), fraction=0.2), False)
    for options in (
        {"knowledge": "all"},
        {"knowledge": "own"},
        {"knowledge": "own", "redraw": True},
    ):
        adversary = Adversary(SignFlipping(), fraction=0.2, **options)
        yield named("attack on uploads", options), describe_unfit_adversary(adversary, False)
    own = Adversary(SignFlipping(), fraction=0.2, knowledge="own")
    yield "attack on uploads, cohorts of fixed size", describe_unfit_adversary(own, True)
    by_size = Adversary(ALittleIsEnough(), fraction=0.2, knowledge="own")
    yield (
        "attack on uploads, factor by the size of the cohort",
        describe_unfit_adversary(by_size, False),
    )


def option_rows():
    """Yield other options with their refusal."""
    for mode in ("none", [0.5, 0.5], "channel", "feature"):
        data = shared_out(classes([5, 5]), normalize=mode)
        yield f"data.normalize: {mode}", describe_shared_quantity(data, FOR)
    data = shared_out(classes([5, 5]), root_samples=2)
    yield "data.root_samples: 2", describe_shared_quantity(data, FOR)
    data = shared_out(classes([5, 5]), transforms=[nn.Identity()])
    yield "data.transforms", describe_shared_quantity(data, FOR)
    for name, source in SOURCES.items():
        yield name, describe_shared_quantity(FederatedData(source), FOR)
    for monitor in ("privacy/epsilon", "val/global/accuracy", "train/loss"):
        refusal = try_refusal(check_private_monitors, Monitoring(monitor))
        yield f"callback or schedule that monitors {monitor}", refusal


_COLUMNS = {"target": "label", "client": "owner", "one_hot": ["animal"]}
_VALUES = {"label": ["no", "yes"], "animal": ["cat", "dog"]}
SOURCES = {
    "Table with categories of the file": Table("a.csv", **_COLUMNS),
    "Table with given `categories`": Table("a.csv", **_COLUMNS, categories=_VALUES),
    "ImageFolder": ImageFolder("animals"),
    "ImageFolder with given `classes`": ImageFolder("animals", classes=["cat", "dog"]),
    "Shakespeare": Shakespeare(),
    "Shakespeare with given `characters`": Shakespeare(characters="abc"),
}


class Sentences:
    """The sentences of the refusals: equal ones, but for a name and states, have one number."""

    def __init__(self):
        self.numbers = {}

    def cell(self, name, refusal):
        """Return the text of a cell."""
        if refusal is None:
            return "private"
        sentence = re.sub(rf"\b{re.split('[, ]', name)[0]}\b", "NAME", refusal)
        states = re.search(r"states (?:of clients )?\(([\w., ]+)\)", sentence)
        if states:
            sentence = sentence.replace(f"({states[1]})", "(STATES)")
        number = self.numbers.setdefault(sentence, len(self.numbers) + 1)
        return f"refused ({number})" + (f": {states[1]}" if states else "")

    def lines(self):
        return [f"{number}. {sentence}" for sentence, number in self.numbers.items()]


def make_table():
    """Return the tables in Markdown, and the sentences of the refusals."""
    sentences = Sentences()
    lines = []
    for head, rows in (
        (("algorithm", "Poisson, or no amplification", "cohorts of fixed size"), algorithm_rows()),
        (("aggregator", "one sum", "with `buckets`"), aggregator_rows()),
        (("sampler", "with privacy"), sampler_rows()),
        (("adversary", "with privacy"), attack_rows()),
        (("other option", "with privacy"), option_rows()),
    ):
        lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for name, *refusals in rows:
            cells = [sentences.cell(name, refusal) for refusal in refusals]
            lines.append(f"| {' | '.join([name, *cells])} |")
        lines.append("")
    lines += [
        "The sentences, in which NAME is the class of the row, and STATES are those of its cell:",
        "",
    ]
    return "\n".join(lines + sentences.lines())


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
