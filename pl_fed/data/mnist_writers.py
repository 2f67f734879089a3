"""MNIST by writer.

The writer ids come from QMNIST (C. Yadav and L. Bottou, "Cold case: The lost MNIST digits", NeurIPS
2019, arXiv 1905.10498): 539 writers of the training images, and 297 others of the test images.
"""

from dataclasses import replace

import torch

from pl_fed.data.folders import data_root, missing_files_error
from pl_fed.data.images import MNIST
from pl_fed.data.reading import read_npz, report_read_errors
from pl_fed.data.source import Arrays


class MNISTWriters(MNIST):
    """MNIST by writer: 70,000 handwritten digits, 28×28, grey, with the ids of their writers.

    The official parts have no writer in common. Set ``data.split: own``, or use the partitioner
    ByOwner.

    Args:
        root: The folder that holds ``MNIST/raw`` and ``MNIST_writers/mnist_writer_ids.npz``. The
            latter has the arrays ``train_writer`` [60000] and ``test_writer`` [10000], in MNIST's
            order. ``None`` uses the environment variable ``PL_FED_DATA``, or ``data``.
        download: Whether to download MNIST's missing files; the writer ids are not downloaded.
    """

    file = "MNIST_writers/mnist_writer_ids.npz"

    def load(self) -> Arrays:
        """Return the images with their writers.

        Raises:
            FileNotFoundError: If files are missing.
            ValueError: If the file of the writer ids is broken.
        """
        path = data_root(self.root) / self.file
        if not path.is_file():
            remedy = "write the writer ids of QMNIST's labels there with numpy.savez"
            raise missing_files_error(data_root(self.root), self.file, remedy)
        arrays = super().load()
        parts = read_npz(path, ("train_writer", "test_writer")).values()
        with report_read_errors(path, "writers"):
            return replace(arrays, client=torch.cat([*map(torch.from_numpy, parts)]))
