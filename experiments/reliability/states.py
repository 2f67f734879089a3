"""Kinds of state that a run keeps between rounds, as command lines."""

from experiments.grid import ROOT

FIT = [
    *("fit", "--config", str(ROOT / "configs/quickstart.yaml"), "--trainer.max_epochs", "12"),
    *("--trainer.check_val_every_n_epoch", "3", "--data.num_clients", "10"),
    *("--federation.sampler.cohort_size", "5"),
    *("--trainer.default_root_dir", "runs", "--trainer.logger", "false"),
    *("--trainer.enable_progress_bar", "false"),
]
SAVE_EACH = [
    *("--trainer.callbacks+=pl_fed.callbacks.LastCheckpoint", "--trainer.callbacks.share", "1.0"),
]
STACKED = ["--federation.engine.name", "stacked"]
ONE_BY_ONE = ["--federation.engine.name", "one_by_one"]
KEEP = ["--federation.engine.keep_optimizer_state", "true"]
ON_DISK = ["--federation.storage.folder", "store"]
SGD = ["--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "0.05"]
MOMENTUM = [*SGD, "--model.optimizer.momentum", "0.9"]
ADAM = ["--model.optimizer", "torch.optim.Adam", "--model.optimizer.lr", "0.005"]
MLP = [
    *("--model.net", "pl_fed.models.MLP", "--model.net.in_features", "64"),
    *("--model.net.hidden", "[8]", "--model.net.num_classes", "10"),
]
ADAPTED = [
    *("--model.net", "pl_fed.models.LoRA", "--model.net.r", "2"),
    *("--model.net.base", "experiments.reliability.modules.AdaptedNet"),
    *("--model.net.target_modules", "[body]", "--model.net.modules_to_save", "[head]"),
]


def _algorithm(name: str, *options: str, net: list[str] = MLP) -> list[str]:
    return ["--model", f"pl_fed.clients.{name}", "--model.local_epochs", "1", *SGD, *net, *options]


def _server(optimizer: str, **options: float) -> list[str]:
    return _class("--federation.server_optimizer", optimizer, **options)


def _class(place: str, name: str, **options: object) -> list[str]:
    """Return the options that set a class and its arguments."""
    arguments = [part for key, value in options.items() for part in (f"{place}.{key}", str(value))]
    return [place, name, *arguments]


def _schedule(name: str, **options: object) -> list[str]:
    return _class("--model.lr_scheduler", f"torch.optim.lr_scheduler.{name}", **options)


def _callback(name: str, **options: object) -> list[str]:
    _, _, *arguments = _class("--trainer.callbacks", name, **options)
    return [f"--trainer.callbacks+={name}", *arguments]


def _attack(name: str, **options: object) -> list[str]:
    return [
        *("--federation.adversary.attack", f"pl_fed.attacks.{name}"),
        *("--federation.adversary.fraction", "0.2"),
        *(
            part
            for key, value in options.items()
            for part in (f"--federation.adversary.{key}", str(value))
        ),
    ]


def _sampler(name: str, **options: object) -> list[str]:
    return _class("--federation.sampler", f"pl_fed.samplers.{name}", **options)


def _private(*options: str) -> list[str]:
    return [
        *("--federation.privacy.clip_norm", "0.3", "--federation.privacy.delta", "0.01"),
        *("--federation.privacy.noise_multiplier", "1.0", "--federation.privacy.noise_seed", "0"),
        *options,
    ]


FLAME = _algorithm("FLAME", "--model.lam", "1", "--model.rho", "0.03")
POISSON = _sampler("Poisson", rate=0.4)
CYCLIC = [*_sampler("Cyclic", groups=5), "--federation.privacy.min_separation", "5"]
CENTERED_CLIPPING = ["--federation.aggregator", "pl_fed.aggregators.CenteredClipping"]
TOP_3 = _callback(
    "ModelCheckpoint", monitor="val/global/accuracy", mode="max", save_top_k=3, save_last="true"
)
STOP_EARLY = _callback("EarlyStopping", monitor="val/global/loss", patience=1, min_delta=0.3)
AVERAGE = _callback("EMAWeightAveraging", decay=0.8)

_SAVED_EACH_ROUND = {
    "FedAvg, server momentum": [
        *_algorithm("FedAvg"),
        *STACKED,
        *_server("SGD", lr=1, momentum=0.9),
    ],
    "FedAvg, server Adam, cosine": [
        *_algorithm("FedAvg"),
        *ONE_BY_ONE,
        *_server("Adam", lr=0.02),
        *_schedule("CosineAnnealingLR", T_max=12),
    ],
    "FedAvg, server Yogi": [
        *_algorithm("FedAvg"),
        *STACKED,
        *_server("pl_fed.optimizers.Yogi", lr=0.02),
    ],
    "FedAvg, kept Adam": [*_algorithm("FedAvg"), *ADAM, *KEEP, *ONE_BY_ONE],
    "Ditto, kept Adam": [*ONE_BY_ONE, *ADAM, *KEEP],
    "Ditto, kept momentum on disk": [*STACKED, *MOMENTUM, *KEEP, *ON_DISK],
    "Ditto, kept Adam on disk, Yogi": [
        *(*ONE_BY_ONE, *ADAM, *KEEP, *ON_DISK),
        *_server("pl_fed.optimizers.Yogi", lr=0.02),
    ],
    "Ditto, states on disk": [*STACKED, *ON_DISK],
    "Ditto, plateau": [
        *STACKED,
        *_class(
            "--model.lr_scheduler",
            "lightning.pytorch.cli.ReduceLROnPlateau",
            monitor="train/loss",
            patience=1,
            factor=0.5,
        ),
    ],
    "Ditto, bf16, kept Adam": [*ADAM, *KEEP, *STACKED, "--trainer.precision", "bf16-mixed"],
    "Ditto, logs each 7 rounds": [*STACKED, "--trainer.log_every_n_steps", "7"],
    "Ditto, limits": [
        *(*_algorithm("Ditto"), *ONE_BY_ONE, *_sampler("Poisson", rate=0.2)),
        *("--trainer.gradient_clip_val", "1.0", "--trainer.limit_train_batches", "3"),
    ],
    "FLAME": [*FLAME, *STACKED],
    "FLAME, on disk": [*FLAME, *STACKED, *ON_DISK],
    "FLAME, lagged": [*FLAME, "--model.lagged_global", "true", *ONE_BY_ONE],
    "FedTilt": [*_algorithm("FedTilt", "--model.tau", "2", "--model.lam", "2"), *ONE_BY_ONE],
    "FedTilt, tilted server": [
        *_algorithm("FedTilt", "--model.tau", "2", "--model.lam", "2", "--model.mu", "0.05"),
        *STACKED,
        *_class("--federation.aggregator", "pl_fed.aggregators.TiltedMean", q=0.5),
    ],
    "SCAFFOLD, attack, centered clipping": [
        *(*_algorithm("Scaffold"), *ONE_BY_ONE, *CENTERED_CLIPPING, *_attack("Mimic")),
    ],
    "SCAFFOLD, buckets, redrawn attackers, on disk": [
        *(*_algorithm("Scaffold"), *ONE_BY_ONE, *CENTERED_CLIPPING, *ON_DISK),
        *("--federation.pre_aggregators+=pl_fed.aggregators.Bucketing",),
        *_attack("ALittleIsEnough", redraw="true"),
    ],
    "SCAFFOLD, start": [
        *(*_algorithm("Scaffold", "--model.control", "start"), *STACKED),
        *_server("SGD", lr=1, momentum=0.9),
    ],
    "FedADMM": [*_algorithm("FedADMM"), *STACKED],
    "FedADMM, attack from round 7": [
        *(*_algorithm("FedADMM"), *STACKED, *_attack("SignFlipping", start_round=7)),
    ],
    "APFL": [*_algorithm("APFL"), *STACKED],
    "FedRep": [*_algorithm("FedRep"), *ONE_BY_ONE],
    "FedRep, on disk": [*_algorithm("FedRep"), *ONE_BY_ONE, *ON_DISK],
    "FedPer": [*_algorithm("FedPer"), *STACKED],
    "L2SGD": [*_algorithm("L2SGD"), *STACKED],
    "pFedMe": [*_algorithm("PFedMe"), *STACKED],
    "pFedMe, epochs": [*_algorithm("PFedMeEpochs"), *ONE_BY_ONE],
    "MAPPER": [*_algorithm("Mapper"), *ONE_BY_ONE],
    "Ditto, choice of lambda": [*_algorithm("DittoChoice"), *ONE_BY_ONE],
    "Ditto, greedy": [*_algorithm("DittoGreedy"), *STACKED],
    "Lp-Proj": [*_algorithm("LpProj", "--model.dimensions", "20"), *ONE_BY_ONE],
    "mean-regularized": [*_algorithm("MeanRegularized"), *STACKED],
    "MOCHA": [*_algorithm("Mocha"), *ONE_BY_ONE, *_sampler("All")],
    "Per-FedAvg": [*_algorithm("PerFedAvg"), *STACKED],
    "local": [*_algorithm("Local"), *STACKED],
    "finetuning": [*_algorithm("Finetuning"), *ONE_BY_ONE],
    "LoRA": [*_algorithm("Ditto", net=ADAPTED), *STACKED],
    "LoRA, exact": [*_algorithm("FedExLoRA", net=ADAPTED), *ONE_BY_ONE],
    "Poisson cohorts": [*_algorithm("Ditto"), *STACKED, *POISSON],
    "privacy": [*ONE_BY_ONE, *POISSON, *_private()],
    "privacy, adaptive clipping, server Adam": [
        *(*STACKED, *POISSON, *_private("--federation.privacy.target_quantile", "0.5")),
        *_server("Adam", lr=0.02),
    ],
    "privacy, buckets, median": [
        *(*ONE_BY_ONE, *POISSON, *_private("--federation.privacy.buckets", "3")),
        *("--federation.aggregator", "pl_fed.aggregators.Median"),
    ],
    "DP-FTRL, server momentum": [
        *(*_algorithm("FedAvg"), *STACKED, *_private(*CYCLIC)),
        *_server("SGD", lr=1, momentum=0.9),
    ],
    "DP-FTRL, Ditto on disk": [*ONE_BY_ONE, *ON_DISK, *_private(*CYCLIC)],
    "schedule": [*_algorithm("FedAvg"), *STACKED, *_schedule("StepLR", step_size=4)],
    "LightningModule, kept Adam, schedule": [
        *KEEP,
        *("--model", "pl_fed.clients.FedAvg", "--model.local_epochs", "1"),
        *SGD,  # the default: the module's own optimizer takes its place
        *("--model.net", "experiments.reliability.modules.LitDigits"),
        *_callback("LearningRateMonitor"),
        *("--trainer.logger", "lightning.pytorch.loggers.CSVLogger"),
        *("--trainer.logger.save_dir", "logs"),
    ],
    "data set that draws": [
        *ONE_BY_ONE,
        *("--data.dataset", "pl_fed.data.TorchDataset", "--data.dataset.redraw", "true"),
        *("--data.dataset.dataset", "experiments.reliability.modules.NoisyDigits"),
        *("--data.partitioner", "IID"),
    ],
}
_OTHER_CHECKPOINTS = {
    "default checkpoints": [],
    "three best checkpoints": [*TOP_3, *STACKED],
    "three best checkpoints, early end": [*TOP_3, *STOP_EARLY, *STACKED],
    "moving average": [*_algorithm("FedAvg"), *SAVE_EACH, *AVERAGE, *STACKED],
    "moving average, three best checkpoints": [*_algorithm("FedAvg"), *AVERAGE, *TOP_3, *STACKED],
    "moving average, schedule": [
        *(*_algorithm("Ditto"), *SAVE_EACH, *AVERAGE, *ONE_BY_ONE),
        *_schedule("ExponentialLR", gamma=0.9),
    ],
}
STATES: dict[str, list[str]] = {
    **{name: [*SAVE_EACH, *options] for name, options in _SAVED_EACH_ROUND.items()},
    **_OTHER_CHECKPOINTS,
}
FAULTY = "faulty Ditto"  # fails where an environment variable says, and is Ditto otherwise
OPTIONS: dict[str, list[str]] = {
    **STATES,
    FAULTY: [*SAVE_EACH, *ONE_BY_ONE, "--model", "experiments.reliability.modules.FaultyDitto"],
}
