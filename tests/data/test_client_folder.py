"""A folder with one file per client: arrays or tables."""

import shutil
import unicodedata

import numpy as np
import pytest
import torch
from made_data import write_patients

from pl_fed.data import ClientFolder, FederatedData, Npz, Table

SIZES = {"client_10": 4, "client_9": 3, "b": 5}


def write_arrays(folder, name, size, seed=0, **arrays):
    draw = np.random.default_rng([seed, size])
    all_arrays = {"x": draw.normal(size=(size, 3)), "y": draw.integers(3, size=size), **arrays}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{name}.npz", **{k: v for k, v in all_arrays.items() if v is not None})
    return all_arrays["x"], all_arrays["y"]


@pytest.fixture
def folder(tmp_path):
    for name, size in SIZES.items():
        write_arrays(tmp_path, name, size)
    return tmp_path


def test_arrays_of_each_client(folder):
    (folder / ".hidden.npz").write_text("left out")
    (folder / "readme.txt").write_text("left out")
    arrays = ClientFolder(str(folder)).load()
    assert arrays.names == ["b", "client_9", "client_10"]
    begin = 0
    for id, name in enumerate(arrays.names):
        x, y = write_arrays(folder, name, SIZES[name])
        samples = slice(begin, begin + SIZES[name])
        assert arrays.client[samples].tolist() == [id] * SIZES[name]
        assert torch.equal(arrays.inputs[samples], torch.from_numpy(x))
        assert torch.equal(arrays.targets[samples], torch.from_numpy(y))
        begin += SIZES[name]
    assert len(arrays) == begin
    clients = FederatedData(ClientFolder(str(folder)), seed=0).clients
    assert clients.owners == [["b"], ["client_9"], ["client_10"]]


def test_targets_of_several_integers_a_sample_are_no_classes(tmp_path):
    for name in "ab":
        write_arrays(tmp_path, name, 2, y=[[0, 3], [1, 2]])
    with pytest.raises(ValueError, match="leave `num_classes` at 0 if your own task takes such"):
        ClientFolder(str(tmp_path)).load()
    arrays = ClientFolder(str(tmp_path), num_classes=0).load()
    assert (arrays.targets.tolist(), arrays.num_classes) == ([[0, 3], [1, 2]] * 2, 0)


def test_names_of_clients_are_those_of_their_files(tmp_path):
    for name in ("mynpz", "client_1", "my", "client_01"):  # two names of the same number
        write_arrays(tmp_path, name, 2)
    assert ClientFolder(str(tmp_path)).load().names == ["client_01", "client_1", "my", "mynpz"]


def test_order_of_clients_does_not_depend_on_that_of_the_file_system(tmp_path, monkeypatch):
    for name in ("1", "01", "001"):
        write_arrays(tmp_path, name, 2)
    paths = sorted(tmp_path.iterdir())
    for order in (paths, paths[::-1]):
        monkeypatch.setattr(type(tmp_path), "iterdir", lambda path, order=order: iter(order))
        assert ClientFolder(str(tmp_path)).load().names == ["001", "01", "1"]


def test_dtypes_are_preserved_and_classes_are_counted_over_all_files(tmp_path):
    write_arrays(tmp_path, "a", 2, x=np.full((2, 1, 4, 4), 255, "uint8"), y=[0, 1])
    write_arrays(tmp_path, "b", 2, x=np.zeros((2, 1, 4, 4), "uint8"), y=[4, 0], split=None)
    arrays = ClientFolder(str(tmp_path)).load()
    assert (arrays.inputs.dtype, arrays.num_classes) == (torch.uint8, 5)
    assert ClientFolder(str(tmp_path), num_classes=7).load().num_classes == 7


def test_official_parts_by_folders(tmp_path):
    for part, names in (("train", "ba"), ("test", "ab"), ("val", "b")):
        for name in names:
            write_arrays(tmp_path / part, name, 3, seed=ord(name))
    data = FederatedData(ClientFolder(str(tmp_path)), split="official", seed=0)
    arrays, clients = data.dataset.load(), data.clients
    assert arrays.names == ["a", "b"]
    assert arrays.client.tolist() == [0] * 6 + [1] * 9
    assert arrays.split.tolist() == [0] * 3 + [2] * 3 + [0] * 3 + [1] * 3 + [2] * 3
    sizes = [part.sizes.tolist() for part in (clients.train, clients.val, clients.test)]
    assert sizes == [[3, 3], [0, 3], [3, 3]]


def test_parts_have_the_names_of_a_split_column(tmp_path):
    for part in ("Train", "valid", "testing"):
        write_arrays(tmp_path / part, "a", 2)
    with pytest.warns(UserWarning, match=r"leaves out the files in testing of .*: name official"):
        arrays = ClientFolder(str(tmp_path)).load()
    assert arrays.split.tolist() == [0, 0, 1, 1]


def test_official_parts_by_an_array(tmp_path):
    for name in "ab":
        write_arrays(tmp_path, name, 3, split=np.array([0, 1, 2]))
    assert ClientFolder(str(tmp_path)).load().split.tolist() == [0, 1, 2] * 2


@pytest.fixture
def tables(tmp_path):
    """The table of patients, and a folder with a file for each of its hospitals."""
    pytest.importorskip("pyarrow")
    path = write_patients(tmp_path)
    header, *lines = path.read_text().splitlines()
    folder = tmp_path / "hospitals"
    folder.mkdir()
    for line in lines:
        name = line.split(",")[4]
        file = folder / f"{name}.csv"
        if not file.exists():
            file.write_text(f"{header}\n")
        with file.open("a") as out:
            out.write(f"{line}\n")
    return path, folder


def test_folder_of_tables_equals_the_joined_table(tables):
    path, folder = tables
    settings = {"target": "readmitted", "one_hot": ["sex"], "ids": ["ward"]}
    joined_table = Table(str(path), client="hospital", **settings)
    pieces = ClientFolder(str(folder), exclude=["hospital"], **settings)
    a, b = joined_table.load(), pieces.load()
    assert a.names == b.names
    assert torch.equal(a.client, b.client)
    assert torch.equal(a.targets, b.targets)
    assert all(torch.equal(x, y) for x, y in zip(a.inputs, b.inputs, strict=True))
    assert joined_table.preparation == pieces.preparation


def test_names_that_differ_by_a_space_are_reported(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,ill\n2,well\n3,ill \n")
    with pytest.warns(UserWarning, match="takes 'ill' and 'ill ' in column 'y' for two values"):
        ClientFolder(str(tmp_path), target="y").load()


def test_two_forms_of_a_category_in_unicode_are_reported(tmp_path):
    for number, form in enumerate(("NFC", "NFD")):
        text = f"x,y\n1.5,{unicodedata.normalize(form, 'Genève')}\n2.5,Uri\n"
        (tmp_path / f"{number}.csv").write_text(text, encoding="utf-8")
    words = r"takes 'Gene\\u0300ve' and 'Gen\\xe8ve' in column 'y' for two values"
    with pytest.warns(UserWarning, match=words):
        assert ClientFolder(str(tmp_path), target="y").load().num_classes == 3


@pytest.mark.parametrize(
    "settings", [{"target": "y", "one_hot": ["c"]}, {"target": "c", "exclude": ["y"]}]
)
def test_integers_that_are_real_numbers_in_some_files_are_reported(tmp_path, settings):
    """pandas writes the integers of a client with a missing value as real numbers."""
    (tmp_path / "a.csv").write_text("x,y,c\n1,0,3\n2,1,4\n")
    (tmp_path / "b.csv").write_text("x,y,c\n3,0,3.0\n4,1,x\n")
    with pytest.warns(UserWarning, match="takes '3' and '3.0' in column 'c' for two values"):
        ClientFolder(str(tmp_path), **settings).load()


def test_categories_and_types_are_joined_over_all_tables(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.csv").write_text("x,city,y\n1,Uri,0\n")
    (tmp_path / "b.tsv").write_text("y\tx\tcity\n2\t1.5\tBern\n")
    arrays = ClientFolder(str(tmp_path), target="y", one_hot=["city"]).load()
    assert arrays.inputs.tolist() == [[1, 0, 1], [1.5, 1, 0]]
    assert arrays.targets.tolist() == [0, 1]


def test_booleans_beside_numbers_are_0_and_1(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.csv").write_text("smokes,y\nTrue,2\nFalse,5\n")
    (tmp_path / "b.csv").write_text("smokes,y\n1,5\n0,2\n")
    arrays = ClientFolder(str(tmp_path), target="y").load()
    assert arrays.inputs.tolist() == [[1], [0], [1], [0]]
    assert arrays.targets.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("others", ["1\n2,0", "true\n2,false", "TRUE\n2,FALSE"])
def test_booleans_that_are_written_differently_are_reported(tmp_path, others):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.csv").write_text("x,y\n1,True\n2,False\n")
    (tmp_path / "b.csv").write_text(f"x,y\n1,{others}\n")
    with pytest.warns(UserWarning, match="in column 'y' for two values, .* booleans of the column"):
        ClientFolder(str(tmp_path), target="y").load()


def test_booleans_of_parquet_files_beside_integers_are_reported(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, y in {"a": [True, False], "b": [1, 0]}.items():
        parquet.write_table(pyarrow.table({"x": [1, 2], "y": y}), tmp_path / f"{name}.parquet")
    with pytest.warns(UserWarning, match="takes '0' and 'false' in column 'y' for two values"):
        ClientFolder(str(tmp_path), target="y").load()


def test_columns_that_are_left_out_may_differ_in_their_types(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.csv").write_text("x,visit,y\n1,2020-02-01,0\n")
    (tmp_path / "b.csv").write_text("x,visit,y\n2,7,1\n")
    for columns in ({"exclude": ["visit"]}, {"inputs": ["x"]}):
        arrays = ClientFolder(str(tmp_path), target="y", **columns).load()
        assert arrays.inputs.tolist() == [[1], [2]]


def test_real_targets_stay_real_in_a_file_whose_categories_are_read_as_text(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.csv").write_text("x,ward,y\n1,7,1.50\n2,8,2\n")
    (tmp_path / "b.csv").write_text("x,ward,y\n3,north,0.25\n")
    arrays = ClientFolder(str(tmp_path), target="y", ids=["ward"]).load()
    assert arrays.targets.tolist() == [[1.5], [2], [0.25]]
    assert arrays.inputs[1].tolist() == [[0], [1], [2]]


def test_the_name_na_is_one_name_in_all_files(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.csv").write_text("x,country,y\n1,NA,0\n2,NA,1\n")
    (tmp_path / "b.csv").write_text("x,country,y\n3,DE,0\n4,NA,1\n")
    arrays = ClientFolder(str(tmp_path), target="y", one_hot=["country"]).load()
    assert arrays.inputs[:, 1:].tolist() == [[0, 1], [0, 1], [1, 0], [0, 1]]


def assert_refused(folder, path, words, error=ValueError, **settings):
    with pytest.raises(error, match=words) as failed:
        ClientFolder(str(folder), **settings).load()
    sentence = str(failed.value)
    assert sentence.startswith("Expected ")
    assert sentence.endswith(".")
    assert str(path) in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros((4, 2))}, r"hold arrays like b.npz \(x \[3\] .* but got x \[2\]"),
        ({"x": np.zeros((4, 3), "float32")}, r"float64\), .* but got x \[3\] \(torch.float32\)"),
        ({"y": np.zeros(4)}, r"but got x \[3\] \(torch.float64\), y \[\] \(torch.float64\)"),
        ({"y": None}, "to hold an array `y` but got x"),
        ({"y": np.zeros(3, int)}, "`y` to have 4 rows"),
        ({"x": np.full((4, 3), np.nan)}, "`x` to hold finite numbers"),
        ({"y": -np.ones(4, int)}, "`y` to be class ids"),
        ({"split": np.zeros(4, int)}, "like b.npz .* but got .* split"),
    ],
)
def test_mismatched_arrays_are_refused(folder, arrays, words):
    write_arrays(folder, "client_10", 4, **arrays)
    assert_refused(folder, folder / "client_10.npz", words)


def test_mismatched_tables_are_refused(tables):
    _, folder = tables
    settings = {"target": "readmitted", "exclude": ["hospital"], "one_hot": ["sex", "ward"]}
    file = folder / "hospital 3.csv"
    text = file.read_text()
    assert_refused(folder, folder, "`target` to name the column .* but got None and None")
    assert_refused(folder, folder, "`num_classes` to be None, but got y and 2", target="y",
            num_classes=2)  # fmt: skip
    file.write_text(text.replace("pressure", "bmi"))
    assert_refused(
        folder, file, "the columns of hospital 0.csv but got bmi, pressure in only", **settings
    )
    header, first, *lines = text.splitlines()
    file.write_text("\n".join([header, "," + first.split(",", 1)[1], *lines]))
    assert_refused(folder, file, "'age' to hold finite .* in 1 rows, first in row 0", **settings)
    file.write_text(f"{header}\n")
    assert_refused(folder, file, "at least one row but got none", **settings)
    file.write_text("\n".join([header, "1,2,f,4,hospital 3,yes"]))
    source = ClientFolder(str(folder), **settings)
    source.load()
    assert "ward=4" in source.preparation, "a number is a name among names"


def test_invalid_folders_are_refused(folder):
    nowhere = folder / "nowhere"
    assert_refused(
        nowhere, nowhere, "found none at .*: set `data.dataset.folder`", FileNotFoundError
    )
    nowhere.mkdir()
    assert_refused(nowhere, nowhere, "one for each client, .* but got none in", FileNotFoundError)
    assert_refused(folder, folder, "`ids` to be left out for .npz .* but got \\['a'\\]", ids=["a"])
    write_arrays(folder / "test", "b", 3)
    assert_refused(folder, folder, "but got files both in it and in test in", FileNotFoundError)
    shutil.rmtree(folder / "test")
    (folder / "c.csv").write_text("x,y\n1,2\n")
    assert_refused(folder, folder, "either .npz files or tables but got both")


def test_two_forms_of_a_name_in_unicode_are_no_two_clients(tmp_path):
    """One client would have the training samples, and another one the test samples."""
    x, y = np.zeros((3, 2), np.float32), np.arange(3)
    for part, form in (("train", "NFC"), ("test", "NFD")):
        (tmp_path / part).mkdir()
        np.savez(tmp_path / part / f"{unicodedata.normalize(form, 'Genève')}.npz", x=x, y=y)
    with pytest.raises(ValueError, match=r"'Gene\\u0300ve' and 'Gen\\xe8ve', two forms"):
        ClientFolder(str(tmp_path)).load()


def test_two_files_of_a_client_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "a.tsv").write_text("x\ty\n1\t2\n")
    assert_refused(tmp_path, tmp_path, "one file for each client but got 2 for a", target="y")


def test_folder_equals_the_federation_of_a_joined_file(folder, tmp_path):
    arrays = ClientFolder(str(folder)).load()
    path = tmp_path / "folder" / "joined.npz"
    path.parent.mkdir()
    names = np.array([f"{id} {arrays.owner_name(int(id))}" for id in arrays.client])
    np.savez(path, x=arrays.inputs, y=arrays.targets, client=names)
    folder_clients, file_clients = (
        FederatedData(s, seed=0).clients for s in (ClientFolder(str(folder)), Npz(path))
    )
    assert folder_clients.digests["samples"] == file_clients.digests["samples"]
    assert folder_clients.digests["labels"] == file_clients.digests["labels"]
