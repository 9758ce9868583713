"""Writes a report: one HTML file that needs no other, and its tables and images as files."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from html import escape
from io import BytesIO
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from hts_torchrl.errors import naming
from hts_torchrl.tools.report.figures import learning_curves, waiting
from hts_torchrl.tools.report.groups import Group, grouped
from hts_torchrl.tools.report.intervals import interquartile_mean, probability_of_improvement
from hts_torchrl.tools.report.run_folder import ROLES, Run, read_runs

_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; display: block; overflow-x: auto }
th, td { border: 1px solid #ccc; padding: 0.2rem 0.5rem; text-align: right }
img { max-width: 100% }
"""
_NO_UTF8 = "backslashreplace"
"""What becomes of bytes in the name of a folder that are no text."""


class _Section(NamedTuple):
    """A part of the page, which is a file of its own too."""

    title: str
    about: str
    file: str
    content: Figure | pd.DataFrame


def write_report(paths: list[Path], output: Path) -> list[tuple[str, str]]:
    """Write ``report.html``, its tables as CSV and its images as PNG.

    Args:
        paths: folders of runs, or folders that have such below them.
        output: folder to write into; made if it is not there.

    Returns:
        Label and text of each line to tell: what is left out below a folder, what to know about
        the comparison, and the page.

    Raises:
        ConfigurationError: if a path has no run, a run that is named itself no finished
            evaluation, a group a seed twice, or the folder cannot be written.
    """
    runs, left_out = read_runs(paths)
    groups = grouped(runs)
    warnings = [f"{folder} {reason}: it is left out" for folder, reason in left_out.items()]
    remarks, page = list(_remarks(groups)), output / "report.html"
    with naming("--output", output):
        output.mkdir(parents=True, exist_ok=True)
        parts = [_write(section, output / section.file) for section in _sections(groups)]
        page.write_text(_html([*warnings, *remarks], parts), "utf-8", _NO_UTF8)
    told = [("warning", text) for text in warnings] + [("note", text) for text in remarks]
    return [*told, ("report", str(page))]


def _remarks(groups: list[Group]) -> Iterator[str]:
    environments = dict.fromkeys(group.environment for group in groups)
    if len(environments) > 1:
        yield (
            f"{len(environments)} environments ({', '.join(environments)}): scores are compared "
            "within each alone, and none is normalised"
        )
    single = [group.label for group in groups if len(group.runs) == 1]
    if single:
        yield f"one run has no interval: {', '.join(single)}"
    runs = [run for group in groups for run in group.runs]
    for run in runs:
        if run.earlier:
            yield f"{run.folder} continues {', '.join(map(str, run.earlier))}: one curve"
    early = [run.folder for run in runs if run.ended_early]
    if early:
        yield f"not evaluated at the end of its total_frames: {', '.join(map(str, early))}"


def _sections(groups: list[Group]) -> Iterator[_Section]:
    yield _Section(
        "Final scores",
        "The score of the last evaluation: interquartile mean (IQM), and its 95 % stratified "
        "bootstrap interval (low, high) of 2,000 resamples of the runs, by rliable. An interval "
        "of fewer than five runs tells little. Waiting is the mean over the runs.",
        "groups.csv",
        group_table(groups),
    )
    yield _Section(
        "Probability of improvement",
        "How likely a run of the first group ends with a higher score than one of the second, "
        "with the same kind of interval. Equal scores count half.",
        "improvement.csv",
        improvement_table(groups),
    )
    yield _Section(
        "Evaluation score",
        "Thick: interquartile mean over the runs. Band: its pointwise 95 % bootstrap interval. "
        "Thin: the runs. Minutes are those of training, without evaluation.",
        "score.png",
        learning_curves(groups, "evaluations"),
    )
    yield _Section(
        "Training return",
        "Mean raw return of the last 100 training games, drawn in the same way.",
        "training_return.png",
        learning_curves(groups, "training"),
    )
    yield _Section(
        "Who waited for whom",
        "Shares of the time in which learner, executors and actors waited for the others: the "
        "mean over the runs, and each run. Without worker processes only the learner's is known.",
        "waiting.png",
        waiting(groups),
    )
    differing = "Between groups of one name."
    yield _Section("Settings that differ", differing, "settings.csv", setting_table(groups))
    yield _Section("Runs", "One row a run.", "report.csv", run_table(groups))


def _write(section: _Section, path: Path) -> str:
    """Write the section's file and return its HTML; a table without rows has none."""
    content = section.content
    if isinstance(content, Figure):
        image = BytesIO()
        content.savefig(image, format="png", dpi=120)
        path.write_bytes(image.getvalue())
        data = base64.b64encode(image.getvalue()).decode()
        shown = f'<img alt="{escape(section.title)}" src="data:image/png;base64,{data}">'
    else:
        content.to_csv(path, index=False, errors=_NO_UTF8)
        if content.empty:
            return ""
        shown = content.to_html(index=False, na_rep="-", float_format="{:,.4g}".format, border=0)
    return f"<h2>{escape(section.title)}</h2>\n<p>{escape(section.about)}</p>\n{shown}\n"


def _html(remarks: list[str], parts: list[str]) -> str:
    notes = "".join(f"<li>{escape(remark)}</li>\n" for remark in remarks)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f"<title>Report</title><style>{_STYLE}</style></head>\n<body>\n<h1>Report</h1>\n"
        f"<ul>\n{notes}</ul>\n{''.join(parts)}</body>\n</html>\n"
    )


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
