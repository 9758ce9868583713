"""The tables of a report: one row a run, a group, a pair of groups, a setting."""

from __future__ import annotations

from itertools import combinations

import pandas as pd

from hts_torchrl.tools.report.groups import Group
from hts_torchrl.tools.report.intervals import interquartile_mean, probability_of_improvement
from hts_torchrl.tools.report.run_folder import ROLES, Run


def run_table(groups: list[Group]) -> pd.DataFrame:
    """Return one row a run; times are minutes of training, waiting is a share of 0 to 1."""
    return pd.DataFrame([_run_row(group, run) for group in groups for run in group.runs])


def _run_row(group: Group, run: Run) -> dict[str, object]:
    last, training = run.evaluations.iloc[-1], run.training["score"]
    seconds = 60 * last["minutes"]
    return {
        "group": group.label,
        "environment": group.environment,
        "seed": run.seed,
        "score": run.score,
        "best_score": run.evaluations["score"].max(),
        "training_return": training.iloc[-1] if len(training) else None,
        "frames": int(last["frames"]),
        "minutes": last["minutes"],
        "frames_per_second": last["frames"] / seconds if seconds else None,
        **{f"{role}_waiting": run.waiting[role] for role in ROLES},
        "ended_early": run.ended_early,
        "folder": str(run.folder),
    }


def group_table(groups: list[Group]) -> pd.DataFrame:
    """Return one row a group: final scores, their IQM with its 95 % interval, and medians."""
    rows = []
    for group in groups:
        runs = run_table([group])
        iqm = interquartile_mean(group.scores)
        rows.append(
            {
                "group": group.label,
                "environment": group.environment,
                "runs": len(group.runs),
                "seeds": " ".join(str(run.seed) for run in group.runs),
                "score_iqm": iqm.value,
                "score_low": iqm.low,
                "score_high": iqm.high,
                "score_least": runs["score"].min(),
                "score_most": runs["score"].max(),
                **{
                    f"{name}_median": runs[name].median()
                    for name in ("frames", "minutes", "frames_per_second")
                },
                **{f"{role}_waiting": runs[f"{role}_waiting"].mean() for role in ROLES},
            }
        )
    return pd.DataFrame(rows)


def improvement_table(groups: list[Group]) -> pd.DataFrame:
    """Return one row for two groups of one environment with two runs or more each."""
    rows: list[tuple[object, ...]] = []
    for one, other in combinations(groups, 2):
        if one.environment != other.environment:
            continue
        estimate = probability_of_improvement(one.scores, other.scores)
        if estimate is not None:
            rows.append((one.label, other.label, one.environment, *estimate))
    columns = ["group", "over", "environment", "probability", "low", "high"]
    return pd.DataFrame(rows, columns=columns)


def setting_table(groups: list[Group]) -> pd.DataFrame:
    """Return one row for each setting in which groups of one name differ."""
    rows = [
        (group.label, name, str(value))
        for group in groups
        for name, value in group.differing.items()
    ]
    return pd.DataFrame(rows, columns=["group", "setting", "value"])
