"""Groups of samples: columns and arrays that are inputs only on demand."""

import numpy as np
import pytest
import torch
from made_data import write_celeba
from small_federations import Given, classes

from pl_fed.data import CelebA, ClientFolder, FederatedData, NpyFolder, Npz, Table
from pl_fed.data.source import Arrays

pytest.importorskip("pyarrow")

ROWS = "age,sex,ill,hospital\n44,f,no,Bern\n51,m,yes,Bern\n9,f,no,Uri\n30,m,yes,Uri\n"


@pytest.fixture
def patients(tmp_path):
    path = tmp_path / "patients.csv"
    path.write_text(ROWS)
    return str(path)


def test_group_of_a_table_is_no_input(patients):
    source = Table(patients, target="ill", client="hospital", group="sex")
    arrays = source.load()
    assert arrays.inputs.tolist() == [[44], [51], [9], [30]]
    assert arrays.groups.tolist() == [0, 1, 0, 1]
    assert arrays.list_group_names() == ("f", "m")
    assert "groups by sex: f, m" in source.preparation
    assert source.list_shared_quantities() == {"categories": "none for 'ill'"}


@pytest.mark.parametrize("role", ["one_hot", "ids"])
def test_group_is_an_input_on_demand(patients, role):
    arrays = Table(patients, target="ill", group="sex", exclude=["hospital"], **{role: ["sex"]})
    inputs = arrays.load().inputs
    numbers, codes = (inputs[:, :1], inputs[:, 1]) if role == "one_hot" else inputs
    assert numbers[:, 0].tolist() == [44, 51, 9, 30]
    assert codes.flatten().tolist() == ([1, 0, 1, 0] if role == "one_hot" else [0, 1, 0, 1])
    assert arrays.load().groups.tolist() == [0, 1, 0, 1]


def test_owner_may_be_the_group_and_the_group_may_be_excluded(patients):
    arrays = Table(patients, "ill", client="hospital", group="hospital", exclude=["sex"]).load()
    assert arrays.groups.tolist() == arrays.client.tolist() == [0, 0, 1, 1]
    assert (
        Table(patients, "ill", group="sex", exclude=["sex", "hospital"]).load().groups is not None
    )


def test_given_categories_order_the_groups(patients):
    categories = {"sex": ["m", "x"]}
    arrays = Table(patients, "ill", client="hospital", group="sex", categories=categories).load()
    assert arrays.groups.tolist() == [2, 0, 2, 0]
    assert arrays.list_group_names() == ("m", "x", "other")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": "ill"}, "`group` to name a column without another use but got 'ill'"),
        ({"group": "sect"}, "`group` to name a column but got 'sect', and none of this name"),
        ({"group": ["sex"]}, r"`group` to be the name of a column but got \['sex'\]"),
    ],
)
def test_wrong_groups_are_refused(patients, changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Table(patients, "ill", **changes).load()


def test_missing_and_real_groups_are_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,y,g\n1,a,f\n2,b,\n")
    with pytest.raises(ValueError, match="'g' to have a value in each row but got none in 1 rows"):
        Table(str(path), "y", group="g").load()
    path.write_text("x,y,g\n1,a,0.5\n2,b,1.5\n")
    with pytest.raises(ValueError, match="'g' to hold integers or text for `group` but got double"):
        Table(str(path), "y", group="g").load()


def test_groups_of_a_folder_of_tables_are_numbered_over_all_files(tmp_path):
    (tmp_path / "Bern.csv").write_text("x,y,g\n1,a,young\n2,b,young\n")
    (tmp_path / "Uri.csv").write_text("x,y,g\n1,a,old\n2,b,young\n")
    arrays = ClientFolder(str(tmp_path), target="y", group="g").load()
    assert arrays.groups.tolist() == [1, 1, 0, 1]
    assert arrays.list_group_names() == ("old", "young")
    assert arrays.inputs.shape == (4, 1)


def test_groups_of_arrays(tmp_path):
    x, y = np.zeros((3, 2), "float32"), np.array([0, 1, 1])
    np.savez(tmp_path / "texts.npz", x=x, y=y, group=["m", "f", "m"])
    arrays = Npz(str(tmp_path / "texts.npz")).load()
    assert (arrays.groups.tolist(), arrays.list_group_names()) == ([1, 0, 1], ("f", "m"))
    folder = tmp_path / "clients"
    folder.mkdir()
    np.savez(folder / "a.npz", x=x, y=y, group=[0, 2, 1])
    arrays = ClientFolder(str(folder)).load()
    assert (arrays.groups.tolist(), arrays.list_group_names()) == ([0, 2, 1], ("0", "1", "2"))
    for name, array in {"x": x, "y": y, "group": np.array(["m", "f", "m"])}.items():
        np.save(folder / f"{name}.npy", array)
    arrays = NpyFolder(str(folder)).load()
    assert (arrays.groups.tolist(), arrays.list_group_names()) == ([1, 0, 1], ("f", "m"))


def test_groups_of_celeba_are_an_attribute(tmp_path, monkeypatch):
    write_celeba(tmp_path, [5] * 12, monkeypatch)
    options = {"root": str(tmp_path), "attribute": "Young", "size": 8}
    arrays = CelebA(**options, group="Smiling").load()
    assert arrays.groups.tolist() == [1, 0] * 6
    assert arrays.list_group_names() == ("not Smiling", "Smiling")
    assert CelebA(**options).load().groups is None
    with pytest.raises(ValueError, match="`group` to be one of Young, Smiling but got 'Male'"):
        CelebA(**options, group="Male").load()


@pytest.mark.parametrize(
    ("groups", "names", "message"),
    [
        ([0, 2], ("a", "b"), "`groups` to be ids from 0 to below 2 but got 2"),
        ([0, -1], (), "`groups` to be ids from 0 to below 1000 but got -1"),
        ([0.5, 1.0], (), "`groups` to be integers but got torch.float32"),
        ([0], (), "`groups` to have 2 rows"),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups, names, message):
    with pytest.raises(ValueError, match=message):
        Arrays(
            torch.zeros(2, 1),
            torch.tensor([0, 1]),
            num_classes=2,
            groups=torch.tensor(groups),
            group_names=names,
        )


def test_groups_follow_their_samples():
    """Through selections of clients, copies of shared samples, and devices."""
    arrays = classes([6, 8], num_classes=2)
    groups = torch.arange(14) % 3
    data = FederatedData(Given(Arrays(
        arrays.inputs, arrays.targets, arrays.client, num_classes=2, groups=groups
    )), seed=0)  # fmt: skip
    clients = data.clients
    assert clients.group_names == ("0", "1", "2")
    assert clients.select(torch.tensor([1])).groups.tolist() == groups.tolist()
    shared = clients.select(torch.tensor([0, 1]))
    object.__setattr__(shared, "val", shared.train)
    copies = shared.copy_shared_samples()
    assert copies.groups.tolist() == groups[copies.ids].tolist()
    assert clients.to(torch.device("cpu"), torch.float64).groups.dtype == torch.int64
