"""The accountant computes the ε of dp-accounting, for all kinds of participation."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("dp_accounting", reason="the extra pl_fed[privacy] is not installed")

import dp_accounting
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

import pl_fed
from pl_fed.functional.privacy import gaussian_epsilon, sensitivity_of_bands
from pl_fed.privacy import Accountant, Participation, saved_results

noise_multipliers, rounds = st.floats(0.7, 6.0), st.integers(1, 400)
deltas = st.sampled_from([1e-6, 1e-5, 1e-3])


def direct_epsilon(accountant, event, count, delta):
    accountant.compose(event, count)
    return accountant.get_epsilon(delta)


@pytest.mark.slow
@settings(deadline=None, max_examples=2)
@given(noise=noise_multipliers, count=rounds, delta=deltas, rate=st.floats(0.001, 0.3))
def test_poisson_sampling_by_pld(noise, count, delta, rate):
    own = Accountant(Participation("poisson", 1000, 1000 * rate), delta)
    event = dp_accounting.PoissonSampledDpEvent(
        own.participation.rate, dp_accounting.GaussianDpEvent(noise)
    )
    expected = direct_epsilon(PLDAccountant(), event, count, delta)
    assert own.accounting == "pld"
    assert own.epsilon(noise, count) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
@settings(deadline=None, max_examples=5)
@given(noise=noise_multipliers, count=rounds, delta=deltas, rate=st.floats(0.001, 0.3))
def test_poisson_sampling_by_rdp(noise, count, delta, rate):
    own = Accountant(Participation("poisson", 1000, 1000 * rate), delta, "rdp")
    event = dp_accounting.PoissonSampledDpEvent(
        own.participation.rate, dp_accounting.GaussianDpEvent(noise)
    )
    expected = direct_epsilon(RdpAccountant(), event, count, delta)
    assert own.epsilon(noise, count) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
@settings(deadline=None, max_examples=2)
@given(noise=noise_multipliers, count=rounds, delta=deltas, cohort=st.integers(1, 300))
def test_cohorts_of_fixed_size_have_half_the_noise_in_units_of_their_sensitivity(
    noise, count, delta, cohort
):
    own = Accountant(Participation("without_replacement", 1000, cohort), delta)
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        1000, cohort, dp_accounting.GaussianDpEvent(noise / 2)
    )
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    expected = direct_epsilon(accountant, event, count, delta)
    assert own.accounting == "rdp"
    assert own.epsilon(noise, count) == pytest.approx(expected, rel=1e-9)


@settings(deadline=None, max_examples=10)
@given(noise=noise_multipliers, count=rounds, delta=deltas, separation=st.integers(1, 20))
def test_any_cohorts_compose_gaussian_mechanisms(noise, count, delta, separation):
    own = Accountant(Participation("any", 1000, 10, separation), delta)
    event = dp_accounting.GaussianDpEvent(noise)
    expected = dp_accounting.get_epsilon_gaussian(
        noise / math.sqrt(math.ceil(count / separation)), delta
    )
    assert own.accounting == "gaussian"
    assert own.epsilon(noise, count) == pytest.approx(expected, rel=1e-9)
    by_rdp = Accountant(own.participation, delta, "rdp").epsilon(noise, count)
    assert by_rdp == pytest.approx(
        direct_epsilon(RdpAccountant(), event, math.ceil(count / separation), delta), rel=1e-9
    )
    assert expected < by_rdp


@pytest.mark.slow
@given(log_deviation=st.floats(-2.5, 4), log_delta=st.floats(-12, -0.01))
def test_epsilon_of_a_gaussian_mechanism_is_the_library_s_bit_for_bit(log_deviation, log_delta):
    deviation, delta = 10**log_deviation, 10**log_delta
    with np.errstate(divide="ignore"):  # of the library, where both terms are equal
        expected = dp_accounting.get_epsilon_gaussian(deviation, delta)
    assert gaussian_epsilon(deviation, delta) == expected


@pytest.mark.parametrize("kind", ["any", "banded"])
def test_bound_of_epsilon_is_exact_without_sampling(kind):
    accountant = Accountant(Participation(kind, 100, 10, 3), 1e-5)
    for rounds in (0, 1, 7, 300):
        bound = accountant.epsilon_bound(1.3, rounds, 1000)
        assert bound == accountant.epsilon(1.3, rounds)


@pytest.mark.slow
def test_accountings_of_any_cohorts_agree():
    participation = Participation("any", 1000, 10)
    exact, by_pld = (Accountant(participation, 1e-5, kind) for kind in ("auto", "pld"))
    expected = direct_epsilon(PLDAccountant(), dp_accounting.GaussianDpEvent(8.0), 25, 1e-5)
    assert by_pld.epsilon(8.0, 25) == pytest.approx(expected, rel=1e-9)
    assert exact.epsilon(8.0, 25) == pytest.approx(expected, rel=1e-3)


def test_banded_noise_is_one_gaussian_mechanism():
    own = Accountant(Participation("banded", 100, 10, 10), 1e-5)
    event = dp_accounting.GaussianDpEvent(4.0 / sensitivity_of_bands(10, 35))
    assert own.epsilon(4.0, 35) == pytest.approx(
        dp_accounting.get_epsilon_gaussian(event.noise_multiplier, 1e-5), rel=1e-9
    )


def test_no_round_costs_nothing_and_epsilon_grows():
    own = Accountant(Participation("any", 1000, 10), 1e-5)
    spent = [own.epsilon(4.0, count) for count in range(5)]
    assert spent[0] == 0
    assert spent == sorted(set(spent))


@pytest.mark.slow
def test_calibration_meets_the_target_from_below():
    for participation in (
        Participation("without_replacement", 1000, 50),
        Participation("any", 1000, 50),
    ):
        own = Accountant(participation, 1e-5)
        noise = own.calibrate(2.0, 30, lambda _: None)
        assert 2.0 * (1 - 1e-4) < own.epsilon(noise, 30) <= 2.0


def test_calibration_is_saved_and_announced():
    sentences = []
    for _ in range(2):
        own = Accountant(Participation("any", 999, 50), 1e-5)
        own.calibrate(3.0, 30, sentences.append)
    assert len(sentences) == 1
    assert "ε = 3 after 30 rounds, which may take 20 s; later runs" in sentences[0]


@pytest.mark.slow
def test_broken_file_of_saved_results_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_FED_CACHE", str(tmp_path))
    expected = Accountant(Participation("any", 99, 5), 1e-5, "pld").epsilon(4.0, 3)
    (file,) = (tmp_path / "privacy").iterdir()
    for content in ("", "{}", '{"title": "another", "numbers": {}}', "[1]"):
        file.write_text(content)
        assert Accountant(Participation("any", 99, 5), 1e-5, "pld").epsilon(4.0, 3) == expected


def test_saved_noise_below_the_target_is_computed_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_FED_CACHE", str(tmp_path))
    participation, sentences = Participation("any", 99, 5), []
    expected = Accountant(participation, 1e-5).calibrate(2.0, 10, sentences.append)
    (file,) = (tmp_path / "privacy").iterdir()
    content = json.loads(file.read_text())
    for noise, searches in ((0.9 * expected, 2), (1.1 * expected, 2)):
        content["numbers"] = dict.fromkeys(content["numbers"], noise)
        file.write_text(json.dumps(content))
        own = Accountant(participation, 1e-5)
        assert own.calibrate(2.0, 10, sentences.append) >= expected
        assert len(sentences) == searches  # more noise than needed meets the target, too


def test_saved_results_belong_to_a_version_and_its_accounting(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_FED_CACHE", str(tmp_path))
    paths = set()
    for version, source in (("1", "a"), ("2", "a"), ("2", "b")):
        monkeypatch.setattr(pl_fed, "__version__", version)
        monkeypatch.setattr(saved_results, "_hash_source", lambda source=source: source)
        saved_results.SavedResults("title").get("number", lambda: 1.0)
        paths = {*(tmp_path / "privacy").iterdir()}
    assert len(paths) == 3


def test_results_without_a_writable_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_FED_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    assert Accountant(Participation("any", 99, 5), 1e-5, "pld").epsilon(4.0, 3) > 0


def test_results_of_a_user_without_a_home_stay_in_memory(monkeypatch):
    """In a container or a service, the system may not know the user."""

    def raise_unknown():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PL_FED_CACHE", raising=False)
    monkeypatch.setattr(saved_results.Path, "home", raise_unknown)
    results = saved_results.SavedResults("title")
    assert [results.get("number", lambda value=value: value) for value in (1.0, 2.0)] == [1.0, 1.0]


@pytest.mark.slow
def test_number_of_rounds_within_a_budget():
    own = Accountant(Participation("without_replacement", 1000, 50), 1e-5)
    count = own.count_rounds(2.0, 3.0, limit=1000)
    assert own.epsilon(2.0, count) <= 3.0 < own.epsilon(2.0, count + 1)
    assert own.count_rounds(2.0, 3.0, limit=count - 1) == count - 1
    assert own.count_rounds(2.0, 1e-3, limit=10) == 0


@pytest.mark.parametrize("noise", [1e-6, 0.01, 0.05])
def test_little_noise_has_the_bound_of_a_client_in_each_round(noise):
    own = Accountant(Participation("poisson", 100, 10.0), 1e-3)
    bound = gaussian_epsilon(noise / math.sqrt(100), 1e-3)
    assert own.epsilon(noise, 100) == bound > 4020.59  # ε of the distribution with a noise of 0.05
    everywhere = Accountant(Participation("any", 100, 10.0), 1e-3, "pld")
    assert everywhere.epsilon(noise, 100) == bound


@pytest.mark.slow
def test_bound_of_epsilon_is_exact_for_few_rounds_and_at_the_end(monkeypatch):
    own = Accountant(Participation("poisson", 1000, 50.0), 1e-5)
    asked = []
    monkeypatch.setattr(own, "epsilon", lambda _, count: asked.append(count) or float(count))
    bounds = [own.epsilon_bound(1.0, count, last=1005) for count in range(1, 1006)]
    assert all(count <= bound <= 1.06 * count for count, bound in enumerate(bounds, 1))
    assert bounds == sorted(bounds)
    assert bounds[:40] == list(range(1, 41))
    assert bounds[-1] == 1005
    assert len(set(asked)) < 140


def test_no_privacy_loss_distribution_without_replacement():
    with pytest.raises(ValueError, match=r'`federation.privacy.accounting` to be "rdp" or "auto"'):
        Accountant(Participation("without_replacement", 100, 5), 1e-5, "pld")


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install \"pl_fed\[privacy\]\""):
        Accountant(Participation("any", 100, 5), 1e-5)
