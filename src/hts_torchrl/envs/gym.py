"""Any Gymnasium environment: a factory by id, and the group that steps single ones."""

from __future__ import annotations

import contextlib
import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

import gymnasium
import numpy as np

from hts_torchrl.envs.group import (
    EnvFactory,
    EnvGroup,
    Observation,
    Transition,
    called,
    close_each,
    closed_if_refused,
    require_alike,
    require_apart,
)
from hts_torchrl.envs.layers import is_a
from hts_torchrl.envs.observed import DeclaredSpace, as_flag, as_returned, as_reward, observing
from hts_torchrl.envs.own_generators import OwnGenerators, making
from hts_torchrl.envs.registered import made
from hts_torchrl.envs.spaces import action_maker, env_spec, in_one_line
from hts_torchrl.errors import ConfigurationError, require
from hts_torchrl.specs import Array, EnvSpec

_RESET = ("observation", "info")
_STEP = ("observation", "reward", "terminated", "truncated", "info")


@dataclass(frozen=True)
class GymEnvs(EnvFactory):
    """Environments of one Gymnasium id.

    What they return as ``info`` is not kept: what a policy or a loss needs belongs into the
    observation, by a wrapper of yours around an environment made by a function of yours.

    Example:
        >>> from hts_torchrl import GymEnvs, env_spec_of
        >>> env_spec_of(GymEnvs("CartPole-v1")).action.sizes
        (2,)
    """

    id: str
    """Gymnasium's id, ``CartPole-v1``; ``module:Name-v0`` imports the module first."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``gymnasium.make``."""
    imports: list[str] = field(default_factory=list)
    """Modules that each process imports first, because they register environments."""

    def __post_init__(self) -> None:
        """Refuse what is no collection."""
        require(isinstance(self.kwargs, Mapping), f"kwargs={self.kwargs!r}", "a mapping")
        lists = isinstance(self.imports, Sequence) and not isinstance(self.imports, str)
        require(lists, f"imports={self.imports!r}", "a list of modules")

    def group(self, indices: Sequence[int], *, render: bool = False) -> EnvGroup:
        """Make the environments of the given indices (:class:`EnvFactory`).

        Raises:
            ConfigurationError: if Gymnasium knows no such environment or lacks what it needs.
        """
        kwargs = {**self.kwargs, **({"render_mode": "rgb_array"} if render else {})}
        envs: list[gymnasium.Env[Any, Any]] = []
        with closed_if_refused(envs):
            self._make_each(indices, kwargs, envs)
            return SerialGroup(envs, indices)

    def _make_each(
        self, indices: Sequence[int], kwargs: dict[str, Any], envs: list[gymnasium.Env[Any, Any]]
    ) -> None:
        try:
            for module in self.imports:
                importlib.import_module(module)
            _let_plugin_register(self.id)
            for index in indices:
                envs.append(self._make(index, kwargs))  # noqa: PERF401 - what was made is closed
        except gymnasium.error.UnregisteredEnv as error:
            near = difflib.get_close_matches(self.id, gymnasium.registry, n=3)
            hint = f"; near to it: {', '.join(near)}" if near else ""
            named = f"module:{self.id.rpartition(':')[2]}"
            raise ConfigurationError(
                f"Gymnasium knows no environment {self.id!r}{hint}; if a module registers it, name "
                f"that module: id={named!r} or imports=['module']"
            ) from error
        except (gymnasium.error.Error, ImportError, TypeError, ValueError, AssertionError) as error:
            if not str(error):  # the traceback alone tells what it is
                raise
            raise ConfigurationError(f"environment {self.id!r}: {error}") from error

    def _make(self, index: int, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
        with called("make", index), making(index):
            _import_modules(self.id)  # torch may come with them, and is seeded only if it is there
        with called("make", index), making(index):
            env = made(lambda: gymnasium.make(self.id, **kwargs))
            return SeededMinAtar(env) if is_a(env.unwrapped, "minatar.BaseEnv") else env


def _import_modules(env_id: str) -> None:
    """Import what an environment is made of; what fails is told by ``gymnasium.make``."""
    module, colon, name = env_id.rpartition(":")
    with contextlib.suppress(Exception):
        if colon:
            importlib.import_module(module)
        importlib.import_module(str(gymnasium.registry[name].entry_point).partition(":")[0])


def _let_plugin_register(env_id: str) -> None:
    """Have the package that an id's namespace names register its environments, if it has not.

    Such packages have an entry point, which Gymnasium called in its versions before 1.
    """
    namespace, slash, _ = env_id.rpartition("/")
    if slash and not any(known.startswith(namespace + slash) for known in gymnasium.registry):
        for plugin in entry_points(group="gymnasium.envs", name=namespace):
            plugin.load()()


class SeededMinAtar(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Forgets the last action with each seed: a sticky one would go on from the game before."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin a game; if it is seeded, as in a new environment."""
        if seed is not None:
            self.unwrapped.game.last_action = 0  # type: ignore[attr-defined]
        return self.env.reset(seed=seed, options=options)


class SerialGroup:
    """Single Gymnasium environments stepped one after another (a :class:`SeededGroup`)."""

    steps_per_seed = 0
    next_seed: Callable[[int], int | None] | None = None

    def __init__(self, envs: Sequence[gymnasium.Env[Any, Any]], indices: Sequence[int]) -> None:
        self.envs = list(envs)
        self.indices = list(indices)
        self.num_envs = len(self.envs)
        inner = zip(self.indices, self.envs, strict=True)
        require_apart({index: [env.unwrapped] for index, env in inner})
        spaces: list[tuple[Any, Any]] = [  # of which an environment may have forgotten one
            (getattr(env, "observation_space", None), getattr(env, "action_space", None))
            for env in self.envs
        ]
        specs = {
            index: spec_of(env, index, *pair)
            for env, index, pair in zip(self.envs, self.indices, spaces, strict=True)
        }
        self.spec: EnvSpec = require_alike(specs)
        self._action_spaces = [space for _, space in spaces]
        self._action_of = [action_maker(each) for each in self._action_spaces]
        self._declared = [DeclaredSpace(space, self.spec.observations) for space, _ in spaces]
        self._next: Observation = {
            key: np.empty((self.num_envs, *spec.shape), spec.dtype)
            for key, spec in self.spec.observations.items()
        }
        self._generators = [OwnGenerators() for _ in self.envs]
        self._stepping = [observing("step", index) for index in self.indices]

    def _begin(self, row: int, seed: int | None) -> None:
        self._require_same_actions(row)  # a game may have changed them, and reset() put them back
        with observing("reset", self.indices[row]), self._generators[row] as generators:
            if seed is not None:
                generators.seed(seed)
            observation, _ = as_returned(self.envs[row].reset(seed=seed), _RESET)
            store(self._declared[row].entries(observation), self._next, row)
        self._require_same_actions(row)

    def _require_same_actions(self, row: int) -> None:
        space, first = self.envs[row].action_space, self._action_spaces[row]
        if space is not first and space != first:
            raise ConfigurationError(
                f"environment {self.indices[row]} has the action space {in_one_line(space)}, but "
                f"had {in_one_line(first)} when it was made: declare all actions from the start, "
                "and tell by an 'action_mask' in the observation which of them are allowed"
            )

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Seed and reset every environment."""
        return self.restart(range(self.num_envs), seeds)

    def restart(self, rows: Sequence[int], seeds: Sequence[int]) -> Observation:
        """Seed and reset some environments."""
        for row, seed in zip(rows, seeds, strict=True):
            self._begin(row, int(seed))
        return self._next

    def step(self, actions: Array) -> Transition:
        """Step each environment, and reset those whose episode ended."""
        rewards = np.zeros(self.num_envs, np.float32)
        terminated = np.zeros(self.num_envs, bool)
        truncated = np.zeros(self.num_envs, bool)
        ended = []
        for row, env in enumerate(self.envs):
            with self._stepping[row], self._generators[row]:
                action = self._action_of[row](actions[row])
                observation, reward, terminates, truncates, _ = as_returned(env.step(action), _STEP)
                rewards[row] = as_reward(reward)
                if terminates is not False:
                    terminated[row] = as_flag("terminated", terminates)
                if truncates is not False:
                    truncated[row] = as_flag("truncated", truncates)
                store(self._declared[row].entries(observation), self._next, row)
            if terminated[row] or truncated[row]:
                ended.append(row)
        after = self._next
        if ended:
            after = {key: array.copy() for key, array in self._next.items()}
            for row in ended:
                self._begin(row, None if self.next_seed is None else self.next_seed(row))
        ends = terminated | truncated
        return Transition(after, self._next, rewards, rewards, terminated, truncated, ends)

    def render(self) -> Array:
        """Return the first environment's picture."""
        return np.asarray(self.envs[0].render())

    def close(self) -> None:
        """Close every environment."""
        close_each(dict(zip(self.indices, self.envs, strict=True)))


def spec_of(
    env: Any,  # noqa: ANN401 - a single or a vector environment
    index: int,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
) -> EnvSpec:
    """Describe the environment of an index, which is named where a space is refused."""
    try:
        return env_spec(observation_space, action_space)
    except ConfigurationError as error:
        name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
        raise ConfigurationError(f"environment {index} ({name}): {error}") from None


def store(entries: Observation, into: Observation, row: int) -> None:
    """Write the entries of one environment's observation into its row."""
    for key, array in into.items():
        array[row] = entries[key]
