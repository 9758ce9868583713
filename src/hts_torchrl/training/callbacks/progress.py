"""What a terminal, or a log file, shows of a training while it runs."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar

from hts_torchrl.training.callbacks.statistics import TrainingStatistics

_TERMINAL_S, _FILE_S = 0.2, 30.0
"""Seconds between two lines: on a terminal each replaces the one before, in a file all stay."""
_FORMATS = {"steps_per_second": "{:,.0f} steps/s", "episode/return": "episode return {:.4g}"}


class ProgressLine(ProgressBar):
    """Shows frames, speed and the return of episodes in one line, and each evaluation in another.

    Figures that a module logs with ``prog_bar=True`` follow. On a terminal the line is replaced
    five times a second; anywhere else a line is written every 30 seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._next_s = 0.0
        self._on_screen = False

    def enable(self) -> None:
        """Show lines from now on."""
        self._enabled = True

    def disable(self) -> None:
        """Show no line from now on; Lightning disables all ranks but the first."""
        self._enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print what a module prints in lines of its own."""
        self._clear()
        print(*args, **kwargs)  # noqa: T201

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Show the run's figures, once the last line is old enough."""
        now_s = time.monotonic()
        if not self._enabled or now_s < self._next_s:
            return
        figures, on_terminal = trainer.progress_bar_metrics, sys.stdout.isatty()
        if figures or on_terminal:
            self._show(_progress(trainer, figures))
            self._next_s = now_s + (_TERMINAL_S if on_terminal else _FILE_S)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say that the run waits for an evaluation."""
        if self._enabled and sys.stdout.isatty():
            self._show("evaluating ...")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the score of an evaluation within training."""
        self._clear()
        score = trainer.callback_metrics.get("eval/score")
        if self._enabled and trainer.state.fn == "fit" and score is not None:
            frames = TrainingStatistics.of(trainer).frames
            self.print(f"evaluation after {frames:,} frames: score {float(score):.2f}", flush=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the terminal's line free."""
        self._clear()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the terminal's line free for the error."""
        self._clear()

    def _show(self, line: str) -> None:
        self._clear()
        self._on_screen = sys.stdout.isatty()
        if self._on_screen:  # what is wider would stay when the line is replaced
            line = line[: shutil.get_terminal_size().columns - 1]
        print(line, end="" if self._on_screen else "\n", flush=True)  # noqa: T201

    def _clear(self) -> None:
        if self._on_screen:
            print("\r\x1b[K", end="", flush=True)  # noqa: T201
            self._on_screen = False


def _progress(trainer: Trainer, figures: dict[str, Any]) -> str:
    frames = TrainingStatistics.of(trainer).frames
    schedule = trainer.datamodule.schedule  # type: ignore[attr-defined]
    total = schedule.num_rounds * schedule.frames_per_round
    parts = [f"{frames / total:4.0%}", f"{frames:,} of {total:,} frames"]
    for name, value in figures.items():
        text = _FORMATS.get(name, f"{name} {{:.4g}}")
        parts.append(text.format(float(value)))
    return " | ".join(parts)
