"""Gaps between groups in a run: against loops over samples, in any chunks, models and processes."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from further_cases import mark_further
from small_federations import Given, classes, reals, sections, seeded
from torch import nn

import pl_fed
from pl_fed.attacks import RandomLabels
from pl_fed.clients import Ditto, FedAvg
from pl_fed.data import FederatedData
from pl_fed.functional.client_figures import read_figures
from pl_fed.functional.group_fairness import GROUP_FIGURES
from pl_fed.metrics import ClientMetrics
from pl_fed.reports.answers import find_answers
from pl_fed.reports.group import group_runs
from pl_fed.reports.run import find_runs
from pl_fed.samplers import All

SIZES = [40, 60, 30, 50]


def make_arrays(num_classes=2, sizes=SIZES):
    """Samples of two groups; the last client has none of the second."""
    arrays = classes(sizes, num_classes=num_classes, seed=1)
    groups = torch.randint(2, (len(arrays),), generator=torch.Generator().manual_seed(7))
    groups[arrays.client == len(sizes) - 1] = 0
    return replace(arrays, groups=groups, group_names=("old", "young"))


def fit_and_test(folder, arrays, kind=Ditto, engine="one_by_one", batch=None, **options):
    changes = {name: options.pop(name) for name in ("held_out_clients",) if name in options}
    criterion = nn.CrossEntropyLoss() if arrays.num_classes else nn.MSELoss()
    data = FederatedData(
        Given(arrays), batch_size=8, seed=0, clients_per_eval_batch=batch, **changes
    )
    outputs = max(arrays.num_classes, 1)
    client = seeded(lambda: kind(nn.Linear(4, outputs), local_steps=3, criterion=criterion))
    trainer = pl_fed.Trainer(
        pl_fed.Federation(All(), seed=0, **sections(engine=engine, **options)),
        run_dir=folder,
        max_epochs=2,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(client, data)
    trainer.test(client, data, verbose=False)
    return trainer, client, data


def read_rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_metrics(folder):
    return json.loads((folder / "summary.json").read_text())["metrics"]["test"]


def list_samples(client, data, clients):
    """Return target, prediction and group of each test sample, by the global model."""
    samples = []
    for client_id in clients:
        for sample in data.test.samples(client_id).tolist():
            with torch.no_grad():
                predicted = int(client.global_model(data.inputs[sample][None]).argmax())
            samples.append((int(data.targets[sample]), predicted, int(data.groups[sample])))
    return samples


def measure_by_loops(samples):
    """Return the gaps of two classes between two groups; a rate without samples is ``None``."""

    def rate(group, condition, event):
        hits = [event(t, p) for t, p, g in samples if g == group and condition(t)]
        return np.mean(hits) if hits else None

    def gap(condition, event):
        first, second = (rate(group, condition, event) for group in (0, 1))
        return np.nan if first is None or second is None else abs(first - second)

    accuracies = [rate(group, lambda _: True, lambda t, p: t == p) for group in (0, 1)]
    defined = [value for value in accuracies if value is not None]
    odds = [gap(lambda t, c=c: t == c, lambda _, p: p == 1) for c in (0, 1)]
    return {
        "demographic_parity": gap(lambda _: True, lambda _, p: p == 1),
        "equalized_odds": np.nan if np.isnan(odds).any() else max(odds),
        "accuracy_gap": gap(lambda _: True, lambda t, p: t == p),
        "accuracy_worst": min(defined),
    }


@pytest.mark.slow
def test_gaps_of_a_run_equal_loops_over_its_samples(tmp_path):
    attack = {"attack": RandomLabels(), "ids": [1]}
    _, client, data = fit_and_test(tmp_path, make_arrays(), FedAvg, **attack)
    metrics, table = read_metrics(tmp_path), read_rows(tmp_path / "per_client.csv")
    pooled = measure_by_loops(list_samples(client, data.clients, [0, 2, 3]))
    for name, value in pooled.items():
        assert metrics[f"global/group/{name}"] == pytest.approx(value), name
    own = [measure_by_loops(list_samples(client, data.clients, [k])) for k in range(4)]
    for name in GROUP_FIGURES:
        values = [gaps[name] for gaps in own]
        read = [float(row[f"global_group_{name}"]) for row in table]
        assert read == pytest.approx(values, nan_ok=True, rel=1e-8), name
        benign = [values[k] for k in (0, 2, 3)]
        defined = [value for value in benign if not np.isnan(value)]
        assert metrics[f"global/group/client_{name}"] == pytest.approx(np.mean(defined))
        assert metrics[f"global/group/client_{name}_undefined"] == 3 - len(defined)
    assert np.isnan(own[3]["accuracy_gap"]), "a client of one group"
    assert metrics["global/group/client_accuracy_gap_undefined"] >= 1


@pytest.mark.slow
def test_table_of_groups_and_the_report(tmp_path):
    _, client, data = fit_and_test(tmp_path / "run", make_arrays(), FedAvg)
    rows = read_rows(tmp_path / "run" / "per_group.csv")
    assert list(rows[0]) == ["client", "byzantine", "group", "samples", "global_accuracy"]
    assert [(row["client"], row["group"]) for row in rows] == [
        *((str(k), name) for k in range(3) for name in ("old", "young")),
        ("3", "old"),
    ]
    answers = {a.name: a.rows for a in find_answers(group_runs(find_runs([tmp_path])[0]))}
    metrics = read_metrics(tmp_path / "run")
    (row,) = answers["group_gaps"]
    table = pl_fed.read_run(tmp_path / "run").groups
    assert table["group"].tolist() == [row["group"] for row in rows]
    assert table["samples"].tolist() == [float(row["samples"]) for row in rows]
    assert row["equalized odds gap"] == pytest.approx(metrics["global/group/equalized_odds"])
    assert row["clients without accuracy gap"] == 1
    samples = list_samples(client, data.clients, range(4))
    for row, group in zip(answers["group_accuracy"], (0, 1)):
        hits = [t == p for t, p, g in samples if g == group]
        assert (row["samples"], row["clients"]) == (len(hits), 4 - group)
        assert row["global accuracy"] == pytest.approx(np.mean(hits), rel=1e-8)


@pytest.mark.parametrize("num_classes", mark_further([2, 3], [3]))
@pytest.mark.slow
def test_chunks_and_engines_give_the_same_gaps(tmp_path, num_classes):
    arrays, found = make_arrays(num_classes), []
    for name, engine, batch in (("a", "one_by_one", 1), ("b", "stacked", 3), ("c", "stacked", 99)):
        fit_and_test(tmp_path / name, arrays, engine=engine, batch=batch)
        metrics = read_metrics(tmp_path / name)
        found.append({key: value for key, value in metrics.items() if "/group/" in key})
    assert {key.split("/")[0] for key in found[0]} == {"global", "personal", "hybrid"}
    assert found[1] == pytest.approx(found[0], rel=1e-10, nan_ok=True)
    assert found[2] == pytest.approx(found[1], rel=1e-10, nan_ok=True)


def test_sums_of_processes_are_those_of_one():
    """Processes add the states up; each has the counts of its clients."""
    draw = torch.Generator().manual_seed(0)
    counts = torch.randint(1, 9, (6, 3, 2, 2), generator=draw)
    counts[:, 2] = torch.minimum(counts[:, 0], counts[:, 1])
    metrics = [ClientMetrics(6, 2, num_groups=2) for _ in range(3)]
    parts = (range(6), (0, 2, 5), (1, 3, 4))
    for metric, ids in zip(metrics, map(list, parts)):
        own = counts[ids]
        losses = torch.ones(len(ids))
        tables = own[:, 2].sum(1), own[:, 0].sum(1)
        metric.update(torch.tensor(ids), *tables, losses, groups=own)
    for name in ("group_counts", "correct", "count", "loss_sum", "loss_samples"):
        setattr(metrics[1], name, getattr(metrics[1], name) + getattr(metrics[2], name))
    whole, joined = metrics[0].compute(), metrics[1].compute()
    assert list(whole) == list(metrics[0].names)
    assert {k: float(v) for k, v in joined.items()} == {k: float(v) for k, v in whole.items()}


def test_counts_of_another_shape_are_refused():
    metric, ones = ClientMetrics(2, 2, num_groups=3), torch.ones(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"`groups` to be of shape \[1, 3, 3, 2\] but got None"):
        metric.update(torch.tensor([0]), ones, ones, torch.ones(1))


@pytest.mark.slow
def test_held_out_clients_have_gaps_of_their_own(tmp_path):
    fit_and_test(tmp_path, make_arrays(), FedAvg, held_out_clients=2)
    metrics, rows = read_metrics(tmp_path), read_rows(tmp_path / "per_client.csv")
    held_out = [row for row in rows if row["held_out"] == "1"]
    values = [float(row["global_group_accuracy_worst"]) for row in held_out]
    found = metrics["held_out/global/group/client_accuracy_worst"]
    assert found == pytest.approx(np.mean(values))


@pytest.mark.slow
def test_data_without_groups_have_neither_gaps_nor_a_table(tmp_path):
    fit_and_test(tmp_path, replace(make_arrays(), groups=None, group_names=()))
    assert not any("group" in name for name in read_metrics(tmp_path))
    assert not (tmp_path / "per_group.csv").exists()


@pytest.mark.slow
def test_groups_of_real_valued_targets_are_named_as_unused(tmp_path, caplog):
    arrays = reals(torch.randn(24, 4), torch.randn(24, 1), [0] * 12 + [1] * 12)
    arrays = replace(arrays, groups=torch.arange(24) % 2)
    with caplog.at_level("INFO"):
        fit_and_test(tmp_path, arrays)
    assert "Gaps between the groups 0, 1 are not measured" in caplog.text
    assert not any("group" in name for name in read_metrics(tmp_path))


@pytest.mark.slow
def test_further_statistics_of_a_run_are_those_of_its_table(tmp_path):
    names = ["gini", "gap", "worst50", "q25"]
    fit_and_test(tmp_path, make_arrays(3), statistics=names, held_out_clients=1)
    metrics, rows = read_metrics(tmp_path), read_rows(tmp_path / "per_client.csv")
    for place, flag in (("", "0"), ("held_out/", "1")):
        table = [row for row in rows if row["held_out"] == flag]
        for metric in ("accuracy", "loss"):
            values = np.array([float(row[f"personal_{metric}"]) for row in table])
            for figure in read_figures(names):
                found = metrics[f"{place}personal/{metric}_{figure.name}"]
                expected = figure.compute(values, metric == "accuracy")
                assert found == pytest.approx(expected, rel=1e-6), (place, metric, figure.name)


def test_unknown_statistics_are_refused_before_training():
    with pytest.raises(ValueError, match=r"`federation\.statistics` to hold gini, .* got 'ginny'"):
        pl_fed.Federation(statistics=["ginny"])
