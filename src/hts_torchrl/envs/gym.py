"""Any Gymnasium environment: a factory by id, and the adapter of a single one."""

from __future__ import annotations

import contextlib
import difflib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

import gymnasium

from hts_torchrl.envs.adapter import EnvAdapter, SerialGroup, Step
from hts_torchrl.envs.group import EnvFactory, EnvGroup, Observation, called, closed_if_refused
from hts_torchrl.envs.layers import is_a
from hts_torchrl.envs.observed import DeclaredSpace, as_flag, as_returned, as_reward
from hts_torchrl.envs.own_generators import making
from hts_torchrl.envs.registered import made
from hts_torchrl.envs.spaces import action_maker, env_spec, in_one_line
from hts_torchrl.errors import ConfigurationError, require
from hts_torchrl.specs import Array, EnvSpec

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
            return SerialGroup([*map(GymAdapter, envs, indices)])

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
            return made(lambda: gymnasium.make(self.id, **kwargs))


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


class GymAdapter(EnvAdapter):
    """A single Gymnasium environment."""

    def __init__(self, env: gymnasium.Env[Any, Any], index: int) -> None:
        space, self._action_space = env.observation_space, env.action_space
        super().__init__(env, index, spec_of(env, index, space, self._action_space))
        self.parts = [env.unwrapped]
        self._action_of = action_maker(self._action_space)
        self._space = DeclaredSpace(space, self.declared)

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Begin a game."""
        self._require_same_actions()  # a game may have changed them, and reset() put them back
        with self._resetting:
            if seeds and is_a(self.env.unwrapped, "minatar.BaseEnv"):
                self.env.unwrapped.game.last_action = 0  # a sticky one would go on
            returned = self.env.reset(seed=seeds[0] if seeds else None)
            observation, _ = as_returned(returned, ("observation", "info"))
            entries = self._space.entries(observation)
        self._require_same_actions()
        return entries

    def _require_same_actions(self) -> None:
        space, first = self.env.action_space, self._action_space
        if space is not first and space != first:
            raise ConfigurationError(
                f"environment {self.index} has the action space {in_one_line(space)}, but "
                f"had {in_one_line(first)} when it was made: declare all actions from the start, "
                "and tell by an 'action_mask' in the observation which of them are allowed"
            )

    def step(self, action: Array) -> Step:
        """Step the environment."""
        with self._stepping:
            returned = as_returned(self.env.step(self._action_of(action)), _STEP)
            observation, reward, terminated, truncated, _ = returned
            reward = as_reward(reward)
            terminated = terminated is not False and as_flag("terminated", terminated)
            truncated = truncated is not False and as_flag("truncated", truncated)
            return self._space.entries(observation), reward, reward, terminated, truncated


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
