"""Who worked and who waited in a run: statistics of all rounds, and the trace of one."""

from __future__ import annotations

import time
from typing import TypeAlias

from hts_torchrl.config import CollectorSettings
from hts_torchrl.shared.worker_status import WorkerStatus

Trace: TypeAlias = dict[str, list[tuple[float, float]]]


class RunTimes:
    """Seconds of the learner and of the rendezvous, summed over rounds.

    Of each round, a collector notes these::

        times.ask()
        times.meet(round_index, status)
        times.hand_out()
    """

    def __init__(self, settings: CollectorSettings) -> None:
        self._settings = settings
        self._executors = range(settings.num_executors)
        self.traced_round = -1
        self.trace: Trace = {}
        self.skew_s = 0.0
        self._busy_s = self._waiting_s = 0.0
        self._asked_s = self._handed_out_s = time.perf_counter()

    def begin(self) -> None:
        """Note that the caller has begun to iterate."""
        self._handed_out_s = time.perf_counter()

    def ask(self) -> None:
        """Note that the caller has asked for a round: the learner's work is done."""
        self._asked_s = time.perf_counter()
        self._busy_s += self._asked_s - self._handed_out_s

    def hand_out(self) -> None:
        """Note that the caller gets a round."""
        self._handed_out_s = time.perf_counter()
        self._waiting_s += self._handed_out_s - self._asked_s

    def meet(self, round_index: int, status: WorkerStatus) -> None:
        """Note how far apart the executors finished, and what a traced round consisted of."""
        finished_s = status.finished_s[self._executors]
        self.skew_s += float(finished_s.max() - finished_s.min())
        if round_index == self.traced_round:
            names = [f"executor {index}" for index in self._executors]
            names += [f"actor {index}" for index in range(self._settings.num_actors)]
            self.trace = {name: status.spans(worker) for worker, name in enumerate(names)}
            self.trace["learner"] = [(self._handed_out_s, self._asked_s)]

    def learner_stats(self) -> dict[str, int | float | bool]:
        """Return the learner's seconds at work and waiting."""
        return {"learner_busy_s": self._busy_s, "learner_waiting_s": self._waiting_s}

    def worker_stats(self, status: WorkerStatus) -> dict[str, int | float | bool]:
        """Return the workers' seconds at work and waiting, and who is last at the rendezvous."""
        stats: dict[str, int | float | bool] = {}
        executors = len(self._executors)
        for role, rows in (("executors", slice(executors)), ("actors", slice(executors, None))):
            stats[f"{role}_busy_s"] = float(status.busy_s[rows].sum())
            stats[f"{role}_waiting_s"] = float(status.waiting_s[rows].sum())
        if self._settings.num_actors > 0:
            stats["rendezvous_skew_s"] = self.skew_s
            last = int(status.finished_s[:executors].argmax())
            stats["slowest_env"] = self._settings.global_envs_of(last)[0]
        return stats
