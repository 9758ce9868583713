"""Throughput: what cannot be compared is refused, and a row computes where it is asked to."""

import re
import sys
from dataclasses import fields
from pathlib import Path
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


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        (["envpool workers=2"], "--settings: envpool has no workers"),
        (
            ["loop", "loop actors=2 delay=0"],
            "--settings: loop has no delay",
        ),
        (["trainer speed=9"], "--settings: trainer speed=9; such as"),
        (["trainer", "loop", "trainer workers=1"], "two rows are the same: trainer"),
        (["envpool", "loop actors=2", "loop actors=2"], "two rows are the same: loop actors=2"),
    ],
)
def test_settings_without_effect_and_equal_rows_are_refused(
    settings, wrong, load, monkeypatch, capsys
):
    program = load("throughput")
    monkeypatch.setattr(sys, "argv", ["throughput.py", "--settings", *settings])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2
    assert f"error: {wrong}" in capsys.readouterr().err.splitlines()[-1]


def test_a_row_has_the_settings_that_its_program_reads(load):
    throughput = load("throughput")
    settings = {field.name for field in fields(throughput.Run)[6:]}
    for program in {row.program for row in throughput.ROWS.values()}:
        text = (Path(throughput.__file__).parent / program).read_text()
        rows = [row.settings for row in throughput.ROWS.values() if row.program == program]
        read = settings & set(re.findall(r'run\["(\w+)"\]', text))
        assert set(" ".join(rows).split()) - {"source"} == read


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
        ".common.torch_layers": {"BaseFeaturesExtractor": object},
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
