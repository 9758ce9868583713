"""The advisor: what a task costs on this machine, what to expect of it, and which settings suit it.

Symbols: N environments, T steps of a round (the paper's alpha), G environments an executor, B rows
of an actor's pass.
"""

from __future__ import annotations

import contextlib
import copy
import math
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Semaphore
from typing import Any

import cloudpickle
import numpy as np
from lightning.pytorch import Callback, Trainer

from hts_torchrl.collector import HTSCollector
from hts_torchrl.config import ActionSpec, Precision
from hts_torchrl.data import PRECISIONS, HTSDataModule
from hts_torchrl.envs.group import Array, EnvFactory, EnvGroup
from hts_torchrl.envs.idle import IdleEnvs
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.learner import Learner
from hts_torchrl.theory import expected_lag, expected_round_s, gamma_fit, kolmogorov_smirnov
from hts_torchrl.trial import train_for_trial

_ENDLESS = 10**6
_MOST_START_S = 60.0
_SUMMED = 100
"""Steps in each sum whose distribution is compared with a Gamma distribution, as in the paper."""


@dataclass(frozen=True)
class Costs:
    """Seconds of each part: executor and actor in a crew, the others while all cores are busy."""

    step_s: Array
    """Each step of one environment ``[K]``, resets included."""
    visit_s: float
    """What an executor adds to each step of its G environments, however many they are."""
    pass_s: Mapping[int, float]
    """An actor's pass, by its rows B."""
    update_s: float
    """The learner's time for each environment step of a round."""


@dataclass(frozen=True)
class Settings:
    """What decides the speed, beside the costs."""

    num_envs: int
    envs_per_executor: int
    inference_batch_size: int
    num_actors: int
    steps_per_round: int
    delay: int
    cores: int


def limits(costs: Costs, settings: Settings) -> dict[str, float]:
    """Return the steps a second that each part would allow if nothing else were slower.

    ``rendezvous`` is the exact expectation of :func:`expected_round_s` for executors with a core
    each; the passes that answer an executor add to every step, and with ``delay=0`` the update to
    every round. Passes are taken to be as full as the environments can make them.
    """
    group, steps = settings.envs_per_executor, settings.steps_per_round
    rows = settings.inference_batch_size
    env_s, pass_s = float(costs.step_s.mean()), costs.pass_s[rows]
    mean_s = group * env_s + costs.visit_s + math.ceil(group / rows) * pass_s
    variance = group * float(costs.step_s.var())
    shape = mean_s**2 / variance if variance else 1e6
    round_s = expected_round_s(settings.num_envs // group, steps, mean_s, shape=shape)
    frames = settings.num_envs * steps
    if settings.delay == 0:
        round_s += frames * costs.update_s
    return {
        "cores": settings.cores / (_collect_s(costs, settings) + costs.update_s),
        "learner": 1 / costs.update_s,
        "actors": max(settings.num_actors, 1) / _row_s(costs, settings),
        "rendezvous": frames / round_s,
    }


def _collect_s(costs: Costs, settings: Settings) -> float:
    """Return the seconds of CPU in which a step is collected."""
    visit_s = costs.visit_s / settings.envs_per_executor
    return float(costs.step_s.mean()) + visit_s + _row_s(costs, settings)


def _row_s(costs: Costs, settings: Settings) -> float:
    """Return the actor's seconds for one of the rows of a pass."""
    rows = settings.inference_batch_size
    return costs.pass_s[rows] / min(rows, settings.num_envs)


def speed(costs: Costs, settings: Settings) -> float:
    """Return the steps a second to expect: the least of the :func:`limits`."""
    return min(limits(costs, settings).values())


def advice(costs: Costs, settings: Settings) -> Settings:
    """Return the settings that suit the same task.

    Of the crews within 5 % of the fastest, the one with the least work, which leaves most to the
    learner; so many actors that they are no limit; twice the environments while that is a quarter
    faster, because cores wait for them; and where a very long round would be faster, the shortest
    one with 95 % of its speed.
    """
    better = _suited_crew(costs, settings)
    while True:
        wider = _suited_crew(costs, replace(better, num_envs=2 * better.num_envs))
        if speed(costs, wider) < 1.25 * speed(costs, better):
            break
        better = wider
    longest = speed(costs, replace(better, steps_per_round=4096))
    while speed(costs, better) < 0.95 * longest:
        better = replace(better, steps_per_round=2 * better.steps_per_round)
    return better


def _suited_crew(costs: Costs, settings: Settings) -> Settings:
    """Return the settings with the executors and actors that suit the environments and cores."""
    crews = [
        _with_actors(costs, replace(settings, envs_per_executor=group, inference_batch_size=rows))
        for group in range(1, settings.num_envs + 1)
        if settings.num_envs % group == 0
        for rows in costs.pass_s
    ]
    fastest = max(speed(costs, crew) for crew in crews)
    fast = [crew for crew in crews if speed(costs, crew) >= 0.95 * fastest]
    return max(fast, key=lambda crew: limits(costs, crew)["cores"])


def _with_actors(costs: Costs, settings: Settings) -> Settings:
    """Return the settings with a fifth more actors than the rest can use."""
    bounds = limits(costs, settings)
    rest = min(bounds["cores"], bounds["learner"])
    wanted = math.ceil(1.2 * rest * max(settings.num_actors, 1) / bounds["actors"])
    return replace(settings, num_actors=max(settings.num_actors, wanted))


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
        own: Precision = self._trainer.precision  # type: ignore[assignment]
        precisions = list(dict.fromkeys((own, *PRECISIONS)))
        with _busy(self._data.env, self._cores - 1):
            step_s = np.array(list(measured_step_times(self._group, seconds / 2)))
            yield from _describe(step_s)
            update_s = {name: self._update_s(name, seconds / 8) for name in precisions}
        self._group.close()
        costs_in = {}
        for precision in precisions:
            costs = self._costs(step_s, update_s[precision], precision, seconds / 8)
            costs_in[precision] = costs
            passes = ", ".join(f"{1e3 * s:.3f} ({rows} rows)" for rows, s in costs.pass_s.items())
            yield (
                f"in {precision:15}ms: {1e3 * update_s[precision]:.3f} a step for the update, an "
                f"actor's pass {passes}, an executor's own time a step {1e3 * costs.visit_s:.3f}"
            )
        settings = self._settings()
        costs = costs_in[own]
        bounds = limits(costs, settings)
        expected = speed(costs, settings)
        each = ", ".join(f"{name} {value:.0f}" for name, value in bounds.items())
        yield f"expected          {expected:.0f} steps/s, the least of: {each}"
        yield _staleness(costs, settings)
        measured = self._measured(settings, own, seconds / 2)
        yield (
            f"measured          {measured:.0f} steps/s in {seconds / 2:g} s of training, "
            f"{measured / expected:.2f} of the expected"
        )
        better, precision = best_settings(costs_in, settings, own)
        yield f"advice            {_suggestion(settings, own, better, precision)}"
        if (better, precision) != (settings, own):
            advised = self._measured(better, precision, seconds / 2)
            yield (
                f"measured with it  {advised:.0f} steps/s, {advised / measured:.2f} times as many; "
                f"{speed(costs_in[precision], better):.0f} were expected"
            )

    def _settings(self) -> Settings:
        crew, schedule = self._data.crew, self._data.schedule
        return Settings(
            num_envs=crew.num_envs,
            envs_per_executor=crew.envs_per_executor,
            inference_batch_size=crew.batch_size,
            num_actors=crew.num_actors,
            steps_per_round=schedule.steps_per_round,
            delay=schedule.delay,
            cores=self._cores,
        )

    def _update_s(self, precision: Precision, seconds: float) -> float:
        serial = self._data.for_trial(_ENDLESS, num_actors=0)
        return self._train(serial, precision, seconds).update_s

    def _costs(self, step_s: Array, update_s: float, precision: Precision, seconds: float) -> Costs:
        own = self._settings()
        several = sorted({own.inference_batch_size, own.num_envs})
        visits_s, pass_s = [], {}
        for rows in several:
            visit_s, pass_s[rows] = self._crew_s(rows, precision, seconds / len(several))
            visits_s.append(visit_s)
        return Costs(step_s, float(np.mean(visits_s)), pass_s, update_s)

    def _crew_s(self, rows: int, precision: Precision, seconds: float) -> tuple[float, float]:
        """Return the seconds of an executor's step, without its environment's, and of a pass."""
        learner = copy.deepcopy(self._learner)
        spec = self._group.spec
        if learner.policy is None:
            learner.build_policy(spec)
        collector = HTSCollector(
            IdleEnvs(spec),
            learner.actor_critic,
            num_envs=self._data.crew.num_envs,
            frames_per_batch=self._data.schedule.frames_per_round,
            inference_batch_size=rows,
            precision=precision,
            policy_device=str(self._trainer.strategy.root_device),
            clone=False,
        )
        collector._leave_out_extras()
        spans: dict[str, list[float]] = {"executor": [], "actor": [], "learner": []}
        try:
            for index, _ in enumerate(collector):
                if index == 0:
                    until_s = time.perf_counter() + seconds
                if index % 3 == 0:
                    collector.trace_round(index + 2)  # the next one has started
                elif index % 3 == 2:
                    for worker, works in (collector.trace or {}).items():
                        spans[worker.split()[0]] += [end - begin for begin, end in works]
                    if time.perf_counter() > until_s:
                        break
        finally:
            collector.shutdown()
        return float(np.mean(spans["executor"])), float(np.mean(spans["actor"]))

    def _measured(self, settings: Settings, precision: Precision, seconds: float) -> float:
        data = self._data.for_trial(
            _ENDLESS,
            num_envs=settings.num_envs,
            envs_per_executor=settings.envs_per_executor,
            inference_batch_size=settings.inference_batch_size,
            num_actors=settings.num_actors,
            frames_per_batch=settings.num_envs * settings.steps_per_round,
        )
        return self._train(data, precision, seconds).steps_per_s

    def _train(self, data: HTSDataModule, precision: Precision, seconds: float) -> _Watch:
        watch = _Watch(seconds)
        train_for_trial(self._learner, data, self._trainer, watch, precision=precision)
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
    load = settings.cores / _collect_s(costs, settings) * costs.update_s
    lag = f"{expected_lag(1, load):.1f}" if load < 1 else "more and more"
    return f"age of the data   {settings.delay} update; {lag} in an asynchronous system (Claim 2)"


def best_settings(
    costs_in: Mapping[Precision, Costs], settings: Settings, precision: Precision
) -> tuple[Settings, Precision]:
    """Return the :func:`advice`, in another precision if that is 10 % faster."""
    better = {name: advice(costs, settings) for name, costs in costs_in.items()}
    speeds = {name: speed(costs, better[name]) for name, costs in costs_in.items()}
    best = max(speeds, key=lambda name: speeds[name])
    if speeds[best] < 1.1 * speeds[precision]:
        best = precision
    return better[best], best


def _suggestion(
    settings: Settings, precision: Precision, better: Settings, better_precision: Precision
) -> str:
    """Name the flags that differ."""
    own, flags = _flags(settings, precision), _flags(better, better_precision)
    changed = {name: value for name, value in flags.items() if value != own[name]}
    if not changed:
        return "keep the settings"
    harmless = {"data.envs_per_executor", "data.num_actors"}
    remark = " (which also changes what is learnt)" * (not changed.keys() <= harmless)
    return " ".join(f"--{name}={value}" for name, value in changed.items()) + remark


def _flags(settings: Settings, precision: Precision) -> dict[str, Any]:
    return {
        "data.num_envs": settings.num_envs,
        "data.envs_per_executor": settings.envs_per_executor,
        "data.inference_batch_size": settings.inference_batch_size,
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
