"""Small federations for Trainers in several processes, started as by torchrun."""

import copy
import os
import re
import socket
import traceback
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from unittest import mock

import torch
import torch.distributed as dist
from equal_trials import equal_trials_shared
from forked_processes import fork_context
from lightning.pytorch import LightningModule
from small_federations import Given, Only, classes, sections, seeded
from stateful_modules import ACCEPTED
from torch import nn

import pl_fed
from pl_fed.aggregators import (
    QFFL,
    AdaptiveClipping,
    CenteredClipping,
    DeepSight,
    FairFed,
    FLDetector,
    FLTrust,
    Krum,
    Mean,
    Median,
    NearestNeighborMixing,
    NormFilter,
    Term,
    TiltedMean,
    TrimmedMean,
)
from pl_fed.attacks import ALittleIsEnough, Attack, Backdoor, Combined, Outliers, RandomLabels
from pl_fed.clients import (
    FLAME,
    IFCA,
    Client,
    Ditto,
    DittoChoice,
    FedAvg,
    FedNova,
    FedRep,
    FedTilt,
    Finetuning,
    Local,
    LpProj,
    Mocha,
    Scaffold,
)
from pl_fed.compressors import PowerSGD, TopK
from pl_fed.data import Arrays, FederatedData, TorchDataset
from pl_fed.distributed import work_share
from pl_fed.privacy import DifferentialPrivacy
from pl_fed.rounds.broken_clients import NonFiniteLossError
from pl_fed.rounds.round import RoundRunner
from pl_fed.samplers import All, Poisson, Uniform
from pl_fed.systems import LogNormal, Systems

SIZES = [9, 20, 12, 30, 15, 16, 25, 10, 18]
ROUNDS = 2


class OppositeAttack(Attack):
    """Forges uploads opposite to the mean of the honest ones."""

    def forge(self, honest, own, context):
        return -honest.mean(0).expand_as(own) * (1 + context.losses.sum())


class DivergentPoison(Attack):
    """Poisons data so that the Byzantine client's training diverges."""

    def poison(self, batch, context):
        return batch._replace(inputs=batch.inputs / 0)


class DivergentClient(Client):
    """Client 5, recognized by its samples, gets a loss of NaN."""

    def training_step(self, batch, batch_idx):
        begin = sum(SIZES[:5])
        broken = ((batch.samples >= begin) & (batch.samples < begin + SIZES[5])).any()
        return super().training_step(batch, batch_idx) * torch.where(broken, torch.nan, 1.0)


class DivergentFedAvg(DivergentClient, FedAvg):
    """FedAvg with a divergent client."""


class DivergentDitto(DivergentClient, Ditto):
    """Ditto, with personal models and a divergent client."""


class FailingDitto(Ditto):
    """Client 5 raises an exception."""

    def begin(self, client):
        super().begin(client)
        if client.steps and (client.ids == 5).any():
            raise OSError("a broken file")


class ShortUploads(Ditto):
    """Client 5 sends an upload that is too short."""

    def end_round(self, client):
        upload = super().end_round(client)
        return upload[:, 1:] if (client.ids == 5).any() else upload


class MissingUploads(Ditto):
    """Client 5 sends no upload."""

    def end_round(self, client):
        return None if (client.ids == 5).any() else super().end_round(client)


def small_net():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3))


def batch_norm_net():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def frozen_net():
    net = small_net()
    net[0].requires_grad_(False)
    return net


def attacked_settings(**options):
    return {"sampler": Uniform(7), "attack": RandomLabels(redraw=True), "fraction": 0.3, **options}


def sharded_settings(aggregator):
    return attacked_settings(aggregator=aggregator, gathered_bytes=0)


SEARCHED_FORGERIES = {
    "attack": Combined([RandomLabels(), ALittleIsEnough("search", trials=8)]),
    "fraction": 0.4,
    "redraw": True,
    "sampler": Uniform(7),
    "aggregator": Median(),
    "gathered_bytes": 0,
}


UNEQUAL = Systems(
    speed=LogNormal(20.0, 1.0),
    availability=0.8,
    jitter=0.5,
    deadline=0.4,
    policy="partial",
)
SEARCHED_FORGERY = {
    "attack": ALittleIsEnough("search", trials=8),
    "ids": [1, 4],
    "aggregator": Median(),
}


def fltrust_settings(**options):
    return attacked_settings(aggregator=FLTrust(), root_samples=20, **options)


def build_pre_aggregators():
    return [NormFilter(), AdaptiveClipping(), NearestNeighborMixing()]


def own_batches():
    """The samples, as batches that are lists: one of inputs and one of targets."""
    arrays = classes(SIZES)
    samples = [*zip(arrays.inputs, arrays.targets.tolist(), strict=True)]
    owners = arrays.client.tolist()
    return TorchDataset(samples, client=owners, collate_fn=lambda samples: [*zip(*samples)])


class ListNet(LightningModule):
    """Takes batches of lists."""

    def __init__(self):
        super().__init__()
        self.net = small_net()

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        outputs = self.net(torch.stack(inputs))
        return nn.functional.cross_entropy(outputs, torch.tensor(targets, device=self.device))

    def test_step(self, batch, batch_idx):
        outputs = self.net(torch.stack(batch[0]))
        targets = torch.tensor(batch[1], device=self.device)
        self.log("test_acc", (outputs.argmax(1) == targets).double().mean())


def samples_of_two_groups():
    arrays = classes(SIZES)
    return Given(replace(arrays, groups=torch.arange(len(arrays)) % 5 // 3))


FAIRFED = {"aggregator": FairFed(0.5)}


def classes_of(owners, sizes):
    """Return random samples of owners with these ids."""
    arrays = classes(list(sizes))
    client = torch.tensor(list(owners))[arrays.client]
    return Arrays(arrays.inputs, arrays.targets, client, num_classes=arrays.num_classes)


def settings(
    net=small_net,
    client=Ditto,
    lr=0.1,
    momentum=0.5,
    precision="64-true",
    root_samples=0,
    source=lambda: Given(classes(SIZES)),
    central=lambda: None,
    gathered_bytes=work_share.GATHERED_BYTES,
    held_out_clients=None,
    rounds=ROUNDS,
    **federation,
):
    return locals()


SCENARIOS = {
    "Ditto": settings(rounds=3, server_optimizer=partial(torch.optim.Adam, lr=0.01)),
    "float32, by samples": settings(precision="32-true", aggregator=Mean("samples")),
    "Median": settings(**attacked_settings(aggregator=Median())),
    "Median in shards": settings(**sharded_settings(Median())),
    "TrimmedMean": settings(**attacked_settings(aggregator=TrimmedMean(1))),
    "TrimmedMean in shards": settings(**sharded_settings(TrimmedMean(1))),
    "Krum": settings(**attacked_settings(aggregator=Krum())),
    "Krum in shards": settings(**sharded_settings(Krum())),
    "multi-Krum in shards, float32": settings(precision="32-true", **sharded_settings(Krum(3))),
    "Term, poisoned": settings(**attacked_settings(aggregator=Term(2.0))),
    "QFFL in shards, poisoned": settings(**sharded_settings(QFFL(2.0, lipschitz=10.0))),
    "FairFed, poisoned": settings(source=samples_of_two_groups, **attacked_settings(**FAIRFED)),
    "FairFed in shards": settings(source=samples_of_two_groups, gathered_bytes=0, **FAIRFED),
    "FairFed, one client": settings(source=samples_of_two_groups, sampler=Only(3), **FAIRFED),
    "FedTilt, tilted in shards": settings(client=FedTilt, **sharded_settings(TiltedMean(2.0))),
    "forged": settings(aggregator=Median(), gathered_bytes=0, attack=OppositeAttack(), ids=[1, 4]),
    "forged by a search, redrawn": settings(**SEARCHED_FORGERIES),
    "broken uploads": settings(net=batch_norm_net, attack=DivergentPoison(), ids=[3, 4]),
    "all uploads broken": settings(attack=DivergentPoison(), ids=list(range(9)), sampler=All()),
    "BatchNorm": settings(net=batch_norm_net),
    "BatchNorm, in shards": settings(rounds=3, net=batch_norm_net, **sharded_settings(Median())),
    "all at home in one process": settings(net=batch_norm_net, sampler=Only(0, 4, 8)),
    "fewer clients than processes": settings(sampler=Only(3)),
    "nothing is sent": settings(client=Local),
    "parts are kept": settings(net=batch_norm_net, client=FedRep),
    "the server keeps all models": settings(client=Mocha),
    "the server keeps all models, some forged": settings(
        client=Mocha, attack=OppositeAttack(), ids=[1, 4]
    ),
    "the server keeps a control": settings(client=Scaffold, momentum=0.0),
    "adapted before evaluations": settings(client=partial(Finetuning, finetune_steps=3, lam=0.3)),
    "held-out clients": settings(rounds=3, held_out_clients=3, held_out_rounds=2),
    "held-out clients, whose head trains": settings(
        held_out_clients=4, net=batch_norm_net, client=FedRep
    ),
    "held-out clients, adapted": settings(
        rounds=3,
        held_out_clients=3,
        held_out_rounds=2,
        client=partial(Finetuning, finetune_steps=3, lam=0.3),
    ),
    "a choice of λ": settings(client=DittoChoice),
    "a frozen part, nothing is kept": settings(
        net=frozen_net, client=FedAvg, engine="stacked", chunk_size=2
    ),
    "stacked": settings(engine="stacked", chunk_size=2),
    "states of local optimizers": settings(
        rounds=3, keep_optimizer_state=True, server_optimizer=partial(torch.optim.Adam, lr=0.01)
    ),
    "FLAME": settings(client=partial(FLAME, weights="samples", lagged_global=True)),
    "Lp-Proj in shards": settings(
        client=partial(LpProj, dimensions=9), **sharded_settings(Median())
    ),
    "DeepSight": settings(rounds=3, **attacked_settings(aggregator=DeepSight(num_inputs=20))),
    "FLDetector": settings(rounds=3, **attacked_settings(aggregator=FLDetector(window=1))),
    "FLTrust": settings(**fltrust_settings()),
    "FLTrust in shards": settings(**fltrust_settings(gathered_bytes=0)),
    "a chain in shards": settings(
        **sharded_settings(TrimmedMean(1)), pre_aggregators=build_pre_aggregators()
    ),
    "a chain": settings(
        **attacked_settings(aggregator=TrimmedMean(1)), pre_aggregators=build_pre_aggregators()
    ),
    "a backdoor": settings(attack=Backdoor(1, size=1), ids=[1, 4], aggregator=Median()),
    "outliers": settings(corruption=Outliers()),
    "one diverges": settings(net=batch_norm_net, client=DivergentDitto, sampler=All()),
    "one diverges, in shards": settings(
        client=DivergentDitto, sampler=All(), aggregator=Krum(), gathered_bytes=0
    ),
    "one sends too little": settings(client=ShortUploads, sampler=All(), chunk_size=1),
    "one sends nothing": settings(client=MissingUploads, sampler=All(), chunk_size=1),
    "one process sends nothing": settings(client=MissingUploads, sampler=Only(2, 5), chunk_size=1),
    "all clients of one process fail": settings(
        client=FailingDitto,
        sampler=Only(2, 5),
        engine="auto",
        on_client_error="leave_out",
    ),
    "a central set": settings(
        net=batch_norm_net, client=FedRep, central=lambda: Given(classes([13], seed=7))
    ),
    "clusters, some forged": settings(
        client=partial(IFCA, clusters=3), attack=OppositeAttack(), ids=[1, 4], sampler=All()
    ),
    "compressed, one diverges": settings(
        client=DivergentDitto, sampler=Uniform(7), compression=TopK(9)
    ),
    "compressed in low rank, some forged": settings(
        client=Scaffold, momentum=0.0, attack=OppositeAttack(), ids=[1, 4], compression=PowerSGD(1)
    ),
    "own batches": settings(net=ListNet, source=own_batches, client=Local),
    "unequal clients": settings(systems=UNEQUAL, sampler=All()),
    "unequal clients, normalised": settings(
        client=FedNova, systems=UNEQUAL, sampler=All(), aggregator=Mean("samples")
    ),
    "unequal clients, normalised and forged": settings(
        client=FedNova, systems=UNEQUAL, sampler=All(), **SEARCHED_FORGERY
    ),
    "diverges": settings(client=DivergentFedAvg, sampler=All(), max_rejected=0.0),
}

if find_spec("dp_accounting"):
    adaptive = DifferentialPrivacy(
        clip_norm=0.1,
        noise_multiplier=1.0,
        delta=0.01,
        target_quantile=0.5,
        quantile_share=0.1,
        noise_seed=0,
    )
    SCENARIOS["private"] = settings(sampler=Poisson(0.5), privacy=adaptive)
    SCENARIOS["private, in buckets"] = settings(
        sampler=Poisson(0.5), privacy=replace(adaptive, buckets=3), aggregator=CenteredClipping(0.1)
    )
    SCENARIOS["private, with empty cohorts"] = settings(
        rounds=3, sampler=Poisson(0.05), privacy=adaptive
    )

CHANGED_CLIENTS = {  # the data of a checkpoint, and other data that match it by owners
    "nine clients": settings(rounds=3),
    "seven and three others": settings(
        rounds=3,
        source=lambda: Given(classes_of(range(2, 12), [*SIZES[2:], 9, 6, 8])),
        sampler=Uniform(6),
        match_clients=True,
    ),
}

STATEFUL = {f"stateful, {name}": settings(net=kind, rounds=3) for name, kind in ACCEPTED.items()}

PREDICTED = ("Ditto", "states of local optimizers", "held-out clients", "held-out clients, adapted")


def make(name, folder, rounds, processes, nodes):
    scenario = copy.deepcopy({**SCENARIOS, **STATEFUL, **CHANGED_CLIENTS}[name])
    work_share.GATHERED_BYTES = scenario.pop("gathered_bytes")
    names = ("net", "client", "precision", "root_samples", "source", "central")
    net, kind, precision, root_samples, source, central = (scenario.pop(key) for key in names)
    held_out, own_rounds = scenario.pop("held_out_clients"), scenario.pop("rounds")
    step = {key: scenario.pop(key) for key in ("lr", "momentum")}
    algorithm_options = {"lam": 0.5} if kind is Ditto else {}
    client = kind(
        seeded(net),
        optimizer=partial(torch.optim.SGD, **step),
        local_epochs=1,
        **algorithm_options,
    )
    data = FederatedData(
        source(),
        batch_size=5,
        drop_last=True,
        root_samples=root_samples,
        central=central(),
        seed=0,
        held_out_clients=held_out,
    )
    federation_settings = scenario.pop("federation")
    federation = pl_fed.Federation(
        federation_settings.pop("sampler", None) or Uniform(5),
        seed=0,
        **sections(**federation_settings),
    )
    trainer = pl_fed.Trainer(
        federation,
        default_root_dir=folder,
        run_dir=folder / "run",
        accelerator="cpu",
        devices=processes // nodes,
        num_nodes=nodes,
        strategy="ddp" if processes > 1 else "auto",
        precision=precision,
        max_epochs=rounds or own_rounds,
        check_val_every_n_epoch=3 if rounds else own_rounds,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return trainer, client, data


def run(name, folder, rounds=None, resumes=None, processes=1, nodes=1):
    """Run a scenario, and return its outcome. All processes return equal outcomes."""
    trainer, client, data = make(name, folder, rounds, processes, nodes)
    try:
        with equal_trials_shared():
            trainer.fit(client, data, ckpt_path=resumes)
    except NonFiniteLossError as error:
        return {"error": str(error)}
    trainer.test(client, data, verbose=False)
    metrics, store = trainer.federation.metrics("test"), trainer.federation.store
    state = trainer.federation.state_dict()
    predictions = trainer.predict(client, data) if name in PREDICTED else []
    return {
        "client": client.state_dict(),
        "store": {name: in_order(rows) for name, rows in state["store"].items() if rows},
        "server": state["server"],
        "participation": state["participation"],
        "metrics": {model: metrics.compute() for model, metrics in metrics.items()},
        "per client": {model: metrics.per_client() for model, metrics in metrics.items()},
        "logged": {k: v for k, v in trainer.callback_metrics.items() if k != "time/round"},
        "predictions": [
            [row["client"], row["prediction"]] for batch in predictions for row in batch
        ],
        "held": sorted(
            {k for metrics in store.state_dict().values() for k in metrics["clients"].tolist()}
        ),
    }


def in_order(table):
    """Return the rows of a store sorted by client. A store keeps the order of first writes."""
    order = table["clients"].argsort()
    rows = torch.cat([table["default"].expand(0, -1), *table["rows"]])
    return {"clients": table["clients"][order], "rows": rows[order]}


def start(size, nodes, jobs, folder):
    """Run jobs, dicts of arguments by name, in processes; return the outcomes of each process.

    The machine simulates several nodes, each with its share of the processes.
    """
    context = fork_context()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        context.Process(target=_work, args=(rank, size, nodes, port, jobs, folder))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
        if process.is_alive():
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _work(rank, size, nodes, port, jobs, folder):
    torch.set_num_threads(1)
    local, work_share._PIECE = size // nodes, 400  # bytes: so that there are several
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank % local),
        GROUP_RANK=str(rank // local),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(local),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    from lightning.pytorch.utilities import rank_zero_only

    rank_zero_only.rank = rank  # the value that torchrun's environment gives
    outcomes = {}
    guard = ObjectGuard(RoundRunner.run)
    RoundRunner.run = guard.method()
    try:
        for name, arguments in jobs.items():
            outcomes[name] = run(**arguments, processes=size, nodes=nodes)
    except BaseException:
        outcomes["failed"] = traceback.format_exc()
    outcomes["rounds without objects"] = guard.rounds
    torch.save(outcomes, folder / f"{rank}.pt")


class ObjectGuard:
    """Object guard: refuses collectives of pickled objects in rounds after a run's first.

    Args:
        run: ``RoundRunner.run``.

    Attributes:
        rounds: Number of rounds that have ended without such a collective.
    """

    def __init__(self, run):
        self.run = run
        self.rounds = 0

    def method(self):
        """Return a method that replaces ``RoundRunner.run``."""

        def run(runner, *arguments, **settings):
            if not vars(runner).setdefault("_had_a_round", False):
                runner._had_a_round = True
                return self.run(runner, *arguments, **settings)
            with ExitStack() as stack:
                for name in filter(re.compile("_object").search, dir(dist)):
                    stack.enter_context(mock.patch.object(dist, name, self._refuse))
                report = self.run(runner, *arguments, **settings)
            self.rounds += 1
            return report

        return run

    @staticmethod
    def _refuse(*_, **__):
        raise AssertionError("a round after the first one sends pickled objects")
