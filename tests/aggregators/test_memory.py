"""Memory of an aggregator that grows is saved and resumed."""

from functools import partial

import pytest
import torch
from exhaustive import exhaustive_for
from small_federations import classes, mlp, seeded, sgd, shared_out

import pl_fed
from pl_fed.aggregators import (
    AFL,
    AAggFF,
    Aggregator,
    CenteredClipping,
    FedFV,
    FLDetector,
    FoolsGold,
)
from pl_fed.clients import FedAvg
from pl_fed.samplers import Uniform
from pl_fed.types import RoundContext

SIZES = [6, 5, 8, 7]


class PastSums(Aggregator):
    """Weighs uploads by the length of the sum of a client's uploads of all rounds."""

    def __init__(self):
        super().__init__()
        self.add_memory("sums")

    def max_byzantine(self, num_uploads):
        return 0

    def forward(self, uploads, weights, context):
        self.require_uploads(uploads)
        if not self.sums.numel():
            self.sums = uploads.new_zeros(context.num_clients, uploads.shape[1])
        self.sums[context.clients] += uploads
        shares = self.sums[context.clients].norm(dim=1).softmax(0)
        return shares @ uploads


class Undeclared(PastSums):
    def __init__(self):
        Aggregator.__init__(self)
        self.register_buffer("sums", torch.empty(0))


def fit(folder, rounds, aggregator, ckpt_path=None):
    trainer = pl_fed.Trainer(
        pl_fed.Federation(Uniform(2), aggregator, seed=0), run_dir=folder, max_epochs=rounds,
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    client = FedAvg(seeded(mlp), optimizer=sgd(0.1))
    trainer.fit(client, shared_out(classes(SIZES)), ckpt_path=ckpt_path)
    return client.row("global").data


@exhaustive_for("sums", "detector", "ascent")
@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        PastSums,
        FoolsGold,
        partial(FLDetector, window=1),
        partial(FLDetector, window=1, restart=True),
        partial(FedFV, tau=3),
        AFL,
        AAggFF,
    ],
    ids=["sums", "gold", "detector", "restart", "conflicts", "ascent", "decisions"],
)
def test_memory_of_any_shape_resumes_bit_for_bit(tmp_path, make):
    expected = fit(tmp_path / "a", 6, make())
    fit(tmp_path / "b", 3, make())
    assert torch.equal(fit(tmp_path / "b", 6, make(), "last"), expected)


@pytest.mark.slow
def test_undeclared_memory_has_a_remedy(tmp_path):
    fit(tmp_path, 2, Undeclared())
    with pytest.raises(
        ValueError, match=r"memory of Undeclared .*: declare memory .* `add_memory`"
    ):
        fit(tmp_path, 4, Undeclared(), "last")


def test_memory_may_have_a_default():
    class Counts(CenteredClipping):
        def __init__(self):
            super().__init__()
            self.add_memory("rounds", torch.zeros(1))

    counts, other = Counts(), Counts()
    counts.rounds += 3
    counts(torch.ones(2, 4), torch.ones(2), RoundContext())
    other.load_state_dict(counts.state_dict())
    assert other.rounds.tolist() == [3.0]
    assert torch.equal(other.centre, counts.centre)
