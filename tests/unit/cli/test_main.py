"""What the command line makes of its arguments."""

import errno
import io
import json
import os
import re
import resource
import shutil
import signal
import socket
import tomllib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers import Logger

import hts_torchrl
from hts_torchrl import A2C as A2CLearner
from hts_torchrl import PPO, LearningCurve
from hts_torchrl.cli.command_line import HTSCommandLine
from hts_torchrl.cli.config_files import expand_configs
from hts_torchrl.cli.main import _leave
from hts_torchrl.errors import ConfigurationError, WorkerKilled, WorkerPlace
from hts_torchrl.training.callbacks.stop_together import Stopped
from tests.command_line import A2C, CARTPOLE, files, refused, run

ALL_SUBCOMMANDS = {"fit", "validate", "test", "predict", "play", "export", "advise", "verify"}


def write(path, **content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))
    return str(path)


class HidesSettings(PPO):
    """Passes its settings on in a form that jsonargparse does not follow."""

    def __init__(self, bonus: float = 1.0, **settings):
        self.bonus = bonus
        super().__init__(**{"epochs": 2, **settings})


class HidesAll(PPO):
    def __init__(self, **settings):
        super().__init__(**{"epochs": 2, **settings})


class PassesSettingsOn(PPO):
    def __init__(self, bonus: float = 1.0, **settings):
        self.bonus = bonus
        super().__init__(**settings)


class TakesNoOthers(PPO):
    def __init__(self, bonus: float = 1.0):
        self.bonus = bonus
        super().__init__(epochs=2)


def makes_a_learner(epochs: int = 2) -> PPO:
    return PPO(epochs=epochs)


class NamesItsRunLate(Logger):
    """As WandbLogger does: its run has no name before it has begun."""

    name, version, save_dir = "project", None, "."

    @property
    def experiment(self):
        self.version = "a1b2c3"

    def log_hyperparams(self, *_, **__): ...

    def log_metrics(self, *_, **__): ...


class OwnCurve(LearningCurve):
    """As of a user who draws something else."""


class TestSettings:
    def test_reach_learner_data_and_trainer(self, made):
        line = made(
            "fit", *CARTPOLE, "--model=PPO", "--model.epochs=7", "--trainer.gradient_clip_val=0.25"
        )
        assert isinstance(line.model, PPO)
        assert line.model.epochs == 7
        assert line.datamodule.env.id == "CartPole-v1"
        assert line.datamodule.schedule.steps_per_round == 8
        assert line.trainer.gradient_clip_val == 0.25

    @pytest.mark.parametrize("kind", [HidesSettings, HidesAll])
    def test_a_class_that_hides_those_of_its_base_is_warned_of(self, made, kind, recwarn):
        line = made("fit", *CARTPOLE, f"--model={__name__}.{kind.__name__}")
        assert line.model.epochs == 2
        told = [str(each.message) for each in recwarn]
        assert any("settings of PPO in a config are left out" in each for each in told)

    @pytest.mark.parametrize("kind", [PassesSettingsOn, TakesNoOthers])
    def test_a_class_that_passes_them_on_or_wants_none_is_not(self, made, kind):
        assert isinstance(made("fit", *CARTPOLE, f"--model={__name__}.{kind.__name__}").model, kind)

    def test_a_function_may_make_the_learner(self, made):
        line = made("fit", *CARTPOLE, f"--model={__name__}.makes_a_learner")
        assert (type(line.model), line.model.epochs) == (PPO, 2)

    def test_one_epoch_is_the_default(self, made):
        assert made("fit", *CARTPOLE, *A2C).trainer.max_epochs == 1

    def test_the_seed_of_everything_is_that_of_the_environments(self, made):
        line = made("fit", *CARTPOLE, *A2C, "--seed_everything=17")
        assert line.datamodule.seed == 17
        assert torch.initial_seed() == 17

    def test_the_config_file_is_read(self, made, tmp_path):
        config = write(tmp_path / "mine.yaml", model={"class_path": "A2C"}, name="mine")
        line = made("fit", *CARTPOLE, "--config", config)
        assert isinstance(line.model, A2CLearner)
        assert "mine" in line.trainer.log_dir

    def test_the_command_line_overrides_the_file(self, made, tmp_path):
        data = {"num_envs": 8, "evaluation_episodes": 3}
        config = write(tmp_path / "mine.yaml", data=data, model={"class_path": "A2C"})
        line = made("fit", "--config", config, *CARTPOLE, "--data.evaluation_episodes=5")
        assert line.datamodule.evaluation_episodes == 5
        assert line.datamodule.schedule.num_envs == 4

    def test_a_later_file_overrides_an_earlier_one(self, made, tmp_path):
        first = write(tmp_path / "first.yaml", data={"evaluation_episodes": 3, "delay": 0})
        second = write(tmp_path / "second.yaml", data={"evaluation_episodes": 4})
        line = made("fit", *CARTPOLE, *A2C, "--config", first, "--config", second)
        assert line.datamodule.schedule.delay == 0

    def test_an_interpolation_sees_what_the_command_line_overrides(self, made, tmp_path):
        config = write(
            tmp_path / "mine.yaml",
            data={"inference_batch_size": "${data.num_envs}", "num_envs": 16},
            model={"class_path": "A2C"},
        )
        line = made("fit", "--config", config, *CARTPOLE, "--data.num_envs=2")
        assert line.datamodule.pool.inference_batch_size == 2

    def test_all_loggers_of_a_run_share_a_folder(self, made):
        loggers = made("fit", *CARTPOLE, *A2C, "--name=mine").trainer.loggers
        assert len(loggers) == 2
        assert {str(logger.log_dir) for logger in loggers} == {"runs/mine/version_0"}

    def test_runs_of_several_ranks_that_begin_together_have_folders_of_their_own(
        self, made, monkeypatch
    ):
        monkeypatch.setattr("hts_torchrl.cli.command_line.end_at_once", lambda _: None)
        ranks = ["--trainer.devices=2", "--trainer.strategy=ddp"]
        lines = [made("fit", *CARTPOLE, *A2C, *ranks) for _ in range(2)]
        for line in lines:
            line.before_fit()
        folders = [line.trainer.log_dir for line in lines]
        assert folders == ["runs/run/version_0", "runs/run/version_1"]

    def test_runs_lie_below_the_trainers_root(self, made):
        line = made("fit", *CARTPOLE, *A2C, "--name=mine", "--trainer.default_root_dir=root")
        assert line.trainer.log_dir == "root/runs/mine/version_0"

    @pytest.mark.parametrize("root", ["~/there", "$PLACE/there"])
    def test_a_root_is_expanded_alike_for_all_loggers(self, root, made, monkeypatch):
        monkeypatch.setenv("HOME", "/place")
        monkeypatch.setenv("PLACE", "/place")
        line = made("fit", *CARTPOLE, *A2C, f"--trainer.default_root_dir={root}")
        folders = {str(logger.log_dir) for logger in line.trainer.loggers}
        assert folders == {"/place/there/runs/run/version_0"}

    def test_a_variable_in_a_runs_name_is_expanded_for_all_that_it_writes(self, made, monkeypatch):
        monkeypatch.setenv("JOB", "7")
        trainer = made("fit", *CARTPOLE, *A2C, "--name=job_$JOB").trainer
        folders = {Path(trainer.log_dir), *(Path(each.root_dir) for each in trainer.loggers)}
        assert folders == {Path("runs/job_7"), Path("runs/job_7/version_0")}

    @pytest.mark.parametrize(
        "arguments",
        [
            {"save_dir": "$PLACE/logs"},
            {"save_dir": "~/logs"},
            {"save_dir": ".", "name": "job_$PLACE"},
        ],
    )
    def test_a_variable_in_a_folder_of_the_users_logger_is_refused(
        self, arguments, capsys, monkeypatch, tmp_path
    ):
        """Lightning would replace it for TensorBoard's files, and not for checkpoints."""
        monkeypatch.setenv("PLACE", str(tmp_path))
        monkeypatch.setenv("HOME", str(tmp_path))
        logger = json.dumps({"class_path": "TensorBoardLogger", "init_args": arguments})
        message = refused(capsys, "fit", *CARTPOLE, *A2C, f"--trainer.logger={logger}")
        assert message.startswith("the TensorBoardLogger's folder ")
        assert files(tmp_path) == set()

    def test_a_logger_that_names_its_run_late_has_done_so_before_the_folder_is_made(self, made):
        line = made("fit", *CARTPOLE, *A2C, f"--trainer.logger={__name__}.NamesItsRunLate")
        assert Path(line.trainer.log_dir).parts[-2:] == ("project", "a1b2c3")

    def test_callbacks_of_the_user_come_beside_our_own(self, made):
        line = made("fit", *CARTPOLE, *A2C, "--trainer.callbacks=LearningRateMonitor")
        names = {type(callback).__name__ for callback in line.trainer.callbacks}
        assert {"LearningRateMonitor", "TrainingStatistics", "LearningCurve"} <= names
        assert {"LastCheckpoint", "BestCheckpoint"} <= names

    @pytest.mark.parametrize(
        "arguments",
        [
            ["ModelCheckpoint"],
            ["ModelCheckpoint", "monitor=eval/score", "mode=max", "save_top_k=3"],
            ["ModelCheckpoint", "save_last=true"],
            ["Timer", "duration=00:01:00:00"],
            ["EMAWeightAveraging", "decay=0.9"],
            ["hts_torchrl.training.callbacks.TrainingStatistics"],
        ],
    )
    def test_callbacks_of_lightning_do_not_collide_with_ours(self, made, arguments):
        name, *settings = arguments
        flags = [f"--trainer.callbacks.{setting}" for setting in settings]
        line = made("fit", *CARTPOLE, *A2C, f"--trainer.callbacks={name}", *flags)
        names = [type(callback).__name__ for callback in line.trainer.callbacks]
        assert names.count(name.rpartition(".")[2]) == 1
        assert names.count("TrainingStatistics") == names.count("LastCheckpoint") == 1

    def test_a_callback_that_is_derived_from_ours_comes_in_its_place(self, made):
        line = made("fit", *CARTPOLE, *A2C, f"--trainer.callbacks={__name__}.OwnCurve")
        curves = [each for each in line.trainer.callbacks if isinstance(each, LearningCurve)]
        assert [type(each) for each in curves] == [OwnCurve]

    def test_the_users_progress_bar_comes_in_place_of_ours(self, made):
        bar = ["--trainer.enable_progress_bar=true", "--trainer.callbacks=RichProgressBar"]
        bar += ["--trainer.callbacks.refresh_rate=5"]
        line = made("fit", *CARTPOLE, *A2C, *bar)
        assert type(line.trainer.progress_bar_callback).__name__ == "RichProgressBar"
        assert line.trainer.progress_bar_callback.refresh_rate == 5

    def test_barebones_goes_without_what_lightning_refuses_beside_it(self, made):
        arguments = [each for each in CARTPOLE if "trainer" not in each]
        trainer = made("fit", *arguments, *A2C, "--trainer.barebones=true").trainer
        assert trainer.loggers == trainer.checkpoint_callbacks == []

    def test_checkpoints_can_be_switched_off(self, made):
        line = made("fit", *CARTPOLE, *A2C, "--trainer.enable_checkpointing=false")
        assert line.trainer.checkpoint_callback is None


class Failing(Callback):
    """Raises in the third round."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):  # noqa: ARG002
        if batch_idx == 2:
            raise ArithmeticError("as asked")


def test_a_run_that_fails_is_saved_by_the_users_own_last_checkpoint_too():
    last = ["--trainer.callbacks=hts_torchrl.training.callbacks.LastCheckpoint"]
    last += ["--trainer.callbacks.dirpath=mine"]
    with pytest.raises(ArithmeticError):
        run("fit", *CARTPOLE, *A2C, *last, f"--trainer.callbacks+={__name__}.Failing")
    assert torch.load("mine/last.ckpt", weights_only=True)["updates"] == 2


class FailingAtTheEnd(Callback):
    """Raises when the second round has been learned."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):  # noqa: ARG002
        if batch_idx == 1:
            raise ArithmeticError("as asked")


def test_a_round_at_whose_end_a_callback_fails_is_counted():
    with pytest.raises(ArithmeticError):
        run("fit", *CARTPOLE, *A2C, f"--trainer.callbacks={__name__}.FailingAtTheEnd")
    saved = torch.load("runs/run/version_0/checkpoints/last.ckpt", weights_only=True)
    assert saved["updates"] == 2
    assert saved["callbacks"]["TrainingStatistics"]["frames"] == 2 * 32


class TestBase:
    def test_a_file_builds_on_another_beside_it(self, made, tmp_path):
        write(tmp_path / "games" / "base.yaml", model={"class_path": "A2C"}, data={"delay": 0})
        config = write(tmp_path / "games" / "mine.yaml", base="base.yaml", name="mine")
        line = made("fit", *CARTPOLE, "--config", config)
        assert line.datamodule.schedule.delay == 0

    def test_bases_come_before_the_file_and_theirs_before_them(self, tmp_path):
        ground = write(tmp_path / "ground.yaml", name="ground")
        left = write(tmp_path / "left.yaml", base="ground.yaml")
        right = write(tmp_path / "right.yaml")
        top = write(tmp_path / "top.yaml", base=["left.yaml", "right.yaml"])
        expanded = expand_configs(["fit", f"--config={top}"])
        assert [word for word in expanded if word.endswith(".yaml")] == [ground, left, right, top]

    def test_a_file_that_builds_on_itself_is_refused(self, tmp_path):
        write(tmp_path / "one.yaml", base="two.yaml")
        two = write(tmp_path / "two.yaml", base="one.yaml")
        with pytest.raises(ConfigurationError, match="it builds on itself"):
            expand_configs(["fit", "--config", two])

    def test_a_file_may_be_the_base_of_two(self, tmp_path):
        write(tmp_path / "ground.yaml")
        write(tmp_path / "left.yaml", base="ground.yaml")
        write(tmp_path / "right.yaml", base="ground.yaml")
        top = write(tmp_path / "top.yaml", base=["left.yaml", "right.yaml"])
        assert top in expand_configs(["fit", "--config", top])

    def test_the_short_flag_may_be_joined_with_its_file(self, tmp_path):
        ground = write(tmp_path / "ground.yaml")
        top = write(tmp_path / "top.yaml", base="ground.yaml")
        expanded = expand_configs(["fit", f"-c{top}"])
        assert expanded == ["fit", "--config", ground, "--config", top, "--base=null"]

    def test_a_base_that_is_not_there_is_named(self, tmp_path):
        mine = write(tmp_path / "mine.yaml", base="none.yaml")
        with pytest.raises(ConfigurationError, match=r"none\.yaml: No such file"):
            expand_configs(["fit", "-c", mine])

    def test_a_config_of_this_package_is_found_in_any_folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        expanded = expand_configs(["fit", "--config=configs/pong.yaml"])
        configs = Path(__file__).resolve().parents[3] / "configs"
        files = [Path(word).resolve() for word in expanded if word.endswith(".yaml")]
        assert files == [configs / "atari/ppo.yaml", configs / "pong.yaml"]

    def test_a_file_builds_on_one_of_this_package(self, tmp_path):
        mine = write(tmp_path / "mine.yaml", base="configs/cartpole_a2c.yaml")
        files = map(Path.resolve, map(Path, expand_configs(["fit", "-c", mine])))
        assert Path(__file__).resolve().parents[3] / "configs/cartpole_a2c.yaml" in files

    def test_the_users_own_file_comes_before_that_of_this_package(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        write(tmp_path / "configs" / "pong.yaml")
        expanded = expand_configs(["fit", "--config=configs/pong.yaml"])
        assert expanded == ["fit", "--config", "configs/pong.yaml", "--base=null"]

    def test_a_config_that_nobody_has_is_named_as_it_was_given(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigurationError, match=r"--config=configs/none\.yaml: No such file"):
            expand_configs(["fit", "--config=configs/none.yaml"])

    def test_arguments_without_a_config_stay(self):
        assert expand_configs(["fit", "--model=A2C"]) == ["fit", "--model=A2C"]


class Billion(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(10**9)


class Letters(Billion):
    observation_space = gymnasium.spaces.Text(5)


def leaving(code):
    raise SystemExit(code)


gymnasium.register("Leaving-v0", leaving)
gymnasium.register("Billion-v0", Billion)
gymnasium.register("Letters-v0", Letters)

WRONG = {
    "an unknown environment": (
        ["--data.env.id=CartPol-v1"],
        "Gymnasium knows no environment 'CartPol-v1'; near to it: CartPole-v1",
    ),
    "an argument the environment does not know": (
        ['--data.env.kwargs={"foo": 1}'],
        "environment 'CartPole-v1': CartPoleEnv.__init__() got an unexpected keyword",
    ),
    "a space that is not supported": (
        ["--data.env.id=Letters-v0"],
        "environment 0 (Letters-v0): the observation space Text(1, 5, ",
    ),
    "a network that cannot read": (
        ["--model.network=nature"],
        "the network 'nature' cannot read observations of shape (4,)",
    ),
    "a number out of range": (["--model.gamma=2"], "gamma=2.0; 0 to 1 is needed"),
    "an emulator that stands still": (
        ["--data.env=AtariEnvs", "--data.env.game=pong", "--data.env.frame_skip=0"],
        "frame_skip=0; 1 or more is needed",
    ),
    "arguments without names": (["--data.env.kwargs=[1]"], 'Parser key "data.env"'),
    "a game's setting of a wrong type": (
        ["--data.env=AtariEnvs", "--data.env.game=pong", "--data.env.life_loss=2"],
        'Parser key "data.env"',
    ),
    "a name that is empty": (["--name="], "--name=: the name of a folder is needed"),
    "a base outside of a file": (["--base=foo"], "--base: it belongs into a config file"),
    "a run of nothing": (["--trainer.limit_train_batches=0"], "limit_train_batches=0: no part of"),
    "a seed out of bounds": (["--seed_everything=-1"], "--seed_everything=-1; 0 to 4294967295 is "),
    "a folder that cannot be made": (["--name=/proc/none"], "the run's folder /proc/none/version_"),
    "a root on another machine": (
        ["--trainer.default_root_dir=memory://runs"],
        "the run's folder memory://runs; one of this machine is needed",
    ),
    "a logger's folder on another machine": (
        ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=memory://runs"],
        "the run's folder memory://runs/lightning_logs/version_0; one of this machine is",
    ),
    "games without a step": (
        ['--data.env.kwargs={"max_episode_steps": 0}'],
        "environment 'CartPole-v1': Expect the `max_episode_steps` to be positive",
    ),
    "a strategy": (["--trainer.strategy=none"], "You selected an invalid strategy name"),
    "an interval in steps and one in time": (
        ["--data.evaluation_frames=32", "--trainer.val_check_interval=00:00:01:00"],
        "val_check_interval=a time and evaluation_frames=32: both",
    ),
    "rounds begun anew": (
        ["--trainer.reload_dataloaders_every_n_epochs=1"],
        "reload_dataloaders_every_n_epochs=1; 0 is needed",
    ),
    "an accelerator": (["--trainer.accelerator=tpu"], "Requirement 'torch_xla"),
    "an unknown flag": (["--data.numm_envs=3"], "unrecognized arguments: --data.numm_envs=3"),
    "a setting without a value": (
        ["--model.learning_rate", "--model.network=mlp"],
        "argument --model.learning_rate: expected one argument",
    ),
    "a last setting without a value": (
        ["--data.env.id"],
        "argument --data.env.id: expected one argument",
    ),
    "a negative number with an exponent": (
        ["--model.learning_rate", "-1e-3"],
        "learning_rate=-0.001; ",
    ),
    "a shortened flag": (["--data.num_env=3"], "unrecognized arguments: --data.num_env=3"),
    "a misspelled flag": (
        ["--trainer.max_step=3"],
        "unrecognized arguments: --trainer.max_step=3 (did you mean --trainer.max_steps?)",
    ),
    "a setting that the learner has not": (
        ["--model.clip=0.1"],
        "Parser key \"model\": Option 'clip' is not accepted",
    ),
    "a shortened --config": (["--conf=none.yaml"], "unrecognized arguments: --conf=none.yaml"),
    "a shortened --ckpt_path": (["--ckpt=none.ckpt"], "unrecognized arguments: --ckpt=none.ckpt"),
    "a wrong type": (["--data.num_envs=four"], 'Parser key "data.num_envs": Expected a'),
    "a value of none of several types": (
        ["--trace=x"],
        'Parser key "trace": int or null is needed',
    ),
    "a number that is not whole where there may be none": (
        ["--data.evaluation_frames=1e3"],
        'Parser key "data.evaluation_frames": int or null is needed',
    ),
    "no arguments by name": (
        ["--model.optimizer_kwargs=5"],
        'Parser key "model": Parser key "optimizer_kwargs": dict[str, Any] or null is needed',
    ),
    "an argument of no optimiser": (
        ["--model.optimizer=adamw", '--model.optimizer_kwargs={"weigth_decay": 0.1}'],
        "optimizer_kwargs has 'weigth_decay', which adamw does not take; it takes amsgrad, betas, ",
    ),
    "an unknown learner": (
        ["--model=DQN"],
        "Parser key \"model\": 'DQN' is no class known here; write your own with its module, ",
    ),
    "an unknown factory": (["--data.env=FooEnvs"], 'Parser key "data.env"'),
    "an unknown callback": (
        ["--trainer.callbacks=Foo"],
        "Parser key \"trainer.callbacks\": 'Foo' is no class known here; write your own with",
    ),
    "a logger without what it requires": (
        ["--trainer.logger=TensorBoardLogger"],
        'Parser key "trainer.logger": the following arguments are required: save_dir',
    ),
    "an argument of no callback": (
        ['--trainer.callbacks=[{"class_path": "Timer", "init_args": {"span": 3}}]'],
        "Parser key \"trainer.callbacks\": Option 'span' is not accepted",
    ),
    "no precision of Lightning's": (
        ["--trainer.precision=bf8"],
        "Parser key \"trainer.precision\": Expected a typing.Literal['transformer-engine', ",
    ),
    "an interpolation that leads nowhere": (
        ["--data.frames_per_batch=${data.none}"],
        "Interpolation key 'data.none' not found",
    ),
    "a config without a name": (["--config"], "--config: the name of a file is needed"),
    "a missing config": (["--config=none.yaml"], "--config=none.yaml: No such file"),
    "a checkpoint by Lightning's word": (
        ["--ckpt_path=last"],
        "--ckpt_path=last: there is no such file (give a path, such as "
        "runs/NAME/version_0/checkpoints/last.ckpt)",
    ),
    "a checkpoint without a name": (["--ckpt_path="], "--ckpt_path=.: there is no such file"),
    "frames without end": (
        [f"--data.total_frames={10**23}"],
        f"--data.total_frames={10**23}; at most {2**63 - 1} is possible",
    ),
    "more frames than can be counted": (
        [f"--data.total_frames={10**18}"],
        "total_frames=1000000000000000000; at most",
    ),
    "more steps than can be counted": (
        ["--model=PPO", f"--model.epochs={10**18}"],
        "3 rounds of 4000000000000000000 minibatches are more than",
    ),
    "more devices than cores": (
        ["--trainer.devices=1000"],
        "--trainer.devices=1000: this machine has ",
    ),
    "a billion actions": (
        ["--data.env.id=Billion-v0"],
        "the network 'mlp' of this environment (observations [[1]], actions [1000000000]) takes",
    ),
    "a name that is no UTF-8": (["--name=\udcff"], "'--name=\\udcff': this is no UTF-8"),
    "an argument that nests deeply": (
        [f"--data.env.kwargs={'[' * 3000 + ']' * 3000}"],
        "",
    ),
    "arguments that are none": (["--data.env.kwargs=null"], "kwargs=None; a mapping is needed"),
    "modules that are none": (["--data.env.imports=null"], "imports=None; a list of modules is"),
    "no seed": (["--seed_everything=false"], "--seed_everything=false: give a number, such as 0"),
    "any seed": (["--seed_everything=true"], "--seed_everything=true: give a number, such as 0"),
    "an environment that ends the process": (
        ["--data.env.id=Leaving-v0", "--data.env.kwargs={code: 0}"],
        "environment 'Leaving-v0': make() of environment 0 calls sys.exit(); raise an error there",
    ),
    "a metric that nobody logs": (
        [
            "--data.evaluation_frames=32",
            "--trainer.callbacks=EarlyStopping",
            "--trainer.callbacks.monitor=eval/scor",
        ],
        "Early stopping conditioned on metric `eval/scor` which is not available",
    ),
    "a whole path as the name of a folder in another": (
        ["--name=/elsewhere", "--trainer.default_root_dir=here"],
        "--name=/elsewhere: a whole path has no place in --trainer.default_root_dir=here; give one",
    ),
    "a missing checkpoint": (["--ckpt_path=none.ckpt"], "--ckpt_path=none.ckpt: there is no such"),
}


def test_tasks_of_slurm_that_lightning_refuses_end_with_one_line(capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE", raising=False)
    message = refused(capsys, "fit", *CARTPOLE, *A2C)
    assert message.startswith("You set `--ntasks=4` in your SLURM bash script")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model.gama=1"], "Parser key \"model\": Option 'gama' {} gamma?)"),
        (["--data.env.idd=CartPole-v1"], "Parser key \"data.env\": Option 'idd' {} id?)"),
        (
            ["--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitr=eval/score"],
            "Parser key \"trainer.callbacks\": Option 'monitr' {} monitor?)",
        ),
    ],
)
def test_a_misspelled_argument_of_a_class_is_answered_with_the_near_one(flags, message, capsys):
    told = refused(capsys, "fit", *CARTPOLE, *A2C, *flags)
    assert told == message.format("is not accepted (did you mean")


@pytest.mark.parametrize("flag", ["--optimizer=SGD", "--lr_scheduler.gamma=0.9"])
def test_an_optimiser_of_lightnings_is_refused_with_what_the_learner_has(flag, capsys):
    message = refused(capsys, "fit", *CARTPOLE, *A2C, flag)
    assert message.startswith(f"unrecognized arguments: {flag} (the learner makes its own: ")
    assert "--model.optimizer" in message


def test_a_spike_that_a_callback_finds_ends_with_one_line(capsys, monkeypatch):
    monkeypatch.setattr(SpikeDetection, "_is_spike", lambda *_: True)
    with pytest.raises(SystemExit) as left:
        run("fit", *CARTPOLE, *A2C, "--trainer.callbacks=SpikeDetection")
    assert left.value.code == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "hts-torchrl: error: Training spike detected in batch 1"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("data: {num_env: 3}", "option 'data.num_env' (did you mean data.num_envs?)"),
        ("optimizer: null", "option 'optimizer' (the learner makes its own: --model.optimizer, "),
        ("lr_scheduler: {gamma: 0.9}", "option 'lr_scheduler.gamma' (the learner makes its own: "),
    ],
)
def test_an_entry_of_a_config_that_is_no_setting_is_answered_as_its_flag(
    entries, message, capsys, tmp_path
):
    config = tmp_path / "own.yaml"
    config.write_text(entries)
    told = refused(capsys, "fit", *CARTPOLE, *A2C, f"--config={config}")
    assert told.startswith(f"--config={config}: Subcommand 'fit' does not accept {message}")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"trac": 3}, "Subcommand 'fit' does not accept option 'trac' (did you mean trace?)"),
        ({"data": {"delay": "long"}}, "Parser key \"data.delay\": Expected a <class 'int'>."),
        ({"data": {"evaluation_frames": "${nowhere}"}}, "Interpolation key '..nowhere' not found"),
        ({"data": 3}, "data=3; settings by name are needed"),
        ({"trainer": [1]}, "trainer=[1]; settings by name are needed"),
        (
            {"model": {"class_path": "A2C", "init_args": {"gama": 1}}},
            "Parser key \"model\": Option 'gama' is not accepted",
        ),
        (
            {"trainer": {"callbacks": [{"class_path": "Timer", "init_args": {"durat": 1}}]}},
            "Parser key \"trainer.callbacks\": Option 'durat' is not accepted",
        ),
    ],
)
def test_a_mistake_in_a_config_is_told_with_its_file(entries, message, tmp_path, capsys):
    """Also where others build on that file, and give other settings or one that is right."""
    wrong = write(tmp_path / "wrong.yaml", **entries)
    write(tmp_path / "right.yaml", model={"class_path": "A2C"}, data={"delay": 1})
    top = write(tmp_path / "top.yaml", base=["right.yaml", "wrong.yaml"], name="top")
    assert refused(capsys, "fit", *CARTPOLE, *A2C, "-c", top).startswith(
        f"--config={wrong}: {message}"
    )


def test_a_mistake_in_a_flag_is_told_without_the_config_that_has_the_setting(tmp_path, capsys):
    right = write(tmp_path / "right.yaml", data={"delay": 1})
    message = refused(capsys, "fit", *CARTPOLE, *A2C, "-c", right, "--data.delay=long")
    assert message.startswith('Parser key "data.delay": Expected')


def test_a_section_of_a_config_may_be_empty(made, tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("data:\ntrainer:\nname: mine\n")
    assert "mine" in made("fit", *CARTPOLE, *A2C, f"--config={config}").trainer.log_dir


def test_a_seed_that_is_null_is_refused(tmp_path, capsys):
    env = {"class_path": "GymEnvs", "init_args": {"id": "CartPole-v1"}}
    data = {"env": env, "num_envs": 4, "frames_per_batch": 32, "total_frames": 96}
    model = {"class_path": "A2C"}
    config = write(tmp_path / "mine.yaml", seed_everything=None, model=model, data=data)
    told = refused(capsys, "fit", f"--config={config}")
    assert told == f'--config={config}: Parser key "seed_everything": bool or int is needed'


@pytest.mark.parametrize("flags", [[], ["--trainer.max_steps=1"]], ids=["alone", "with a flag"])
def test_an_empty_section_keeps_what_earlier_files_say(flags, made, tmp_path):
    trainer = {"gradient_clip_val": 0.5, "enable_progress_bar": False, "accelerator": "cpu"}
    write(tmp_path / "first.yaml", trainer=trainer, data={"delay": 0}, model={"class_path": "A2C"})
    (tmp_path / "mine.yaml").write_text("base: first.yaml\ntrainer:\ndata:\nmodel:\n")
    of_data = [flag for flag in CARTPOLE if flag.startswith("--data.")]
    line = made("fit", *of_data, f"--config={tmp_path / 'mine.yaml'}", *flags)
    assert (line.trainer.gradient_clip_val, line.datamodule.pool.delay) == (0.5, 0)


def test_what_follows_the_help_of_a_class_is_not_answered_by_itself(capsys):
    told = refused(capsys, "fit", "--model.help=PPO", "--data.env=GymEnvs")
    assert told == "unrecognized arguments: --data.env=GymEnvs"


def test_an_error_names_its_rank_among_several(monkeypatch, capsys):
    group = torch.distributed
    for name, value in {"is_initialized": True, "get_world_size": 2, "get_rank": 1}.items():
        monkeypatch.setattr(group, name, lambda value=value: value)
    with pytest.raises(SystemExit):
        _leave(ConfigurationError("as asked"), status=2)
    assert capsys.readouterr().err == "hts-torchrl: error: rank 1: as asked\n"


@pytest.mark.parametrize("code", [3, 128 + signal.SIGTERM])
def test_an_environment_that_leaves_with_a_status_is_named_and_a_signal_is_not(code, capsys):
    flags = ("--data.env.id=Leaving-v0", f"--data.env.kwargs={{code: {code}}}")
    with pytest.raises(SystemExit) as left:
        run("fit", *CARTPOLE, *A2C, *flags)
    assert left.value.code == code
    told = "hts-torchrl: error: sys.exit(3), raised by make() of environment 0\n"
    assert (told in capsys.readouterr().err) == (code == 3)


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input_ends_with_one_line_and_status_2(what, capsys):
    arguments, message = WRONG[what]
    assert refused(capsys, "fit", *CARTPOLE, *A2C, *arguments).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], 'expected "subcommand" to be one of {fit,validate,test,predict,play,'),
        (["train"], "argument subcommand: invalid choice: 'train'"),
        (["--data.env=GymEnvs", "fit"], "name fit, or another command, before all flags"),
        (["-c", "configs/pong.yaml"], "name fit, or another command, before all flags"),
        (["fit", "--model=A2C"], "the following arguments are required: --data.env, --data."),
        (["fit", *CARTPOLE], "the following arguments are required: --model"),
        (["fit", *CARTPOLE, "--model.network=mlp"], "--model: name a class: PPO"),
        (["fit", "--model=A2C", "--data.env.id=CartPole-v1"], "--data.env: name a class: GymEnvs"),
        (
            ["fit", "--model=A2C", "--data.env=gymnasium.make"],
            'Parser key "data.env": Import path gymnasium.make does not correspond to a subclass '
            "of EnvFactory; one of Gymnasium is named by --data.env=GymEnvs --data.env.id=module:",
        ),
        (
            ["fit", "--model=A2C", "--data.env=CartPole-v1"],
            'Parser key "data.env": Expected a dot import path string: CartPole-v1; one of '
            "Gymnasium is named by --data.env=GymEnvs --data.env.id=CartPole-v1",
        ),
        (["play", *CARTPOLE, *A2C], "play needs --ckpt_path"),
        (["export", *CARTPOLE, *A2C], "export needs --ckpt_path"),
        (["validate", *CARTPOLE, *A2C, "--ckpt_path=x"], "--ckpt_path=x: there is no such file"),
        (["advise", *CARTPOLE, *A2C, "--seconds=.nan"], "--seconds=nan; more than 0 is needed"),
        (["advise", *CARTPOLE, *A2C, "--data.collection=actors"], "--data.collection=actors: "),
        (["verify", *CARTPOLE, *A2C, "--data.collection=server"], "--data.collection=server: "),
        (["advise", *CARTPOLE, *A2C, "--data.backend=ray"], "--data.backend=ray: advise measures"),
        (["advise", *CARTPOLE, *A2C, "--data.step_barrier=true"], "--data.step_barrier=true: "),
        (["doctor", "--fast"], "doctor takes no arguments: --fast"),
        (["report", "r" * 300], "[Errno 36] File name too long: 'rrr"),
        (["fit", f"--config={'c' * 300}"], f"--config={'c' * 300}: File name too long"),
    ],
)
def test_a_wrong_command_ends_with_one_line_and_status_2(arguments, message, capsys):
    assert refused(capsys, *arguments).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.clip=0.1", "--model=A2C"], "--model.clip: --model=hts_torchrl.A2C, which"),
        (
            ["--data.env.kwargs.size=3", "--data.env=AtariEnvs", "--data.env.game=pong"],
            "--data.env.kwargs.size: --data.env=hts_torchrl.AtariEnvs, which follows, has no 'kwar",
        ),
    ],
)
def test_a_setting_that_the_class_behind_it_has_not_is_refused(
    arguments, message, tmp_path, capsys
):
    config = {
        "model": {"class_path": "PPO"},
        "data": {
            "env": {"class_path": "GymEnvs", "init_args": {"id": "CartPole-v1"}},
            "frames_per_batch": 32,
            "total_frames": 96,
        },
    }
    path = write(tmp_path / "ppo.yaml", **config)
    assert refused(capsys, "fit", f"--config={path}", *arguments).startswith(message)


def test_all_arguments_of_a_class_may_come_before_it(capsys):
    arguments = ['--model.init_args={"gamma": 0.5}', "--model.init_args.epsilon=0.1", *A2C]
    with pytest.raises(SystemExit) as left:
        run("fit", *CARTPOLE, *arguments, "--print_config")
    assert left.value.code == 0
    given = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]
    assert (given["gamma"], given["epsilon"]) == (0.5, 0.1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model=lies_here.Learner"],
        ["--data.env.id=lies_here:Game-v0"],
        ["--data.env.imports=[lies_here]"],
    ],
)
def test_a_module_of_the_working_folder_is_told_how_to_be_found(arguments, capsys):
    Path("lies_here.py").write_text("")
    message = refused(capsys, "fit", *CARTPOLE, *A2C, *arguments)
    assert message.endswith("(it lies in this folder, and PYTHONPATH=. finds it)")


def test_seeds_behind_a_flag_that_stands_before_fit_are_refused(capsys):
    Path("cartpole.yaml").write_text("name: mine\n")
    message = refused(capsys, "--config=cartpole.yaml", "fit", *CARTPOLE, *A2C, "--seeds", "1", "2")
    assert message == "--seeds: name fit before all flags"


def test_a_config_whose_name_is_null_is_refused(tmp_path, capsys):
    config = write(tmp_path / "unnamed.yaml", name=None)
    message = refused(capsys, "fit", *CARTPOLE, *A2C, f"--config={config}")
    assert message == "name: null in a config file: the name of a folder is needed"


class RemovesTheFolder(Callback):
    """As a user does who tidies up while a run goes on."""

    def on_train_batch_end(self, trainer, *_):
        shutil.rmtree(trainer.log_dir)


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_a_run_whose_folder_is_removed_ends_with_one_line(capsys):
    logger = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=."]
    removes = f"--trainer.callbacks={__name__}.RemovesTheFolder"
    with pytest.raises(SystemExit) as left:
        run("fit", *CARTPOLE, *A2C, *logger, removes, "--trainer.enable_checkpointing=false")
    assert left.value.code == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("hts-torchrl: error: ")
    assert last.endswith("version_0/metrics.csv was removed while the run wrote it")


def test_a_config_behind_a_pipe_is_refused(capsys):
    os.mkfifo("pipe")
    message = refused(capsys, "fit", *CARTPOLE, *A2C, "--config=pipe")
    assert message == "--config=pipe: a pipe is read only once; a file is needed"


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as left:
        run("--version")
    assert left.value.code == 0
    with Path(__file__).parents[3].joinpath("pyproject.toml").open("rb") as project:
        assert capsys.readouterr().out.split()[-1] == tomllib.load(project)["project"]["version"]


@pytest.mark.parametrize("command", [*sorted(ALL_SUBCOMMANDS), "report", "tune", "doctor"])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as left:
        run(command, "--help")
    assert left.value.code == 0
    usage = capsys.readouterr().out.splitlines()[0]
    assert usage.startswith("usage: ")
    assert f" {command} " in usage


def test_a_wrong_command_is_told_with_all_that_there_are(capsys):
    message = refused(capsys, "repor", "runs")
    assert all(f"'{name}'" in message for name in [*ALL_SUBCOMMANDS, "report", "tune", "doctor"])


def test_a_wrong_choice_is_told_without_the_whole_configuration(capsys):
    message = refused(capsys, "fit", *CARTPOLE, *A2C, "--data.collection=lazy")
    assert "Got value: lazy" in message
    assert "Namespace" not in message


RUBBISH = [
    {"state_dict": {}},
    {"state_dict": [torch.zeros(1)], "updates": 3},
    {"state_dict": {"a": 3}, "updates": 3},
    {"state_dict": {3: torch.zeros(1)}, "updates": 3},
    {"state_dict": {}, "updates": "many"},
    {"state_dict": {}, "updates": -1},
]


def half_a_checkpoint():
    whole = io.BytesIO()
    torch.save({"state_dict": {"weights": torch.zeros(40_000)}}, whole)
    return whole.getvalue()[:9_000]


@pytest.mark.parametrize(
    "subcommand",
    [
        "fit",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("validate", "play", "export")
        ),
    ],
)
@pytest.mark.parametrize(
    "content", [b"PK\x03\x04 and no more", b"", half_a_checkpoint(), [1, 2], *RUBBISH]
)
def test_a_file_that_is_no_checkpoint_is_refused(subcommand, content, tmp_path, capsys):
    if isinstance(content, bytes):
        (tmp_path / "half.ckpt").write_bytes(content)
    else:
        torch.save(content, tmp_path / "half.ckpt")
    message = refused(capsys, subcommand, *CARTPOLE, *A2C, "--ckpt_path=half.ckpt")
    assert message == "--ckpt_path=half.ckpt: this is no checkpoint, or half of one"


class KeepsAPath(Callback):
    """Its state is no plain value, so nothing loads a checkpoint with it."""

    def state_dict(self):
        return {"place": Path("here")}


def test_a_checkpoint_with_an_object_is_told_by_the_run_and_refused_by_all_commands(capsys):
    run("fit", *CARTPOLE, *A2C, f"--trainer.callbacks={__name__}.KeepsAPath")
    told = capsys.readouterr().out
    path = "runs/run/version_0/checkpoints/best.ckpt"
    assert f"commands:       none, because of {path}: this has objects beside tensors" in told
    assert "hts-torchrl fit" not in told
    message = refused(capsys, "validate", f"--ckpt_path={path}")
    assert message.startswith(f"--ckpt_path={path}: this has objects beside tensors and plain val")


def test_a_file_that_cannot_be_read_is_told_with_the_reason(monkeypatch, capsys):
    message = refused(capsys, "validate", "--ckpt_path=/proc/self/mem")
    assert message == "--ckpt_path=/proc/self/mem: Input/output error"

    def fail(_):
        raise PermissionError(errno.EACCES, "Permission denied", "last.ckpt")

    monkeypatch.setattr("hts_torchrl.cli.main._run", fail)
    assert refused(capsys, "fit") == "[Errno 13] Permission denied: 'last.ckpt'"


class Predicting(A2CLearner):
    """A learner whose predictions are its own."""

    def predict_step(self, evaluation, _):  # noqa: ARG002
        return 3.0


@pytest.mark.parametrize(
    ("model", "first", "told"),
    [
        (A2CLearner, True, "game 0: score 3, 5 steps\n"),
        (A2CLearner, False, ""),
        (Predicting, True, ""),
    ],
)
def test_one_rank_tells_the_games_that_all_have_played(model, first, told, capsys):
    games = {"score": torch.tensor([3.0]), "length": torch.tensor([5])}
    loop = SimpleNamespace(predictions=[games if model is A2CLearner else 3.0])
    trainer = SimpleNamespace(is_global_zero=first, predict_loop=loop)
    HTSCommandLine.after_predict(SimpleNamespace(trainer=trainer, model=model()))
    assert capsys.readouterr().out == told


# A billion laughs, as lists and as mappings that are merged.
LAUGHS = "a0: &a0 [ha]\n" + "".join(
    f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 10)}]\n" for number in range(1, 12)
)
MERGED_LAUGHS = "a0: &a0 {ha: 1}\n" + "".join(
    f"a{number}: &a{number}\n  <<: [{', '.join([f'*a{number - 1}'] * 10)}]\n"
    for number in range(1, 12)
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [1,\n", "--config=bad.yaml: while parsing"),
        ("- 1\n", "--config=bad.yaml: it is a list; settings by name are needed"),
        ("# nothing\n", "--config=bad.yaml: it is empty; settings by name are needed"),
        ("data:\n  num_envs: 4\n  num_envs: 8\n", "--config=bad.yaml: it has num_envs twice"),
        ("trainer: {logger: !!bool maybe}\n", "--config=bad.yaml: a value is none of the type"),
        ("data:\n  seed: 5\n", "--config=bad.yaml: data.seed is seed_everything: give that"),
        ("data.seed: 5\n", "--config=bad.yaml: data.seed is seed_everything: give that"),
        ("data: []\n", "--config=bad.yaml: data=[]; settings by name are needed"),
        ("trainer: false\n", "--config=bad.yaml: trainer=False; settings by name are needed"),
        ("base: 3\n", "--config=bad.yaml: base=3; one file or a list is needed"),
        ("base: {a: 1}\n", "--config=bad.yaml: base={'a': 1}; one file or a list"),
        ("base: [[a]]\n", "--config=bad.yaml: base=[['a']]; one file or a list"),
        ("data: {nums: 3}\n", "--config=bad.yaml: Subcommand 'fit' does not accept option "),
        (b"\xff\xfe\x00\x01", "--config=bad.yaml: "),
        ("data: " + "[" * 60 + "]" * 60, "--config=bad.yaml: it nests too deeply"),
        ("data: " + "[" * 3000 + "]" * 3000, "--config=bad.yaml: it nests too deeply"),
        ("trainer: &a\n  logger: *a\n", "--config=bad.yaml: an alias stands for what it is part"),
        (LAUGHS, "--config=bad.yaml: its aliases stand for more than 100000 entries"),
        (MERGED_LAUGHS, "--config=bad.yaml: its aliases stand for more than 100000 entries"),
    ],
)
def test_a_file_that_is_no_config_is_refused(content, message, tmp_path, capsys):
    text = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "bad.yaml").write_bytes(text)
    refusal = refused(capsys, "fit", *CARTPOLE, *A2C, "--config=bad.yaml")
    assert refusal.startswith(message)


def test_a_link_to_itself_is_refused(tmp_path, capsys):
    (tmp_path / "circle").symlink_to("circle")
    refusal = refused(capsys, "fit", *CARTPOLE, *A2C, "--config=circle")
    assert refusal == "--config=circle: Too many levels of symbolic links"
    refusal = refused(capsys, "validate", "--ckpt_path=circle")
    assert refusal == f"--ckpt_path={tmp_path / 'circle'}: there is no such file"


def test_a_folder_of_runs_that_is_a_dangling_link_is_refused(tmp_path, capsys):
    (tmp_path / "runs").symlink_to("elsewhere")
    refusal = refused(capsys, "fit", *CARTPOLE, *A2C)
    told = "a file is where a folder is needed"
    assert refusal == f"the run's folder runs/run/version_0: {told}: runs"


def test_files_that_cannot_be_opened_any_more_are_told_with_the_limit(monkeypatch, capsys):
    def fail(_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("hts_torchrl.cli.main._run", fail)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert refused(capsys, "fit").endswith(f"the limit is {limit}, raise it (ulimit -n)")


def test_an_argument_that_the_locale_cannot_hold_is_told_with_what_helps(monkeypatch, capsys):
    """As under LANG=C with PYTHONUTF8=0, where the two bytes of an umlaut are no text."""
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "ascii")
    message = refused(capsys, "fit", "--name=\udcc3\udcbcb")
    assert message.endswith("this Python takes arguments for ascii: set PYTHONUTF8=1")


@pytest.mark.parametrize(("batches", "frames"), [("true", 32), ("2", 64)])
def test_a_fast_development_run_writes_nothing(batches, frames, tmp_path, capsys):
    run("fit", *CARTPOLE, *A2C, f"--trainer.fast_dev_run={batches}")
    assert f"trained:        {frames} frames" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_wrong_input_leaves_no_folder_behind(tmp_path, capsys):
    refused(capsys, "fit", *CARTPOLE, *A2C, "--data.frames_per_batch=30")
    assert list(tmp_path.iterdir()) == []


_ENDED = "At least one process failed: worker 1 (exit code -9). Check for more infos in the log."
_LOST = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
_NOT_MET = "Timed out after 26 seconds waiting for clients. 1/2 clients joined."
_CLOSED = "Application timeout caused pair closure"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            WorkerKilled(WorkerPlace("actor", 0, (), 7, 0), "was killed by SIGKILL"),
            "actor 0, round 7: was killed by SIGKILL; --data.recover=replay repeats a round up to "
            "3 times, --ckpt_path resumes",
        ),
        (
            RuntimeError(_LOST),
            f"another rank has ended or cannot be reached, and its own lines say why: {_LOST}",
        ),
        *(
            (
                RuntimeError(lost),
                f"another rank has ended or cannot be reached, and its own lines say why: {lost}",
            )
            for lost in (_CLOSED, _NOT_MET)
        ),
        (
            RuntimeError(_ENDED),
            "a worker was killed, or has ended and says why above (is /dev/shm too small?): "
            f"{_ENDED}",
        ),
        (
            RuntimeError("ProcessInferenceServer process is not alive (exitcode=-9)."),
            "a worker was killed, or has ended and says why above (is /dev/shm too small?): "
            "ProcessInferenceServer process is not alive (exitcode=-9).",
        ),
    ],
    ids=[
        "a killed worker",
        "a rank that another has left",
        "a rank that has waited too long for another",
        "a rank that has met no other",
        "a killed worker of TorchRL's",
        "a killed server of TorchRL's",
    ],
)
def test_what_another_process_caused_ends_with_one_line(error, told, monkeypatch, capsys):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("hts_torchrl.cli.main.run_subcommand", fail)
    with pytest.raises(SystemExit) as left:
        run("fit")
    assert left.value.code == 1
    assert capsys.readouterr().err == f"hts-torchrl: error: {told}\n"


def test_a_port_that_is_in_use_is_told_by_the_variable_that_names_it(monkeypatch, capsys):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        listen = partial(torch.distributed.TCPStore, "127.0.0.1", port, 1, is_master=True)
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setattr("hts_torchrl.cli.main.run_subcommand", lambda *_, **__: listen())
        message = refused(capsys, "fit")
    assert message == f"MASTER_PORT={port}: it is in use on this machine; another one is needed"


def test_a_missing_package_ends_with_its_name(monkeypatch, capsys):
    def fail(*_, **__):
        raise ModuleNotFoundError("`MLFlowLogger` needs `mlflow`")

    monkeypatch.setattr("hts_torchrl.cli.main.run_subcommand", fail)
    assert refused(capsys, "fit") == "`MLFlowLogger` needs `mlflow`"


class TestProcessGroup:
    """Gloo's threads abort a process that leaves them to the end of the interpreter."""

    @pytest.fixture
    def end(self, monkeypatch):
        """Calls the command line, whose run joins a group and ends as it is told."""

        def end(error=None):
            def subcommand(_line, _name):
                store = torch.distributed.HashStore()
                torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
                if error is not None:
                    raise error

            monkeypatch.setattr(HTSCommandLine, "_run_subcommand", subcommand)
            run("fit", *CARTPOLE, *A2C)

        return end

    def test_is_closed_when_a_run_ends(self, end):
        end()
        assert not torch.distributed.is_initialized()

    def test_is_closed_when_ranks_stop_together(self, end):
        with pytest.raises(SystemExit, match="143"):
            end(Stopped(143))
        assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("arguments", [["fit", "--help"], ["--help"]])
def test_help_knows_the_chosen_subcommand_or_all(arguments, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["hts-torchrl", *arguments])
    built = set(HTSCommandLine.subcommands())
    assert built == ({"fit"} if arguments[0] == "fit" else ALL_SUBCOMMANDS)
    with pytest.raises(SystemExit) as left:
        run(*arguments)
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert ("--data.num_envs" in out) == (arguments[0] == "fit")
    assert all(f"\n    {name} " in out for name in built - {"fit"})


def test_help_lists_the_classes_that_users_name(capsys):
    with pytest.raises(SystemExit):
        run("fit", "--help")
    listed = set(re.findall(r"hts_torchrl\.[\w.]+", "".join(capsys.readouterr().out.split())))
    checkpoints = ("training.callbacks.BestCheckpoint", "training.callbacks.LastCheckpoint")
    assert {f"hts_torchrl.{name}" for name in ("PPO", "GymEnvs", "LearningCurve")} < listed
    assert listed <= {f"hts_torchrl.{name}" for name in (*hts_torchrl.__all__, *checkpoints)}


def test_help_of_a_class_has_the_docstrings_of_its_fields(capsys):
    with pytest.raises(SystemExit):
        run("fit", "--data.env.help=GymEnvs")
    told = " ".join(capsys.readouterr().out.split())
    assert "--data.env.kwargs KWARGS Further arguments of ``gymnasium.make``." in told
