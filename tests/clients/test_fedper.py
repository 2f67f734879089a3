"""FedPer against a loop over modules, and the parts that leave a client."""

import by_hand
import pytest
import torch
from exhaustive import exhaustive_but
from small_federations import Only, classes, mlp, run_rounds, seeded, sgd, shared_out
from tables import table_test
from torch import nn

from pl_fed import EngineOptions, Federation, Trainer
from pl_fed.clients import FedAvg, FedBN, FedPer, FedRep, Local
from pl_fed.clients.fedper import belongs
from pl_fed.models import LogisticRegression

SIZES = [7, 3, 10, 2]  # minibatches of 4: one to three in a pass
EVERYONE = torch.arange(len(SIZES))
ENGINES = ["one_by_one", "stacked", "stacked_compiled"]


def make_data(sizes=SIZES):
    return shared_out(classes(sizes, seed=2), batch_size=4)


def norm_net():
    norms = nn.BatchNorm1d(5), nn.BatchNorm1d(4, affine=False)
    linear = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 3)
    return nn.Sequential(linear[0], norms[0], nn.Tanh(), linear[1], norms[1], linear[2])


def simulate(net, own, rounds, cohort=EVERYONE, momentum=0.0):
    """Return each client's net and the server's net after rounds of two passes."""
    data, server = make_data(), seeded(net).double()

    def is_own(name):
        return belongs(name, own)

    states = [server.state_dict() for _ in SIZES]
    for _ in range(rounds):
        nets = []
        for k in cohort.tolist():
            start = by_hand.mixed(server, states[k], is_own)
            batches, steps = by_hand.minibatches(data, k, 4), 2 * by_hand.per_pass(data, k, 4)
            optimizer = sgd(0.1, momentum=momentum)
            end = by_hand.trained(start, batches, steps, lambda name: True, optimizer)
            states[k] = end.state_dict()
            nets.append(end)
        server = by_hand.mean_of(nets, server, is_own)
    return [by_hand.mixed(server, state, is_own) for state in states], server


@exhaustive_but(
    "own0-0.0-one_by_one", "own1-0.0-one_by_one", "own2-0.9-stacked", "own2-0.9-stacked_compiled"
)
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("own", "momentum"), [(["2"], 0.0), (["0.weight", "2.bias"], 0.0), (["2"], 0.9)]
)
def test_rounds_equal_a_loop_over_modules(uncompiled, engine, own, momentum):
    """The third client takes no part: its body is the server's nevertheless."""
    cohort = torch.tensor([0, 1, 3])
    nets, server = simulate(mlp, own, 3, cohort, momentum)
    client = FedPer(seeded(mlp), own, optimizer=sgd(0.1, momentum=momentum), local_epochs=2)
    settings = {"sampler": Only(0, 1, 3), "shuffle": False, "engine": engine, "chunk_size": 2}
    result = run_rounds(client, make_data(), rounds=3, **settings)
    torch.testing.assert_close(result.w, by_hand.row(server))
    torch.testing.assert_close(result.v, torch.stack([by_hand.row(net) for net in nets]))
    personal_rows = torch.stack([by_hand.row(net, lambda name: belongs(name, own)) for net in nets])
    torch.testing.assert_close(result.states["own"], personal_rows)
    assert torch.equal(result.v[2, :20], result.v[0, :20]) == (own == ["2"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "own"), [(FedPer, ("5",)), (FedPer, ("3", "4")), (FedBN, ("1", "4"))]
)
def test_running_statistics_go_with_the_layers(kind, own):
    """The server averages statistics of shared layers; personal layers keep theirs."""
    sizes = SIZES
    nets, server = simulate(norm_net, own, 2)
    settings = {} if kind is FedBN else {"own": own}
    client = kind(seeded(norm_net), optimizer=sgd(0.1), local_epochs=2, **settings)
    assert client.own == own
    result = run_rounds(client, make_data(), rounds=2, shuffle=False)
    torch.testing.assert_close(result.w, by_hand.row(server))
    torch.testing.assert_close(result.w_statistics, by_hand.statistics(server))
    torch.testing.assert_close(result.v, torch.stack([by_hand.row(net) for net in nets]))
    expected = torch.stack([by_hand.statistics(net) for net in nets])
    torch.testing.assert_close(result.v_statistics, expected)
    start = by_hand.statistics(seeded(norm_net).double())
    shared = [n for n, _ in server.named_buffers() if "running" in n and not belongs(n, own)]
    assert torch.equal(result.w_statistics, start) == (not shared)
    different = len(result.v_statistics.unique(dim=0))
    assert different == (1 if own == ("5",) else len(sizes))


@pytest.mark.slow
@pytest.mark.parametrize(("own", "is_own"), [(None, lambda n: n.startswith("2.")), (["0"], None)])
def test_own_parts_never_leave_the_client(own, is_own):
    """Uploads are zero there, to the bit, and the server's are as they were at first."""
    is_own = is_own or (lambda n: n.startswith("0."))
    uploads = []
    client = FedPer(seeded(mlp), own, optimizer=sgd(0.1), local_epochs=2)
    end_round = client.end_round

    def record(rows):
        upload = end_round(rows)
        uploads.append(upload.clone())
        return upload

    client.end_round = record
    federation = Federation(Only(0, 2), seed=0, engine=EngineOptions("stacked"))
    federation.setup(client, make_data(), "fit")
    uploads.clear()  # that of the trial before training
    first = client.row("global").data.clone()
    for round in range(2):
        federation.run_round(round, client.train().configure_optimizers())
    mask = torch.cat(
        [torch.full((p.numel(),), is_own(n)) for n, p in client.global_model.named_parameters()]
    )
    for upload in uploads:
        assert not upload[:, mask].any()
        assert upload[:, ~mask].any()
    assert torch.equal(client.row("global").data[mask], first[mask])
    assert not torch.equal(client.row("global").data[~mask], first[~mask])


@pytest.mark.slow
def test_no_personal_part_equals_fedavg():
    settings = {"optimizer": sgd(0.1, momentum=0.5), "local_epochs": 2}
    result = run_rounds(FedPer(seeded(mlp), [], **settings), make_data())
    assert torch.equal(result.w, run_rounds(FedAvg(seeded(mlp), **settings), make_data()).w)
    assert torch.equal(result.v, result.w.expand(4, -1))


@pytest.mark.slow
def test_all_parts_personal_equals_local_training():
    settings = {"optimizer": sgd(0.1, momentum=0.5), "local_epochs": 2}
    result = run_rounds(FedPer(seeded(mlp), ["0", "2"], **settings), make_data())
    assert torch.equal(result.v, run_rounds(Local(seeded(mlp), **settings), make_data()).v)
    assert torch.equal(result.w, FedPer(seeded(mlp)).double().row("global").data)


def test_default_head_is_the_last_trained_layer():
    net = seeded(lambda: nn.Sequential(mlp(), nn.Linear(3, 3)))
    net[1].requires_grad_(False)
    assert FedPer(net).own == ("0.2",)


def test_only_the_personal_model_is_evaluated():
    assert FedPer(seeded(mlp)).evaluated == ("personal",)


@table_test("own", [["3"], ["0", "2.weights"], ["1"]])
def test_unknown_names_are_refused(own):
    match = rf"`own` to list names among 0.weight, 0.bias, 2.weight, .* but got '{own[-1]}'"
    with pytest.raises(ValueError, match=match):
        FedPer(seeded(mlp), own)


def test_net_of_one_layer_needs_the_names_of_its_personal_parts():
    with pytest.raises(ValueError, match=r"`own` to be a list .* .LogisticRegression. but"):
        FedPer(LogisticRegression(4, 3))
    assert FedPer(LogisticRegression(4, 3), own=["layers.1.bias"]).own == ("layers.1.bias",)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head.weight = self.body.weight

    def forward(self, x):
        return self.head(self.middle(self.body(x)))


@table_test("own", [None, ["head"], ["body.weight", "middle"]])
def test_shared_parameters_in_a_personal_part_are_refused(own):
    with pytest.raises(ValueError, match="all or none of the names of a parameter but got") as no:
        FedPer(Tied(), own)
    assert str(no.value).endswith(": body.weight and head.weight are the same parameter.")
    FedPer(Tied(), ["head", "body"])
    FedPer(Tied(), ["middle", "head.bias"])


@pytest.mark.filterwarnings("ignore:.*(many workers|number of training batches)")
@table_test("kind", [FedPer, FedRep, FedBN])
@pytest.mark.slow
def test_a_fit_in_64_bits_has_rows_of_one_type(kind, tmp_path):
    """A net without running statistics has empty rows of them, in the type of its parameters."""
    net = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    trainer = Trainer(
        Federation(seed=0),
        run_dir=tmp_path / kind.__name__,
        accelerator="cpu",
        precision="64-true",
        max_epochs=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(kind(net, optimizer=sgd()), make_data())
    client = trainer.federation.client
    assert client.row("global").data.dtype == torch.float64
    assert client.statistics("global").data.dtype == torch.float64
