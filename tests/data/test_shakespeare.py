"""Shakespeare by speaking role, on a small text of the same form."""

import pytest
import torch
from made_data import write_plays

from pl_fed.data import Shakespeare

SPEECHES = [("All", "abcdefg"), ("Duke", "ab"), ("All", "hi\nj"), ("Fool", "aaaaaaaaaaaa")]


def decode_row(arrays, row, alphabet):
    return "".join(alphabet[int(position)] for position in row)


def test_sequences_are_cut_from_the_joined_speeches_of_a_role(tmp_path):
    text = write_plays(tmp_path, SPEECHES)
    alphabet = sorted({*text})
    arrays = Shakespeare(str(tmp_path), length=4, min_characters=5).load()
    assert arrays.names == ["All", "Fool"], "the Duke speaks too little"
    assert arrays.client.tolist() == [0, 0, 1, 1]
    assert arrays.inputs.dtype == arrays.targets.dtype == torch.int64
    inputs = [decode_row(arrays, row, alphabet) for row in arrays.inputs]
    targets = [decode_row(arrays, row, alphabet) for row in arrays.targets]
    assert inputs == ["abcd", "efg\n", "aaaa", "aaaa"]  # the last 3 characters of All are too few
    assert targets == ["bcde", "fg\nh", "aaaa", "aaaa"]


def test_a_role_needs_one_character_more_than_a_sequence(tmp_path):
    write_plays(tmp_path, [("Exact", "abcd"), ("Longer", "abcde")])
    arrays = Shakespeare(str(tmp_path), length=4, min_characters=1).load()
    assert arrays.names == ["Longer"]


def test_the_mark_at_the_beginning_of_a_file_is_no_character(tmp_path):
    text = write_plays(tmp_path, SPEECHES)
    source = Shakespeare(str(tmp_path), length=4, min_characters=5)
    expected = source.load()
    (tmp_path / "Shakespeare" / "input.txt").write_text(text, encoding="utf-8-sig")
    arrays = source.load()
    assert arrays.names == ["All", "Fool"], "the first speech of All has no other role"
    assert torch.equal(arrays.inputs, expected.inputs)


def test_a_text_without_long_roles_is_refused(tmp_path):
    write_plays(tmp_path, SPEECHES)
    with pytest.raises(ValueError, match=r"input.txt to be speeches .* of 99 characters .* lower"):
        Shakespeare(str(tmp_path), length=4, min_characters=99).load()


def test_missing_text_is_reported_in_one_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`root` to be a folder with Shakespeare/input"):
        Shakespeare(str(tmp_path)).load()


@pytest.mark.slow
def test_the_real_text_has_141_roles(real_data):
    if real_data is None:
        pytest.skip("PL_FED_DATA does not name a folder with the real data")
    arrays = Shakespeare(real_data).load()
    assert len(arrays.names) == 141
    assert int(arrays.inputs.max()) < 65
    assert arrays.client.bincount().min() >= 12, "1,000 characters make 12 sequences of 80"
