"""The data split, with samples and classes per client: numbers, table, picture, command."""

import contextlib
import csv
import errno
import io
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml
from PIL import Image
from rich.console import Console
from small_federations import Given

from pl_fed.command.main import main
from pl_fed.data import Arrays, FederatedData
from pl_fed.partitioners import IID, ByOwner
from pl_fed.reports.split import Split

ROOT = Path(__file__).parent.parent.parent
QUICKSTART = ["--config", str(ROOT / "configs" / "quickstart.yaml")]


def make_split(labels, clients, **options):
    y = torch.tensor(labels)
    classes = 0 if y.is_floating_point() else 3
    arrays = Arrays(torch.zeros(len(y), 2), y, torch.tensor(clients), num_classes=classes)
    options = {"val_fraction": 0.0, "test_fraction": 0.0} | options
    return Split(FederatedData(Given(arrays), **options).clients)


def test_counts_and_distances_equal_hand_computed_values():
    """The overall distribution of the classes is 3/4, 0, 1/4. Client 0 has only class 0."""
    split = make_split([0, 0, 0, 2], [5, 5, 9, 9])
    assert split.counts.tolist() == [[2, 0, 0], [1, 0, 1]]
    assert split.classes_per_client.tolist() == [1, 2]
    assert split.distances.tolist() == [0.25, 0.25]
    assert split.sizes["train"].tolist() == [2, 2]
    assert split.rows()[1] == {
        "client": 1,
        "owner": "9",
        "train": 2,
        "val": 0,
        "test": 0,
        "classes": 2,
        "distance": 0.25,
        "class_0": 1,
        "class_1": 0,
        "class_2": 1,
    }


def test_split_of_real_values_has_only_sizes(tmp_path):
    split = make_split([0.5, 1.5, 2.5], [0, 0, 1])
    assert split.rows()[0] == {"client": 0, "owner": "0", "train": 2, "val": 0, "test": 0}
    split.write(tmp_path / "split.csv")
    assert (tmp_path / "split.csv").read_text().splitlines()[0] == "client,owner,train,val,test"
    split.draw(tmp_path / "split.png")
    assert Image.open(tmp_path / "split.png").size[0] > 1000
    text = render(split)
    assert "2 clients" in text
    assert "distance" not in text
    assert "class" not in text


ODD = ["=1+1", "\x1b[31mred\x1b[0m", "[bold]é☃", "'tis"]


def test_formulas_and_control_characters_in_names_are_escaped(tmp_path):
    arrays = Arrays(torch.zeros(4, 2), torch.zeros(4).long(), torch.arange(4), num_classes=1)
    named = Given(replace(arrays, names=ODD))
    split = Split(FederatedData(named, val_fraction=0.0, test_fraction=0.0).clients)
    split.write(tmp_path / "split.csv")
    text = render(split)
    assert "\x1b" not in text
    assert "\\x1b[31mred" in text
    with (tmp_path / "split.csv").open(encoding="utf-8", newline="") as file:
        owners = [row["owner"] for row in csv.DictReader(file)]
    assert owners == ["'=1+1", ODD[1], ODD[2], "''tis"]
    assert [owner.removeprefix("'") for owner in owners] == ODD


def test_ascii_terminal_shows_escaped_letters():
    arrays = Arrays(torch.zeros(2, 2), torch.zeros(2).long(), torch.arange(2), num_classes=1)
    named = Given(replace(arrays, names=["é☃", "b"]))
    split = Split(FederatedData(named, val_fraction=0.0, test_fraction=0.0).clients)
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    split.show(Console(file=file, width=120))
    file.flush()
    assert b"\\xe9\\u2603" in file.buffer.getvalue()


def test_clients_have_the_names_of_their_owners(tmp_path):
    """Owners have ids or names. Partitioning by label leaves clients without owners."""
    owner = torch.tensor([9, 9, 4, 4, 7, 7]) - 4
    arrays = Arrays(torch.zeros(6, 2), torch.zeros(6, dtype=torch.int64), owner, num_classes=1)
    named = replace(arrays, names=["Ada", "Bo", "Cy", "Di", "Ed", "Flo of the longest name"])
    options = {"val_fraction": 0.5, "test_fraction": 0.0}

    def owners(arrays, *partitioner):
        split = Split(FederatedData(Given(arrays), *partitioner, **options).clients)
        return [row.get("owner") for row in split.rows()], render(split)

    assert owners(arrays)[0] == ["0", "3", "5"]
    names, table = owners(named)
    assert names == ["Ada", "Di", "Flo of the longest name"]
    assert "Flo of the longest …" in table
    names, table = owners(replace(named, names=["[/x]", "", "", "[b]o[/b]", "", "[bold]"]))
    assert names == ["[/x]", "[b]o[/b]", "[bold]"]
    assert all(name in table for name in names)
    several, _ = owners(named, ByOwner(), 2)
    assert sorted(", ".join(several).split(", ")) == ["Ada", "Di", named.names[-1]]
    assert owners(named, IID(), 2)[0] == [None, None]
    with pytest.raises(ValueError, match="`client` to be positions in `names` but got 5"):
        replace(named, names=named.names[:5])


def render(split):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    split.show(console)
    return console.export_text()


def test_table_lists_few_clients_and_summarizes_many():
    few, many = (
        make_split([0, 1, 2] * 10, list(range(30))),
        make_split([0, 1, 2] * 20, list(range(60))),
    )
    assert "0:1" in render(few)
    assert "0:1" not in render(many)
    assert "60 clients" in render(many)


def test_median_of_two_clients_is_their_mean():
    text = render(make_split([0] * 10 + [0, 1, 2] * 5, [0] * 10 + [1] * 15))
    (samples,) = [line.split() for line in text.splitlines() if "train samples" in line]
    assert [cell for cell in samples if cell[0].isdigit()] == ["25", "10", "12.5", "15"]
    (classes,) = [line.split() for line in text.splitlines() if "│ classes" in line]
    assert [cell for cell in classes if cell[0].isdigit()] == ["3", "1", "2", "3"]


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, 12, 200])
def test_picture_is_drawn_for_few_and_many_clients(tmp_path, clients):
    split = make_split([k % 3 for k in range(600)], [k % clients for k in range(600)])
    split.draw(tmp_path / "split.png")
    pixels = Image.open(tmp_path / "split.png").convert("RGB").getcolors(1 << 24)
    assert len(pixels) > 20


@pytest.mark.slow
def test_partition_writes_table_and_picture_without_training(tmp_path, capsys):
    main(["partition", *QUICKSTART, "--trainer.default_root_dir", str(tmp_path)])
    text = capsys.readouterr().out
    (folder,) = tmp_path.iterdir()
    assert str(folder) in text
    assert "30 clients" in text
    assert {file.name for file in folder.iterdir()} == {"split.csv", "split.png"}
    with (folder / "split.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["client"] for row in rows] == [str(k) for k in range(30)]
    assert sum(int(row[part]) for row in rows for part in ("train", "val", "test")) == 1797
    assert {row["classes"] for row in rows} == {"2"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["write", "draw"])
def test_partition_on_a_full_disk_ends_in_a_sentence(tmp_path, capsys, monkeypatch, name):
    """The error of the system names no file."""
    method = getattr(Split, name)
    monkeypatch.setattr(Split, name, lambda split, path: method(split, Path("/dev/full")))
    monkeypatch.setattr("pl_fed.reports.split.replace_file", contextlib.nullcontext)
    with pytest.raises(SystemExit):
        main(["partition", *QUICKSTART, "--trainer.default_root_dir", str(tmp_path)])
    error = capsys.readouterr().err
    assert f"error: Expected disk space for the files of the data split in {tmp_path}" in error
    assert error.endswith("No space left on device: free disk space and repeat the command.\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["write", "draw"])
def test_file_of_a_split_is_written_completely_or_not_at_all(tmp_path, monkeypatch, name):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "replace", Mock(side_effect=full))
    with pytest.raises(OSError, match="No space left"):
        getattr(make_split([0, 1, 2], [0, 1, 1]), name)(tmp_path / "split")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_partition_needs_no_model(tmp_path):
    layer = tmp_path / "data.yaml"
    layer.write_text(
        "data:\n"
        "  dataset: {class_path: pl_fed.data.Digits}\n"
        "  partitioner: {class_path: pl_fed.partitioners.Quantity}\n"
        "  num_clients: 5\n"
    )
    main(["partition", "--config", str(layer), "--trainer.default_root_dir", str(tmp_path / "a")])
    assert list((tmp_path / "a").glob("*/split.png"))


@pytest.mark.slow
def test_partition_accepts_the_config_of_another_machine(tmp_path):
    """The config asks for GPUs, and the test runs with and without GPUs."""
    trainer = {"accelerator": "gpu", "devices": 8, "strategy": "ddp", "precision": "16-mixed"}
    layer = tmp_path / "gpus.yaml"
    layer.write_text(yaml.safe_dump({"trainer": trainer}))
    root = ["--trainer.default_root_dir", str(tmp_path / "a")]
    main(["partition", *QUICKSTART, "--config", str(layer), *root])
    assert list((tmp_path / "a").glob("*/split.png"))


@pytest.mark.slow
def test_partition_does_not_build_the_model(tmp_path):
    net = {"architecture": "resnet18", "weights": "no_such_file.pth", "num_classes": 10}
    model = {"lam": 1.0, "net": {"class_path": "pl_fed.models.FrozenBody", "init_args": net}}
    layer = tmp_path / "frozen.yaml"
    layer.write_text(
        yaml.safe_dump({"model": {"class_path": "pl_fed.clients.Ditto", "init_args": model}})
    )
    root = ["--trainer.default_root_dir", str(tmp_path / "a")]
    main(["partition", *QUICKSTART, "--config", str(layer), *root])
    assert list((tmp_path / "a").glob("*/split.png"))


@pytest.mark.slow
def test_impossible_split_is_refused_in_one_sentence(tmp_path, capsys):
    root = ["--trainer.default_root_dir", str(tmp_path)]
    with pytest.raises(SystemExit) as stopped:
        main(["partition", *QUICKSTART, "--data.num_clients", "2000", *root])
    assert stopped.value.code == 1
    assert not list(tmp_path.iterdir())
    text = capsys.readouterr().err
    assert text.startswith("error: Expected argument `num_clients`")
    assert text.count("\n") == 1
