"""How often the host waits for the device: never in a local step, rarely in a chunk and a round."""

import json

import pytest

pytestmark = pytest.mark.slow

COUNT = """
import json, sys
sys.path[:0] = ["tests/devices", "tests"]
import pretend_device
pretend_device.install()
import logging, warnings
from dataclasses import replace
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
from small_federations import classes, mlp, seeded, sgd, shared_out
from pl_fed import Adversary, EngineOptions, Federation
from pl_fed.attacks import Outliers, RandomLabels
from pl_fed.attacks.trigger_attack import TriggerAttack
from pl_fed.clients import Ditto, FedALA, FedAvg, FedRep, PFedFDA, PFedMe
from pl_fed.samplers import All

class Bright(TriggerAttack):
    def add_trigger(self, batch, context):
        return batch.inputs + 1

def waits(kind, engine, steps, chunk_size, attack=None, mapped=False, uneven=False, kept=False):
    work = {"local_epochs" if uneven else "local_steps": steps}
    client = kind(seeded(mlp), optimizer=sgd(0.1, momentum=0.5), **work).cuda()
    adversary = Adversary(attack, ids=[1, 3]) if attack else Adversary()
    federation = Federation(
        All(),
        engine=EngineOptions(engine, chunk_size=chunk_size, keep_optimizer_state=kept),
        seed=0,
        adversary=adversary,
    )
    arrays = classes([8, 40 if uneven else 8] * 4, num_classes=3)
    if mapped:
        arrays = replace(arrays, mapped=True)
    federation.setup(client, shared_out(arrays), "fit")
    client.train()
    optimizer = client.configure_optimizers()
    federation.run_round(0, optimizer)
    with pretend_device.counting() as counts:
        federation.run_round(1, optimizer)
    return {f"{reason} at {place}": count for (reason, place), count in counts.waits.items()}

cases = {}
for engine in ("one_by_one", "stacked"):
    for kind in (FedAvg, Ditto):
        cases[f"{kind.__name__}, {engine}"] = (kind, engine, None)
    cases[f"RandomLabels, {engine}"] = (FedAvg, engine, RandomLabels())
cases["Outliers, stacked"] = (FedAvg, "stacked", Outliers())
cases["a trigger, stacked"] = (FedAvg, "stacked", Bright(target=0))
cases["PFedMe, stacked"] = (PFedMe, "stacked", None)
cases["PFedFDA, stacked"] = (PFedFDA, "stacked", None)
cases["FedRep, stacked"] = (FedRep, "stacked", None)
cases["FedALA, stacked"] = (FedALA, "stacked", None)
for engine in ("one_by_one", "stacked"):
    cases[f"mapped, {engine}"] = (FedAvg, engine, None, True)
cases["unequal clients, stacked"] = (Ditto, "stacked", None, False, True)
cases["kept states, stacked"] = (FedAvg, "stacked", None, False, True, True)
part, *chosen = sys.argv[1:]
cases = {name: case for name, case in cases.items() if (name in chosen) == (part == "chosen")}
print(json.dumps({
    name: {
        "short": waits(kind, engine, 4, 8, *more),
        "long": waits(kind, engine, 8, 8, *more),
        "chunks": waits(kind, engine, 4, 2, *more),
    }
    for name, (kind, engine, *more) in cases.items()
}))
"""


# waits of a chunk, not of a client: for features, to load and store states, and for a preparation;
# and one of each of two attackers with a trigger
FEATURES = {
    "PFedFDA, stacked": 6,
    "kept states, stacked": 5,
    "FedALA, stacked": 12,
    "a trigger, stacked": 2,
}


CHOSEN = (  # of those that load and store alike, one
    *("FedAvg, one_by_one", "Ditto, stacked", "RandomLabels, stacked", "a trigger, stacked"),
    *("PFedFDA, stacked", "mapped, one_by_one", "kept states, stacked"),
)


def test_host_waits_in_no_step_and_rarely_in_a_round(run_script):
    check_waits(run_script, "chosen", 7)


@pytest.mark.exhaustive
def test_host_waits_in_no_step_and_rarely_in_a_round_in_further_cases(run_script):
    check_waits(run_script, "further", 9)


def check_waits(run_script, part, number):
    """Check the waits of a part of the cases, of which there must be so many."""
    done = run_script("", "-c", COUNT, part, *CHOSEN)
    assert done.returncode == 0, done.stderr[-2000:]
    cases = json.loads(done.stdout.splitlines()[-1])
    assert len(cases) == number
    for name, counts in cases.items():
        total = {length: sum(places.values()) for length, places in counts.items()}
        assert total["long"] == total["short"], f"{name}: local steps wait, {counts['long']}"
        more = (total["chunks"] - total["short"]) / 3
        assert more <= 2 + FEATURES.get(name, 0), f"{name}: chunks wait, {counts['chunks']}"
        reads = 8 if name == "mapped, one_by_one" else FEATURES.get(name, 0)  # blocks of samples
        assert total["short"] <= 6 + reads, f"{name}: a round waits, {counts['short']}"


AGGREGATE = """
import json, sys
sys.path[:0] = ["tests/devices", "tests", "tests/aggregators"]
import pretend_device
pretend_device.install()
from dataclasses import replace
import test_aggregator_contract as contract
import torch
from pl_fed import aggregators

def waits(name, clients):
    uploads = torch.randn(clients, 12, generator=torch.Generator().manual_seed(0)).double().cuda()
    context = contract.context(uploads.cpu())
    views = context.layout.views(torch.linspace(2.0, -1.0, 12).double().cuda())
    context = replace(
        context,
        net=lambda update=None: lambda inputs: inputs.double() @ views["weight"].T + views["bias"],
        broadcast=context.broadcast.cuda(),
        **{name: getattr(context, name).cuda() for name in ("inputs", "losses", "group_counts")},
    )
    options = {"num_inputs": 5, "num_sets": 2} if name == "DeepSight" else {}
    aggregator = getattr(aggregators, name)(**options).cuda()
    with pretend_device.counting() as counts:
        aggregator(uploads, torch.arange(1, clients + 1).cuda(), context)
    return {f"{reason} at {place}": count for (reason, place), count in counts.waits.items()}

names = ("Bucketing", "Bulyan", "DeepSight", "FreqFed", "LASA")
print(json.dumps({name: [waits(name, 8), waits(name, 16)] for name in names}))
"""


def test_aggregators_wait_as_often_for_many_clients_as_for_few(run_script):
    done = run_script("", "-c", AGGREGATE)
    assert done.returncode == 0, done.stderr[-2000:]
    for name, (few, many) in json.loads(done.stdout.splitlines()[-1]).items():
        assert sum(many.values()) == sum(few.values()) < 20, f"{name}: {many}"


VALIDATE = """
import json, sys
from pathlib import Path
sys.path.insert(0, "tests/devices")
import pretend_device
pretend_device.install()
sys.path[:0] = pretend_device.ROOMS
import tempfile
from device_cases import ditto, given
from lightning.pytorch import Callback
import pl_fed
from pl_fed.samplers import All

class Count(Callback):
    def on_validation_start(self, trainer, module):
        if trainer.current_epoch == 1:  # the first validation moves the metrics to the device
            self.context = pretend_device.counting()
            self.counts = self.context.__enter__()

    def on_train_end(self, trainer, module):
        self.context.__exit__(None, None, None)

count = Count()
trainer = pl_fed.Trainer(
    pl_fed.Federation(All(), seed=0), run_dir=Path(tempfile.mkdtemp()) / "run", accelerator="gpu",
    devices=1, max_epochs=2, num_sanity_val_steps=0, enable_progress_bar=False,
    enable_model_summary=False, enable_checkpointing=False, callbacks=[count],
)
trainer.fit(ditto(), given())
assert "val/personal/accuracy" in trainer.callback_metrics
counted = {f"{reason} at {place}": n for (reason, place), n in count.counts.waits.items()}
print(json.dumps(counted))
"""


def test_validation_waits_for_a_table_of_each_model_and_not_for_each_number(run_script):
    """Three models have 57 metrics; the log, the tables and the callbacks read them on the CPU."""
    done = run_script("", "-c", VALIDATE)
    assert done.returncode == 0, done.stderr[-2000:]
    waits = json.loads(done.stdout.splitlines()[-1])
    assert 6 <= sum(waits.values()) <= 24, waits
