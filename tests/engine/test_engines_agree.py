"""All engines give the same numbers for every net, algorithm, optimizer and chunk size.

One axis varies at a time around a base case. Eager engines run all pairs of nets and algorithms;
traced steps, which are dear, run the pairs for which the engines have code of their own.
"""

import warnings
from dataclasses import replace

import pytest
import torch
from further_cases import covering, mark_further, mark_if
from hypothesis import given, settings
from hypothesis import strategies as st
from small_federations import NOTHING_READABLE, classes, mlp, run_rounds, seeded, sgd, shared_out
from torch import nn
from torchvision.transforms import v2

import pl_fed
from pl_fed import EngineOptions, Federation
from pl_fed.attacks import Backdoor, FlippedLabels, GaussianNoise, Outliers, RandomLabels
from pl_fed.clients import Ditto, FedAvg, Local
from pl_fed.data.batches import LocalWork
from pl_fed.engine import Clipping
from pl_fed.engine.choice import COMPILED, EAGER
from pl_fed.samplers import All, Uniform

pytestmark = pytest.mark.slow

SIZES = [7, 3, 4, 1]  # in minibatches of 4: full and partial ones, one with a single sample
IMAGES = (2, 4, 4)


class Tied(nn.Module):
    """A net with two layers that share one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.second(self.first(x).tanh()).tanh())


class Repeated(nn.Module):
    """A net with one layer and one dropout, each used twice and registered under two names."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop, self.last = nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 3)
        self.again, self.drop_again = self.layer, self.drop

    def forward(self, x):
        x = self.drop(self.layer(x).tanh())
        return self.last(self.drop_again(self.again(x).tanh()))


class Scaled(nn.Module):
    """A net with a constant buffer in its state dict, such as positional encodings."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 4))

    def forward(self, x):
        return self.net(x * self.scale)


def frozen_body():
    body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False), nn.Tanh())
    return nn.Sequential(body.requires_grad_(False), nn.Linear(6, 3))


NETS = {  # name: builder, shape of a sample
    "mlp": (mlp, (4,)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)), (4,)),
    "convolution, group norm": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.AvgPool2d(2),
            nn.Flatten(), nn.Linear(16, 3),
        ),
        IMAGES,
    ),
    "dropout": (
        lambda: nn.Sequential(
            nn.Dropout(0.2), nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)
        ),
        (4,),
    ),
    "dropout of channels": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(16, 3)
        ),
        IMAGES,
    ),
    "tied weights": (Tied, (4,)),
    "layers used twice": (Repeated, (4,)),
    "constant buffer": (Scaled, (4,)),
    "frozen body": (frozen_body, (4,)),
}  # fmt: skip

# nets of other tests here, for all algorithms
SHOWN_ELSEWHERE = {"mlp", "layer norm", "convolution, group norm", "dropout"}

ALGORITHMS = {
    "FedAvg": lambda net, **kwargs: FedAvg(net, local_epochs=2, **kwargs),
    "Local": lambda net, **kwargs: Local(net, local_steps=3, **kwargs),
    "Ditto, r > s": lambda net, **kwargs: Ditto(
        net, lam=0.5, local_epochs=2, personal_steps=1, personal_lr=0.05, **kwargs
    ),
    "Ditto, r < s": lambda net, **kwargs: Ditto(
        net, lam=2.0, local_steps=2, personal_epochs=2, **kwargs
    ),
}

OPTIMIZERS = {
    "SGD, all options": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05
    ),
    "SGD, dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, dampening=0.3),
    "SGD, maximize": lambda p: torch.optim.SGD(p, lr=0.01, maximize=True),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.05),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
}

# unmarked with a kept state: test_optimizer_states.py
KEPT_ELSEWHERE = {
    *("SGD, all options", "SGD, dampening", "Adam", "Adam, amsgrad", "NAdam", "Rprop", "Adagrad"),
    "ASGD",
}

ENGINES = (*EAGER, *COMPILED)

TWO_MODELS = "Ditto, r < s"  # the base case: w and v finish at different steps


@pytest.fixture(autouse=True)
def forbid_fallbacks(uncompiled):
    """Fail a test whose stacked clients fall back to one by one, or whose traced steps to eager."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Clients are run one by one")
        warnings.filterwarnings("error", "Local steps run eagerly")
        yield


def assert_engines_agree(
    client, data, chunk_sizes=(None, 3), largest=1e-10, traced=True, cuts_chunks=True, **settings
):
    """Compare all engines with one by one; return the outcome of one by one.

    Args:
        client: The algorithm.
        data: The clients' data.
        chunk_sizes: The chunk sizes of the eager engines; the compiled engines take the last one.
            By default all clients at once, and chunks of which the last one is smaller.
        largest: The largest difference of any number.
        traced: Whether the compiled engines run, too.
        cuts_chunks: Whether one by one runs in chunks, too.
        settings: Settings of ``run_rounds``.
    """
    expected = run_rounds(client, data, **settings)
    assert expected.w.isfinite().all()
    for chunk_size in chunk_sizes:
        if cuts_chunks and chunk_size is not None:  # None: the same rounds again
            in_chunks = run_rounds(client, data, chunk_size=chunk_size, **settings)
            assert expected.distance(in_chunks) == 0
        stacked = run_rounds(client, data, engine="stacked", chunk_size=chunk_size, **settings)
        assert expected.distance(stacked) <= largest
    for engine in COMPILED if traced else ():
        compiled = run_rounds(client, data, engine=engine, chunk_size=chunk_sizes[-1], **settings)
        assert expected.distance(compiled) <= largest
    return expected


def assert_engines_agree_on_training(algorithm, net, **settings):
    """Compare all engines for an algorithm and a net; check that the models have moved."""
    make, shape = NETS[net]
    client = ALGORITHMS[algorithm](seeded(make), optimizer=sgd(0.1))
    outcome = assert_engines_agree(client, shared_out(classes(SIZES, shape)), **settings)
    before = client.row(client.trained[-1]).data
    after = outcome.w if "global" in client.trained else outcome.v[0]
    assert not torch.equal(before.double(), after)


@pytest.mark.parametrize("algorithm", mark_further(ALGORITHMS, ["Ditto, r > s", "Local"]))
def test_engines_agree_for_every_algorithm_and_chunk_size(algorithm):
    assert_engines_agree_on_training(algorithm, "dropout", chunk_sizes=(None, 1, 2, 3))


@pytest.mark.parametrize("net", mark_further(NETS, SHOWN_ELSEWHERE))
def test_engines_agree_for_every_net(net):
    """Each net is in a stack of one, too: by FedAvg."""
    assert_engines_agree_on_training(TWO_MODELS, net, chunk_sizes=(3,))
    assert_engines_agree_on_training("FedAvg", net, chunk_sizes=(1,), traced=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("net", NETS)
def test_eager_engines_agree_for_every_net_and_further_algorithms(net):
    for algorithm in ALGORITHMS.keys() - {TWO_MODELS, "FedAvg"}:
        eager = {"chunk_sizes": (3,), "traced": False, "cuts_chunks": False}
        assert_engines_agree_on_training(algorithm, net, **eager)


def test_engines_agree_for_one_model_with_a_frozen_body():
    """The two models of Ditto share the frozen body; FedAvg has one model."""
    assert_engines_agree_on_training("FedAvg", "frozen body", chunk_sizes=(3,))


@pytest.mark.parametrize("optimizer", mark_further(OPTIMIZERS, KEPT_ELSEWHERE))
def test_engines_agree_for_every_elementwise_optimizer(optimizer):
    data, build = shared_out(classes(SIZES)), OPTIMIZERS[optimizer]
    client = ALGORITHMS["Ditto, r > s"](seeded(mlp), optimizer=build)
    assert_engines_agree(client, data, chunk_sizes=(3,), traced=False, cuts_chunks=False)
    client = ALGORITHMS["FedAvg"](seeded(lambda: nn.Linear(4, 3)), optimizer=build)
    is_in_step = optimizer.startswith("SGD")  # others step outside: stacks as in an eager one
    expected = assert_engines_agree(client, data, chunk_sizes=(3,), traced=is_in_step)
    if not is_in_step:
        compiled = run_rounds(client, data, engine="one_by_one_compiled", chunk_size=3)
        assert expected.distance(compiled) <= 1e-10


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),  # SGD is in the step, Adam outside of it
    covering(["Ditto, r > s", "Ditto, r < s", "FedAvg"], ["SGD, all options", "Adam"]),
)
def test_engines_agree_for_every_algorithm_with_an_optimizer_state(algorithm, optimizer):
    client = ALGORITHMS[algorithm](seeded(mlp), optimizer=OPTIMIZERS[optimizer])
    assert_engines_agree(client, shared_out(classes(SIZES)), chunk_sizes=(None, 3))


@pytest.mark.parametrize(
    ("clipping", "algorithm"),
    covering([Clipping(0.02, "value"), Clipping(0.05)], reversed(ALGORITHMS)),
    ids=str,
)
def test_engines_agree_with_gradient_clipping(clipping, algorithm):
    client = ALGORITHMS[algorithm](seeded(mlp), optimizer=sgd(0.5, momentum=0.5))
    data, traced = shared_out(classes(SIZES)), algorithm == TWO_MODELS
    clipped = assert_engines_agree(client, data, chunk_sizes=(3,), traced=traced, clipping=clipping)
    assert clipped.distance(run_rounds(client, data)) > 1e-3


def test_every_model_of_every_client_is_clipped_separately():
    """One step of SGD with learning rate 1 moves a model by the norm of its clipped gradient."""
    client = Ditto(seeded(mlp), lam=0.0, optimizer=sgd(1.0), local_steps=1)
    for engine in ENGINES:
        settings = {"engine": engine, "clipping": Clipping(0.01), "rounds": 1}
        outcome = run_rounds(client, shared_out(classes([4, 4])), **settings)
        moved = outcome.v - client.row("personal").data.double()
        torch.testing.assert_close(
            moved.norm(dim=1), torch.full((2,), 0.01).double(), rtol=1e-3, atol=0
        )


def test_engines_agree_with_augmentation():
    augment = [v2.RandomHorizontalFlip(0.5), v2.RandomCrop(4, padding=1)]
    make, shape = NETS["convolution, group norm"]
    arrays = classes(SIZES, shape)
    client = ALGORITHMS["Ditto, r > s"](seeded(make), optimizer=sgd(0.1))
    augmented = assert_engines_agree(client, shared_out(arrays, augment=augment))
    assert augmented.distance(run_rounds(client, shared_out(arrays))) > 1e-6


@pytest.mark.parametrize(
    ("augment", "attack"),
    covering([None, [v2.RandomHorizontalFlip(0.5)]], [FlippedLabels(), RandomLabels()]),
    ids=["-FlippedLabels", "-RandomLabels", "augmented-FlippedLabels", "augmented-RandomLabels"],
)
def test_engines_agree_with_poisoned_labels_of_byzantine_clients(attack, augment):
    make, shape = NETS["convolution, group norm"]
    data = shared_out(classes([9, 4, 6], shape, num_classes=2), augment=augment)
    net = nn.Sequential(seeded(make), nn.Linear(3, 2))
    client = ALGORITHMS["Ditto, r < s"](net, optimizer=sgd(0.2))
    traced = augment is not None and isinstance(attack, RandomLabels)
    poisoned = assert_engines_agree(
        client, data, chunk_sizes=(None, 2), traced=traced, attack=attack, ids=[0, 2]
    )
    benign = run_rounds(client, data, rounds=1)
    first = run_rounds(client, data, rounds=1, attack=attack, ids=[0, 2])
    moved = (first.v - benign.v).abs().amax(dim=1)
    assert (moved > 1e-6).tolist() == [True, False, True]
    assert poisoned.w.isfinite().all()


POISONED_AT_ACCESS = [
    RandomLabels("access"), GaussianNoise(0.5), Outliers(0.5, 0.5), Backdoor(1, 0.5, 1)
]  # fmt: skip


@pytest.mark.parametrize(
    "attack",
    [mark_if(type(attack) in (Outliers, GaussianNoise), attack) for attack in POISONED_AT_ACCESS],
    ids=lambda a: type(a).__name__,
)
def test_engines_agree_with_samples_poisoned_in_every_epoch(monkeypatch, attack):
    """A client's samples are gathered in one step, or in several ones."""
    data = shared_out(classes(SIZES))
    client = Ditto(seeded(mlp), optimizer=sgd(0.2), local_epochs=3)
    settings = {"chunk_sizes": (None, 2), "attack": attack, "ids": [0, 2]}
    gathered_at_once = assert_engines_agree(client, data, traced=False, **settings)
    assert gathered_at_once.distance(run_rounds(client, data)) > 1e-3
    monkeypatch.setattr("pl_fed.data.batches._GATHER_BYTES", 0)
    traced = isinstance(attack, (RandomLabels, GaussianNoise))
    in_several_steps = assert_engines_agree(client, data, traced=traced, **settings)
    assert in_several_steps.distance(gathered_at_once) == 0


def test_labels_drawn_at_every_access_equal_the_labels_of_the_round_in_its_first_epoch_only():
    data = shared_out(classes(SIZES))
    for epochs in (1, 2):
        client = FedAvg(seeded(mlp), optimizer=sgd(0.2), local_epochs=epochs)
        per_round, per_access = (
            run_rounds(client, data, corruption=RandomLabels(redraw)) for redraw in (True, "access")
        )
        assert (per_round.distance(per_access) == 0) is (epochs == 1)


any_sizes_and_work = given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    batch_size=st.integers(1, 10),
    steps=st.tuples(*[st.one_of(st.none(), st.integers(1, 5))] * 2),
    epochs=st.tuples(*[st.integers(1, 2)] * 2),
    drop_last=st.booleans(),
    chunk_size=st.integers(1, 4),
)


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@any_sizes_and_work
def test_eager_engines_agree_for_any_sizes_and_work(**work):
    assert_engines_agree_for_work(**work, traced=False)


@pytest.mark.exhaustive
@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@any_sizes_and_work
def test_compiled_engines_agree_for_any_sizes_and_work(**work):
    assert_engines_agree_for_work(**work, traced=True)


def assert_engines_agree_for_work(sizes, batch_size, steps, epochs, drop_last, chunk_size, traced):
    (r, s), (r_epochs, s_epochs) = steps, epochs
    client = Ditto(
        seeded(NETS["dropout"][0]),
        lam=0.7,
        optimizer=sgd(0.1, momentum=0.9),
        local_steps=r,
        local_epochs=None if r else r_epochs,
        personal_steps=s,
        personal_epochs=None if s else s_epochs,
    )
    data = shared_out(classes(sizes), batch_size, drop_last=drop_last)
    assert_engines_agree(client, data, chunk_sizes=(chunk_size,), rounds=1, traced=traced)


@pytest.mark.parametrize("algorithm", mark_further(ALGORITHMS, ["Ditto, r > s", "Local"]))
def test_engines_agree_in_single_precision(algorithm):
    make, shape = NETS["convolution, group norm"]
    client = ALGORITHMS[algorithm](seeded(make), optimizer=sgd(0.1, momentum=0.9))
    data, traced = shared_out(classes(SIZES, shape)), algorithm == TWO_MODELS
    settings = {"largest": 1e-5, "dtype": torch.float32}
    assert_engines_agree(client, data, chunk_sizes=(None, 3), traced=traced, **settings)


@pytest.mark.parametrize("algorithm", mark_further(ALGORITHMS, ["Ditto, r > s", "Local"]))
def test_engines_agree_in_mixed_precision(algorithm):
    """bfloat16 has three digits; the rows stay in float32."""

    def autocast():
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)

    client = ALGORITHMS[algorithm](seeded(lambda: mlp(32)), optimizer=sgd(0.1))
    data = shared_out(classes([16, 5, 9]))
    settings = {"dtype": torch.float32, "autocast": autocast}
    mixed = run_rounds(client, data, **settings)
    full = run_rounds(client, data, dtype=torch.float32)
    assert 0 < mixed.distance(full) < 2e-2
    for engine in ENGINES if algorithm == TWO_MODELS else EAGER:
        other = run_rounds(client, data, engine=engine, chunk_size=2, **settings)
        assert mixed.distance(other) < 2e-2
        assert other.distance(full) > mixed.distance(full) / 4  # every engine casts
    assert mixed.w.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "make"),
    covering([{"weight": [1.0, 0.2, 3.0]}, {"ignore_index": 1}], [Ditto, FedAvg, Local]),
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_engines_agree_with_weighted_and_ignored_classes(options, make):
    """torch divides a minibatch's loss by the sum of its weights, with padding as without."""
    if "weight" in options:
        options = {"weight": torch.tensor(options["weight"])}
    criterion = nn.CrossEntropyLoss(**options)
    arrays = classes([7, 3, 10], num_classes=3, seed=5)
    client = make(seeded(mlp), optimizer=sgd(0.1), criterion=criterion, local_steps=2)
    data, traced = shared_out(arrays, batch_size=5), make is Ditto
    assert_engines_agree(client, data, chunk_sizes=(None, 2), traced=traced)


def test_engines_agree_with_minibatches_of_ignored_samples():
    """torch's loss is 0 / 0 there; a client whose samples are all ignored does not move."""
    arrays = classes([7, 3, 10], num_classes=3, seed=5)
    criterion = nn.CrossEntropyLoss(ignore_index=1)
    client = FedAvg(seeded(mlp), optimizer=sgd(0.1), criterion=criterion, local_epochs=1)
    outcome = assert_engines_agree(client, shared_out(arrays, batch_size=1), chunk_sizes=(None, 2))
    assert all(report["train/rejected"] == 0 for report in outcome.reports)


class Reporting(FedAvg):
    """A client that reports the norm of its model and the index of its step beside its loss."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        norm = torch.stack([p.square().sum() for p in self.global_model.parameters()]).sum().sqrt()
        return {"loss": loss, "norm": norm, "step": loss.detach() * 0 + batch_idx}


def test_outputs_of_training_steps_are_averaged_over_steps_and_cohort():
    data = shared_out(classes([8, 4]))  # two steps and one: the means of the step are 1/2 and 0
    client = Reporting(seeded(mlp), optimizer=sgd(0.1))
    outcomes = [run_rounds(client, data, engine=name) for name in ENGINES]
    for outcome in outcomes:
        assert float(outcome.reports[0]["train/step"]) == 0.25
    norms = [float(outcome.reports[1]["train/norm"]) for outcome in outcomes]
    assert norms == pytest.approx(norms[:1] * len(ENGINES), abs=1e-12)
    assert norms[0] > 0.5


class Anchored(Ditto):
    """A client with two states: an anchor that pulls v, and the number of its rounds."""

    def __init__(self, net, **kwargs):
        super().__init__(net, **kwargs)
        self.add_state("anchor", self.initial_row)
        self.add_state("rounds", 0)

    def training_step(self, batch, batch_idx):
        pull = self.squared_distance("personal", "anchor") - self.squared_distance("global")
        return super().training_step(batch, batch_idx) + 0.3 * pull

    def end_round(self, client):
        personal = client.models["personal"].parameters
        client.states["anchor"] = (client.states["anchor"] + personal) / 2
        client.states["rounds"] += 1
        return super().end_round(client)


def test_engines_agree_for_a_client_with_declared_states():
    client = Anchored(seeded(mlp), lam=0.2, optimizer=sgd(0.1), local_epochs=2, personal_steps=3)
    data = shared_out(classes(SIZES))
    anchored = assert_engines_agree(client, data, chunk_sizes=(1, 3), rounds=3)
    plain = Ditto(seeded(mlp), lam=0.2, optimizer=sgd(0.1), local_epochs=2, personal_steps=3)
    assert anchored.distance(run_rounds(plain, data, rounds=3)) > 1e-4


class WithoutPersonalSteps(Ditto):
    """A client that takes no step on v."""

    def __init__(self, net, **kwargs):
        super().__init__(net, **kwargs)
        personal = replace(self.models["personal"], work=LocalWork(steps=0))
        self.set_models({**self.models, "personal": personal})


def test_engines_agree_for_a_model_without_steps():
    client = WithoutPersonalSteps(seeded(mlp), optimizer=sgd(0.1))
    outcome = assert_engines_agree(client, shared_out(classes(SIZES)), chunk_sizes=(1, 3))
    assert (outcome.v == client.row("global").data).all()
    assert not torch.equal(outcome.w, client.row("global").data.double())


@pytest.mark.parametrize("engine", ENGINES)
def test_states_written_by_a_client_are_kept(engine):
    client = Anchored(seeded(mlp), optimizer=sgd(0.1)).double()
    federation = Federation(Uniform(2), engine=EngineOptions(engine), seed=0)
    federation.setup(client, shared_out(classes(SIZES)), "fit")
    client.train()
    optimizer = client.configure_optimizers()
    rounds = torch.zeros(len(SIZES), 1, dtype=torch.float64)
    for round in range(4):
        rounds[federation.draw_cohort(round)] += 1
        federation.run_round(round, optimizer)
    assert torch.equal(federation.store.read("rounds", torch.arange(len(SIZES))), rounds)


def test_a_round_leaves_no_trace_in_the_client_except_its_global_model():
    client = ALGORITHMS["Ditto, r > s"](seeded(NETS["dropout"][0]), optimizer=sgd(0.1)).double()
    before = {name: value.clone() for name, value in client.state_dict().items()}
    for engine in ENGINES:
        run_round_without_a_copy(client, engine)
        assert all(parameter.grad is None for parameter in client.parameters())
        assert client.draws.key == 0
        with pytest.raises(ValueError, match=NOTHING_READABLE):
            client.read("broadcast")
    for name, value in client.state_dict().items():
        if name.startswith("personal"):
            assert torch.equal(value, before[name])


def run_round_without_a_copy(client, engine):
    """Run a round on the client; ``run_rounds`` would copy it."""
    federation = Federation(All(), engine=EngineOptions(engine), seed=0)
    federation.setup(client, shared_out(classes(SIZES)), "fit")
    client.train()
    federation.run_round(0, client.configure_optimizers())


@pytest.mark.parametrize("algorithm", mark_further(["norm", "value"], ["norm"]))
def test_precision_and_clipping_of_the_trainer_reach_both_engines(tmp_path, algorithm):
    rows = {}
    for engine in ("one_by_one", "stacked"):
        for clip in (None, 0.001):
            client = Ditto(seeded(mlp), optimizer=sgd(0.5), local_epochs=2)
            federation = Federation(All(), engine=EngineOptions(engine), seed=0)
            trainer = pl_fed.Trainer(
                federation,
                max_epochs=2,
                precision="bf16-mixed" if engine == "one_by_one" else "32-true",
                gradient_clip_val=clip,
                gradient_clip_algorithm=algorithm,
                default_root_dir=tmp_path,
                accelerator="cpu",
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_checkpointing=False,
            )
            trainer.fit(client, shared_out(classes(SIZES)))
            assert federation.session.states.settings.local.clipping == Clipping(clip, algorithm)
            rows[engine, clip] = client.row("global").data
    start = Ditto(seeded(mlp)).row("global").data
    assert all(row.dtype == torch.float32 for row in rows.values())
    for clip in (None, 0.001):
        assert (rows["one_by_one", clip] - rows["stacked", clip]).abs().max() < 2e-2
    assert (rows["stacked", None] - start).norm() > 5 * (rows["stacked", 0.001] - start).norm()


class Padded(nn.Module):
    """A net with an embedding whose padding row stays constant."""

    def __init__(self, api):
        super().__init__()
        self.api, self.table = api, nn.Embedding(5, 4, padding_idx=1 if api == "layer" else None)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        ids, weight = (x.abs() * 2).long().clamp(max=4), self.table.weight
        if self.api == "layer":
            vectors = self.table(ids)
        elif self.api == "function":
            vectors = nn.functional.embedding(ids, weight, padding_idx=1)
        else:
            vectors = torch.embedding(weight, ids, 1)
        return self.last(vectors.mean(1))


@pytest.mark.parametrize("api", ["layer", "function", "operation"])
@pytest.mark.parametrize("engine", EAGER)
def test_the_padding_row_of_an_embedding_stays_constant_in_every_client(engine, api):
    client = FedAvg(seeded(lambda: Padded(api)), optimizer=sgd(0.5), local_epochs=2)
    before = client.global_model.table.weight.detach().double().clone()
    outcome = run_rounds(client, shared_out(classes(SIZES)), engine=engine)
    moved = (outcome.w[:20].view(5, 4) - before).abs().amax(1) > 0
    assert moved.tolist() == [True, False, True, True, True]
    reference = run_rounds(client, shared_out(classes(SIZES)))
    assert outcome.distance(reference) < 1e-12


class LatePadding(FedAvg):
    """An algorithm whose net looks up embeddings from its second step on."""

    def training_step(self, batch, batch_idx):
        if batch_idx:
            return super().training_step(batch, batch_idx)
        losses = self.global_model.last(batch.inputs).square().mean(1)
        return (
            losses.mean() if batch.mask is None else (losses * batch.mask).sum() / batch.mask.sum()
        )


def test_padding_row_stays_constant_if_a_later_step_is_the_first_with_an_embedding():
    client = LatePadding(seeded(lambda: Padded("layer")), optimizer=sgd(0.5), local_epochs=2)
    before = client.global_model.table.weight.detach().double().clone()
    outcome = run_rounds(client, shared_out(classes(SIZES)), engine="stacked")
    moved = (outcome.w[:20].view(5, 4) - before).abs().amax(1) > 0
    assert moved.tolist() == [True, False, True, True, True]


class Scaled(nn.Module):
    """A net with a parameter and a loss of other shapes than usual."""

    def __init__(self):
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.tensor(3.0)), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.scale * x)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradient_of_a_number_is_clipped_in_a_stack(algorithm, recwarn):
    clipping = Clipping(0.05, algorithm)
    outcomes = [
        run_rounds(
            FedAvg(seeded(Scaled), optimizer=sgd(0.5)),
            shared_out(classes(SIZES)),
            engine=engine,
            clipping=clipping,
        )
        for engine in EAGER
    ]
    assert outcomes[0].distance(outcomes[1]) < 1e-12
    assert not [warning for warning in recwarn if "one by one" in str(warning.message)]


class OneNumber(FedAvg):
    """An algorithm with outputs of shape [1]."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss.reshape(1), "double": 2 * loss.detach().reshape(1, 1)}


@pytest.mark.parametrize("engine", EAGER)
def test_outputs_of_one_number_have_any_shape(engine):
    data = shared_out(classes(SIZES))
    expected = run_rounds(FedAvg(seeded(mlp), optimizer=sgd(0.1)), data, engine=engine)
    client = OneNumber(seeded(mlp), optimizer=sgd(0.1))
    outcome = run_rounds(client, data, engine=engine, chunk_size=2)
    assert outcome.distance(expected) < 1e-12
    for report in outcome.reports:
        loss, double = float(report["train/loss"]), float(report["train/double"])
        assert double == pytest.approx(2 * loss, rel=1e-12)
