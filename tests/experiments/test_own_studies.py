"""The studies of FedTilt, two-level fairness, adapters, privacy and Shakespeare's plays."""

import math
from pathlib import Path

import pytest
import torch
from small_federations import Given

from experiments.__main__ import open_experiment
from experiments.adapters import studies as adapters
from experiments.compression import studies as compression
from experiments.experiment import CellRun, read_csv
from experiments.fedtilt import figures
from experiments.fedtilt_levels import page as levels
from experiments.fedtilt_levels import studies as levels_studies
from experiments.fedtilt_levels.data import Graded, Share
from experiments.privacy import page as privacy
from experiments.privacy.modules import GlorotCNN
from experiments.shakespeare import studies as shakespeare
from experiments.systems import studies as systems
from pl_fed.data import Arrays


def test_values_follow_labels_and_seeds():
    def find(name, seed, **labels):
        cells = open_experiment(name).cells
        (cell,) = (c for c in cells if c.seed == seed and labels.items() <= c.values.items())
        return cell.change.overrides

    tilted = find("fedtilt/own", 2, setting="mnist/corruption", method="FedTilt")
    assert (tilted["model.lam"], tilted["model.tau"]) == (1.0, -0.5)
    plain = find("fedtilt/own", 2, setting="mnist/corruption", method="Ditto")
    assert (plain["model.lam"], "model.tau" in plain) == (0.1, False)
    labels = {"data": "Fashion-MNIST", "attack": "none", "algorithm": "Ditto"}
    private = find("privacy", 2, epsilon="4", **labels)
    assert (private["federation.privacy.noise_seed"], private["data.dataset.seed"]) == (2, 2)
    assert "federation.privacy.noise_seed" not in find("privacy", 2, epsilon="inf", **labels)
    method = {"sizes": "unequal", "method": "FedTilt, τ = 3"}
    chosen = find("fedtilt_levels", 0, losses="remain", **method)
    assert (chosen["model.optimizer.lr"], chosen["model.mu"]) == (0.005, 0.1)


@pytest.mark.slow
def test_pages_show_the_current_rows():
    """The test fails for new rows: run python -m experiments NAME --report."""
    root = Path(figures.HERE).parent
    text = adapters.build_table(read_csv(root / "adapters/results.csv"))
    assert (root / "adapters/table.md").read_text().endswith(text)
    rows, curves = (read_csv(compression.HERE / f"{name}.csv") for name in ("results", "curves"))
    text = compression.build_table(rows, curves)
    assert (compression.HERE / "table.md").read_text().endswith(text)
    text = shakespeare.build_table(read_csv(root / "shakespeare/results.csv"))
    assert (root / "shakespeare/table.md").read_text().endswith(text)
    rows = read_csv(root / "privacy/results.csv")
    assert (root / "privacy/table.md").read_text() == privacy.make_table(rows)
    rows = read_csv(root / "privacy/buckets.csv")
    assert (root / "privacy/buckets.md").read_text() == privacy.make_buckets_table(rows)
    text = levels.make_tables(levels.read_results())
    assert (root / "fedtilt_levels/table.md").read_text() == text
    assert (root / "fedtilt/figures.md").read_text() == figures.make_page()
    assert (root / "systems/table.md").read_text() == systems.make_page()


def test_bytes_until_a_level_are_those_of_the_first_point_on_it():
    rows = [
        {"round": str(round), "seed": seed, "bytes_up": str(size), "accuracy": str(accuracy)}
        for seed, shift in (("0", 0.0), ("1", 0.1))
        for round, size, accuracy in ((9, 2e6, 0.2 + shift), (19, 4e6, 0.6 + shift))
    ]
    megabytes, accuracies = compression.average_curve(rows)
    assert megabytes == [2.0, 4.0]
    assert accuracies == pytest.approx([0.25, 0.65])
    assert compression.find_level((megabytes, accuracies), 0.25) == "2"
    assert compression.find_level((megabytes, accuracies), 0.3) == "4"
    assert compression.find_level((megabytes, accuracies), 0.7) == "–"


def test_bytes_in_the_committed_results_follow_from_the_codecs():
    """An upload of the MLP (784, 64, 10), by hand; ten clients upload in each of 100 rounds."""
    rows = read_csv(compression.HERE / "results.csv")
    d, k = 784 * 64 + 64 + 64 * 10 + 10, 508
    bits = {
        "none": 32 * d,
        "QSGD, 8 bits": 32 + 8 * d,
        "QSGD, 2 bits": 32 * -(-d // 256) + 2 * d,
        "signs": d + 32,
        "PowerSGD, rank 2": 32 * (2 * (784 + 64) + 64 + 2 * (64 + 10) + 10),
        "top 1 %": k * (32 + 16),
        "random 1 %": k * 32,
    }
    for row in compression.select(rows, method="FedAvg"):
        size = -(-bits[row["codec"]] // 8)
        assert int(row["upload_bytes"]) == size
        assert int(row["bytes_up"]) == 1000 * size
        assert int(row["bytes_down"]) == 1000 * 4 * d


def test_rows_that_were_discussed_are_those_of_the_figures():
    discussed = set((figures.HERE / "tables.md").read_text().splitlines())
    rows = [line for line in (figures.HERE / "figures.md").read_text().splitlines() if "] " in line]
    assert len(rows) > 60
    assert discussed.issuperset(rows)


@pytest.mark.parametrize(
    ("wrong", "std"),
    [(0, 0.0), (1, (9 / 36) ** 0.5 / 10), (59, (9 / 36) ** 0.5 / 10), (60, 0.0)],
)
def test_dealt_errors_have_exact_spreads(wrong, std):
    """One of 60 images in ten groups: one accuracy is 5/6 and nine are 1, in any deal."""
    stds = figures.deal_errors(torch.tensor([wrong]), torch.tensor([60]), 10, seed=0)
    assert float(stds) == pytest.approx(std, abs=1e-12)


def test_dealt_errors_are_hypergeometric():
    """The mean of s² over deals is p(1 − p)/m · (n − m)/(n − 1), groups of m of n images."""
    errors, sizes = torch.full((300,), 9), torch.full((300,), 60)
    squares = torch.stack(
        [figures.deal_errors(errors, sizes, 10, seed).square() for seed in range(4)]
    )
    assert float(squares.mean()) == pytest.approx(0.15 * 0.85 / 6 * 54 / 59, rel=0.04)


def test_accuracy_in_own_proportions_weighs_classes_by_training_samples(tmp_path):
    (tmp_path / "per_client.csv").write_text("client,rounds\n4,7\n")
    (tmp_path / "per_class.csv").write_text(
        "client,class,samples,personal_accuracy\n4,0,1000,0.9\n4,2,1000,0.5\n"
    )
    (tmp_path / "train_classes.csv").write_text("client,class,samples\n4,0,30\n4,2,10\n")
    row = {"test/personal/accuracy": 0.7, "seconds/total": 1.0}
    (client,) = levels_studies.collect(CellRun(row, tmp_path))["clients.csv"]
    assert client == {
        "client": "4",
        "rounds": "7",
        "accuracy": "0.7",
        "own_accuracy": "0.8",
        "class_std": "0.2",
        "worst_class": "0.5",
    }


def test_share_takes_equal_fractions_of_all_parts():
    split = torch.tensor([0, 2] * 50)
    x = torch.arange(100.0)[:, None]
    share = Share(Given(Arrays(x, split // 2, split=split, num_classes=2)), 0.2)
    arrays = share.load()
    assert torch.equal(arrays.split.bincount(), torch.tensor([10, 0, 10]))
    assert len(arrays.inputs.unique()) == 20
    assert torch.equal(arrays.targets, arrays.inputs[:, 0].long() % 2)
    assert torch.equal(arrays.inputs, share.load().inputs)


def test_graded_classes_are_in_a_geometric_series():
    """Three classes of 1,110 samples, ratio 100: each has 1,000, 100 and 10 of three clients."""
    labels = torch.arange(3).repeat(1110)
    train, test = Graded(3, 100.0).split_matching(
        labels, torch.arange(3).repeat(5), 3, torch.Generator().manual_seed(0)
    )
    counts = torch.stack([labels[part].bincount(minlength=3) for part in train])
    assert counts.sort(1).values.tolist() == [[10, 100, 1000]] * 3
    assert counts.sort(0).values.tolist() == [[10] * 3, [100] * 3, [1000] * 3]
    assert [len(part) for part in test] == [15] * 3
    with pytest.raises(ValueError, match="multiple of the 3 classes"):
        Graded(3).split(labels, 4, torch.Generator())


def test_initial_weights_follow_the_seed():
    """pfl-research's net: 1,626,442 parameters, Glorot's bounds, a seed of its own."""
    nets = [GlorotCNN(seed) for seed in (0, 0, 1)]
    rows = [torch.nn.utils.parameters_to_vector(net.parameters()) for net in nets]
    assert len(rows[0]) == 1_626_442
    assert rows[0].equal(rows[1])
    assert not rows[0].equal(rows[2])
    bound = math.sqrt(6 / (12_544 + 128))  # of the linear layer 12544 → 128
    assert 0.999 * bound < nets[0].layers[7].weight.abs().max() <= bound
