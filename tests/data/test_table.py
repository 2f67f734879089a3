"""Tables: CSV and parquet files, and the use of their columns."""

import csv
import math
import sys

import numpy as np
import pytest
import torch
from made_data import write_patients
from small_federations import run_rounds, seeded, sgd
from tables import table_test
from torch import nn

from pl_fed.clients import FedAvg
from pl_fed.data import FederatedData, Table
from pl_fed.partitioners import Dirichlet
from pl_fed.tasks import Classification

pa = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

ROWS = {
    "age": [44, 51, 9, 30],
    "weight": [70.5, 80.25, 31.0, 66.0],
    "sex": ["f", "m", "f", "m"],
    "job": ["nurse", "clerk", "pupil", "clerk"],
    "smokes": [True, False, False, True],
    "hospital": ["Uri", "Bern", "Bern", "Uri"],
    "part": ["train", "train", "test", "val"],
    "ill": ["no", "yes", "no", "yes"],
}
OTHER = {"client": "hospital", "split": "part", "one_hot": ["sex"], "ids": ["job"]}


@pytest.fixture(params=["csv", "csv.gz", "tsv", "parquet"])
def write_table(request, tmp_path):
    """Write a table in every format, with replaced columns; ``None`` omits a column."""

    def write(**columns):
        rows = {n: v for n, v in {**ROWS, **columns}.items() if v is not None}
        return save(tmp_path / f"table.{request.param}", pa.table(rows))

    return write


def save(path, table):
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
        return str(path)
    from pyarrow import csv as arrow_csv

    delimiter = "\t" if path.suffix == ".tsv" else ","
    options = arrow_csv.WriteOptions(delimiter=delimiter)
    with pa.output_stream(path) as stream:  # compressed by the suffix
        arrow_csv.write_csv(table, stream, options)
    return str(path)


def save_parquet(tmp_path, **columns):
    rows = {n: v for n, v in {**ROWS, **columns}.items() if v is not None}
    return save(tmp_path / "table.parquet", pa.table(rows))


def test_columns_become_inputs_targets_clients_and_parts(write_table):
    arrays = Table(write_table(), target="ill", **OTHER).load()
    numbers, ids = arrays.inputs
    assert numbers.dtype == torch.float64
    assert numbers.tolist() == [
        [44, 70.5, 1, 0, 1],  # age, weight, sex=f, sex=m, smokes
        [51, 80.25, 0, 1, 0],
        [9, 31, 1, 0, 0],
        [30, 66, 0, 1, 1],
    ]
    assert ids.dtype == torch.int64
    assert ids.tolist() == [[1], [0], [2], [0]]
    assert (arrays.targets.tolist(), arrays.num_classes) == ([0, 1, 0, 1], 2)
    assert [arrays.owner_name(int(id)) for id in arrays.client] == ROWS["hospital"]
    assert arrays.split.tolist() == [0, 0, 2, 1]


def test_preparation_names_inputs_categories_and_classes(tmp_path):
    table = Table(save_parquet(tmp_path), target="ill", **OTHER)
    data = FederatedData(table, split="own", val_fraction=0, test_fraction=0, seed=0)
    assert data.preparation["dataset"]["preparation"] == (
        "inputs: age, weight, sex=f, sex=m, smokes; ids: job (clerk, nurse, pupil);"
        " classes: no, yes"
    )


def test_inputs_are_in_the_order_of_the_setting(tmp_path):
    names = {"target": "ill", "inputs": ["weight", "sex", "age"], "one_hot": ["sex"]}
    arrays = Table(save_parquet(tmp_path), **names).load()
    assert arrays.inputs[1].tolist() == [80.25, 0, 1, 51]
    arrays = Table(save_parquet(tmp_path), "ill", inputs=["age"], ids=["job"]).load()
    assert [part.shape[1] for part in arrays.inputs] == [1, 1]
    arrays = Table(save_parquet(tmp_path), "ill", inputs=["job"], ids=["job", "sex"]).load()
    assert arrays.inputs.tolist() == [[1, 0], [0, 1], [2, 0], [0, 1]]


def test_dtype_of_a_column_determines_the_targets(tmp_path):
    base_settings = {"exclude": ["ill", "part"], "one_hot": ["sex", "job", "hospital"]}

    def targets(name, **settings):
        columns = [column for column in base_settings["exclude"] if column != name]
        settings = {**base_settings, "exclude": columns, **settings}
        arrays = Table(save_parquet(tmp_path), name, **settings).load()
        return arrays.targets.tolist(), arrays.num_classes

    assert targets("weight") == ([[70.5], [80.25], [31.0], [66.0]], 0)
    assert targets("age") == ([2, 3, 0, 1], 4)
    assert targets("age", classes=False) == ([[44], [51], [9], [30]], 0)
    assert targets("smokes") == ([1, 0, 0, 1], 2)
    assert targets("ill") == ([0, 1, 0, 1], 2)
    assert targets("weight", classes=True) == ([2, 3, 0, 1], 4)
    assert targets(["smokes", "age"]) == ([[1, 44], [0, 51], [0, 9], [1, 30]], 0)


def test_class_ids_from_zero_stay_the_same(write_table):
    labels = [2, 0, 1, 2]
    table = Table(write_table(ill=labels), "ill", inputs=["age"])
    assert table.load().targets.tolist() == labels


@pytest.mark.parametrize("values", [[10, 9, 2, 9], ["10", "9", "2", "9"]])
def test_clients_are_sorted_as_numbers_or_texts(tmp_path, values):
    arrays = Table(save_parquet(tmp_path, hospital=values), "ill", "hospital", ["age"]).load()
    names = [arrays.owner_name(id) for id in range(3)]
    assert names == (["2", "9", "10"] if isinstance(values[0], int) else ["10", "2", "9"])
    assert [arrays.owner_name(int(id)) for id in arrays.client] == [str(v) for v in values]


def test_missing_categories_are_a_category(write_table):
    arrays = Table(write_table(job=[None, 7, 3, None]), "ill", inputs=["job"], ids=["job"]).load()
    assert arrays.inputs.flatten().tolist() == [2, 1, 0, 2]
    arrays = Table(
        write_table(job=[None, 7, 3, None]), "ill", inputs=["job"], one_hot=["job"]
    ).load()
    assert arrays.inputs.tolist() == [[0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 1]]


def test_not_a_number_is_a_missing_value(tmp_path):
    """Some programs write it to parquet files as a number."""
    path = save_parquet(tmp_path, age=[math.nan, 7.0, 3.0, None])
    arrays = Table(path, "ill", inputs=["age"], ids=["age"]).load()
    assert arrays.inputs.flatten().tolist() == [2, 1, 0, 2]
    for settings in ({"classes": True}, {"categories": {"age": [3, 7]}}):
        with pytest.raises(ValueError, match="'age' to have a value in each row but got none in 2"):
            Table(path, "age", inputs=["weight"], **settings).load()


def test_integers_that_would_be_rounded_are_refused_by_column(tmp_path):
    path = save_parquet(tmp_path, age=[2**53 + 1, 1, 2, 3])
    words = r"column 'age' to hold integers that float64 does not round, up to 2\^53, but got int64"
    with pytest.raises(ValueError, match=words):
        Table(path, "ill", inputs=["age"]).load()


def test_missing_text_of_a_csv_file_is_the_last_category(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text("job,ill\nnurse,0\n,1\nbaker,0\n ,1")
    for settings in ({}, {"categories": {"job": ["baker", "nurse"]}}):
        arrays = Table(str(path), "ill", inputs=["job"], ids=["job"], **settings).load()
        assert arrays.inputs.flatten().tolist() == [1, 2, 0, 2]


def test_given_integers_are_categories_of_a_real_column(tmp_path):
    """pandas writes a column of integers with a missing value as real numbers."""
    path = save_parquet(tmp_path, age=[2.0, 1.0, None, 1.5])
    for values, expected in (([1, 2], [1, 0, 2, 2]), ([2.0, 1], [0, 1, 2, 2])):
        settings = {"inputs": ["weight"], "ids": ["age"], "categories": {"age": values}}
        assert Table(path, "ill", **settings).load().inputs[1].flatten().tolist() == expected
    path = save_parquet(tmp_path, age=[2.0, 1.0, 1.0, 2.0])
    arrays = Table(path, "age", inputs=["weight"], categories={"age": [2, 1]}).load()
    assert (arrays.targets.tolist(), arrays.class_names) == ([0, 1, 1, 0], ("2", "1"))


def test_categories_with_a_dictionary_and_other_types(tmp_path):
    from datetime import date
    from decimal import Decimal

    job = pa.array(ROWS["job"]).dictionary_encode()
    weight = [Decimal("1.25"), Decimal("2.50"), Decimal("3.75"), Decimal("4.00")]
    days = [date(2020, 1, d) for d in (2, 1, 2, 1)]
    path = save_parquet(tmp_path, job=job, weight=weight, part=days, smokes=None)
    arrays = Table(path, "job", "part", ["weight"]).load()
    assert arrays.targets.tolist() == [1, 0, 2, 0]
    assert arrays.names == ["2020-01-01", "2020-01-02"]
    assert arrays.inputs.flatten().tolist() == [1.25, 2.5, 3.75, 4]


@pytest.mark.slow
def test_table_equals_that_of_the_csv_module(tmp_path):
    """A table larger than a block of the reader, with a column whose type changes at its end."""
    draw = np.random.default_rng(0)
    count = 60_000
    x = draw.normal(size=(count, 3)).round(6)
    late_column = [*range(count - 1), 0.5]  # integers, and one real number
    owners = [f'client {k}, "{k % 7}"' for k in draw.integers(50, size=count)]
    labels = draw.integers(1, 4, size=count)  # from 1
    path = tmp_path / "large.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "c", "late", "owner", "y"])
        writer.writerows(zip(*x.T, late_column, owners, labels))
    assert path.stat().st_size > 3e6
    arrays = Table(str(path), "y", "owner").load()
    expected = np.column_stack([x, late_column])
    assert np.array_equal(arrays.inputs.numpy(), expected)
    assert np.array_equal(arrays.targets.numpy(), labels - 1)
    assert arrays.names == sorted(set(owners))
    assert [arrays.names[k] for k in arrays.client[:100]] == owners[:100]


def test_partitioner_splits_by_the_classes(tmp_path):
    path = write_patients(tmp_path)
    table = Table(str(path), "readmitted", exclude=["hospital"], one_hot=["sex"], ids=["ward"])
    clients = FederatedData(table, Dirichlet(0.3), 3, seed=0).clients
    assert (clients.num_clients, clients.num_classes) == (3, 2)
    assert clients.owners == []


def test_normalization_applies_to_numbers_only(tmp_path):
    path = write_patients(tmp_path)
    table = Table(str(path), "readmitted", "hospital", one_hot=["sex"], ids=["ward"])
    data = FederatedData(table, normalize="feature", seed=0)
    numbers, ids = data.clients.inputs
    before, ids_before = table.load().inputs
    train = before[data.clients.train.index]
    std, mean = torch.std_mean(train, 0, correction=0)
    assert torch.allclose(numbers, (before - mean) / (std + 0.001))
    assert torch.equal(ids, ids_before)
    assert data.preparation["mean"] == [pytest.approx(mean.tolist()), None]
    plain = FederatedData(table, seed=0)
    assert torch.equal(plain.clients.inputs[0], before)
    assert plain.preparation["mean"] is None


class Wards(nn.Module):
    """Embeddings of the ids beside the numbers, as nets for tables have them."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(3, 2), nn.Linear(4 + 2, 2)

    def forward(self, numbers, ids):
        return self.linear(torch.cat([numbers, self.embedding(ids[:, 0])], 1))


@pytest.mark.slow
def test_a_net_with_embeddings_learns_the_table(tmp_path):
    path = write_patients(tmp_path)
    table = Table(str(path), "readmitted", "hospital", one_hot=["sex"], ids=["ward"])
    settings = {"val_fraction": 0.0, "test_fraction": 0.0, "normalize": "feature", "seed": 0}
    data = FederatedData(table, **settings)
    client = FedAvg(seeded(Wards), optimizer=sgd(0.5), local_epochs=2)
    outcomes = [run_rounds(client, data, 5, engine=name) for name in ("one_by_one", "stacked")]
    assert outcomes[0].distance(outcomes[1]) < 1e-10
    losses = [float(report["train/loss"]) for report in outcomes[0].reports]
    assert losses[-1] < 0.5 * losses[0]


def assert_refused(path, words, target="ill", **settings):
    with pytest.raises(ValueError, match=words) as failed:
        Table(path, target, **settings).load()
    sentence = str(failed.value)
    assert sentence.startswith("Expected ")
    assert sentence.endswith(".")
    assert path in sentence
    assert "\n" not in sentence


HOLES = [1.0, None, 3.0, float("nan")]


@pytest.mark.parametrize(
    ("columns", "settings", "words"),
    [
        ({}, {"target": "sick"}, r"`target` to name a column but got 'sick', and none .*age, wei"),
        ({}, {"client": "owner"}, "`client` to name a column but got 'owner'"),
        ({}, {"one_hot": ["Sex"]}, "`one_hot` to name a column but got 'Sex'"),
        ({}, {}, "column 'sex' to hold numbers but got string: add it to `one_hot` or `ids` .*"),
        ({"age": HOLES}, {"inputs": ["age"]}, "'age' to hold finite .* in 2 rows, first in row 1:"),
        ({"age": [None] * 4}, {"inputs": ["age"]}, "'age' .* in 4 rows, first in row 0"),
        ({"age": HOLES}, {"target": "age", "inputs": ["weight"]}, "'age' to hold finite numbers"),
        ({"ill": [None, 1, 0, 1]}, {"inputs": ["age"]}, "'ill' to have a value .* in 1 rows,"),
        ({"hospital": [1, 2, None, 1]}, {"client": "hospital", "inputs": ["age"]}, "'hospital' to"),
        (
            {"hospital": [1.5, 2, 3, 1]},
            {"client": "hospital", "inputs": ["age"]},
            "integers or text for `client` but got double: round it",
        ),
        (
            {"part": ["train", "dev", "test", "test"]},
            {"split": "part", "inputs": ["age"]},
            "'part' to hold train, val and test, .* but got 'dev'",
        ),
        ({"job": [[1], [2], [3], [4]]}, {"inputs": ["age"], "ids": ["job"]}, "categories but got"),
        ({"weight": [1e39] * 4}, {"inputs": ["weight"]}, "finite numbers but got NaN or infinity"),
        ({n: None for n in ROWS if n != "ill"}, {}, "a column of inputs but got none"),
        ({n: v[:0] for n, v in ROWS.items()}, {"inputs": ["age"]}, "at least one row but got none"),
    ],
)
def test_unsuitable_tables_are_refused(tmp_path, columns, settings, words):
    assert_refused(save_parquet(tmp_path, **columns), words, **settings)


@table_test(
    ("settings", "error", "words"),
    [
        ({"target": []}, ValueError, "`target` to name a column but got an empty list"),
        ({"target": "a", "client": "a"}, ValueError, "`client` .* 'a', which is also in `target`"),
        ({"target": "a", "ids": ["b"], "one_hot": ["b"]}, ValueError, "which is also in `one_hot`"),
        ({"target": "a", "ids": ["a"]}, ValueError, "`target` .* also in `one_hot` or `ids`"),
        ({"target": "a", "inputs": ["b", "b"]}, ValueError, "`inputs` .* also in `inputs`"),
        ({"target": "a", "one_hot": "sex"}, TypeError, r"a list of columns .* write \[sex\]"),
        ({"target": 3}, TypeError, "`target` to be a list of names of columns but got 3"),
        ({"target": "a", "client": ["b"]}, TypeError, "`client` to be the name of a column"),
        ({"target": ["a", "b"], "classes": True}, ValueError, "`classes` to be left out for sev"),
        ({"target": "a", "path": "a.xlsx"}, ValueError, ".csv, .tsv or .parquet file but got a.xl"),
        ({"target": "a", "delimiter": "; "}, ValueError, "`delimiter` to be one character"),
    ],
)
def test_invalid_settings_are_refused(settings, error, words):
    with pytest.raises(error, match=f"^Expected argument {words}" if words[0] == "`" else words):
        Table(**{"path": "a.csv", **settings})


def test_missing_and_broken_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"a CSV file but found none at .*no.csv: set `da"):
        Table(str(tmp_path / "no.csv"), "y").load()
    path = tmp_path / "broken.parquet"
    path.write_bytes(b"PAR1 but no more")
    assert_refused(str(path), "to be a parquet file but got ArrowInvalid")
    path = tmp_path / "broken.csv"
    path.write_text("a,ill\n1,2\n3\n")
    assert_refused(str(path), "to be a CSV file but got ArrowInvalid: .*Expected 2 columns, got 1")
    path.write_text("a,a,ill\n1,2,3\n")
    assert_refused(str(path), "to name each column once but got 'a' twice: rename it")


def test_other_delimiters(tmp_path):
    path = tmp_path / "semicolons.csv"
    path.write_text("a;ill\n1;2\n3;4\n")
    assert Table(str(path), "ill", delimiter=";").load().inputs.tolist() == [[1], [3]]
    assert_refused(str(path), r"got 'ill', and none of this name \(columns: a;ill\)")


def test_missing_pyarrow_is_reported(tmp_path, monkeypatch):
    path = save_parquet(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"pyarrow to be installed for table\.parquet"):
        Table(path, "ill").load()


def test_net_of_a_regression_says_how_integers_become_real_targets(tmp_path):
    table = Table(save_parquet(tmp_path), "age", inputs=["weight"])
    with pytest.raises(ValueError, match=r"up to 3\. .* set `data.dataset.classes: false`\.$"):
        Classification().check_outputs(torch.zeros(2, 1), table.load().targets[:2], 4)
