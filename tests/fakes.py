"""Environments whose behaviour is known: each observation names its own place; no torch here.

Factories are frozen dataclasses called with the environment's index, so they travel to workers.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from hts_torchrl.shared.rollout import DebugCells

NUM_ACTIONS = 4
SEED_RANGE = 4096


class CoordinateEnv(gymnasium.Env):
    """Observation float32 (environment, episode, step in it, last action, seed modulo 4096).

    Episode ``k`` of environment ``n`` has ``lengths[(n + k) % len(lengths)]`` steps and terminates
    if ``n + k`` is even, else it is truncated. So a game depends on those before it, and not on its
    seed and its actions alone: it cannot be played again.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (5,), np.float32)
    action_space = spaces.Discrete(NUM_ACTIONS)

    def __init__(self, index: int, lengths: tuple[int, ...] = (3, 5, 2)) -> None:
        self.index = index
        self.lengths = lengths
        self.episode = -1
        self.seed = 0
        self.steps = 0
        self.action = -1

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        if seed is not None:
            self.seed = seed % SEED_RANGE
        self.episode += 1
        self.steps, self.action = 0, -1
        return self._observation(), {}

    def step(self, action):
        self.steps += 1
        self.action = int(action)
        reward = self.index + self.steps / 8 + self.action / 64
        kind = self.index + self.episode
        ends = self.steps >= self.lengths[kind % len(self.lengths)]
        terminated = ends and kind % 2 == 0
        return self._observation(), reward, terminated, ends and not terminated, {}

    def _observation(self):
        place = (self.index, self.episode, self.steps, self.action, self.seed)
        return np.array(place, np.float32)


@dataclass(frozen=True)
class CoordinateEnvs:
    """Makes :class:`CoordinateEnv` by index."""

    lengths: tuple[int, ...] = (3, 5, 2)

    def __call__(self, index: int) -> gymnasium.Env:
        return CoordinateEnv(index, self.lengths)


class _Jitter(gymnasium.Wrapper):
    def __init__(self, env: gymnasium.Env, seed: int, most_s: float) -> None:
        super().__init__(env)
        self._random, self._most_s = random.Random(seed), most_s

    def step(self, action):
        time.sleep(self._random.uniform(0.0, self._most_s))
        return self.env.step(action)


@dataclass(frozen=True)
class JitterEnv:
    """Sleeps a seeded random time, up to 3 ms, before each step of another environment."""

    make: Callable[[int], gymnasium.Env]
    seed: int = 0
    most_s: float = 0.003

    def __call__(self, index: int) -> gymnasium.Env:
        return _Jitter(self.make(index), self.seed * 1000 + index, self.most_s)


_PACKAGE = """
import gymnasium
from tests.fakes import CoordinateEnv

def make():
    return CoordinateEnv(0)

def register_plugin():
    gymnasium.register("Plugin/Mine-v0", entry_point=make)

gymnasium.register("Mine-v0", entry_point=make)
"""


def write_package(folder: Path, name: str) -> None:
    """Write a package of a user's, which registers ``Mine-v0`` when it is imported."""
    package = folder / name
    package.mkdir()
    (package / "__init__.py").write_text(_PACKAGE)


class Broken(RuntimeError):
    """What :class:`FailingEnv` raises."""


class _Disturbed(CoordinateEnv):
    """Does something bad at its ``at``-th step since the start, counted from 0."""

    def __init__(self, index: int, at: int, disturbance: Callable[[], None]) -> None:
        super().__init__(index)
        self.stepped, self.at, self.disturbance = 0, at, disturbance

    def step(self, action):
        if self.stepped == self.at:
            self.disturbance()
        self.stepped += 1
        return super().step(action)


def _break() -> None:
    raise Broken("as asked")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    time.sleep(3600)


def _hang_in_c() -> None:
    """Wait for a lock that is held already, and keep every other thread from running Python."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


class _BrokenReset(CoordinateEnv):
    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        _break()


class _BrokenClose(CoordinateEnv):
    def close(self):
        _break()


@dataclass(frozen=True)
class FailingEnv:
    """Environment ``index`` raises in its ``constructor``, ``reset``, ``close``, or step ``at``."""

    where: str
    index: int = 1
    at: int = 0

    def __call__(self, index: int) -> gymnasium.Env:
        if index != self.index:
            return CoordinateEnv(index)
        if self.where == "constructor":
            _break()
        if self.where == "step":
            return _Disturbed(index, self.at, _break)
        return _BrokenReset(index) if self.where == "reset" else _BrokenClose(index)


class _HangingReset(CoordinateEnv):
    def reset(self, *, seed=None, options=None):
        if self.episode == 0:
            _hang()
        return super().reset(seed=seed, options=options)


class _Undeclared(CoordinateEnv):
    def __init__(self, index: int, maker: UndeclaredEnv) -> None:
        super().__init__(index)
        self.maker, self.stepped = maker, 0

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        return (self.maker.observation if self.maker.at < 0 else observation), info

    def step(self, action):
        observation, *rest = super().step(action)
        self.stepped += 1
        wrong = self.stepped == self.maker.at + 1
        return (self.maker.observation if wrong else observation), *rest


@dataclass(frozen=True)
class UndeclaredEnv:
    """Environment ``index`` observes what it has not declared at step ``at``, or (-1) at resets."""

    observation: Any
    index: int = 1
    at: int = 0

    def __call__(self, index: int) -> gymnasium.Env:
        return _Undeclared(index, self) if index == self.index else CoordinateEnv(index)


@dataclass(frozen=True)
class HangingEnv:
    """Environment ``index`` never returns from step ``at``, or from its second ``reset``."""

    where: str = "step"
    index: int = 1
    at: int = 0

    def __call__(self, index: int) -> gymnasium.Env:
        if index != self.index:
            return CoordinateEnv(index)
        if self.where == "reset":
            return _HangingReset(index)
        return _Disturbed(index, self.at, _hang_in_c if self.where == "C code" else _hang)


@dataclass(frozen=True)
class KillSelfEnv:
    """Environment ``index`` kills its own process at step ``at``."""

    index: int = 1
    at: int = 0

    def __call__(self, index: int) -> gymnasium.Env:
        return _Disturbed(index, self.at, _kill) if index == self.index else CoordinateEnv(index)


class MultiDiscreteEnv(gymnasium.Env):
    """Two choices an action, of 3 and 5; the observation repeats them; 4 steps an episode."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.MultiDiscrete([3, 5])

    def __init__(self, index: int) -> None:
        self.index, self.steps = index, 0

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        self.steps = 0
        return np.array([self.index, 0, -1, -1], np.float32), {}

    def step(self, action):
        assert self.action_space.contains(np.asarray(action))
        self.steps += 1
        observation = np.array([self.index, self.steps, *action], np.float32)
        return observation, 1.0, self.steps == 4, False, {}


class RecallEnv(gymnasium.Env):
    """Shows one of two cues in the first step only; an action earns 1 where it names the cue."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, steps: int = 10) -> None:
        self.steps = steps

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.cue, self.step_count = int(self.np_random.integers(2)), 0
        return np.array([2 * self.cue - 1], np.float32), {}

    def step(self, action):
        self.step_count += 1
        ends = self.step_count == self.steps
        return np.zeros(1, np.float32), float(action == self.cue), ends, False, {}


class DivergingEnv(RecallEnv):
    """Terminates with an observation that is not finite."""

    def step(self, action):
        observation, reward, ends, *others = super().step(action)
        return observation if not ends else observation * np.nan, reward, ends, *others


class DictEnv(gymnasium.Env):
    """A picture and a vector as observation; 3 steps an episode."""

    observation_space = spaces.Dict(
        {
            "picture": spaces.Box(0, 255, (1, 4, 4), np.uint8),
            "vector": spaces.Box(-np.inf, np.inf, (2,), np.float32),
        }
    )
    action_space = spaces.Discrete(NUM_ACTIONS)

    def __init__(self, index: int) -> None:
        self.index, self.steps = index, 0

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        self.steps = 0
        return self._observation(), {}

    def step(self, action):  # noqa: ARG002
        self.steps += 1
        return self._observation(), 1.0, self.steps == 3, False, {}

    def _observation(self) -> dict[str, Any]:
        return {
            "picture": np.full((1, 4, 4), 10 * self.index + self.steps, np.uint8),
            "vector": np.array([self.index, self.steps], np.float32),
        }


class NestedEnv(DictEnv):
    """The same, as a pair of the picture and a dictionary."""

    observation_space = spaces.Tuple(
        [
            DictEnv.observation_space["picture"],
            spaces.Dict(vector=DictEnv.observation_space["vector"]),
        ]
    )

    def _observation(self) -> tuple[Any, dict[str, Any]]:
        both = super()._observation()
        return both["picture"], {"vector": both["vector"]}


class ModulesEnv(CoordinateEnv):
    """Its observation tells which of some modules this process has imported."""

    modules = ("torch", "torchrl", "tensordict", "lightning")
    observation_space = spaces.Box(0, 1, (len(modules),), np.float32)

    def _observation(self):
        return np.array([name in sys.modules for name in self.modules], np.float32)


@dataclass
class RecordingEnv:
    """Makes an environment that appends every action it is given to ``actions``."""

    space: spaces.Space
    actions: list[Any] = field(default_factory=list)

    def __call__(self, index: int) -> gymnasium.Env:
        maker = self

        class _Recording(CoordinateEnv):
            action_space = maker.space

            def step(self, action):
                maker.actions.append(action)
                return super().step(0)

        return _Recording(index)


@dataclass(frozen=True)
class GatedEnv:
    """Environment ``index`` waits in step ``at`` until the file ``gate`` exists."""

    gate: str
    index: int = 1
    at: int = 0

    def __call__(self, index: int) -> gymnasium.Env:
        if index != self.index:
            return CoordinateEnv(index)
        return _Disturbed(index, self.at, self._wait)

    def _wait(self) -> None:
        while not Path(self.gate).exists():
            time.sleep(0.001)


def _once(folder: str, name: str) -> bool:
    """Whether this is the first call with that name; the file outlives the process."""
    try:
        (Path(folder) / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class _Deadly(gymnasium.Wrapper):
    def __init__(self, env: gymnasium.Env, maker: DeadlyEnvs) -> None:
        super().__init__(env)
        self.maker, self.steps = maker, 0

    def _die(self, moment: str) -> None:
        for kind, number in self.maker.deaths:
            due = kind == moment and (kind != "step" or number == self.steps)
            if due and _once(self.maker.folder, f"{kind}-{number}"):
                os.kill(os.getpid(), self.maker.sent)

    def reset(self, **kwargs):
        self._die("reset")
        return self.env.reset(**kwargs)

    def step(self, action):
        self._die("step")
        self.steps += 1
        return self.env.step(action)


@dataclass(frozen=True)
class DeadlyEnvs:
    """CartPole in games of 20 steps; environment 1 ends its process at the given moments, once."""

    folder: str
    deaths: tuple[tuple[str, int], ...] = ()
    sent: signal.Signals = signal.SIGKILL

    def __call__(self, index: int) -> gymnasium.Env:
        env = gymnasium.make("CartPole-v1", max_episode_steps=20)
        return _Deadly(env, self) if index == 1 else env


def _live_for_ever() -> None:
    while True:
        time.sleep(3600)


class _Parental(gymnasium.Wrapper):
    def __init__(self, env: gymnasium.Env, maker: ParentalEnvs) -> None:
        super().__init__(env)
        if maker.kind == "program":
            quiet = subprocess.DEVNULL  # a test that reads what its program says ends without it
            self.child = subprocess.Popen(["sleep", "3600"], stdout=quiet, stderr=quiet)
        else:
            self.child = multiprocessing.get_context("fork").Process(target=_live_for_ever)
            self.child.start()
        self.maker, self.stepped = maker, 0
        maker.note("children", self.child.pid)

    def step(self, action):
        if self.stepped == self.maker.breaks_at:
            raise BrokenPipeError("the emulator is gone")
        self.stepped += 1
        return self.env.step(action)

    def close(self):
        if self.maker.tidy:
            self.child.terminate()
            self.child.wait() if self.maker.kind == "program" else self.child.join()
            self.maker.note("closed", self.child.pid)


@dataclass(frozen=True)
class ParentalEnvs:
    """CartPole whose environments each start a process that lives for ever, except in ``asker``.

    They are ended by ``close`` if it is ``tidy``. The files ``children`` and ``closed`` in
    ``folder`` have their numbers.
    """

    folder: str
    kind: str = "fork"
    tidy: bool = False
    breaks_at: int = -1
    asker: int = field(default_factory=os.getpid)

    def __call__(self, _: int) -> gymnasium.Env:
        env = gymnasium.make("CartPole-v1", max_episode_steps=20)
        return env if os.getpid() == self.asker else _Parental(env, self)

    def note(self, name: str, pid: int) -> None:
        with (Path(self.folder) / name).open("a") as file:
            file.write(f"{pid} ")

    def noted(self, name: str) -> list[int]:
        path = Path(self.folder) / name
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []


class _Forgetful(CoordinateEnv):
    def step(self, action):
        fill = DebugCells.__setitem__

        def forget(cells, step, values):
            DebugCells.__setitem__ = fill  # the first that is stored of a step is its action
            if step != 1:
                fill(cells, step, values)

        DebugCells.__setitem__ = forget
        return super().step(action)


@dataclass(frozen=True)
class ForgetfulEnvs:
    """Environment ``index`` plants a bug in its process: no action is stored at step 1."""

    index: int = 2

    def __call__(self, index: int) -> gymnasium.Env:
        return _Forgetful(index) if index == self.index else CoordinateEnv(index)


class Duel:
    """A game of PettingZoo's parallel interface, whose agents each know their own place.

    An agent observes float32 (agent, episode, step in it, last action of the one before it, seed
    modulo 4096), and is rewarded with its own action and an eighth for each step. Episodes have
    ``lengths[k % len(lengths)]`` steps, counted from the seed on; in the last one the first agent
    terminates and the others are truncated, unless ``leaves`` names a step at which the first goes.
    """

    def __init__(self, agents=2, lengths=(3, 2), leaves=None, render_mode=None) -> None:
        self.possible_agents = [f"player_{number}" for number in range(agents)]
        self.lengths, self.leaves, self.render_mode = lengths, leaves, render_mode
        self.agents, self.episode, self.seed, self.closed = [], -1, 0, False

    def observation_space(self, agent):  # noqa: ARG002
        return spaces.Box(-np.inf, np.inf, (5,), np.float32)

    def action_space(self, agent):  # noqa: ARG002
        return spaces.Discrete(NUM_ACTIONS)

    def reset(self, seed=None, options=None):  # noqa: ARG002
        if seed is not None:
            self.seed, self.episode = seed % SEED_RANGE, -1
        self.agents = list(self.possible_agents)
        self.episode += 1
        self.steps = 0
        self.actions = dict.fromkeys(self.agents, -1)
        return self._observations(), {name: {} for name in self.agents}

    def step(self, actions):
        assert actions.keys() == set(self.agents)
        self.steps += 1
        self.actions = actions
        names = self.agents
        ends = self.steps >= self.lengths[self.episode % len(self.lengths)]
        leaves = self.steps == self.leaves
        rewards = {name: int(actions[name]) + self.steps / 8 for name in names}
        terminations = {name: (ends or leaves) and name == names[0] for name in names}
        truncations = {name: ends and name != names[0] for name in names}
        observations = self._observations()
        self.agents = [name for name in names if not terminations[name] and not truncations[name]]
        return observations, rewards, terminations, truncations, {name: {} for name in names}

    def _observations(self):
        others = [self.actions[self.agents[-1]], *self.actions.values()]
        return {
            name: np.array([row, self.episode, self.steps, others[row], self.seed], np.float32)
            for row, name in enumerate(self.agents)
        }

    def render(self):
        return np.full((4, 6, 3), self.steps, np.uint8)

    def close(self):
        self.closed = True


class ForbiddenAction(RuntimeError):
    """What :class:`MaskedEnv` raises for an action that its mask forbade."""


class MaskedEnv(gymnasium.Env):
    """Forbids all actions but some, others in every step, and raises for a forbidden one.

    In step ``k`` the choices ``c`` with ``(c + k + environment) % 3 == 0`` are forbidden; the
    reward is 1 for the smallest that is allowed. An episode has 6 steps, and its last observation
    allows nothing, as the end of a board game does.
    """

    def __init__(self, index: int, action_space: spaces.Space | None = None) -> None:
        self.action_space = action_space or spaces.Discrete(NUM_ACTIONS)
        discrete = isinstance(self.action_space, spaces.Discrete)
        self.sizes = [int(self.action_space.n)] if discrete else self.action_space.nvec.tolist()
        self.index, self.steps = index, 0
        self.observation_space = spaces.Dict(
            {
                "action_mask": spaces.MultiBinary(sum(self.sizes)),
                "observation": spaces.Box(-np.inf, np.inf, (3,), np.float32),
            }
        )

    def masks(self) -> list[Any]:
        turn = self.steps + self.index
        return [np.array([(c + turn) % 3 != 0 for c in range(size)]) for size in self.sizes]

    def _observation(self, ended: bool = False) -> dict[str, Any]:
        mask = np.concatenate(self.masks()) & (not ended)
        place = np.array([self.index, self.steps, self.steps % 3], np.float32)
        return {"action_mask": mask.astype(np.int8), "observation": place}

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        self.steps = 0
        return self._observation(), {}

    def step(self, action):
        choices = np.atleast_1d(action).tolist()
        for choice, mask in zip(choices, self.masks(), strict=True):
            if not mask[choice]:
                raise ForbiddenAction(f"{choice} in step {self.steps}")
        reward = float(choices[0] == int(np.flatnonzero(self.masks()[0])[0]))
        self.steps += 1
        ended = self.steps == 6
        return self._observation(ended), reward, ended, False, {}


@dataclass(frozen=True)
class MaskedEnvs:
    """Makes :class:`MaskedEnv` by index, with one choice or with two."""

    sizes: tuple[int, ...] = (NUM_ACTIONS,)

    def __call__(self, index: int) -> gymnasium.Env:
        one = len(self.sizes) == 1
        return MaskedEnv(index, None if one else spaces.MultiDiscrete(self.sizes))


class ArrayActionEnv(gymnasium.Env):
    """Takes numbers from 0 to 1 in an array of a shape of its own; 4 steps an episode.

    The reward is their mean, so the best action is known; it raises for one that its space does not
    contain.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.action_space = spaces.Box(0.0, 1.0, shape, np.float32)
        self.steps = 0

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert isinstance(action, np.ndarray)
        assert self.action_space.contains(action), action
        self.steps += 1
        observation = np.full(1, self.steps, np.float32)
        return observation, float(action.mean()), self.steps == 4, False, {}


class NestedActionEnv(gymnasium.Env):
    """Takes ``{"arm": (numbers, choice from 5 on), "gear": choice}``; 4 steps an episode.

    The observation repeats the action; it raises for one that its space does not contain.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (6,), np.float32)
    action_space = spaces.Dict(
        {
            "arm": spaces.Tuple(
                [spaces.Box(-1.0, np.array([[1.0], [2.0]]), dtype=np.float64),
                 spaces.Discrete(4, start=5)]
            ),
            "gear": spaces.MultiDiscrete([3, 2], dtype=np.int32),
        }
    )  # fmt: skip

    def __init__(self, index: int) -> None:
        self.index, self.steps = index, 0

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        self.steps = 0
        return np.full(6, self.index, np.float32), {}

    def step(self, action):
        (numbers, grip), gear = action["arm"], action["gear"]
        # A box of float64 takes the float32 that a policy gives.
        assert self.action_space.contains(
            {"arm": (np.asarray(numbers, np.float64), grip), "gear": gear}
        ), action
        self.steps += 1
        observation = np.concatenate([[self.steps], numbers.ravel(), [grip], gear])
        return observation.astype(np.float32), float(gear[0] == 2), self.steps == 4, False, {}
