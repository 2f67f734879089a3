"""The nets of the papers. Any other ``nn.Module`` that returns logits works as well."""

from pl_fed.models.adapter import Adapter as Adapter
from pl_fed.models.character_gru import CharacterGRU as CharacterGRU
from pl_fed.models.ditto_celeba_cnn import DittoCelebaCNN as DittoCelebaCNN
from pl_fed.models.ditto_fashion_cnn import DittoFashionCNN as DittoFashionCNN
from pl_fed.models.ditto_femnist_cnn import DittoFemnistCNN as DittoFemnistCNN
from pl_fed.models.fedtilt_cnn import FedTiltCNN as FedTiltCNN
from pl_fed.models.flame_cnn import FlameCNN as FlameCNN
from pl_fed.models.flame_femnist_cnn import FlameFemnistCNN as FlameFemnistCNN
from pl_fed.models.frozen_body import FrozenBody as FrozenBody
from pl_fed.models.hugging_face_model import HuggingFaceModel as HuggingFaceModel
from pl_fed.models.linear_svm import LinearSVM as LinearSVM
from pl_fed.models.logistic_regression import LogisticRegression as LogisticRegression
from pl_fed.models.lora import LoRA as LoRA
from pl_fed.models.mlp import MLP as MLP
