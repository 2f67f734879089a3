"""Loading a checkpoint runs no code; one that does not fit is refused in one sentence and kept."""

import copy
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
from further_cases import mark_others

import pl_fed.lightning.checkpoints
from pl_fed.command.fit import FederatedCLI
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
def original_run(tmp_path_factory):
    """A folder with a run of two rounds under ``runs``."""
    folder = tmp_path_factory.mktemp("original")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["fit", *SHORT, "--trainer.max_epochs", "2"])
    return folder


@pytest.fixture
def run(original_run, tmp_path, monkeypatch):
    """The folder of a copy of that run, below the current folder."""
    shutil.copytree(original_run / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    (folder,) = Path("runs").iterdir()
    return folder


@pytest.fixture
def content(run):
    """The content of the run's checkpoint."""
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)


@pytest.fixture
def cached_arguments(monkeypatch):
    """Lets all commands of a test have the parsed arguments of the first command."""
    setup_parser, parse_arguments, first = (
        FederatedCLI.setup_parser,
        FederatedCLI.parse_arguments,
        {},
    )

    def setup_parser_once(cli, *args, **kwargs):
        if not first:
            setup_parser(cli, *args, **kwargs)
        vars(cli).update(first)

    def parse_arguments_once(cli, parser, args):
        if not first:
            parse_arguments(cli, parser, args)
            names = ("parser", "_subcommand_parsers", "_subcommand_method_arguments")
            first.update({name: getattr(cli, name) for name in names})
            first.update(config=cli.config, _ckpt_path=cli._ckpt_path)
        cli.config = copy.deepcopy(first["config"])

    monkeypatch.setattr(FederatedCLI, "setup_parser", setup_parser_once)
    monkeypatch.setattr(FederatedCLI, "parse_arguments", parse_arguments_once)


@pytest.fixture
def server(tmp_path):
    """The URL of a server of the current folder."""

    class QuietHandler(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = partial(QuietHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def get_error(capsys, subcommand, *arguments):
    """Run a failing command; return its error message of one sentence."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main([subcommand, *(SHORT if subcommand != "export" else []), *arguments])
    assert stopped.value.code in (1, 2)
    (line,) = [s for s in capsys.readouterr().err.splitlines() if s.startswith("error: ")]
    return line.removeprefix("error: ")


class Malicious:
    """Creates a file when it is unpickled."""

    def __reduce__(self):
        return (open, ("executed", "w"))


def get_addresses(path, server):
    """Yield the path of a file, and URLs of it."""
    yield path
    yield f"file://{Path(path).absolute()}"
    yield f"local://{Path(path).absolute()}"
    yield f"{server}/{path}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "subcommand", mark_others(["fit", "validate", "test", "predict"], "fit", "predict")
)
def test_loading_a_checkpoint_runs_no_code(content, server, capsys, monkeypatch, subcommand):
    """Large files are mapped. All subcommands load in the same way, so one of them tries all."""
    torch.save({**content, "other": Malicious()}, "malicious.ckpt")
    path, *urls = get_addresses("malicious.ckpt", server)
    sizes_and_addresses = [(False, path), (True, urls[-1])]
    if subcommand == "fit":
        sizes_and_addresses = [(False, path), *zip((True, True, False, True), (path, *urls))]
    for is_large, address in sizes_and_addresses:
        monkeypatch.setattr(pl_fed.lightning.checkpoints, "_LARGE", 0 if is_large else 1 << 28)
        message = get_error(capsys, subcommand, "--ckpt_path", address)
        assert "which contains objects other than tensors, numbers and strings" in message
        assert address in message
        assert not Path("executed").exists()


def test_export_runs_no_code(run, content, capsys, monkeypatch):
    path = run / "checkpoints" / "last.ckpt"
    torch.save({**content, "other": Malicious()}, path)
    for is_large in (False, True):
        monkeypatch.setattr(pl_fed.lightning.checkpoints, "_LARGE", 0 if is_large else 1 << 28)
        message = get_error(capsys, "export", "--ckpt", str(path), "--client", "1")
        assert "which contains objects other than tensors" in message
        assert not Path("executed").exists()


def test_reading_the_identity_of_a_checkpoint_runs_no_code(content):
    torch.save({**content, "other": Malicious()}, "malicious.ckpt")
    assert read_identity("malicious.ckpt") == {}
    assert not Path("executed").exists()


@pytest.mark.slow
def test_checkpoint_at_a_url_gives_the_results_of_the_file(run, server, capsys):
    path = run / "checkpoints" / "last.ckpt"
    results = []
    for address in get_addresses(str(path), server):
        main(["test", *SHORT, "--ckpt_path", address])
        results.append(re.findall(r"personal model.*", capsys.readouterr().out))
    assert results == results[:1] * 4
    main(["fit", *SHORT, "--trainer.max_epochs", "3", "--ckpt_path", f"{server}/{path}"])


def test_checkpoint_with_wrong_checksums_is_refused(run, server, capsys):
    content = bytearray((run / "checkpoints" / "last.ckpt").read_bytes())
    start = content.index(b"PK", len(content) // 2) - 200
    content[start : start + 8] = bytes(byte ^ 255 for byte in content[start : start + 8])
    Path("broken.ckpt").write_bytes(content)
    for address in (f"{server}/broken.ckpt", "broken.ckpt"):
        assert "to be a complete checkpoint" in get_error(capsys, "test", "--ckpt_path", address)


def test_checkpoint_without_its_first_half_is_refused(run, capsys):
    """The entries of the archive would begin before the file does."""
    content = (run / "checkpoints" / "last.ckpt").read_bytes()
    Path("half.ckpt").write_bytes(content[len(content) // 2 :])
    assert "to be a complete checkpoint" in get_error(capsys, "test", "--ckpt_path", "half.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("foo://x", "a URL that fsspec can read but got foo://x: Protocol not known: foo"),
        (
            "file://nowhere",
            "to be a checkpoint, last or the folder of a run but got file://nowhere: no such file",
        ),
        ("a\0b", r"the command line to have no NUL characters but got 'a\x00b'"),
        ("{server}/none.ckpt", "can be fetched but got {server}/none.ckpt: HTTP Error 404"),
        ("http://127.0.0.1:1/x.ckpt", "can be fetched but got http://127.0.0.1:1/x.ckpt: "),
    ],
)
def test_address_without_a_checkpoint_is_refused(run, server, capsys, address, words):
    address, words = (text.replace("{server}", server) for text in (address, words))
    for subcommand in ("fit", "test"):
        assert words in get_error(capsys, subcommand, "--ckpt_path", address)
    assert len([*Path("runs").iterdir()]) == 1, "no folder is left"


def test_option_to_load_objects_is_refused(run, capsys):
    for subcommand in ("fit", "validate", "test", "predict"):
        message = get_error(capsys, subcommand, "--ckpt_path", "last", "--weights_only", "false")
        assert message.startswith("Expected argument `weights_only` to be True, or left out")


def test_objects_are_refused_for_every_value_of_weights_only(content):
    torch.save({**content, "other": Malicious()}, "malicious.ckpt")
    for weights_only in (None, True, False):
        with pytest.raises(ValueError, match="contains objects other than tensors"):
            AtomicCheckpointIO().load_checkpoint("malicious.ckpt", weights_only=weights_only)
    assert not Path("executed").exists()


def remove_entry(mapping, *names):
    """Return a copy of nested dicts without one entry."""
    first, *inner_names = names
    if not inner_names:
        return {name: value for name, value in mapping.items() if name != first}
    return {**mapping, first: remove_entry(mapping[first], *inner_names)}


def replace_entry(mapping, value, *names):
    """Return a copy of nested dicts with another value of one entry."""
    first, *inner_names = names
    return {
        **mapping,
        first: replace_entry(mapping[first], value, *inner_names) if inner_names else value,
    }


def damaged_parts(content):
    """Yield contents that lack a part, or have another part, and words of the error message."""
    for name in pl_fed.lightning.checkpoints._PARTS:
        if name != "federation":
            yield remove_entry(content, *name.split(".")), f"with the part `{name}`"
            yield replace_entry(content, [], *name.split(".")), f"with the part `{name}`"


def damaged_contents(content):
    """Yield contents of checkpoints that pl_fed did not write, and words of the error message."""
    change = partial(replace_entry, content)
    for value in (None, [1], 3):
        yield {**content, "federation": value}, "with the part `federation`"
    for value in ([1, 2], torch.zeros(3), {}):
        yield value, "which contains no federation"
    engine = ("federation", "engine")
    yield change("fast", *engine, "engine"), "whose engine is one of"
    yield change(-1, *engine, "size"), "at least 1 client"
    store = ("federation", "store", "personal")
    clients = content["federation"]["store"]["personal"]["clients"]
    rows = content["federation"]["store"]["personal"]["rows"]
    yield (
        change(clients + 1000, *store, "clients"),
        "to have client ids from 0 to 5 but got",
    )
    yield change(clients - 9, *store, "clients"), "ids of at least 0"
    yield change(clients * 0, *store, "clients"), "different client ids"
    yield (
        change(None, *store, "clients"),
        "to have a default row, ids of clients and rows",
    )
    yield change([x[:, :-1] for x in rows], *store, "rows"), "to have a row of"
    yield change(rows[:0], *store, "rows"), "to have a row of"
    yield change(5, *store), "to have a default row"
    personal = content["federation"]["store"]["personal"]
    yield change({"other": personal}, "federation", "store"), "client states to be"
    yield change(1.5, "federation", "identity", "inputs"), "with the same inputs"
    yield change("other", "federation", "identity"), "with the part `federation.identity`"
    yield change("often", "federation", "participation"), "of 6 clients but got one of st"
    name, tensor = next(iter(content["state_dict"].items()))
    yield remove_entry(content, "state_dict", name), f"for `{name}` but got one with no tensor"
    yield (
        change(tensor[:1], "state_dict", name),
        f"for `{name}` but got one with shape [1",
    )
    yield change(tensor, "state_dict", "other"), "have no tensor for `other` but got one"


@pytest.mark.slow
@pytest.mark.usefixtures("cached_arguments")
def test_refused_checkpoint_changes_no_file(run, content, capsys):
    some_parts = [*damaged_parts(content)][::7]  # one rule checks all parts
    assert len(some_parts) > 3
    check_refusals(run, [*some_parts, *damaged_contents(content)], capsys)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("cached_arguments")
def test_checkpoint_without_any_part_is_refused_and_changes_no_file(run, content, capsys):
    check_refusals(run, damaged_parts(content), capsys)


def check_refusals(run, contents, capsys):
    """Check that a resume refuses each content of its checkpoint, and changes no file."""
    path = run / "checkpoints" / "last.ckpt"
    for damaged, words in contents:
        torch.save(damaged, path)
        before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
        arguments = ["--ckpt_path", "last", "--trainer.max_epochs", "3"]
        message = get_error(capsys, "fit", *arguments)
        assert message.startswith("Expected ")
        assert words in message
        assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_full_disk_leaves_the_previous_checkpoint(tmp_path, monkeypatch, number):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"round": 1}, path)
    content = path.read_bytes()

    def raise_disk_error():
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(pl_fed.lightning.checkpoints, "_PIECE", -1)
    monkeypatch.setattr(pl_fed.lightning.checkpoints.DiskRows, "give_back", raise_disk_error)
    words = f"Expected to write .*last.ckpt but got: {os.strerror(number)}.* is kept"
    with pytest.raises(OSError, match=words):
        AtomicCheckpointIO().save_checkpoint({"round": 2}, path)
    assert path.read_bytes() == content
    assert not (tmp_path / TEMPORARY_NAME).exists(), "its disk space is freed"


def test_interrupt_while_saving_is_raised_as_an_interrupt(tmp_path, monkeypatch):
    """A RuntimeError of the writer would end in a traceback."""

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(pl_fed.lightning.checkpoints, "_PIECE", -1)
    monkeypatch.setattr(pl_fed.lightning.checkpoints.DiskRows, "give_back", interrupt)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint({"x": torch.zeros(1000)}, tmp_path / "last.ckpt")
