"""Data of the boards of personalization: exact bags, characters and features on small files."""

import numpy as np
import pytest
import torch

from experiments.personalization.data import Articles, ImageFeatures, PatchFeatures, SomeRoles


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_FED_DATA", str(tmp_path))
    return tmp_path


def test_articles_are_bags_of_hashed_words(root):
    (root / "AGNews").mkdir()
    (root / "AGNews" / "ag_news_test.csv").write_text(
        "title,description,class\n"
        "Cup final,the final of the cup,Sports\n"
        "Shares fall,oil and shares,Business\n"
    )
    arrays = Articles(samples=2, words=10_000).load()
    assert list(arrays.class_names) == ["Business", "Sports"]
    words = arrays.inputs.sum(1)[arrays.targets.argsort()]
    assert words.tolist() == [3.0, 2.0], "shares, fall, oil; cup, final"
    assert set(arrays.inputs.unique().tolist()) == {0.0, 1.0}


def test_samples_of_roles_are_five_characters_and_the_next(root):
    (root / "Shakespeare").mkdir()
    first, second = "abcdefghijklmnop", "ponmlkjihgfedcba"
    text = f"Romeo:\n{first}\n\nJuliet:\n{second}\n\nNurse:\nabc\n"
    (root / "Shakespeare" / "input.txt").write_text(text)
    arrays = SomeRoles(roles=2, samples=2).load()
    vocabulary = sorted({*text})
    places = arrays.inputs.view(4, 5, -1).argmax(2)
    read = [
        ("".join(vocabulary[p] for p in row), vocabulary[target])
        for row, target in zip(places, arrays.targets)
    ]
    assert sorted(read) == [("abcde", "f"), ("fghij", "k"), ("kjihg", "f"), ("ponml", "k")]
    assert arrays.client.unique(return_counts=True)[1].tolist() == [2, 2]


def test_a_board_without_its_file_is_told(root):
    for source, name in (
        (Articles(), "ag_news_test.csv"),
        (ImageFeatures(filters=3), "labels.npz"),
    ):
        with pytest.raises(FileNotFoundError, match=f"{name} but found none in"):
            source.load()


def features_by_numpy(layer, image):
    """The features of an image [3, height, width], patch by patch."""
    image, size = image.double().numpy(), layer.size
    mean, whitening, centers = (
        value.double().numpy() for value in (layer.mean, layer.whitening, layer.centers)
    )
    places = image.shape[1] - size + 1
    half = places // 2
    sums = np.zeros((len(centers), 2, 2))
    for y in range(places):
        for x in range(places):
            patch = image[:, y : y + size, x : x + size].ravel()
            patch = (patch - patch.mean()) / np.sqrt(patch.var(ddof=1) + 10)
            distances = np.linalg.norm((patch - mean) @ whitening - centers, axis=1)
            sums[:, y // half, x // half] += np.maximum(0, distances.mean() - distances)
    return (sums.ravel() - layer.shift.numpy()) / layer.scale.numpy()


def test_features_are_those_of_the_paper_patch_by_patch():
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (30, 3, 11, 11), dtype=torch.uint8, generator=draw)
    layer = PatchFeatures(images, filters=4, seed=0)
    features = layer(images)
    assert features.shape == (30, 16)
    torch.testing.assert_close(features.mean(0), torch.zeros(16), atol=1e-4, rtol=0)
    torch.testing.assert_close(features.std(0), torch.ones(16))
    np.testing.assert_allclose(features[7].numpy(), features_by_numpy(layer, images[7]), atol=1e-3)
