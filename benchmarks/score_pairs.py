"""Last scores of two methods after the same steps, in pairs of task and seed.

Run: python benchmarks/score_pairs.py --results benchmarks/results/time_to_score.csv
         --methods hts synchronous
         --arguments="--data.total_frames=1000000 --trainer.precision=bf16-mixed"

Trains nothing: it reads what ``time_to_score.py`` has measured. A run counts if no score ended it
(``--scores`` and no number) and it has all these arguments, and no others but those that change no
bit. The summary is the geometric mean of first divided by second, and the 2.5 and 97.5 percentiles
of 10,000 resamples of the pairs. It needs scores above 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from finished_runs import NEVER, FinishedRuns
from harness import markdown, number
from score_report import Curve, Point, Run

CHANGE_NO_BIT = ("--data.timeout_s=", "--data.envs_per_executor=")


def last_scores(
    runs: dict[Run, Curve], method: str, arguments: Sequence[str]
) -> dict[tuple[str, int], float]:
    """Return the last score of each task and seed."""
    return {
        (run.task, run.seed): curve[-1].score
        for run, curve in runs.items()
        if (run.method, run.last_score) == (method, NEVER)
        and {a for a in run.arguments.split() if not a.startswith(CHANGE_NO_BIT)} == {*arguments}
    }


def summary(first: Sequence[float], second: Sequence[float]) -> str:
    """Return the geometric mean of first / second, its interval, and who is ahead how often."""
    logarithms = np.log(np.divide(first, second))
    resamples = np.random.default_rng(0).choice(logarithms, (10_000, len(logarithms)))
    low, high = np.exp(np.percentile(resamples.mean(axis=1), [2.5, 97.5]))
    ahead = int((logarithms > 0).sum())
    return (
        f"{np.exp(logarithms.mean()):.2f} ({low:.2f} to {high:.2f}) times the score; "
        f"ahead in {ahead} of {len(logarithms)} pairs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="of time_to_score.py")
    parser.add_argument("--methods", nargs=2, required=True, metavar=("FIRST", "SECOND"))
    parser.add_argument("--arguments", type=str.split, default=[], help="that both have")
    args = parser.parse_args()
    runs = FinishedRuns(args.results, Run, Point).runs
    first, second = (last_scores(runs, method, args.arguments) for method in args.methods)
    pairs = sorted(first.keys() & second.keys())
    if not pairs:
        sys.exit(f"{args.results}: no task and seed has both of {' and '.join(args.methods)}")
    rows = [
        {"task": task, "seed": str(seed)}
        | dict(zip(args.methods, map(number, (first[task, seed], second[task, seed])), strict=True))
        for task, seed in pairs
    ]
    print(markdown(rows))
    if min(found[pair] for found in (first, second) for pair in pairs) <= 0:
        sys.exit("a score is not above 0, so their ratios tell nothing")
    print(summary([first[pair] for pair in pairs], [second[pair] for pair in pairs]))


if __name__ == "__main__":
    main()
