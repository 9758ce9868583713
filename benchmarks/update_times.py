"""How long the learner's updates take in a training, and what of it is the GPU's work."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.autograd.profiler_util import DeviceType
from torch.profiler import ProfilerActivity, profile


class UpdateTimes(Callback):
    """Times updates after a warm-up, then traces some more, and ends the training.

    Tracing slows an update down, so the traced ones are not timed.

    Args:
        warm_up: updates before the first that is timed.
        timed: updates.
        traced: updates, at least one.
    """

    def __init__(self, warm_up: int, timed: int, traced: int) -> None:
        self._first, self._last = warm_up, warm_up + timed
        self._traced = traced
        self._updates = 0
        self._began_s = self._ended_s = 0.0
        self._profile: Any = None
        self.update_ms: list[float] = []
        """From the first part of a round to the last."""
        self.between_ms: list[float] = []
        """From there to the next round: publishing, waiting, and copying the round to the GPU."""
        self.operations = 0.0
        """Kernels, copies and fillings on the GPU for each update."""
        self.busy_ms = 0.0
        """Time that these took there, for each update."""

    def on_train_batch_start(self, _: Trainer, __: object, part: Any, ___: int) -> None:
        if not part.is_first:
            return
        self._began_s = time.perf_counter()
        if self._first < self._updates <= self._last:
            self.between_ms.append((self._began_s - self._ended_s) * 1e3)
        if self._updates == self._last:
            on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self._profile.start()

    def on_train_batch_end(
        self, trainer: Trainer, _: object, __: object, part: Any, ___: int
    ) -> None:
        if not part.is_last:
            return
        self._ended_s = time.perf_counter()
        if self._first <= self._updates < self._last:
            self.update_ms.append((self._ended_s - self._began_s) * 1e3)
        self._updates += 1
        if self._updates == self._last + self._traced:
            self._profile.stop()
            self._count(self._profile.key_averages())
            trainer.should_stop = True

    def _count(self, events: Any) -> None:
        ours = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
        self.operations = sum(event.count for event in ours) / self._traced
        self.busy_ms = sum(event.self_device_time_total for event in ours) / self._traced / 1e3
