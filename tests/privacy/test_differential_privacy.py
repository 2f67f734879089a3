"""The section ``federation.privacy``: wrong arguments are refused in one sentence."""

from math import inf, nan

import pytest
from tables import table_test

from pl_fed import DifferentialPrivacy

VALID = {"clip_norm": 1.0, "delta": 1e-5, "noise_multiplier": 1.0}
MISTAKES = [
    ({"noise_multiplier": 0}, "`federation.privacy.noise_multiplier` to be above 0, .* but got 0"),
    ({"noise_multiplier": -1.0}, "without noise there is no privacy; to clip only, remove"),
    (
        {"noise_multiplier": None},
        "one of `federation.privacy.epsilon` and .* but got None and None",
    ),
    ({"epsilon": 2.0}, "one of .* but got 2.0 and 1.0: set the first for a target"),
    ({"epsilon": 0.0, "noise_multiplier": None}, "epsilon` to be above 0, .* got 0.0: set, for"),
    ({"epsilon": -1, "noise_multiplier": None}, "epsilon` to be above 0, and finite, but got -1"),
    ({"epsilon": inf, "noise_multiplier": None}, "epsilon` to be above 0, and finite, but got inf"),
    ({"epsilon": nan, "noise_multiplier": None}, "epsilon` to be above 0, and finite, but got nan"),
    ({"stop_at_epsilon": 0}, "stop_at_epsilon` to be above 0, and finite, but got 0"),
    ({"delta": 0.0}, r"`federation.privacy.delta` to be in \(0, 1\) but got 0"),
    ({"delta": 1.0}, r"delta` to be in \(0, 1\) but got 1.0"),
    ({"delta": "small"}, "`federation.privacy.delta` to be a number but got 'small'"),
    ({"clip_norm": 0.0}, "`federation.privacy.clip_norm` to be above 0, and finite, but got 0.0"),
    ({"clip_norm": None}, "`federation.privacy.clip_norm` to be a number but got None"),
    ({"clip_norm": True}, "`federation.privacy.clip_norm` to be a number but got True"),
    ({"target_quantile": 1.0}, r"target_quantile` to be in \(0, 1\)"),
    ({"quantile_share": 0.0}, r"quantile_share` to be in \(0, 1\)"),
    ({"clip_lr": -0.1}, "clip_lr` to be above 0"),
    ({"accounting": "moments"}, "accounting` to be 'auto', 'pld' or 'rdp' but got 'moments'"),
    ({"amplification": "no"}, "amplification` to be true or false but got 'no'"),
    ({"rounds": 5}, "rounds` to be given with `federation.privacy.epsilon` but got 5 without"),
    ({"min_separation": 0}, "`federation.privacy.min_separation` to be at least 1 but got 0"),
    ({"min_separation": 3, "target_quantile": 0.5}, "needs one clipping norm in all rounds"),
    ({"noise_cohort_size": 10}, "to be given together but got 10 and None"),
    ({"population": 10}, "to be given together but got None and 10"),
    ({"noise_cohort_size": 9, "population": 8}, r"at most `federation.privacy.population` \(8\)"),
    ({"noise_cohort_size": 0.5, "population": 8}, "noise_cohort_size` to be an integer"),
]


@table_test(("arguments", "words"), MISTAKES)
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises((TypeError, ValueError), match=words):
        DifferentialPrivacy(**{**VALID, **arguments})


def test_budget_is_the_smaller_limit():
    assert DifferentialPrivacy(**VALID).budget == inf
    target = {**VALID, "noise_multiplier": None, "epsilon": 3.0}
    assert DifferentialPrivacy(**target).budget == 3.0
    assert DifferentialPrivacy(**target, stop_at_epsilon=2.0).budget == 2.0
