"""The room is light: it needs no torch, and imports the slow parts of scipy when they are used."""

import inspect
import subprocess
import sys

import pytest

import pl_fed
from pl_fed import statistics


@pytest.mark.slow
def test_import_is_light():
    code = "import sys, pl_fed.statistics; print({'torch', 'scipy.stats'} & set(sys.modules))"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "set()"


def test_room_is_an_attribute_of_the_package():
    assert pl_fed.statistics is statistics


def test_functions_refuse_runs_that_diverged():
    """Every function of results refuses NaN by one sentence that names the argument."""
    sample, table = [1.0, float("nan"), 3.0], [[1.0, 2.0], [float("nan"), 1.0]]
    calls = {
        **{name: (sample,) for name in ("t_interval", "bootstrap_interval")},
        **{
            name: (sample, [1.0, 2.0, 3.0])
            for name in (
                *("paired_differences", "paired_t_test", "wilcoxon_test", "sign_flip_test"),
                *("cohens_d", "rank_biserial", "cliffs_delta", "probability_of_superiority"),
            )
        },
        "swap_test": (table, table, lambda values: values.mean(-1)),
        "measure_cluster_effect": (sample, [0, 0, 1]),
        "aggregate_interval": (table,),
        "performance_profile": (table, [0.5]),
        "friedman_test": (table,),
        "compare_ranks": (table, ["a", "b"]),
    }
    for name, arguments in calls.items():
        with pytest.raises(ValueError, match=r"Expected argument `\w+` .*(nan|NaN).*diverged"):
            getattr(statistics, name)(*arguments)
    others = {  # numbers that are no results, or tables with a rule for NaN
        *("interquartile_mean", "correct_by_holm", "format_p_value", "critical_difference"),
        *("count_seeds", "paired_t_power", "smallest_difference"),
        *("arrange_scores", "pair_runs", "resolve_repeated_seeds"),
    }
    functions = {name for name, _ in inspect.getmembers(statistics, inspect.isfunction)}
    assert functions == {*calls, *others}, "a new function states its rule for NaN here"
