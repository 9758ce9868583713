"""The advisor: a task's costs on this machine, its expected speed, and settings that suit it."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from lightning.pytorch import Callback, Trainer

from hts_torchrl.collectors.hts import HTSCollector
from hts_torchrl.config import PRECISIONS, Precision
from hts_torchrl.envs.group import closed_at_end
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.errors import require
from hts_torchrl.learner import Learner
from hts_torchrl.machine import allowed_cores
from hts_torchrl.specs import Array
from hts_torchrl.tools.idle import IdleEnvs
from hts_torchrl.tools.runtime_model import expected_lag, gamma_fit, kolmogorov_smirnov
from hts_torchrl.tools.short_fit import data_of_short_fit, short_fit
from hts_torchrl.tools.speed import Costs, Settings, best_settings, collect_s, limits, speed
from hts_torchrl.tools.step_times import busy_cores, measured_step_times
from hts_torchrl.training.datamodule import HTSDataModule

_ENDLESS = 10**6
_LEARNT = " (which also changes what is learnt)"
_SUMMED = 100
"""Steps in each sum whose distribution is compared with a Gamma distribution, as in the paper."""


class Advisor:
    """Measures a task, predicts its speed, and checks the prediction by training for a while.

    It takes a minute or more::

        advisor = Advisor(A2C(), data, trainer)
        for line in advisor.report(seconds=60):
            print(line)

    Args:
        learner: the learner, which is not changed.
        data: the environments and the worker pool.
        trainer: gives precision, gradient clipping and accumulation.
    """

    def __init__(self, learner: Learner, data: HTSDataModule, trainer: Trainer) -> None:
        self._learner, self._data, self._trainer = learner, data, trainer
        self._cores = max(1, int(allowed_cores()))
        self._group = make_group(data.env, [0])

    def report(self, seconds: float) -> Iterator[str]:
        """Yield the lines of the report as they are found, in about two times ``seconds``."""
        own: Precision = self._trainer.precision  # type: ignore[assignment]
        precisions = list(dict.fromkeys((own, *PRECISIONS)))
        with busy_cores(self._data.env, self._cores - 1), closed_at_end(self._group):
            step_s = np.array(list(measured_step_times(self._group, seconds / 2)))
            require(len(step_s) > 1, f"--seconds={seconds:g}", "time for two steps")
            yield from _describe(step_s)
            serial = {"num_actors": 0}
            update_s = {p: self._train(serial, p, seconds / 8).update_s for p in precisions}
        costs_in = {}
        for precision in precisions:
            costs = self._costs(step_s, update_s[precision], precision, seconds / 8)
            costs_in[precision] = costs
            passes = ", ".join(f"{1e3 * s:.3f} ({rows} rows)" for rows, s in costs.pass_s.items())
            yield (
                f"in {precision:15}ms: {1e3 * update_s[precision]:.3f} a step for the update, an "
                f"actor's pass {passes}, an executor's own time a step {1e3 * costs.visit_s:.3f}, "
                f"between two rounds {1e3 * costs.handover_s:.3f}"
            )
        settings = self._settings()
        costs = costs_in[own]
        bounds = limits(costs, settings)
        expected = speed(costs, settings)
        each = ", ".join(f"{name} {value:.0f}" for name, value in bounds.items())
        yield f"expected          {expected:.0f} steps/s, the least of: {each}"
        yield _staleness(costs, settings)
        measured = self._train(_of_data(settings), own, seconds / 2).steps_per_s
        yield (
            f"measured          {measured:.0f} steps/s in {seconds / 2:g} s of training, "
            f"{measured / expected:.2f} of the expected"
        )
        better, precision = best_settings(costs_in, settings, own)
        yield f"advice            {_suggestion(settings, own, better, precision)}"
        best = measured
        if (better, precision) != (settings, own):
            best = self._train(_of_data(better), precision, seconds / 2).steps_per_s
            yield (
                f"measured with it  {best:.0f} steps/s, {best / measured:.2f} times as many; "
                f"{speed(costs_in[precision], better):.0f} were expected"
            )
        bounds = limits(costs_in[precision], better)
        if bounds["learner"] == min(bounds.values()):
            yield from self._more_threads(better, precision, seconds / 2, best)

    def _more_threads(
        self, settings: Settings, precision: Precision, seconds: float, steps_per_s: float
    ) -> Iterator[str]:
        """Train with more threads of the learner, while twice as many are a tenth faster.

        No model says it: whoever waits for the learner leaves it cores, and whoever does not shares
        them with its threads. In bfloat16, a learner that may gives each a chunk.
        """
        threads = self._learner.num_threads
        if threads is None or self._trainer.strategy.root_device.type != "cpu":
            return
        learner = copy.deepcopy(self._learner)
        while 2 * threads <= self._cores:
            learner.num_threads = 2 * threads
            flags = f"--model.num_threads={2 * threads}"
            divides = settings.num_envs % (2 * threads) == 0
            if precision != "32-true" and learner.computes_side_by_side and divides:
                learner.gradient_chunks = 2 * threads
                flags += f" --model.gradient_chunks={2 * threads}"
            measured = self._train(_of_data(settings), precision, seconds, learner).steps_per_s
            helps = measured >= 1.1 * steps_per_s
            advice = f"{flags}{_LEARNT}" if helps else f"keep {threads}"
            yield (
                f"learner threads   {2 * threads}: {measured:.0f} steps/s, "
                f"{measured / steps_per_s:.2f} times as many as with {threads}: {advice}"
            )
            if not helps:
                return
            threads, steps_per_s = 2 * threads, measured

    def _settings(self) -> Settings:
        pool, schedule = self._data.pool, self._data.schedule
        return Settings(
            num_envs=pool.num_envs,
            envs_per_executor=pool.envs_per_executor,
            inference_batch_size=pool.batch_size,
            num_actors=pool.num_actors,
            steps_per_round=schedule.steps_per_round,
            delay=schedule.delay,
            cores=self._cores,
            envs_per_game=self._group.num_envs,
        )

    def _costs(self, step_s: Array, update_s: float, precision: Precision, seconds: float) -> Costs:
        own = self._settings()
        several = sorted({own.inference_batch_size, own.num_envs})
        found = [self._pool_s(rows, precision, seconds / len(several)) for rows in several]
        visits_s, passes_s, handovers_s = zip(*found, strict=True)
        pass_s = dict(zip(several, passes_s, strict=True))
        return Costs(
            step_s, float(np.mean(visits_s)), pass_s, update_s, float(np.mean(handovers_s))
        )

    def _pool_s(
        self, rows: int, precision: Precision, seconds: float
    ) -> tuple[float, float, float]:
        """Measure a pool of one executor, whose environments do nothing.

        Returns:
            Seconds of an executor's step, of a pass, and of what a round adds to both.
        """
        learner = copy.deepcopy(self._learner)
        learner.prepare_policy(self._data)
        spec = self._group.spec
        collector = HTSCollector(
            IdleEnvs(spec),
            learner.actor_critic,
            num_envs=self._data.pool.num_envs,
            envs_per_executor=self._data.pool.num_envs,
            frames_per_batch=self._data.schedule.frames_per_round,
            inference_batch_size=rows,
            precision=precision,
            policy_device=self._data.policy_device or str(self._trainer.strategy.root_device),
            cudagraph_policy=self._data.cudagraph_policy,
            compile_policy=self._data.pool.compile_policy,
            clone=False,
            all_outputs=False,
        )
        spans: dict[str, list[float]] = {"executor": [], "actor": [], "learner": []}
        rounds_s = []
        ended_s = time.perf_counter()
        try:
            for index, _ in enumerate(collector):
                before_s, ended_s = ended_s, time.perf_counter()
                if index == 0:
                    until_s = ended_s + seconds
                if index % 3 == 1:  # neither this round nor the one before is traced
                    rounds_s.append(ended_s - before_s)
                if index % 3 == 0:
                    collector.trace_round(index + 2)  # the next one has started
                elif index % 3 == 2:
                    for worker, works in (collector.trace or {}).items():
                        spans[worker.split()[0]] += [end - begin for begin, end in works]
                    if time.perf_counter() > until_s:
                        break
        finally:
            collector.shutdown()
        visit_s, pass_s = float(np.mean(spans["executor"])), float(np.mean(spans["actor"]))
        passes = math.ceil(self._data.pool.num_envs / rows)
        steps_s = self._data.schedule.steps_per_round * (visit_s + passes * pass_s)
        return visit_s, pass_s, max(0.0, float(np.median(rounds_s)) - steps_s)

    def _train(
        self,
        settings: dict[str, Any],
        precision: Precision,
        seconds: float,
        learner: Learner | None = None,
    ) -> _Watch:
        watch = _Watch(seconds)
        data = data_of_short_fit(self._data, _ENDLESS, **settings)
        short_fit(learner or self._learner, data, self._trainer, watch, precision=precision)
        return watch


class _Watch(Callback):
    """Ends training after some seconds, not counting the first three rounds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.rounds, self.frames = seconds, -3, 0
        self.steps_per_s = self.update_s = float("nan")

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:  # noqa: ANN401
        part = arguments[2]
        if not part.is_last:
            return
        self.rounds += 1
        now_s = time.perf_counter()
        busy_s = trainer.datamodule.collector.stats()["learner_busy_s"]  # type: ignore[attr-defined]
        if self.rounds <= 0:
            self.began_s, self.busy_before_s = now_s, busy_s
            return
        self.frames += part.round.numel()
        self.steps_per_s = self.frames / (now_s - self.began_s)
        self.update_s = (busy_s - self.busy_before_s) / self.frames
        trainer.should_stop = now_s - self.began_s >= self.seconds


def _describe(step_s: Array) -> Iterator[str]:
    """Say how the times of steps are distributed."""
    ms = 1e3 * step_s
    centred = step_s - step_s.mean()
    correlation = float((centred[1:] * centred[:-1]).mean() / max(step_s.var(), 1e-300))
    yield (
        f"environment step  {ms.mean():.3f} ms (deviation {ms.std():.3f}, longest {ms.max():.3f}, "
        f"correlation with the step before {correlation:.2f}; {len(ms)} steps)"
    )
    sums = step_s[: len(step_s) // _SUMMED * _SUMMED].reshape(-1, _SUMMED).sum(1)
    if len(sums) >= 20:
        mean_s, shape = gamma_fit(sums)
        distance, probability = kolmogorov_smirnov(sums, mean_s, shape=shape)
        verdict = "fit" if probability >= 0.05 else "do not fit"
        yield (
            f"sums of {_SUMMED} steps  {verdict} a Gamma distribution of shape {shape:.0f} "
            f"(Kolmogorov-Smirnov D = {distance:.3f}, p = {probability:.3f}, {len(sums)} sums)"
        )


def _staleness(costs: Costs, settings: Settings) -> str:
    """Compare the age of the data with an asynchronous system's of the same costs."""
    load = settings.cores / collect_s(costs, settings) * costs.update_s
    lag = f"{expected_lag(1, load):.1f}" if load < 1 else "more and more"
    return f"age of the data   {settings.delay} update; {lag} in an asynchronous system (Claim 2)"


def _suggestion(
    settings: Settings, precision: Precision, better: Settings, better_precision: Precision
) -> str:
    """Name the flags that differ."""
    own, flags = _flags(settings, precision), _flags(better, better_precision)
    if better.num_envs != settings.num_envs:  # by which the default is another one
        own["data.inference_batch_size"] = None
    changed = {name: value for name, value in flags.items() if value != own[name]}
    if not changed:
        return "keep the settings"
    harmless = {"data.envs_per_executor", "data.num_actors"}
    remark = _LEARNT * (not changed.keys() <= harmless)
    return " ".join(f"--{name}={value}" for name, value in changed.items()) + remark


def _flags(settings: Settings, precision: Precision) -> dict[str, Any]:
    flags = {f"data.{name}": value for name, value in _of_data(settings).items()}
    return {**flags, "trainer.precision": precision}


def _of_data(settings: Settings) -> dict[str, Any]:
    """Return the settings that a data module has, by its names."""
    names = ("num_envs", "envs_per_executor", "inference_batch_size", "num_actors")
    frames = settings.num_envs * settings.steps_per_round
    return {**{name: getattr(settings, name) for name in names}, "frames_per_batch": frames}
