"""LightningCLI for this package's classes: run a subcommand, or only parse ``fit``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import yaml
from jsonargparse import set_parsing_settings
from lightning.pytorch import Callback

from hts_torchrl.cli.command_line import HTSCommandLine
from hts_torchrl.cli.commands import HTSTrainer
from hts_torchrl.cli.config_files import expand_configs
from hts_torchrl.learner import Learner
from hts_torchrl.training.datamodule import HTSDataModule

_OTHERS = (
    "Besides: `hts-torchrl report RUN ...` writes several runs into one page, `hts-torchrl tune` "
    "searches settings, and `hts-torchrl doctor` checks the machine (each has --help)."
)
_TRAINER_DEFAULTS = {"max_epochs": 1, "num_sanity_val_steps": 0, "enable_model_summary": False}


def run_subcommand(
    arguments: Sequence[str],
    *,
    callbacks: Sequence[Callback] = (),
    kind: type[HTSCommandLine] = HTSCommandLine,
) -> None:
    """Parse the arguments, make what they name, and run the subcommand that is their first.

    Args:
        arguments: subcommand, flags and their values; ``sys.argv`` has them afterwards.
        callbacks: of the Trainer, behind those that the arguments name.
        kind: of command line, such as one that ends when it has parsed.

    Raises:
        ConfigurationError: if a flag, or what it says, is wrong.
    """
    # ${data.num_envs} in a file means the value that counts in the end, of this subcommand.
    set_parsing_settings(
        omegaconf_absolute_to_relative_paths=True,
        # Of fields, as GymEnvs has: it takes most of a second, and only help shows them.
        docstring_parse_attribute_docstrings=any(".help" in each for each in arguments),
    )
    # Lightning reads the arguments from sys.argv, and warns where they are given otherwise.
    sys.argv[1:] = expand_configs(arguments)
    kind(
        Learner,
        HTSDataModule,
        subclass_mode_model=True,
        trainer_class=HTSTrainer,
        trainer_defaults={**_TRAINER_DEFAULTS, "callbacks": list(callbacks)},
        seed_everything_default=0,
        auto_configure_optimizers=False,  # the learner makes its own, of model.optimizer
        save_config_kwargs={"overwrite": True},
        parser_kwargs={
            "parser_mode": "omegaconf+",
            "exit_on_error": True,
            "epilog": _OTHERS,
            "version": version("hts-torchrl"),
        },
    )


def parsed_fit(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the config that ``fit`` would save with these arguments; nothing else is made.

    Args:
        arguments: those behind ``fit``. Types are checked; what the classes refuse is not.

    Raises:
        ConfigurationError: if a flag is not there, or its value of a wrong type.
    """
    before = sys.argv[:]
    try:
        run_subcommand(["fit", *arguments], kind=_Parsing)
    except _Parsed as parsed:
        config: dict[str, Any] = yaml.safe_load(parsed.config)
        return config
    finally:
        sys.argv[:] = before
    raise AssertionError("the command line ran what was only to be parsed")


class _Parsed(Exception):
    def __init__(self, config: str) -> None:
        super().__init__()
        self.config = config


class _Parsing(HTSCommandLine):
    """Ends when the arguments are parsed, before it seeds, imports or makes anything."""

    def prepare_checkpoint(self) -> None:
        raise _Parsed(self.dumped())
