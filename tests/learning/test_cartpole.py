"""CartPole is solved by all three algorithms, whatever the seed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.command_line import run

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("config", ["cartpole_ppo", "cartpole_a2c", "cartpole_pqn"])
def test_cartpole_is_balanced_for_475_steps_and_more(config, seed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(
        "fit", f"--config={CONFIGS / config}.yaml", f"--seed_everything={seed}",
        "--data.num_actors=0", "--trainer.enable_progress_bar=false",
    )  # fmt: skip
    score = re.search(r"final score: +(\S+)", capsys.readouterr().out)
    assert float(score[1]) >= 475
