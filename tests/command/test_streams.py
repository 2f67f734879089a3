"""Standard streams that are closed, or that nobody reads any more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pl_fed.command.streams import _keep_usable

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.skipif(os.name != "posix", reason="file descriptors of POSIX")


def test_output_goes_nowhere_after_its_reader_has_ended():
    reader, descriptor = os.pipe()
    with open(descriptor, "w", encoding="utf-8", errors="replace") as given:
        stream = _keep_usable(given, descriptor)
        print("größer", file=stream, flush=True)
        assert os.read(reader, 100) == "größer\n".encode()
        os.close(reader)
        for _ in range(3):
            print("x" * 100_000, file=stream, flush=True)
        assert os.fstat(descriptor).st_rdev == os.stat(os.devnull).st_rdev
    assert (stream.encoding, stream.errors) == ("utf-8", "replace")


def test_output_escapes_characters_that_its_encoding_lacks():
    reader, descriptor = os.pipe()
    with open(descriptor, "w", encoding="ascii") as given:
        print("ε = 8", file=_keep_usable(given, descriptor), flush=True)
        assert os.read(reader, 100) == b"\\u03b5 = 8\n"
    os.close(reader)


def run_shell(command, folder):
    """Run a pipe, and return the status of its first command."""
    program = f"{sys.executable} -m pl_fed {command}; exit ${{PIPESTATUS[0]}}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(["bash", "-c", program], cwd=folder, env=environment).returncode


@pytest.mark.slow
def test_short_commands_end_with_their_own_status(tmp_path):
    for tail in ("| head -1", ">&-", "2>&- >&- <&-"):
        assert run_shell(f"list algorithms {tail}", tmp_path) == 0
    assert run_shell("list colours 2>&-", tmp_path) == 2


@pytest.mark.exhaustive  # the two tests above ask the same of a stream and of a short command
@pytest.mark.slow
def test_fit_ends_with_its_own_status_and_all_results(tmp_path):
    """Standard error is closed, and nobody reads standard output after its first character."""
    arguments = "--trainer.max_epochs 1 --trainer.logger false --trainer.default_root_dir runs"
    assert run_shell(f"fit --config quickstart {arguments} 2>&- | head -c 1", tmp_path) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert {"per_client.csv", "summary.json"} <= {path.name for path in run.iterdir()}
