"""Rounds, uploads and simulated seconds until the clients' models reach a level."""

from collections.abc import Iterator, Sequence
from typing import Any

from pl_fed.reports.group import Group, is_lower_better, list_models, main_metric
from pl_fed.reports.run import Run
from pl_fed.reports.systems import read_clock

_SHARE = 0.95  # of the best value of all groups


def measure_communication(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Yield the rounds, uploads, bytes and time to reach the level, by model and group."""
    metric = main_metric(groups, "val")
    lower = is_lower_better((run for group in groups for run in group.runs), metric)
    models = list_models(groups, "val")[:1] + (["global"] if len(groups) > 1 else [])
    for model in dict.fromkeys(models):
        name = f"val/{model}/{metric}"
        curves = {group.number: group.curve(name) for group in groups}
        values = [value for curve in curves.values() for value in curve.mean]
        best = (min(values) if lower else max(values)) if values else 0.0
        level = best / _SHARE if lower == (best > 0) else best * _SHARE
        for group in groups:
            curve = curves[group.number]
            if not curve.rounds:
                continue
            reached = [
                round
                for round, value in zip(curve.rounds, curve.mean)
                if (value <= level if lower else value >= level)
            ]
            trained = max(run.num_rounds for run in group.runs)  # an evaluation may follow them
            yield {
                "group": group.number,
                "name": group.label,
                "model": model,
                f"level of {metric}": level,
                "rounds": min(reached[0] + 1, trained) if reached else "not reached",
                **(_count_uploads(_find_run(group, reached[0]), reached[0]) if reached else {}),
                **_read_time(group, reached[:1]),
            }


def _read_time(group: Group, reached: Sequence[int]) -> dict[str, float]:
    """Return the simulated seconds at the end of a round, if there is one and a clock."""
    clock = read_clock(group)
    if not reached or reached[0] not in clock:
        return {}
    return {"simulated seconds": clock[reached[0]]}


def _find_run(group: Group, last_round: int) -> Run:
    """Return the first run with a round: another one may have stopped or diverged before it."""
    runs = [run for run in group.runs if last_round in run.curve("train/cohort")]
    return (runs or group.runs)[0]


def _count_uploads(run: Run, last_round: int) -> dict[str, Any]:
    """Return the uploads until a round, and the megabytes of uploads and downloads.

    The megabytes of an earlier version are those of the summary's size of an upload.
    """
    cohorts = run.curve("train/cohort")
    if not cohorts:
        return {}
    uploads = int(sum(size for round, size in cohorts.items() if round <= last_round))
    if run.curve("train/upload_bytes"):
        sent, received = (
            sum(size for round, size in run.curve(name).items() if round <= last_round)
            for name in ("train/upload_bytes", "train/download_bytes")
        )
        megabytes = {"MB uploaded": sent / 1e6, "MB downloaded": received / 1e6}
        return {"uploads": uploads if sent else 0, **megabytes}
    upload_bytes = run.counts.get("upload_bytes")
    if not isinstance(upload_bytes, int):
        return {"uploads": uploads}
    if not upload_bytes:  # local training
        uploads = 0
    return {"uploads": uploads, "MB uploaded": uploads * upload_bytes / 1e6}
