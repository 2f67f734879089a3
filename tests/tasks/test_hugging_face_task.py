"""Hugging Face models: their own losses, their masks under vmap, and one sentence for mistakes."""

import copy
import dataclasses
import warnings

import pytest
import torch
from exhaustive import exhaustive_for
from small_federations import run_tried_rounds, sgd, shared_out

from pl_fed.clients import Ditto, FedAvg, FedTilt
from pl_fed.data.source import Arrays
from pl_fed.tasks import Classification, HuggingFace
from pl_fed.tasks.attention_masks import additive_mask, takes_additive_masks

transformers = pytest.importorskip("transformers", reason="needs Hugging Face models")
from hugging_face_models import FAMILIES, LABELS, LENGTH, VOCABULARY, texts, tiny  # noqa: E402

pytestmark = pytest.mark.slow

transformers.logging.set_verbosity_error()

LM = {"bert": "masked_lm", "distilbert": "masked_lm", "gpt2": "causal_lm", "llama": "causal_lm"}
PROBLEMS = {  # the head, the labels, options of the model
    "classes": ("sequence_classification", "sequence", {}),
    "tokens": ("token_classification", "tokens", {}),
    "language": (None, "lm", {}),
    "numbers": ("sequence_classification", "real", {"num_labels": 1}),
    "several labels": (
        "sequence_classification",
        "multi",
        {"problem_type": "multi_label_classification"},
    ),
}


def model_and_texts(family, problem, **options):
    """Return a tiny model of a family for a problem, and labelled texts."""
    head, kind, own = PROBLEMS[problem]
    return tiny(family, head or LM[family], **own, **options), texts(kind=kind)


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_logits_are_those_of_the_model(family):
    for problem in PROBLEMS:
        for attention in ("eager", "sdpa"):
            net, arrays = model_and_texts(family, problem, attention=attention)
            net.double().eval()
            labels = arrays.targets
            labels = labels.double() if labels.is_floating_point() else labels
            task = HuggingFace()
            task.read_net(net)
            with torch.no_grad():
                outputs = task.predict(net, arrays.inputs)
                own = copy.deepcopy(net)(**arrays.inputs, labels=labels)
            counts = arrays.inputs["attention_mask"].bool() if outputs.dim() == 3 else ...
            torch.testing.assert_close(outputs[counts], own.logits[counts], atol=1e-12, rtol=0)
            losses, weights = task.losses(outputs, labels), task.weights(labels)
            weights = torch.ones_like(losses) if weights is None else weights
            mean = losses.sum() / weights.sum()
            for loss in (task.batch_loss(outputs, labels), mean):
                assert abs(float(loss - own.loss)) < 1e-6, (problem, attention)


@exhaustive_for("distilbert", "llama", "gpt2")
@pytest.mark.parametrize("family", FAMILIES)
def test_stacked_clients_get_the_numbers_of_clients_one_by_one(family):
    for problem in ("classes", "tokens"):
        net, arrays = model_and_texts(family, problem, attention="sdpa")
        client, data = Ditto(net, lam=0.1, optimizer=sgd()), shared_out(arrays)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Clients are run one by one")
            stacked = run_tried_rounds(client, data, engine="stacked", chunk_size=2, rounds=1)
        in_turn = run_tried_rounds(client, data, rounds=1)
        assert stacked.distance(in_turn) < 1e-10, problem
        assert float((stacked.v - stacked.w).abs().max()) > 1e-4


def test_token_ids_without_a_mask_are_the_model_s_main_input():
    arrays = texts()
    ids = Arrays(arrays.inputs["input_ids"], arrays.targets, arrays.client, num_classes=LABELS)
    full = {"input_ids": ids.inputs, "attention_mask": torch.ones_like(ids.inputs)}
    runs = []
    for inputs in (ids, dataclasses.replace(ids, inputs=full)):
        for engine in ("one_by_one", "stacked"):
            client = FedAvg(tiny(), optimizer=sgd())
            runs.append(run_tried_rounds(client, shared_out(inputs), engine=engine, rounds=1))
    assert max(run.distance(runs[0]) for run in runs) < 1e-10


def test_fedtilt_takes_classes_of_texts_and_refuses_classes_of_tokens():
    run = run_tried_rounds(FedTilt(tiny(), tau=1.0, lam=0.5), shared_out(texts()), rounds=1)
    assert torch.isfinite(run.w).all()
    net, arrays = model_and_texts("bert", "tokens")
    with pytest.raises(ValueError, match=r"a class id for each sample, as FedTilt tilts"):
        run_tried_rounds(FedTilt(net), shared_out(arrays), rounds=1)


def test_models_that_do_not_stack_run_one_by_one_with_one_warning():
    dropout = tiny(attention_probs_dropout_prob=0.1)  # draws from torch's own generator
    with pytest.warns(UserWarning, match="Clients are run one by one, as they cannot be stacked"):
        run_tried_rounds(FedAvg(dropout), shared_out(texts()), engine="stacked", rounds=1)


def test_a_family_with_other_masks_gets_its_arguments_unchanged():
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    size |= {"intermediate_size": 8, "vocab_size": VOCABULARY, "pad_token_id": 1, "num_labels": 3}
    net = transformers.DebertaV2ForSequenceClassification(transformers.DebertaV2Config(**size))
    assert not takes_additive_masks(net.config, LENGTH)
    task = HuggingFace()
    task.read_net(net.eval())
    arrays = texts()
    assert torch.equal(task.predict(net, arrays.inputs), net(**arrays.inputs).logits)


def test_a_model_with_trained_tokens_before_the_text_lengthens_the_mask_by_itself():
    peft = pytest.importorskip("peft", reason="needs trained prompts")
    config = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    net = peft.get_peft_model(tiny("bert").get_base_model(), config).eval()
    task, arrays = HuggingFace(), texts()
    task.read_net(net)
    with torch.no_grad():
        outputs = task.predict(net, arrays.inputs)
        expected = net(**arrays.inputs).logits
    assert torch.equal(outputs, expected)


def test_causal_masks_hide_later_tokens_and_padding():
    mask = additive_mask(torch.tensor([[1, 1, 0]]), causal=True, dtype=torch.float64)
    assert (mask[0, 0] == 0).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 0]]
    config = transformers.MistralConfig(sliding_window=4)
    assert takes_additive_masks(config, 4)
    assert not takes_additive_masks(config, 5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_outputs_behind_padding_on_the_left_are_those_of_the_model(family, attention):
    """The last padding predicts the first token, though no key is visible to it."""
    net, task = tiny(family, "causal_lm", attention).eval(), HuggingFace()
    task.read_net(net)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    inputs = {"input_ids": torch.tensor([[1, 1, 7, 8], [5, 6, 7, 8]]), "attention_mask": mask}
    torch.testing.assert_close(task.predict(net, inputs), net(**inputs).logits)
    blocked = additive_mask(mask, causal=True, dtype=torch.float32, is_sdpa=True)
    assert blocked.isneginf()[:, 0].all(-1).tolist() == [[True, True, False, False], [False] * 4]


def refusal(net, arrays, **arguments):
    """Return the error of a federation before its first round."""
    with pytest.raises(ValueError, match="Expected") as info:
        run_tried_rounds(FedAvg(net, **arguments), shared_out(arrays), rounds=1)
    return str(info.value)


def test_every_mistake_is_refused_with_one_sentence():
    assert "3 labels, one for each class" in refusal(tiny(num_labels=2), texts())
    assert f"token ids from 0 to {VOCABULARY - 2}" in refusal(
        tiny(vocab_size=VOCABULARY - 1), texts(sizes=(50,))
    )
    assert "fit the problem single_label_classification" in refusal(tiny(), texts(kind="real"))
    assert "a loss of its own, but got MSELoss" in refusal(
        tiny(), texts(), criterion=torch.nn.MSELoss()
    )
    assert "a model of transformers for the task HuggingFace" in refusal(
        torch.nn.Linear(2, 2), texts(), task=HuggingFace()
    )
    with pytest.raises(ValueError, match=r"`problem` to be .* but got 'ranking'"):
        HuggingFace("ranking")
    bare = transformers.BertModel(tiny().config)
    assert "one of the heads ForSequenceClassification" in refusal(bare, texts())


def test_a_model_with_another_own_loss_is_refused():
    class Smoothed(transformers.BertForSequenceClassification):
        def forward(self, *args, labels=None, **kwargs):
            outputs = super().forward(*args, labels=labels, **kwargs)
            outputs.loss = None if outputs.loss is None else outputs.loss + 1
            return outputs

    net = Smoothed(tiny().config)
    assert "but its own loss is" in refusal(net, texts())
    plain = FedAvg(net, task=Classification())
    with pytest.raises(ValueError, match="Expected argument `net` to return a tensor"):
        run_tried_rounds(plain, shared_out(texts()), rounds=1)


def test_masks_that_a_model_reads_otherwise_than_pl_fed_are_refused(monkeypatch):
    def invert(mask, causal, dtype, is_sdpa):
        return additive_mask(1 - mask, causal, dtype)

    monkeypatch.setattr("pl_fed.tasks.hugging_face.additive_mask", invert)
    net, arrays = model_and_texts("bert", "language", initializer_range=1.0)
    assert "but its own loss is" in refusal(net, arrays)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_own_loss_may_differ_by_the_rounding_of_the_net_only(dtype):
    net, arrays = model_and_texts("bert", "language")
    net.to(dtype).eval()
    task = HuggingFace()
    task.read_net(net)
    with torch.no_grad():
        loss = task.batch_loss(task.predict(net, arrays.inputs), arrays.targets)
        task.check_loss(net, arrays.inputs, arrays.targets, loss)
        for factor in (0.9, 1.1):
            with pytest.raises(ValueError, match="but its own loss is"):
                task.check_loss(net, arrays.inputs, arrays.targets, factor * loss)
