"""fit, validate and play from the first argument to the last file."""

import contextlib
import csv
import gc
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from safetensors import safe_open

from hts_torchrl import ConfigurationError, load_policy
from tests.command_line import A2C, CARTPOLE, Valued, files, refused, run

PPO = ["--model=PPO", "--model.learning_rate_decay=true"]
FIRST = ["training", "environments", "frames", "device", "seed", "writes to"]
LAST = [
    *("trained", "final score", "best", "checkpoint", "log", "learning curve", "trace"),
    *("continue", "play", "export"),
]


def told_by(out):
    """What ``fit`` printed, by the label of each line."""
    lines = (line.split(":", 1) for line in out.splitlines() if re.match(r"[a-z ]{3,14}: ", line))
    return {label: text.strip() for label, text in lines}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """The folder in which ``fit`` ran once, what it printed, and what Lightning logged."""
    directory = tmp_path_factory.mktemp("fitted")
    out = (directory / "stdout").open("w")
    handler = logging.FileHandler(directory / "log")
    loggers = [logging.getLogger(f"lightning.{name}") for name in ("pytorch", "fabric")]
    for logger in loggers:
        logger.addHandler(handler)
    with contextlib.chdir(directory), out, contextlib.redirect_stdout(out):
        run("fit", *CARTPOLE, *PPO, "--name=mine", "--data.evaluation_frames=32", "--trace=1")
    for logger in loggers:
        logger.removeHandler(handler)
    handler.close()
    return directory


@pytest.fixture
def run_directory(fitted, monkeypatch):
    monkeypatch.chdir(fitted)
    return fitted / "runs" / "mine" / "version_0"


class TestFit:
    def test_leaves_everything_in_one_folder(self, run_directory):
        found = files(run_directory)
        assert {
            "checkpoints/best.ckpt",
            "checkpoints/last.ckpt",
            "config.yaml",
            "hparams.yaml",
            "learning_curve.png",
            "metrics.csv",
            "trace.json",
        } <= found
        assert any("events.out.tfevents" in name for name in found)

    def test_tells_what_trains_first_and_score_and_files_last(self, fitted, run_directory):
        told = told_by((fitted / "stdout").read_text())
        assert list(told)[:6] == FIRST
        assert told["training"] == "PPO on GymEnvs(CartPole-v1), network mlp"
        assert told["environments"] == "4 (in this process)"
        assert told["frames"] == "96 in 3 rounds of 32"
        assert told["device"] == "cpu, precision 32-true"
        assert told["writes to"] == told["log"] == "runs/mine/version_0"
        assert list(told)[6:] == LAST
        assert told["trained"].startswith("96 frames in 0.")
        assert float(told["final score"].split()[0]) > 5
        assert told["final score"].endswith(" (mean of 2 games, sampled actions)")
        for name in ("checkpoint", "best", "learning curve", "trace"):
            assert (fitted / told[name]).is_file()
        assert (fitted / told["log"]).samefile(run_directory)

    def test_tells_after_how_many_frames_a_score_is_not_that_of_the_last_weights(
        self, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.chdir(tmp_path)
        run("fit", *CARTPOLE, *A2C, "--data.evaluation_frames=64")  # of 96
        told = told_by(capsys.readouterr().out)
        assert "final score" not in told
        assert told["last score"].endswith(" (mean of 2 games, sampled actions, after 64 frames)")

    @pytest.mark.parametrize(
        ("in_hardware", "device"),
        [
            (True, "cpu, precision bf16-mixed"),
            (
                False,
                "cpu, precision bf16-mixed (emulated by this processor: 32-true is much faster)",
            ),
        ],
    )
    def test_tells_where_bfloat16_is_emulated(
        self, in_hardware, device, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("hts_torchrl.cli.terminal.bfloat16_in_hardware", lambda: in_hardware)
        run("fit", *CARTPOLE, *A2C, "--trainer.precision=bf16-mixed")
        assert told_by(capsys.readouterr().out)["device"] == device

    def test_leaves_out_what_lightning_tells_in_every_run(self, fitted):
        assert (fitted / "log").read_text() == ""

    @pytest.mark.usefixtures("run_directory")
    def test_tells_commands_that_go_on_with_it(self, fitted, capsys):
        told = told_by((fitted / "stdout").read_text())
        for name in ("continue", "play", "export"):
            program, *arguments = shlex.split(told[name])
            assert program == "hts-torchrl"
            run(*arguments)
        out = capsys.readouterr().out
        assert told_by(out)["trained"].startswith("192 frames in 0.")
        assert told_by(out)["writes to"] == "runs/mine/version_1"
        assert "\nvideo of " in out
        assert "\npolicy after " in out

    # Of Lightning, because the run that goes on has no Timer.
    @pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
    @pytest.mark.parametrize(
        ("limits", "flags"),
        [
            ({"max_steps": 1, "max_time": "01:00:00:00"}, {"max_steps": -1, "max_time": "null"}),
            ({"max_epochs": -1, "max_steps": 1}, {"max_epochs": 1, "max_steps": -1}),
            ({"limit_train_batches": 1}, {"limit_train_batches": 1.0}),
        ],
    )
    def test_tells_how_a_run_goes_on_that_ended_at_a_limit(
        self, limits, flags, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.chdir(tmp_path)
        run("fit", *CARTPOLE, *A2C, *(f"--trainer.{name}={each}" for name, each in limits.items()))
        told = told_by(capsys.readouterr().out)
        assert told["trained"].startswith("32 frames in 0.")
        _, *arguments = shlex.split(told["continue"])
        assert arguments[3:] == [f"--trainer.{name}={each}" for name, each in flags.items()]
        run(*arguments)
        assert told_by(capsys.readouterr().out)["trained"].startswith("96 frames in 0.")

    def test_tells_that_early_stopping_would_end_a_longer_run_too(
        self, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.chdir(tmp_path)
        stopping = [
            "--trainer.callbacks=EarlyStopping",
            "--trainer.callbacks.monitor=eval/score",
            "--trainer.callbacks.mode=max",
            "--trainer.callbacks.stopping_threshold=0",
        ]
        run("fit", *CARTPOLE, *A2C, "--data.evaluation_frames=32", *stopping)
        told = told_by(capsys.readouterr().out)
        assert told["trained"].startswith("32 frames in 0.")
        assert told["stopped by"].startswith("EarlyStopping(monitor=eval/score); a longer run too")
        _, *arguments = shlex.split(told["continue"])
        run(*arguments)
        assert told_by(capsys.readouterr().out)["trained"].startswith("64 frames in 0.")

    def test_tells_that_a_timer_of_the_users_would_end_a_longer_run_too(
        self, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.chdir(tmp_path)
        timer = ["--trainer.callbacks=Timer", "--trainer.callbacks.duration={microseconds: 1}"]
        run("fit", *CARTPOLE, *A2C, "--trainer.max_time=01:00:00:00", *timer)
        told = told_by(capsys.readouterr().out)
        assert told["stopped by"].startswith("Timer; a longer run too")
        assert "max_time" not in told["continue"]  # by which it would not go on

    def test_that_is_to_make_no_step_trains_nothing(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        run("fit", *CARTPOLE, *A2C, "--model.learning_rate_decay=true", "--trainer.max_steps=0")
        assert told_by(capsys.readouterr().out)["trained"].startswith("0 frames in 0.")

    def test_writes_the_figures(self, run_directory):
        with (run_directory / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert rows[0].keys() >= {
            *("train/frames", "train/minutes", "steps_per_second", "wait/learner"),
            *("loss/policy", "loss/value", "loss/entropy", "loss/clip_fraction"),
            *("eval/score", "eval/score_std", "eval/episode_length", "eval/frames"),
            *("epoch", "step"),
        }
        assert [float(row["eval/frames"]) for row in rows if row["eval/frames"]] == [32, 64, 96]

    def test_best_is_the_checkpoint_of_the_best_evaluation(self, run_directory):
        with (run_directory / "metrics.csv").open() as file:
            scores = [float(row["eval/score"]) for row in csv.DictReader(file) if row["eval/score"]]
        best = torch.load(run_directory / "checkpoints" / "best.ckpt", weights_only=True)
        assert best["updates"] == scores.index(max(scores)) + 1

    def test_last_is_the_checkpoint_of_the_last_evaluation(self, run_directory):
        last = torch.load(run_directory / "checkpoints" / "last.ckpt", weights_only=True)
        assert last["updates"] == 3

    def test_writes_a_config_that_repeats_the_run(self, fitted, run_directory):
        run("fit", "--config", str(run_directory / "config.yaml"), "--name=again")
        weights = [
            torch.load(path / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
            for path in (run_directory, fitted / "runs" / "again" / "version_0")
        ]
        assert weights[0].keys() == weights[1].keys()
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    def test_a_second_run_has_a_folder_of_its_own(self, fitted):
        command = ["fit", *CARTPOLE, *A2C, "--name=second"]
        with contextlib.chdir(fitted):
            run(*command)
            run(*command)
        assert {path.name for path in (fitted / "runs" / "second").iterdir()} == {
            "version_0",
            "version_1",
        }

    def test_says_if_the_traced_round_never_came(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        run("fit", *CARTPOLE, *A2C, "--trace=3")
        assert "trace:          the run has no such round" in capsys.readouterr().out
        assert "trace.json" not in str(files(tmp_path))
        assert "round_index=-1 of a trace" in refused(capsys, "fit", *CARTPOLE, *A2C, "--trace=-1")

    @pytest.mark.parametrize(
        ("setting", "updates"),
        [
            ("max_steps=2", 2),
            pytest.param(
                *("check_val_every_n_epoch=2", 3),
                marks=pytest.mark.filterwarnings("ignore:check_val_every_n_epoch=2:UserWarning"),
            ),
            ("limit_val_batches=0", 3),
        ],
    )
    def test_leaves_last_ckpt_however_it_ends_and_names_only_what_is_there(
        self, setting, updates, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.chdir(tmp_path)
        run("fit", *CARTPOLE, *A2C, "--data.evaluation_frames=96", f"--trainer.{setting}")
        told = told_by(capsys.readouterr().out)
        last = Path(told["checkpoint"])
        assert last.name == "last.ckpt"
        assert torch.load(last, weights_only=True)["updates"] == updates
        for name in told.keys() & {"checkpoint", "best", "log", "learning curve"}:
            assert Path(told[name]).exists()

    def test_leaves_the_best_score_in_last_ckpt_too(self, tmp_path, monkeypatch, capsys):
        """Else a run that goes on in this folder would take a lower one for the best."""
        monkeypatch.chdir(tmp_path)
        run("fit", *CARTPOLE, *A2C)
        told = told_by(capsys.readouterr().out)
        saved = torch.load(told["checkpoint"], weights_only=True)["callbacks"]
        [best] = [state for name, state in saved.items() if name.startswith("BestCheckpoint")]
        score = float(told["final score"].split()[0])
        assert float(best["best_model_score"]) == pytest.approx(score, abs=0.01)

    def test_goes_on_from_a_checkpoint(self, run_directory):
        best = str(run_directory / "checkpoints" / "best.ckpt")
        run("fit", *CARTPOLE, *PPO, "--name=resumed", f"--ckpt_path={best}")
        resumed = run_directory.parent.parent / "resumed" / "version_0" / "checkpoints"
        assert torch.load(resumed / "last.ckpt", weights_only=True)["updates"] == 3


class TestLoggers:
    """Wherever the logs go, a run's files lie in one folder."""

    @pytest.mark.parametrize(
        ("logger", "folder"),
        [("tests.command_line.ForeignLogger", "store/experiment/run-7"), ("false", ".")],
    )
    def test_files_of_a_run_share_the_folder_above_its_checkpoints(
        self, logger, folder, tmp_path, monkeypatch
    ):
        monkeypatch.chdir(tmp_path)
        run("fit", *CARTPOLE, *A2C, f"--trainer.logger={logger}", "--trace=1")
        kept = {name for name in files(tmp_path) if not name.endswith((".digests", ".previous"))}
        names = ["checkpoints/best.ckpt", "checkpoints/last.ckpt"]
        names += ["config.yaml", "learning_curve.png", "trace.json"]
        assert kept == {str(Path(folder, name)) for name in names}

    def test_a_config_of_the_users_own_is_not_written_over(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "config.yaml").write_text("name: mine # and why\n")
        fit = ["fit", *CARTPOLE, *A2C, "--config=config.yaml", "--trainer.logger=false"]
        message = refused(capsys, *fit)
        assert message.endswith(
            "or name another folder (--trainer.default_root_dir, or that of a logger)"
        )
        assert files(tmp_path) == {"config.yaml"}
        assert (tmp_path / "config.yaml").read_text() == "name: mine # and why\n"

    def test_a_run_leaves_the_folder_of_one_that_began_meanwhile(self, tmp_path, monkeypatch):
        """As in an array of jobs; on a network's file system a folder is seen late."""
        monkeypatch.chdir(tmp_path)
        others = Path("runs", "run", "version_0", "metrics.csv")
        others.parent.mkdir(parents=True)
        others.write_text("another run's")
        for logger in (TensorBoardLogger, CSVLogger):
            monkeypatch.setattr(logger, "_get_next_version", lambda _: 0)  # finds none
        run("fit", *CARTPOLE, *A2C)
        run("fit", *CARTPOLE, *A2C)
        assert files(others.parent) == {"metrics.csv"}
        assert others.read_text() == "another run's"
        names = {"checkpoints/last.ckpt", "config.yaml", "metrics.csv", "learning_curve.png"}
        for version in (1, 2):
            assert names < files(Path("runs", "run", f"version_{version}"))

    def test_a_run_that_writes_over_another_says_so(self, tmp_path, monkeypatch, recwarn):
        monkeypatch.chdir(tmp_path)
        fit = ["fit", *CARTPOLE, *A2C, "--trainer.logger=CSVLogger"]
        fit += ["--trainer.logger.save_dir=.", "--trainer.logger.version=one"]
        goes_on = "--ckpt_path=lightning_logs/one/checkpoints/last.ckpt"
        for arguments, replaced in (
            (fit, []),
            (fit, ["metrics.csv", "checkpoints/last.ckpt"]),
            (["validate", *fit[1:], goes_on], ["metrics.csv"]),
            ([*fit, goes_on], ["metrics.csv"]),
        ):
            run(*arguments)
            told = [str(recwarn.pop().message) for _ in range(len(recwarn))]
            assert [each for each in told if "of an earlier run" in each] == [
                f"lightning_logs/one/{file} is of an earlier run: this one writes over it"
                for file in replaced
            ]

    def test_so_does_one_that_writes_over_checkpoints_in_a_folder_of_the_users(
        self, tmp_path, monkeypatch, recwarn
    ):
        monkeypatch.chdir(tmp_path)
        last = "--trainer.callbacks=hts_torchrl.training.callbacks.LastCheckpoint"
        fit = ["fit", *CARTPOLE, *A2C, last, "--trainer.callbacks.dirpath=kept"]
        place = Path("kept/last.ckpt").resolve()
        for replaced in ([], [place]):
            run(*fit)
            told = [str(recwarn.pop().message) for _ in range(len(recwarn))]
            assert [each for each in told if "of an earlier run" in each] == [
                f"{file} is of an earlier run: this one writes over it" for file in replaced
            ]


class TestPlayedGames:
    """``validate``, ``test`` and ``predict`` play the games of the last evaluation."""

    def last_evaluation(self, run_directory):
        with (run_directory / "metrics.csv").open() as file:
            return [row for row in csv.DictReader(file) if row["eval/score"]][-1]

    @pytest.mark.parametrize(("command", "name"), [("validate", "eval"), ("test", "test")])
    def test_its_scores_are_told(self, command, name, run_directory, capsys):
        run(command, *CARTPOLE, *PPO, f"--ckpt_path={run_directory}/checkpoints/last.ckpt")
        # A number is the last word of its row of the table, but for a frame where rich draws one.
        lines = [line.strip("│ ").split() for line in capsys.readouterr().out.splitlines()]
        told = {line[0]: float(line[-1]) for line in lines if line and line[0][:5] == f"{name}/"}
        row = self.last_evaluation(run_directory)
        told.pop("eval/minutes", None)  # which went on from the evaluation to the checkpoint
        assert told.keys() - {"eval/frames"} == {
            f"{name}/{n}" for n in ("score", "score_std", "episode_length", "updates")
        }
        for key, value in told.items():
            assert value == pytest.approx(float(row[key.replace("test/", "eval/")]))

    def test_predict_tells_each_game(self, run_directory, capsys):
        run("predict", *CARTPOLE, *PPO, f"--ckpt_path={run_directory}/checkpoints/last.ckpt")
        told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("game ")]
        games = [re.fullmatch(r"game (\d): score (\d+), (\d+) steps", line) for line in told]
        assert [game[1] for game in games] == ["0", "1"]
        assert all(game[2] == game[3] for game in games)  # CartPole gives 1 a step
        scores = [float(game[2]) for game in games]
        assert np.mean(scores) == float(self.last_evaluation(run_directory)["eval/score"])


class TestValidate:
    def test_needs_no_config_beside_the_checkpoint(self, run_directory, capsys):
        run("validate", f"--ckpt_path={run_directory}/checkpoints/last.ckpt", "--name=alone")
        assert "eval/score" in capsys.readouterr().out

    def test_takes_the_checkpoint_before_a_damaged_one(self, run_directory, tmp_path, capsys):
        shutil.copytree(run_directory, tmp_path / "copy")
        last = tmp_path / "copy" / "checkpoints" / "last.ckpt"
        last.write_bytes(last.read_bytes()[:1000])
        with pytest.warns(UserWarning, match=r"last\.ckpt is damaged: resuming from"):
            run("validate", f"--ckpt_path={last}", "--name=before")
        assert "eval/score" in capsys.readouterr().out
        last.with_name("last.ckpt.previous").unlink()
        message = refused(capsys, "validate", f"--ckpt_path={last}")
        assert message.startswith(f"--ckpt_path={last}: this is damaged")

    @pytest.mark.parametrize("command", ["validate", "play"])
    def test_refuses_the_checkpoint_of_another_network(self, command, run_directory, capsys):
        path = run_directory / "checkpoints" / "last.ckpt"
        pendulum = ["--data.env.id=Pendulum-v1", f"--ckpt_path={path}"]
        message = refused(capsys, command, *CARTPOLE, *PPO, *pendulum)
        assert message.startswith("the checkpoint is of another network: its policy.")


class TestExport:
    def test_writes_the_policy_of_the_checkpoint(self, run_directory, tmp_path, capsys):
        checkpoint, output = run_directory / "checkpoints" / "last.ckpt", tmp_path / "policies"
        output = output / "mine.safetensors"
        run("export", f"--ckpt_path={checkpoint}", f"--output={output}")
        assert capsys.readouterr().out == f"policy after 3 updates: {output}\n"
        trained = torch.load(checkpoint, weights_only=True)["state_dict"]
        exported = load_policy(output).state_dict()
        assert trained.keys() == {f"policy.{name}" for name in exported}
        assert all(torch.equal(trained[f"policy.{name}"], exported[name]) for name in exported)
        with safe_open(output, "pt") as file:
            about = json.loads(file.metadata()["about"])
        assert about == {
            "environment": {
                "factory": "GymEnvs",
                "id": "CartPole-v1",
                "kwargs": {},
                "imports": [],
            },
            "updates": 3,
        }

    def test_writes_an_onnx_file_that_answers_as_the_policy(self, run_directory, tmp_path, capsys):
        runtime = pytest.importorskip("onnxruntime")
        checkpoint, output = run_directory / "checkpoints" / "last.ckpt", tmp_path / "mine.onnx"
        run("export", f"--ckpt_path={checkpoint}", f"--output={output}")
        told = f"policy after 3 updates: {output} (its answers differ from the policy's by "
        assert capsys.readouterr().out.startswith(told)
        run("export", f"--ckpt_path={checkpoint}", f"--output={tmp_path}/same.safetensors")
        policy = load_policy(tmp_path / "same.safetensors")
        observation = torch.linspace(-1, 1, 20).reshape(5, 4)
        with torch.no_grad():
            parameters, value = policy.heads({"observation": observation})
        given = {"observation": observation.numpy()}
        logits, own_value, _ = runtime.InferenceSession(output).run(None, given)
        torch.testing.assert_close(torch.from_numpy(logits), parameters["logits"])
        torch.testing.assert_close(torch.from_numpy(own_value), value)

    def test_a_policy_of_the_users_own_needs_its_module(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        own = "--model.policy=tests.command_line.Valued"
        run("fit", *CARTPOLE, *A2C, own)
        run("export", *CARTPOLE, *A2C, own, "--ckpt_path=runs/run/version_0/checkpoints/last.ckpt")
        with pytest.raises(ConfigurationError, match="a policy of your own"):
            load_policy("policy.safetensors")
        assert isinstance(load_policy("policy.safetensors", Valued()), Valued)

    def test_a_wrong_output_is_refused(self, run_directory, capsys):
        arguments = ["export", f"--ckpt_path={run_directory}/checkpoints/last.ckpt"]
        message = refused(capsys, *arguments, "--output=policy.pt")
        assert message == "--output=policy.pt: a name that ends in .safetensors or .onnx is needed"
        message = refused(capsys, *arguments, "--output=/dev/null/policy.safetensors")
        assert message.startswith("--output=/dev/null/policy.safetensors: cannot write the policy")


class TestPlay:
    # imageio's reader of videos, which only the test uses, leaves its pipes open.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    @pytest.mark.parametrize("suffix", ["gif", "mp4"])
    def test_writes_a_video_of_a_game(self, suffix, run_directory, tmp_path, capsys):
        video = tmp_path / "new" / f"game.{suffix}"
        path = run_directory / "checkpoints" / "last.ckpt"
        run("play", *CARTPOLE, *PPO, f"--ckpt_path={path}", f"--video={video}")
        told = int(capsys.readouterr().out.split("video of ")[1].split()[0])
        with imageio.get_reader(video) as reader:
            frames = [np.asarray(frame) for frame in reader]
        assert frames[0].shape[:2] == (400, 600)
        assert not np.array_equal(frames[0], frames[-2])
        # A GIF shows pictures that are equal as one, longer.
        assert 5 < len(frames) <= told
        assert suffix == "gif" or len(frames) == told

    # imageio does not close its pipe to an ffmpeg that has ended.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    @pytest.mark.parametrize(
        ("suffix", "reason"),
        [("gif", "No space left on device"), ("mp4", "ffmpeg could not write it, and tells above")],
    )
    def test_a_video_that_cannot_be_written_ends_with_one_line(
        self, suffix, reason, run_directory, tmp_path, capsys
    ):
        play = ["play", f"--ckpt_path={run_directory}/checkpoints/last.ckpt"]
        folder = tmp_path / f"folder.{suffix}"
        folder.mkdir()
        assert refused(capsys, *play, f"--video={folder}") == f"--video={folder}: this is a folder"
        full = tmp_path / f"full.{suffix}"
        full.symlink_to("/dev/full")
        assert refused(capsys, *play, f"--video={full}").startswith(f"--video={full}: {reason}")
        gc.collect()  # here, and not within another test

    def test_refuses_another_kind_of_video(self, run_directory, capsys):
        path = run_directory / "checkpoints" / "last.ckpt"
        message = refused(
            capsys, "play", *CARTPOLE, *PPO, f"--ckpt_path={path}", "--video=game.avi"
        )
        assert message == "--video=game.avi: a name that ends in .mp4 or .gif is needed"


def test_a_policy_of_the_users_own_is_trained_validated_and_played(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    policy = ["--model=PPO", "--model.policy=tests.command_line.Valued"]
    run("fit", *CARTPOLE, *policy, "--name=own")
    path = "runs/own/version_0/checkpoints/last.ckpt"
    assert "policy.module.0.module.weight" in torch.load(path, weights_only=True)["state_dict"]
    for subcommand in (["validate"], ["play", "--video=own.gif"]):
        run(*subcommand, *CARTPOLE, *policy, f"--ckpt_path={path}")
    out = capsys.readouterr().out
    assert "eval/score" in out
    assert "own.gif" in out


def test_the_printed_config_holds_every_default(capsys):
    with pytest.raises(SystemExit) as left:
        run("fit", *CARTPOLE, *A2C, "--print_config")
    assert left.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["init_args"]["gae_lambda"] == 1.0
    assert printed["data"]["envs_per_executor"] == 1
    assert printed["trainer"]["max_epochs"] == 1


def has_ended(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


TWO_RANKS = ["--trainer.devices=2", "--trainer.strategy=ddp"]


@contextlib.contextmanager
def endless_fit(folder, *arguments, frames=100_000_000, folders=()):
    """A run as a program of its own; yields it, and kills what it leaves."""
    flags = [*CARTPOLE, *A2C, "--data.num_actors=1", "--data.envs_per_executor=2", *arguments]
    endless = [f"--data.total_frames={frames}", "--trainer.enable_progress_bar=true"]
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "hts_torchrl.cli", "fit", *flags, *endless],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*folders, *sys.path])},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            # A shell starts its background commands, and so these tests, with Ctrl-C ignored.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


THREADED = """
import threading
from gymnasium.envs.classic_control import CartPoleEnv

class Threaded(CartPoleEnv):
    def __init__(self, **settings):
        super().__init__(**settings)
        threading.Thread(target=threading.Event().wait, name="emulator").start()
"""


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_thread_that_an_environment_leaves_is_named_and_a_signal_ends_it(number, tmp_path):
    (tmp_path / "threaded.py").write_text(
        f"{THREADED}\nimport gymnasium\ngymnasium.register('Threaded-v0', Threaded)\n"
    )
    with endless_fit(
        tmp_path, "--data.env.id=threaded:Threaded-v0", frames=96, folders=[str(tmp_path)]
    ) as process:
        errors = tmp_path / "errors"
        while "waiting for threads that others started: emulator" not in errors.read_text():
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        ends_with_all_it_started(process)
        assert process.returncode == -number


def wait_until_it_trains(process):
    while "steps/s" not in process.stdout.readline():  # the first line of progress
        assert process.poll() is None


def wait_until_it_has_started_a_rank(process):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not any(
        b"fit" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        for child in children.read_text().split()
    ):
        assert process.poll() is None
        time.sleep(0.01)


def ends_with_all_it_started(process):
    """Return what else it printed."""
    out, _ = process.communicate(timeout=60)
    deadline = time.monotonic() + 10  # the fork server notices by itself
    while not has_ended(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert has_ended(process.pid)
    return out


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [[], pytest.param(TWO_RANKS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("send", "number", "status"),
    [  # a terminal sends to the whole group, an init system, or a scheduler, to one or to all
        (os.killpg, signal.SIGINT, 130),
        pytest.param(os.kill, signal.SIGTERM, 143, marks=pytest.mark.thorough),
        pytest.param(os.killpg, signal.SIGTERM, 143, marks=pytest.mark.thorough),
    ],
    ids=["Ctrl-C", "SIGTERM", "SIGTERM to all"],
)
def test_a_signal_ends_training_with_a_checkpoint_and_no_process_left(
    tmp_path, send, number, status, ranks
):
    with endless_fit(tmp_path, *ranks) as process:
        wait_until_it_trains(process)
        send(process.pid, number)
        out = ends_with_all_it_started(process)
    assert process.returncode == status
    assert "\r" not in out
    resume = shlex.split(told_by(out)["continue"])
    assert resume[-1] == "--ckpt_path=runs/run/version_0/checkpoints/last.ckpt"
    assert "Traceback" not in (tmp_path / "errors").read_text()
    (last,) = tmp_path.glob("runs/run/version_0/checkpoints/last.ckpt")
    assert torch.load(last, weights_only=True)["updates"] > 0


@pytest.mark.processes
def test_a_reader_that_leaves_ends_the_run_as_a_signal_does(tmp_path):
    with endless_fit(tmp_path) as process:
        process.stdout.readline()
        process.stdout.close()  # as `| head -1` does
        ends_with_all_it_started(process)
    assert process.returncode == 128 + signal.SIGPIPE
    assert "BrokenPipeError" not in (tmp_path / "errors").read_text()


def test_nobody_has_to_read_what_is_told(tmp_path):
    fit = shlex.join([sys.executable, "-m", "hts_torchrl.cli", "fit", *CARTPOLE, *A2C])
    closed = subprocess.run(
        ["sh", "-c", f"{fit} >&- 2>&-"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert closed.returncode == 0
    assert (tmp_path / "runs/run/version_0/checkpoints/last.ckpt").is_file()


@pytest.mark.parametrize(("given", "sleeps"), [({}, True), ({"OMP_WAIT_POLICY": "active"}, False)])
def test_threads_of_a_learner_sleep_while_they_wait_unless_the_user_says_otherwise(given, sleeps):
    environment = {k: value for k, value in os.environ.items() if k != "OMP_WAIT_POLICY"}
    path = os.pathsep.join(sys.path)
    ended = subprocess.run(
        [sys.executable, "-m", "hts_torchrl.cli", "--version"],
        env={**environment, **given, "PYTHONPATH": path, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "GOMP_SPINCOUNT" in ended.stderr  # of GNU's OpenMP, which torch has
    assert ("GOMP_SPINCOUNT = '0'" in ended.stderr) == sleeps


def test_the_config_of_a_run_is_verified_and_advised_on(run_directory, capsys):
    config = f"--config={run_directory / 'config.yaml'}"
    run("verify", config, "--updates=1")
    assert "the same bits as the serial twin" in capsys.readouterr().out
    run("advise", config, "--seconds=1")
    assert "steps/s" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["verify", "advise"])
def test_a_checkpoint_to_begin_with_is_refused_where_nothing_is_resumed(
    command, run_directory, capsys
):
    path = run_directory / "checkpoints" / "last.ckpt"
    message = refused(capsys, command, f"--ckpt_path={path}")
    assert message == f"{command} trains from the start: give --ckpt_path=null"


def test_a_name_that_the_output_cannot_show_ends_no_run(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "hts_torchrl.cli", "fit", *CARTPOLE, *A2C, "--name=\u00e9"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert told_by(ended.stdout)["log"] == r"runs/\xe9/version_0"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", [["doctor"], ["fit", *CARTPOLE, *A2C]], ids=["doctor", "fit"])
def test_a_full_disk_under_the_output_ends_the_run_with_one_line(tmp_path, command):
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "hts_torchrl.cli", *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert ended.returncode == 1
    assert ended.stderr == (
        "hts-torchrl: error: the output or a log cannot be written: No space left on device\n"
    )


def test_a_disk_that_fills_under_tensorboard_ends_the_run_with_one_line(tmp_path):
    tmp_path.joinpath("full.py").write_text(
        "import errno\n"
        "from lightning.pytorch import Callback\n"
        "from tensorboard.summary.writer.record_writer import RecordWriter\n"
        "class Full(Callback):\n"
        "    def on_train_start(self, trainer, pl_module):\n"
        "        RecordWriter.write = self.write\n"
        "    def write(self, data):\n"
        "        raise OSError(errno.ENOSPC, 'No space left on device')\n"
    )
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "hts_torchrl.cli", "fit", *CARTPOLE, *A2C),
            "--trainer.callbacks=full.Full",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert ended.stderr == (
        "hts-torchrl: error: the output or a log cannot be written: No space left on device\n"
    )
    assert "continue:" in ended.stdout


@pytest.mark.parametrize(
    ("kib", "status", "told"),
    [
        (4, 2, "the shared arrays of a round take 0.1 MB, and no file may be so large here"),
        (150, 1, "cannot write the checkpoint runs/run/version_0/checkpoints/last.ckpt"),
    ],
)
def test_a_limit_of_the_size_of_files_ends_the_run_with_one_line(kib, status, told, tmp_path):
    ended = subprocess.run(
        [
            *("bash", "-c", f'ulimit -f {kib}; exec "$@"', "bash"),
            *(sys.executable, "-m", "hts_torchrl.cli", "fit", *CARTPOLE, *A2C),
            "--model.optimizer=adam",  # whose state makes the checkpoint larger than the arrays
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == status
    assert ended.stderr.startswith(f"hts-torchrl: error: {told}")
    assert "ulimit -f" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
@pytest.mark.processes
def test_a_rank_does_not_outlive_the_process_that_started_it(tmp_path):
    with endless_fit(tmp_path, *TWO_RANKS) as process:
        # Before they have met: from then on a lost connection would end it, too.
        wait_until_it_has_started_a_rank(process)
        process.kill()
        ends_with_all_it_started(process)
