"""MNIST by writer.

Who wrote each digit of MNIST is known from C. Yadav and L. Bottou, "Cold case: The lost MNIST
digits", NeurIPS 2019, arXiv 1905.10498 (QMNIST): 539 writers of the training images, 297 others of
the test images.
"""

from dataclasses import replace

import torch

from pl_fed.data.folders import data_root, missing_files_error
from pl_fed.data.images import MNIST
from pl_fed.data.reading import read_npz, report_read_errors
from pl_fed.data.source import Arrays


class MNISTWriters(MNIST):
    """70,000 handwritten digits, 28×28, grey, each with its writer.

    The official parts have no writer in common: set ``data.split: own``, or use the partitioner
    ByOwner.

    Args:
        root: The folder that holds ``MNIST/raw``, and ``MNIST_writers/mnist_writer_ids.npz`` with
            ``train_writer`` [60000] and ``test_writer`` [10000], in MNIST's order; ``None`` takes
            ``PL_FED_DATA``, or ``data``.
        download: Whether to fetch MNIST's own files if they are not there.
    """

    file = "MNIST_writers/mnist_writer_ids.npz"

    def load(self) -> Arrays:
        """Return the images, each with its writer.

        Raises:
            FileNotFoundError: If files are not there.
            ValueError: If the file of the writers is broken.
        """
        path = data_root(self.root) / self.file
        if not path.is_file():
            how = "write who wrote what, which QMNIST's labels say, there with numpy.savez"
            raise missing_files_error(data_root(self.root), self.file, how)
        arrays = super().load()
        parts = read_npz(path, ("train_writer", "test_writer")).values()
        with report_read_errors(path, "writers"):
            return replace(arrays, client=torch.cat([*map(torch.from_numpy, parts)]))
