"""Linear discriminant analysis: the classifier of classes with normal features and one covariance.

R. A. Fisher, "The use of multiple measurements in taxonomic problems", Annals of Eugenics 7, 1936.
For class means μ_c, the covariance Σ and priors π_c, the scores of features z are::

    W_c = Σ⁻¹ μ_c,    b_c = −½ μ_cᵀ Σ⁻¹ μ_c + ln π_c,    score_c = W_c · z + b_c
"""

import torch
from torch import Tensor


def class_moments(
    features: Tensor, classes: Tensor, default: Tensor, min_samples: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the means of classes, and the covariance of the features around them.

    The covariance is the sum of the outer products over the number of samples minus 1.

    Args:
        features: Shape [samples, features].
        classes: 1 for the class of a sample, else 0, [samples, classes]; zeros leave a sample out.
        default: The means of classes with fewer than ``min_samples`` samples, [classes, features].
        min_samples: The number of samples from which on a class has a mean of its own.

    Example:
        >>> features = torch.tensor([[1.0], [3.0], [8.0]])
        >>> classes = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> class_moments(features, classes, torch.tensor([[0.0], [7.0]]), min_samples=2)
        (tensor([[2.],
                [7.]]), tensor([[1.5000]]))
    """
    counts = classes.sum(0)[:, None]
    means = torch.where(counts >= min_samples, classes.T @ features / counts.clamp(min=1), default)
    differences = (features - classes @ means) * classes.sum(1)[:, None]
    return means, differences.T @ differences / (counts.sum() - 1).clamp(min=1)


def factor_covariance(covariance: Tensor, shrinkage: float) -> Tensor:
    """Return the Cholesky factor of (1 − ε) Σ + ε tr(Σ) / d I; NaN if it is not positive definite.

    Args:
        covariance: Σ, shape [..., d, d].
        shrinkage: ε in [0, 1].
    """
    variance = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    shrunk = (1 - shrinkage) * covariance + shrinkage * variance * eye
    factor, failures = torch.linalg.cholesky_ex(shrunk)
    return torch.where(failures[..., None, None] == 0, factor, torch.nan)


def linear_discriminant(means: Tensor, factor: Tensor, log_priors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights and biases of the classes' scores.

    Args:
        means: The means of the classes, [classes, d].
        factor: The Cholesky factor of the covariance, [..., d, d].
        log_priors: ln π, shape [classes].

    Returns:
        Weights [..., classes, d] and biases [..., classes].

    Example:
        >>> means = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
        >>> factor = factor_covariance(torch.tensor([[1.0, 0.2], [0.2, 2.0]]), shrinkage=0.0)
        >>> linear_discriminant(means, factor, torch.tensor([0.25, 0.75]).log())
        (tensor([[ 0.0000,  0.0000],
                [ 2.0408, -0.2041]]), tensor([-1.3863, -2.3285]))
    """
    columns = means.T.expand(*factor.shape[:-2], -1, -1)
    weights = torch.cholesky_solve(columns, factor).mT
    return weights, log_priors - (weights * means).sum(-1) / 2


def clip_eigenvalues(matrix: Tensor) -> Tensor:
    """Return the positive semidefinite matrix nearest to a symmetric one, [d, d].

    Rounding in a low precision may make a covariance indefinite.

    Example:
        >>> clip_eigenvalues(torch.tensor([[4.0, 0.0], [0.0, -1.0]]))
        tensor([[4., 0.],
                [0., 0.]])
    """
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    clipped: Tensor = (vectors * values.clamp(min=0)) @ vectors.T
    return clipped
