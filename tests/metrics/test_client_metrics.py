"""The metrics of a federation, against plain numpy."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table_test

from pl_fed.functional.client_figures import read_figures
from pl_fed.metrics import ClientMetrics

LOSSES = ["loss", "loss_var"]
NAMES = [
    "accuracy",
    "accuracy_weighted",
    "accuracy_std",
    "accuracy_var",
    "accuracy_worst10",
    "accuracy_best10",
    "accuracy_jain",
    *LOSSES,
    "class_std_mean",
    "class_std_std",
]


@st.composite
def evaluations(draw):
    """Draw evaluated samples of clients; some clients have none."""
    clients, classes = draw(st.integers(1, 25)), draw(st.integers(1, 5))
    numbers = np.random.default_rng(draw(st.integers(0, 10_000)))
    count = numbers.integers(0, 9, (clients, classes)) * (numbers.random((clients, 1)) < 0.8)
    correct = (count * numbers.random(count.shape)).round().astype(np.int64)
    losses = numbers.random(clients) * count.sum(1)
    return correct, count, losses, numbers.random(clients) < 0.7


def compute_by_numpy(correct, count, losses, benign):
    rows = [k for k in range(len(count)) if benign[k] and count[k].sum()]
    if not rows:
        return {}
    accuracy = np.array([correct[k].sum() / count[k].sum() for k in rows])
    loss = np.array([losses[k] / count[k].sum() for k in rows])
    spread = [np.std([c / n for c, n in zip(correct[k], count[k]) if n]) for k in rows]
    tail = (len(rows) + 9) // 10
    squares = (accuracy**2).sum()
    return {
        "accuracy": accuracy.mean(),
        "accuracy_weighted": correct[rows].sum() / count[rows].sum(),
        "accuracy_std": accuracy.std(),
        "accuracy_var": accuracy.var(),
        "accuracy_worst10": np.sort(accuracy)[:tail].mean(),
        "accuracy_best10": np.sort(accuracy)[-tail:].mean(),
        "accuracy_jain": accuracy.sum() ** 2 / (len(rows) * squares) if squares else np.nan,
        "loss": loss.mean(),
        "loss_var": loss.var(),
        "class_std_mean": np.mean(spread),
        "class_std_std": np.std(spread),
    }


def make_metric(correct, count, losses, benign, rows=slice(None)):
    metric = ClientMetrics(*count.shape, benign=torch.from_numpy(benign))
    feed(metric, correct, count, losses, rows)
    return metric


def feed(metric, correct, count, losses, rows=slice(None)):
    clients = torch.arange(len(count))[rows]
    parts = (torch.from_numpy(part[rows]) for part in (correct, count, losses))
    metric.update(clients, *parts)


def assert_same(actual, expected, **tolerance):
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert float(actual[name]) == pytest.approx(float(value), nan_ok=True, **tolerance), name


quick = settings(max_examples=80, deadline=None, derandomize=True, database=None)


@pytest.mark.slow
@quick
@given(evaluation=evaluations())
def test_against_numpy(evaluation):
    computed = make_metric(*evaluation).compute()
    assert_same(computed, compute_by_numpy(*evaluation), rel=1e-12, abs=1e-12)
    assert all(value.dtype == torch.float64 and value.ndim == 0 for value in computed.values())


def test_names_equal_the_documented_names():
    metric = ClientMetrics(1, 1)
    metric.update(torch.tensor([0]), torch.ones(1, 1), torch.ones(1, 1), torch.ones(1))
    assert list(metric.compute()) == NAMES


@pytest.mark.slow
@quick
@given(evaluation=evaluations(), order_seed=st.integers(0, 100))
def test_clients_may_be_evaluated_in_any_order_and_in_parts(evaluation, order_seed):
    correct, count, losses, benign = evaluation
    order = np.random.default_rng(order_seed).permutation(len(count))
    metric = make_metric(correct // 2, count // 2, losses / 2, benign, order)
    feed(metric, correct - correct // 2, count - count // 2, losses / 2, order[::-1].copy())
    assert_same(metric.compute(), make_metric(*evaluation).compute(), rel=1e-12, abs=1e-12)


def make_backdoor_metric(misled, triggered, benign=None):
    n = len(misled)
    metric = ClientMetrics(n, 1, benign and torch.tensor(benign), backdoor=True)
    ones = torch.ones(n, 1)
    args = (torch.arange(n), ones, ones, torch.ones(n))
    metric.update(*args, torch.tensor(misled), torch.tensor(triggered))
    return metric


def test_backdoor_success_is_the_mean_over_clients_with_triggered_samples():
    metric = make_backdoor_metric([1, 0, 3, 2], [2, 0, 3, 2], [True, True, True, False])
    assert metric.compute()["backdoor_success"].item() == 0.75
    success = ("backdoor_success", "backdoor_success_worst10", "backdoor_success_max")
    assert list(metric.compute()) == [*NAMES, *success] == list(metric.names)
    shares = metric.per_client()["backdoor_success"].tolist()
    assert shares[0] == 0.5
    assert np.isnan(shares[1])
    assert shares[2:] == [1.0, 1.0]


def test_worst_clients_are_those_with_the_largest_success():
    misled = [k % 12 for k in range(24)]
    metric = make_backdoor_metric([*misled, 12, 0], [12] * 25 + [0], [True] * 24 + [False, True])
    values = metric.compute()
    top = sorted((k / 12 for k in misled), reverse=True)[:3]  # a tenth of 24, rounded up
    assert values["backdoor_success_worst10"].item() == pytest.approx(sum(top) / 3)
    assert values["backdoor_success_max"].item() == pytest.approx(11 / 12), "of a benign client"


def test_backdoor_success_is_missing_without_triggered_samples():
    assert list(make_backdoor_metric([0, 0], [0, 0]).compute()) == NAMES
    assert list(make_backdoor_metric([0, 4], [0, 5], [True, False]).compute()) == NAMES


def test_backdoor_success_accumulates_and_is_reset():
    metric = make_backdoor_metric([1], [2])
    update = (torch.tensor([0]), torch.ones(1, 1), torch.ones(1, 1), torch.ones(1))
    metric.update(*update, torch.tensor([2]), torch.tensor([2]))
    assert metric.compute()["backdoor_success"].item() == 0.75
    metric.reset()
    metric.update(*update, torch.tensor([0]), torch.tensor([2]))
    assert metric.compute()["backdoor_success"].item() == 0.0


@table_test("name", ["misled", "triggered"])
def test_counts_of_misled_samples_of_a_wrong_shape_are_refused(name):
    counts = {"misled": torch.ones(2), "triggered": torch.ones(2), name: torch.ones(3)}
    tables = (torch.arange(2), torch.ones(2, 1), torch.ones(2, 1), torch.ones(2))
    with pytest.raises(ValueError, match=rf"`{name}` to be of shape \[2\] but got shape \[3\]"):
        ClientMetrics(2, 1, backdoor=True).update(*tables, **counts)


def test_client_may_occur_twice_in_an_update():
    metric = ClientMetrics(2, 2)
    correct, count = torch.tensor([[1, 0], [0, 2]]), torch.tensor([[2, 0], [0, 2]])
    metric.update(torch.tensor([1, 1]), correct, count, torch.tensor([1.0, 3.0]))
    assert metric.per_client()["samples"].tolist() == [0, 4]
    assert metric.compute()["accuracy"] == 0.75
    assert metric.compute()["loss"] == 1


def two_processes(evaluation):
    """Two metrics with half of the clients each, joined as by torch.distributed."""
    correct, count, losses, benign = evaluation
    half = len(count) // 2
    halves = [
        make_metric(correct, count, losses, benign, rows)
        for rows in (slice(half), slice(half, None))
    ]
    states = [[part.correct, part.count, part.loss_sum, part.loss_samples] for part in halves]
    for own, metric in zip(states, halves):
        turns = itertools.cycle(range(4))  # torchmetrics gathers the states one by one

        def gather(state, group=None, own=own, turns=turns):
            position = next(turns)
            assert torch.equal(own[position], state)
            return [of_process[position] for of_process in states]

        metric.distributed_available_fn = lambda: True
        metric.dist_sync_fn = gather
    return halves


@pytest.mark.slow
@quick
@given(evaluation=evaluations())
def test_joined_processes_equal_a_single_process(evaluation):
    single_process = make_metric(*evaluation)
    for metric in two_processes(evaluation):
        own = metric.count.clone()
        table = metric.per_client()
        assert torch.equal(table["samples"], single_process.per_client()["samples"])
        assert_same(metric.compute(), single_process.compute(), rel=1e-12, abs=1e-12)
        for actual, expected in zip(metric.per_class(), single_process.per_class()):
            assert torch.equal(actual.nan_to_num(-1), expected.nan_to_num(-1))
        assert torch.equal(metric.count, own)  # and goes on with its own share


def test_byzantine_clients_are_in_the_table_but_not_in_the_metrics():
    metric = ClientMetrics(3, 1, benign=torch.tensor([True, False, True]))
    correct, count = torch.tensor([[1], [0]]), torch.tensor([[2], [4]])
    metric.update(torch.tensor([0, 1]), correct, count, torch.tensor([3.0, 100.0]))
    assert metric.compute()["accuracy"] == 0.5
    assert metric.compute()["loss"] == 1.5
    table = metric.per_client()
    assert list(table) == ["samples", "accuracy", "loss", "class_std", "byzantine"]
    assert table["byzantine"].tolist() == [0, 1, 0]
    assert table["samples"].tolist() == [2, 4, 0]
    assert table["accuracy"][:2].tolist() == [0.5, 0]
    assert table["loss"][:2].tolist() == [1.5, 25]
    assert table["class_std"][:2].tolist() == [0, 0]
    assert all(table[name][2].isnan() for name in ("accuracy", "loss", "class_std"))


def trained_metric(trained, benign=(True,) * 5, **options):
    """Five clients with accuracies 0, 1/4, 1/2, 3/4 and 1, and losses 4, 3, 2, 1 and 0."""
    masks = {"benign": torch.tensor(benign), "trained": torch.tensor(trained)}
    metric = ClientMetrics(5, 1, **masks, **options)
    hits = torch.arange(5)
    measures = {name: 2.0 * hits for name in options.get("measures", {})}
    count = torch.full((5, 1), 4)
    metric.update(hits, hits[:, None], count, 16.0 - 4 * hits, measures=measures)
    return metric


def test_clients_that_took_part_have_statistics_of_their_own():
    metric = trained_metric([False, True, True, True, True], [True, True, True, True, False])
    values = metric.compute()
    spread = (1 / 24) ** 0.5  # of 1/4, 1/2 and 3/4
    expected = {
        "accuracy_trained": 0.5,
        "accuracy_trained_std": spread,
        "accuracy_trained_worst10": 0.25,
        "loss_trained": 2.0,
        "loss_trained_std": 4 * spread,
        "loss_trained_worst10": 3.0,
    }
    assert list(values) == [*NAMES, *expected]
    for name, value in expected.items():
        assert values[name].item() == pytest.approx(value, rel=1e-15), name
    assert values["accuracy"] == 0.375, "over all benign clients, as ever"
    assert list(metric.names) == NAMES


@pytest.mark.parametrize(
    ("trained", "benign"),
    [
        ([True] * 5, [True] * 5),
        ([False] * 5, [True] * 5),
        ([False, True, True, True, True], [False, True, True, True, True]),
    ],
    ids=["all took part", "none took part", "only a Byzantine client did not take part"],
)
def test_equal_statistics_are_not_repeated(trained, benign):
    assert list(trained_metric(trained, benign).compute()) == NAMES


@pytest.mark.parametrize(("is_better", "worst"), [(True, 2.0), (False, 8.0)])
def test_metrics_of_a_task_are_also_over_the_clients_that_took_part(is_better, worst):
    trained = [False, True, True, True, True]
    values = trained_metric(trained, measures={"f1": is_better}).compute()
    assert values["f1"] == 4
    assert values["f1_trained"] == 5
    assert values["f1_trained_std"] == pytest.approx(5**0.5)
    assert values["f1_trained_worst10"] == worst
    assert "f1_trained_undefined" not in values


def test_accuracy_by_class():
    metric = ClientMetrics(2, 3)
    correct, count = torch.tensor([[1, 0, 0], [0, 2, 1]]), torch.tensor([[4, 0, 1], [0, 2, 2]])
    metric.update(torch.arange(2), correct, count, torch.ones(2))
    accuracy, samples = metric.per_class()
    assert samples.tolist() == count.tolist()
    assert accuracy.nan_to_num(-1).tolist() == [[0.25, -1, 0], [-1, 1, 0.5]]
    samples.zero_()
    assert metric.per_client()["samples"].tolist() == [5, 4], "what is returned is a copy"


def test_real_valued_targets_have_loss_metrics_and_no_accuracy():
    metric = ClientMetrics(2, 0)
    nothing = torch.zeros(2, 1)
    metric.update(torch.arange(2), nothing, torch.tensor([[2], [4]]), torch.tensor([2.0, 12.0]))
    assert {name: value.item() for name, value in metric.compute().items()} == {
        "loss": 2.0,
        "loss_var": 1.0,
        "loss_weighted": 14 / 6,
        "loss_std": 1.0,
        "loss_worst10": 3.0,
        "loss_best10": 1.0,
        "loss_jain": pytest.approx(16 / 20),
    }
    assert set(metric.names) == set(metric.compute())
    assert [table.shape for table in metric.per_class()] == [(2, 0), (2, 0)]
    table = metric.per_client()
    assert table["loss"].tolist() == [1, 3]
    assert table["accuracy"].isnan().all()
    assert table["class_std"].isnan().all()


def test_loss_to_which_no_sample_counts_is_undefined_and_that_of_a_diverged_model_is_not():
    for num_classes in (0, 1):
        metric, ones = ClientMetrics(3, num_classes), torch.ones(3, 1)
        losses = torch.tensor([1.0, 3.0, torch.nan])
        metric.update(
            torch.arange(3), ones, ones, losses, has_loss=torch.tensor([True, True, False])
        )
        metrics = metric.compute()
        assert metrics["loss"] == 2
        assert metrics["loss_var"] == 1
        assert metric.per_client()["loss"].isnan().tolist() == [False, False, True]
        metric.reset()
        metric.update(torch.arange(3), ones, ones, losses)
        assert metric.compute()["loss"].isnan()


def test_metrics_without_evaluated_clients_are_empty():
    metric = ClientMetrics(2, 3, benign=torch.tensor([True, False]))
    none = torch.empty(0, dtype=torch.int64)
    metric.update(none, torch.empty(0, 3), torch.empty(0, 3), torch.empty(0))
    assert metric.compute() == {}
    row = torch.ones(1, 3)
    metric.update(torch.tensor([1]), row, row, torch.ones(1))  # a byzantine client only
    assert metric.compute() == {}


def test_sums_of_losses_preserve_small_losses():
    metric = ClientMetrics(1, 1)
    ones = torch.ones(1, 1)
    for loss in (1e8, 0.5, 0.5):
        metric.update(torch.tensor([0]), ones, ones, torch.tensor([loss]))
    assert metric.compute()["loss"].item() == pytest.approx((1e8 + 1) / 3, rel=1e-15)


def test_casts_do_not_narrow_the_states():
    metric = ClientMetrics(1, 1).half().float()
    assert metric.loss_sum.dtype == torch.float64
    assert metric.count.dtype == torch.int64
    assert metric.benign.dtype == metric.trained.dtype == torch.bool


def test_reset_clears_the_sums_and_keeps_the_benign_clients():
    metric = ClientMetrics(2, 1, benign=torch.tensor([False, True]))
    row = torch.ones(2, 1)
    metric.update(torch.arange(2), row, row, torch.ones(2))
    metric.reset()
    metric.update(torch.arange(2), row * 0, row, torch.tensor([5.0, 7.0]))
    assert metric.compute()["accuracy"] == 0
    assert metric.compute()["loss"] == 7


def test_forward_returns_the_metrics_of_its_update():
    metric = ClientMetrics(2, 1)
    row = torch.ones(1, 1)
    metric(torch.tensor([0]), row, row, torch.ones(1))
    assert metric(torch.tensor([1]), row * 0, row, torch.ones(1))["accuracy"] == 0
    assert metric.compute()["accuracy"] == 0.5


def test_copies_and_pickles_contain_the_sums():
    metric = ClientMetrics(1, 1)
    metric.update(torch.tensor([0]), torch.ones(1, 1), torch.ones(1, 1), torch.ones(1))
    for twin in (copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
        assert twin.compute()["accuracy"] == 1


def test_mask_of_benign_clients_is_copied():
    benign = torch.tensor([True, True])
    metric = ClientMetrics(2, 1, benign=benign)
    benign.fill_(False)
    assert metric.benign.all()


@table_test(
    ("arguments", "error", "message"),
    [
        ((0, 2), ValueError, "`num_clients` to be at least 1 but got 0"),
        ((2, -1), ValueError, "`num_classes` to be at least 0 but got -1"),
        ((2, 2, torch.ones(2)), TypeError, "`benign` to be a bool tensor but got torch.float32"),
        ((2, 2, torch.ones(3) > 0), ValueError, r"`benign` .* \[2\] but got shape \[3\]"),
        (
            (2, 2, None, False, None, torch.ones(1) > 0),
            ValueError,
            r"`trained` .* \[2\] but got shape \[1\]",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ClientMetrics(*arguments)


@table_test(
    ("shapes", "message"),
    [
        (((1, 3), (1, 2), (1,)), r"`correct` to be of shape \[1, 2\] but got shape \[1, 3\]"),
        (((1, 2), (2, 2), (1,)), r"`count` to be of shape \[1, 2\] but got shape \[2, 2\]"),
        (((1, 2), (1, 2), ()), r"`loss_sum` to be of shape \[1\] but got shape \[\]"),
    ],
)
def test_updates_of_another_shape_are_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        ClientMetrics(4, 2).update(torch.tensor([0]), *(torch.zeros(shape) for shape in shapes))


def make_metric_of_figures(*names, **options):
    """A metric of four clients with 10 samples each: accuracies of the sheet, and their losses."""
    metric = ClientMetrics(4, 1, figures=read_figures(names), **options)
    count, correct = torch.full((4, 1), 10), torch.tensor([[9], [8], [5], [7]])
    measures = {name: torch.tensor([1.0, -2.0, torch.nan, 4.0]) for name in metric.measures}
    losses = torch.tensor([1.0, 2.0, 5.0, 3.0])
    metric.update(torch.arange(4), correct, count, losses, measures=measures)
    return metric


def test_further_statistics_over_clients():
    metric = make_metric_of_figures("gini", "gap", "worst50", "q50", "worst10")
    values = metric.compute()
    assert list(values) == list(metric.names)
    endings = ("gini", "gap", "worst50", "q50")
    assert [name for name in values if name not in NAMES] == [
        *(f"accuracy_{ending}" for ending in endings),
        *(f"loss_{ending}" for ending in (*endings, "worst10")),
    ]
    assert values["accuracy_gini"].item() == pytest.approx(0.1120689655, abs=1e-10)
    assert values["accuracy_worst50"].item() == pytest.approx(0.6)
    assert values["accuracy_q50"].item() == pytest.approx(0.75)
    assert values["loss_gap"].item() == pytest.approx(0.4)
    assert values["loss_worst50"].item() == pytest.approx(0.4), "the largest losses"
    assert all(value.dtype == torch.float64 and value.ndim == 0 for value in values.values())


def test_further_statistics_leave_out_clients_without_a_value_and_unknown_directions():
    metric = make_metric_of_figures("gap", "gini", "worst50", measures={"skill": None})
    values = metric.compute()
    assert values["skill_gap"].item() == 6
    assert values["skill_gini"].isnan(), "a client has a negative value"
    assert values["skill_jain"].isnan()
    assert "skill_worst50" not in values
    assert list(values) == list(metric.names)


def test_further_statistics_without_classes():
    metric = ClientMetrics(2, 0, figures=read_figures(["gap", "worst10"]))
    ones = torch.ones(2, 1, dtype=torch.int64)
    metric.update(torch.arange(2), ones, ones, torch.tensor([1.0, 3.0]))
    values = metric.compute()
    assert list(values) == list(metric.names)
    assert values["loss_gap"].item() == 2


def test_metrics_may_have_the_names_of_counts():
    """A task may log the number of correct samples, or a score of benign files."""
    measures = dict.fromkeys(("correct", "benign", "trained"), True)
    metric = ClientMetrics(2, 1, benign=torch.tensor([True, False]), measures=measures)
    correct, count = torch.tensor([[3], [1]]), torch.tensor([[4], [4]])
    values = {name: torch.tensor([7.0, 8.0]) for name in measures}
    metric.update(torch.tensor([0, 1]), correct, count, loss_sum=torch.zeros(2), measures=values)
    numbers = metric.compute()
    assert float(numbers["accuracy_weighted"]) == 0.75
    assert [float(numbers[name]) for name in measures] == [7, 7, 7], "of the benign client"
    table = metric.per_client()
    assert all(table[name].tolist() == [7, 8] for name in measures)
    assert table["byzantine"].tolist() == [0, 1]
