"""The setting of a published table of fair methods builds, with each of its methods."""

from pathlib import Path

import pytest

from pl_fed.studies.cell_configs import check_config
from pl_fed.studies.study import Study

FOLDER = Path(__file__).parents[2] / "experiments" / "fair_published"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["study", "best"])
def test_each_label_of_the_study_builds(name):
    met = set()
    for cell in Study.from_file(FOLDER / f"{name}.yaml").cells:
        if not {*cell.values.items()} <= met:
            met |= {*cell.values.items()}
            check_config(cell.arguments)
    assert {axis for axis, _ in met} == {"method", "split", "work"}
