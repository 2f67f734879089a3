"""Adapters of peft: one frozen body, rows of adapters, and the same numbers in every engine."""

import copy
import warnings

import pytest
import torch
from small_federations import (
    Only,
    Outcome,
    classes,
    mlp,
    run_rounds,
    seeded,
    sgd,
    shared_out,
)
from tables import table_test
from torch import nn

from pl_fed.aggregators import Mean, Median
from pl_fed.attacks import RandomLabels, SignFlipping
from pl_fed.clients import Ditto, FedAvg, FedExLoRA, FedRep
from pl_fed.models import LoRA

pytest.importorskip("peft", reason="needs adapters")
transformers = pytest.importorskip("transformers", reason="needs Hugging Face models")
from further_cases import mark_others  # noqa: E402
from hugging_face_models import FAMILIES, texts, tiny  # noqa: E402

pytestmark = pytest.mark.slow

transformers.logging.set_verbosity_error()


def adapters(family="bert", **arguments):
    """Return a tiny model with adapters of rank 2; with one seed, they are equal."""
    return seeded(lambda: LoRA(tiny(family), r=2, **arguments))


def stacked_and_in_turn(client, data, **settings) -> tuple[Outcome, Outcome]:
    """Return the outcomes of clients that run at once, and one by one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Clients are run one by one")
        stacked = run_rounds(client, data, engine="stacked", chunk_size=2, rounds=1, **settings)
    return stacked, run_rounds(client, data, rounds=1, **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_models_share_the_body_and_engines_agree(family):
    client = Ditto(adapters(family, dropout=0.1), lam=0.1, optimizer=sgd(0.5))
    trained = {name for name, p in client.global_model.named_parameters() if p.requires_grad}
    pairs = zip(
        client.global_model.named_parameters(), client.personal_model.parameters(), strict=True
    )
    assert {name for (name, own), other in pairs if own is not other} == trained
    assert all("lora_" in name or "modules_to_save" in name for name in trained)
    stacked, in_turn = stacked_and_in_turn(client, shared_out(texts()))
    assert stacked.distance(in_turn) < 1e-10
    assert float((stacked.v - stacked.w).abs().max()) > 1e-4


def test_a_row_holds_the_adapters_and_the_head():
    layout = FedAvg(adapters()).row("global").layout
    assert layout.numel == 2 * 2 * 2 * (8 + 8) + 8 * 3 + 3  # two layers of two adapters, the head


def test_a_is_frozen_and_equal_in_all_clients_with_freeze_a():
    client = FedAvg(adapters(freeze_a=True), optimizer=sgd())
    assert not [name for name in client.row("global").layout.names if "lora_A" in name]
    stacked, in_turn = stacked_and_in_turn(client, shared_out(texts()))
    assert stacked.distance(in_turn) < 1e-10


def test_only_the_last_blocks_have_adapters_with_layers():
    names = [name for name, p in adapters(layers=[1]).named_parameters() if p.requires_grad]
    assert {name.split("layer.")[1][0] for name in names if "lora" in name} == {"1"}


def test_a_body_in_bfloat16_trains_adapters_in_float32():
    net = adapters(body_dtype="bfloat16")
    dtypes = {p.requires_grad: p.dtype for p in net.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    client, data = Ditto(net, optimizer=sgd(0.5)), shared_out(texts())
    stacked, in_turn = stacked_and_in_turn(client, data, dtype=None)
    assert stacked.distance(in_turn) < 1e-3
    full = run_rounds(Ditto(adapters(), optimizer=sgd(0.5)), data, rounds=1, dtype=None)
    assert 0 < in_turn.distance(full) < 0.02


def test_labels_keep_their_precision_beside_a_body_in_bfloat16():
    net = LoRA(tiny(num_labels=1), r=2, body_dtype="bfloat16").eval()
    labels = torch.full((16,), 1001.0)  # 1000 in bfloat16
    with torch.no_grad():
        outputs = net(**texts().inputs, labels=labels)
    expected = (outputs.logits.squeeze(1) - labels).square().mean()
    torch.testing.assert_close(outputs.loss, expected)


def test_a_net_of_one_s_own_takes_adapters_robust_aggregators_and_attacks():
    net = seeded(lambda: LoRA(mlp(), r=2, target_modules=["0"], modules_to_save=["2"]))
    settings = {"aggregator": Median(), "attack": SignFlipping(), "fraction": 0.25}
    client, data = FedRep(net, optimizer=sgd()), shared_out(classes((5, 3, 8, 4)))
    stacked, in_turn = stacked_and_in_turn(client, data, **settings)
    assert stacked.distance(in_turn) < 1e-10


@pytest.mark.parametrize(  # GPT-2 stores transposed weights
    "family", mark_others(["bert", "gpt2"], "gpt2")
)
def test_fedex_adds_the_residual_of_the_products_to_the_body(family):
    data, settings = shared_out(texts(), batch_size=8), {"optimizer": sgd(0.5), "local_steps": 2}
    client = FedExLoRA(adapters(family, alpha=3.0).double(), **settings)
    client.row("global").data.normal_(generator=torch.Generator().manual_seed(0))
    net, start = client.global_model, client._products(client.initial_row())
    first_body = client.first_body.clone()
    for rounds in (1, 2):
        # by hand: each client alone, from the body of the round before
        plain = FedAvg(copy.deepcopy(net), **settings)
        alone = [run_rounds(plain, data, 1, sampler=Only(owner)).w for owner in range(3)]
        products = start + torch.stack([client._products(row) for row in alone]).mean(0)
        products = products - client._products(client.row("global").data)
        run = run_rounds(FedExLoRA(copy.deepcopy(net), **settings), data, 1)
        mean = torch.stack(alone).mean(0)
        torch.testing.assert_close(run.w, mean, atol=1e-12, rtol=0)
        own_start = client._products(client.row("global").data)
        moved = run.server_states["products"] - own_start
        torch.testing.assert_close(moved, products - start, atol=1e-12, rtol=0)
        client.row("global").data.copy_(run.w)
        client.update_body({"products": products})
        weights = torch.cat([a.weight.flatten() for a in net.adapters().values()])
        expected = first_body + products
        torch.testing.assert_close(weights + client._products(run.w), expected)
        assert float((weights - first_body).abs().max()) > 1e-6, rounds
        start = products


def test_fedex_engines_agree_over_rounds_and_freeze_a_needs_no_residual():
    data = shared_out(texts())
    client = FedExLoRA(adapters(), optimizer=sgd(0.5))
    runs = [run_rounds(client, data, 2, engine=engine) for engine in ("one_by_one", "stacked")]
    assert runs[0].distance(runs[1]) < 1e-10
    frozen = FedExLoRA(adapters(freeze_a=True), optimizer=sgd(0.5))
    plain = FedAvg(adapters(freeze_a=True), optimizer=sgd(0.5))
    exact, mean = (run_rounds(each, data, 2) for each in (frozen, plain))
    torch.testing.assert_close(exact.w, mean.w, atol=1e-10, rtol=0)


def test_fedex_continues_from_a_body_that_an_earlier_federation_has_changed():
    client = FedExLoRA(adapters().double())
    draw = torch.Generator().manual_seed(0)
    client.row("global").data.normal_(generator=draw)
    client.update_body({"products": torch.randn(client.first_body.shape, generator=draw).double()})
    body = client._body()
    assert float((body - client.first_body).abs().max()) > 1
    client.update_body(client.server_state_defaults())
    torch.testing.assert_close(client._body(), body, atol=1e-12, rtol=0)


class Attentive(nn.Module):
    """A net with an embedding and with attention as one layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.head = nn.Linear(4, 3)


@table_test("layer", ["embedding", "attention"])
def test_fedex_refuses_layers_whose_products_it_does_not_average(layer):
    net = LoRA(Attentive(), r=2, target_modules=[layer, "head"])
    assert all(adapter.is_plain for adapter in net.adapters().values())
    with pytest.raises(ValueError, match=rf"got another kind at \S*{layer}\.lora_\S*: change"):
        FedExLoRA(net)


def test_fedex_refuses_attacks_that_its_body_would_undo():
    settings = {"fraction": 0.34, "rounds": 1}
    with pytest.raises(ValueError, match=r"adversary.attack` to leave uploads .* got SignFlipping"):
        run_rounds(FedExLoRA(adapters()), shared_out(texts()), attack=SignFlipping(), **settings)
    client = FedExLoRA(adapters(), optimizer=sgd())
    assert run_rounds(client, shared_out(texts()), attack=RandomLabels(), **settings).reports


def test_mistakes_are_refused_with_one_sentence():
    with pytest.raises(ValueError, match=r"LoRA that fit Sequential but peft refuses them"):
        LoRA(mlp(), target_modules=["missing"])
    with pytest.raises(ValueError, match=r"`body_dtype` to be 'float32', .* but got 'int8'"):
        LoRA(mlp(), target_modules=["0"], body_dtype="int8")
    with pytest.raises(TypeError, match=r"a pl_fed.models.LoRA for FedExLoRA but got Linear"):
        FedExLoRA(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"a body of torch.float32 for FedExLoRA"):
        FedExLoRA(adapters(body_dtype="bfloat16"))
    for settings, words in (
        ({"aggregator": Median()}, r"`federation.aggregator` to be Mean\(.* but got Median: "),
        ({"aggregator": Mean("samples")}, r"but got Mean\(weighting='samples'\): change it"),
        ({"server_optimizer": sgd(0.5)}, r"`federation.server_optimizer` to be plain SGD"),
    ):
        with pytest.raises(ValueError, match=words):
            run_rounds(FedExLoRA(adapters()), shared_out(texts()), rounds=1, **settings)
