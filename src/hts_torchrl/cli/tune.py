"""``hts-torchrl tune``: a study of settings, each trial by ``fit`` in processes of its own."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from hts_torchrl.cli.fit_commands import FitCommands
from hts_torchrl.cli.run_folder import expanded
from hts_torchrl.cli.subcommands import parsed_fit
from hts_torchrl.cli.terminal import tell
from hts_torchrl.durable_file import replacing
from hts_torchrl.errors import NO_ROOM, ConfigurationError, require
from hts_torchrl.tools.tune.study_file import StudyFile, Value, flags
from hts_torchrl.tools.tune.trial import Budget, Outcome, TrialWatch, read_evaluations

if TYPE_CHECKING:
    from optuna import Trial
    from optuna.trial import FrozenTrial

    from hts_torchrl.tools.tune.study import Study

_LOGGERS = ("TensorBoardLogger", "CSVLogger")
_REFUSED = {
    "--seeds": "the study file names the seeds",
    "--seed_everything": "the study file names the seeds",
    "--ckpt_path": "each trial trains from the start",
    "--trainer.logger": "each trial logs into its own folder",
    "--print_config": "hts-torchrl fit prints configs",
}


def tune(arguments: Sequence[str]) -> None:
    """Search the flags that a study file names, and write the best config.

    Ctrl-C and SIGTERM end the running ``fit`` as they end any, and then the study. The same command
    goes on with it.

    Args:
        arguments: those behind ``tune``; all that are not its own are those of ``fit``.

    Raises:
        ConfigurationError: if the extra ``tune`` is missing, or, before anything is trained, if the
            study file, a flag or the folder is wrong.
        SystemExit: with the status that a signal asks for; with 1 if no trial is complete.
    """
    given, fit_arguments = _parsed(arguments)
    try:
        import optuna  # noqa: F401, PLC0415 - of an extra
    except ImportError as error:
        raise ConfigurationError(
            f"a study needs optuna: pip install 'hts-torchrl[tune]' ({error})"
        ) from error
    from hts_torchrl.tools.tune.study import Study, locked  # noqa: PLC0415 - of the extra

    study_file = StudyFile.read(given.study)
    configs = [_checked(fit_arguments, each, given.study) for each in study_file.examples()]
    output = given.study.with_suffix("") if given.output is None else given.output
    output = Path(expanded(output))  # as the loggers of each trial need it
    if output == given.study:
        raise ConfigurationError(
            f"--study={output}: without a suffix .yaml it needs --output=FOLDER"
        )
    frames = [int(config["data"]["total_frames"]) for config in configs]
    budget = Budget(max(frames), configs[0]["data"]["evaluation_frames"])
    described = json.loads(json.dumps({"study": asdict(study_file), "config": configs[0]}))
    with locked(output) as lock, FitCommands() as commands:
        study = Study(output, study_file, budget, described)
        trials = _Trials(commands, study_file, fit_arguments, output, budget, lock)
        _search(study, trials, given.trials)
    if commands.status:
        sys.stderr.write(
            f"hts-torchrl: stopped after {study.settled} of {given.trials} trials; the same "
            "command continues\n"
        )
        raise SystemExit(commands.status)
    if study.best is None:
        raise SystemExit(1)


def _parsed(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments of ``tune``, and all others in their order."""
    parser = _Parser(
        prog="hts-torchrl tune",
        description="Search settings by Optuna. All other arguments are those of fit.",
        usage="%(prog)s --config CONFIG --study STUDY --trials TRIALS [--output OUTPUT] [...]",
        allow_abbrev=False,
    )
    parser.add_argument("--study", type=Path, required=True, help="YAML file: what to search")
    parser.add_argument("--trials", type=int, required=True, help="how many, in all of its runs")
    parser.add_argument(
        "--output", type=Path, help="folder of the study; by default the file's name without .yaml"
    )
    given, others = parser.parse_known_args(list(arguments))
    require(given.trials >= 1, f"--trials={given.trials}", "1 or more")
    for argument in others:
        for flag, reason in _REFUSED.items():
            name = argument.partition("=")[0].removesuffix("+")  # which appends to a list
            if name == flag or name.startswith(f"{flag}."):
                raise ConfigurationError(f"{flag}: {reason}")
    return given, others


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"tune: {message}")


def _checked(arguments: list[str], values: Mapping[str, Value], study: Path) -> dict[str, Any]:
    try:
        config = parsed_fit([*arguments, *flags(values)])
    except ConfigurationError as error:
        # It may be of the command line as well, or of both together.
        raise ConfigurationError(f"{error} (with {_typed(values)}, of --study={study})") from error
    if config.get("ckpt_path") is not None:
        raise ConfigurationError(f"--ckpt_path: {_REFUSED['--ckpt_path']}")
    return config


def _search(study: Study, trials: _Trials, number: int) -> None:
    """Run trials until so many have an outcome, or a signal comes."""
    written = None
    while True:
        study.write_table()
        best = study.best
        if best is not None and best != written:
            trials.write_best(best)
            written = best
        if trials.commands.status:
            return
        if study.settled >= number:
            break
        trial, values = study.ask()
        outcome = trials.run(trial, values)
        if trials.commands.status:
            study.give_up()
        else:
            study.tell(trial, outcome)
            tell(f"trial {trial.number}", f"{_told(outcome, trials.study_file)}: {_typed(values)}")
    if best is None:
        tell("best", "no trial is complete")
    else:
        tell("best", f"trial {best.number}, {trials.study_file.objective} {best.value:g}")
        tell("best config", str(trials.output / "best.yaml"))
    tell("trials", str(trials.output / "trials.csv"))


def _told(outcome: Outcome, study_file: StudyFile) -> str:
    if outcome.state == "failed":
        return f"failed, {outcome.reason}"
    state, figures = f"pruned {outcome.reason}", f"{outcome.frames:,} frames"
    if outcome.value is not None:
        state = f"{study_file.objective} {outcome.value:g}"
    if outcome.value != outcome.score:
        figures = f"score {outcome.score:g}, {figures}"
    return f"{state} ({figures} in {outcome.minutes:.1f} minutes)"


def _typed(values: Mapping[str, Value]) -> str:
    return shlex.join(flags(values))


@dataclass(frozen=True)
class _Trials:
    """Runs a trial: ``fit`` for each seed, in the trial's own folder."""

    commands: FitCommands
    """Runs ``fit``, and notes signals."""
    study_file: StudyFile
    """Seeds and objective."""
    arguments: list[str]
    """Of ``fit``, without what is searched."""
    output: Path
    """Folder of the study."""
    budget: Budget
    """Of a trial."""
    lock: int
    """File descriptor of the study's lock, which each ``fit`` holds while it runs."""

    def run(self, trial: Trial, values: Mapping[str, Value]) -> Outcome:
        """Train all seeds, or as many as it takes to know that the trial is no good."""
        watch = TrialWatch(trial, self.study_file.objective, self.budget)
        folder = self.output / f"trial_{trial.number}"
        for seed in self.study_file.seeds:
            failed = self._train(watch, values, folder, seed)
            if failed or self.commands.status:
                return Outcome("failed", reason=failed)
            if not watch.goes_on:
                break
        return watch.outcome()

    def _train(
        self, watch: TrialWatch, values: Mapping[str, Value], folder: Path, seed: int
    ) -> str:
        """Train one seed; return in words why it failed, or nothing.

        Raises:
            OSError: if the disk is full: the trial has no outcome, and the next command repeats it.
        """
        version, log = f"seed_{seed}", folder / f"seed_{seed}.log"
        folder.mkdir(parents=True, exist_ok=True)
        metrics = folder / version / "metrics.csv"
        metrics.unlink(missing_ok=True)  # of a study whose journal is gone
        place = {"save_dir": str(self.output), "name": folder.name, "version": version}
        loggers = [
            {"class_path": f"lightning.pytorch.loggers.{name}", "init_args": place}
            for name in _LOGGERS
        ]
        watch.begin_seed()
        status = self.commands.run(
            [
                *("fit", *self.arguments, *flags(values), f"--seed_everything={seed}"),
                f"--trainer.logger={json.dumps(loggers)}",
            ],
            log=log,
            is_enough=lambda: watch.look(read_evaluations(metrics)),
            keeps_open=[self.lock],
        )
        enough = watch.look(read_evaluations(metrics))
        if status and not enough:
            reason = _reason(log, status)
            for number in NO_ROOM:
                if os.strerror(number) in reason:
                    raise OSError(number, os.strerror(number), str(folder))
            return reason
        return "" if watch.has_seen else "no evaluation was made"

    def write_best(self, trial: FrozenTrial) -> None:
        """Write a config that trains the trial's first seed with the same bits."""
        seed = self.study_file.seeds[0]
        config = parsed_fit([*self.arguments, *flags(trial.params), f"--seed_everything={seed}"])
        about = f"# Trial {trial.number}: {self.study_file.objective} {trial.value:g}\n"
        with replacing(self.output / "best.yaml") as new:
            new.write_text(about + yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def _reason(log: Path, status: int) -> str:
    """Return what a command said of its failure, in one line."""
    mark, said = "hts-torchrl: error: ", log.read_text(encoding="utf-8", errors="replace")
    if mark in said:
        return said.rpartition(mark)[2].partition("\n")[0]
    return f"exit status {status} ({log} has what it printed)"
