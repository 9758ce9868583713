"""The parser of the command line's arguments, and its errors in one line."""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import sys
from typing import Any, NoReturn

from jsonargparse import DefaultHelpFormatter
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from hts_torchrl.errors import ConfigurationError

NO_FLAGS = {
    **LightningCLI.subcommands(),
    **{name: {"model", "datamodule"} for name in ("play", "export", "advise", "verify")},
}
"""Subcommands, each with the arguments that are no flags."""


_WITHOUT_VALUE = re.compile(r"argument (?P<flag>--\S+): expected one argument")
_NOT_ACCEPTED = re.compile(r"Option '(?P<name>\w+)' is not accepted")
_NO_PATH = re.compile(r"- Expected a path but .+? either not accessible or invalid - ")
_ALTERNATIVES = re.compile(
    r"Does not validate against any of the Union subtypes Subtypes: \[.*?\] Errors: (?=- )"
)
_NOT_OF_TYPE = r"Expected a <class '[\w.]+'>(\. Got value: \S+)?"
_OTHER_TYPE = re.compile(
    rf" ?- ({_NOT_OF_TYPE}|Not a valid subclass of .*? \(implicit class_path\))"
)
_NO_REASON = re.compile(
    r"Does not validate against any of the Union subtypes Subtypes: \[(?P<kinds>.*?)\] Errors:"
    rf"( - {_NOT_OF_TYPE})*$"
)
_NO_CLASS = re.compile(r"- Expected a dot import path string: (?P<name>\S+)")
_NO_ENV = 'Parser key "data.env": Expected a dot import path string: '
_OF_GYMNASIUM = "; one of Gymnasium is named by --data.env=GymEnvs --data.env.id="
_INTERNAL = re.compile(r", hts_torchrl\.(?!training\.callbacks\.[A-Z])\w+\.[\w.]+")


class _HelpFormatter(DefaultHelpFormatter):
    """Lists no class that this package has for itself: what users name is imported from above."""

    def _expand_help(self, action: argparse.Action) -> str:
        return _INTERNAL.sub("", super()._expand_help(action))


class HTSArgumentParser(LightningArgumentParser):
    """Reports a wrong argument in one line, without the usage, and takes no shortened flags.

    What looks for ``--config`` and ``--ckpt_path`` before anything is parsed would miss ``--conf``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        own = {"allow_abbrev": False, "formatter_class": _HelpFormatter}
        super().__init__(*args, **{**own, **kwargs})
        # Else argparse takes -1e-3 for a flag, and the flag before it has no value.
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")

    def parse_path(self, cfg_path: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Name the config file in what is wrong with it; its empty sections set nothing."""
        try:
            config = super().parse_path(cfg_path, *args, **kwargs)
        except ConfigurationError as error:
            raise ConfigurationError(f"--config={cfg_path}: {error}") from error
        for section in ("model", "data", "trainer"):
            if section in config and config[section] is None:
                del config[section]
        return config

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # noqa: ARG002
        """Print what is wrong and exit with status 2."""
        wrong = reason_in(message)
        if " are required: " in wrong:  # named as flags
            for command in NO_FLAGS:
                wrong = wrong.replace(f" {command}.", " --")
        if wrong.endswith("EnvFactory is abstract"):
            wrong = "--data.env: name a class: GymEnvs, AtariEnvs, ... or module.Class"
        if wrong.endswith("a subclass of EnvFactory"):
            wrong += _OF_GYMNASIUM + "module:Name-v0"
        if wrong.startswith(_NO_ENV):
            wrong += _OF_GYMNASIUM + wrong.removeprefix(_NO_ENV)
        if wrong.startswith("argument --seeds: "):  # which is taken before anything is parsed
            wrong = "--seeds: name fit before all flags"
        if wrong.startswith("argument subcommand: invalid choice: "):
            wrong += "; others are 'report', 'tune' and 'doctor'"
        if not_accepted := _NOT_ACCEPTED.fullmatch(wrong):  # by a class, whose parser this is
            names = [flag.removeprefix("--") for flag in self._option_string_actions]
            meant = difflib.get_close_matches(not_accepted["name"], names, n=1, cutoff=0.8)
            wrong += "".join(f" (did you mean {name}?)" for name in meant)
        if without_value := _WITHOUT_VALUE.fullmatch(wrong):  # of a class, it is named alone
            wrong = _with_setting(wrong, without_value["flag"])
        raise ConfigurationError(wrong)


def _with_setting(wrong: str, flag: str) -> str:
    """Name the first setting of a class that was given no value, where argparse names the class."""
    for argument, value in itertools.pairwise([*sys.argv, "--"]):
        if argument.startswith(f"{flag}.") and "=" not in argument and value.startswith("--"):
            return wrong.replace(flag, argument)
    return wrong


def reason_in(message: str) -> str:
    """Return jsonargparse's message in one line, without the types that the user did not mean.

    Of a value that may be several things, it says for each why the value is not that.
    """
    # Behind that it repeats the whole configuration.
    wrong = " ".join(message.split()).partition(" Given value type:")[0]
    wrong = _NO_PATH.sub("", wrong)  # what names a class may name a config file of it as well
    alternatives = _ALTERNATIVES.search(wrong)
    if alternatives is None:
        return wrong
    reasons = _OTHER_TYPE.sub("", wrong[alternatives.end() :])
    reasons = _NO_CLASS.sub(
        r"- '\g<name>' is no class known here; write your own with its module, module.\g<name>",
        reasons,
    )
    several = dict.fromkeys(reasons.strip().removeprefix("- ").split(" - "))
    # One class has a near name, and another of the alternatives may have none.
    different = [each for each in several if f"{each} (did you mean" not in reasons]
    wrong = wrong[: alternatives.start()] + " - ".join(different) if reasons else wrong
    return _NO_REASON.sub(_kinds_needed, wrong.strip())


def _kinds_needed(match: re.Match[str]) -> str:
    """Return in words of which types a value may be, where no reason tells more."""
    kinds = (
        match["kinds"].replace("NoneType", "null").replace("typing.", "").replace(", <", " or <")
    )
    return re.sub(r"<class '([\w.]+)'>", r"\1", kinds) + " is needed"
