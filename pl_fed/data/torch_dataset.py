"""Your own data from a map-style torch ``Dataset``."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch.utils.data import Dataset

from pl_fed.arguments import check_choice, check_integers
from pl_fed.data.batch_roles import BatchRoles
from pl_fed.data.collation import PaddingCollation
from pl_fed.data.dataset_reading import read_data_sets
from pl_fed.data.reading_options import ReadingOptions
from pl_fed.data.source import TEST, TRAIN, VAL, Arrays, DataSource


class TorchDataset(DataSource):
    """Torch data set: your own data from a map-style ``torch.utils.data.Dataset``.

    Each sample is read once, into tensors of the same types. A data set that draws at random from
    the global generators of torch, numpy or python is read again for each training minibatch, under
    seeds that depend on round and client. Validation and test samples are drawn once.

    A sample is a tuple, such as ``(x, y)``, or a dict. Its inputs and targets may be tensors,
    tuples or dicts. The net is called as ``net(x)``, ``net(*inputs)`` or ``net(**inputs)``.

    Args:
        dataset: The data set, or its training part.
        client: The owner of each sample, an integer or a text: the key or position of an entry of
            the sample, the name of an attribute of the data set with one owner per sample, or a
            list of the owners of all samples. ``None`` if samples have no owners, so that a
            partitioner is needed.
        inputs: The keys or positions of the inputs. ``None`` uses all entries besides client and
            target.
        target: The key or position of the target. ``None`` uses the last entry of a tuple, or the
            entry called labels, label, targets, target or y of a dict.
        labels: The class of each sample for partitioners, where the target is not a class id: the
            key or position of an entry of the sample, a list for all samples, or a function of a
            sample. ``None`` uses the target.
        client_fn: A function that returns the owner of a sample, instead of ``client``.
        collate_fn: Joins a list of samples into a batch. ``None`` uses torch's ``default_collate``.
        padding: The number that pads shorter samples to the longest one, for all entries or by the
            key of an entry.
        val: The official validation part.
        test: The official test part. Without one, each client's samples are cut by the fractions.
        num_classes: Number of classes. ``None`` uses the largest class id + 1.
        num_workers: Number of processes that read, ahead of the steps for own batches; 0 for the
            main one.
        redraw: Whether each training minibatch reads its samples again, so that random augmentation
            is drawn anew. ``None`` reads some samples twice, and draws anew if they differ.
        on_disk: Whether inputs are stored in a temporary file in ``TMPDIR`` and read from there,
            because they are larger than memory.
        batches: ``"own"`` gives the steps of a LightningModule the batches that ``collate_fn``
            makes, of any type and unchanged, each read when a step asks for it: see
            :class:`~pl_fed.tasks.OwnBatches`. ``None`` does so only if ``collate_fn`` does not
            return tensors with a row for each sample.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If an argument is out of range.

    Example:
        >>> samples = [{"x": 0.5, "site": "b", "y": 1}, {"x": 2.0, "site": "a", "y": 0}]
        >>> arrays = TorchDataset(samples, client="site").load()
        >>> arrays.inputs.tolist(), arrays.targets.tolist()
        ([0.5, 2.0], [1, 0])
        >>> arrays.client.tolist(), arrays.names
        ([1, 0], ['a', 'b'])
    """

    def __init__(
        self,
        dataset: Dataset,  # type: ignore[type-arg]  # jsonargparse takes no Dataset[Any]
        client: int | str | list[int] | list[str] | None = None,
        inputs: list[str] | list[int] | None = None,
        target: int | str | None = None,
        labels: int | str | list[int] | list[str] | Callable[[Any], Any] | None = None,
        client_fn: Callable[[Any], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        padding: float | dict[str, float] | None = None,
        val: Dataset | None = None,  # type: ignore[type-arg]
        test: Dataset | None = None,  # type: ignore[type-arg]
        num_classes: int | None = None,
        num_workers: int = 0,
        redraw: bool | None = None,
        on_disk: bool = False,
        batches: Literal["own"] | None = None,
    ) -> None:
        if batches is not None:
            check_choice(("own",), batches=batches)
        if num_classes is not None:
            check_integers(0, num_classes=num_classes)
        check_integers(0, num_workers=num_workers)
        entry = labels if isinstance(labels, int | str) else None
        listed = None if isinstance(labels, int | str) else labels
        self.roles = build_roles(client, client_fn, inputs, target, entry)
        self.collate_fn = choose_collation(collate_fn, padding)
        self.parts = {TRAIN: dataset, VAL: val, TEST: test}
        self.num_classes = num_classes
        own = batches == "own"
        self.options = ReadingOptions(redraw, on_disk, num_workers, own, listed)

    def load(self) -> Arrays:
        """Return all samples, read once.

        Raises:
            TypeError: If a data set is not map-style.
            ValueError: If a sample cannot be read, has no such entries, or differs in shape or
                type from the others.
        """
        data_sets = {part: data for part, data in self.parts.items() if data is not None}
        return read_data_sets(
            data_sets, self.roles, self.collate_fn, self.num_classes, self.options
        )


def build_roles(
    client: int | str | Sequence[Any] | None,
    client_fn: Callable[[Any], Any] | None,
    inputs: Sequence[str | int] | None,
    target: int | str | None,
    labels: int | str | None,
) -> BatchRoles:
    """Return the use of the entries of samples.

    Raises:
        TypeError: If ``inputs`` is no list, or ``client_fn`` is not callable.
        ValueError: If both ``client`` and ``client_fn`` are set.
    """
    check_callables(client_fn=client_fn)
    if client is not None and client_fn is not None:
        raise ValueError(
            f"Expected argument `client` to be left out with `client_fn` but got {client!r}."
        )
    if inputs is not None and not isinstance(inputs, list | tuple):
        raise TypeError(
            f"Expected argument `inputs` to be a list of entries but got {inputs!r}: write"
            f" [{inputs}]."
        )
    return BatchRoles(client if client_fn is None else client_fn, inputs, target, labels)


def choose_collation(
    collate_fn: Callable[[list[Any]], Any] | None, padding: float | dict[str, float] | None
) -> Callable[[list[Any]], Any] | None:
    """Return the function that joins samples; ``None`` for the default.

    Raises:
        TypeError: If ``collate_fn`` is not callable.
        ValueError: If both arguments are set.
    """
    check_callables(collate_fn=collate_fn)
    if padding is None:
        return collate_fn
    if collate_fn is not None:
        raise ValueError(
            "Expected argument `padding` to be left out with `collate_fn`, which pads by itself,"
            f" but got {padding!r}."
        )
    return PaddingCollation(padding)


def check_callables(**arguments: object) -> None:
    """Raise ``TypeError`` unless all arguments are callable, or ``None``."""
    for name, value in arguments.items():
        if value is not None and not callable(value):
            raise TypeError(f"Expected argument `{name}` to be a function but got {value!r}.")
