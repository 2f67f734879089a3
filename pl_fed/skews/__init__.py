"""Feature skew: a different change of the inputs on each client."""

from pl_fed.skews.base import Skew as Skew
from pl_fed.skews.colors import Colors as Colors
from pl_fed.skews.quality import Quality as Quality
from pl_fed.skews.rotations import Rotations as Rotations
