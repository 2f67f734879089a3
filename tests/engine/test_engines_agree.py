"""All engines give the same numbers, whatever the net, the optimizer and the chunks."""

import warnings
from dataclasses import replace

import pytest
import torch
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

SIZES = [7, 3, 10, 1]  # batches of 4: a partial last one, fewer than one, three, a single sample
IMAGES = (2, 4, 4)


class Tied(nn.Module):
    """Two layers with one weight between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.second(self.first(x).tanh()).tanh())


class Repeated(nn.Module):
    """One layer and one dropout, each used twice and known by two names."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop, self.last = nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 3)
        self.again, self.drop_again = self.layer, self.drop

    def forward(self, x):
        x = self.drop(self.layer(x).tanh())
        return self.last(self.drop_again(self.again(x).tanh()))


class Scaled(nn.Module):
    """A net with a constant that is saved with it, as positional encodings are."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 4))

    def forward(self, x):
        return self.net(x * self.scale)


def frozen_body():
    body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False), nn.Tanh())
    return nn.Sequential(body.requires_grad_(False), nn.Linear(6, 3))


NETS = {  # name -> how to make it, shape of a sample
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
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.05),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
}

ENGINES = (*EAGER, *COMPILED)

each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


@pytest.fixture(autouse=True)
def no_silent_fallback(uncompiled):
    """Let a test fail in which stacked clients end up one by one, or traced steps eager."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Clients are run one by one")
        warnings.filterwarnings("error", "Local steps run eagerly")
        yield


def agree(client, data, chunks=(None, 1, 2, 3), largest=1e-10, traced=True, **kwargs):
    """Run the engines with several sizes of chunk, and return what the first led to."""
    first = run_rounds(client, data, engine="one_by_one", **kwargs)
    assert first.w.isfinite().all()
    for chunk_size in chunks:
        same = run_rounds(client, data, engine="one_by_one", chunk_size=chunk_size, **kwargs)
        assert first.distance(same) == 0
        stacked = run_rounds(client, data, engine="stacked", chunk_size=chunk_size, **kwargs)
        assert first.distance(stacked) <= largest
    for engine in COMPILED if traced else ():
        same = run_rounds(client, data, engine=engine, chunk_size=chunks[-1], **kwargs)
        assert first.distance(same) <= largest
    return first


@each_algorithm
@pytest.mark.parametrize("net", NETS)
def test_for_every_net(net, algorithm):
    make, shape = NETS[net]
    client = ALGORITHMS[algorithm](seeded(make), optimizer=sgd(0.1))
    outcome = agree(client, shared_out(classes(SIZES, shape)))
    before = client.row(client.trained[-1]).data
    assert not torch.equal(
        before.double(), outcome.w if "global" in client.trained else outcome.v[0]
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_for_every_elementwise_optimizer(optimizer):
    for algorithm in ("FedAvg", "Ditto, r > s", "Ditto, r < s"):
        client = ALGORITHMS[algorithm](seeded(mlp), optimizer=OPTIMIZERS[optimizer])
        traced = algorithm == "Ditto, r > s"
        agree(client, shared_out(classes(SIZES)), chunks=(None, 3), traced=traced)


@each_algorithm
@pytest.mark.parametrize("clipping", [Clipping(0.05), Clipping(0.02, "value")], ids=str)
def test_with_clipping(clipping, algorithm):
    client = ALGORITHMS[algorithm](seeded(mlp), optimizer=sgd(0.5, momentum=0.5))
    data = shared_out(classes(SIZES))
    clipped = agree(client, data, chunks=(None, 3), clipping=clipping)
    assert clipped.distance(run_rounds(client, data)) > 1e-3


def test_clipping_holds_for_each_model_of_each_client():
    """One step of SGD with learning rate 1 moves a model by the norm that is left."""
    client = Ditto(seeded(mlp), lam=0.0, optimizer=sgd(1.0), local_steps=1)
    for engine in ENGINES:
        settings = {"engine": engine, "clipping": Clipping(0.01), "rounds": 1}
        outcome = run_rounds(client, shared_out(classes([4, 4])), **settings)
        moved = outcome.v - client.row("personal").data.double()
        torch.testing.assert_close(
            moved.norm(dim=1), torch.full((2,), 0.01).double(), rtol=1e-3, atol=0
        )


def test_with_augmentation():
    augment = [v2.RandomHorizontalFlip(0.5), v2.RandomCrop(4, padding=1)]
    make, shape = NETS["convolution, group norm"]
    arrays = classes(SIZES, shape)
    client = ALGORITHMS["Ditto, r > s"](seeded(make), optimizer=sgd(0.1))
    changed = agree(client, shared_out(arrays, augment=augment))
    assert changed.distance(run_rounds(client, shared_out(arrays))) > 1e-6


@pytest.mark.parametrize(
    "attack", [RandomLabels(), FlippedLabels()], ids=lambda a: type(a).__name__
)
@pytest.mark.parametrize("augment", [None, [v2.RandomHorizontalFlip(0.5)]], ids=["", "augmented"])
def test_with_poisoned_labels_on_some_clients(attack, augment):
    make, shape = NETS["convolution, group norm"]
    data = shared_out(classes([9, 4, 6], shape, num_classes=2), augment=augment)
    net = nn.Sequential(seeded(make), nn.Linear(3, 2))
    client = ALGORITHMS["Ditto, r < s"](net, optimizer=sgd(0.2))
    poisoned = agree(client, data, attack=attack, ids=[0, 2])
    clean = run_rounds(client, data, rounds=1)
    first = run_rounds(client, data, rounds=1, attack=attack, ids=[0, 2])
    moved = (first.v - clean.v).abs().amax(dim=1)
    assert (moved > 1e-6).tolist() == [True, False, True]
    assert poisoned.w.isfinite().all()


EVERY_ACCESS = [RandomLabels("access"), GaussianNoise(0.5), Outliers(0.5, 0.5), Backdoor(1, 0.5, 1)]


@pytest.mark.parametrize("gather_bytes", [1 << 20, 0], ids=["at once", "in steps"])
@pytest.mark.parametrize("attack", EVERY_ACCESS, ids=lambda a: type(a).__name__)
def test_with_poisoned_samples_over_several_passes(monkeypatch, attack, gather_bytes):
    data = shared_out(classes(SIZES))
    client = Ditto(seeded(mlp), optimizer=sgd(0.2), local_epochs=3)
    at_once = run_rounds(client, data, attack=attack, ids=[0, 2])
    monkeypatch.setattr("pl_fed.data.batches._GATHER_BYTES", gather_bytes)
    poisoned = agree(client, data, attack=attack, ids=[0, 2])
    assert poisoned.distance(at_once) == 0
    assert poisoned.distance(run_rounds(client, data)) > 1e-3


def test_labels_drawn_at_every_access_are_those_of_the_round_in_its_first_pass_only():
    data, kind = shared_out(classes(SIZES)), RandomLabels
    for epochs in (1, 2):
        client = FedAvg(seeded(mlp), optimizer=sgd(0.2), local_epochs=epochs)
        pair = [run_rounds(client, data, corruption=kind(each)) for each in (True, "access")]
        assert (pair[0].distance(pair[1]) == 0) is (epochs == 1)


ANY = given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    batch_size=st.integers(1, 10),
    steps=st.tuples(*[st.one_of(st.none(), st.integers(1, 5))] * 2),
    epochs=st.tuples(*[st.integers(1, 2)] * 2),
    drop_last=st.booleans(),
    chunk_size=st.integers(1, 4),
)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@ANY
def test_for_any_sizes_and_any_work(sizes, batch_size, steps, epochs, drop_last, chunk_size):
    any_agree(sizes, batch_size, steps, epochs, drop_last, chunk_size, traced=False)


@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@ANY
def test_for_any_sizes_and_any_work_traced(sizes, batch_size, steps, epochs, drop_last, chunk_size):
    any_agree(sizes, batch_size, steps, epochs, drop_last, chunk_size, traced=True)


def any_agree(sizes, batch_size, steps, epochs, drop_last, chunk_size, traced):
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
    agree(client, data, chunks=(chunk_size,), rounds=1, traced=traced)


@each_algorithm
def test_in_single_precision(algorithm):
    make, shape = NETS["convolution, group norm"]
    client = ALGORITHMS[algorithm](seeded(make), optimizer=sgd(0.1, momentum=0.9))
    data = shared_out(classes(SIZES, shape))
    agree(client, data, chunks=(None, 3), largest=1e-5, dtype=torch.float32)


@each_algorithm
def test_in_mixed_precision(algorithm):
    """bfloat16 keeps three digits; that the rows stay float32 is what makes it mixed."""

    def autocast():
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)

    client = ALGORITHMS[algorithm](seeded(lambda: mlp(32)), optimizer=sgd(0.1))
    data = shared_out(classes([16, 5, 9]))
    kwargs = {"dtype": torch.float32, "autocast": autocast}
    mixed = run_rounds(client, data, **kwargs)
    full = run_rounds(client, data, dtype=torch.float32)
    assert 0 < mixed.distance(full) < 2e-2
    for engine in ENGINES:
        other = run_rounds(client, data, engine=engine, chunk_size=2, **kwargs)
        assert mixed.distance(other) < 2e-2
        assert other.distance(full) > mixed.distance(full) / 4  # all are cast
    assert mixed.w.dtype == torch.float32


@pytest.mark.parametrize("make", [FedAvg, Ditto, Local])
@pytest.mark.parametrize("options", [{"weight": [1.0, 0.2, 3.0]}, {"ignore_index": 1}], ids=str)
def test_with_weighted_and_ignored_classes(options, make):
    """torch divides by the weights of a minibatch; so must a minibatch with padding."""
    options = {k: torch.tensor(v) if k == "weight" else v for k, v in options.items()}
    criterion = nn.CrossEntropyLoss(**options)
    arrays = classes([7, 3, 10], num_classes=3, seed=5)
    client = make(seeded(mlp), optimizer=sgd(0.1), criterion=criterion, local_steps=2)
    agree(client, shared_out(arrays, batch_size=5), chunks=(None, 2))


def test_with_minibatches_in_which_nothing_counts():
    """torch gives 0 / 0 there; a client whose samples are all ignored stands still instead."""
    arrays = classes([7, 3, 10], num_classes=3, seed=5)
    criterion = nn.CrossEntropyLoss(ignore_index=1)
    client = FedAvg(seeded(mlp), optimizer=sgd(0.1), criterion=criterion, local_epochs=1)
    outcome = agree(client, shared_out(arrays, batch_size=1), chunks=(None, 2))
    assert all(report["train/rejected"] == 0 for report in outcome.reports)


class Reporting(FedAvg):
    """A client that reports the norm of its model beside its loss."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        norm = torch.stack([p.square().sum() for p in self.global_model.parameters()]).sum().sqrt()
        return {"loss": loss, "norm": norm, "step": loss.detach() * 0 + batch_idx}


def test_what_a_client_reports_is_averaged_over_steps_and_cohort():
    data = shared_out(classes([8, 4]))  # two steps and one: the means of the step are 1/2 and 0
    client = Reporting(seeded(mlp), optimizer=sgd(0.1))
    outcomes = [run_rounds(client, data, engine=name) for name in ENGINES]
    for outcome in outcomes:
        assert float(outcome.reports[0]["train/step"]) == 0.25
    norms = [float(outcome.reports[1]["train/norm"]) for outcome in outcomes]
    assert norms == pytest.approx(norms[:1] * len(ENGINES), abs=1e-12)
    assert norms[0] > 0.5


class Anchored(Ditto):
    """A client that is pulled to where it was before, and counts its rounds."""

    def __init__(self, net, **kwargs):
        super().__init__(net, **kwargs)
        self.add_state("anchor", self.initial_row)
        self.add_state("rounds", 0)

    def training_step(self, batch, batch_idx):
        pull = self.squared_distance("personal", "anchor") - self.squared_distance("global")
        return super().training_step(batch, batch_idx) + 0.3 * pull

    def end_round(self, client):
        own = client.models["personal"].parameters
        client.states["anchor"] = (client.states["anchor"] + own) / 2
        client.states["rounds"] += 1
        return super().end_round(client)


def test_for_a_client_with_states_of_its_own():
    client = Anchored(seeded(mlp), lam=0.2, optimizer=sgd(0.1), local_epochs=2, personal_steps=3)
    data = shared_out(classes(SIZES))
    anchored = agree(client, data, rounds=3)
    plain = Ditto(seeded(mlp), lam=0.2, optimizer=sgd(0.1), local_epochs=2, personal_steps=3)
    assert anchored.distance(run_rounds(plain, data, rounds=3)) > 1e-4


class Resting(Ditto):
    """Takes no step on v_k."""

    def __init__(self, net, **kwargs):
        super().__init__(net, **kwargs)
        personal = replace(self.models["personal"], work=LocalWork(steps=0))
        self.set_models({**self.models, "personal": personal})


def test_for_a_model_that_takes_no_steps():
    client = Resting(seeded(mlp), optimizer=sgd(0.1))
    outcome = agree(client, shared_out(classes(SIZES)))
    assert (outcome.v == client.row("global").data).all()
    assert not torch.equal(outcome.w, client.row("global").data.double())


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_client_writes_into_its_states_is_kept(engine):
    client = Anchored(seeded(mlp), optimizer=sgd(0.1)).double()
    federation = Federation(Uniform(2), engine=EngineOptions(engine), seed=0)
    federation.setup(client, shared_out(classes(SIZES)), "fit")
    client.train()
    optimizer = client.configure_optimizers()
    drawn = torch.zeros(len(SIZES), 1, dtype=torch.float64)
    for round in range(4):
        drawn[federation.draw_cohort(round)] += 1
        federation.run_round(round, optimizer)
    assert torch.equal(federation.store.read("rounds", torch.arange(len(SIZES))), drawn)


def test_the_client_is_left_as_it_was():
    client = ALGORITHMS["Ditto, r > s"](seeded(NETS["dropout"][0]), optimizer=sgd(0.1)).double()
    before = {name: value.clone() for name, value in client.state_dict().items()}
    for engine in ENGINES:
        run_on_the_client_itself(client, engine)
        assert all(parameter.grad is None for parameter in client.parameters())
        assert client.draws.key == 0
        with pytest.raises(ValueError, match=NOTHING_READABLE):
            client.read("broadcast")
    for name, value in client.state_dict().items():
        if name.startswith("personal"):
            assert torch.equal(value, before[name])


def run_on_the_client_itself(client, engine):
    federation = Federation(All(), engine=EngineOptions(engine), seed=0)
    federation.setup(client, shared_out(classes(SIZES)), "fit")
    client.train()
    federation.run_round(0, client.configure_optimizers())


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_trainers_precision_and_clipping_reach_both_engines(tmp_path, algorithm):
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
            assert federation.states.settings.local.clipping == Clipping(clip, algorithm)
            rows[engine, clip] = client.row("global").data
    start = Ditto(seeded(mlp)).row("global").data
    assert all(row.dtype == torch.float32 for row in rows.values())
    for clip in (None, 0.001):
        assert (rows["one_by_one", clip] - rows["stacked", clip]).abs().max() < 2e-2
    assert (rows["stacked", None] - start).norm() > 5 * (rows["stacked", 0.001] - start).norm()


class Padded(nn.Module):
    """Vectors of ids, of which one stays as it is."""

    def __init__(self, how):
        super().__init__()
        self.how, self.table = how, nn.Embedding(5, 4, padding_idx=1 if how == "layer" else None)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        ids, weight = (x.abs() * 2).long().clamp(max=4), self.table.weight
        if self.how == "layer":
            vectors = self.table(ids)
        elif self.how == "function":
            vectors = nn.functional.embedding(ids, weight, padding_idx=1)
        else:
            vectors = torch.embedding(weight, ids, 1)
        return self.last(vectors.mean(1))


@pytest.mark.parametrize("how", ["layer", "function", "operation"])
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_the_row_of_the_padding_stays_in_every_client(engine, how):
    client = FedAvg(seeded(lambda: Padded(how)), optimizer=sgd(0.5), local_epochs=2)
    before = client.global_model.table.weight.detach().double().clone()
    found = run_rounds(client, shared_out(classes(SIZES)), engine=engine)
    moved = (found.w[:20].view(5, 4) - before).abs().amax(1) > 0
    assert moved.tolist() == [True, False, True, True, True]
    reference = run_rounds(client, shared_out(classes(SIZES)))
    assert found.distance(reference) < 1e-12
