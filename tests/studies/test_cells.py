"""Cells: all combinations once, with names that are safe and tell them apart."""

import errno
import itertools
import json
import math
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pl_fed.plain_yaml import load_yaml
from pl_fed.studies import command
from pl_fed.studies.cell_folder import CellFolder, CellRecord, State, write_text
from pl_fed.studies.cells import Cell, expand, find_cell, folder_name
from pl_fed.studies.changes import Change
from pl_fed.studies.execution import Event
from pl_fed.studies.inspection import CellStatus, check_configs, read_states
from pl_fed.studies.jobs import CheckOutcome
from pl_fed.studies.readers import StudyError
from pl_fed.studies.selection import read_only
from pl_fed.studies.spec import read_spec
from pl_fed.studies.study import Study

LABELS = st.lists(
    st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Zs"]), min_size=1).filter(
        lambda label: label.strip() and label.isprintable()
    ),
    min_size=1,
    max_size=4,
    unique_by=str.casefold,
)
AXES = st.dictionaries(st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True), LABELS, max_size=3)


def study(axes, seeds=2, leave_out=()):
    return read_spec(
        {
            "name": "study",
            "base": "quickstart",
            "axes": {name: {label: {} for label in labels} for name, labels in axes.items()},
            "seeds": seeds,
            "leave_out": list(leave_out),
        }
    )


@given(AXES.filter(lambda axes: not {"seed", "status", "cell"} & axes.keys()), st.integers(1, 3))
@pytest.mark.slow
def test_cells_are_all_combinations(axes, seeds):
    cells = expand(study(axes, seeds))
    combinations = itertools.product(*axes.values(), range(seeds))
    assert [(*cell.values.values(), cell.seed) for cell in cells] == list(combinations)
    assert len({cell.path.casefold() for cell in cells}) == len(cells)
    for cell in cells:
        for part in cell.path.split("/"):
            assert re.fullmatch(r"[\w.+=,-]+", part), part
            assert len(part.encode()) <= 200
            assert part not in (".", "..")


def test_values_are_words_as_in_json_but_for_infinite_ones():
    nested = {"a": [1, 2.5, None, True, "é"], 2: {"b": {}, "c": []}, True: 1e-7}
    change = Change(overrides={"data.x": nested, "model.y": {"z": [math.inf, -math.inf]}})
    assert change.words() == [
        f"--data.x={json.dumps(nested)}",
        '--model.y={"z": [.inf, -.inf]}',
    ]
    assert load_yaml(change.words()[1].partition("=")[2]) == {"z": [math.inf, -math.inf]}


def test_cell_with_a_long_path_can_be_locked(tmp_path):
    """Each folder of its path is short enough, but a name of all of them is not."""
    path = f"tuning/{'a' * 100}/trial=000/{'b' * 180}"
    folder, other = CellFolder(tmp_path, path), CellFolder(tmp_path, f"{path}c")
    assert not folder.is_locked
    with folder.lock() as is_alone:
        assert (is_alone, folder.is_locked, other.is_locked) == (True, True, False)


@given(AXES.filter(lambda axes: axes and not {"seed", "status", "cell"} & axes.keys()), st.data())
@pytest.mark.slow
def test_leave_out_and_only_are_complements(axes, data):
    chosen = {
        name: data.draw(st.lists(st.sampled_from(labels), min_size=1, unique=True))
        for name, labels in axes.items()
        if data.draw(st.booleans())
    }
    spec = study(axes)
    cells = expand(spec)
    words = [f"{name}={label}" for name, labels in chosen.items() for label in labels]
    selection = read_only(words, spec.axes)
    selected = [cell.name for cell in cells if selection.includes(cell.values, cell.seed)]
    assert len(selected) == 2 * len(
        list(itertools.product(*(chosen.get(name, labels) for name, labels in axes.items())))
    )
    if chosen and len(selected) < len(cells):
        remaining = [cell.name for cell in expand(study(axes, leave_out=[chosen]))]
        assert remaining == [cell.name for cell in cells if cell.name not in selected]


def test_later_changes_win_and_classes_come_before_their_arguments():
    spec = read_spec(
        {
            "name": "order",
            "base": ["quickstart", {"model": {"lam": 1, "optimizer": {"lr": 0.5}}}],
            "axes": {
                "lam": [2],
                "algorithm": {"a": ["ditto", {"model": "pl_fed.clients.Ditto"}]},
            },
            "seeds": [7],
        }
    )
    (cell,) = expand(spec)
    assert cell.arguments == [
        *("--config", "quickstart", "--config", "ditto"),
        *("--model=pl_fed.clients.Ditto", "--model.lam=2", "--model.optimizer.lr=0.5"),
        "--seed_everything=7",
    ]
    assert cell.name == "lam=2,algorithm=a,seed=7"


def test_digest_follows_the_texts_of_layers(tmp_path):
    layer = tmp_path / "layer.yaml"
    digests = set()
    for text in ("model: {lam: 1}", "model: {lam: 2}"):
        layer.write_text(text)
        digests |= {Cell({}, seed, Change((str(layer),))).digest for seed in (0, 1)}
    assert len(digests) == 4
    layer.write_text("# stronger\nmodel: {lam:  2}  # than before\n\n")
    assert Cell({}, 0, Change((str(layer),))).digest in digests
    layer.write_text('model: {lam: "2"}')
    assert Cell({}, 0, Change((str(layer),))).digest not in digests


def test_digest_follows_the_texts_of_config_files_among_the_values(tmp_path):
    file, digests = tmp_path / "model.yaml", set()
    for text in ("lam: 1", "lam: 2"):
        file.write_text(text)
        digests.add(Cell({}, 0, Change(overrides={"model": str(file)})).digest)
    assert len(digests) == 2
    missing = Cell({}, 0, Change(overrides={"model": "nowhere.yaml", "model.lam": 1}))
    assert missing.digest == Cell({}, 0, missing.change).digest


def test_digests_follow_the_texts_of_config_files_that_layers_and_values_name(tmp_path):
    layer, model, net = (tmp_path / f"{name}.yaml" for name in ("layer", "model", "net"))
    layer.write_text("model: model.yaml  # not nowhere.yaml")
    model.write_text(f"{{class_path: Ditto, init_args: {{net: {net}, more: {layer}}}}}")
    value = {"class_path": "Ditto", "init_args": {"net": str(net)}}
    changes = [Change((str(layer),)), Change(overrides={"model": value})]
    digests = set()
    for text in ("{width: 8}", "{width: 9}", "{width:  9}  # as before"):
        net.write_text(text)
        for change in changes:
            cell = Cell({}, 0, change)
            digests |= {cell.digest, cell.config_digest}
    assert len(digests) == 2 * 2 * 2
    before = Cell({}, 0, changes[0]).digest
    net.unlink()
    assert Cell({}, 0, changes[0]).digest != before


def test_long_names_are_shortened_and_stay_apart():
    names = {folder_name({"axis": "a" * 300 + str(number)}) for number in range(50)}
    assert len(names) == 50
    assert max(map(len, names)) <= 180


def test_labels_like_names_stay_apart():
    """A separator within a label must not make one cell's folder that of another."""
    cells = expand(study({"a": ["x", "x,b=y"], "b": ["y,b=z", "z"]}))
    assert len({cell.path for cell in cells}) == len(cells) == 8


def test_cell_is_found_by_its_name_and_its_folder():
    cells = expand(study({"attack": ["none", "a b"], "lr": ["1", "2"]}))
    for cell in cells:
        assert find_cell(",".join(reversed(cell.name.split(","))), cells) == cell
        assert find_cell(f"runs/study/{cell.path}/", cells) == cell
    with pytest.raises(StudyError, match="`again` to be the name of a cell, such as attack=none,"):
        find_cell("attack=none", cells)


def test_selection_refuses_words_of_another_form():
    spec = study({"attack": ["none"]})
    for word, part in (
        ("attack", "`only` to be an axis and a label"),
        ("attack=none,seed=0", "as in `--only attack=none --only seed=0`, but got"),
        ("atack=none", "did you mean attack"),
        ("attack=non", "did you mean none"),
    ):
        with pytest.raises(StudyError, match=part):
            read_only([word], spec.axes)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EACCES])
def test_a_run_moves_aside_also_to_another_file_system(tmp_path, monkeypatch, number):
    """The folder of a study may be a link to a larger disk, and the place aside is none."""
    folder, rename = CellFolder(tmp_path / "study", "algorithm=Ditto/seed=0"), Path.rename

    def rename_on_one_disk(source, target):
        if source.parent != Path(target).parent:
            raise OSError(number, os.strerror(number))
        return rename(source, target)

    (folder.path / "checkpoints").mkdir(parents=True)
    (folder.path / "summary.json").write_text("{}")
    monkeypatch.setattr(Path, "rename", rename_on_one_disk)
    if number != errno.EXDEV:
        with pytest.raises(OSError, match=os.strerror(number)):
            folder.move_aside()
        return
    place = folder.move_aside()
    assert place.parent == tmp_path / "study_aside/algorithm=Ditto/seed=0"
    assert sorted(path.name for path in place.iterdir()) == ["checkpoints", "summary.json"]
    assert list(folder.path.parent.iterdir()) == []


def test_a_cell_that_failed_without_a_record_ends_the_command_with_1(tmp_path, monkeypatch, capsys):
    """For example one whose folder cannot be made: its state is missing, and not failed."""
    (tmp_path / "study.yaml").write_text("{name: a, base: quickstart}")

    def fail(study, workers, only, report):
        (cell,) = study.cells
        folder = CellFolder(study.folder, cell.path)
        for is_final in (False, True):
            status = CellStatus(cell, folder, State.FAILED, "OSError: a link of another disk")
            report(Event(status, is_final=is_final))

    monkeypatch.setattr(Study, "run", fail)
    with pytest.raises(SystemExit) as stop:
        command.main([str(tmp_path / "study.yaml"), "--folder", str(tmp_path / "study")])
    output = capsys.readouterr()
    assert stop.value.code == 1
    assert "got 1 that failed twice, first seed=0 (OSError: a link of another disk)" in output.err


class ComparingPool:
    """Comparing pool: finds that all configs differ."""

    def map(self, jobs):
        """Return each job with its outcome."""
        return [(job, CheckOutcome(changes=dict.fromkeys(job.folders, "lost"))) for job in jobs]


@pytest.mark.parametrize("digest", ["same", "other", None])
def test_a_finished_run_of_other_inputs_whose_config_is_lost_is_no_result(tmp_path, digest):
    (cell,) = Study("a", "quickstart", options={"folder": str(tmp_path)}).cells
    folder = CellFolder(tmp_path, cell.path)
    write_text(folder.path / "summary.json", json.dumps({"stage": "test"}))
    if digest is not None:
        own = cell.digest if digest == "same" else digest
        folder.write_record(CellRecord("a", cell.name, {}, cell.seed, own))
    (status,) = check_configs(tmp_path, read_states(tmp_path, [cell]), ComparingPool())
    assert status.state is (State.CHANGED if digest == "other" else State.DONE)
    assert status.reason == ("lost" if digest == "other" else "")
