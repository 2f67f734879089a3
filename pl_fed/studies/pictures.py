"""Pictures of a study's report: heat maps, fronts of mean against worst 10 %, average ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pl_fed.reports.critical_difference import draw_critical_difference
from pl_fed.reports.picture import Picture, line_style
from pl_fed.statistics import RankComparison
from pl_fed.studies.comparison import Layout, MetricComparison
from pl_fed.studies.fronts import draw_fronts
from pl_fed.studies.heat_map import draw_heat_map
from pl_fed.studies.tables import RANK_RULE, describe_metric, name_files

WORST10 = "_worst10"
"""End of the names of metrics over the worst tenth of the clients."""


def draw_pictures(comparisons: Sequence[MetricComparison]) -> Iterator[Picture]:
    """Yield the pictures of a study: for each metric a heat map and average ranks, and fronts.

    A method has the same colour in all of them, by its place on its axis.

    Args:
        comparisons: The comparisons of the methods by each metric.
    """
    for comparison in comparisons:
        yield draw_heat_map(comparison)
        if comparison.ranks is not None:
            yield _draw_ranks(comparison.metric, comparison.layout, comparison.ranks)
    for comparison in comparisons:
        if worst := find_worst10(comparison, comparisons):
            yield draw_fronts(comparison, worst)


def find_worst10(
    comparison: MetricComparison, comparisons: Sequence[MetricComparison]
) -> MetricComparison | None:
    """Return the comparison by the worst 10 % of the clients; ``None`` if there is none."""
    name = f"{comparison.metric}{WORST10}"
    return next((item for item in comparisons if item.metric == name), None)


def _draw_ranks(metric: str, layout: Layout, ranks: RankComparison) -> Picture:
    """Return the critical-difference diagram; its blocks are seeds."""
    name = f"ranks_{name_files(metric)}"
    styles = {method: line_style(place) for place, method in enumerate(layout.methods)}
    picture = draw_critical_difference(ranks, name, describe_metric(metric), styles)
    return replace(picture, note=f"{picture.note} A block is a seed. {RANK_RULE}".strip())
