"""CartPole is solved by all three algorithms, by A2C with four of five seeds or more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.command_line import run

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("config", "seeds"), [("cartpole_ppo", 5), ("cartpole_a2c", 4), ("cartpole_pqn", 5)]
)
def test_cartpole_is_balanced_for_475_steps_and_more(config, seeds, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scores = []
    for seed in range(1, 6):
        run(
            "fit", f"--config={CONFIGS / config}.yaml", f"--seed_everything={seed}",
            "--data.num_actors=0", "--trainer.enable_progress_bar=false",
        )  # fmt: skip
        score = re.search(r"final score: +(\S+)", capsys.readouterr().out)
        scores.append(float(score[1]))
    assert sum(score >= 475 for score in scores) >= seeds, scores
