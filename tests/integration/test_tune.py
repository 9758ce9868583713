"""Studies of real trainings: the same study has the same scores, and its best config too."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command_line import A2C, CARTPOLE, run

FITTED = [
    *CARTPOLE,
    *A2C,
    "--data.total_frames=2048",
    "--data.evaluation_frames=512",
    "--trainer.log_every_n_steps=16",
]
STUDY = """
space:
  model.learning_rate: {low: 1.0e-3, high: 1.0e-1, log: true}
  model.gae_lambda: [0.8, 0.95]
seeds: [7]
startup_trials: 1
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("study.yaml").write_text(STUDY)


def arguments(trials, output):
    return ["tune", "--study=study.yaml", f"--trials={trials}", f"--output={output}", *FITTED]


def tune(trials, output):
    run(*arguments(trials, output))
    return rows(output)


def rows(output):
    with Path(output, "trials.csv").open() as file:
        return list(csv.DictReader(file))


def reproducible(table):
    """What two studies have in common: all but the minutes, and the trials' numbers."""
    return [
        {name: text for name, text in row.items() if name not in ("number", "minutes")}
        for row in table
        if row["state"] != "cut off"
    ]


@pytest.mark.processes
def test_the_best_config_trains_with_the_score_of_its_trial():
    [row] = tune(1, "made")
    assert row["state"] == "complete"
    assert row["frames"] == "2048"
    run("fit", "--config=made/best.yaml", "--name=again")
    with Path("runs/again/version_0/metrics.csv").open() as file:
        scores = [line["eval/score"] for line in csv.DictReader(file) if line["eval/score"]]
    assert len(scores) == 4
    assert float(scores[-1]) == pytest.approx(float(row["value"]), rel=1e-5)


@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_study_that_was_cut_off_ends_with_the_trials_of_one_that_was_not():
    whole = tune(4, "whole")
    assert len({row["model.learning_rate"] for row in whole}) == 4
    with subprocess.Popen(
        [sys.executable, "-m", "hts_torchrl.cli", *arguments(4, "parts")], start_new_session=True
    ) as process:
        try:
            metrics = Path("parts/trial_1/seed_7/metrics.csv")
            while not metrics.exists() and process.poll() is None:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
            with pytest.raises(ProcessLookupError):  # nobody of its group is left
                os.killpg(process.pid, 0)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert [row["state"] for row in rows("parts")][1] == "cut off"
    assert reproducible(tune(4, "parts")) == reproducible(whole)
