"""Labels of runs: short, distinct and descriptive."""

from run_folders import CONFIG, with_changes

from pl_fed.reports.labels import labels

MEDIAN = {"class_path": "pl_fed.aggregators.Median"}


def test_settings_without_effect_on_results_are_in_no_label():
    changed = with_changes({"seed_everything": 5, "trainer.default_root_dir": "elsewhere"})
    assert labels([changed, CONFIG]) == ["Ditto", "Ditto"]


def test_labels_have_the_different_settings():
    flame = {"class_path": "pl_fed.clients.FLAME", "init_args": {"lam": 5.0}}
    configs = [
        CONFIG,
        with_changes({"model.init_args.lam": 0.25}),
        with_changes({"model": flame}),
        with_changes({"federation.aggregator": MEDIAN, "federation.adversary.fraction": 0.2}),
    ]
    assert labels(configs) == [
        "Ditto, lam=0.1",
        "Ditto, lam=0.25",
        "FLAME",  # no other FLAME has another lam
        "Ditto, lam=0.1, Median, fraction=0.2",
    ]


def test_labels_have_different_optimizer_options():
    first, other = (
        with_changes(
            {"model.init_args.optimizer": {"class_path": "o.SGD", "init_args": {"lr": lr}}}
        )
        for lr in (0.1, 0.2)
    )
    assert labels([first, other]) == ["Ditto, optimizer.lr=0.1", "Ditto, optimizer.lr=0.2"]


def test_labels_of_many_differences_are_short_and_distinct():
    configs = [
        with_changes({f"data.setting_with_a_long_name_{n}": k for n in range(9)}) for k in range(5)
    ]
    names = labels(configs)
    assert len(set(names)) == 5
    assert max(map(len, names)) <= 60
    assert names[3] == "Ditto, setting_with_a_long_name_0=3"


def test_labels_begin_with_classes_and_add_settings_that_fit():
    long = {f"data.setting_with_a_long_name_{n}": 1 for n in range(9)}
    configs = [
        with_changes({"model.init_args.lam": 0.5, **long}),
        with_changes({"federation.aggregator": MEDIAN}),
        with_changes({}),
    ]
    for name in labels(configs):
        assert len(name) <= 60
    assert "Median" in labels(configs)[1]
    assert "lam=0.5" in labels(configs)[0]


def test_long_label_begins_with_the_most_distinctive_setting():
    """A setting that differs between all runs precedes a setting of one run."""
    common = {f"data.same_but_in_one_{n}": 1 for n in range(3)}
    configs = [
        *(
            with_changes({**common, "trainer.some_setting_of_it": k, "federation.a": 1})
            for k in range(5)
        ),
        with_changes({f"data.same_but_in_one_{n}": 2 for n in range(3)}),
    ]
    names = labels(configs)
    assert len({name[:35] for name in names}) == len(configs)
    assert names[3].startswith("Ditto, some_setting_of_it=3")
