"""Folders as ``fit`` leaves them, with figures that the test names."""

import csv

import pytest
import yaml

ENV = {"class_path": "hts_torchrl.GymEnvs", "init_args": {"id": "CartPole-v1", "kwargs": {}}}


@pytest.fixture
def write_run(tmp_path):
    """Writes a run with an evaluation every 100 frames and minute, and returns its folder.

    One that goes on from another has its first evaluation after ``begin`` of them.
    """

    def write(folder, scores, *, seed=1, name="mine", env=ENV, rows=(), begin=0, **model):
        directory = tmp_path / folder
        directory.mkdir(parents=True)
        config = {
            "seed_everything": seed,
            "name": name,
            "model": {"class_path": "hts_torchrl.PPO", "init_args": {"clip": 0.1, **model}},
            "data": {
                "env": env,
                "total_frames": 100 * (begin + len(scores)),
                "frames_per_batch": 50,
            },
            "trainer": {"max_epochs": 1},
            "ckpt_path": "checkpoints/last.ckpt" if begin else None,
        }
        (directory / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        evaluations = [
            {"eval/score": score, "eval/frames": 100 * place, "eval/minutes": float(place)}
            for place, score in enumerate(scores, start=begin + 1)
        ]
        all_rows = [*evaluations, *rows]
        with (directory / "metrics.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, sorted({key for row in all_rows for key in row}))
            writer.writeheader()
            writer.writerows(all_rows)
        return directory

    return write
