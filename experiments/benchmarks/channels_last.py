"""``OMP_NUM_THREADS=1 python experiments/benchmarks/channels_last.py``: how images are laid out.

Compares layouts of convolutional nets on one CPU thread, as medians in turns:

- A round, compiled, one client after the other: the compiler's layout against channels last
  (``pl_fed/engine/channels_last.py``).
- The evaluation of the global model on 1,000 samples: torch's default with 1,024 samples at once;
  channels last; also with 128 samples at once; and also with large products by oneDNN, as in
  pl_fed (``pl_fed/evaluation/model_runner.py``).
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from cases import Case
from local_steps import ByPlFed
from products import medians
from report import table

from pl_fed.clients import FedAvg
from pl_fed.data import FederatedData
from pl_fed.engine import compiled
from pl_fed.engine.channels_last import ChannelsLast
from pl_fed.evaluation import model_runner
from pl_fed.evaluation.evaluator import Evaluator

WAYS = (nullcontext, ChannelsLast)
EVALUATED = {  # layout, samples at once, whether by oneDNN
    "torch's way": (nullcontext, 1024, False),
    "channels last": (ChannelsLast, 1024, False),
    "128 samples at once": (ChannelsLast, 128, False),
    "oneDNN": (ChannelsLast, 128, True),
}
SMALL = {"clients": 10, "steps": 2}
CASES = [
    Case("pfl's CNN, minibatches of 10", "PflCNN", (3, 32, 32), **SMALL),
    Case("Ditto's CNN, of 16", "DittoFashionCNN", (1, 28, 28), batch_size=16, **SMALL),
    Case("FLAME's CNN, of 100", "FlameCNN", (3, 32, 32), batch_size=100, **SMALL),
    Case("FedTilt's CNN, of 10", "FedTiltCNN", (3, 32, 32), **SMALL),
    Case("a residual net with group normalisation, of 10", "Residual", (3, 32, 32), **SMALL),
]


def rounds(case: Case, data: FederatedData) -> list[float]:
    """Return the seconds of a round in both ways."""
    ready = []
    for way in WAYS:
        with mock.patch.object(compiled, "ChannelsLast", way):
            program = ByPlFed(case, data, "one_by_one_compiled")
            program.round()
            ready.append(program.round)
    return medians(*ready, repeat=1)


def evaluations(case: Case) -> list[float]:
    """Return the seconds of the global model on clients' training data in all ways."""
    data = replace(case, steps=-(-100 // case.batch_size)).data()
    evaluator = Evaluator(FedAvg(case.build()), lambda _: {})

    def evaluate(layout: type, batch: int, by_onednn: bool) -> None:
        with (
            mock.patch.object(model_runner, "ChannelsLast", layout),
            mock.patch.object(model_runner, "_CONVOLUTION_BATCH", batch),
            mock.patch.object(model_runner, "is_mkl_slow", return_value=by_onednn),
        ):
            evaluator.start_losses(data.clients, torch.arange(case.clients), {})

    return medians(*(partial(evaluate, *way) for way in EVALUATED.values()), repeat=1)


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        times = [*rounds(case, case.data()), *evaluations(case)]
        rows.append([case.title, *(f"{1e3 * seconds:.1f}" for seconds in times)])
    head = ["net", *(f"round, ms: {way}" for way in ("the compiler's layout", "channels last"))]
    print(table([*head, *(f"evaluation, ms: {way}" for way in EVALUATED)], rows))


if __name__ == "__main__":
    main()
