"""Client-level differential privacy: its settings, and the accounting of its cost."""

from pl_fed.privacy.accountant import Accountant as Accountant
from pl_fed.privacy.differential_privacy import DifferentialPrivacy as DifferentialPrivacy
from pl_fed.privacy.participation import Participation as Participation
