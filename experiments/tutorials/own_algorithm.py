"""Tutorial: write your own algorithm, check it without a federation, and compare it with Ditto.

python -m experiments.tutorials.own_algorithm

The algorithm: a personal model with a pull to what the client remembers of the global models that
it received. The data are scikit-learn's digits, without a download. The script takes a few seconds
on one CPU core. README.md in this folder explains it.
"""

import logging
import tempfile
import warnings

import torch
from torch import Tensor

import pl_fed
from pl_fed import clients, data, models, partitioners, samplers
from pl_fed.clients import Client, ClientRound, Model
from pl_fed.types import Batch


class Remembering(Client):
    """Remembering: a personal model with a pull to a running mean of the received global models.

    Args:
        net: The net.
        lam: Strength of the pull, at least 0.
        memory: Weight of the old mean, in [0, 1); 0 is Ditto.
        **kwargs: Arguments of :class:`pl_fed.clients.Client`, such as ``local_epochs``.
    """

    def __init__(
        self, net: torch.nn.Module, lam: float = 0.1, memory: float = 0.5, **kwargs: object
    ) -> None:
        super().__init__(net, models={"global": Model(), "personal": Model()}, **kwargs)
        self.add_state("remembered", self.initial_row)  # a row that each client keeps
        self.lam, self.memory = lam, memory

    def begin(self, client: ClientRound) -> None:
        """Update the memory of several clients at once: rows are [clients, numbers]."""
        new = (1 - self.memory) * client.broadcast.parameters
        client.states["remembered"] = self.memory * client.states["remembered"] + new

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the objective of one client."""
        losses = self.loss("global", batch) + self.loss("personal", batch)
        return losses + self.lam / 2 * self.squared_distance("personal", to="remembered")


def check() -> None:
    """Check the hooks on two clients, without a federation."""
    client = Remembering(torch.nn.Linear(4, 3), lam=1.0)
    client_round = client.run_begin(client.new_round(clients=2, samples=5))
    batch = Batch(torch.randn(5, 4), torch.arange(5) % 3)
    with client.reading(client_round.client_rows(0)):
        objective = client.training_step(batch, 0)
    losses = client.loss("global", batch) + client.loss("personal", batch)
    torch.testing.assert_close(objective, losses)  # all models are equal at first: no pull
    uploads, states = client.run_end_round(client_round)
    if uploads is None or uploads.shape != (2, 15) or states["remembered"].shape != (2, 15):
        raise AssertionError("Expected a row of 15 parameters for each of two clients.")


def run(client: Client, rounds: int) -> tuple[float, float]:
    """Return the mean accuracy and the worst 10 % of the personal models."""
    federation = pl_fed.Federation(
        samplers.Uniform(10), engine=pl_fed.EngineOptions("stacked"), seed=0
    )
    digits = data.FederatedData(
        data.Digits(), partitioners.Shards(2), num_clients=30, batch_size=10, seed=0
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl_fed.Trainer(
            federation,
            max_epochs=rounds,
            accelerator="cpu",
            default_root_dir=folder,
            check_val_every_n_epoch=rounds,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(client, digits)
        results = trainer.test(client, digits, verbose=False)[0]
    return results["test/personal/accuracy"], results["test/personal/accuracy_worst10"]


def compare(rounds: int = 60) -> dict[str, tuple[float, float]]:
    """Run Ditto and the new algorithm on the same clients, cohorts and minibatches."""
    classes = {"Ditto": clients.Ditto, "Remembering": Remembering}
    results = {}
    for name, client_class in classes.items():
        torch.manual_seed(0)  # the net's initial weights
        net = models.MLP(in_features=64, hidden=[32], num_classes=10)
        results[name] = run(client_class(net, lam=1.0), rounds)
    return results


def main() -> None:
    """Check the algorithm, and print the comparison."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    check()
    for name, (mean, worst) in compare().items():
        print(f"{name:12} mean accuracy {mean:.2f}, worst 10 % of clients {worst:.2f}")


if __name__ == "__main__":
    main()
