"""Names of runs: short, different, and telling."""

from run_folders import CONFIG, with_changes

from pl_fed.reports.labels import labels

MEDIAN = {"class_path": "pl_fed.aggregators.Median"}


def test_what_changes_no_result_is_in_no_name():
    changed = with_changes({"seed_everything": 5, "trainer.default_root_dir": "elsewhere"})
    assert labels([changed, CONFIG]) == ["Ditto", "Ditto"]


def test_names_say_in_what_runs_differ():
    flame = {"class_path": "pl_fed.clients.FLAME", "init_args": {"lam": 5.0}}
    given = [
        CONFIG,
        with_changes({"model.init_args.lam": 0.25}),
        with_changes({"model": flame}),
        with_changes({"federation.aggregator": MEDIAN, "federation.adversary.fraction": 0.2}),
    ]
    assert labels(given) == [
        "Ditto, lam=0.1",
        "Ditto, lam=0.25",
        "FLAME",  # its lam is that of no other FLAME
        "Ditto, lam=0.1, Median, fraction=0.2",
    ]


def test_optimizers_are_told_apart():
    first, other = (
        with_changes(
            {"model.init_args.optimizer": {"class_path": "o.SGD", "init_args": {"lr": lr}}}
        )
        for lr in (0.1, 0.2)
    )
    assert labels([first, other]) == ["Ditto, optimizer.lr=0.1", "Ditto, optimizer.lr=0.2"]


def test_names_of_runs_that_differ_in_much_are_short_and_different():
    given = [
        with_changes({f"data.setting_with_a_long_name_{n}": k for n in range(9)}) for k in range(5)
    ]
    found = labels(given)
    assert len(set(found)) == 5
    assert max(map(len, found)) <= 60
    assert found[3] == "Ditto, setting_with_a_long_name_0=3"


def test_what_fits_is_said_as_well_and_classes_first():
    long = {f"data.setting_with_a_long_name_{n}": 1 for n in range(9)}
    given = [
        with_changes({"model.init_args.lam": 0.5, **long}),
        with_changes({"federation.aggregator": MEDIAN}),
        with_changes({}),
    ]
    for name in labels(given):
        assert len(name) <= 60
    assert "Median" in labels(given)[1]
    assert "lam=0.5" in labels(given)[0]


def test_what_tells_most_comes_first_in_a_long_name():
    """One run with other data does not put its arguments before what tells all the others apart."""
    alike = {f"data.same_but_in_one_{n}": 1 for n in range(3)}
    given = [
        *(
            with_changes({**alike, "trainer.some_setting_of_it": k, "federation.a": 1})
            for k in range(5)
        ),
        with_changes({f"data.same_but_in_one_{n}": 2 for n in range(3)}),
    ]
    found = labels(given)
    assert len({name[:35] for name in found}) == len(given)
    assert found[3].startswith("Ditto, some_setting_of_it=3")
