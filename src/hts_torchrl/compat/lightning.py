"""What Lightning keeps private: its loops' counts, its answers to signals, LightningCLI's steps."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

class_alone = _restricted_classmethod
"""A ``classmethod`` that an instance refuses, as it would return another and not change."""


def set_logged_steps(trainer: Trainer, steps: int) -> None:
    """Set the step number under which the Trainer logs next."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = steps


def logs_after_batch(trainer: Trainer) -> bool:
    """Return whether the Trainer logs after the running batch: with ``log_every_n_steps=0`` never.

    It counts batches that end with a step, however many optimisers a module steps by itself.
    """
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    if every == 0 or is_accumulating(trainer):
        return False
    return (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % every == 0


def set_callback_metrics(trainer: Trainer, figures: Mapping[str, Tensor]) -> None:
    """Put figures into ``Trainer.callback_metrics``, as ``log_dict`` does, but not into loggers.

    It is much less work than ``log_dict``, which every update would have to do.
    """
    trainer._logger_connector._callback_metrics.update(figures)
    for logged in trainer._results.result_metrics:  # type: ignore[union-attr]
        if logged.meta.name in figures:
            logged._forward_cache = figures[logged.meta.name]  # else its last value returns


def log_figures(module: LightningModule, figures: Mapping[str, Tensor]) -> None:
    """Log figures of the step that is being made, if the Trainer will log after it.

    ``Trainer.callback_metrics`` has them in any case.
    """
    trainer = module.trainer
    if logs_after_batch(trainer):
        module.log_dict(figures)
    else:
        set_callback_metrics(trainer, figures)


@contextlib.contextmanager
def leaving_at_sigterm(module: LightningModule) -> Iterator[None]:
    """Leave as soon as SIGTERM comes, if a module has a Trainer, in the middle of whatever runs.

    The Trainer itself looks between batches only. Several ranks that train must leave together.

    Raises:
        SIGTERMException: meanwhile, wherever the main thread is.
    """
    trainer, number = module._trainer, signal.SIGTERM
    before: Any = signal.getsignal(number)
    in_main_thread = threading.current_thread() is threading.main_thread()
    is_together = trainer is not None and trainer.world_size > 1 and trainer.state.fn == "fit"
    if trainer is None or is_together or not (in_main_thread and callable(before)):
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before)
        if trainer.world_size == 1:  # else Lightning would wait for the others here
            before(number, frame)
        raise SIGTERMException(128 + number)

    signal.signal(number, leave)
    try:
        if trainer.received_sigterm:
            raise SIGTERMException(128 + number)
        yield
    finally:
        signal.signal(number, before)


def is_compiled(module: LightningModule) -> bool:
    """Return whether the Trainer was given ``torch.compile(module)``, whose hooks are compiled."""
    return module._compiler_ctx is not None


def is_accumulating(trainer: Trainer) -> bool:
    """Return whether the current batch adds to a gradient that a later one applies."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def answer_sigterm(trainer: Trainer, answer: Callable[[int, FrameType | None], None]) -> None:
    """Replace the Trainer's own answer to SIGTERM, before it registers its handlers."""
    connector: Any = trainer._signal_connector
    connector._sigterm_notifier_fn = answer


def put_back_at_end(trainer: Trainer, answers: Mapping[int, Any]) -> None:
    """Let the Trainer end with these answers to signals, not with those that it found."""
    connector: Any = trainer._signal_connector
    connector._original_handlers.update(answers)


def requeue_signals(trainer: Trainer) -> list[int]:
    """Return the signal at which Lightning saves and requeues a job of SLURM; elsewhere none.

    Lightning leaves it to a handler that is there before it registers its own.
    """
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return []
    number = environment.requeue_signal
    return [] if number is None else [number]


def requeue(trainer: Trainer, number: int) -> None:
    """Save a checkpoint and have SLURM requeue the job, as Lightning answers that signal."""
    connector: Any = trainer._signal_connector
    connector._slurm_sigusr_handler_fn(number, None)


def take_next_version(loggers: Iterable[Logger]) -> None:
    """Let loggers that count their versions take the next one; they have made no folder yet."""
    for logger in loggers:
        numbered: Any = logger
        numbered._version = numbered.version + 1


def leave_gradients(strategy: Strategy) -> None:
    """Keep a strategy of several ranks from averaging gradients, until its training ends."""
    if isinstance(strategy.model, DistributedDataParallel):
        strategy.model.require_backward_grad_sync = False


def process_start_method(strategy: Strategy) -> str | None:
    """Return how the strategy starts its processes by multiprocessing; None if it does not."""
    launcher = strategy.launcher
    if isinstance(launcher, _MultiProcessingLauncher):
        return launcher._start_method
    return None


def save_if_anything_is_new(callback: ModelCheckpoint, trainer: Trainer) -> None:
    """Write a checkpoint now, unless the last one holds the same step."""
    if not callback._should_skip_saving_checkpoint(trainer):
        callback._save_topk_checkpoint(trainer, callback._monitor_candidates(trainer))


def last_saved(callback: ModelCheckpoint) -> str:
    """Return the path of the last checkpoint that was written; empty before the first."""
    return callback._last_checkpoint_saved


@contextlib.contextmanager
def monitoring_alike(trainer: Trainer) -> Iterator[None]:
    """Let all ranks name and rank checkpoints by the figures of rank 0, which writes them.

    By figures of its own a rank may look for another file, and all must look together.
    """
    saving = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    for each in saving:
        figures = functools.partial(_of_rank_0, each._monitor_candidates)
        each._monitor_candidates = figures  # type: ignore[method-assign]
    yield
    for each in saving:
        del each._monitor_candidates


def _of_rank_0(figures: Callable[[Trainer], dict[str, Tensor]], trainer: Trainer) -> Any:  # noqa: ANN401
    own = {name: value.cpu() for name, value in figures(trainer).items()}
    return trainer.strategy.broadcast(own)


class FitLoop:
    """The counts of the fit loop in a checkpoint; changes are made in place.

    Example:
        >>> FitLoop.of({"state_dict": {}}) is None
        True
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        self._batches = state["epoch_loop.batch_progress"]
        self._epochs = state["epoch_progress"]

    @classmethod
    def of(cls, checkpoint: dict[str, Any]) -> FitLoop | None:
        """Return that of a checkpoint; None if it holds weights alone."""
        state = checkpoint.get("loops", {}).get("fit_loop")
        return None if state is None else cls(state)

    @staticmethod
    def replace(checkpoint: dict[str, Any], state: dict[str, Any]) -> None:
        """Put the state of another fit loop (``trainer.fit_loop.state_dict()``) into it."""
        checkpoint["loops"]["fit_loop"] = state

    @property
    def is_finished(self) -> bool:
        """Whether the epoch has ended."""
        return bool(self._batches["is_last_batch"] or self._epochs["current"]["processed"])

    def end(self) -> None:
        """Count the epoch as done, as after an evaluation that is not made again."""
        for counts in (self._epochs["total"], self._epochs["current"]):
            counts["processed"] = counts["started"]

    def move(self, batches: int, *, done: int, epoch_length: int) -> None:
        """Stand so many batches further, within an epoch.

        Args:
            batches: by which the counts of the whole run change.
            done: batches that the run has then done.
            epoch_length: batches of each epoch.
        """
        epochs, in_epoch = divmod(done, epoch_length)
        self._batches["is_last_batch"] = False
        total, current = self._batches["total"], self._batches["current"]
        further = in_epoch - current["processed"]
        for name in total:
            total[name] += batches
            current[name] += further
        begun = {"ready": epochs + 1, "started": epochs + 1}
        for counts in (self._epochs["total"], self._epochs["current"]):
            counts.update({**begun, "processed": epochs, "completed": epochs})


class CommandLine(LightningCLI):
    """LightningCLI with public names for steps that it takes before it makes anything.

    ``prepare_checkpoint`` is called between parsing and ``instantiate_classes``.
    """

    def setting(self, name: str) -> Any:  # noqa: ANN401
        """Return a setting of the subcommand, its class instantiated."""
        return self._get(self.config_init, name)

    def flags(self) -> list[str]:
        """Return the flags of the subcommand that is the first argument, or those of all."""
        parsers = self._subcommand_parsers
        chosen = [parsers[sys.argv[1]]] if sys.argv[1] in parsers else parsers.values()
        return [flag for parser in chosen for flag in parser._option_string_actions]

    def dumped(self) -> str:
        """Return the subcommand's config as YAML, as it is saved beside a run."""
        name = self.config.subcommand
        parser, config = self._parser(name), self.config[name]
        return str(parser.dump(config, skip_unset=False))

    def prepare_checkpoint(self) -> None:
        """Take settings from ``--ckpt_path``."""
        super()._parse_ckpt_path()

    def _parse_ckpt_path(self) -> None:
        self.prepare_checkpoint()
