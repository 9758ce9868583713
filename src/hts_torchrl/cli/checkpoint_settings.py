"""What the command line takes from a checkpoint: plain settings of known fields, never code."""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

import torch

from hts_torchrl.envs.atari import AtariEnvs
from hts_torchrl.envs.envpool import EnvPoolEnvs
from hts_torchrl.envs.football.envs import FootballEnvs
from hts_torchrl.envs.gym import GymEnvs
from hts_torchrl.envs.pettingzoo import PettingZooEnvs
from hts_torchrl.errors import ConfigurationError, in_one_line
from hts_torchrl.learner import A2C, PPO, PQN, Impala
from hts_torchrl.learner.restored import why_not_read
from hts_torchrl.models.trunks import is_built_in
from hts_torchrl.settings import taking
from hts_torchrl.training.datamodule import HTSDataModule
from hts_torchrl.training.run_settings import class_name, known_arguments, plain

# Imported, they are known to the parser as well: --data.env=AtariEnvs.
_LEARNERS: dict[str, type] = {each.__name__: each for each in (A2C, PPO, PQN, Impala)}
_FACTORIES: dict[str, type] = {
    each.__name__: each for each in (AtariEnvs, EnvPoolEnvs, FootballEnvs, GymEnvs, PettingZooEnvs)
}


def _trainer(
    precision: str,
    accumulate_grad_batches: int,
    gradient_clip_val: float | None,
    gradient_clip_algorithm: Literal["norm", "value"] | None,
) -> None:
    """Have the arguments of a Trainer that a checkpoint may give."""


@dataclass(frozen=True)
class CheckpointSettings:
    """The settings of a checkpoint's run, as far as they can be had without running its code.

    A class or function that is none of this package, and an environment id that names a module, are
    withheld: they are imported only where the user's own command or config names them.
    """

    config: dict[str, Any]
    """In the words of a config file."""
    withheld: dict[str, str]
    """What would have to be imported, quoted for a shell, by the setting that names it."""
    policy_arguments: dict[str, Any] = field(default_factory=dict)
    """Of a policy that is none of this package, which belong to its class."""

    @classmethod
    def read(cls, path: Path, own: Mapping[str, type] = MappingProxyType({})) -> Self:
        """Read a checkpoint; nothing in it is run, and nothing beside it is read.

        Args:
            path: of the checkpoint.
            own: classes that the user's own command or config names, by that name.

        Raises:
            ConfigurationError: if it cannot be read or is no checkpoint, or a setting is of a wrong
                type.
        """
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if not isinstance(content, dict) or not _has_weights(content):
                raise ValueError("no weights")
        except Exception as error:  # whatever a file that is something else may lead to
            raise ConfigurationError(why_not_read(path, error)) from error
        settings = cls({}, {})
        settings._add_learner(content.get("learner"), own)
        data = content.get(HTSDataModule.__qualname__)
        if isinstance(data, dict) and "settings" in data:
            settings._add_data(data["settings"], own)
        return settings

    def _add_learner(self, learner: object, own: Mapping[str, type]) -> None:
        name, arguments = _class_and_arguments(learner, "model")
        described = _mapping(learner)
        policy = described.get("policy")
        make = _LEARNERS.get(name, own.get(name))
        if make is None:
            self.withheld["model"] = shlex.quote(name)
            return
        known = self._plain_arguments(make, arguments, "model", _own_arguments(make))
        if policy is not None:
            self.policy_arguments.update(_mapping(described.get("policy_arguments", {})))
            own_words = self.policy_arguments.items()
            given = [f"--model.policy.{_as_flag(n)}={_as_flag(v)}" for n, v in own_words]
            self.withheld["model.policy"] = " ".join([_as_flag(policy), *given])
            known.pop("network", None)
        elif not is_built_in(known.get("network", "mlp")):
            self.withheld["model.network"] = shlex.quote(known.pop("network"))
        if "." in known.get("optimizer", ""):
            self.withheld["model.optimizer"] = shlex.quote(known.pop("optimizer"))
        self.config["model"] = {"class_path": name, "init_args": known}

    def _plain_arguments(
        self, make: type, given: object, setting: str, own: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return arguments of a class; of its ``own``, which may name what is imported, numbers."""
        words: dict[str, Any] = {}
        if isinstance(given, dict):
            words = {n: v for n, v in given.items() if n in own and not _is_number(v)}
            given = {name: value for name, value in given.items() if name not in words}
        for name, value in words.items():
            if value != _as_in_config(own[name]):
                self.withheld[f"{setting}.{name}"] = _as_flag(value)
        return known_arguments(make, given, f"the checkpoint's {setting}", besides=("policy",))

    def _add_data(self, settings: object, own: Mapping[str, type]) -> None:
        if not isinstance(settings, dict) or not {"data", "trainer"} <= settings.keys():
            raise ConfigurationError("the checkpoint's settings of data and trainer are missing")
        trainer = {n: v for n, v in _mapping(settings["trainer"]).items() if n != "world_size"}
        self.config["trainer"] = known_arguments(_trainer, trainer, "the checkpoint's trainer")
        portable = settings.get("portable", False)
        if type(portable) is not bool:
            raise ConfigurationError("the checkpoint's portable: true or false is needed")
        self.config["portable"] = portable
        data = dict(_mapping(settings["data"]))
        env = data.pop("env", None)
        data = known_arguments(HTSDataModule, data, "the checkpoint's data", besides=_NOT_OF_A_FILE)
        if "seed" in data:
            self.config["seed_everything"] = data.pop("seed")
        self.config["data"] = data
        name, arguments = _class_and_arguments(env, "data.env")
        make = _FACTORIES.get(name, own.get(name))
        if make is None:
            self.withheld["data.env"] = shlex.quote(name)
            return
        of_user = {} if name in _FACTORIES else _defaults(make)
        known = self._plain_arguments(make, arguments, "data.env", of_user)
        may_import = name in ("EnvPoolEnvs", "GymEnvs") and _may_import(known)
        if may_import or name == "PettingZooEnvs":
            flags = [name, f"--data.env.id={_as_flag(known.get('id'))}"]
            if imports := known.get("imports"):
                flags.append(f"--data.env.imports={shlex.quote(json.dumps(imports))}")
            if kwargs := known.get("kwargs"):
                self.withheld["data.env.kwargs"] = shlex.quote(json.dumps(kwargs))
                flags.append(f"--data.env.kwargs={self.withheld['data.env.kwargs']}")
            self.withheld["data.env"] = " ".join(flags)
            return
        data["env"] = {"class_path": name, "init_args": known}

    def refusal(self, setting: str) -> ConfigurationError:
        """Return what to say where the user names nothing for a setting that was withheld."""
        value, line = self.withheld[setting], in_one_line(self.withheld[setting])
        shown = line if len(line) <= 100 else f"{line[:97]}..."
        taken = "taken" if setting == "data.env.kwargs" else "imported"
        config = "--config with the config.yaml of its run"
        typed = value == line and len(value) <= _MOST_TYPED
        remedy = f"--{setting}={value} (or {config})" if typed else config
        return ConfigurationError(
            f"the checkpoint's {setting} is {shown}, which is {taken} only if your command names "
            f"it: add {remedy}"
        )


_NOT_OF_A_FILE = ("env", "accept_changes", "backend", "num_collectors", "backend_options")
"""Of the data module: what is looked at by itself, agreed to, or joins a cluster."""
_MOST_TYPED = 1000
"""Characters of a flag that a message proposes; it is whole, or not proposed."""


def _has_weights(content: dict[Any, Any]) -> bool:
    weights, updates = content.get("state_dict"), content.get("updates")
    return (
        isinstance(weights, dict)
        and all(isinstance(name, str) for name in weights)
        and all(isinstance(tensor, torch.Tensor) for tensor in weights.values())
        and type(updates) is int
        and updates >= 0
    )


def _may_import(arguments: dict[str, Any]) -> bool:
    """Return whether a module or a program could be run that an id or its arguments name."""
    values = arguments.get("kwargs", {}).values()
    numbers = all(map(_is_number, values))
    return ":" in arguments.get("id", "") or not numbers or bool(arguments.get("imports"))


def _as_in_config(default: object) -> Any:  # noqa: ANN401
    """Return the default of an argument as the command line would tell it to a checkpoint."""
    if isinstance(default, Enum):
        return default.name
    told = plain(default)
    return told["init_args"] if is_dataclass(default) else told


def _as_flag(value: object) -> str:
    """Return a value as a flag has it."""
    return shlex.quote(value if isinstance(value, str) else json.dumps(value, default=str))


def _is_number(value: object) -> bool:
    """Return whether a value is a number, a list of such, or nothing: it names nothing then."""
    if type(value) is list:
        return all(map(_is_number, value))
    return not value or type(value) in (bool, int, float)


def _own_arguments(make: type) -> dict[str, Any]:
    """Return the arguments that none of this package's learners has, with their defaults."""
    package = [each for each in taking(make) if "." not in class_name(each)]
    known = {name for each in package for name in inspect.signature(each).parameters}
    return {name: each for name, each in _defaults(make).items() if name not in known}


def _defaults(make: type) -> dict[str, Any]:
    return {name: each.default for name, each in inspect.signature(make).parameters.items()}


def _class_and_arguments(described: object, where: str) -> tuple[str, object]:
    settings = _mapping(described)
    name = settings.get("class_path")
    if type(name) is not str:
        raise ConfigurationError(f"the checkpoint's {where} has no name")
    return name, settings.get("init_args", {})


def _mapping(value: object) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(f"the checkpoint's settings are a {type(value).__name__}")
    return value
