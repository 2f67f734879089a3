"""Reading of a map-style data set with minibatches of its own, of any type."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import ConcatDataset

from pl_fed.data.batch_roles import BatchRoles
from pl_fed.data.reading_options import ReadingOptions
from pl_fed.data.redraw import explain_errors, name_of, spaced_positions
from pl_fed.data.sample_owners import list_parts, number_labels, number_sample_owners
from pl_fed.data.sample_structure import to_entries
from pl_fed.data.source import Arrays
from pl_fed.nets.fingerprints import Fingerprints
from pl_fed.random import fork_all_generators
from pl_fed.tasks.own_batches import Collate, OwnBatches


def read_own_batches(
    data_sets: Mapping[int, Any],
    roles: BatchRoles,
    collates: Mapping[int, Collate],
    options: ReadingOptions,
    reason: str = "",
) -> Arrays:
    """Return a row for each sample; steps read the data set's own batches by these rows.

    Samples are read here only if they hold their owners or labels, and a few to find out whether
    they are drawn at random.

    Args:
        data_sets: Map-style data sets by their official part. A single one has no official part.
        roles: The owner and the label of a sample; its inputs and target are left out.
        collates: Joins samples into a batch, for each official part.
        options: How samples are read.
        reason: Why samples are no tensors; empty if the user asked for own batches.

    Raises:
        ValueError: If a sample cannot be read or joined, or does not hold its owner or label.
    """
    pieces = list(data_sets.values())
    dataset = pieces[0] if len(pieces) == 1 else ConcatDataset(pieces)
    name = " and ".join(dict.fromkeys(map(name_of, pieces)))
    with fork_all_generators() as seed, explain_errors(name):
        seed(0)
        owners, labels = _read_owners_and_labels(dataset, roles, options.labels)
        random = [data_sets[part] for part in data_sets if _draws(data_sets[part], collates[part])]
    starts = [0, *accumulate(map(len, pieces))]
    collate = {start: collates[part] for start, part in zip(starts, data_sets)}
    batches = OwnBatches(dataset, collate, bool(random), reason, options.num_workers)
    redraws = options.redraw is not False and any(piece is pieces[0] for piece in random)
    draws = ""
    if random and not _repeats(batches, starts):
        draws = f"{name} with a generator or a memory of its own"
        rank_zero_warn(
            f"{name} gives other samples when it is read again with the same seeds, because it"
            " draws from a generator of its own: two equal runs will differ. Draw from the global"
            " generators of torch, numpy or random."
        )
    if reason:
        rank_zero_info(
            f"The batches of {name} are no tensors with a row for each sample alone: steps get them"
            " as its `collate_fn` makes them."
        )
    client, names = number_sample_owners(dataset, owners, roles)
    rows = batches.rows()
    return Arrays(
        inputs=rows,
        targets=torch.zeros(len(rows)),
        client=client,
        split=list_parts(data_sets),
        names=names,
        labels=labels,
        redraw=batches.redraw if redraws else None,
        entries=batches,
        ordered_draws=draws,
    )


def _read_owners_and_labels(
    dataset: Any, roles: BatchRoles, labels: Callable[[Any], Any] | Sequence[Any] | None
) -> tuple[Sequence[Any] | None, torch.Tensor | None]:
    """Return the owners and the labels of all samples; ``None`` for missing ones.

    Samples are read once, and only if they hold one of both.
    """
    if labels is None and roles.labels is not None:
        labels = partial(_read_entry, name=roles.labels)
    in_samples = callable(roles.client) or isinstance(roles.client, int)
    if isinstance(roles.client, str):
        in_samples = len(dataset) > 0 and roles.owner(dataset[0]) is not None
    owners: list[Any] = []
    values: list[Any] = []
    if in_samples or callable(labels):
        for position in range(len(dataset)):
            sample = _read_sample(dataset, position)
            if in_samples:
                owners.append(roles.owner(sample))
            if callable(labels):
                values.append(labels(sample))
    found = values if callable(labels) else labels
    numbers = None if found is None else number_labels(found, len(dataset))
    return owners if in_samples else None, numbers


def _read_sample(dataset: Any, position: int) -> Any:
    """Return a sample; an error has a note of its position."""
    try:
        return dataset[position]
    except Exception as error:
        error.add_note(f"sample {position}")
        raise


def _read_entry(sample: Any, name: Any) -> int | str:
    """Return the entry of a sample that is its label.

    Raises:
        ValueError: If there is none.
    """
    try:
        entry = to_entries(sample)[name]
        return entry if isinstance(entry, str) else int(entry)
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            "Expected argument `labels` to be the key or position of an integer, or a text, in each"
            f" sample but got {name!r} for {type(sample).__name__}."
        ) from error


def _draws(dataset: Any, collate: Collate) -> bool:
    """Return whether samples, or a batch of them, differ when they are read again."""
    positions = spaced_positions(len(dataset))
    if not positions:
        return False
    first, second = (
        Fingerprints({}).compute(
            collate([_read_sample(dataset, position) for position in positions])
        )
        for _ in range(2)
    )
    return first != second


def _repeats(batches: OwnBatches, starts: Sequence[int]) -> bool:
    """Return whether batches of each part are the same when they are read again under their keys.

    Parts may have samples of other structures, as training and ranking samples of a recommender.
    """
    rows, prints = batches.rows(), []
    for _ in range(2):
        batches.forget()
        joined = [
            batches.join(part[spaced_positions(len(part))], None)
            for part in rows.tensor_split([*starts[1:]])
            if len(part)
        ]
        prints.append(Fingerprints({}).compute(joined))
    return prints[0] == prints[1]
