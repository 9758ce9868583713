"""Every config makes a run that fits its environment; one of Atari and one of football are run."""

import sys
from pathlib import Path

import pytest
import torch
import yaml

from hts_torchrl import Impala
from hts_torchrl.cli.command_line import HTSCommandLine
from tests.command_line import refused, run

CONFIGS = Path(__file__).parents[2] / "configs"
BASES = {
    "atari/a2c.yaml",
    "atari/ppo.yaml",
    "atari/pqn.yaml",
    "football/ppo.yaml",
    "mujoco/ppo.yaml",
}
OVERLAYS = {f"baselines/{name}.yaml" for name in ("synchronous", "impala", "seed_rl")}
NAMES = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml"))
RUNS = [name for name in NAMES if name not in BASES | OVERLAYS]
# The others differ from these in the names of games and scenarios.
FIRST = {
    *("atari/breakout_a2c.yaml", "atari/breakout_ppo.yaml", "atari/pong_pqn.yaml"),
    "football/corner.yaml",
}
LOADED = [
    pytest.param(name, marks=pytest.mark.thorough if "/" in name and name not in FIRST else ())
    for name in RUNS
]
FOOTBALL = [each for each in LOADED if each.values[0].startswith("football/")]


@pytest.fixture
def line(monkeypatch, tmp_path, request):
    """What the command line makes of a config, before it runs."""
    folder = request.param.partition("/")[0]
    if folder in ("box2d", "minatar", "mujoco"):
        pytest.importorskip({"box2d": "Box2D"}.get(folder, folder))
    lines = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HTSCommandLine, "_run_subcommand", lambda line, _: lines.append(line))
    run("fit", *(f"--config={CONFIGS / name}" for name in request.param.split()))
    return lines[-1]


@pytest.mark.parametrize("line", LOADED, indirect=True)
def test_a_config_makes_a_run_that_fits_its_environment(line):
    data, learner = line.datamodule, line.model
    learner.prepare_policy(data)
    schedule = data.schedule
    steps = schedule.steps_per_round
    unroll = getattr(learner, "unroll", None)
    assert unroll is None or steps % unroll == 0
    parts = getattr(learner, "minibatches", 1)
    assert schedule.frames_per_round % parts == 0
    assert data.evaluation_frames < schedule.frames_per_round * schedule.num_rounds


@pytest.mark.parametrize("config", ["cartpole_a2c", "cartpole_ppo", "cartpole_pqn"])
def test_cartpoles_share_an_executor_however_many_there_are(config, monkeypatch, tmp_path):
    lines = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HTSCommandLine, "_run_subcommand", lambda line, _: lines.append(line))
    run("fit", f"--config={CONFIGS / config}.yaml", "--data.num_envs=4")
    pool = lines[-1].datamodule.pool
    assert (pool.num_envs, pool.num_executors, pool.batch_size) == (4, 1, 4)


@pytest.mark.parametrize(
    "line",
    [f"{task} baselines/synchronous.yaml" for task in ("football/corner.yaml", "pong.yaml")],
    indirect=True,
)
def test_the_synchronous_baseline_differs_from_its_task_in_who_waits_alone(line):
    pool, schedule = line.datamodule.pool, line.datamodule.schedule
    assert (pool.step_barrier, schedule.delay) == (True, 0)
    assert pool.batch_size == pool.num_envs == 16
    overlay = yaml.safe_load((CONFIGS / "baselines" / "synchronous.yaml").read_text())
    assert list(overlay) == ["data"]


@pytest.mark.parametrize(
    ("line", "collection", "learning_rate"),
    [
        ("football/corner.yaml baselines/impala.yaml", "actors", 3.43e-4),
        ("atari/breakout_a2c.yaml baselines/seed_rl.yaml", "server", 7e-4),
    ],
    indirect=["line"],
)
def test_the_asynchronous_baselines_keep_the_settings_of_their_task(
    line, collection, learning_rate
):
    learner, data = line.model, line.datamodule
    assert (type(learner), data.collection) == (Impala, collection)
    assert (data.schedule.num_envs, data.schedule.steps_per_round) == (16, 32)
    assert (learner.network, learner.learning_rate) == ("nature", learning_rate)


@pytest.mark.parametrize("name", RUNS)
def test_the_name_of_a_run_is_that_of_its_file(name):
    content = yaml.safe_load((CONFIGS / name).read_text())
    assert content["name"] == Path(name).stem


@pytest.mark.parametrize("algorithm", ["a2c", "ppo"])
def test_the_games_of_the_paper_are_all_there(algorithm):
    games = {
        *("bank_heist", "beam_rider", "breakout", "frostbite", "jamesbond", "krull"),
        *("kung_fu_master", "ms_pacman", "qbert", "seaquest", "space_invaders", "star_gunner"),
    }
    assert games <= {name.split("/")[-1].removesuffix(f"_{algorithm}.yaml") for name in NAMES}


def test_the_football_tasks_of_the_paper_are_all_there():
    tasks = {
        *("empty_goal_close", "empty_goal", "run_to_score", "run_to_score_with_keeper"),
        *("pass_and_shoot_with_keeper", "run_pass_and_shoot_with_keeper", "3_vs_1_with_keeper"),
        *("corner", "counterattack_easy", "counterattack_hard", "single_goal_versus_lazy"),
        "11_vs_11_easy_stochastic",
    }
    assert {f"football/{task}.yaml" for task in tasks} <= set(RUNS)


@pytest.mark.parametrize("line", FOOTBALL, indirect=True)
def test_a_football_config_plays_the_scenario_of_its_name(line):
    (adapter,) = line.datamodule.env.group([0]).adapters
    assert adapter.scenario.removeprefix("academy_") == line.config["fit"]["name"]


@pytest.mark.parametrize("line", ["football/corner.yaml"], indirect=True)
def test_ppo_on_football_has_the_settings_of_the_paper(line):
    learner, data = line.model, line.datamodule
    schedule = data.schedule
    assert (schedule.num_envs, schedule.steps_per_round, schedule.delay) == (16, 128, 1)
    assert (learner.optimizer_name, learner.learning_rate, learner.epsilon) == (
        "adam",
        3.43e-4,
        1e-5,
    )
    assert learner.learning_rate_decay
    assert (learner.gamma, learner.gae_lambda) == (0.993, 0.95)
    assert (learner.entropy_coef, learner.value_coef) == (0.003, 0.5)
    assert (learner.epochs, learner.minibatches, learner.clip) == (2, 8, 0.08)
    assert learner.clip_value
    assert line.trainer.gradient_clip_val == 0.64
    assert (data.evaluation_frames, data.evaluation_episodes) == (100_000, 10)
    assert (data.env.rewards, data.env.frame_stack) == ("scoring,checkpoints", 4)


@pytest.mark.parametrize("line", ["atari/breakout_a2c.yaml"], indirect=True)
def test_a2c_on_atari_has_the_settings_of_the_paper(line):
    learner, schedule = line.model, line.datamodule.schedule
    assert (schedule.num_envs, schedule.steps_per_round, schedule.delay) == (16, 5, 1)
    assert (learner.optimizer_name, learner.learning_rate, learner.epsilon) == (
        "rmsprop",
        7e-4,
        1e-5,
    )
    assert (learner.gamma, learner.entropy_coef, learner.value_coef) == (0.99, 0.01, 0.5)
    assert line.trainer.gradient_clip_val == 0.5


def test_an_atari_config_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(
        *("fit", "--config", str(CONFIGS / "atari" / "breakout_a2c.yaml")),
        *("--data.num_actors=0", "--data.num_envs=4", "--data.frames_per_batch=20"),
        *("--data.total_frames=40", "--data.evaluation_episodes=1", "--data.env.max_frames=80"),
        *("--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"),
        "--trainer.log_every_n_steps=1",
    )
    assert "final score" in capsys.readouterr().out
    path = tmp_path / "runs" / "breakout_a2c" / "version_0" / "checkpoints" / "last.ckpt"
    assert torch.load(path, weights_only=True)["updates"] == 2


@pytest.mark.thorough
def test_a_football_config_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(
        *("fit", "--config", str(CONFIGS / "football" / "empty_goal_close.yaml")),
        *(
            "--data.num_actors=0",
            "--data.num_envs=2",
            "--data.envs_per_executor=2",
            "--data.frames_per_batch=16",
        ),
        *("--data.total_frames=32", "--data.evaluation_episodes=1"),
        *("--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"),
        "--trainer.log_every_n_steps=1",
    )
    assert "final score" in capsys.readouterr().out
    path = tmp_path / "runs" / "empty_goal_close" / "version_0" / "checkpoints" / "last.ckpt"
    assert torch.load(path, weights_only=True)["updates"] == 2


def test_a_scenario_that_there_is_not_ends_with_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = str(CONFIGS / "football" / "corner.yaml")
    message = refused(capsys, "fit", "--config", config, "--data.env.scenario=emty_goal")
    assert message.startswith("football has no scenario 'emty_goal'; near to it: empty_goal")


def test_football_without_its_extra_ends_with_the_line_that_installs_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "hts_torchrl.envs.football.envpool_engine", raising=False)
    monkeypatch.delattr("hts_torchrl.envs.football.envpool_engine", raising=False)
    monkeypatch.setitem(sys.modules, "envpool", None)
    message = refused(capsys, "fit", "--config", str(CONFIGS / "football" / "corner.yaml"))
    assert message.endswith("pip install 'hts-torchrl[football]'")
