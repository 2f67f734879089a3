"""Vehicle sensors: is it a tank or a truck?

M. F. Duarte and Y. H. Hu. "Vehicle classification in distributed sensor networks". Journal of
Parallel and Distributed Computing, 2004. In the format of V. Smith et al., "Federated multi-task
learning", NeurIPS 2017, arXiv 1705.10467 (MOCHA), and of Ditto (ICML 2021, arXiv 2012.04221): 23
clients, each a sensor, with 100 features of sound and vibration and two classes.
"""

import torch

from pl_fed.data.folders import data_root, missing_files_error
from pl_fed.data.reading import read_npz, report_read_errors
from pl_fed.data.source import Arrays, DataSource


class Vehicle(DataSource):
    """Vehicle: 1,860 samples of 23 sensors, with 100 features that are scaled for each sensor.

    The files' classes −1 and 1 become 0 and 1. This is the training part of Ditto's files; the test
    part is not available. With ``data.split: own``, test data are cut from the training part, so
    results are not comparable with the paper's.

    Args:
        root: The folder that holds ``Vehicle/vehicle_ditto_train.npz``, with the arrays ``x``
            [samples, 100], ``y`` [samples] of −1 and 1, and ``device`` [samples]. ``None`` uses the
            environment variable ``PL_FED_DATA``, or ``data``.
    """

    file = "Vehicle/vehicle_ditto_train.npz"

    def __init__(self, root: str | None = None) -> None:
        self.root = data_root(root)

    def load(self) -> Arrays:
        """Return the samples with their sensors.

        Raises:
            FileNotFoundError: If the file is missing.
            ValueError: If the file is broken.
        """
        path = self.root / self.file
        if not path.is_file():
            remedy = (
                "write the arrays x, y and device of the training file of Ditto's vehicle data"
                " there with numpy.savez"
            )
            raise missing_files_error(self.root, self.file, remedy)
        x, y, device = map(torch.from_numpy, read_npz(path, ("x", "y", "device")).values())
        with report_read_errors(path, "samples"):
            if not bool((y.abs() == 1).all()):
                raise ValueError(f"Expected `y` to be -1 and 1 but got {y[y.abs() != 1][0].item()}")
            return Arrays(x, (y > 0).long(), device, num_classes=2)
