"""The study of the delay: no run influences another or is repeated, and never is no number."""

from dataclasses import dataclass

import numpy as np
import pytest

NAMES = ("delay", "delayed_learners", "finished_runs", "harness", "steps_to_score")


@pytest.fixture
def programs(load):
    return {name: load(name) for name in NAMES}


@dataclass(frozen=True)
class Played:
    task: str
    seed: int


@dataclass(frozen=True)
class Figure:
    steps: float


class TestFinishedRuns:
    def test_are_found_again_by_all_of_their_columns(self, programs, tmp_path):
        finished = programs["finished_runs"].FinishedRuns
        path = tmp_path / "runs.csv"
        points = [Figure(1.5), Figure(float("inf"))]
        finished(path, Played, Figure).add(Played("Go", 1), points)
        finished(path, Played, Figure).add(Played("Go", 2), [Figure(3.0)])
        assert finished(path, Played, Figure).runs == {
            Played("Go", 1): points,
            Played("Go", 2): [Figure(3.0)],
        }

    def test_have_one_head_in_their_file(self, programs, tmp_path):
        finished = programs["finished_runs"].FinishedRuns(tmp_path / "runs.csv", Played, Figure)
        finished.add(Played("Go", 1), [Figure(1.0)])
        finished.add(Played("Go", 2), [Figure(2.0)])
        assert finished.path.read_text().split() == ["task,seed,steps", "Go,1,1.0", "Go,2,2.0"]

    def test_of_another_version_are_refused(self, programs, tmp_path):
        path = tmp_path / "runs.csv"
        path.write_text("task,steps\nGo,1.0\n")
        with pytest.raises(SystemExit, match="columns of another version"):
            programs["finished_runs"].FinishedRuns(path, Played, Figure)


class TestSteps:
    def test_of_equal_seeds_have_a_ratio_without_doubt(self, programs):
        ratios = programs["steps_to_score"].ratios([30.0] * 4, [20.0] * 4)
        assert set(ratios) == {1.5}

    def test_that_are_never_make_the_median_never_where_they_are_half(self, programs):
        table = programs["steps_to_score"].table
        steps = {
            ("Go", "ppo", "late"): [10.0, np.inf, np.inf],
            ("Go", "ppo", "base"): [10.0, 20.0, np.inf],
        }
        late, base = table(steps, "base").splitlines()[2:]
        assert "| late | never (10 to never) | inf (" in late
        assert late.endswith("| 1 of 3 |")
        assert "| base | 20 (10 to never) |  | 2 of 3 |" in base

    def test_that_nobody_reached_are_no_difference(self, programs):
        ratios = programs["steps_to_score"].ratios([np.inf] * 3, [np.inf] * 3)
        assert set(ratios) == {1.0}

    def test_of_two_tasks_have_the_geometric_mean_of_their_ratios(self, programs):
        steps = {
            ("Go", "ppo", "late"): [40.0] * 3,
            ("Go", "ppo", "base"): [10.0] * 3,
            ("Chess", "ppo", "late"): [10.0] * 3,
            ("Chess", "ppo", "base"): [10.0] * 3,
        }
        text = programs["steps_to_score"].overview(steps, "base")
        assert "| ppo | late | Go, Chess | 2.00 (2.00 to 2.00) |" in text


def run_of(delay, method="gradient", seed=1, algorithm="a2c", **changes):
    figures = {"score": 1e6, "games": 5, "frames": 1500} | changes
    return delay.Run("CartPole", algorithm, method, seed, **figures)


class TestARun:
    def test_has_the_same_outcome_after_another_one(self, programs):
        delay = programs["delay"]
        first, other, again = (
            delay.train(run_of(delay, seed=seed)).last_return for seed in (1, 2, 1)
        )
        assert first == again != other

    def test_ends_at_its_limit_without_the_score(self, programs):
        delay = programs["delay"]
        assert delay.train(run_of(delay)).steps == np.inf

    def test_ends_in_the_round_that_reaches_the_score(self, programs):
        delay = programs["delay"]
        steps = delay.train(run_of(delay, score=10.0)).steps
        assert steps < 1500
        assert steps % 128 == 0

    @pytest.mark.parametrize("algorithm", ["a2c", "ppo", "pqn"])
    def test_is_possible_with_every_method(self, programs, algorithm):
        delay = programs["delay"]
        for method in delay.METHODS[algorithm]:
            outcome = delay.train(run_of(delay, method, algorithm=algorithm))
            assert np.isfinite(outcome.last_return), method

    def test_differs_where_another_rule_learns(self, programs):
        delay = programs["delay"]
        plain, other = (
            delay.train(run_of(delay, method=name, frames=5000)).last_return
            for name in ("gradient", "ratio, uncut")
        )
        assert plain != other

    def test_counts_where_its_score_and_limit_are_those_of_the_task(self, programs, monkeypatch):
        delay = programs["delay"]
        monkeypatch.setitem(delay.TASKS, "CartPole", delay.Task("cartpole", 400.0, 20, 9000))
        figures = {"score": 400.0, "games": 20, "frames": 9000}
        others = [{"score": 300.0}, {"games": 10}, {"frames": 8000}]
        runs = {run_of(delay, **figures): [delay.Outcome(5000.0, 401.0)]} | {
            run_of(delay, seed=seed, **figures | other): [delay.Outcome(1.0, 401.0)]
            for seed, other in enumerate(others, start=2)
        }
        assert delay.steps_of(runs)["CartPole", "a2c", "gradient"] == [5000.0]
