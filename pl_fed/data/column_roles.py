"""Column roles: the use of each column of a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ROLES = ("target", "client", "split", "inputs", "exclude", "one_hot", "ids", "group")


def quote_hint(values: Any) -> str:
    """Return the remedy for names that YAML reads as booleans; else an empty text.

    Example:
        >>> quote_hint([False])
        ': put the names yes, no, on and off in quotes, because YAML reads them as booleans'
    """
    is_read = isinstance(values, list | tuple) and any(isinstance(v, bool) for v in values)
    text = ": put the names yes, no, on and off in quotes, because YAML reads them as booleans"
    return text if is_read else ""


@dataclass(frozen=True)
class ColumnRoles:
    """Column roles: the use of each column of a table.

    Attributes:
        target: The column of the targets, or the columns of several real-valued targets.
        client: The column of the owner of each sample. It may be an input as well, if ``inputs``,
            ``one_hot`` or ``ids`` name it.
        inputs: The columns of the inputs; ``None`` for all columns without another role.
        exclude: Columns that ``inputs=None`` leaves out.
        one_hot: Input columns of categories that become one 0/1 input per category.
        ids: Input columns of categories that become ids, for embeddings.
        split: The column of the official part of each sample.
        classes: Whether the target is a class; ``None`` for yes unless it is real-valued.
        group: The column of the group of each sample, for group fairness. It is an input only if
            ``inputs``, ``one_hot`` or ``ids`` name it.

    Raises:
        TypeError: If an argument is no name or list of names.
        ValueError: If a column has two roles, or is named twice.
    """

    target: str | Sequence[str]
    client: str | None = None
    inputs: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    one_hot: Sequence[str] | None = None
    ids: Sequence[str] | None = None
    split: str | None = None
    classes: bool | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        """Check the names."""
        for role in ("client", "split", "group"):
            name = getattr(self, role)
            if name is not None and not isinstance(name, str):
                raise TypeError(
                    f"Expected argument `{role}` to be the name of a column but got {name!r}"
                    f"{quote_hint([name])}."
                )
        for role in ("target", "inputs", "exclude", "one_hot", "ids"):
            self._check_list(role)
        if not self.targets:
            raise ValueError("Expected argument `target` to name a column but got an empty list.")
        categories = self._columns("one_hot", "ids")
        groups = (
            ("target", "client", "split", "exclude"),
            ("target", "split", "exclude", "inputs"),  # the owner may be an input
            ("one_hot", "ids"),
            ("target", "split", "group"),  # the group may be an input, the owner, or excluded
        )
        for roles in groups:
            self._check_disjoint(roles)
        for role in ("target", "split", "exclude"):
            for name in self._columns(role):
                if name in categories:
                    raise ValueError(
                        f"Expected argument `{role}` to name a column without another use but got"
                        f" {name!r}, which is also in `one_hot` or `ids`."
                    )
        if len(self.targets) > 1 and self.classes:
            raise ValueError(
                "Expected argument `classes` to be left out for several targets but got True: set"
                " `target` to a single column."
            )

    @property
    def targets(self) -> list[str]:
        """The columns of the targets."""
        return self._columns("target")

    def input_columns(self, names: Sequence[str]) -> list[str]:
        """Return the columns of the inputs, in the order of ``inputs`` or of the table."""
        if self.inputs is None:
            used = {*self._columns("target", "client", "split", "exclude", "group")}
            used -= {*self._columns("one_hot", "ids")}
            return [name for name in names if name not in used]
        extra = [name for name in self._columns("one_hot", "ids") if name not in self.inputs]
        return [*self.inputs, *extra]

    def list_columns(self) -> set[str]:
        """Return the columns that an argument names."""
        return {*self._columns(*_ROLES)}

    def name_columns(self) -> list[str]:
        """Return the columns of names: owners, parts, groups, categories and classes."""
        targets = [] if self.classes is False or len(self.targets) > 1 else self.targets
        return [*self._columns("client", "split", "group", "one_hot", "ids"), *targets]

    def real_columns(self, categories: Mapping[str, Any] | None) -> list[str]:
        """Return the target if it is real-valued unless its column holds text or integers.

        Args:
            categories: The given values of columns; a target with given values holds classes.
        """
        is_open = self.classes is None and len(self.targets) == 1
        return [name for name in self.targets if is_open and name not in (categories or {})]

    def check_columns(self, names: Sequence[str]) -> None:
        """Raise ``ValueError`` if a table lacks a column, or has two columns of one name."""
        listed = ", ".join(map(str, names)) or "none"
        doubled = [name for name in names if names.count(name) > 1]
        if doubled:
            raise ValueError(
                f"Expected a table to name each column once but got {doubled[0]!r} twice: rename it"
            )
        for role in _ROLES:
            for name in self._columns(role):
                if name not in names:
                    raise ValueError(
                        f"Expected argument `{role}` to name a column but got {name!r}, and none of"
                        f" this name (columns: {listed})"
                    )
        if not self.input_columns(names):
            raise ValueError(f"Expected a column of inputs but got none (columns: {listed})")

    def _columns(self, *roles: str) -> list[str]:
        columns: list[str] = []
        for role in roles:
            value = getattr(self, role)
            columns += [value] if isinstance(value, str) else value or []
        return columns

    def _check_list(self, role: str) -> None:
        value = getattr(self, role)
        if isinstance(value, str) and role != "target":
            raise TypeError(
                f"Expected argument `{role}` to be a list of columns but got {value!r}: write"
                f" [{value}]."
            )
        names = [value] if isinstance(value, str) else value
        is_list = isinstance(names, list | tuple) or (names is None and role != "target")
        if not is_list or not all(isinstance(name, str) for name in names or ()):
            raise TypeError(
                f"Expected argument `{role}` to be a list of names of columns but got {value!r}"
                f"{quote_hint(names)}."
            )

    def _check_disjoint(self, roles: Sequence[str]) -> None:
        uses: dict[str, str] = {}
        for role in roles:
            for name in self._columns(role):
                if name in uses:
                    raise ValueError(
                        f"Expected argument `{role}` to name a column without another use but got"
                        f" {name!r}, which is also in `{uses[name]}`."
                    )
                uses[name] = role
