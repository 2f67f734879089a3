"""The store of client states: equal rows from memory and disk, no memory until written."""

import copy
import ctypes
import errno
import io
import os
import resource
from unittest.mock import Mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from tables import table_test

import pl_fed.state.store
from pl_fed.state import ClientStore, free_memory, keep_freed_memory
from pl_fed.state.memory import control_group_memory

CPU = torch.device("cpu")


@pytest.fixture(params=["memory", "disk"])
def storage_folder(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "states"


def ids(*clients):
    return torch.tensor(clients)


def test_unwritten_client_has_the_default(storage_folder):
    default = torch.tensor([1.0, 2.0])
    store = ClientStore(5, {"personal": default}, storage_folder)
    assert store.read("personal", ids(0, 4)).tolist() == [[1.0, 2.0]] * 2
    default.zero_()
    assert store.read("personal", ids(3)).tolist() == [[1.0, 2.0]], "the default is a copy"


def test_rows_are_read_in_the_requested_order(storage_folder):
    store = ClientStore(5, {"a": torch.zeros(2), "b": torch.ones(1)}, storage_folder)
    store.write("a", ids(3, 1), torch.tensor([[3.0, 3.5], [1.0, 1.5]]))
    assert store.read("a", ids(1, 0, 3)).tolist() == [[1.0, 1.5], [0.0, 0.0], [3.0, 3.5]]
    assert store.read("b", ids(1, 3)).tolist() == [[1.0], [1.0]], "names are apart"
    store.write("a", ids(1), torch.tensor([[7.0, 7.5]]))
    assert store.read("a", ids(1)).tolist() == [[7.0, 7.5]]


def test_reads_are_copies(storage_folder):
    store = ClientStore(3, {"a": torch.zeros(2)}, storage_folder)
    store.write("a", ids(1), torch.ones(1, 2))
    for clients in (ids(0), ids(1), ids(0, 1)):
        store.read("a", clients).fill_(9.0)
    assert store.read("a", ids(0, 1)).tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_writes_are_copies(storage_folder):
    store = ClientStore(3, {"a": torch.zeros(2)}, storage_folder)
    rows = torch.ones(1, 2)
    store.write("a", ids(1), rows)
    rows.zero_()
    assert store.read("a", ids(1)).tolist() == [[1.0, 1.0]]


def test_rows_need_no_gradient(storage_folder):
    store = ClientStore(3, {"a": torch.zeros(2, requires_grad=True)}, storage_folder)
    store.write("a", ids(1), torch.ones(1, 2, requires_grad=True) * 2)
    assert not store.read("a", ids(0, 1)).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rows_of_every_dtype_are_read_bit_for_bit(storage_folder, dtype):
    rows = torch.randn(4, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    store = ClientStore(9, {"a": torch.full((33,), 0.1, dtype=dtype)}, storage_folder)
    store.write("a", ids(8, 2, 5, 0), rows)
    stored = store.read("a", ids(8, 2, 5, 0))
    assert stored.dtype == dtype
    assert torch.equal(stored, rows)
    assert torch.equal(store.read("a", ids(1)), torch.full((1, 33), 0.1, dtype=dtype))


def test_empty_rows_are_stored(storage_folder):
    """A net without running statistics has empty rows."""
    store = ClientStore(3, {"statistics": torch.empty(0), "a": torch.zeros(1)}, storage_folder)
    assert store.read("statistics", ids(0, 2)).shape == (2, 0)
    store.write("statistics", ids(1), torch.empty(1, 0))
    assert store.read("statistics", ids(1, 0)).shape == (2, 0)
    loaded = ClientStore(3, {"statistics": torch.empty(0), "a": torch.zeros(1)}, storage_folder)
    loaded.load_state_dict(store.state_dict())
    assert loaded.read("statistics", ids(1)).shape == (1, 0)


def test_store_without_names_is_loaded(storage_folder):
    store = ClientStore(3, {}, storage_folder)
    store.load_state_dict(store.state_dict())


def written_store(storage_folder):
    store = ClientStore(6, {"a": torch.arange(3.0), "b": torch.zeros(1).double()}, storage_folder)
    store.write("a", ids(4, 1), torch.tensor([[4.0, 4.1, 4.2], [1.0, 1.1, 1.2]]))
    store.write("b", ids(2), torch.tensor([[0.1]]).double())
    return store


def test_state_dict_round_trip_through_a_file(storage_folder, tmp_path):
    store = written_store(storage_folder)
    torch.save(store.state_dict(), tmp_path / "state.ckpt")
    state = torch.load(tmp_path / "state.ckpt", weights_only=True)
    assert sum(len(rows) for rows in state["a"]["rows"]) == 2, "unwritten clients cost nothing"
    assert state["a"]["clients"].tolist() == [4, 1], "in the order of their first write"
    loaded = ClientStore(6, {"a": torch.zeros(3), "b": torch.ones(1).double()})
    loaded.write("a", ids(5), torch.ones(1, 3))  # loading removes this row
    loaded.load_state_dict(state)
    for name in ("a", "b"):
        all_clients = torch.arange(6)
        assert torch.equal(loaded.read(name, all_clients), store.read(name, all_clients))


def test_loading_leaves_an_earlier_state_dict_unchanged(storage_folder):
    store = written_store(storage_folder)
    state = store.state_dict()
    before = copy.deepcopy(state)
    other = ClientStore(6, {"a": torch.full((3,), 9.0), "b": torch.zeros(1).double()})
    store.load_state_dict(other.state_dict())
    assert_same_state(state, before)
    store.load_state_dict(state)
    store.load_state_dict(store.state_dict())
    assert_same_state(store.state_dict(), before)


def assert_same_state(state, other):
    for name in ("a", "b"):
        for key in ("default", "clients"):
            assert torch.equal(state[name][key], other[name][key])
        assert torch.equal(torch.cat(state[name]["rows"]), torch.cat(other[name]["rows"]))


@table_test(
    ("arguments", "words"),
    [
        ((6, {"a": torch.zeros(3)}), r"to be \['a'\] but got \['a', 'b'\]"),
        (
            (6, {"a": torch.zeros(4), "b": torch.zeros(1)}),
            "state 'a' to have rows of 4 numbers but got 3",
        ),
        (
            (4, {"a": torch.zeros(3), "b": torch.zeros(1)}),
            "state 'a' to have client ids from 0 to 3 but got 4",
        ),
    ],
)
def test_state_of_another_store_is_refused_and_changes_no_row(arguments, words):
    state = written_store(None).state_dict()
    other = ClientStore(*arguments)
    with pytest.raises(ValueError, match=words):
        other.load_state_dict(state)
    for name, default in arguments[1].items():
        all_clients = torch.arange(arguments[0])
        assert torch.equal(other.read(name, all_clients), default.expand(arguments[0], -1))


@pytest.mark.parametrize("created_in_inference_mode", [True, False])
@pytest.mark.parametrize("written_in_inference_mode", [True, False])
def test_store_works_across_inference_mode(
    storage_folder, created_in_inference_mode, written_in_inference_mode
):
    """Lightning evaluates in inference mode. Rows written there must be trainable later."""
    with torch.inference_mode(created_in_inference_mode):
        store = ClientStore(3, {"a": torch.zeros(2)}, storage_folder)
    with torch.inference_mode(written_in_inference_mode):
        store.write("a", ids(1), torch.ones(1, 2))
    with torch.inference_mode(not written_in_inference_mode):
        store.write("a", ids(1, 2), torch.full((2, 2), 2.0))
        assert store.read("a", ids(1, 0)).tolist() == [[2.0, 2.0], [0.0, 0.0]]
    state = store.state_dict()
    with torch.inference_mode(written_in_inference_mode):
        store.load_state_dict(state)
    row = store.read("a", ids(0, 1))
    row.requires_grad_().sum().backward()
    assert row.grad is not None


def resident_bytes():
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not free_memory(CPU), reason="no /proc")
def test_unwritten_rows_take_no_memory(storage_folder, monkeypatch):
    monkeypatch.setattr(pl_fed.state.store, "free_memory", lambda device: 1 << 50)
    before = resident_bytes()
    store = ClientStore(1000, {"personal": torch.zeros(1_000_000)}, storage_folder)  # 4 GB
    store.write("personal", ids(500), torch.ones(1, 1_000_000))
    assert float(store.read("personal", ids(500)).sum()) == 1e6
    assert float(store.read("personal", ids(499)).sum()) == 0
    assert store.on_disk == (storage_folder is not None)
    assert resident_bytes() - before < 100e6


def test_folder_of_a_store_stays_empty(tmp_path):
    store = ClientStore(10, {"a/b": torch.zeros(100), "personal": torch.zeros(100)}, tmp_path)
    store.write("a/b", ids(3), torch.ones(1, 100))
    assert list(tmp_path.iterdir()) == []
    assert float(store.read("a/b", ids(3)).sum()) == 100


def test_two_stores_may_share_a_folder(tmp_path):
    first, second = (ClientStore(2, {"a": torch.zeros(1)}, tmp_path) for _ in range(2))
    first.write("a", ids(0), torch.ones(1, 1))
    second.write("a", ids(0), torch.full((1, 1), 2.0))
    assert first.read("a", ids(0)).tolist() == [[1.0]]


# Placement of the rows


@pytest.mark.parametrize(("free_bytes", "on_disk"), [(160, False), (159, True), (1 << 40, False)])
def test_rows_go_to_disk_beyond_half_of_the_free_memory(monkeypatch, tmp_path, free_bytes, on_disk):
    monkeypatch.setattr(pl_fed.state.store, "free_memory", lambda device: free_bytes)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    store = ClientStore(10, {"a": torch.zeros(1), "b": torch.zeros(1)})  # 80 bytes
    for name in ("a", "b"):
        store.write(name, ids(7), torch.ones(1, 1))
        assert store.read(name, ids(7, 6)).tolist() == [[1.0], [0.0]]
    assert store.on_disk == on_disk
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("memory", "sharers", "on_disk"), [(0.5, 1, False), (0.5, 4, True), (40, 4, False)]
)
def test_processes_share_a_fraction_of_the_free_memory(monkeypatch, memory, sharers, on_disk):
    monkeypatch.setattr(pl_fed.state.store, "free_memory", lambda device: 100)
    store = ClientStore(10, {"a": torch.zeros(1)}, memory=memory, sharers=sharers)  # 40 bytes
    store.write("a", ids(7), torch.ones(1, 1))
    assert store.on_disk == on_disk


@pytest.mark.parametrize(
    ("memory", "blocks"), [(0, 0), (79, 1), (120, 3), (0.5, 3), (1.0, 5), (1 << 40, 5)]
)
def test_memory_budget_is_filled_block_by_block(monkeypatch, tmp_path, memory, blocks):
    """Rows of 20 bytes in blocks of two, nine of them; 240 bytes are free."""
    monkeypatch.setattr(pl_fed.state.row_table, "_BLOCK_BYTES", 40)
    monkeypatch.setattr(pl_fed.state.store, "free_memory", lambda device: 240)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    store = ClientStore(9, {"a": torch.zeros(5)}, memory=memory)
    rows = torch.arange(45.0).view(9, 5)
    order = torch.tensor([3, 8, 0, 5, 1, 7, 2, 6, 4])
    for clients in order.split(3):
        store.write("a", clients, rows[clients])
    assert torch.equal(store.read("a", torch.arange(9)), rows)
    assert len(store._tables["a"]._blocks) == blocks
    assert store.on_disk == (blocks < 5)


class Model(RuleBasedStateMachine):
    """A store with rows in memory and on disk against a plain dict."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(pl_fed.state.row_table, "_BLOCK_BYTES", 24)
        self.store = self.make_store()
        self.expected = {}

    def make_store(self):
        return ClientStore(12, {"a": torch.full((3,), -1.0)}, memory=49)  # two blocks of two rows

    def teardown(self):
        self.patch.undo()

    @rule(clients=st.lists(st.integers(0, 11), unique=True), value=st.integers(0, 9))
    def write(self, clients, value):
        rows = torch.tensor(clients).view(-1, 1) * 10.0 + value + torch.arange(3) / 4
        self.store.write("a", torch.tensor(clients, dtype=torch.int64), rows)
        self.expected |= dict(zip(clients, rows.tolist()))

    @rule(clients=st.lists(st.integers(0, 11)))
    def read(self, clients):
        self.store.prefetch(torch.tensor(clients, dtype=torch.int64))
        rows = self.store.read("a", torch.tensor(clients, dtype=torch.int64)).tolist()
        assert rows == [self.expected.get(client, [-1.0] * 3) for client in clients]

    @rule()
    def save_and_load(self):
        file = io.BytesIO()
        torch.save(self.store.state_dict(), file)
        file.seek(0)
        self.store = self.make_store()
        self.store.load_state_dict(torch.load(file, weights_only=True))


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)


def test_rows_that_do_not_fit_the_device_go_to_the_cpu(monkeypatch):
    """The device "meta" replaces a GPU: its tensors have a place and no memory."""
    free = {"meta": 0, "cpu": 1 << 40}
    monkeypatch.setattr(pl_fed.state.store, "free_memory", lambda device: free[device.type])
    store = ClientStore(10, {"a": torch.zeros(1, device="meta")})
    store.write("a", ids(7), torch.ones(1, 1))
    assert not store.on_disk
    assert store._tables["a"].pieces()[0].tolist() == [[1.0]], "the row is in main memory"
    assert store.read("a", ids(7)).device.type == "meta"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_full_disk_raises_an_error_and_keeps_the_store(monkeypatch, tmp_path, number):
    store = ClientStore(10, {"a": torch.zeros(1 << 18)}, tmp_path)
    store.write("a", ids(1), torch.ones(1, 1 << 18))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", Mock(side_effect=OSError(number, "No room")))
        with pytest.raises(
            OSError,
            match=r"room for 2 rows of 1.0 MiB but got: No room: set `federation.storage.fol",
        ):
            store.write("a", ids(2, 3), torch.ones(2, 1 << 18))
    assert float(store.read("a", ids(2)).sum()) == 0, "nothing was written"
    store.write("a", ids(2), torch.ones(1, 1 << 18))
    assert float(store.read("a", ids(1, 2)).sum()) == 1 << 19


def test_partial_reads_and_writes_are_completed(monkeypatch, tmp_path):
    """The system may read or write fewer bytes than requested."""
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda file, to, at: preadv(file, [to[0][:5]], at))
    store = ClientStore(4, {"a": torch.zeros(9)}, tmp_path)
    rows = torch.arange(18.0).view(2, 9)
    store.write("a", ids(3, 1), rows)
    assert torch.equal(store.read("a", ids(3, 1)), rows)


def test_free_memory_is_between_a_mebibyte_and_a_pebibyte():
    assert 1 << 20 < free_memory(CPU) < 1 << 50


def write_group(
    folder, *, limit, used, cached, names=("memory.max", "memory.current", "inactive_file")
):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {cached}\n")


FIRST_VERSION = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_memory_of_a_job_is_limited_by_all_enclosing_groups(tmp_path):
    own = tmp_path / "own"
    own.write_text("0::/slurm/job_7/step_0\n")
    write_group(tmp_path / "slurm" / "job_7" / "step_0", limit="max", used=90, cached=0)
    write_group(tmp_path / "slurm" / "job_7", limit=1000, used=700, cached=200)
    write_group(tmp_path / "slurm", limit=5000, used=900, cached=0)
    assert list(control_group_memory(own, tmp_path)) == [500, 4100]


@pytest.mark.parametrize("path", ["/", "/docker/0123"], ids=["own names", "the host's names"])
def test_memory_of_a_container_is_its_limit_minus_usage(tmp_path, path):
    own = tmp_path / "own"
    own.write_text(f"9:name=systemd:/\n4:memory:{path}\n3:cpu,cpuacct:/\n")
    write_group(tmp_path / "memory", limit=300, used=100, cached=0, names=FIRST_VERSION)
    assert list(control_group_memory(own, tmp_path)) == [200]


def test_group_beyond_its_limit_has_no_memory(tmp_path):
    (tmp_path / "own").write_text("0::/\n")
    write_group(tmp_path, limit=100, used=130, cached=0)
    assert list(control_group_memory(tmp_path / "own", tmp_path)) == [0]


def test_missing_groups_set_no_limit(tmp_path):
    assert not list(control_group_memory(tmp_path / "own", tmp_path))
    (tmp_path / "own").write_text("0::/user.slice\n")
    assert not list(control_group_memory(tmp_path / "own", tmp_path))


@pytest.mark.parametrize(("group_memory", "free"), [([], 1000), ([400, 600], 400), ([5000], 1000)])
def test_free_memory_is_the_minimum_of_machine_and_groups(monkeypatch, group_memory, free):
    monkeypatch.setattr("pl_fed.state.memory._machine_memory", lambda: 1000)
    monkeypatch.setattr("pl_fed.state.memory.control_group_memory", lambda: group_memory)
    assert free_memory(CPU) == free


def test_freed_memory_is_not_kept_without_glibc(monkeypatch):
    def fail(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", fail)
    keep_freed_memory.__wrapped__()


def test_glibc_is_configured_once(monkeypatch):
    settings = []

    class Library:
        @staticmethod
        def mallopt(option, value):
            settings.append((option, value))

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library)
    keep_freed_memory.cache_clear()
    keep_freed_memory()
    keep_freed_memory()
    assert settings == [(-3, 2**25), (-1, 2**28)]
