"""A checkpoint never runs code, is refused in one sentence where it does not fit, and is kept."""

import errno
import os
import re
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import pl_fed.lightning.checkpoints
from pl_fed.command.main import main
from pl_fed.lightning.checkpoints import AtomicCheckpointIO, read_identity
from pl_fed.run_folder import TEMPORARY_NAME

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
SHORT = [
    *("--config", str(CONFIG), "--trainer.default_root_dir", "runs"),
    *("--trainer.enable_progress_bar", "false", "--data.num_clients", "6"),
    *("--federation.sampler.cohort_size", "2", "--federation.engine.name", "one_by_one"),
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:The run resumes with another config"),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder in which a run of two rounds lies under ``runs``."""
    folder = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["fit", *SHORT, "--trainer.max_epochs", "2"])
    return folder


@pytest.fixture
def run(written, tmp_path, monkeypatch):
    """A copy of that run, below the current folder."""
    shutil.copytree(written / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    (folder,) = Path("runs").iterdir()
    return folder


@pytest.fixture
def good(run):
    """What its checkpoint holds."""
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)


@pytest.fixture
def server(tmp_path):
    """The address of a server of the current folder."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = partial(Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def refused(capsys, subcommand, *arguments):
    """Return the one sentence with which a command ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([subcommand, *(SHORT if subcommand != "export" else []), *arguments])
    assert ended.value.code in (1, 2)
    (line,) = [s for s in capsys.readouterr().err.splitlines() if s.startswith("error: ")]
    return line.removeprefix("error: ")


class Evil:
    """Makes a file when it is unpickled."""

    def __reduce__(self):
        return (open, ("executed", "w"))


def places_of(path, server):
    yield path
    yield f"file://{Path(path).absolute()}"
    yield f"local://{Path(path).absolute()}"
    yield f"{server}/{path}"


@pytest.mark.parametrize("subcommand", ["fit", "validate", "test", "predict"])
def test_no_checkpoint_runs_code_wherever_it_lies(good, server, capsys, monkeypatch, subcommand):
    torch.save({**good, "other": Evil()}, "evil.ckpt")
    for large in (False, True):
        monkeypatch.setattr(pl_fed.lightning.checkpoints, "_LARGE", 0 if large else 1 << 28)
        for place in places_of("evil.ckpt", server):
            found = refused(capsys, subcommand, "--ckpt_path", place)
            assert "which contains objects other than tensors, numbers and strings" in found
            assert place in found
            assert not Path("executed").exists()


def test_an_export_runs_no_code(run, good, capsys, monkeypatch):
    path = run / "checkpoints" / "last.ckpt"
    torch.save({**good, "other": Evil()}, path)
    for large in (False, True):
        monkeypatch.setattr(pl_fed.lightning.checkpoints, "_LARGE", 0 if large else 1 << 28)
        found = refused(capsys, "export", "--ckpt", str(path), "--client", "1")
        assert "which contains objects other than tensors" in found
        assert not Path("executed").exists()


def test_who_wrote_a_checkpoint_is_read_without_running_code(good):
    torch.save({**good, "other": Evil()}, "evil.ckpt")
    assert read_identity("evil.ckpt") == {}
    assert not Path("executed").exists()


def test_a_checkpoint_at_an_address_is_as_the_file(run, server, capsys):
    path = run / "checkpoints" / "last.ckpt"
    said = []
    for place in places_of(str(path), server):
        main(["test", *SHORT, "--ckpt_path", place])
        said.append(re.findall(r"personal model.*", capsys.readouterr().out))
    assert said == said[:1] * 4
    main(["fit", *SHORT, "--trainer.max_epochs", "3", "--ckpt_path", f"{server}/{path}"])


def test_a_fetched_checkpoint_is_compared_with_its_checksums(run, server, capsys):
    content = (run / "checkpoints" / "last.ckpt").read_bytes()
    place = content.index(b"PK", len(content) // 2) - 200
    Path("broken.ckpt").write_bytes(
        content[:place] + bytes(b ^ 255 for b in content[place : place + 8]) + content[place + 8 :]
    )
    for source in (f"{server}/broken.ckpt", "broken.ckpt"):
        assert "to be a complete checkpoint" in refused(capsys, "test", "--ckpt_path", source)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("foo://x", "a URL that fsspec can read but got foo://x: Protocol not known: foo"),
        ("file://nowhere", "to be a checkpoint, last or best but got file://nowhere: no such file"),
        ("a\0b", r"the command line to have no NUL characters but got 'a\x00b'"),
        ("{server}/none.ckpt", "can be fetched but got {server}/none.ckpt: HTTP Error 404"),
        ("http://127.0.0.1:1/x.ckpt", "can be fetched but got http://127.0.0.1:1/x.ckpt: "),
    ],
)
def test_a_place_without_a_checkpoint(run, server, capsys, place, words):
    place, words = (text.replace("{server}", server) for text in (place, words))
    for subcommand in ("fit", "test"):
        assert words in refused(capsys, subcommand, "--ckpt_path", place)
    assert len([*Path("runs").iterdir()]) == 1, "no folder is left"


def test_loading_objects_is_refused(run, capsys):
    for subcommand in ("fit", "validate", "test", "predict"):
        found = refused(capsys, subcommand, "--ckpt_path", "last", "--weights_only", "false")
        assert found.startswith("Expected argument `weights_only` to be True, or left out")


def test_objects_are_not_loaded_whatever_is_asked_for(good):
    torch.save({**good, "other": Evil()}, "evil.ckpt")
    for asked in (None, True, False):
        with pytest.raises(ValueError, match="contains objects other than tensors"):
            AtomicCheckpointIO().load_checkpoint("evil.ckpt", weights_only=asked)
    assert not Path("executed").exists()


def without(mapping, *names):
    """Return nested dicts without one entry."""
    first, *others = names
    if not others:
        return {name: value for name, value in mapping.items() if name != first}
    return {**mapping, first: without(mapping[first], *others)}


def changed(mapping, value, *names):
    first, *others = names
    return {**mapping, first: changed(mapping[first], value, *others) if others else value}


def torn(good):
    """Yield checkpoints that pl_fed did not write, and words of the sentence."""
    for name in pl_fed.lightning.checkpoints._PARTS:
        if name != "federation":
            yield without(good, *name.split(".")), f"with the part `{name}`"
            yield changed(good, [], *name.split(".")), f"with the part `{name}`"
    for value in (None, [1], 3):
        yield {**good, "federation": value}, "with the part `federation`"
    for value in ([1, 2], torch.zeros(3), {}):
        yield value, "which contains no federation"
    engine = ("federation", "engine")
    yield changed(good, "fast", *engine, "engine"), "whose engine is one of"
    yield changed(good, -1, *engine, "size"), "at least 1 client"
    store = ("federation", "store", "personal")
    clients = good["federation"]["store"]["personal"]["clients"]
    rows = good["federation"]["store"]["personal"]["rows"]
    yield changed(good, clients + 1000, *store, "clients"), "to have client ids from 0 to 5 but got"
    yield changed(good, clients - 9, *store, "clients"), "ids of at least 0"
    yield changed(good, clients * 0, *store, "clients"), "different client ids"
    yield changed(good, None, *store, "clients"), "to have a default row, ids of clients and rows"
    yield changed(good, [x[:, :-1] for x in rows], *store, "rows"), "to have a row of"
    yield changed(good, rows[:0], *store, "rows"), "to have a row of"
    yield changed(good, 5, *store), "to have a default row"
    one = good["federation"]["store"]["personal"]
    yield changed(good, {"other": one}, "federation", "store"), "client states to be"
    yield changed(good, 1.5, "federation", "identity", "inputs"), "with the same inputs"
    yield changed(good, "other", "federation", "identity"), "with the part `federation.identity`"
    yield changed(good, "often", "federation", "participation"), "of 6 clients but got one of st"
    name, tensor = next(iter(good["state_dict"].items()))
    yield without(good, "state_dict", name), f"for `{name}` but got one with no tensor"
    yield changed(good, tensor[:1], "state_dict", name), f"for `{name}` but got one with shape [1"
    yield changed(good, tensor, "state_dict", "other"), "have no tensor for `other` but got one"


def test_a_checkpoint_that_pl_fed_did_not_write_changes_no_file(run, good, capsys):
    path = run / "checkpoints" / "last.ckpt"
    for checkpoint, words in torn(good):
        torch.save(checkpoint, path)
        before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
        more = ["--ckpt_path", "last", "--trainer.max_epochs", "3"]
        found = refused(capsys, "fit", *more)
        assert found.startswith("Expected ")
        assert words in found
        assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch, number):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"round": 1}, path)
    content = path.read_bytes()

    def full():
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(pl_fed.lightning.checkpoints, "_PIECE", -1)
    monkeypatch.setattr(pl_fed.lightning.checkpoints.DiskRows, "give_back", full)
    words = f"Expected to write .*last.ckpt but got: {os.strerror(number)}.* is kept"
    with pytest.raises(OSError, match=words):
        AtomicCheckpointIO().save_checkpoint({"round": 2}, path)
    assert path.read_bytes() == content
    assert not (tmp_path / TEMPORARY_NAME).exists(), "its room is given back"


def test_an_interrupt_while_saving_stays_one(tmp_path, monkeypatch):
    """A RuntimeError of the writer would end in a trace."""

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(pl_fed.lightning.checkpoints, "_PIECE", -1)
    monkeypatch.setattr(pl_fed.lightning.checkpoints.DiskRows, "give_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint({"x": torch.zeros(1000)}, tmp_path / "last.ckpt")
