"""Writes a report: one HTML file that needs no other, and its tables and pictures as files."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from html import escape
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from hts_torchrl.errors import ConfigurationError, reason_of
from hts_torchrl.tools.report.figures import learning_curves, waiting
from hts_torchrl.tools.report.groups import Group, grouped
from hts_torchrl.tools.report.run_folder import read_runs
from hts_torchrl.tools.report.tables import (
    group_table,
    improvement_table,
    run_table,
    setting_table,
)

_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; display: block; overflow-x: auto }
th, td { border: 1px solid #ccc; padding: 0.2rem 0.5rem; text-align: right }
img { max-width: 100% }
"""


class _Section(NamedTuple):
    """A part of the page, which is a file of its own too."""

    title: str
    about: str
    file: str
    content: Figure | pd.DataFrame


def write_report(paths: list[Path], output: Path) -> list[tuple[str, str]]:
    """Write ``report.html``, its tables as CSV and its pictures as PNG.

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
    try:
        output.mkdir(parents=True, exist_ok=True)
        parts = [_write(section, output / section.file) for section in _sections(groups)]
        page.write_text(_html([*warnings, *remarks], parts), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--output={output}: {reason_of(error, output)}") from error
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
    early = [run.folder for group in groups for run in group.runs if run.ended_early]
    if early:
        yield f"ended before its total_frames: {', '.join(map(str, early))}"


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
        picture = BytesIO()
        content.savefig(picture, format="png", dpi=120)
        path.write_bytes(picture.getvalue())
        data = base64.b64encode(picture.getvalue()).decode()
        shown = f'<img alt="{escape(section.title)}" src="data:image/png;base64,{data}">'
    else:
        content.to_csv(path, index=False)
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
