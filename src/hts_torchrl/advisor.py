"""The advisor: what a task costs on this machine, what to expect of it, and which settings suit it.

Symbols: N environments, T steps of a round (the paper's alpha), G environments an executor.
"""

from __future__ import annotations

import contextlib
import copy
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Semaphore
from typing import Any

import cloudpickle
import numpy as np
import torch
from lightning.pytorch import Callback, Trainer

from hts_torchrl.config import ActionSpec, Precision
from hts_torchrl.data import PRECISIONS, HTSDataModule
from hts_torchrl.envs.group import Array, EnvFactory, EnvGroup
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.inference import PolicyInference
from hts_torchrl.learner import Learner
from hts_torchrl.theory import expected_lag, expected_round_s, gamma_fit, kolmogorov_smirnov
from hts_torchrl.trial import train_for_trial

_ENDLESS = 10**6
_MOST_START_S = 60.0
_SUMMED = 100
"""Steps in each sum whose distribution is compared with a Gamma distribution, as in the paper."""


@dataclass(frozen=True)
class Costs:
    """Seconds of each part, measured while all other cores step environments."""

    step_s: Array
    """Each step of one environment ``[K]``, resets included."""
    pass_s: float
    """An actor's pass of ``pass_rows`` observations."""
    pass_rows: int
    update_s: float
    """The learner's time for each environment step of a round."""


@dataclass(frozen=True)
class Settings:
    """What decides the speed, beside the costs."""

    num_envs: int
    envs_per_executor: int
    num_actors: int
    steps_per_round: int
    delay: int
    cores: int


def limits(costs: Costs, settings: Settings) -> dict[str, float]:
    """Return the steps a second that each part would allow if nothing else were slower.

    ``rendezvous`` is the exact expectation of :func:`expected_round_s` for executors with a core
    each; a pass adds to every step, and with ``delay=0`` the update to every round.
    """
    group, steps = settings.envs_per_executor, settings.steps_per_round
    mean_s = group * float(costs.step_s.mean()) + costs.pass_s
    variance = group * float(costs.step_s.var())
    shape = mean_s**2 / variance if variance else 1e6
    round_s = expected_round_s(settings.num_envs // group, steps, mean_s, shape=shape)
    frames = settings.num_envs * steps
    if settings.delay == 0:
        round_s += frames * costs.update_s
    work_s = float(costs.step_s.mean()) + costs.pass_s / costs.pass_rows + costs.update_s
    return {
        "cores": settings.cores / work_s,
        "learner": 1 / costs.update_s,
        "actors": max(settings.num_actors, 1) * costs.pass_rows / costs.pass_s,
        "rendezvous": frames / round_s,
    }


def advice(costs: Costs, settings: Settings) -> Settings:
    """Return settings for the same task that are no slower, changed only where it pays.

    As many environments an executor as leave every core one; so many actors that they are no limit;
    twice the environments while that is a quarter faster, because cores wait for them; and where a
    very long round would be faster, the shortest one with 95 % of its speed.
    """

    def speed(candidate: Settings) -> float:
        return min(limits(costs, candidate).values())

    better = _suited_crew(costs, settings)
    while True:
        wider = _suited_crew(costs, replace(better, num_envs=2 * better.num_envs))
        if speed(wider) < 1.25 * speed(better):
            break
        better = wider
    longest = speed(replace(better, steps_per_round=4096))
    while speed(better) < 0.95 * longest:
        better = replace(better, steps_per_round=2 * better.steps_per_round)
    return better


def _suited_crew(costs: Costs, settings: Settings) -> Settings:
    """Return the settings with the executors and actors that suit the environments and cores."""
    fits = [
        group
        for group in range(1, settings.num_envs + 1)
        if settings.num_envs % group == 0 and settings.num_envs // group >= settings.cores
    ]
    suited = replace(settings, envs_per_executor=max(fits, default=1))
    bounds = limits(costs, suited)
    rows = 1.2 * min(bounds["cores"], bounds["learner"])
    wanted = math.ceil(rows * costs.pass_s / costs.pass_rows)
    return replace(suited, num_actors=max(suited.num_actors, wanted))


class Advisor:
    """Measures a task, predicts its speed, and checks the prediction by training for a while.

    Example:
        >>> advisor = Advisor(A2C(), data, trainer)        # doctest: +SKIP
        >>> for line in advisor.report(seconds=60):        # doctest: +SKIP
        ...     print(line)

    Args:
        learner: the learner, which stays as it is.
        data: the environments and the crew.
        trainer: gives precision, gradient clipping and accumulation.
    """

    def __init__(self, learner: Learner, data: HTSDataModule, trainer: Trainer) -> None:
        self._learner, self._data, self._trainer = learner, data, trainer
        self._cores = len(os.sched_getaffinity(0))
        self._group = make_group(data.env, [0])

    def report(self, seconds: float) -> Iterator[str]:
        """Yield the lines of the report as they are found, in about two times ``seconds``."""
        with _busy(self._data.env, self._cores - 1):
            step_s = np.array(list(measured_step_times(self._group, seconds / 2)))
            yield from _describe(step_s)
            own: Precision = self._trainer.precision  # type: ignore[assignment]
            costs_in: dict[Precision, Costs] = {}
            for precision in dict.fromkeys((own, *PRECISIONS)):
                costs = costs_in[precision] = self._costs(step_s, precision, seconds / 6)
                yield (
                    f"in {precision:15}{1e3 * costs.pass_s:.3f} ms for an actor's pass of "
                    f"{costs.pass_rows} rows, {1e3 * costs.update_s:.3f} ms a step for the update"
                )
        self._group.close()
        crew, schedule = self._data.crew, self._data.schedule
        settings = Settings(
            num_envs=crew.num_envs,
            envs_per_executor=crew.envs_per_executor,
            num_actors=crew.num_actors,
            steps_per_round=schedule.steps_per_round,
            delay=schedule.delay,
            cores=self._cores,
        )
        costs = costs_in[own]
        bounds = limits(costs, settings)
        expected = min(bounds.values())
        each = ", ".join(f"{name} {value:.0f}" for name, value in bounds.items())
        yield f"expected          {expected:.0f} steps/s, the least of: {each}"
        yield _staleness(costs, settings)
        yield _suggestion(costs_in, settings, own)
        measured = self._train(self._data.for_trial(_ENDLESS), seconds / 2)
        yield (
            f"measured          {measured:.0f} steps/s in {seconds / 2:g} s of training, "
            f"{measured / expected:.2f} of the expected"
        )

    def _costs(self, step_s: Array, precision: Precision, seconds: float) -> Costs:
        learner = copy.deepcopy(self._learner)
        if learner.policy is None:
            learner.build_policy(self._group.spec)
        rows = self._data.crew.batch_size
        inference = PolicyInference(
            learner.actor_critic,
            self._group.spec,
            batch_size=rows,
            device=str(self._trainer.strategy.root_device),
            precision=precision,
        )
        observation = self._group.reset([0])
        observations = {key: np.repeat(array, rows, 0) for key, array in observation.items()}
        draws = np.full((rows, self._group.spec.action.num_draws), 0.5)
        pass_s = _seconds_of(lambda: inference.answer(observations, draws), seconds)
        clock = _LearnerClock()
        serial = self._data.for_trial(_ENDLESS, num_actors=0)
        self._train(serial, seconds, clock, precision=precision)
        return Costs(step_s, pass_s, rows, clock.seconds / clock.frames)

    def _train(
        self,
        data: HTSDataModule,
        seconds: float,
        *callbacks: Callback,
        precision: Precision | None = None,
    ) -> float:
        """Train for a while; returns steps a second."""
        watch = _Watch(seconds)
        train_for_trial(self._learner, data, self._trainer, watch, *callbacks, precision=precision)
        return watch.steps_per_s


class _Watch(Callback):
    """Ends training after some seconds, not counting the first three rounds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.rounds, self.frames, self.steps_per_s = seconds, -3, 0, float("nan")

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:  # noqa: ANN401
        part = arguments[2]
        if not part.is_last:
            return
        self.rounds += 1
        now_s = time.perf_counter()
        if self.rounds <= 0:
            self.began_s = now_s
            return
        self.frames += part.round.numel()
        self.steps_per_s = self.frames / (now_s - self.began_s)
        trainer.should_stop = now_s - self.began_s >= self.seconds


class _LearnerClock(Callback):
    """Sums up the time of updates, without the first round."""

    def __init__(self) -> None:
        self.seconds, self.frames, self.rounds = 0.0, 0, 0

    def on_train_batch_start(self, *_: Any) -> None:  # noqa: ANN401
        self.began_s = time.perf_counter()

    def on_train_batch_end(self, *arguments: Any) -> None:  # noqa: ANN401
        part = arguments[3]
        if self.rounds > 0:
            self.seconds += time.perf_counter() - self.began_s
            self.frames += part.round.numel() * part.is_last
        self.rounds += part.is_last


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
    collects = settings.cores / (float(costs.step_s.mean()) + costs.pass_s / costs.pass_rows)
    load = collects * costs.update_s
    lag = f"{expected_lag(1, load):.1f}" if load < 1 else "more and more"
    return f"age of the data   {settings.delay} update; {lag} in an asynchronous system (Claim 2)"


def _suggestion(costs_in: dict[Precision, Costs], settings: Settings, precision: Precision) -> str:
    """Name the flags that would change, and what they would give."""
    better = {name: advice(costs, settings) for name, costs in costs_in.items()}
    speeds = {name: min(limits(costs, better[name]).values()) for name, costs in costs_in.items()}
    best = max(speeds, key=lambda name: speeds[name])
    if speeds[best] < 1.1 * speeds[precision]:
        best = precision
    own, flags = _flags(settings, precision), _flags(better[best], best)
    changed = [f"--{name}={value}" for name, value in flags.items() if value != own[name]]
    if not changed:
        return "advice            keep the settings"
    learnt = own["data.frames_per_batch"] != flags["data.frames_per_batch"] or best != precision
    remark = " (which also changes what is learnt)" * learnt
    return f"advice            {' '.join(changed)}: {speeds[best]:.0f} steps/s expected{remark}"


def _flags(settings: Settings, precision: Precision) -> dict[str, Any]:
    return {
        "data.num_envs": settings.num_envs,
        "data.envs_per_executor": settings.envs_per_executor,
        "data.num_actors": settings.num_actors,
        "data.frames_per_batch": settings.num_envs * settings.steps_per_round,
        "trainer.precision": precision,
    }


def measured_step_times(group: EnvGroup, seconds: float) -> Iterator[float]:
    """Yield the seconds of each step, by random actions, after a tenth of the time."""
    random = np.random.default_rng(0)
    group.reset([0])
    began_s = time.perf_counter()
    while True:
        action = _random_action(group.spec.action, random)
        before_s = time.perf_counter()
        group.step(action)
        now_s = time.perf_counter()
        if now_s - began_s > seconds:
            return
        if now_s - began_s > seconds / 10:
            yield now_s - before_s


def _random_action(spec: ActionSpec, random: np.random.Generator) -> Array:
    """Return one environment's action ``[1, ...]``."""
    action: Array
    if spec.kind == "continuous":
        action = random.standard_normal((1, *spec.array.shape))
    elif spec.kind == "one_hot":
        action = np.eye(spec.sizes[0])[random.integers(spec.sizes[0], size=1)]
    else:
        action = random.integers(0, spec.sizes).reshape(1, *spec.array.shape)
    return action.astype(spec.array.dtype)


def _seconds_of(work: Callable[[], object], seconds: float) -> float:
    """Return the mean time of ``work``, after a tenth of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for span_s in (seconds / 10, seconds):
        count, began_s = 0, time.perf_counter()
        while time.perf_counter() - began_s < span_s:
            work()
            count += 1
    torch.set_num_threads(threads)
    return (time.perf_counter() - began_s) / count


@contextlib.contextmanager
def _busy(env: EnvFactory, count: int) -> Iterator[None]:
    """Let other processes step environments meanwhile: a busy machine's cores are slower."""
    context = multiprocessing.get_context("spawn")
    make, stepping = cloudpickle.dumps(env), context.Semaphore(0)
    others = [
        context.Process(target=_step_on, args=(make, stepping), daemon=True) for _ in range(count)
    ]
    for other in others:
        other.start()
    try:
        for _ in others:  # they import this module first, which takes seconds
            stepping.acquire(timeout=_MOST_START_S)
        yield
    finally:
        for other in others:
            other.kill()
            other.join()
            other.close()


def _step_on(make: bytes, stepping: Semaphore) -> None:
    group = make_group(cloudpickle.loads(make), [0])
    stepping.release()
    for _ in measured_step_times(group, float("inf")):
        pass
