"""Data of the boards: writers of MNIST, articles, roles, and features of CIFAR-10."""

import csv
import os
from pathlib import Path

import numpy as np
import torch
from sklearn.cluster import MiniBatchKMeans
from sklearn.feature_extraction.text import HashingVectorizer
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, one_hot, unfold

from experiments.make_cifar10_npz import OUTPUT, tiles
from experiments.robustness.data import draw_positions
from pl_fed.data import Arrays, DataSource, MNISTWriters, Shakespeare
from pl_fed.data.folders import data_root, missing_files_error


class SomeWriters(DataSource):
    """The images of randomly drawn writers of MNIST, each of whom is a client.

    Args:
        writers: The number of writers.
        min_images: The least number of images of a writer.
        seed: Seed of the draw.
    """

    def __init__(self, writers: int = 40, min_images: int = 60, seed: int = 0) -> None:
        self.writers = writers
        self.min_images = min_images
        self.seed = seed

    def load(self) -> Arrays:
        """Return the images.

        Raises:
            ValueError: If there are fewer such writers.
        """
        arrays = MNISTWriters().load()
        writer = torch.as_tensor(arrays.client)
        ids, counts = writer.unique(return_counts=True)
        ids = ids[counts >= self.min_images]
        if len(ids) < self.writers:
            raise ValueError(
                f"Expected argument `writers` to be at most {len(ids)}, the number of writers of"
                f" {self.min_images} images or more, but got {self.writers}."
            )
        chosen = ids[draw_positions(len(ids), self.writers, self.seed)]
        index = torch.isin(writer, chosen).nonzero().flatten()
        return Arrays(
            arrays.inputs[index],
            arrays.targets[index],
            client=writer[index],
            num_classes=arrays.num_classes,
        )


class Articles(DataSource):
    """Articles of AG's News as bags of words: four topics.

    The inputs are 1 for the hashed words of an article, and 0 for others. Only the 7,600 articles
    of the official test part are used.

    Args:
        samples: The number of articles.
        words: The number of hashed words.
        seed: Seed of the draw.
    """

    file = "AGNews/ag_news_test.csv"

    def __init__(self, samples: int = 3000, words: int = 1000, seed: int = 0) -> None:
        self.samples = samples
        self.words = words
        self.seed = seed

    def load(self) -> Arrays:
        """Return the bags of words, float32 [articles, words], and the topics.

        Raises:
            FileNotFoundError: If the file is missing.
        """
        path = find_file(self.file)
        with path.open(newline="", encoding="utf-8") as lines:
            articles = list(csv.DictReader(lines))
        chosen = draw_positions(len(articles), self.samples, self.seed).tolist()
        texts = [f"{articles[n]['title']} {articles[n]['description']}" for n in chosen]
        bags = HashingVectorizer(
            n_features=self.words,
            stop_words="english",
            binary=True,
            norm=None,
            alternate_sign=False,
        ).transform(texts)
        topics = sorted({article["class"] for article in articles})
        targets = [topics.index(articles[n]["class"]) for n in chosen]
        inputs = torch.from_numpy(bags.toarray()).float()
        return Arrays(inputs, torch.tensor(targets), num_classes=len(topics), class_names=topics)


class SomeRoles(DataSource):
    """The next of five characters of Shakespeare's plays. Each role is a client.

    Args:
        roles: The number of roles.
        samples: The number of samples of each: its first ones.
        seed: Seed of the draw.
    """

    length = 5

    def __init__(self, roles: int = 25, samples: int = 300, seed: int = 0) -> None:
        self.roles = roles
        self.samples = samples
        self.seed = seed

    def load(self) -> Arrays:
        """Return five characters, one-hot float32 [samples, 5 × characters], and the next one."""
        arrays = Shakespeare(
            length=self.length, min_characters=self.length * self.samples + 1
        ).load()
        characters = int(max(arrays.inputs.max(), arrays.targets.max())) + 1
        owners = arrays.client.unique()
        chosen = owners[draw_positions(len(owners), self.roles, self.seed)]
        index = torch.cat(
            [(arrays.client == role).nonzero().flatten()[: self.samples] for role in chosen]
        )
        inputs = one_hot(arrays.inputs[index], characters).flatten(1).float()
        return Arrays(
            inputs,
            arrays.targets[index, -1],
            client=arrays.client[index],
            num_classes=characters,
            names=arrays.names,
        )


class ImageFeatures(DataSource):
    """Features of CIFAR-10 from one layer that is learned without labels, then frozen.

    Filters are the centers of a k-means of whitened patches (A. Coates, H. Lee and A. Y. Ng, "An
    Analysis of Single-Layer Networks in Unsupervised Feature Learning", AISTATS 2011). They come
    from other images than those of the clients. The features are written to runs/ once.

    Args:
        samples: The number of images.
        filters: The number of filters; each has four features, one for each quarter of an image.
        seed: Seed of the draws.
    """

    def __init__(self, samples: int = 3000, filters: int = 200, seed: int = 0) -> None:
        self.samples = samples
        self.filters = filters
        self.seed = seed

    def load(self) -> Arrays:
        """Return the features, float32 [images, 4 × filters], and the classes.

        Raises:
            FileNotFoundError: If the mosaics of experiments/make_cifar10_npz.py are missing.
        """
        path = OUTPUT.with_name(f"cifar10_features_{self.samples}_{self.filters}_{self.seed}.npz")
        if not path.exists():
            self._write(path)
        with np.load(path) as file:
            return Arrays(torch.from_numpy(file["x"]), torch.from_numpy(file["y"]), num_classes=10)

    def _write(self, path: Path) -> None:
        file = find_file("CIFAR10/labels.npz")
        source, labels = file.parent, np.load(file)["train_1_labels"].astype(np.int64)
        chosen = draw_positions(len(labels), self.samples, self.seed)
        images = torch.from_numpy(tiles(source / "train_1.webp"))[chosen]
        layer = PatchFeatures(
            torch.from_numpy(tiles(source / "train_2.webp")), self.filters, self.seed
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{os.getpid()}_{path.name}")
        np.savez(temporary, x=layer(images).numpy(), y=labels[chosen.numpy()])
        temporary.replace(path)


class PatchFeatures:
    """A layer of filters that are the centers of whitened patches, after Coates et al. (2011).

    Patches are normalized (variance plus 10) and whitened by ZCA (eigenvalues plus 0.1). A filter's
    activation is max(0, mean distance to all centers − distance to its own center); a feature is
    its sum over a quarter of the image. Features are standardized as on the images that the layer
    is learned from.

    Args:
        images: The images that it is learned from, uint8 [images, 3, height, width].
        filters: The number of centers.
        seed: Seed of the draw of patches and of the centers.
    """

    size = 6
    patches = 50_000
    standard = 1000  # images

    def __init__(self, images: Tensor, filters: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        patches = _cut(images[torch.randperm(len(images), generator=draw)[:200]], self.size)
        patches = patches.flatten(0, 1)
        patches = patches[torch.randperm(len(patches), generator=draw)[: self.patches]]
        self.mean = patches.mean(0)
        values, vectors = torch.linalg.eigh(torch.cov(patches.T))
        self.whitening = vectors @ (vectors / (values + 0.1).sqrt()).T
        clusters = MiniBatchKMeans(filters, random_state=seed, n_init=1, batch_size=4096)
        whitened = (patches - self.mean) @ self.whitening
        self.centers = torch.from_numpy(clusters.fit(whitened.numpy()).cluster_centers_).float()
        self.shift, self.scale = torch.zeros(4 * filters), torch.ones(4 * filters)
        features = self(images[: self.standard])
        self.shift, self.scale = features.mean(0), features.std(0)

    def __call__(self, images: Tensor) -> Tensor:
        """Return the features of images, float32 [images, 4 × filters]."""
        features = [self._sum_quarters(part) for part in images.split(50)]
        return (torch.cat(features) - self.shift) / self.scale

    def _sum_quarters(self, images: Tensor) -> Tensor:
        patches = _cut(images, self.size)
        distances = torch.cdist((patches - self.mean) @ self.whitening, self.centers)
        activations = (distances.mean(2, keepdim=True) - distances).relu()
        width = images.shape[-1] - self.size + 1
        grid = activations.transpose(1, 2).unflatten(2, (-1, width))
        return (adaptive_avg_pool2d(grid, 2) * (grid[0, 0].numel() / 4)).flatten(1)


def _cut(images: Tensor, size: int) -> Tensor:
    """Return normalized patches, float32 [images, patches, numbers]."""
    patches = unfold(images.float(), size).transpose(1, 2)
    centred = patches - patches.mean(2, keepdim=True)
    return centred / (patches.var(2, keepdim=True) + 10).sqrt()


def find_file(name: str) -> Path:
    """Return the path of a file of PL_FED_DATA.

    Raises:
        FileNotFoundError: If it is missing.
    """
    path = data_root(None) / name
    if not path.is_file():
        raise missing_files_error(data_root(None), name, "put it there, or leave this board out")
    return path
