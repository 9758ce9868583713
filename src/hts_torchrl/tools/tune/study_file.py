"""The study file: which flags to search, for what, with which seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, get_args

from hts_torchrl.errors import ConfigurationError, naming, require
from hts_torchrl.yaml_file import read_yaml

if TYPE_CHECKING:
    from optuna import Trial

Value: TypeAlias = bool | int | float | str | None
Aim = Literal["score", "frames_to", "minutes_to"]
Sampler = Literal["tpe", "random"]
Pruner = Literal["median", "hyperband", "none"]

_OF_A_RUN = ("seed_everything", "seeds", "ckpt_path", "config", "base", "name", "trainer.logger")
"""Flags that the study sets, or that say nothing of how a run learns."""


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included; whole numbers if both are."""

    low: float
    high: float
    step: float | None = None
    log: bool = False

    @property
    def examples(self) -> tuple[Value, ...]:
        """Its two ends."""
        return self.low, self.high

    def suggest(self, trial: Trial, flag: str) -> Value:
        """Return the sampler's number for a trial."""
        if isinstance(self.low, int) and isinstance(self.high, int):
            step = 1 if self.step is None else int(self.step)
            return trial.suggest_int(flag, self.low, self.high, step=step, log=self.log)
        return trial.suggest_float(flag, self.low, self.high, step=self.step, log=self.log)


@dataclass(frozen=True)
class Choices:
    """One of several values; a list or a mapping is its JSON text."""

    values: tuple[Value, ...]

    @property
    def examples(self) -> tuple[Value, ...]:
        """All of them."""
        return self.values

    def suggest(self, trial: Trial, flag: str) -> Value:
        """Return the sampler's choice for a trial."""
        chosen: Value = trial.suggest_categorical(flag, self.values)
        return chosen


@dataclass(frozen=True)
class Objective:
    """What makes a trial better than another: a mean over its seeds."""

    aim: Aim = "score"
    """``score``: of the last evaluation, the higher the better. ``frames_to`` and ``minutes_to``:
    environment steps, or minutes of training, before the first evaluation that has ``target``."""
    target: float | None = None

    @property
    def direction(self) -> Literal["maximize", "minimize"]:
        """In Optuna's words."""
        return "maximize" if self.aim == "score" else "minimize"

    def __str__(self) -> str:
        """Return it as a heading, such as ``frames_to 475``."""
        return self.aim if self.target is None else f"{self.aim} {self.target:g}"


@dataclass(frozen=True)
class StudyFile:
    """What a study file says."""

    space: Mapping[str, Range | Choices]
    """By flag of ``fit`` without its dashes, in the order of the file."""
    objective: Objective = Objective()
    seeds: tuple[int, ...] = (1,)
    """Each trial trains these, one after another."""
    seed: int = 0
    """Of the sampler."""
    sampler: Sampler = "tpe"
    pruner: Pruner = "median"
    startup_trials: int = 10
    """Trials that are drawn at random, and that the median pruner waits for, at the start."""
    warmup_frames: int = 0
    """Environment steps before which the median pruner stops no trial."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a YAML file.

        Raises:
            ConfigurationError: with the file and the entry that is wrong.
        """
        with naming("--study", path):
            return cls._of(read_yaml(path))

    @classmethod
    def _of(cls, content: object) -> Self:
        given, names = _mapping(content, "it"), [field.name for field in fields(cls)]
        if unknown := set(given) - set(names):
            raise ConfigurationError(f"{min(map(str, unknown))} is none of {', '.join(names)}")
        read: dict[str, Any] = {"space": _space(given.pop("space", {}))}
        if "objective" in given:
            read["objective"] = _objective(given.pop("objective"))
        if "seeds" in given:
            read["seeds"] = _seeds(given.pop("seeds"))
        for name, words in (("sampler", Sampler), ("pruner", Pruner)):
            if name in given:
                value = given.pop(name)
                read[name] = "none" if value is None else value
                require(
                    read[name] in get_args(words), f"{name}={value}", " or ".join(get_args(words))
                )
        for name, value in given.items():
            whole = type(value) is int and value >= 0
            require(whole, f"{name}={value}", "a whole number, 0 or more")
        return cls(**read, **given)

    def examples(self) -> list[dict[str, Value]]:
        """Return values of all flags that together have every choice and both ends of ranges."""
        most = max(len(each.examples) for each in self.space.values())
        return [
            {
                flag: each.examples[min(place, len(each.examples) - 1)]
                for flag, each in self.space.items()
            }
            for place in range(most)
        ]


def flags(values: Mapping[str, Value]) -> list[str]:
    """Return command-line arguments that set the values."""
    return [
        f"--{flag}={value if isinstance(value, str) else json.dumps(value)}"
        for flag, value in values.items()
    ]


def _mapping(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(
            f"{name} is a {type(value).__name__}; names with values are needed"
        )
    return dict(value)


def _space(given: object) -> dict[str, Range | Choices]:
    space = {str(flag).removeprefix("--"): each for flag, each in _mapping(given, "space").items()}
    require(bool(space), "space={}", "a flag of fit")
    for flag in space:
        if flag in _OF_A_RUN or flag.startswith("trainer.logger."):
            raise ConfigurationError(f"space.{flag}: a study cannot search this flag")
    return {flag: _searched(each, f"space.{flag}") for flag, each in space.items()}


def _searched(given: object, name: str) -> Range | Choices:
    if isinstance(given, list):
        values = tuple(_plain(value, name) for value in given)
        different = 0 < len(values) == len(set(values))  # Optuna finds a value by ==
        require(different, f"{name}={given}", "different values (1, 1.0 and true are one)")
        return Choices(values)
    return _range(_mapping(given, name), name)


def _plain(value: object, name: str) -> Value:
    try:
        return value if isinstance(value, Value) else json.dumps(value)
    except TypeError as error:  # YAML takes 2026-01-31 for a date
        raise ConfigurationError(
            f"{name} has {value!s}, a {type(value).__name__}; put quotes around it"
        ) from error


def _range(given: dict[str, Any], name: str) -> Range:
    if not {"low", "high"} <= given.keys() <= {"low", "high", "step", "log"}:
        raise ConfigurationError(
            f"{name} has {', '.join(map(str, given)) or 'nothing'}; low and high are needed, and "
            "step or log may follow (or a list of choices)"
        )
    low, high = (_number(given[part], f"{name}.{part}") for part in ("low", "high"))
    step = None if given.get("step") is None else _number(given["step"], f"{name}.step")
    log = given.get("log", False)
    require(isinstance(log, bool), f"{name}.log={log}", "true or false")
    require(low < high, f"{name}.high={high}", f"more than low={low}")
    require(step is None or step > 0, f"{name}.step={step}", "more than 0")
    whole = isinstance(low, int) and isinstance(high, int)
    fits = not whole or isinstance(step, int | None)
    require(fits, f"{name}.step={step}", "a whole number")
    span = Decimal(str(high)) - Decimal(str(low))
    ends = step is None or span % Decimal(str(step)) == 0  # else Optuna moves the upper one
    require(ends, f"{name}.step={step}", f"a divisor of high - low = {span}")
    require(not log or low > 0, f"{name}.low={low}", "with log, more than 0")
    require(not (log and step), f"{name}.step={step}", "with log, none")
    return Range(low, high, step, log)


def _number(given: object, name: str) -> float:
    """Return a number; YAML takes ``1e-4``, without a point, for text."""
    try:
        number: Any = float(given) if isinstance(given, str) else given
        known = type(number) in (int, float) and math.isfinite(number)
    except (ValueError, OverflowError):
        known = False
    require(known, f"{name}={given}", "a number")
    return number  # type: ignore[no-any-return]


def _objective(given: object) -> Objective:
    if given in ("score", "eval/score"):
        return Objective()
    if isinstance(given, dict) and len(given) == 1:
        [(aim, target)] = given.items()
        if aim in ("frames_to", "minutes_to"):
            return Objective(aim, _number(target, f"objective.{aim}"))
    raise ConfigurationError(
        f"objective={given}; score, frames_to: SCORE or minutes_to: SCORE is needed"
    )


def _seeds(given: object) -> tuple[int, ...]:
    possible = range(2**32)
    whole = isinstance(given, list) and all(
        type(each) is int and each in possible for each in given
    )
    seeds = tuple(given) if whole and isinstance(given, list) else ()
    different = 0 < len(seeds) == len(set(seeds))
    require(different, f"seeds={given}", f"a list of different whole numbers, 0 to {possible[-1]},")
    return seeds
