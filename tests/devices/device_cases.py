"""Small federations for the CPU and the pretend device: all shipped leaves, found by a walk.

A case is a function of a device and a folder that returns numbers by name, on the CPU. Its
attribute ``cpu`` is the case, or its name, that gives the CPU's numbers; without it, the case
itself does. Those that :func:`mark_further` marks run in ``make test-all``, not in ``make test``.
Cases run in processes with the pretend device: see ``run_on_device.py``.
"""

import copy
import inspect
import multiprocessing
import os
import re
import socket
import tempfile
import traceback
from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import lit_federations
import lit_modules
import torch
import worlds
from equal_trials import equal_trials_shared
from small_federations import Arrays, Given, classes, mlp, run_rounds, sections, seeded, sgd
from test_aggregator_contract import CONFIGURATIONS as AGGREGATORS
from test_attack_contract import CONFIGURATIONS as ATTACKS
from test_compressor_contract import CONFIGURATIONS as CODECS
from test_models import NETS
from test_preaggregator_contract import CONFIGURATIONS as PRE_AGGREGATORS
from test_sampler_contract import CONCRETE as SAMPLERS
from test_shipped_pieces_agree import CLIENT_ARGUMENTS, shipped_classes
from test_task_contract import CASES as TASKS
from torch import nn

import pl_fed
from pl_fed.clients import Client, Ditto, FedAvg
from pl_fed.data import FederatedData
from pl_fed.samplers import All, Cyclic, Poisson, Uniform

SIZES = [5, 10, 4, 7, 5, 8, 6]
EAGER = ("one_by_one", "stacked")
PARTS = {"val_fraction": 0.2, "test_fraction": 0.2, "seed": 0}
ROUNDS = 2


def mark_further(cases, further):
    """Return the cases, after a mark on those with these names, which are left out by `make test`.

    The others are a covering choice: among them, each kind of tensors that leaves keep and make
    runs on the device, and each setting.
    """
    for name in further:
        cases[name].is_further = True
    return cases


def first_of_each(configurations):
    """Return the first configuration of each class."""
    return [*{kind: (kind, arguments) for kind, arguments in reversed(configurations)}.values()]


def given(arrays=None, **settings):
    """Return a datamodule with training, validation and test samples of each client."""
    arrays = classes(SIZES) if arrays is None else arrays
    return FederatedData(Given(arrays), batch_size=4, **{**PARTS, **settings})


def ditto(net=mlp, **settings):
    options = {"optimizer": sgd(0.1, momentum=0.5), "local_epochs": 1, **settings}
    return Ditto(seeded(net), **options)


def numbers_of(trainer, client, data, checkpoint=None, predicts=False, tests=True):
    """Fit and test, and return metrics, models and client states by name, on the CPU."""
    with equal_trials_shared():
        trainer.fit(client, data, ckpt_path=checkpoint)
    if tests:
        trainer.test(client, data, verbose=False)
    numbers = {f"metric {n}": value for n, value in trainer.callback_metrics.items()}
    numbers |= {f"model {name}": value for name, value in client.state_dict().items()}
    for name, table in trainer.federation.state_dict()["store"].items():
        if table:
            default = table["default"].cpu()
            rows = torch.cat([default.expand(0, -1), *(rows.cpu() for rows in table["rows"])])
            numbers[f"state {name}"] = rows[table["clients"].cpu().argsort()]
    if predicts:
        rows = [row for batch in trainer.predict(client, data) for row in batch]
        numbers |= {
            f"prediction {row['client']} {name}": value
            for row in rows
            for name, value in row.items()
            if isinstance(value, torch.Tensor)
        }
        assert not any(v.is_cuda for n, v in numbers.items() if n.startswith("prediction"))
    return {n: v.detach().cpu() for n, v in numbers.items() if not n.startswith("metric time/")}


def run(
    device,
    folder,
    client=ditto,
    data=given,
    precision="64-true",
    rounds=ROUNDS,
    trainer=None,
    checkpoint=None,
    predicts=False,
    sampler=None,
    on_disk=False,
    tests=False,
    federation=None,
    **settings,
):
    """Fit, with a validation at the end; ``settings`` are those of the federation's sections."""
    settings = {"seed": 0, "engine": "one_by_one", **copy.deepcopy(settings)}
    if on_disk:
        settings["folder"] = str(folder / "states")
    return numbers_of(
        pl_fed.Trainer(
            federation or pl_fed.Federation(sampler or All(), **sections(**settings)),
            run_dir=folder / "run",
            accelerator=device,
            devices=1,
            precision=precision,
            max_epochs=rounds,
            num_sanity_val_steps=0,
            check_val_every_n_epoch=rounds,
            enable_progress_bar=False,
            enable_model_summary=False,
            **(trainer or {}),
        ),
        client(),
        data(),
        checkpoint=checkpoint,
        predicts=predicts,
        tests=tests,
    )


def run_without_trainer(device, folder, client=ditto, data=None, **settings):
    """Run rounds alone, without a Trainer and evaluations, which take two thirds of the time."""
    client, data = placed(client, device), (data or shared_data)()
    outcome = run_rounds(client, data, **copy.deepcopy(settings))
    numbers = {"w": outcome.w, "v": outcome.v, "loss": outcome.reports[-1]["train/loss"]}
    numbers |= {f"state {name}": rows for name, rows in outcome.states.items()}
    numbers |= {f"server {name}": row for name, row in outcome.server_states.items()}
    return {name: value.detach().cpu() for name, value in numbers.items()}


@cache
def placed(client, device):
    """Return a client on a device; cases share it, and its trial before training."""
    return client().to("cuda" if device == "gpu" else "cpu")


@cache
def shared_data():
    """Return data that cases share, with two groups of samples."""
    groups = torch.arange(sum(SIZES)) % 2
    return given(replace(classes(SIZES), groups=groups, group_names=("a", "b")), root_samples=8)


DITTO_WITH_A_DEFENCE = {
    *("Median", "TrimmedMean", "Krum", "Term, poisoned", "QFFL in shards, poisoned", "DeepSight"),
    *("FLDetector", "FLTrust", "a chain"),
}
LIKE_OTHERS_IN_EVALUATIONS = {  # FedAvg or Ditto; `make test` has their rounds
    *("APFL", "DittoGreedy", "FedADMM", "FedALA", "FedAS", "FedBN", "FedDBE", "FedDyn", "FedPer"),
    *("FedProx", "HierFedAvg", "L2SGD", "Mapper", "MeanRegularized", "Moon", "PFedMe"),
    *("PFedMeEpochs", "PropFair"),
}
LIKE_OTHERS_ON_DEVICE = {  # in the tensors that they keep and make
    *("Ditto 2", "Ditto 3", "DittoGreedy", "FedAS", "FedBABU", "FedBN", "FedDBE", "FedDyn"),
    *("FedPer", "FedProx", "Finetuning", "HierFedAvg", "L2SGD", "Local", "Mapper"),
    *("MeanRegularized", "PFedMeEpochs", "PropFair", "SimpleTuning"),
}
TRACED_ALGORITHMS = ("Ditto", "FedAvg", "FedTilt", "Scaffold")


def algorithms():
    """Return every algorithm; the CPU's numbers are those of ``one_by_one``.

    An algorithm's own tensors are the same in all engines, so the stacked engine runs rounds alone,
    and the compiled engine, which only traces on this device, runs four kinds of objective: of two
    models, of one, of losses of samples, and with states in each step. One by one, an algorithm of
    the scenarios runs rounds alone, too: there it runs with a Trainer.
    """
    cases, with_trainer = {}, {find_class(scenario) for scenario in worlds.SCENARIOS.values()}
    further = {"PerFedAvg 2 | one_by_one"}  # of each algorithm, `make test` has one engine
    for param in shipped_classes(pl_fed.clients, Client, {"FedExLoRA"}):
        for count, arguments in enumerate(CLIENT_ARGUMENTS.get(param.id, [{}])):
            options = {"optimizer": sgd(0.1, weight_decay=0.01), "local_epochs": 1, **arguments}
            client = lambda kind=param.values[0], options=options: kind(seeded(mlp), **options)  # noqa: E731
            variant = f" {count + 1}" if count else ""
            name = f"{param.id}{variant}"
            rounds = partial(run_without_trainer, client=client, data=shared_data, chunk_size=3)
            if param.values[0] in with_trainer:
                cases[f"{name} | one_by_one"] = partial(rounds, engine="one_by_one")
                cases[f"{name} | one_by_one"].cpu = rounds
            else:
                cases[f"{name} | one_by_one"] = partial(run, client=client)
            traced = ["stacked_compiled"] if name in TRACED_ALGORITHMS else []
            for engine in ("stacked", *traced):
                case = cases[f"{name} | {engine}"] = partial(rounds, engine=engine)
                case.cpu = rounds
            has_rounds = param.values[0] in with_trainer or name in LIKE_OTHERS_IN_EVALUATIONS
            further.add(f"{name} | {'one_by_one' if has_rounds else 'stacked'}")
            further |= {f"{name} | {engine}" for engine in traced if name != "FedAvg"}
    further |= {name for name in cases if name.partition(" | ")[0] in LIKE_OTHERS_ON_DEVICE}
    return mark_further(cases, further)


def find_class(scenario):
    """Return the algorithm of a scenario of ``worlds.py``."""
    client = scenario["client"]
    return client.func if isinstance(client, partial) else client


DEFENCES = {  # of those that ask the device for the same kinds of work, one
    *("AAggFF", "CRFL", "CenteredClipping", "Chain", "DeepSight", "FLDetector", "FLTrust"),
    *("FairFed", "FedMGDA", "FoolsGold", "FreqFed", "GeometricMedian", "Krum", "LASA", "Mean"),
    *("Median", "RFLBAT", "SignGuard", "Term", "TorchJD", "Clipping", "NearestNeighborMixing"),
}
ATTACKS_ON_DEVICE = {
    *("A3FL", "ALittleIsEnough", "AdaptiveAttack", "BadPFL", "Backdoor", "Canaries", "Combined"),
    *("DistributedBackdoor", "EdgeCaseBackdoor", "FlippedLabels", "FreeRider", "GaussianNoise"),
    *("LargeLoss", "MinMax", "Mimic", "Neurotoxin", "Outliers", "TrainingAttack"),
}


def defences():
    """Return every aggregator and every pre-aggregator, in rounds alone."""
    median = {"aggregator": pl_fed.aggregators.Median()}
    cases = {
        f"{kind.__name__} {arguments}": {"aggregator": kind(**name_layers(arguments))}
        for kind, arguments in AGGREGATORS
    }
    cases |= {
        f"{kind.__name__} {arguments}, Median": {"pre_aggregators": [kind(**arguments)], **median}
        for kind, arguments in PRE_AGGREGATORS
    }
    first = {f"{kind.__name__} {arguments}" for kind, arguments in first_of_each(AGGREGATORS)}
    first |= {
        f"{kind.__name__} {arguments}, Median" for kind, arguments in first_of_each(PRE_AGGREGATORS)
    }
    chosen = {name for name in first if name.partition(" ")[0] in DEFENCES}
    cases = {name: partial(run_without_trainer, **settings) for name, settings in cases.items()}
    return mark_further(cases, cases.keys() - chosen)


def name_layers(arguments):
    """Return arguments of an aggregator with the last weight of the net as its layers."""
    return arguments | {"layers": ["2.weight"]} if "layers" in arguments else arguments


def codecs():
    """Return every codec, with Byzantine clients, in rounds alone; a net has matrices to factor."""
    settings = {"attack": pl_fed.attacks.SignFlipping(), "ids": [1, 3]}
    cases = {
        f"codec {kind.__name__} {arguments}": partial(
            run_without_trainer, compression=kind(**arguments), **settings
        )
        for kind, arguments in CODECS
    }
    chosen = {f"codec {kind.__name__} {arguments}" for kind, arguments in first_of_each(CODECS)}
    chosen = {name for name in chosen if name.split()[1] in ("PowerSGD", "QSGD", "TopK")}
    return mark_further(cases, cases.keys() - chosen)


def attacks():
    """Return every attack, of attackers who know all uploads or their own, in rounds alone."""
    net = lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 10))  # noqa: E731
    settings = {
        "client": partial(ditto, net),
        "data": cache(lambda: given(classes(SIZES, (1, 4, 4), num_classes=10))),
        "ids": [1, 3],
        "aggregator": pl_fed.aggregators.Median(),
    }
    cases, kinds, further = {}, set(), set()
    for knowledge, (kind, arguments) in zip(cycle(("all", "own", "own")), ATTACKS):
        name = f"{kind.__name__} {arguments}, knows {knowledge}"
        cases[name] = partial(
            run_without_trainer,
            attack=kind(**arguments),
            knowledge="all" if kind(**arguments).needs_simulation else knowledge,
            **settings,
        )
        if kind in kinds or kind.__name__ not in ATTACKS_ON_DEVICE:
            further.add(name)
        kinds.add(kind)
    return mark_further(cases, further)


FURTHER_SCENARIOS = {  # other groups have their algorithms and pieces
    *("compressed, one diverges", "unequal clients, normalised"),
    *("Ditto", "float32, by samples", "FairFed, poisoned", "FairFed in shards"),
    *("multi-Krum in shards, float32", "FedTilt, tilted in shards", "nothing is sent"),
    *("the server keeps all models, some forged", "the server keeps a control"),
    *("a choice of λ", "states of local optimizers", "FLAME", "Lp-Proj in shards", "outliers"),
    *("clusters, some forged", "one sends nothing", "parts are kept"),
    "a frozen part, nothing is kept",
    *("FairFed, one client", "forged", "forged by a search, redrawn", "broken uploads"),
    *("all uploads broken", "BatchNorm", "BatchNorm, in shards", "all at home in one process"),
    *("fewer clients than processes", "the server keeps all models"),
    *("adapted before evaluations", "held-out clients", "held-out clients, whose head trains"),
    *("stacked", "a backdoor", "one diverges", "one diverges, in shards", "one sends too little"),
    *("one process sends nothing", "compressed in low rank, some forged", "unequal clients"),
    *("unequal clients, normalised and forged", "diverges"),
    *{"private", "private, with empty cohorts"} & worlds.SCENARIOS.keys(),
}


def scenarios():
    """Return the scenarios of ``worlds.py``: broken uploads, hybrid models, privacy.

    One process has no shards: of two scenarios that differ in shards alone, the first is enough.
    Those that are Ditto with an aggregator are left to the group of defences.
    """

    def world(device, folder, name):
        trainer, client, data = worlds.make(name, folder, ROUNDS, 1, 1)
        try:
            return numbers_of(trainer, client, data)
        except worlds.NonFiniteLossError as error:
            return {"error": torch.tensor([float(x) for x in re.findall(r"\d+", str(error))])}

    def on_device(device, folder, name):
        plain = worlds.pl_fed
        trainer = lambda *a, **kw: plain.Trainer(*a, **{**kw, "accelerator": device})  # noqa: E731
        worlds.pl_fed = SimpleNamespace(Trainer=trainer, Federation=plain.Federation)
        try:
            return world(device, folder, name)
        finally:
            worlds.pl_fed = plain

    repeated = {f"{name} in shards" for name in worlds.SCENARIOS}
    names = [name for name in worlds.SCENARIOS if name not in repeated | DITTO_WITH_A_DEFENCE]
    cases = {name: partial(on_device, name=name) for name in names}
    for name, case in cases.items():
        case.tolerance = 1e-5 if "float32" in name else 1e-9
    return mark_further(cases, FURTHER_SCENARIOS)


def evaluations():
    """Return an evaluation with gaps between groups of samples, and figures of fairness."""

    def grouped():
        arrays = classes([40, 60, 30])
        return given(replace(arrays, groups=torch.arange(len(arrays)) % 2))

    figures = ["gini", "entropy", "gap", "worst50", "q25"]
    return {"groups of samples": partial(run, data=grouped, tests=True, statistics=figures)}


def samplers():
    """Return every sampler."""
    arguments = {"cohort_size": 3, "groups": 2, "rate": 0.5}
    cases = {}
    for kind in SAMPLERS:
        names = inspect.signature(kind).parameters
        options = {name: value for name, value in arguments.items() if name in names}
        cases[f"sampler {kind.__name__}"] = partial(run, sampler=kind(**options))
    return mark_further(cases, cases.keys() - {"sampler BySize"})  # most cases have All


def tasks():
    """Return every task that takes any net: a linear map onto the shape of its outputs."""

    def federated(outputs, targets, num_classes):
        inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
        owner = torch.arange(6).repeat_interleave(8)
        repeated = targets.repeat(8, *[1] * (targets.dim() - 1))
        return given(Arrays(inputs, repeated, owner, num_classes=num_classes or None))

    def net(shape):
        return nn.Sequential(nn.Linear(4, shape.numel()), nn.Unflatten(1, shape))

    cases = {
        f"task {name}": partial(
            run,
            client=lambda task=task, outputs=outputs: ditto(
                partial(net, outputs.shape[1:]), task=copy.deepcopy(task)
            ),
            data=partial(federated, outputs, targets, num_classes),
            predicts=True,
        )
        for name, (task, outputs, targets, num_classes) in TASKS.items()
    }
    chosen = ("LanguageModelling", "MultiLabel", "Segmentation")  # with masks and without
    return mark_further(cases, cases.keys() - {f"task {name}" for name in chosen})


def modules():
    """Return LightningModules with their own steps, logs and optimizers."""
    made = {
        "images with BatchNorm": (lit_modules.LitImages, lit_federations.images),
        "a table": (lit_modules.LitTable, lit_federations.table),
        "a contrast": (lit_modules.LitAutoencoder, lit_federations.numbers),
    }
    cases = {
        f"module {name}, {engine}": partial(
            run,
            client=lambda make=make: FedAvg(seeded(make)),
            data=lambda arrays=arrays: given(arrays()),
            engine=engine,
        )
        for name, (make, arrays) in made.items()
        for engine in EAGER
    }
    chosen = zip(made, cycle(EAGER))
    return mark_further(cases, cases.keys() - {f"module {name}, {e}" for name, e in chosen})


def adapters():
    """Return a Hugging Face model, whole and with low-rank adapters."""
    if not (worlds.find_spec("transformers") and worlds.find_spec("peft")):
        return {}
    from hugging_face_models import texts, tiny

    from pl_fed.clients import FedExLoRA
    from pl_fed.models import LoRA

    def adapted():
        return LoRA(tiny(), r=2, target_modules=["query", "value"])

    made = {  # each kind of net, each algorithm and each engine in two cases
        "whole, one_by_one": (Ditto, tiny),
        "LoRA, stacked": (Ditto, adapted),
        "FedExLoRA, one_by_one": (FedExLoRA, adapted),
        "FedExLoRA, stacked": (FedExLoRA, adapted),
    }
    cases = {
        f"Hugging Face {name}": partial(
            run,
            client=lambda kind=kind, make=make: kind(make(), optimizer=sgd(0.1)),
            data=lambda: given(texts((8, 9, 12))),
            engine=name.partition(", ")[2],
            rounds=1,
        )
        for name, (kind, make) in made.items()
    }
    return mark_further(cases, cases.keys() - {"Hugging Face FedExLoRA, one_by_one"})


def nets():
    """Return the nets of the papers, but those with over a million parameters."""
    cases = {
        f"net {count} {getattr(make, '__name__', '')}": partial(
            run,
            client=lambda make=make: FedAvg(seeded(make), optimizer=sgd(0.01)),
            data=lambda shape=shape, num_classes=num_classes: given(
                classes([6, 6], shape, num_classes=num_classes), test_fraction=0.0
            ),
            rounds=1,
            engine="auto",
        )
        for count, (make, shape, num_classes, numel) in enumerate(NETS)
        if numel < 1_000_000
    }
    like_others = ("DittoFemnistCNN", "DittoCelebaCNN", "FedTiltCNN", "FlameFemnistCNN")
    like_others += ("medical_mnist", "<lambda>", "LogisticRegression", "MLP")
    return mark_further(cases, {name for name in cases if name.endswith(like_others)})


def engines():
    """Return the settings of engines: optimizers, precisions, clipping, and the choice `auto`.

    Every setting runs in both eager engines. The traced engines, which take the same parts, and
    `auto` run each setting once between them. Engines agree, so that the CPU runs one by one,
    but for low precisions.
    """
    adam = partial(ditto, optimizer=partial(torch.optim.Adam, lr=0.01))
    named = {
        "Adam": {"client": adam},
        "Adam, kept": {"client": adam, "keep_optimizer_state": True},
        "clipping": {"trainer": {"gradient_clip_val": 0.1}},
        "accumulation": {"trainer": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3}},
        "dropout": {"client": partial(ditto, worlds.small_net)},
        "float32": {"precision": "32-true"},
        "bf16-mixed": {"precision": "bf16-mixed"},
    }
    tolerances = {"float32": 1e-5, "bf16-mixed": 3e-3}
    traced = {
        "one_by_one_compiled": ("Adam, kept", "dropout"),
        "stacked_compiled": ("accumulation", "clipping", "bf16-mixed"),
        "auto": ("Adam", "float32"),
    }
    cases = {}
    for engine in (*EAGER, *traced):
        for name in traced.get(engine, named):
            case = cases[f"{engine}, {name}"] = partial(run, engine=engine, **named[name])
            case.tolerance = tolerances.get(name, 1e-9)
            if name not in tolerances:
                case.cpu = f"one_by_one, {name}"
    chosen = {
        *("stacked, Adam, kept", "stacked, accumulation", "stacked, bf16-mixed"),
        *("one_by_one_compiled, dropout", "auto, BatchNorm"),
    }
    data = partial(given, drop_last=True)
    for engine in ("auto", "one_by_one", "one_by_one_compiled"):
        client = partial(ditto, worlds.batch_norm_net)
        case = partial(run, client=client, data=data, engine=engine)
        case.cpu = "one_by_one, BatchNorm"
        cases[f"{engine}, BatchNorm"] = case
    return mark_further(cases, cases.keys() - chosen)


def storage():
    """Return states in memory, on disk and in both, checkpoints across devices, and privacy.

    A checkpoint of each kind of state goes from the device to the CPU, and from there to the
    device; one goes from the device to itself.
    """
    folders = tempfile.TemporaryDirectory()

    @cache
    def save(device, kind):
        """Run the first round; return its checkpoint."""
        folder = Path(folders.name) / device / kind
        run(device, folder, rounds=1, **kept[kind])
        return folder / "run" / "checkpoints" / "last.ckpt"

    def resumed(device, folder, begins, ends, kind):
        places = {True: device, False: "cpu"}
        checkpoint = save(places[begins], kind)
        return run(places[ends], folder, checkpoint=checkpoint, **kept[kind])

    def fit_twice(device, folder, begins, ends):
        """Fit a federation by a trainer of one device, and again by a trainer of the other."""
        settings = {**kept["a centre"], **kept["Adam on the server"]}
        options = sections(engine="one_by_one", seed=0, **settings)
        federation = pl_fed.Federation(All(), **options)
        client, data, places = ditto(), shared_data(), {True: device, False: "cpu"}
        for begun in (begins, ends):
            place = folder / str(begun)
            numbers = run(
                places[begun], place, lambda: client, lambda: data, rounds=1, federation=federation
            )
        return numbers

    cases = {
        "states on disk": partial(run, on_disk=True),
        "states partly in memory": partial(run, memory=400),
        "untrained models are global": partial(run, sampler=Uniform(2), untrained_models="global"),
        "predictions": partial(run, predicts=True),
    }
    kept = {
        "a mean": {},
        "a centre": {"aggregator": pl_fed.aggregators.CenteredClipping()},
        "rows of clients": {"aggregator": pl_fed.aggregators.FairFed(), "data": shared_data},
        "Adam on the server": {"server_optimizer": partial(torch.optim.Adam, lr=0.01)},
        "local momentum": {"keep_optimizer_state": True},
    }
    first_ways = [*zip(cycle((False, True)), kept)]  # `make test` has each kind in one direction
    further = {"fit on device, then CPU", "states partly in memory"}
    further |= {"resume, device to CPU, a centre", "resume, CPU to device, a mean"}
    ways = [(begins, not begins, kind) for begins in (True, False) for kind in kept]
    for begins, ends, kind in [*ways, (True, True, "local momentum")]:
        words = f"{'device' if begins else 'CPU'} to {'device' if ends else 'CPU'}"
        case = partial(resumed, begins=begins, ends=ends, kind=kind)
        case.cpu = f"resume, device to CPU, {kind}"
        name = f"resume, {words}, {kind}"
        cases[name] = case
        further |= set() if (begins, kind) in first_ways else {name}
    for begins, words in ((True, "device, then CPU"), (False, "CPU, then device")):
        case = cases[f"fit on {words}"] = partial(fit_twice, begins=begins, ends=not begins)
        case.cpu = "fit on device, then CPU"
    if worlds.find_spec("dp_accounting"):
        private = partial(
            worlds.DifferentialPrivacy,
            clip_norm=0.1,
            noise_multiplier=1.0,
            delta=0.01,
            noise_seed=0,
        )
        client = lambda: FedAvg(seeded(mlp), optimizer=sgd(0.1))  # noqa: E731
        cases |= {
            "privacy": partial(run, client=client, privacy=private(), sampler=Poisson(0.5)),
            "correlated noise": partial(
                run, client=client, privacy=private(min_separation=2), sampler=Cyclic(2)
            ),
        }
        further.add("privacy")
    return mark_further(cases, further)


def processes():
    """Return two processes that share a device, and the resume of their checkpoint by one.

    The processes are forked at once: autograd's threads, which the first case starts, do not
    survive a fork.
    """
    context = multiprocessing.get_context("fork")

    def start(rank, aggregator):
        ours, theirs = context.Pipe()
        context.Process(target=join, args=(rank, theirs, aggregator), daemon=True).start()
        return ours

    def shared(device, folder, aggregator, connections):
        if device == "cpu":
            return run(device, folder, aggregator=aggregator, rounds=ROUNDS + 1)
        port = free_port()
        for connection in connections:
            connection.send((port, folder))
        errors = [connection.recv() for connection in connections]
        if any(errors):
            raise RuntimeError(max(errors))
        checkpoint = folder / "run" / "checkpoints" / "last.ckpt"
        settings = {"aggregator": aggregator, "checkpoint": checkpoint, "rounds": ROUNDS + 1}
        return run(device, folder / "resumed", **settings)

    aggregators = {"Mean": None, "Median": pl_fed.aggregators.Median()}
    return {
        f"two processes, resumed by one, {name}": partial(
            shared, aggregator=aggregator, connections=[start(rank, aggregator) for rank in (0, 1)]
        )
        for name, aggregator in aggregators.items()
    }


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def join(rank, connection, aggregator):
    """Run as one of two processes; answer with the error, or an empty text."""
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.utilities import rank_zero_only

    port, folder = connection.recv()
    rank_zero_only.rank = rank
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "GROUP_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        trainer = {"num_nodes": 2, "strategy": DDPStrategy(process_group_backend="gloo")}
        run("gpu", folder, aggregator=aggregator, trainer=trainer)
        connection.send("")
    except BaseException:
        connection.send(traceback.format_exc())


GROUPS = {
    "algorithms": [algorithms],
    "defences and attacks": [defences, attacks],
    "scenarios": [scenarios, evaluations],
    "pieces": [samplers, tasks, nets, engines, codecs],
    "modules": [modules, adapters],
    "storage and processes": [processes, storage],
}
