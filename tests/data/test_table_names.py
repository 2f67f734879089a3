"""Names in tables stay as they are written, and row numbers are no inputs."""

import warnings

import pytest
from small_federations import run_rounds, sgd
from tables import table_test
from torch import nn

from pl_fed.clients import FedAvg
from pl_fed.data import ClientFolder, FederatedData, HuggingFace, Table

pa = pytest.importorskip("pyarrow")
pandas = pytest.importorskip("pandas")


def write(tmp_path, column, values, name="t.csv"):
    lines = [f"x,y,{column}", *(f"{k}.5,{k % 2},{value}" for k, value in enumerate(values))]
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    return str(tmp_path / name)


DISTINCT = {
    "leading zeros": ["007", "7", "0012", "12"],
    "signs and spaces": ["7", "+7", " 7", "7 "],
    "upper and lower case": ["ab", "AB", "Ab", "aB"],
    "truth": ["true", "True", "TRUE", "false"],
    "mixed types": ["1", "1.0", "one", "True"],
    "dates": ["2020-01-01", "2020-01-01 00:00", "2020-01-02", "2020-01-03"],
    "exponents": ["1e3", "1000", "1000.0", "x"],
}


@pytest.mark.parametrize("kind", DISTINCT)
def test_owners_stay_distinct(tmp_path, kind):
    values = DISTINCT[kind]
    arrays = Table(write(tmp_path, "owner", values), "y", client="owner").load()
    assert [arrays.names[k] for k in arrays.client] == values


@pytest.mark.parametrize("kind", DISTINCT)
def test_categories_and_classes_stay_distinct(tmp_path, kind):
    path = write(tmp_path, "c", DISTINCT[kind])
    assert Table(path, "y", one_hot=["c"]).load().inputs[:, 1:].sum(0).tolist() == [1.0] * 4
    assert Table(path, "y", inputs=[], ids=["c"]).load().inputs.unique().tolist() == [0, 1, 2, 3]
    arrays = Table(path, "c", exclude=["y"]).load()
    assert (arrays.num_classes, sorted(arrays.targets.tolist())) == (4, [0, 1, 2, 3])


def test_real_numbers_that_name_owners_are_refused_or_distinct(tmp_path):
    path = write(tmp_path, "owner", ["1.5", "1.50", "2.5", "2.25"])
    arrays = Table(path, "y", client="owner").load()
    assert [arrays.names[k] for k in arrays.client] == ["1.5", "1.50", "2.5", "2.25"]
    with pytest.raises(ValueError, match="'owner' to hold integers or text"):
        Table(write(tmp_path, "owner", ["1.5", "2.5"]), "y", client="owner").load()


def test_numbers_keep_their_order(tmp_path):
    arrays = Table(write(tmp_path, "c", ["10", "9", "-2", "100"]), "c", exclude=["y"]).load()
    assert arrays.targets.tolist() == [2, 1, 0, 3]


def test_missing_owners_are_refused_beside_leading_zeros(tmp_path):
    path = write(tmp_path, "owner", ["007", "", "7"])
    with pytest.raises(ValueError, match=r"'owner' to have a value in each row .* first in row 1"):
        Table(path, "y", client="owner").load()


@pytest.mark.parametrize("column", ["client", "target"])
def test_empty_text_is_a_missing_name(tmp_path, column):
    path = write(tmp_path, "c", ["north", " ", "south"])
    roles = {"target": "y", "client": "c"} if column == "client" else {"target": "c"}
    with pytest.raises(ValueError, match=r"'c' to have a value in each row .* first in row 1"):
        Table(path, **roles).load()


def test_classes_of_several_files_are_matched_by_name(tmp_path):
    for name, labels in {"a": ["1", "2"], "b": ["02", "2"], "c": ["yes", "1"]}.items():
        rows = [f"{k},{label}" for k, label in enumerate(labels)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,y", *rows]))
    source = ClientFolder(str(tmp_path), "y")
    arrays = source.load()
    assert source.preparation.endswith("classes: 02, 1, 2, yes")
    assert arrays.targets.tolist() == [1, 2, 0, 2, 3, 1]


FRAME = {"age": [3.0, 9.0, 4.0, 8.0], "ill": [0, 0, 1, 1]}


def save_nameless(frame, path):
    frame.to_csv(path)


def save_twice(frame, path):
    frame.to_csv(path)
    pandas.read_csv(path).to_csv(path)  # a nameless column, and `Unnamed: 0`


def save_reset(frame, path):
    frame.sample(frac=1, random_state=0).reset_index().to_csv(path, index=False)


def save_shuffled(frame, path):
    frame.sample(frac=1, random_state=0).to_parquet(path)


def save_named_index(frame, path):
    frame.rename_axis("patient").to_parquet(path, index=True)


def save_as_text(frame, path):
    frame.set_axis(["r1", "r2", "r3", "r4"]).to_csv(path)


@pytest.mark.parametrize(
    ("save", "name", "dropped"),
    [
        (save_nameless, "t.csv", "''"),
        (save_as_text, "t.csv", "''"),
        (save_twice, "t.csv", "'', 'Unnamed: 0'"),
        (save_reset, "t.csv", "'index'"),
        (save_shuffled, "t.parquet", "'__index_level_0__'"),
        (save_named_index, "t.parquet", "'patient'"),
    ],
)
def test_row_numbers_are_no_inputs(tmp_path, save, name, dropped):
    path = tmp_path / name
    save(pandas.DataFrame(FRAME), path)
    source = Table(str(path), "ill")
    with pytest.warns(UserWarning, match=f"leaves out the column {dropped} of {name}, because"):
        arrays = source.load()
    assert sorted(arrays.inputs.flatten().tolist()) == [3.0, 4.0, 8.0, 9.0]
    assert source.preparation == "inputs: age; classes: 0, 1"


def test_named_columns_of_row_numbers_stay(tmp_path):
    path = tmp_path / "t.csv"
    pandas.DataFrame(FRAME).to_csv(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Table(str(path), "ill", inputs=["", "age"]).load().inputs.shape[1] == 2
        assert Table(str(path), "ill", exclude=[""]).load().inputs.shape[1] == 1
        assert Table(str(path), "ill", client="").load().client.tolist() == [0, 1, 2, 3]


def test_a_feature_called_index_is_an_input(tmp_path):
    path = write(tmp_path, "index", ["3", "3", "1", "2"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Table(path, "y").load().inputs.shape[1] == 2


def test_row_numbers_of_client_files_are_no_inputs(tmp_path):
    for name in ("a", "b"):
        pandas.DataFrame(FRAME).to_csv(tmp_path / f"{name}.csv")
    with pytest.warns(UserWarning, match="leaves out the column '' of the files in"):
        arrays = ClientFolder(str(tmp_path), "ill").load()
    assert arrays.inputs.shape == (8, 1)


def test_row_numbers_of_hugging_face_are_no_inputs():
    datasets = pytest.importorskip("datasets")
    frame = pandas.DataFrame({"age": [3.0, 9.0, 4.0], "label": [0, 1, 0]}, index=[2, 0, 1])
    source = HuggingFace(datasets.Dataset.from_pandas(frame))
    assert "__index_level_0__" in source.dataset.column_names
    with pytest.warns(UserWarning, match="leaves out the column '__index_level_0__'"):
        assert source.load().inputs.shape == (3,)


def test_owner_can_be_an_input(tmp_path):
    path = write(tmp_path, "user", ["u2", "u1", "u2", "u3"])
    arrays = Table(path, "y", client="user", ids=["user"]).load()
    numbers, ids = arrays.inputs
    assert (numbers.shape, ids.flatten().tolist()) == ((4, 1), [1, 0, 1, 2])
    assert arrays.client.tolist() == [1, 0, 1, 2]
    path = write(tmp_path, "user", ["4", "5", "4", "5"])
    arrays = Table(path, "y", client="user", inputs=["user", "x"]).load()
    assert arrays.inputs.tolist() == [[4, 0.5], [5, 1.5], [4, 2.5], [5, 3.5]]
    assert Table(path, "y", client="user").load().inputs.shape[1] == 1


def test_given_categories_number_values_alike_for_all_clients(tmp_path):
    given = {"c": ["dog", "cat"]}
    for extra, column in (("zebra", 2), ("aardvark", 2), ("cat", 1)):
        path = write(tmp_path, "c", ["cat", "dog", extra])
        source = Table(path, "y", one_hot=["c"], categories=given)
        one_hot = source.load().inputs[:, 1:]
        assert one_hot.argmax(1).tolist() == [1, 0, column]
        assert one_hot.shape == (3, 3)
        assert "c=dog, c=cat, c=other" in source.preparation
        assert Table(path, "y", ids=["c"], categories=given).load().inputs[1].tolist() == [
            [1], [0], [column]
        ]  # fmt: skip


@pytest.mark.parametrize("texts", [("true", "false"), ("True", "False"), ("TRUE", "FALSE")])
def test_given_booleans_are_the_texts_of_other_programs(tmp_path, texts):
    path = write(tmp_path, "c", [*texts, texts[0], "perhaps"])
    settings = {"categories": {"c": [True, False]}}
    inputs = Table(path, "y", one_hot=["c"], **settings).load().inputs[:, 1:]
    assert inputs.argmax(1).tolist() == [0, 1, 0, 2]
    path = write(tmp_path, "c", [*texts, texts[0]])
    assert Table(path, "c", exclude=["y"], **settings).load().targets.tolist() == [0, 1, 0]


@pytest.mark.parametrize("texts", [("no", "yes"), ("Off", "On")])
def test_given_booleans_are_refused_for_names_that_yaml_reads_as_booleans(tmp_path, texts):
    path, categories = write(tmp_path, "c", [*texts, texts[0]]), {"c": [False, True]}
    words = f"values of column 'c', such as '{texts[0]}', but got False: put the names yes, no"
    with pytest.raises(ValueError, match=words):
        Table(path, "y", one_hot=["c"], categories=categories).load()
    with pytest.raises(ValueError, match=words):
        Table(path, "c", exclude=["y"], categories=categories).load()


def test_given_integers_are_numbers_that_pandas_writes_beside_a_missing_value(tmp_path):
    path = write(tmp_path, "c", ["2.0", "", "1.0", "1.5"])
    for values, expected in (([1, 2], [1, 2, 0, 2]), ([2, "1.0"], [0, 2, 1, 2])):
        source = Table(path, "y", inputs=[], ids=["c"], categories={"c": values})
        assert source.load().inputs.flatten().tolist() == expected
    path = write(tmp_path, "c", ["2.0", "1.0", "2.0"])
    arrays = Table(path, "c", exclude=["y"], categories={"c": [2, 1]}).load()
    assert (arrays.targets.tolist(), arrays.class_names) == ([0, 1, 0], ("2", "1"))


def test_given_classes_number_targets(tmp_path):
    path = write(tmp_path, "c", ["7", "007", "7"])
    arrays = Table(path, "c", exclude=["y"], categories={"c": ["7", "007", "9"]}).load()
    assert (arrays.targets.tolist(), arrays.num_classes) == ([0, 1, 0], 3)
    with pytest.raises(ValueError, match="classes that `categories` names but got '007'"):
        Table(path, "c", exclude=["y"], categories={"c": [7]}).load()


@table_test(
    ("categories", "error", "words"),
    [
        ({"c": "cat"}, TypeError, "a list of values for each column but got"),
        ([1], TypeError, "a list of values for each column but got"),
        ({"x": [1]}, ValueError, "`categories` to name columns of `one_hot` .* but got 'x'"),
        ({"c": [1, "1"]}, ValueError, "each value of 'c' once but got '1' twice"),
    ],
)
def test_invalid_categories_are_refused(categories, error, words):
    with pytest.raises(error, match=f"^Expected .*{words}"):
        Table("a.csv", "y", one_hot=["c"], categories=categories)


def test_a_table_with_leading_zeros_is_a_federation(tmp_path):
    path = write(tmp_path, "owner", ["007", "7", "007", "7", "007", "7"])
    data = FederatedData(Table(path, "y", "owner"), val_fraction=0, test_fraction=0, batch_size=3)
    assert data.clients.owners == [["007"], ["7"]]
    run_rounds(FedAvg(nn.Linear(1, 2), optimizer=sgd(0.1)), data, 1)


@pytest.mark.parametrize("values", [["1.0", "2.5", "3.0"], ["12.50", "3", "1e3"], ["0.0", "1.0"]])
def test_real_valued_targets_stay_real_however_they_are_written(tmp_path, values):
    arrays = Table(write(tmp_path, "c", values), "c", exclude=["y"]).load()
    assert (arrays.targets.flatten().tolist(), arrays.num_classes) == ([*map(float, values)], 0)
    arrays = Table(write(tmp_path, "c", values), "c", exclude=["y"], classes=True).load()
    assert arrays.num_classes == len(values)
    categories = {"c": values}
    arrays = Table(write(tmp_path, "c", values), "c", exclude=["y"], categories=categories).load()
    assert arrays.targets.tolist() == [*range(len(values))]


def test_real_valued_targets_of_several_files_stay_real(tmp_path):
    write(tmp_path, "c", ["1.0", "2.50"], "a.csv")
    write(tmp_path, "c", ["3", "4"], "b.csv")
    arrays = ClientFolder(str(tmp_path), "c", exclude=["y"]).load()
    assert arrays.targets.tolist() == [[1.0], [2.5], [3.0], [4.0]]


@pytest.mark.parametrize("values", [["1.5", "2.5", "?"], ['"1,200"', '"3,500"'], ["2.5%", "3.0%"]])
def test_target_of_numbers_as_text_is_taken_for_classes_with_a_warning(tmp_path, values):
    path = write(tmp_path, "c", values)
    with pytest.warns(UserWarning, match="takes the target 'c' for classes, because its column"):
        assert Table(path, "c", exclude=["y"]).load().num_classes == len(values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Table(path, "c", exclude=["y"], classes=True).load().num_classes == len(values)
        path = write(tmp_path, "c", ["v1.5", "2020-01-01", "9"])
        assert Table(path, "c", exclude=["y"]).load().num_classes == 3
