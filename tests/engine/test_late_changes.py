"""Steps that begin, after the trials, with what a stack cannot do run one by one from then on."""

import numpy as np
import pytest
import torch
from lit_federations import trainer_of
from small_federations import classes, seeded, shared_out
from stateful_modules import Stateful

from pl_fed import EngineOptions, Federation
from pl_fed.clients import FedAvg
from pl_fed.samplers import All

pytestmark = pytest.mark.slow


class Branches(Stateful):
    """Branches on its data from the second round on."""

    def forward(self, x):
        outputs = self.net(x)
        if self.current_epoch and outputs.mean() > -100:
            outputs = 2 * outputs
        return outputs


class Counts(Stateful):
    """Counts in a buffer in the second round; a stack would count once for all clients."""

    def keep(self):
        self.register_buffer("steps", torch.tensor(0.0))

    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1:  # of three: in the last one, a trial finds it
            self.steps += 1
        return self.loss(batch) * (1 + self.steps)


class Draws(Stateful):
    """Draws from NumPy's generator from the second round on, as a mixup that waits."""

    def training_step(self, batch, batch_idx):
        factor = np.random.beta(1.0, 1.0) if self.current_epoch else 1.0  # noqa: NPY002
        return self.loss(batch) * factor


class Decays(Stateful):
    """Adds a penalty on trained weights from the second round on; in a stack, none is trained."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.current_epoch:
            trained = [weight for weight in self.net.parameters() if weight.requires_grad]
            loss = loss + sum(weight.square().sum() for weight in trained)
        return loss


def fit(kind, folder, engine):
    federation = Federation(All(), seed=0, engine=EngineOptions(engine))
    client = FedAvg(seeded(kind).double(), local_epochs=2)
    data = shared_out(classes([8, 8, 8]), batch_size=4)
    trainer_of(folder, 3, federation).fit(client, data)
    return federation.model_of(0).state_dict()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Branches, "data-dependent control flow.*test_late_changes.py"),
        (Counts, r"training changes a buffer of the net \(global_model.steps\)\.$"),
        (Draws, r"draws from a global generator of Python or NumPy\.$"),
    ],
)
def test_stack_falls_back_to_one_by_one_in_a_later_round(tmp_path, kind, reason):
    np.random.seed(1)  # noqa: NPY002
    expected = fit(kind, tmp_path / "one", "one_by_one")
    np.random.seed(2)  # noqa: NPY002
    with pytest.warns(
        UserWarning, match=f"one by one from round 1 on, .* stacked failed: .*{reason}"
    ):
        actual = fit(kind, tmp_path / "stacked", "stacked")
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_a_stack_is_tried_with_the_last_round_of_steps_that_read_the_round(tmp_path):
    expected = fit(Decays, tmp_path / "one", "one_by_one")
    with pytest.warns(UserWarning, match="other gradients than its first client alone"):
        actual = fit(Decays, tmp_path / "stacked", "stacked")
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
