"""The timeline of one round: who works when, as a file for Perfetto or Chrome."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.round_part import RoundPart

_WORK = {"executor": "step", "actor": "pass", "learner": "update", "parts": "part"}


class RoundTrace(Callback):
    """Writes ``trace.json`` into the log directory once a round has been collected.

    Open it at ``ui.perfetto.dev`` or ``chrome://tracing``. Each worker has a row; a bar is its
    work, a gap its waiting: an executor's steps, an actor's passes, the learner's update on the
    round before and, below it, the parts of that update.

    Attributes:
        written: whether the round was reached and its file lies at ``path``.

    Args:
        round_index: the round, counted from 0; its first two differ from all others, because
            processes still start.
        path: of the file; None is ``trace.json`` in the Trainer's log directory.

    Raises:
        ConfigurationError: if ``round_index`` is negative.
    """

    def __init__(self, round_index: int = 10, path: str | Path | None = None) -> None:
        if round_index < 0:
            raise ConfigurationError(f"round_index={round_index} of a trace; 0 or more is needed")
        self.round_index = round_index
        self.path = None if path is None else Path(path)
        self._parts: list[tuple[float, float]] = []
        self.written = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Ask the collector for the round, unless a resumed run is past it."""
        collector = trainer.datamodule.collector  # type: ignore[attr-defined]
        if self.round_index >= collector.rounds:
            collector.trace_round(self.round_index)
        if self.path is None:
            self.path = Path(trainer.log_dir or ".") / "trace.json"

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002
        batch: RoundPart,
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Write the file when the round has arrived; else begin a part of an update."""
        trace = trainer.datamodule.collector.trace  # type: ignore[attr-defined]
        if self.written:
            return
        if trace is not None:
            self.written = True
            if trainer.is_global_zero:
                assert self.path is not None
                self._write(trace, self.path)
            return
        if batch.is_first:
            self._parts = []
        self._parts.append((time.perf_counter(), 0.0))

    def on_train_batch_end(
        self,
        trainer: Trainer,  # noqa: ARG002
        pl_module: LightningModule,  # noqa: ARG002
        outputs: Any,  # noqa: ANN401, ARG002
        batch: RoundPart,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """End a part of an update."""
        if not self.written:
            self._parts[-1] = (self._parts[-1][0], time.perf_counter())

    def _write(self, trace: dict[str, list[tuple[float, float]]], path: Path) -> None:
        rows = {**trace, "parts of it": self._parts}
        began_s = min(begin for spans in rows.values() for begin, _ in spans)
        events: list[dict[str, Any]] = []
        for row, (name, spans) in enumerate(rows.items()):
            about, work = {"pid": 0, "tid": row}, _WORK[name.split()[0]]
            for kind, value in (("thread_name", name), ("thread_sort_index", row)):
                text = kind.removeprefix("thread_")
                events.append({"ph": "M", "name": kind, "args": {text: value}, **about})
            for begin, end in spans:
                place = {"ts": (begin - began_s) * 1e6, "dur": (end - begin) * 1e6}
                events.append({"ph": "X", "name": work, **place, **about})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
