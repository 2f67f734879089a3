"""The simulation of sizes and powers: its committed rows are those of the command."""

import math

import pytest

from experiments.statistics import run

ROWS = run.read_rows()
SHARES = {
    (row["table"], row["case"], int(row["seeds"]), row["quantity"]): float(row["share"])
    for row in ROWS
}
EXACT = ("Wilcoxon", "sign flips")


def test_page_shows_the_current_rows():
    """The test fails for new rows: run python -m experiments.statistics.run --page."""
    assert (run.HERE / "table.md").read_text() == run.make_page(ROWS)


def test_all_cells_are_there():
    cells = {(table, case, seeds) for table, case, seeds, _ in SHARES}
    expected = {(s.name, case, n) for s in run.SIMULATIONS for case in s.cases for n in run.SEEDS}
    assert cells == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "case", "seeds"),
    [
        ("size", "ties", 3),
        ("power", "normal", 5),
        ("clients", "correlation 0.5 within a seed", 3),
        ("ranks", "3 methods", 3),
        ("tasks", "4 tasks", 3),
    ],
)
def test_a_cell_run_again_gives_the_committed_numbers(table, case, seeds):
    (simulation,) = [simulation for simulation in run.SIMULATIONS if simulation.name == table]
    for quantity, share in simulation.simulate(simulation.cases[case], seeds).items():
        assert share == SHARES[table, case, seeds, quantity]


def test_exact_tests_hold_their_level_for_symmetric_differences():
    bound = 0.05 + 4 * math.sqrt(0.05 * 0.95 / run.SAMPLES)
    symmetric = [name for name, data in run.DATA.items() if data.symmetric]
    sizes = [
        SHARES["size", name, n, test] for name in symmetric for n in run.SEEDS for test in EXACT
    ]
    assert max(sizes) <= bound
    assert all(
        SHARES["size", name, n, test] == 0 for name in symmetric for n in (3, 5) for test in EXACT
    )


def test_simulated_power_of_the_t_test_is_the_computed_one():
    for seeds in run.SEEDS:
        power = run.paired_t_power(1.0, 1.0, seeds)
        assert SHARES["power", "normal", seeds, "paired t"] == pytest.approx(power, abs=0.02)
