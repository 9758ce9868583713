"""The timeline of one round: who works when, as a file for Perfetto or Chrome."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from hts_torchrl.collectors.hts import HTSCollector
from hts_torchrl.durable_file import replacing
from hts_torchrl.errors import ConfigurationError, require
from hts_torchrl.settings import plain_value
from hts_torchrl.training.round_slice import RoundSlice

_WORK = {"executor": "step", "actor": "pass", "learner": "update", "parts": "part"}


class RoundTrace(Callback):
    """Writes ``trace.json`` into the log directory once a round has been collected.

    Open it at ``ui.perfetto.dev`` or ``chrome://tracing``. Each worker has a row. Bars are work and
    gaps are waiting: an executor's steps, an actor's passes, the learner's update on the
    previous round and, below it, the parts of that update. Its bar contains an evaluation that
    follows the update.

    Attributes:
        written: whether the round was reached and its file is at ``path``.

    Args:
        round_index: the round, counted from 0; the first two differ from all others, because
            processes still start.
        path: of the file; None is ``trace.json`` in the Trainer's log directory.

    Raises:
        ConfigurationError: if ``round_index`` is no round's number, or ``path`` is a folder.
    """

    def __init__(self, round_index: int = 10, path: str | Path | None = None) -> None:
        self.round_index = plain_value("round_index", round_index, "int")
        require(self.round_index >= 0, f"round_index={round_index} of a trace", "0 or more")
        self.path = None if path is None else Path(path)
        is_folder = self.path is not None and self.path.is_dir()
        require(not is_folder, f"path={path} of a trace is a folder", "the name of a file")
        self._parts: list[tuple[float, float]] = []
        self._part_began_s = 0.0
        self.written = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ask the collector for the round, unless a resumed run is past it.

        Raises:
            ConfigurationError: where there are no rounds.
        """
        data = trainer.datamodule  # type: ignore[attr-defined]
        collector = getattr(data, "collector", None)
        if not isinstance(collector, HTSCollector):
            form = f"collection={data.collection}" if collector else "a run without HTSDataModule"
            raise ConfigurationError(f"trace={self.round_index}: {form} has no rounds")
        if self.round_index >= collector.rounds:
            collector.trace_round(self.round_index)
        if self.path is None:
            self.path = Path(trainer.log_dir or ".") / "trace.json"

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: RoundSlice, batch_idx: int
    ) -> None:
        """Write the file when the round has arrived; else begin a part of an update."""
        if self.written:
            return
        trace = trainer.datamodule.collector.trace  # type: ignore[attr-defined]
        if trace is not None:
            self.written = True
            if trainer.is_global_zero:
                assert self.path is not None
                self._write(trace, self.path)
        elif batch.is_first:
            self._parts = []
        self._part_began_s = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: RoundSlice, *_: Any
    ) -> None:
        """End a part of an update."""
        if not self.written:
            self._parts.append((self._part_began_s, time.perf_counter()))

    def _write(self, trace: dict[str, list[tuple[float, float]]], path: Path) -> None:
        rows = {**trace, "parts of it": self._parts}
        began_s = min(begin for spans in rows.values() for begin, _ in spans)
        events: list[dict[str, Any]] = []
        for row, (name, spans) in enumerate(rows.items()):
            about, work = {"pid": 0, "tid": row}, _WORK[name.split()[0]]
            for kind, value in (("name", name), ("sort_index", row)):
                named = {"name": f"thread_{kind}", "args": {kind: value}}
                events.append({"ph": "M", **named, **about})
            for begin, end in spans:
                place = {"ts": (begin - began_s) * 1e6, "dur": (end - begin) * 1e6}
                events.append({"ph": "X", "name": work, **place, **about})
        with replacing(path) as new:
            new.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
