"""Everything that leaves a client is accounted for or refused, and the page says so."""

import re

import pytest
from release_matrix import (
    PAGE,
    aggregator_rows,
    algorithm_rows,
    attack_rows,
    make_table,
    option_rows,
    read_table,
    sampler_rows,
)


def refused(rows):
    return {name for name, refusal in rows if refusal is not None}


def allowed(rows):
    return {name for name, refusal in rows if refusal is None}


@pytest.mark.slow
def test_only_the_uniform_mean_of_one_sum_is_allowed():
    assert {name for name, refusal, _ in aggregator_rows() if refusal is None} == {"Mean"}


def test_with_buckets_all_but_means_and_readers_of_clients_data_are_allowed():
    assert {name for name, _, refusal in aggregator_rows() if refusal is not None} == {
        *("Mean", "Mean, weighting: samples", "GeometricMedian, weighting: samples"),
        *("AAggFF", "AFL", "AdaFed", "FairFed", "FedFV"),
        *("TiltedMean", "KLoss", "QFFL", "Term", "FLTrust", "FoolsGold"),
        *("DeepSight", "FLDetector"),
    }


def test_only_samplers_without_clients_data_are_allowed():
    assert refused(sampler_rows()) == {"BySize"}


@pytest.mark.slow
def test_algorithms_with_another_release_are_refused():
    rows = list(algorithm_rows())
    assert {name for name, refusal, _ in rows if refusal} == {
        *("FedExLoRA", "FedNova", "HierFedAvg", "IFCA", "Local", "Mocha"),
        *("FedAS", "FedDBE", "FedDyn", "FedDyn, weights: samples", "PFedFDA"),
        *("Scaffold", "Scaffold, control: start"),
        "FedAvg with BatchNorm",
        *("FLAME, lagged_global: True", "FLAME, weights: samples"),
        *("FedADMM, weights: samples", "LpProj, weights: samples"),
    }
    assert {name for name, refusal, fixed in rows if not (refusal or fixed)} == {
        *("FedAvg", "FedProx", "Finetuning", "PerFedAvg", "SimpleTuning", "FedBABU", "PropFair"),
        "KNNPer",
    }


def test_attackers_know_no_unprotected_uploads():
    assert allowed(attack_rows()) == {"attack on data", "attack on uploads, knowledge: own"}


def test_nothing_shared_is_selected_by_clients_metrics():
    names = refused(option_rows())
    assert {name.split(" ")[-1] for name in names} == {
        *("channel", "feature", "2", "val/global/accuracy", "train/loss"),
        *("data.transforms", "file", "ImageFolder", "Shakespeare"),
    }


@pytest.mark.slow
def test_each_refusal_is_one_sentence_with_expectation_and_finding():
    rows = [(name, refusal) for name, refusal, _ in algorithm_rows()]
    rows += [(name, refusal) for name, _, refusal in algorithm_rows()]
    rows += [(name, refusal) for name, *refusals in aggregator_rows() for refusal in refusals]
    for make_rows in (sampler_rows, attack_rows, option_rows):
        rows += make_rows()
    for name, refusal in rows:
        if refusal:
            assert re.fullmatch(r"Expected .* but got .*[a-z)`'\]]\.", refusal), name
            assert ". " not in refusal, name


def test_page_has_the_table_of_the_code():
    expected = make_table()
    assert read_table() == expected, "run PYTHONPATH=.:tests python tests/privacy/release_matrix.py"


@pytest.mark.parametrize("word", ["Poisson", "zero-out", "replace-one", "not cryptographic"])
def test_page_names_the_terms_of_the_guarantee(word):
    assert word in PAGE.read_text(encoding="utf-8")
