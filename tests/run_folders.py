"""Folders as runs leave them, with numbers that are known."""

import csv
import json

import yaml

from pl_fed.reports import page

CONFIG = {
    "seed_everything": 0,
    "trainer": {"max_epochs": 4, "default_root_dir": "runs/quickstart", "logger": None},
    "model": {
        "class_path": "pl_fed.clients.Ditto",
        "init_args": {"lam": 0.1, "net": {"class_path": "pl_fed.models.MLP", "init_args": {}}},
    },
    "data": {
        "dataset": {"class_path": "pl_fed.data.Digits"},
        "partitioner": {
            "class_path": "pl_fed.partitioners.Shards",
            "init_args": {"classes_per_client": 2},
        },
        "num_clients": 4,
        "seed": None,
    },
    "federation": {
        "sampler": {
            "class_path": "pl_fed.samplers.Uniform",
            "init_args": {"cohort_size": 3},
        },
        "aggregator": None,
        "adversary": {"attack": None, "fraction": None, "ids": None},
        "storage": {"folder": None},
        "seed": None,
    },
}


def with_changes(changes, config=CONFIG):
    """The config with some of its dotted keys changed, ``init_args`` among them."""
    config = json.loads(json.dumps(config))
    for key, value in changes.items():
        *sections, last = key.split(".")
        place = config
        for section in sections:
            place = place[section]
        place[last] = value
    return config


def write_run(
    folder,
    config=CONFIG,
    *,
    accuracy=(0.5, 0.75, 1.0, 0.25),
    byzantine=(),
    models=("global", "personal"),
    rounds=4,
    tested=True,
    classes=True,
    extra=None,
):
    """Write the files of a run whose models all have the same accuracies, by client.

    Validation is in rounds 1, 3, ... with a tenth of the accuracy for each round that was run.
    """
    folder.mkdir(parents=True)
    benign = [a for client, a in enumerate(accuracy) if client not in byzantine]
    mean = sum(benign) / len(benign)
    std = (sum((a - mean) ** 2 for a in benign) / len(benign)) ** 0.5
    table = []
    for round in range(rounds):
        row = {"round": round, "train/loss": 2 - round / 4, "train/cohort": 3, "time/round": 0.5}
        row |= {"train/forged": 0, **(extra or {})}
        if round % 2:
            row |= {f"val/{model}/accuracy": mean * (round + 1) / 10 for model in models}
            row |= {f"val/{model}/loss": 1 / (round + 1) for model in models}
        table.append(row)
    if tested:
        row = {"round": rounds}
        tail = sorted(benign)[0], sorted(benign)[-1]
        for model in models:
            found = (mean, std, *tail, 0.125)
            names = ("accuracy", "accuracy_std", "accuracy_worst10", "accuracy_best10", "loss")
            row |= {f"test/{model}/{name}": value for name, value in zip(names, found)}
        table.append(row)
        clients = [
            {"client": client, "byzantine": int(client in byzantine), "test_samples": 4}
            | {f"{model}_accuracy": value for model in models}
            | {f"{model}_loss": 1 - value for model in models}
            for client, value in enumerate(accuracy)
        ]
        write_table(folder / "per_client.csv", clients)
        cells = [
            {"client": client, "byzantine": int(client in byzantine), "class": c, "samples": 2}
            | {f"{model}_accuracy": value if c == 0 else 1.0 for model in models}
            for client, value in enumerate(accuracy)
            for c in (0, 1)
        ]
        if classes:
            write_table(folder / "per_class.csv", cells)
    write_table(folder / "metrics.csv", table)
    (folder / "config.yaml").write_text("# lightning\n" + yaml.safe_dump(config))
    (folder / "engine.json").write_text(json.dumps({"engine": "stacked"}))
    return folder


def without_accuracy(folder):
    """Make a run that was written one of real values as targets, which have losses alone."""
    for name in ("metrics.csv", "per_client.csv"):
        rows = read_table(folder / name)
        kept = [{k: v for k, v in row.items() if "accuracy" not in k} for row in rows]
        write_table(folder / name, kept)
    (folder / "per_class.csv").unlink()


def write_table(path, rows):
    columns = dict.fromkeys(name for row in rows for name in row)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def draw_only(patch, *titles):
    """Leave out the pictures of a page, which take long, of all chapters but some."""
    chapters = page._pictures

    def choose(groups):
        pictures = chapters(groups)
        assert pictures.keys() >= set(titles)
        return {title: pictures[title] if title in titles else () for title in pictures}

    patch.setattr(page, "_pictures", choose)
