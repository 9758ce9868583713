"""The comparison of ``reproducibility.py``: runs, their digests, and the tables made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from harness import markdown

IDLE, LOADED, RESUMED = "idle", "loaded", "resumed"
NONE = "-"
"""In a cell whose runs are not there."""


@dataclass(frozen=True)
class Run:
    """A training: all that was asked of it."""

    system: str
    task: str
    workers: int
    seed: int
    condition: str
    """``idle``; ``loaded``: beside a busy process; ``resumed``: stopped after half its updates."""
    variant: str
    """Of the libraries' settings, as ``NAME=VALUE NAME=VALUE``; empty: as they are."""
    repeat: int
    updates: int


@dataclass(frozen=True)
class Update:
    """What a run told after an update."""

    update: int
    weights: int
    """How many numbers the digest covers."""
    digest: str


Runs = Mapping[Run, Sequence[Update]]


def first_difference(runs: Sequence[Sequence[Update]]) -> int:
    """Return the first update after which not all have the same weights; 0 if there is none.

    Raises:
        ValueError: if there are fewer than two, or they have not the same updates.
    """
    if len(runs) < 2:
        raise ValueError("one run has nothing to be compared with")
    if len({tuple(update.update for update in run) for run in runs}) > 1:
        raise ValueError("the runs have not the same updates")
    for after in zip(*runs, strict=True):
        if len(set(after)) > 1:
            return after[0].update
    return 0


def fault_of(updates: Sequence[Update], wanted: int) -> str:
    """Return why these cannot be compared; empty if they can."""
    if [update.update for update in updates] != list(range(1, wanted + 1)):
        told = [update.update for update in updates]
        return f"it told the updates {told}, not 1 to {wanted}"
    if min(update.weights for update in updates) < 1:
        return "a digest covers no weights"
    if len({update.weights for update in updates}) > 1:
        return "the number of weights changed"
    for one, next_one in pairwise(updates):
        if one.digest == next_one.digest:
            return f"update {next_one.update} changed no weight"
    return ""


def verdict(runs: Sequence[Sequence[Update]], stopped_after: int = 0) -> str:
    """Return a cell: whether all are the same, or where they part."""
    if len(runs) < 2:
        return NONE
    updates = len(runs[0])
    first = first_difference(runs)
    if not first:
        return f"**same** ({len(runs)} runs)"
    before = ", before the stop" if first <= stopped_after else ""
    return f"update {first} of {updates}{before}"


def chosen(runs: Runs, **wanted: object) -> list[Sequence[Update]]:
    """Return what runs told whose fields have these values, the first repeat first."""
    found = [
        run for run in runs if all(getattr(run, name) == value for name, value in wanted.items())
    ]
    return [runs[run] for run in sorted(found, key=lambda run: run.repeat)]


def row(runs: Runs, system: str, task: str, workers: Sequence[int]) -> dict[str, str]:
    """Return the cells of a system on a task."""

    def of(count: int, condition: str, seed: int = 1) -> list[Sequence[Update]]:
        return chosen(
            runs, system=system, task=task, workers=count, condition=condition, seed=seed,
            variant="",
        )  # fmt: skip

    few, many = workers
    cells = {}
    for count in workers:
        cells[f"again, {count} w"] = verdict(of(count, IDLE))
    cells[f"{many} w and {few} w"] = verdict([*of(few, IDLE)[:1], *of(many, IDLE)[:1]])
    for count in workers:
        compared = of(count, LOADED)
        cells[f"loaded, {count} w"] = verdict([*of(count, IDLE)[:1], *compared] if compared else [])
    for count in workers:
        whole, compared = of(count, IDLE)[:1], of(count, RESUMED)
        half = len(whole[0]) // 2 if whole else 0
        cells[f"resumed, {count} w"] = verdict([*whole, *compared] if compared else [], half)
    cells["another seed"] = verdict([*of(few, IDLE)[:1], *of(few, IDLE, seed=2)[:1]])
    return cells


def seeds_differ(cells: Mapping[str, str]) -> bool:
    """Return whether the control is as it must be: two seeds part at the first update."""
    return cells["another seed"] == NONE or cells["another seed"].startswith("update 1 ")


def table(
    runs: Runs, labels: Mapping[str, str], tasks: Sequence[str], workers: Sequence[int]
) -> str:
    """Return a table for each task, of the systems that have runs."""
    text = []
    for task in tasks:
        there = {run.system for run in runs if run.task == task and not run.variant}
        rows = [
            {"system": label} | row(runs, system, task, workers)
            for system, label in labels.items()
            if system in there
        ]
        if rows:
            text.append(f"### {task}\n\n{markdown(rows)}")
    return "\n".join(text)


def variants_table(runs: Runs, variants: Sequence[str], tasks: Sequence[str], base: str) -> str:
    """Return a table of settings of libraries, each compared with ``base``."""
    rows = []
    for variant in (name for name in variants if name != base):
        cells = {"setting": f"`{variant}`"}
        for task in tasks:
            one, other = (
                chosen(runs, task=task, variant=name, workers=0) for name in (base, variant)
            )
            cells[task] = verdict([*one[:1], *other]) if one and other else NONE
        rows.append(cells)
    return markdown(rows) if rows else ""


def machines_table(here: Runs, there: Runs, tasks: Sequence[str]) -> str:
    """Return a table of the settings of libraries that both machines have trained with."""
    common = [run for run in here if run.variant and run in there]
    rows = []
    for variant in dict.fromkeys(run.variant for run in common):
        cells = {"setting": f"`{variant}`"}
        for task in tasks:
            pair = [runs[run] for run in common for runs in (here, there)
                    if (run.variant, run.task) == (variant, task)]  # fmt: skip
            cells[task] = verdict(pair)
        rows.append(cells)
    return markdown(rows) if rows else ""
