"""Times to a score: who can play what, what a run's games give, and what the table says of it."""

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from benchmarks.training_scores import FEWEST, TrainingScores

from tests.command_line import A2C, CARTPOLE, run

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def program(load):
    return load("time_to_score")


@pytest.fixture
def scores(tmp_path):
    """Of a run that ends at 3, whose clock has begun."""
    watch = TrainingScores(str(tmp_path / "scores.csv"), [3.0, 1.0], max_minutes=1000.0)
    watch.begin()
    yield watch
    watch.end()


def points(path):
    with path.open() as file:
        return [(int(row["frames"]), float(row["score"])) for row in csv.DictReader(file)]


def refused(program, monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["time_to_score.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


class TestTrainingScores:
    def test_there_is_none_before_20_games(self, scores, tmp_path):
        assert not scores.add(10, [5.0] * (FEWEST - 1))
        assert points(tmp_path / "scores.csv") == []
        assert scores.add(20, [5.0] * FEWEST)
        assert points(tmp_path / "scores.csv") == [(20, 5.0)]

    def test_is_the_mean_of_the_last_100_games(self, scores, tmp_path):
        scores.add(10, [1000.0] + [0.5] * 100)
        assert points(tmp_path / "scores.csv") == [(10, 0.5)]

    def test_all_wanted_scores_and_the_last_one_have_points_whatever_is_left_out(
        self, scores, tmp_path
    ):
        for steps, score in enumerate([0.0, 0.1, 0.2, 1.0, 0.4, 2.9]):
            assert not scores.add(steps, [score] * 50)
        assert scores.add(6, [3.0] * 50)
        assert points(tmp_path / "scores.csv") == [(0, 0.0), (3, 1.0), (6, 3.0)]

    def test_the_last_point_is_written_at_the_end_of_the_steps(self, scores, tmp_path):
        scores.add(1, [0.0] * 50)
        scores.add(2, [0.5] * 50)
        scores.end()
        assert points(tmp_path / "scores.csv") == [(1, 0.0), (2, 0.5)]

    def test_a_run_without_wanted_scores_goes_on_whatever_it_scores(self, tmp_path):
        scores = TrainingScores(str(tmp_path / "scores.csv"), [], max_minutes=1000.0)
        scores.begin()
        assert not scores.add(1, [5.0] * 50)
        assert not scores.add(2, [9.0] * 50)
        scores.end()
        assert points(tmp_path / "scores.csv") == [(1, 5.0), (2, 9.0)]

    def test_a_run_ends_after_its_minutes_without_a_game(self, tmp_path):
        scores = TrainingScores(str(tmp_path / "scores.csv"), [1.0], max_minutes=1e-6)
        scores.begin()
        time.sleep(0.001)
        assert scores.add(10, [])
        scores.end()

    def test_a_run_ends_where_its_starter_is_gone(self, scores, monkeypatch):
        monkeypatch.setattr("os.getppid", lambda: -1)
        assert scores.add(10, [])


def test_a_round_of_this_project_counts_when_it_has_ended(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    watch = {"path": str(tmp_path / "scores.csv"), "scores": [], "max_minutes": 9.0}
    run("fit", *CARTPOLE, *A2C, "--data.total_frames=960", *program.watching(watch))
    found = points(tmp_path / "scores.csv")
    assert found[-1][0] == 960


class TestOtherSystems:
    @pytest.mark.parametrize(
        ("task", "game"),
        [
            ("pong", "pong"), ("atari/breakout_ppo", "breakout"), ("cartpole_ppo", "cartpole"),
            ("football/run_to_score", "football/run_to_score"), ("pendulum_ppo", ""),
            ("minatar/breakout_ppo", ""),
            ("mujoco/hopper_ppo", "mujoco/Hopper-v5"), ("mujoco/ant_ppo", ""),
            ("box2d/lunar_lander_ppo", "box2d/LunarLander-v3"),
        ],
    )  # fmt: skip
    def test_play_the_game_of_a_config(self, program, task, game):
        assert program.game_of(task) == game

    @pytest.mark.parametrize(
        ("method", "task"),
        [
            ("cleanrl_envpool", "football/empty_goal_close"),
            ("cleanrl_envpool", "pendulum_ppo"),
            ("cleanrl_envpool", "mujoco/hopper_ppo"),
            ("cleanrl_envpool", "box2d/lunar_lander_ppo"),
            ("sample_factory", "cartpole_ppo"),
        ],
    )
    def test_that_cannot_play_a_task_are_refused_by_name(
        self, program, monkeypatch, capsys, method, task
    ):
        arguments = ("--by", "training", "--methods", "hts", method, "--tasks", task)
        error = refused(program, monkeypatch, capsys, *arguments)
        assert error.endswith(f"error: --methods: {method} cannot play {task}")

    def test_without_published_settings_need_those_of_the_config(
        self, program, monkeypatch, capsys
    ):
        names = ("--methods", "stable_baselines3", "--tasks", "football/corner")
        error = refused(program, monkeypatch, capsys, "--by", "training", *names)
        assert error.endswith(
            "nobody has published settings of stable_baselines3 for football/corner; give "
            "--same-recipe"
        )

    def test_have_no_evaluation(self, program, monkeypatch, capsys):
        error = refused(program, monkeypatch, capsys, "--methods", "sample_factory")
        assert error.endswith("sample_factory has no evaluation; give --by training")

    def test_get_the_settings_that_are_told(self, program):
        text = "cleanrl_envpool main_threads=3 channels_last=False"
        run = program.peer_run("cleanrl_envpool", "pong", ["stable_baselines3 envs=dummy", text])
        assert run.setting == "main_threads=3 channels_last=False"

    def test_are_found_again_by_the_setting_that_stands_in_the_results(self, program):
        for method in program.PEERS:
            run = program.peer_run(method, "pong")
            assert program.peer_run(method, "pong", [f"{method} {run.setting}"]) == run

    def test_with_a_setting_that_is_none_are_refused(self, program, monkeypatch, capsys):
        names = ("--by", "training", "--tasks", "pong", "--methods", "sample_factory")
        setting = ("--settings", "sample_factory speed=9")
        error = refused(program, monkeypatch, capsys, *names, *setting)
        assert "--settings: sample_factory_async speed=9" in error

    def test_that_take_no_part_have_no_setting(self, program, monkeypatch, capsys):
        names = ("--by", "training", "--tasks", "pong", "--methods", "cleanrl_envpool")
        setting = ("--settings", "envpool main_threads=4")  # as throughput.py calls it
        error = refused(program, monkeypatch, capsys, *names, *setting)
        assert error.endswith("--settings: envpool is no other system of --methods")

    def test_with_the_same_recipe_learn_with_the_settings_of_the_config(
        self, program, monkeypatch, tmp_path
    ):
        commands = []
        monkeypatch.setattr(program, "run_to_end", lambda run, *_, **__: commands.append(run))
        monkeypatch.setattr(program, "points", lambda *_: [program.Point(1.0, 100, 2.0)])
        monkeypatch.setattr(program.throughput, "interpreter", lambda _: sys.executable)
        arguments = "main_threads=2"
        for given in (arguments, arguments + program.SAME_RECIPE):
            run = program.Run("breakout", "cleanrl_envpool", 1, "training", 2.0, 9.0, 0, given)
            program.train(run, tmp_path, [2.0])
        published, same = (json.loads(command[-1]) for command in commands)
        assert "recipe" not in published
        assert same["main_threads"] == published["main_threads"] == 2
        assert same["recipe"] == {
            "total_steps": 1_024_000, "num_envs": 16, "steps": 128, "epochs": 4, "minibatches": 4,
            "gae_lambda": 0.95, "learning_rate": 1e-3, "falls": False, "clip": 0.1,
            "clip_value": True, "value_coef": 0.5, "network": "nature", "normalize": False,
        }  # fmt: skip
        football = program.recipe_of("football/empty_goal_close", "stable_baselines3")
        assert football == {
            "total_steps": 204_800, "num_envs": 16, "steps": 128, "epochs": 2, "minibatches": 8,
            "gae_lambda": 0.95, "learning_rate": 3.43e-4, "falls": False, "clip": 0.08,
            "clip_value": True, "value_coef": 0.5, "network": "nature", "normalize": False,
            "gamma": 0.993, "entropy_coef": 0.003, "max_grad_norm": 0.64,
        }  # fmt: skip
        assert program.recipe_of("box2d/lunar_lander_ppo", "stable_baselines3") == {
            "total_steps": 512_000, "num_envs": 16, "steps": 128, "epochs": 4, "minibatches": 32,
            "gae_lambda": 0.98, "learning_rate": 3e-4, "falls": False, "clip": 0.2,
            "clip_value": False, "value_coef": 0.5, "network": "mlp", "normalize": True,
            "gamma": 0.999, "entropy_coef": 0.01, "max_grad_norm": 0.5,
        }  # fmt: skip
        mujoco = program.recipe_of("mujoco/hopper_ppo", "stable_baselines3")
        assert (mujoco["steps"], mujoco["learning_rate"], mujoco["falls"]) == (256, 3e-4, True)
        for method in ("cleanrl_envpool", "stable_baselines3"):
            recipe = program.recipe_of("pong", method)
            assert (recipe["network"], recipe["normalize"]) == ("nips", True)

    @pytest.mark.parametrize(
        ("method", "task", "reason"),
        [
            ("sample_factory", "breakout", "sample_factory has its own recipe only"),
            (
                "cleanrl_envpool",
                "cartpole_ppo",
                "cartpole_ppo is not PPO on Atari, football, Box2D or MuJoCo",
            ),
            (
                "stable_baselines3",
                "atari/pong_a2c",
                "atari/pong_a2c is not PPO on Atari, football, Box2D or MuJoCo",
            ),
        ],
    )
    def test_cannot_have_every_recipe(self, program, monkeypatch, capsys, method, task, reason):
        arguments = ("--by", "training", "--methods", method, "--tasks", task, "--same-recipe")
        error = refused(program, monkeypatch, capsys, *arguments)
        assert error.endswith(f"error: --same-recipe: {reason}")

    @pytest.mark.parametrize("method", ["cleanrl_envpool", "stable_baselines3"])
    def test_with_another_network_has_no_recipe(self, program, monkeypatch, tmp_path, method):
        base = program.CONFIGS / "pong.yaml"
        other = f"base: {base}\nmodel: {{init_args: {{network: impala}}}}\n"
        (tmp_path / "pong.yaml").write_text(other)
        monkeypatch.setitem(program.recipe_of.__globals__, "CONFIGS", tmp_path)
        reason = f"pong has settings that the program of {method} does not"
        with pytest.raises(ValueError, match=reason):
            program.recipe_of("pong", method)


class TestTable:
    @pytest.fixture
    def runs(self, program):
        def run(method, seed):
            return program.Run("pong", method, seed, "training", 2.0, 9.0, 0, "")

        def curve(*points):
            return [program.Point(*point) for point in points]

        return {
            run("hts", 1): curve((1.0, 100, 0.0), (2.0, 200, 1.0), (3.0, 300, 2.0)),
            run("hts", 2): curve((1.5, 150, 1.0), (4.5, 450, 2.0)),
            run("hts", 3): curve((1.0, 100, 0.0), (9.0, 900, 1.5)),
            run("impala", 1): curve((1.0, 100, 0.0)),
        }

    def test_has_medians_and_ranges_and_a_dash_where_a_score_was_not_reached(self, program, runs):
        _, _, hts, impala = program.table(runs, [1.0, 2.0]).splitlines()
        assert hts == (
            "| pong | hts | 3 | 2.00 (1.50 to 9.00) | 200 (150 to 900) "
            "| 4.50 (3.00 to -) | 450 (300 to -) | 2 (1.5 to 2) | 2 (1.5 to 2) |"
        )
        assert impala == "| pong | impala | 1 | - | - | - | - | 0 | 0 |"

    def test_without_scores_has_the_best_and_the_last_one(self, program, runs):
        fell = {run: [*curve, program.Point(10.0, 990, 0.25)] for run, curve in runs.items()}
        head, _, hts, impala = program.table(fell, []).splitlines()
        assert head == "| task | method | seeds | best | last |"
        assert hts == "| pong | hts | 3 | 2 (1.5 to 2) | 0.25 (0.25 to 0.25) |"
        assert impala == "| pong | impala | 1 | 0.25 | 0.25 |"

    def test_of_two_runs_has_the_worse_one(self, program, runs):
        two = {run: curve for run, curve in runs.items() if run.method == "hts" and run.seed > 1}
        *_, hts = program.table(two, [1.0]).splitlines()
        assert hts == (
            "| pong | hts | 2 | 9.00 (1.50 to 9.00) | 900 (150 to 900) "
            "| 1.5 (1.5 to 2) | 1.5 (1.5 to 2) |"
        )

    def test_bands_are_of_one_grid_on_which_a_run_that_ended_keeps_its_score(self, program):
        common_grid = sys.modules[program.Run.__module__].common_grid
        places = [np.array([1.0, 3.0]), np.array([2.0, 4.0])]
        scores = [np.array([0.0, 2.0]), np.array([1.0, 3.0])]
        grid, on_grid = common_grid(places, scores)
        assert (grid[0], grid[-1]) == (2.0, 4.0)
        assert on_grid[:, 0].tolist() == [1.0, 1.0]
        assert on_grid[:, -1].tolist() == [2.0, 3.0]

    def test_the_figure_shows_all_methods(self, program, runs, tmp_path):
        program.draw(runs, [1.0], tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size > 0


@pytest.mark.processes
@pytest.mark.thorough
def test_a_quick_run_by_training_has_a_row_and_a_figure(tmp_path):
    command = [sys.executable, FOLDER / "time_to_score.py", "--by", "training", "--quick"]
    subprocess.run([*command, "--output", tmp_path], check=True, capture_output=True)
    row = (tmp_path / "time_to_score.md").read_text().splitlines()[-1]
    assert row.startswith("| cartpole_ppo | hts | 1 |")
    assert (tmp_path / "time_to_score.png").exists()


HEAD = "task,method,seed,by,last_score,max_minutes,evaluation_frames,arguments,minutes,frames,score"


class TestScorePairs:
    """Scores 2, 8 and 1 times those of the other method: their product is 16, its root 2.52."""

    def told(self, tmp_path, *arguments):
        path = tmp_path / "time_to_score.csv"
        rows = [
            *("a,hts,1,training,inf,9,0,--x=1,1,10,9", "a,hts,1,training,inf,9,0,--x=1,2,20,6"),
            "a,hts,2,training,inf,9,0,--x=1 --data.timeout_s=900,2,20,8",
            *("a,hts,3,training,inf,9,0,--x=1,2,20,5", "a,hts,4,training,inf,9,0,--x=2,2,20,5"),
            *("a,hts,5,training,inf,9,0,--x=1,2,20,5", "a,ppo,5,training,inf,5,0,--x=1,2,20,5"),
            *("a,ppo,1,training,inf,5,0,--x=1,2,20,3", "a,ppo,2,training,inf,5,0,--x=1,2,20,1"),
            *("a,ppo,4,training,inf,5,0,--x=1,2,20,1", "b,ppo,1,training,inf,5,0,--x=1,2,20,1"),
            *("a,hts,6,training,5.0,9,0,--x=1,2,20,5", "a,ppo,6,training,5.0,5,0,--x=1,2,20,6"),
            *("c,hts,1,training,inf,9,0,--x=3,2,20,-9", "c,ppo,1,training,inf,5,0,--x=3,2,20,-20"),
        ]  # fmt: skip
        path.write_text("\n".join([HEAD, *rows]) + "\n")
        command = [sys.executable, FOLDER / "score_pairs.py", "--results", path, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def test_last_scores_are_compared_where_both_methods_have_the_task_and_the_seed(self, tmp_path):
        told = self.told(tmp_path, "--methods", "hts", "ppo", "--arguments=--x=1")
        *table, _, last = told.stdout.splitlines()
        assert table[2:] == ["| a | 1 | 6 | 3 |", "| a | 2 | 8 | 1 |", "| a | 5 | 5 | 5 |"]
        assert last == "2.52 (1.00 to 8.00) times the score; ahead in 2 of 3 pairs"

    def test_ratios_need_scores_above_0(self, tmp_path):
        told = self.told(tmp_path, "--methods", "hts", "ppo", "--arguments=--x=3")
        assert told.returncode == 1
        assert "| c | 1 | -9 | -20 |" in told.stdout
        assert told.stderr == "a score is not above 0, so their ratios tell nothing\n"

    def test_no_pair_is_told(self, tmp_path):
        told = self.told(tmp_path, "--methods", "hts", "seed_rl", "--arguments=--x=1")
        assert told.returncode == 1
        assert told.stderr.endswith("no task and seed has both of hts and seed_rl\n")
