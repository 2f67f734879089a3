"""The layout of small tables that all processes join by one collective of numbers."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pl_fed.distributed.processes import Processes

TableName = tuple[str, str]
"""The kind and the name of a table."""


class TableLayout:
    """Table layout: the tables' names and dtypes on which all processes have agreed.

    The processes agree by pickled objects when any process has a new name or dtype: in the first
    round, and seldom later. Otherwise a join sends one float64 tensor, a page of each process, and
    no object. Its first row has a flag (the process has tables outside the layout), and for each
    table of the layout whether the process has it. Each further row has the values of a client.
    float64 represents all values of smaller floats, of int8 and of bool.

    Attributes:
        dtypes: The dtype of each table, by name.
    """

    def __init__(self) -> None:
        self.dtypes: dict[TableName, torch.dtype] = {}

    def contains(self, tables: Mapping[TableName, Tensor]) -> bool:
        """Return whether the layout represents these tables without a loss."""
        return all(
            name in self.dtypes
            and torch.promote_types(self.dtypes[name], table.dtype) == self.dtypes[name]
            for name, table in tables.items()
        )

    def agree(self, processes: Processes, tables: Mapping[TableName, Tensor]) -> None:
        """Add the names and dtypes of all processes' tables, in the order of the ranks."""
        own = {name: table.dtype for name, table in tables.items()}
        for dtypes in processes.gather_objects(own):
            for name, dtype in dtypes.items():
                self.dtypes[name] = torch.promote_types(self.dtypes.get(name, dtype), dtype)

    def write_page(
        self, tables: Mapping[TableName, Tensor], num_clients: int, device: torch.device
    ) -> Tensor:
        """Return this process's page, float64 [1 + clients, 1 + tables].

        Args:
            tables: The tables of this process's clients, [clients] each.
            num_clients: Number of this process's clients.
            device: The device of the page.
        """
        head = [float(not self.contains(tables)), *(float(name in tables) for name in self.dtypes)]
        page = torch.zeros(1 + num_clients, len(head), dtype=torch.float64, device=device)
        page[0] = torch.tensor(head, dtype=torch.float64)
        for column, name in enumerate(self.dtypes, 1):
            if name in tables:
                page[1:, column] = tables[name].to(device)
        return page
