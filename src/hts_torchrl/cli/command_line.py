"""The arguments of the command line, and what is made of them."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import itertools
import json
import os
import pkgutil
import re
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import yaml
from jsonargparse import SUPPRESS, ActionYesNo, Namespace
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning_utilities.core.enums import StrEnum
from omegaconf.errors import OmegaConfBaseException

from hts_torchrl.cli.argument_parser import NO_FLAGS, HTSArgumentParser, reason_in
from hts_torchrl.cli.checkpoint_settings import CheckpointSettings
from hts_torchrl.cli.config_files import checkpoint_of, classes_given, files_with, is_given
from hts_torchrl.cli.run_folder import expanded, folder_of_job, make_run_folder
from hts_torchrl.compat.lightning import CommandLine
from hts_torchrl.errors import ConfigurationError, naming, require
from hts_torchrl.learner import Learner
from hts_torchrl.portable import VARIABLES, is_portable
from hts_torchrl.training.callbacks import (
    BestCheckpoint,
    LastCheckpoint,
    LearningCurve,
    RoundTrace,
    StopTogether,
    TrainingStatistics,
)
from hts_torchrl.training.callbacks.progress import ProgressLine
from hts_torchrl.training.callbacks.stop_together import end_at_once
from hts_torchrl.training.checkpoints import DurableCheckpointIO, whole_checkpoint
from hts_torchrl.training.extended_hooks import is_of_the_user
from hts_torchrl.training.run_settings import plain
from hts_torchrl.training.trainer_limits import require_supported

# A default of Timer's is one, which YAML cannot write.
yaml.SafeDumper.add_multi_representer(
    StrEnum, lambda dumper, member: dumper.represent_str(member.value)
)


class HTSCommandLine(CommandLine):
    """LightningCLI with this project's subcommands and defaults."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommands, and what each does not take as flags.

        Where one is the first argument, it alone: the parsers of all take most of a start's time.
        """
        chosen = sys.argv[1:2]
        return {name: NO_FLAGS[name] for name in chosen if name in NO_FLAGS} or NO_FLAGS

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
        parser.add_argument(
            "--portable",
            action=ActionYesNo,
            nargs="?",
            default=False,
            help="the same bits on every x86-64 processor with AVX2, in float32 on the CPU; slower",
        )
        if sys.argv[1:2] == ["fit"]:
            parser.add_argument(
                "--seeds",
                type=_Seeds(),
                default=SUPPRESS,
                metavar="SEED ...",
                help="train one run after another, each with one of these as --seed_everything",
            )
        if sys.argv[1:2] in (["advise"], ["verify"]):  # which the config of a run has
            for flag, kind in (("--ckpt_path", str | None), ("--weights_only", bool | None)):
                parser.add_argument(flag, type=kind, default=None, help=SUPPRESS)
        parser.link_arguments(
            "seed_everything", "data.seed", compute_fn=lambda seed: int(seed or 0)
        )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:  # noqa: ANN401
        """Add this project's callbacks and checkpoints, and give all loggers the same version."""
        settings = vars(self.setting("trainer"))
        if settings["barebones"]:  # Lightning refuses them beside it
            settings = {**settings, **dict.fromkeys(_NOT_BAREBONES, False)}
        callbacks, last = _callbacks(settings, self.setting("trace"))
        name = os.path.expandvars(self.setting("name"))  # which TensorBoardLogger alone would do
        if settings["logger"] in (None, True):  # made here, so that --name decides to the last
            runs = str(Path(expanded(settings["default_root_dir"] or ""), "runs"))
            kwargs["logger"] = [TensorBoardLogger(runs, name), CSVLogger(runs, name)]
        kwargs |= folder_of_job(settings, name)
        plugins = _listed(settings["plugins"])
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins = [*plugins, DurableCheckpointIO()]
        try:
            trainer = super().instantiate_trainer(callbacks=callbacks, plugins=plugins, **kwargs)
        except (TypeError, RuntimeError) as error:
            # This is how Lightning refuses a number of devices, and one of SLURM's tasks.
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
            if logger.version is None:  # WandbLogger knows its run's id once the run has begun
                _ = logger.experiment  # type: ignore[attr-defined] # each of Lightning's has it
        return trainer

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:  # noqa: ARG002
        """Put the checkpoint's settings before everything that the user has given."""
        path = checkpoint_of(sys.argv[1:])
        self._checkpoint = _settings_of(path)
        if self._checkpoint is not None and (own := _named_too(self._checkpoint)):
            self._checkpoint = _settings_of(path, own)
        self._parse(parser)
        settings, name = self.config[self.config.subcommand], self.config.subcommand
        if name in ("advise", "verify") and settings.get("ckpt_path") is not None:
            raise ConfigurationError(f"{name} trains from the start: give --ckpt_path=null")
        _require_possible(settings)
        _require_kept(settings, sys.argv[1:])

    def _parse(self, parser: LightningArgumentParser) -> None:
        arguments = sys.argv[1:]
        if self._checkpoint is not None:
            config = json.dumps(self._checkpoint.config)
            arguments = [*arguments[:1], "--config", config, *arguments[1:]]
        try:
            self.config = parser.parse_args(arguments)
        except RecursionError as error:
            longest = max(sys.argv, key=len)
            raise ConfigurationError(f"{longest[:60]}...: it nests too deeply") from error
        except (ConfigurationError, OmegaConfBaseException) as error:
            self._explain_missing(error)
            wrong = self._explained(str(error))
            setting = ".".join(filter(None, itertools.chain(*_SETTING.findall(wrong))))
            files = [] if wrong.startswith("--config=") else files_with(setting, sys.argv[1:])
            where = f"--config={' or '.join(files)}: " if files else ""
            raise ConfigurationError(where + wrong) from error

    def _explained(self, wrong: str) -> str:
        """Return what is wrong, with what was meant by a setting that is unknown."""
        unknown = _UNKNOWN.fullmatch(wrong)
        if unknown is None:
            return wrong
        if sys.argv[1] not in NO_FLAGS:
            return "name fit, or another command, before all flags"
        flag = unknown["flag"] or f"--{unknown['name']}"
        if flag.partition(".")[0] in ("--optimizer", "--lr_scheduler"):
            return f"{wrong} ({_OPTIMIZERS})"
        meant = difflib.get_close_matches(flag, self.flags(), n=1, cutoff=0.8)
        if not meant or meant[0] == flag:  # as behind --model.help=PPO, which takes what follows
            return wrong
        name = meant[0] if unknown["flag"] else meant[0].removeprefix("--")
        return f"{wrong} (did you mean {name}?)"

    def _explain_missing(self, error: Exception) -> None:
        """Say why the checkpoint has no setting that is missing, if one is."""
        if self._checkpoint is None or "required" not in str(error):
            return
        for setting in ("model", "data.env"):
            if setting in self._checkpoint.withheld and f"--{setting}" in str(error):
                raise self._checkpoint.refusal(setting) from error

    def prepare_checkpoint(self) -> None:
        """Take the checkpoint before a damaged one; require names for what it would import."""
        arguments = self.config[self.config.subcommand]
        if self._checkpoint is None:
            return
        arguments["ckpt_path"] = str(whole_checkpoint(Path(arguments["ckpt_path"])))
        withheld = self._checkpoint.withheld
        for setting in withheld:
            section, _, name = setting.rpartition(".")
            has_it = name in (arguments.get(f"{section}.init_args") or {})  # a class may have none
            if has_it and section not in withheld and not is_given(setting, sys.argv[1:]):
                raise self._checkpoint.refusal(setting)
        if (
            arguments.get(_OF_POLICY + "class_path")
            == withheld.get("model.policy", "").split(" ")[0]
        ):
            self._require_policy_arguments(_arguments_of_policy(arguments))
        if self.config.subcommand != "fit" and {"data.env", "data.env.kwargs"} <= withheld.keys():
            env, given = (arguments.get(f"data.env.{each}") for each in ("class_path", "init_args"))
            same = f"{env.rpartition('.')[2]} --data.env.id={shlex.quote(str(given.get('id')))} "
            if withheld["data.env"].startswith(same) and not given.get("kwargs"):
                raise self._checkpoint.refusal("data.env.kwargs")

    def _require_policy_arguments(self, own: Mapping[str, Any]) -> None:
        """Refuse another argument of the checkpoint's policy that is only its class's default."""
        assert self._checkpoint is not None
        for name, value in self._checkpoint.policy_arguments.items():
            is_same = name in own and own[name] == value
            if not is_same and not is_given(f"model.policy.{name}", sys.argv[1:]):
                raise self._checkpoint.refusal("model.policy")

    def before_instantiate_classes(self) -> None:
        """Begin again as a process whose libraries take portable kernels, if this one's do not."""
        if self.config[self.config.subcommand]["portable"] and not is_portable():
            sys.stdout.flush()
            sys.stderr.flush()
            arguments = [sys.executable, *sys.orig_argv[1:]]
            os.execve(sys.executable, arguments, os.environ | VARIABLES)

    def instantiate_classes(self) -> None:
        """Report a setting that a class refuses by the class's own words."""
        settings = self.config[self.config.subcommand]
        if given := settings.get("model"):
            _warn_of_hidden_settings(given)
        try:
            super().instantiate_classes()
            self.model.policy_arguments = _arguments_of_policy(settings)
        except (ValueError, ImportError) as error:
            refused = error.__cause__ if isinstance(error.__cause__, ConfigurationError) else error
            raise ConfigurationError(reason_in(str(refused))) from error

    def before_fit(self) -> None:
        """Refuse a folder that cannot be made before anything else is."""
        given = vars(self.setting("trainer"))["logger"]
        goes_on = self.subcommand != "fit" or self.setting("ckpt_path") or SLURMEnvironment.detect()
        make_run_folder(self.trainer, anew=given in (None, True), goes_on=bool(goes_on))

    before_validate = before_test = before_predict = before_fit

    def after_predict(self) -> None:
        """Tell each game's score and length, once: each rank has played them all."""
        if not self.trainer.is_global_zero or type(self.model).predict_step != Learner.predict_step:
            return  # of a predict_step of the user's own nothing is known
        for games in self.trainer.predict_loop.predictions:
            for game, score in enumerate(games["score"]):
                length = games["length"][game]
                print(f"game {game}: score {float(score):g}, {int(length)} steps")  # noqa: T201


def _warn_of_hidden_settings(given: Namespace) -> None:
    """Warn of a class that no config can give the settings of its base: they are left out.

    jsonargparse follows ``super().__init__(**settings)``, and no other form of it.
    """
    cls = pkgutil.resolve_name(given.class_path)
    if not isinstance(cls, type):  # a function that makes a learner
        return
    own = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    base = next((each for each in cls.__mro__ if not is_of_the_user(each)), object)
    passed_on = any(each.kind is each.VAR_KEYWORD for each in own.values())
    if base is cls or not issubclass(base, Learner) or not passed_on:
        return
    settings = inspect.signature(base).parameters.keys() - own.keys()
    if settings.isdisjoint(given.get("init_args", {}).keys()):
        warnings.warn(
            f"--model={given.class_path}: settings of {base.__name__} in a config are left out, "
            f"as the command line cannot see that {cls.__name__} takes them: let its constructor "
            "pass on its **settings as they are, by super().__init__(**settings)",
            stacklevel=2,
        )


class _Seeds:
    """The type that help shows of ``--seeds``, which is taken before anything is parsed."""

    def __repr__(self) -> str:
        return "int ..."

    def __call__(self, value: object) -> NoReturn:
        raise ValueError(f"seeds={value} in a config file; --seeds belongs on the command line")


_UNKNOWN = re.compile(
    r"unrecognized arguments: (?P<flag>[^\s=]+).*|.* does not accept option '(?P<name>[\w.]+)'"
)
"""A flag, or an entry of a config file."""
_SETTING = re.compile(
    r"Parser key \"([\w.]+)\"|Group '([\w.]+)'|[Oo]ption '([\w.]+)'|full_key: \w+\.([\w.]+)"
)
"""Parts of the name of a wrong setting, in messages of jsonargparse and OmegaConf."""
_OPTIMIZERS = (
    "the learner makes its own: --model.optimizer, --model.learning_rate_decay, or a class with "
    "another configure_optimizers"
)
_NOT_BAREBONES = ("logger", "enable_checkpointing", "enable_progress_bar")


def _callbacks(
    settings: Mapping[str, Any], trace: int | None
) -> tuple[list[Callback], LastCheckpoint | None]:
    """Return the callbacks, ours only where the user gives none like it; and the LastCheckpoint."""
    given = _listed(settings["callbacks"])
    last = None
    if settings["enable_checkpointing"] is not False:
        last = next((each for each in given if isinstance(each, LastCheckpoint)), LastCheckpoint())
    ours: list[Callback] = [TrainingStatistics(), LearningCurve(), StopTogether(last)]
    if trace is not None:
        ours.append(RoundTrace(trace))
    if last is not None:
        ours += [BestCheckpoint(), last]  # in which is then the best score with the latest
    own_bar = any(isinstance(each, ProgressBar) for each in given)
    if settings["enable_progress_bar"] is not False and not own_bar:
        ours.append(ProgressLine())
    others = [e for e in ours if not any(isinstance(mine, type(e)) for mine in given)]
    # Statistics first: they have counted a round where another callback fails at its end.
    by_turn = sorted([*given, *others], key=lambda each: not isinstance(each, TrainingStatistics))
    return by_turn, last


def _listed(given: Any) -> list[Any]:  # noqa: ANN401 - the Trainer takes one, a list or None
    return given if isinstance(given, list) else [given] if given else []


def _require_possible(settings: Namespace) -> None:
    """Refuse what has a right type and cannot be: numbers, a name, a model, devices."""
    for name, value in settings.items():
        if name == "seed_everything":
            if isinstance(value, bool):
                told = str(value).lower()
                raise ConfigurationError(f"--{name}={told}: give a number, such as 0")
            require(0 <= value < 2**32, f"--{name}={value}", f"0 to {2**32 - 1}")
        if isinstance(value, int) and abs(value) > sys.maxsize:
            raise ConfigurationError(f"--{name}={value}; at most {sys.maxsize} is possible")
    if not (name := settings.get("name")):
        told = "--name=" if name == "" else "name: null in a config file"
        raise ConfigurationError(f"{told}: the name of a folder is needed")
    root = settings.get("trainer.default_root_dir")
    if root is not None and Path(os.path.expandvars(name)).is_absolute():
        raise ConfigurationError(
            f"--name={name}: a whole path has no place in --trainer.default_root_dir={root}; give "
            "one of the two"
        )
    if settings.get("model.class_path") == "hts_torchrl.Learner":  # which settings alone stand for
        raise ConfigurationError("--model: name a class: PPO, A2C, ... or module.Class")
    devices, most = str(settings.get("trainer.devices")), max(8, os.cpu_count() or 1)
    if devices.isdecimal() and int(devices) > most:
        raise ConfigurationError(
            f"--trainer.devices={devices}: this machine has {os.cpu_count()} cores; at most "
            f"{most} is possible"
        )


_ARGUMENTS = ("init_args", "dict_kwargs")
"""Where a config has those of a class."""


def _require_kept(settings: Namespace, arguments: Sequence[str]) -> None:
    """Refuse a flag that was dropped because the class named behind it has no such argument.

    Behind the first class it belongs to that one, and another one replaces both.
    """
    for setting in ("model", "data.env"):
        chosen = settings.get(setting)
        for argument in arguments if chosen is not None else ():
            flag = argument.partition("=")[0].removesuffix("+")
            if flag in (f"--{setting}", f"--{setting}.class_path"):
                break
            words = flag.removeprefix(f"--{setting}.").split(".")
            name = words[1 if words[0] in _ARGUMENTS and words[1:] else 0]
            known = name in _ARGUMENTS or any(name in chosen.get(each, {}) for each in _ARGUMENTS)
            if flag.startswith(f"--{setting}.") and not known:
                raise ConfigurationError(
                    f"{flag}: --{setting}={chosen.class_path}, which follows, has no {name!r}"
                )


_OF_POLICY = "model.init_args.policy."


def _arguments_of_policy(settings: Namespace) -> dict[str, Any]:
    """Return the arguments of a policy of the user's own, as a checkpoint holds them."""
    given = settings.get(_OF_POLICY + "init_args")
    return {} if given is None else plain(given.as_dict())


def _named_too(checkpoint: CheckpointSettings) -> dict[str, type]:
    """Return the classes that a checkpoint names, and the user's own command or config as well."""
    own: dict[str, type] = {}
    for setting in ("model", "data.env"):
        name = checkpoint.withheld.get(setting)
        if name is not None and name in classes_given(setting, sys.argv[1:]):
            with contextlib.suppress(ImportError, AttributeError, ValueError):  # told by the parser
                own[name] = pkgutil.resolve_name(name)
    return {name: each for name, each in own.items() if inspect.isclass(each)}


def _settings_of(
    path: str | None, own: Mapping[str, type] = MappingProxyType({})
) -> CheckpointSettings | None:
    """Read the checkpoint that the user names, or the one before if it is damaged."""
    if path is None:
        return None
    try:
        whole = whole_checkpoint(Path(path))
    except ConfigurationError as error:
        hint = ""
        if path in ("best", "last", "hpc"):  # Lightning's words for what a Trainer has saved
            hint = " (give a path, such as runs/NAME/version_0/checkpoints/last.ckpt)"
        raise ConfigurationError(f"--ckpt_path={error}{hint}") from error
    with naming("--ckpt_path", path):
        return CheckpointSettings.read(whole, own)
