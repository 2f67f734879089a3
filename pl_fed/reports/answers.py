"""Answers of a report: tables that each answer one question about the runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pl_fed.reports import (
    attributes,
    communication,
    comparisons,
    defences,
    equality,
    group_gaps,
    systems,
    worst_clients,
)
from pl_fed.reports.group import Group


@dataclass(frozen=True)
class Answer:
    """The answer to a question: a table and its explanation.

    Attributes:
        name: The name of its CSV file, without suffix.
        question: The question, as a title.
        note: An explanation for readers.
        rows: The rows of the table by column; ``group`` is the number of a group.
    """

    name: str
    question: str
    note: str
    rows: Sequence[Mapping[str, Any]]


def find_answers(groups: Sequence[Group]) -> list[Answer]:
    """Return the answers that the runs give; questions without data are left out."""
    return [answer for answer in _candidates(groups) if answer.rows]


def _candidates(groups: Sequence[Group]) -> Iterator[Answer]:
    first = groups[0].title
    yield Answer(
        "differences",
        f"How do the groups differ from {first}?",
        "Differences of the same clients with the same seed and data: the mean, and a 95 % interval"
        " of 1.96 standard errors over these pairs. The interval is about further clients, not"
        " about further seeds.",
        list(comparisons.compare_to_first(groups)),
    )
    yield Answer(
        "local",
        "Is local training enough, and for whom?",
        "Differences from local training of the same clients with the same seed and data. Where"
        " few clients gain, federation does not pay. Mean gain and mean loss are over the clients"
        " that gain and lose; the largest loss is that of one client. Correlations are Spearman's,"
        " of a client's gain: a negative one says that clients with few training samples, or with"
        " poor local models, gain most. The one with local results is below 0 by chance alone where"
        " test sets are small: luck in the local result counts as a loss. Figures of gains are"
        " means over the seeds; those of losses over the seeds in which a client loses.",
        list(comparisons.compare_to_local(groups)),
    )
    yield Answer(
        "equality",
        "How equal are the clients?",
        "Test results of the benign clients by figures of fairness, from per_client.csv; means over"
        " the seeds. Worst k %: the mean over so many clients. Gini, coefficient of variation (cv)"
        " and entropy are about shares of a sum: they are undefined, and left out, where the result"
        " of a client is negative, or those of all clients are 0. Clients whose metric is undefined"
        " are left out, as in all means over clients. Loss gap: the largest minus the smallest mean"
        " loss of a client.",
        list(equality.measure_equality(groups)),
    )
    yield Answer(
        "own_model",
        "Which clients are worse off with their own model than with the global one?",
        "Benign clients, over all runs of a group. A client that never took part has an untrained"
        " model of its own.",
        list(comparisons.compare_own_to_global(groups)),
    )
    yield Answer(
        "attacked",
        "Who loses under an attack?",
        "The same benign clients with the same seed, with and without Byzantine clients.",
        list(comparisons.compare_to_clean(groups)),
    )
    yield Answer(
        "defences",
        "What does a defence cost without an attack, and gain under one?",
        "Differences of means from the same federation with the plain mean, over the seeds that"
        " both have.",
        list(defences.measure_defences(groups)),
    )
    yield Answer(
        "worst_clients",
        "Why are the worst clients the worst?",
        "Spearman's rank correlation of a client's result with its properties, in [−1, 1], over the"
        " benign clients and all runs. Distance: total variation distance of a client's classes"
        " from the overall distribution, on test samples. Near 0, a property explains nothing.",
        list(worst_clients.explain_results(groups)),
    )
    yield Answer(
        "communication",
        "How many rounds and uploads does a level take?",
        "The first validated round at which the mean over clients reaches 95 % of the best value of"
        " all groups. Bytes are those of the uploaded models alone. Seconds are those of the"
        " simulated clock of `federation.systems`.",
        list(communication.measure_communication(groups)),
    )
    yield Answer(
        "participation",
        "Which clients are left out, and are they always the same?",
        "Rounds in which a benign client's upload counted; means over the seeds. Jain's index is 1"
        " if all clients took part equally often. The correlation is Spearman's, of a client's"
        " rounds with its test result. The last column counts the clients that are in the lowest"
        " quarter of rounds in every seed: by a trace, as each seed draws its own speeds.",
        list(systems.measure_participation(groups)),
    )
    yield Answer(
        "group_gaps",
        "Is the model fair to groups of samples?",
        "Gaps between the groups of `data.dataset.group` on test samples: the largest minus the"
        " smallest rate of the groups, in the largest gap of a class against all others. Over all"
        " samples, of benign clients together; then the means over clients of each client's own"
        " gap. A group without samples of a class has no true positive rate: the gap of such a"
        " client is undefined, not 0, and the last columns count these clients. Means over the"
        " seeds.",
        list(group_gaps.measure_gaps(groups)),
    )
    yield Answer(
        "group_accuracy",
        "Which groups of samples are served worst?",
        "Accuracy on the test samples of each group, over all samples of benign clients; means over"
        " the seeds. Clients: benign clients with samples of the group, in the first seed.",
        list(group_gaps.measure_groups(groups)),
    )
    yield Answer(
        "attributes",
        "Are there gaps between groups of clients?",
        "Means over the benign clients by a column of text in per_client.csv.",
        list(attributes.compare_attributes(groups)),
    )
