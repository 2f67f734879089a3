"""The data and the configs that are FedTilt's alone."""

import pytest
import torch
import yaml

from experiments.fedtilt import run as fedtilt
from experiments.fedtilt.data import Unbalanced
from pl_fed.studies.cell_configs import check_config

CONFIGS = {
    f"{s} {m} {split}": fedtilt.job(s, split, m, 0).config
    for number, (s, split) in enumerate(zip(fedtilt.SETTINGS, 3 * list(fedtilt.SPLITS)))
    for m in list(fedtilt.METHODS)[number % 2 :: 2]  # a setting and a method replace options
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_fit_accepts_the_config(name, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(CONFIGS[name]))
    config = check_config(["--config", str(file)]).complete_config
    assert config["model"]["class_path"] == CONFIGS[name]["model"]["class_path"]


def test_unbalanced_clients_have_two_classes_ten_to_one():
    labels = torch.arange(4).repeat(220)
    parts = Unbalanced(10).split(labels, 8, torch.Generator().manual_seed(3))
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(880))
    counts = torch.stack([labels[part].bincount(minlength=4) for part in parts])
    assert torch.equal(counts.sort(1).values, torch.tensor([[0, 0, 10, 100]]).expand(8, 4))
    for group in counts.split(4):
        assert torch.equal(group.sum(0), torch.full((4,), 110)), (
            "each class is once larger and once smaller"
        )
    with pytest.raises(ValueError, match="`num_clients` to be a multiple of the 4 classes but got"):
        Unbalanced().split(labels, 6, torch.Generator())
