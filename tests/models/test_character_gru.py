"""The recurrent language model. torch cannot stack its layers, so it is not in test_models.py."""

import pytest
import torch
from tables import table_test

from pl_fed.models import CharacterGRU


def test_logits_depend_on_earlier_characters_only():
    torch.manual_seed(0)
    net = CharacterGRU(7, embedding=3, hidden=5, layers=2)
    ids = torch.randint(7, (4, 6))
    changed = ids.clone()
    changed[:, 3] = (ids[:, 3] + 1) % 7
    before, after = net(ids), net(changed)
    assert before.shape == (4, 6, 7)
    assert torch.equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] != after[:, 3:]).any(dim=2).all()


def test_number_of_parameters():
    # embedding; two layers of three gates with input, state and two biases; the last layer
    gru = 3 * (3 * 5 + 5 * 5 + 2 * 5) + 3 * (2 * 5 * 5 + 2 * 5)
    net = CharacterGRU(7, embedding=3, hidden=5, layers=2)
    assert sum(p.numel() for p in net.parameters()) == 7 * 3 + gru + 5 * 7 + 7


@table_test("name", ["vocabulary", "embedding", "hidden", "layers"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"^Expected argument `{name}` to be at least 1 but got 0"):
        CharacterGRU(**{"vocabulary": 7, name: 0})
