"""Tiny Hugging Face models with random weights, and labelled texts of random tokens."""

import torch

from pl_fed.data.source import Arrays
from pl_fed.models import HuggingFaceModel

VOCABULARY, LENGTH, LABELS = 40, 6, 3
_SIZE = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_DISTILBERT = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
_DISTILBERT |= {"dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 12}
_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_GPT2 |= {"n_embd": 8, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
FAMILIES = {
    "bert": {"model_type": "bert", "intermediate_size": 12, **_SIZE, **_BERT},
    "distilbert": {"model_type": "distilbert", **_DISTILBERT},
    "gpt2": {"model_type": "gpt2", **_GPT2},
    "llama": {
        "model_type": "llama",
        "num_key_value_heads": 1,
        "intermediate_size": 12,
        **_SIZE,
    },
}
"""The options of a tiny model of each tested family."""


def tiny(family="bert", head="sequence_classification", attention="eager", seed=0, **options):
    """Return a tiny model; with one seed, models are equal."""
    size = {"vocab_size": VOCABULARY, "pad_token_id": 1, "num_labels": LABELS}
    size |= {"n_positions" if family == "gpt2" else "max_position_embeddings": 16}
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return HuggingFaceModel(head, None, {**FAMILIES[family], **size, **options}, attention)


def texts(sizes=(5, 3, 8), kind="sequence", seed=0):
    """Return padded random tokens with random labels.

    Args:
        sizes: Number of texts of each client.
        kind: ``sequence`` for a class of each text, ``tokens`` for a class of each token, ``lm``
            for the tokens themselves, ``real`` for a number, ``multi`` for several labels.
        seed: The seed of the draws.
    """
    draw = torch.Generator().manual_seed(seed)
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    ids = torch.randint(2, VOCABULARY, (len(owner), LENGTH), generator=draw)
    lengths = torch.randint(2, LENGTH + 1, (len(owner), 1), generator=draw)
    mask = (torch.arange(LENGTH) < lengths).long()
    ids = torch.where(mask == 1, ids, 1)
    labels = {
        "sequence": torch.randint(LABELS, (len(owner),), generator=draw),
        "tokens": torch.randint(LABELS, ids.shape, generator=draw).where(mask == 1, -100),
        "lm": ids.where(mask == 1, -100),
        "real": torch.randn(len(owner), generator=draw),
        "multi": torch.randint(2, (len(owner), LABELS), generator=draw).float(),
    }[kind]
    labels[:LABELS] = torch.arange(LABELS) if kind == "sequence" else labels[:LABELS]
    classes = LABELS if kind == "sequence" else 0
    return Arrays({"input_ids": ids, "attention_mask": mask}, labels, owner, num_classes=classes)


def write_texts(folder, sizes=(12,) * 6, num_labels=LABELS):
    """Write texts and their owners as a Hugging Face data set, and return its folder."""
    import datasets

    arrays = texts(sizes)
    columns = {name: tensor.tolist() for name, tensor in arrays.inputs.items()}
    labels = [sample % num_labels for sample in range(len(arrays.targets))]
    columns |= {"labels": labels, "user": arrays.client.tolist()}
    datasets.Dataset.from_dict(columns).save_to_disk(folder)
    return folder
