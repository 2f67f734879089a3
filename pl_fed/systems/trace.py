"""Trace files: the measured speed, bandwidth and availability of clients, also by round."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pl_fed.systems.settings import COLUMNS, PATH, describe_range, is_valid
from pl_fed.text import escape_controls, read_csv

_NAME = f"`{PATH}.trace`"
_ALLOWED = ("client", "round", *COLUMNS)


@dataclass(frozen=True)
class Trace:
    """Trace: the numbers of all clients by round, from a CSV file.

    Attributes:
        starts: For each row of the file, client · span + first round, int64 [rows], ascending.
        span: One more than the last first round of a row.
        columns: The numbers of each row by column, float64 [rows] each.
    """

    starts: Tensor
    span: int
    columns: Mapping[str, Tensor]

    @classmethod
    def read(
        cls,
        path: str | Path,
        num_clients: int,
        owners: Sequence[Sequence[str]],
        num_held_out: int = 0,
    ) -> "Trace":
        """Read a file, and check it against the clients.

        Args:
            path: The CSV file: see :class:`Systems`.
            num_clients: Number of clients of the federation.
            owners: Names of the owners of each client's samples, also of held-out clients; may be
                empty.
            num_held_out: Number of held-out clients, numbered after the others. They may have rows,
                which are not used.

        Raises:
            ValueError: If the file cannot be read, lacks a column or a client, names an unknown
                client or column, or a number is out of range.
        """
        rows = _read_rows(Path(path))
        names = [name for name in COLUMNS if name in rows[0]]
        ids = {own[0]: client for client, own in enumerate(owners) if len(own) == 1}
        num_all = num_clients + num_held_out
        written = {name.removeprefix("'"): client for name, client in ids.items()}  # by hand
        ids = {**{str(client): client for client in range(num_all)}, **written, **ids}
        starts: dict[tuple[int, int], list[float]] = {}
        for line, row in enumerate(rows, 2):
            if row["client"] not in ids:
                raise ValueError(
                    f"Expected column `client` of {_NAME} to name clients, by ids of 0 to"
                    f" {num_all - 1} or by names of owners, but got"
                    f" {escape_controls(row['client'])!r} in line {line}: remove the line."
                )
            start = ids[row["client"]], _read_round(row.get("round", "0"), line)
            if start in starts:
                raise ValueError(
                    f"Expected {_NAME} to have one row for each client and round but got a second"
                    f" one of client {escape_controls(row['client'])} and round {start[1]} in line"
                    f" {line}: remove it."
                )
            starts[start] = [_read_number(name, row[name], line) for name in names]
        missing = [client for client in range(num_clients) if (client, 0) not in starts]
        if missing:
            raise ValueError(
                f"Expected {_NAME} to have a row of round 0 for each of {num_clients} clients but"
                f" got none for clients {missing[:5]}{', …' if missing[5:] else ''}: add them."
            )
        order = sorted(start for start in starts if start[0] < num_clients)
        span = 1 + max(round for _, round in order)
        table = torch.tensor([starts[start] for start in order], dtype=torch.float64)
        return cls(
            torch.tensor([client * span + round for client, round in order]),
            span,
            {name: table[:, place].contiguous() for place, name in enumerate(names)},
        )

    def select(self, clients: Tensor, round: int) -> dict[str, Tensor]:
        """Return the numbers of clients in a round by column, float64 [clients] each.

        Args:
            clients: Ids, int64 [clients].
            round: The round, from 0.
        """
        wanted = clients * self.span + min(round, self.span - 1)
        rows = torch.searchsorted(self.starts, wanted, right=True) - 1
        return {name: numbers[rows] for name, numbers in self.columns.items()}


def _read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a trace file with valid columns."""
    try:
        rows = read_csv(path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"Expected {_NAME} to be a CSV file that can be read but got {path}: {error}."
        ) from None
    names = list(rows[0]) if rows else []
    unknown = [name for name in names if name not in _ALLOWED]
    if "client" not in names or unknown or not set(names) & set(COLUMNS):
        got = ", ".join(map(escape_controls, names)) or "no rows"
        raise ValueError(
            f"Expected {_NAME} to have a column `client`, perhaps a column `round`, and any of the"
            f" columns {', '.join(COLUMNS)} but got {got} in {path.name}: rename the columns."
        )
    return rows


def _read_round(cell: str, line: int) -> int:
    """Return the first round of a row."""
    if not cell.isdecimal() or int(cell) >= 2**31:
        raise ValueError(
            f"Expected column `round` of {_NAME} to be integers from 0 but got"
            f" {escape_controls(cell)!r} in line {line}."
        )
    return int(cell)


def _read_number(name: str, cell: str, line: int) -> float:
    """Return the number in a cell."""
    try:
        number = float(cell)
    except ValueError:
        number = float("nan")
    if not is_valid(name, number):
        raise ValueError(
            f"Expected column `{name}` of {_NAME} to be {describe_range(name)} but got"
            f" {escape_controls(cell)!r} in line {line}."
        )
    return number
