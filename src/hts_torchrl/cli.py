"""The command line ``hts-torchrl``, and its subcommands: ``fit``, ``validate``, ``play``, ..."""

from __future__ import annotations

# First, before torch is loaded.
import hts_torchrl.working_folder  # noqa: F401

# isort: split

import contextlib
import errno
import json
import math
import os
import resource
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import gymnasium
import imageio
import torch
import yaml
from jsonargparse import Namespace, set_parsing_settings
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ProgressBar, TQDMProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.enums import StrEnum
from omegaconf.errors import OmegaConfBaseException

from hts_torchrl.advisor import Advisor
from hts_torchrl.callbacks import (
    BestCheckpoint,
    LastCheckpoint,
    LearningCurve,
    RoundTrace,
    StopTogether,
    TrainingStatistics,
)
from hts_torchrl.callbacks.stop_together import end_at_once, leave_together
from hts_torchrl.checkpoint_settings import CheckpointSettings
from hts_torchrl.checkpoints import DurableCheckpointIO, whole_checkpoint
from hts_torchrl.config_files import checkpoint_of, expand_configs
from hts_torchrl.data import HTSDataModule
from hts_torchrl.doctor import examine
from hts_torchrl.envs.atari import AtariEnvs  # noqa: F401 - makes --data.env=AtariEnvs known
from hts_torchrl.envs.football import FootballEnvs  # noqa: F401
from hts_torchrl.envs.gym import GymEnvs  # noqa: F401
from hts_torchrl.errors import (
    CheckpointError,
    ConfigurationError,
    DifferenceError,
    NotFiniteError,
    ReplayError,
    WorkerError,
    WorkerKilled,
)
from hts_torchrl.learner import A2C, PPO, Impala, Learner  # noqa: F401
from hts_torchrl.policy_file import save_policy
from hts_torchrl.trainer_limits import require_supported
from hts_torchrl.verification import Manifest, first_difference, record


class HTSTrainer(Trainer):
    """Lightning's Trainer, which also plays, exports, advises and verifies."""

    @property
    def log_dir(self) -> str | None:
        """The run's folder; where a logger has none of its own, the one above its checkpoints."""
        logger = self.logger
        if logger is None or isinstance(logger, TensorBoardLogger | CSVLogger | DummyLogger):
            return super().log_dir
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        folder = Path(logger.save_dir or self.default_root_dir, str(logger.name), version)
        return str(self.strategy.broadcast(str(folder)))

    def play(
        self,
        model: Learner,
        datamodule: HTSDataModule,
        ckpt_path: str | None = None,
        weights_only: bool | None = True,
        video: str = "play.mp4",
        frames_per_second: int = 15,
        greedy: bool = False,
    ) -> None:
        """Play one game with the weights of a checkpoint and write a video of it.

        Args:
            model: the learner whose policy plays.
            datamodule: knows the environment.
            ckpt_path: the checkpoint.
            weights_only: load tensors and plain values only, never code.
            video: file to write, ``.mp4`` or ``.gif``.
            frames_per_second: of the video; one step of the environment is one frame.
            greedy: play the likeliest action instead of a drawn one.
        """
        if ckpt_path is None:
            raise ConfigurationError("play needs --ckpt_path")
        if Path(video).suffix not in (".mp4", ".gif"):
            raise ConfigurationError(f"--video={video}: a name that ends in .mp4 or .gif is needed")
        if frames_per_second < 1:
            raise ConfigurationError(
                f"--frames_per_second={frames_per_second}; 1 or more is needed"
            )
        _load_weights(model, datamodule, ckpt_path, weights_only=weights_only)
        evaluation = replace(datamodule.evaluation(precision="32-true"), greedy=greedy)
        frames: list[Any] = list(evaluation.frames(model.actor_critic))
        gif = {"duration": 1000 / frames_per_second, "loop": 0}
        mp4 = {"fps": frames_per_second, "macro_block_size": 2}
        try:
            Path(video).absolute().parent.mkdir(parents=True, exist_ok=True)
            imageio.mimsave(video, frames, **(gif if video.endswith(".gif") else mp4))
        except OSError as error:
            raise ConfigurationError(f"--video={video}: {error.strerror or error}") from error
        print(f"video of {len(frames)} steps: {video}")  # noqa: T201

    def export(
        self,
        model: Learner,
        datamodule: HTSDataModule,
        ckpt_path: str | None = None,
        weights_only: bool | None = True,
        output: str = "policy.safetensors",
    ) -> None:
        """Write the policy of a checkpoint into a safetensors file, which load_policy reads.

        Args:
            model: the learner whose policy it is.
            datamodule: knows the environment.
            ckpt_path: the checkpoint.
            weights_only: load tensors and plain values only, never code.
            output: file to write, ``.safetensors``.
        """
        if ckpt_path is None:
            raise ConfigurationError("export needs --ckpt_path")
        if Path(output).suffix != ".safetensors":
            raise ConfigurationError(
                f"--output={output}: a name that ends in .safetensors is needed"
            )
        built_in = model.policy is None
        _load_weights(model, datamodule, ckpt_path, weights_only=weights_only)
        env = datamodule.env
        settings: dict[str, Any] = asdict(env) if is_dataclass(env) else {}
        environment = {"factory": type(env).__name__, **settings}
        try:
            save_policy(
                model.actor_critic,
                output,
                spec=datamodule.env_spec,
                network=model.network if built_in else None,
                squash=model.squash,
                about={"environment": environment, "updates": model.updates},
            )
        except OSError as error:
            raise ConfigurationError(f"--output={output}: {error}") from error
        print(f"policy after {model.updates} updates: {output}")  # noqa: T201

    def advise(self, model: Learner, datamodule: HTSDataModule, seconds: float = 60.0) -> None:
        """Measure the task, say what speed to expect and which settings suit it, and check that.

        Args:
            model: the learner; it is not trained.
            datamodule: environments and crew.
            seconds: half of them for steps of the environment, half for the check.
        """
        if not 0 < seconds < math.inf:
            raise ConfigurationError(f"--seconds={seconds:g}; more than 0 is needed")
        _require_rounds(datamodule)
        for line in Advisor(model, datamodule, self).report(seconds):
            print(line, flush=True)  # noqa: T201

    def verify(
        self,
        model: Learner,
        datamodule: HTSDataModule,
        updates: int = 20,
        manifest: str | None = None,
    ) -> None:
        """Train twice from the start and compare every bit; exit status 1 if one differs.

        A module that draws from numpy's or Python's global generator is refused by its name.

        The first training has the crew that is configured, the second is the serial twin in this
        process (or, where that is configured, the first has one actor).

        Args:
            model: the learner; it is not trained.
            datamodule: environments and crew.
            updates: length of each training.
            manifest: a file to compare the first training with instead, written if it is not there.
        """
        if updates < 1:
            raise ConfigurationError(f"--updates={updates}; 1 or more is needed")
        _require_rounds(datamodule)
        if model.policy is None:
            model.build_policy(datamodule.env_spec)
        num_actors = max(1, datamodule.crew.num_actors)
        trial = datamodule.for_trial(updates, num_actors=num_actors, debug=True)
        mine = record(model, trial, self)
        if manifest is None:
            name = "the serial twin"
            other = record(model, datamodule.for_trial(updates, num_actors=0, debug=True), self)
        elif (path := Path(manifest)).exists():
            name, other = manifest, Manifest.read(path)
        else:
            mine.write(path)
            print(f"{updates} updates, weights {mine.weights[:16]}: written to {manifest}")  # noqa: T201
            return
        difference = first_difference(mine, other)
        if difference is not None:
            raise DifferenceError(f"this crew and {name} differ: {difference}")
        print(f"{updates} updates, weights {mine.weights[:16]}: the same bits as {name}")  # noqa: T201


def _require_rounds(data: HTSDataModule) -> None:
    if data.collection != "rounds":
        raise ConfigurationError(
            f"--data.collection={data.collection}: advise and verify need rounds; data of any age "
            "has no bits to compare and no rendezvous to wait for"
        )


def _load_weights(
    model: Learner,
    datamodule: HTSDataModule,
    ckpt_path: str,
    *,
    weights_only: bool | None,
) -> None:
    if model.policy is None:
        model.build_policy(datamodule.env_spec)
    checkpoint = torch.load(ckpt_path, map_location="cpu", weights_only=weights_only)
    model.on_load_checkpoint(checkpoint)
    model.load_state_dict(checkpoint["state_dict"])


class HTSArgumentParser(LightningArgumentParser):
    """Reports a wrong argument in one line, without the usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # noqa: ARG002
        """Print what is wrong and exit with status 2."""
        # Behind that it repeats the whole configuration.
        raise ConfigurationError(" ".join(message.split()).partition(" Given value type:")[0])


class HTSCommandLine(LightningCLI):
    """LightningCLI with this project's defaults, and a summary after ``fit``."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommands, each with the arguments that are no flags."""
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
            "validate": {"model", "dataloaders", "datamodule"},
            "test": {"model", "dataloaders", "datamodule"},
            "predict": {"model", "dataloaders", "datamodule"},
            "play": {"model", "datamodule"},
            "export": {"model", "datamodule"},
            "advise": {"model", "datamodule"},
            "verify": {"model", "datamodule"},
        }

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:  # noqa: ANN401
        """Make the parser with one-line errors."""
        parser = HTSArgumentParser(**kwargs)
        parser.add_argument(
            "-c", "--config", action="config", help="YAML file; several are read in order"
        )
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Give environments and actions the seed of everything."""
        parser.add_argument(
            "--base",
            type=str | list[str] | None,
            default=None,
            help="in a config file: file(s) that it builds on, relative to it",
        )
        parser.add_argument("--name", type=str, default="run", help="folder of the run's logs")
        parser.add_argument(
            "--trace",
            type=int | None,
            default=None,
            help="round whose timeline is written to trace.json in that folder (for Perfetto)",
        )
        parser.link_arguments("seed_everything", "data.seed", compute_fn=int)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:  # noqa: ANN401
        """Add this project's callbacks and checkpoints, and give all loggers the same version."""
        settings = vars(self._get(self.config_init, "trainer"))
        if settings["barebones"]:  # Lightning refuses them beside it
            settings = {**settings, **dict.fromkeys(_NOT_BAREBONES, False)}
        last = None if settings["enable_checkpointing"] is False else LastCheckpoint()
        callbacks = _callbacks(settings, last, self._get(self.config_init, "trace"))
        if settings["logger"] in (None, True):  # made here, so that --name decides to the last
            name = self._get(self.config_init, "name")
            kwargs["logger"] = [TensorBoardLogger("runs", name), CSVLogger("runs", name)]
        plugins = settings["plugins"] or []
        plugins = plugins if isinstance(plugins, list) else [plugins]
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins = [*plugins, DurableCheckpointIO()]
        try:
            trainer = super().instantiate_trainer(callbacks=callbacks, plugins=plugins, **kwargs)
        except TypeError as error:  # which is how Lightning refuses a number of devices
            raise ConfigurationError(str(error)) from error
        if self.subcommand == "fit":
            require_supported(trainer)  # before other processes start
        if trainer.world_size > 1:
            end_at_once(trainer.local_rank)
        elif last is not None:
            # Of several ranks, one that failed alone would wait for the others to save with it.
            last.save_on_exception = True
        # Each logger looks for a free version, so all must look before the first makes its folder.
        for logger in trainer.loggers:
            _ = logger.version
        return trainer

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:  # noqa: ARG002
        """Put the checkpoint's settings before everything that the user has given."""
        arguments = sys.argv[1:]
        self._checkpoint = _settings_of(checkpoint_of(arguments))
        if self._checkpoint is not None:
            config = json.dumps(self._checkpoint.config)
            arguments = [*arguments[:1], "--config", config, *arguments[1:]]
        try:
            self.config = parser.parse_args(arguments)
        except OmegaConfBaseException as error:
            raise ConfigurationError(str(error)) from error
        except RecursionError as error:
            longest = max(sys.argv, key=len)
            raise ConfigurationError(f"{longest[:60]}...: it nests too deeply") from error
        except ConfigurationError as error:
            self._explain(error)
            raise
        _require_possible(self.config[self.config.subcommand])

    def _explain(self, error: ConfigurationError) -> None:
        """Say of a setting that is missing why the checkpoint does not give it."""
        if self._checkpoint is None or "required" not in str(error):
            return
        if not self._checkpoint.known:
            raise ConfigurationError(
                f"{error} (--ckpt_path is of a version that kept no settings: add --config with "
                "the config.yaml of its run)"
            ) from error
        for setting in ("model", "data.env"):
            if setting in self._checkpoint.withheld and f".{setting}" in str(error):
                raise self._checkpoint.refusal(setting) from error

    def _parse_ckpt_path(self) -> None:
        """Take the checkpoint before a damaged one; require names for what it would import."""
        arguments = self.config[self.config.subcommand]
        if self._checkpoint is None:
            return
        arguments["ckpt_path"] = str(whole_checkpoint(Path(arguments["ckpt_path"])))
        own = arguments["model"].get("init_args", {})  # of a class that may know neither
        for name, default in (("policy", None), ("network", "mlp")):
            withheld = f"model.{name}" in self._checkpoint.withheld
            if withheld and name in own and own[name] == default:
                raise self._checkpoint.refusal(f"model.{name}")

    def _set_seed(self) -> None:
        """Report a seed that is out of bounds in one line."""
        try:
            super()._set_seed()
        except ValueError as error:
            raise ConfigurationError(f"--seed_everything: {error}") from error

    def instantiate_classes(self) -> None:
        """Report a setting that a class refuses by the class's own words."""
        try:
            super().instantiate_classes()
        except (ValueError, ImportError) as error:
            refused = error.__cause__ if isinstance(error.__cause__, ConfigurationError) else error
            raise ConfigurationError(str(refused)) from error

    def before_fit(self) -> None:
        """Refuse a folder that cannot be made before anything else is."""
        if self.trainer.world_size > 1:  # the next rank would take it for another run's
            return
        directory = Path(self.trainer.log_dir or ".")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"the run's folder {directory}: {error.strerror}") from error

    before_validate = before_test = before_predict = before_fit

    def after_predict(self) -> None:
        """Tell each game's score and length."""
        for games in self.trainer.predict_loop.predictions:
            for game, (score, length) in enumerate(
                zip(games["score"], games["length"], strict=True)
            ):
                print(f"game {game}: score {float(score):g}, {int(length)} steps")  # noqa: T201

    def after_fit(self) -> None:
        """Tell the final score, and where everything lies."""
        directory = self.trainer.log_dir  # which all ranks must ask for, or none
        if not self.trainer.is_global_zero:
            return
        lines = []
        score = self.trainer.callback_metrics.get("eval/score")
        if score is not None:
            lines.append(f"final score:    {float(score):.2f} (mean of the last evaluation)")
        for checkpoint in self.trainer.checkpoint_callbacks:
            path = getattr(checkpoint, "best_model_path", "")
            if path and get_filesystem(path).exists(path):
                label = "best:" if getattr(checkpoint, "monitor", None) else "checkpoint:"
                lines.append(f"{label:15} {path}")
        if directory is not None:
            lines.append(f"log:            {directory}")
        lines += [
            f"learning curve: {callback.path}"
            for callback in self.trainer.callbacks  # type: ignore[attr-defined]
            if isinstance(callback, LearningCurve) and callback.path is not None
        ]
        lines += [
            f"trace:          {callback.path if callback.written else 'the run has no such round'}"
            for callback in self.trainer.callbacks  # type: ignore[attr-defined]
            if isinstance(callback, RoundTrace)
        ]
        print("\n".join(lines))  # noqa: T201


_NOT_BAREBONES = ("logger", "enable_checkpointing", "enable_progress_bar")


def _callbacks(
    settings: Mapping[str, Any], last: LastCheckpoint | None, trace: int | None
) -> list[Callback]:
    """Return the user's callbacks, and ours but for those of which the user gives the like."""
    given = settings["callbacks"] or []
    given = given if isinstance(given, list) else [given]
    ours: list[Callback] = [TrainingStatistics(), LearningCurve(), StopTogether(last)]
    if trace is not None:
        ours.append(RoundTrace(trace))
    if last is not None:
        ours += [last, BestCheckpoint()]
    if settings["enable_progress_bar"] is not False and not any(
        isinstance(each, ProgressBar) for each in given
    ):
        ours.append(TQDMProgressBar(refresh_rate=20))
    return [*given, *(each for each in ours if type(each) not in map(type, given))]


def _require_possible(settings: Namespace) -> None:
    """Refuse numbers beyond those of arrays and loops, and more devices than cores."""
    for name, value in settings.items():
        if isinstance(value, int) and abs(value) > sys.maxsize:
            raise ConfigurationError(f"--{name}={value}; at most {sys.maxsize} is possible")
    devices, most = str(settings.get("trainer.devices")), max(8, os.cpu_count() or 1)
    if devices.isdecimal() and int(devices) > most:
        raise ConfigurationError(
            f"--trainer.devices={devices}: this machine has {os.cpu_count()} cores; at most "
            f"{most} is possible"
        )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _settings_of(path: str | None) -> CheckpointSettings | None:
    """Read the checkpoint that the user names, or the one before if it is damaged."""
    if path is None:
        return None
    try:
        whole = whole_checkpoint(Path(path))
    except ConfigurationError as error:
        raise ConfigurationError(f"--ckpt_path={error}") from error
    try:
        return CheckpointSettings.read(whole)
    except ConfigurationError as error:
        raise ConfigurationError(f"--ckpt_path={path}: {error}") from error


# A default of Timer's is one, which YAML cannot write.
yaml.SafeDumper.add_multi_representer(
    StrEnum, lambda dumper, member: dumper.represent_str(member.value)
)
_TRAINER_DEFAULTS = {"max_epochs": 1, "num_sanity_val_steps": 0, "enable_model_summary": False}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; wrong input ends with one line and status 2."""
    # A run's loggers share one folder on purpose, and a run that goes on from another's checkpoint
    # has its own; the last is between Lightning and torch.
    warnings.filterwarnings("ignore", ".*exists and is not empty")
    warnings.filterwarnings("ignore", "The dirpath has changed")
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec. is deprecated")
    try:
        with _limit_named():
            _run(sys.argv[1:] if arguments is None else arguments)
        leave_together()
    except (
        ConfigurationError,
        MisconfigurationException,
        ModuleNotFoundError,  # of what a callback or a logger needs
        gymnasium.error.Error,
    ) as error:
        _leave(error, status=2)
    except WorkerKilled as error:
        hint = "--data.recover=replay goes on after that, --ckpt_path from a checkpoint"
        _leave(WorkerKilled(error.place, f"{error.cause}; {hint}"), status=1)
    except (CheckpointError, WorkerError, NotFiniteError, ReplayError, DifferenceError) as error:
        _leave(error, status=1)
    except SIGTERMException as stopped:
        leave_together()
        status = 128 + signal.SIGTERM if stopped.code is None else stopped.code
        raise SystemExit(status) from None
    except KeyboardInterrupt:  # before or after Lightning answers it
        raise SystemExit(128 + signal.SIGINT) from None
    except SystemExit as leaving:  # Lightning's answer to Ctrl-C, with status 1
        if isinstance(leaving.__context__, KeyboardInterrupt):
            raise SystemExit(128 + signal.SIGINT) from None
        raise


@contextlib.contextmanager
def _limit_named() -> Iterator[None]:
    """Say which limit it is that allows no further files."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise ConfigurationError(f"{error}: the limit is {most}, raise it (ulimit -n)") from error


def program() -> None:
    """Run the command line as a process of its own, which signals end in good order."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        main()
    finally:  # another signal would end the process before it has cleared away its files
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _terminate(number: int, _: FrameType | None) -> None:
    """End the process in good order, unless Lightning has put a handler before this one."""
    if signal.getsignal(number) is _terminate:
        raise SystemExit(128 + number)


def _run(arguments: Sequence[str]) -> None:
    for argument in arguments:
        if not _is_unicode(argument):
            raise ConfigurationError(f"{argument!a}: this is no UTF-8")
    if list(arguments[:1]) == ["doctor"]:  # which needs neither environment nor learner
        _examine(arguments[1:])
    # ${data.num_envs} in a file means the value that counts in the end, of this subcommand.
    set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
    # Lightning reads the arguments from sys.argv, and warns where they are given otherwise.
    sys.argv[1:] = expand_configs(arguments)
    HTSCommandLine(
        Learner,
        HTSDataModule,
        subclass_mode_model=True,
        trainer_class=HTSTrainer,
        trainer_defaults=_TRAINER_DEFAULTS,
        seed_everything_default=0,
        auto_configure_optimizers=False,  # the learner makes its own, of model.optimizer
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"parser_mode": "omegaconf+", "exit_on_error": True},
    )


def _examine(arguments: Sequence[str]) -> NoReturn:
    """Print what the doctor finds; the exit status is 1 if something is wrong."""
    if arguments:
        raise ConfigurationError(f"doctor takes no arguments: {' '.join(arguments)}")
    findings = []
    for finding in examine():
        print(finding, flush=True)  # noqa: T201
        findings.append(finding)
    raise SystemExit(int(any(finding.mend for finding in findings)))


def _leave(error: Exception, *, status: int) -> NoReturn:
    message = str(error) if isinstance(error, WorkerError) else " ".join(str(error).split())
    sys.stderr.write(f"hts-torchrl: error: {message}\n")
    raise SystemExit(status)


if __name__ == "__main__":
    program()
