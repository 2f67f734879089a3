"""Client states between rounds: rows in memory, and on disk beyond a budget."""

from pl_fed.state.disk_rows import DiskRows as DiskRows
from pl_fed.state.memory import free_memory as free_memory
from pl_fed.state.memory import keep_freed_memory as keep_freed_memory
from pl_fed.state.memory import total_memory as total_memory
from pl_fed.state.row_table import RowTable as RowTable
from pl_fed.state.store import ClientStore as ClientStore
from pl_fed.state.store import check_saved as check_saved
from pl_fed.state.store import check_states as check_states
from pl_fed.state.store import select_clients as select_clients
