"""The model of speed: what the costs of a task allow, and which settings make the most of it.

Symbols: N environments, T steps of a round (the paper's alpha), G environments an executor, B rows
of an actor's pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hts_torchrl.config import Precision
from hts_torchrl.specs import Array
from hts_torchrl.tools.runtime_model import expected_round_s


@dataclass(frozen=True)
class Costs:
    """Seconds of each part: executor and actor in a pool, the others while all cores are busy."""

    step_s: Array
    """Each step of one environment ``[K]``, resets included."""
    visit_s: float
    """What an executor adds to each step of its G environments, however many they are."""
    pass_s: Mapping[int, float]
    """An actor's pass, by its rows B."""
    update_s: float
    """The learner's time for each environment step of a round."""
    handover_s: float = 0.0
    """Between the last step of a round and the first of the next, where no environment steps."""


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
    envs_per_game: int = 1
    """The agents of a game are as many environments, and belong to one executor."""


def limits(costs: Costs, settings: Settings) -> dict[str, float]:
    """Return the steps a second that each part would allow if nothing else were slower.

    ``rendezvous`` is the exact expectation of :func:`expected_round_s` for executors with a core
    each; the passes that answer an executor add to every step, and with ``delay=0`` the update to
    every round. In ``actors`` all passes are as full as the environments can make them; ``cores``
    knows that they are not where executors come one by one.
    """
    group, steps = settings.envs_per_executor, settings.steps_per_round
    rows = settings.inference_batch_size
    env_s, pass_s = float(costs.step_s.mean()), costs.pass_s[rows]
    mean_s = group * env_s + costs.visit_s + math.ceil(group / rows) * pass_s
    variance = group * float(costs.step_s.var())
    shape = mean_s**2 / variance if variance else 1e6
    round_s = expected_round_s(settings.num_envs // group, steps, mean_s, shape=shape)
    round_s += costs.handover_s
    frames = settings.num_envs * steps
    if settings.delay == 0:
        round_s += frames * costs.update_s
    return {
        "cores": _limit_of_cores(costs, settings),
        "learner": 1 / _learner_s(costs, settings),
        "actors": max(settings.num_actors, 1) / _row_s(costs, settings),
        "rendezvous": frames / round_s,
    }


def _limit_of_cores(costs: Costs, settings: Settings) -> float:
    """Return the steps a second at which no core ever idles.

    An actor that has the time answers each executor by itself, in passes with few rows. One that
    has not is always at work, until its passes are full. Then it has as much of the cores as the
    learner, or as all executors if they take more; but a core at most.
    """
    group, rows = settings.envs_per_executor, settings.inference_batch_size
    executor_s, learner_s = _executor_s(costs, settings), _learner_s(costs, settings)
    others_s = executor_s + learner_s
    full = settings.cores / (others_s + _row_s(costs, settings))
    if settings.num_actors == 0:  # all environments are answered together
        return full
    by_itself_s = math.ceil(group / rows) * costs.pass_s[rows] / group
    unhurried = settings.cores / (others_s + by_itself_s)
    shared = settings.cores / (others_s + settings.num_actors * max(executor_s, learner_s))
    a_core_each = (settings.cores - settings.num_actors) / others_s
    return min(full, max(unhurried, shared, a_core_each))


def collect_s(costs: Costs, settings: Settings) -> float:
    """Return the seconds of CPU in which a step is collected, by full passes."""
    return _executor_s(costs, settings) + _row_s(costs, settings)


def _executor_s(costs: Costs, settings: Settings) -> float:
    """Return the seconds of CPU in which an executor makes a step."""
    return float(costs.step_s.mean()) + costs.visit_s / settings.envs_per_executor


def _learner_s(costs: Costs, settings: Settings) -> float:
    """Return the learner's seconds for a step of a round, which it also hands over."""
    return costs.update_s + costs.handover_s / (settings.num_envs * settings.steps_per_round)


def _row_s(costs: Costs, settings: Settings) -> float:
    """Return the actor's seconds for one of the rows of a pass."""
    rows = settings.inference_batch_size
    return costs.pass_s[rows] / min(rows, settings.num_envs)


def speed(costs: Costs, settings: Settings) -> float:
    """Return the steps a second to expect: the least of the :func:`limits`."""
    return min(limits(costs, settings).values())


def advice(costs: Costs, settings: Settings) -> Settings:
    """Return the settings that suit the same task.

    Of the pools within 5 % of the fastest, the one with the least work, which leaves most to the
    learner; so many actors that they are no limit; twice the environments while that is a quarter
    faster, because cores wait for them; and where a very long round would be faster, the shortest
    one with 95 % of its speed.
    """
    better = _suited_pool(costs, settings)
    while True:
        wider = _suited_pool(costs, replace(better, num_envs=2 * better.num_envs))
        if speed(costs, wider) < 1.25 * speed(costs, better):
            break
        better = wider
    longest = speed(costs, replace(better, steps_per_round=4096))
    while speed(costs, better) < 0.95 * longest:
        better = replace(better, steps_per_round=2 * better.steps_per_round)
    return better


def _suited_pool(costs: Costs, settings: Settings) -> Settings:
    """Return the settings with the executors and actors that suit the environments and cores."""
    pools = [
        _with_actors(costs, replace(settings, envs_per_executor=group, inference_batch_size=rows))
        for group in range(settings.envs_per_game, settings.num_envs + 1, settings.envs_per_game)
        if settings.num_envs % group == 0
        for rows in costs.pass_s
    ]
    fastest = max(speed(costs, pool) for pool in pools)
    fast = [pool for pool in pools if speed(costs, pool) >= 0.95 * fastest]
    return max(fast, key=lambda pool: limits(costs, pool)["cores"])


def _with_actors(costs: Costs, settings: Settings) -> Settings:
    """Return the settings with a fifth more actors than the rest can use, one a row at most."""
    bounds = limits(costs, settings)
    rest = min(bounds["cores"], bounds["learner"])
    wanted = math.ceil(1.2 * rest * max(settings.num_actors, 1) / bounds["actors"])
    return replace(settings, num_actors=min(max(settings.num_actors, wanted), settings.num_envs))


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
