"""The tutorials print what their page shows."""

import logging
import re

import pytest
import torch

from experiments.grid import ROOT
from experiments.tutorials import compare_under_attack, own_algorithm

PAGE = (ROOT / "experiments" / "tutorials" / "README.md").read_text()
NUMBER = re.compile(r"\d\.\d\d")


@pytest.fixture
def lightning_logs():
    """Restores the level of Lightning's logger, which a tutorial changes."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.slow
@pytest.mark.parametrize("tutorial", [compare_under_attack, own_algorithm])
def test_tutorial_prints_the_output_of_its_page(tutorial, capsys, lightning_logs):
    """Numbers may differ by rounding on other machines: one of 30 samples in the worst 10 %."""
    name = tutorial.__name__.rpartition(".")[2]
    shown = re.search(rf"<!-- {name} -->(.*)<!-- /{name} -->", PAGE, flags=re.DOTALL)[1]
    tutorial.main()
    printed = capsys.readouterr().out
    shown = re.sub(r"```\w*", "", shown)
    assert NUMBER.sub("x", printed).strip() == NUMBER.sub("x", shown).strip()
    numbers = [float(number) for number in NUMBER.findall(printed)]
    assert numbers == pytest.approx([float(n) for n in NUMBER.findall(shown)], abs=0.035)


def test_own_algorithm_passes_its_check():
    own_algorithm.check()


def test_memory_of_zero_remembers_the_last_broadcast():
    """The centre of the pull is then the one of Ditto."""
    client = own_algorithm.Remembering(torch.nn.Linear(1, 2), memory=0.0)
    client_round = client.new_round(clients=2, samples=3)
    client_round.states["remembered"] += 5.0
    client.run_begin(client_round)
    remembered = client_round.states["remembered"]
    torch.testing.assert_close(remembered, client_round.broadcast.parameters.expand(2, 4))
