"""Tasks: kinds of learning problems, with their losses, predictions and metrics."""

from pl_fed.tasks.base import Task as Task
from pl_fed.tasks.choice import find_task_class as find_task_class
from pl_fed.tasks.classification import Classification as Classification
from pl_fed.tasks.criterion import CriterionTask as CriterionTask
from pl_fed.tasks.hugging_face import HuggingFace as HuggingFace
from pl_fed.tasks.language_modelling import LanguageModelling as LanguageModelling
from pl_fed.tasks.lightning_task import LightningTask as LightningTask
from pl_fed.tasks.multi_label import MultiLabel as MultiLabel
from pl_fed.tasks.own_batches import OwnBatches as OwnBatches
from pl_fed.tasks.regression import Regression as Regression
from pl_fed.tasks.segmentation import Segmentation as Segmentation
from pl_fed.tasks.token_classification import TokenClassification as TokenClassification
