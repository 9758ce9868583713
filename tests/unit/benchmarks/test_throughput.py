"""Throughput: what cannot be compared is refused, and a row computes where it is asked to."""

import sys
from types import SimpleNamespace

import pytest


@pytest.mark.parametrize("game", ["football/corner", "mujoco/Hopper-v5", "box2d/LunarLander-v3"])
def test_a_task_whose_config_is_ppos_is_refused_for_a2c(game, load, monkeypatch, capsys):
    program = load("throughput")
    monkeypatch.setattr(sys, "argv", ["throughput.py", "--games", "breakout", game])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith(f"--games {game}: the settings of its config are PPO's; --algorithm ppo")


@pytest.mark.parametrize("algorithm", ["a2c", "ppo"])
def test_stable_baselines3_computes_on_the_device_of_its_row(algorithm, load, monkeypatch, capsys):
    made = []

    class Model:
        def __init__(self, *_, **settings):
            made.append(settings)

        def learn(self, _, callback):
            while callback._on_step():
                callback._on_rollout_start()

    envs = SimpleNamespace(close=lambda: None)
    modules = {
        "": {"A2C": Model, "PPO": Model},
        ".common.callbacks": {"BaseCallback": object},
        ".common.env_util": {"make_atari_env": None, "make_vec_env": lambda *_, **__: envs},
        ".common.vec_env": dict.fromkeys(
            ("DummyVecEnv", "SubprocVecEnv", "VecEnv", "VecFrameStack", "VecNormalize")
        ),
    }
    for name, content in modules.items():
        module = SimpleNamespace(**content)
        monkeypatch.setitem(sys.modules, f"stable_baselines3{name}", module)
    peer, run = load("peer_stable_baselines3"), load("throughput").Run
    task = run("stable_baselines3", "cartpole", 4, 8, 0.0, algorithm, device="cuda:7")
    peer.measure_speed(vars(task))
    assert [settings["device"] for settings in made] == ["cuda:7"]
    assert float(capsys.readouterr().out) > 0
