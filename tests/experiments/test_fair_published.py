"""The setting of a published table of fair methods builds, with each of its methods."""

from pathlib import Path

import pytest
from covering_cells import choose_cells, labels_of
from further_cases import mark_others

from pl_fed.studies.cell_configs import check_config
from pl_fed.studies.study import Study

FOLDER = Path(__file__).parents[2] / "experiments" / "fair_published"


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_others(["study", "best"], "best"))
def test_each_label_of_the_study_builds(name):
    cells = Study.from_file(FOLDER / f"{name}.yaml").cells
    for cell in choose_cells(cells, labels_of):
        check_config(cell.arguments)
    assert {*cells[0].values} == {"method", "split", "work"}
