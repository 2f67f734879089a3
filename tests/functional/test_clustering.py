"""k-means against all partitions and scikit-learn; the number of clusters of clear cases."""

import itertools

import numpy as np
from sklearn.cluster import KMeans

from pl_fed.functional.clustering import count_clusters, find_clusters


def smallest_dispersion(points, count):
    """The least sum of squares over all partitions into at most ``count`` clusters."""
    best = np.inf
    for labels in itertools.product(range(count), repeat=len(points)):
        labels = np.array(labels)
        groups = [points[labels == label] for label in range(count) if (labels == label).any()]
        best = min(best, sum(((group - group.mean(0)) ** 2).sum() for group in groups))
    return best


def test_clusters_are_the_best_partition():
    draw = np.random.default_rng(0)
    for count, columns in itertools.product((1, 2, 3), (1, 2)):
        points = draw.normal(size=(3, 7, columns))
        labels, dispersions = find_clusters(points, count, np.random.default_rng(1))
        for own, label, dispersion in zip(points, labels, dispersions):
            groups = [own[label == k] for k in range(count)]
            assert np.isclose(sum(((g - g.mean(0)) ** 2).sum() for g in groups), dispersion)
            assert np.isclose(dispersion, smallest_dispersion(own, count), rtol=1e-9)


def test_dispersions_equal_those_of_scikit_learn():
    centres = 5 * np.random.default_rng(1).normal(size=(4, 2))
    points = np.repeat(centres, 10, 0) + np.random.default_rng(2).normal(size=(40, 2))
    for count in (1, 2, 4):
        expected = KMeans(count, n_init=30, random_state=0).fit(points).inertia_
        _, (dispersion,) = find_clusters(points[None], count, np.random.default_rng(0))
        assert np.isclose(dispersion, expected, rtol=1e-9)


def test_number_of_clusters_of_clear_cases():
    draw = np.random.default_rng(0)
    for columns, expected in itertools.product((1, 2), (1, 2)):
        centres = 40 * np.arange(expected)[:, None] * np.ones(columns)
        points = np.repeat(centres, 12, 0) + draw.normal(size=(12 * expected, columns))
        for factor in (1.0, 1e-30, 1e30, -1.0):
            count = count_clusters(factor * points, 8, 10, np.random.default_rng(3))
            assert count == expected


def test_equal_points_and_single_points_are_one_cluster():
    for points in (np.zeros((5, 2)), np.full((1, 1), 3.0), np.full((3, 2), 1e300)):
        assert count_clusters(points, 5, 3, np.random.default_rng(0)) == 1
    labels, dispersions = find_clusters(np.zeros((1, 4, 2)), 3, np.random.default_rng(0))
    assert labels.shape == (1, 4)
    assert dispersions.tolist() == [0]


def test_more_clusters_than_points_do_not_count():
    points = np.array([[0.0], [1.0], [10.0]])
    assert count_clusters(points, 10, 5, np.random.default_rng(0)) in (1, 2)
