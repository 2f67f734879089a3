"""Vehicle sensors: is it a tank or a truck?

M. F. Duarte and Y. H. Hu. "Vehicle classification in distributed sensor networks". Journal of
Parallel and Distributed Computing, 2004. In the form of V. Smith et al., "Federated multi-task
learning", NeurIPS 2017, arXiv 1705.10467 (MOCHA), and of Ditto (ICML 2021, arXiv 2012.04221): 23
sensors, each a client, with 100 features of sound and vibration and two classes.
"""

import torch

from pl_fed.data.folders import data_root, missing_files_error
from pl_fed.data.reading import read_npz, report_read_errors
from pl_fed.data.source import Arrays, DataSource


class Vehicle(DataSource):
    """1,860 samples of 23 sensors, 100 features each, scaled by sensor; classes −1 and 1 are 0, 1.

    It is the training part of Ditto's files; their test part is not to be had. Test data are cut
    from it (``split: own``), and figures are not those of the paper's test part.

    Args:
        root: The folder that holds ``Vehicle/vehicle_ditto_train.npz``, with ``x`` [samples, 100],
            ``y`` [samples] of −1 and 1, and ``device`` [samples]; ``None`` takes ``PL_FED_DATA``,
            or ``data``.
    """

    file = "Vehicle/vehicle_ditto_train.npz"

    def __init__(self, root: str | None = None) -> None:
        self.root = data_root(root)

    def load(self) -> Arrays:
        """Return the samples, each with its sensor.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the file is broken.
        """
        path = self.root / self.file
        if not path.is_file():
            how = (
                "write the arrays x, y and device of the training file of Ditto's vehicle data"
                " there with numpy.savez"
            )
            raise missing_files_error(self.root, self.file, how)
        x, y, device = map(torch.from_numpy, read_npz(path, ("x", "y", "device")).values())
        with report_read_errors(path, "samples"):
            if not bool((y.abs() == 1).all()):
                raise ValueError(f"Expected `y` to be -1 and 1 but got {y[y.abs() != 1][0].item()}")
            return Arrays(x, (y > 0).long(), device, num_classes=2)
