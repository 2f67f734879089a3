"""PFLlib's setting builds, and published figures are compared with ours."""

from pathlib import Path

import pytest
import torch
from further_cases import mark_others

from experiments.experiment import read_csv, write_csv
from experiments.pfllib_published import page
from experiments.pfllib_published.nets import FedAvgCNN
from pl_fed.studies.cell_configs import check_config
from pl_fed.studies.study import Study

FOLDER = Path(page.__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_others(["study", "quick"], "quick"))
def test_each_published_cell_has_a_cell_that_builds(name):
    cells = Study.from_file(FOLDER / f"{name}.yaml").cells
    keys = {(cell.values["split"], cell.values["method"]) for cell in cells}
    assert keys == {(row["split"], row["method"]) for row in read_csv(FOLDER / "published.csv")}
    methods = {cell.values["method"]: cell for cell in cells}
    for cell in methods.values():
        check_config(cell.arguments)


def test_net_has_the_layers_of_pfllib():
    net = FedAvgCNN()
    assert sum(parameter.numel() for parameter in net.parameters()) == 582_026
    assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_page_marks_differences_above_the_band(tmp_path, monkeypatch):
    rows = [
        {"study": "s", "split": "practical", "method": method, "seed": seed, "accuracy": accuracy}
        for method, seed, accuracy in (
            ("Ditto", "0", "96.0"),
            ("Ditto", "1", "97.0"),
            ("FedAvg", "0", "80"),
        )
    ]
    write_csv(tmp_path / "results.csv", rows)
    monkeypatch.setattr(page, "OURS", tmp_path / "results.csv")
    text = page.make_page()
    assert "1 of 2 agree" in text
    assert "−0.97 ✓" in text, "96.5 beside 97.47"
    assert "−5.85 ✗" in text
