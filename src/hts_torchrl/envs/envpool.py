"""EnvPool's environments: a factory by id."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from hts_torchrl.envs.adapter import GymAdapter, SerialGroup
from hts_torchrl.envs.group import EnvFactory, EnvGroup
from hts_torchrl.errors import ConfigurationError, in_one_line, require, require_type
from hts_torchrl.specs import Array

_OURS = ("num_envs", "batch_size", "num_threads", "seed", "env_seed", "max_num_players")
_STEPS_PER_SEED = 100_000
"""Seeding makes a new pool, with a thread and all that the game loads."""


@dataclass(frozen=True)
class EnvPoolEnvs(EnvFactory):
    """Environments of one EnvPool id: classic control, MuJoCo, Atari, Procgen, VizDoom and others.

    They need ``pip install 'hts-torchrl[envpool]'``; Procgen also needs the system's Qt 5. Each
    environment has its own pool of one thread, because EnvPool accepts seeds only when a pool is
    created. So a game depends only on its own seed.

    The score is the sum of rewards. For Atari with clipped rewards or lost lives use
    :class:`AtariEnvs`, which keeps the game's own score. VizDoom has discrete actions with
    ``kwargs={"use_combined_action": True}``.

    Example:
        >>> from hts_torchrl import EnvPoolEnvs, env_spec_of
        >>> env_spec_of(EnvPoolEnvs("CartPole-v1")).action.sizes
        (2,)
    """

    id: str
    """EnvPool's id, such as ``HalfCheetah-v4``; ``envpool.list_all_envs()`` lists them."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``envpool.make``, such as ``frame_skip``."""

    def __post_init__(self) -> None:
        """Refuse what is no name, and arguments that the collector decides."""
        require_type("id", self.id, str, "a name of EnvPool's, such as HalfCheetah-v4,")
        require(isinstance(self.kwargs, Mapping), f"kwargs={self.kwargs!r}", "a mapping")
        taken = [name for name in _OURS if name in self.kwargs]
        require(not taken, f"kwargs has {taken[:1]}", "no number of environments, threads or seeds")

    @property
    def preload(self) -> tuple[str, ...]:
        """EnvPool."""
        return ("envpool",)

    def group(self, indices: Sequence[int], *, render: bool = False) -> EnvGroup:
        """Make the environments of the given indices (:class:`EnvFactory`).

        Raises:
            ConfigurationError: if EnvPool is missing, has no such environment or lacks what it
                needs.
        """
        envpool = _envpool()
        if self.id not in envpool.list_all_envs():
            near = difflib.get_close_matches(self.id, envpool.list_all_envs(), n=3)
            hint = f"; near to it: {', '.join(near)}" if near else ""
            raise ConfigurationError(f"EnvPool has no environment {self.id!r}{hint}")
        kwargs = {**self.kwargs, **({"render_mode": "rgb_array"} if render else {})}
        try:
            envs = [PoolOfOne(envpool, self.id, kwargs) for _ in indices]
        except (ImportError, TypeError, ValueError, AssertionError, RuntimeError) as error:
            told = _of_another_type(envpool, self.id, kwargs) or in_one_line(error)
            raise ConfigurationError(f"EnvPool's environment {self.id!r}: {told}") from error
        group = SerialGroup([*map(GymAdapter, envs, indices)])
        group.steps_per_seed = _STEPS_PER_SEED
        return group


def _envpool() -> ModuleType:
    try:
        import envpool  # noqa: PLC0415 - takes a second

        from hts_torchrl.compat.envpool import let_go_of_import_error  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(
            f"EnvPool is not installed ({error}): pip install 'hts-torchrl[envpool]'"
        ) from error
    let_go_of_import_error()
    return envpool


def _of_another_type(envpool: ModuleType, env_id: str, kwargs: dict[str, Any]) -> str | None:
    """Name an argument whose type EnvPool refuses; its own words are the types of all, by place."""
    for name, value in kwargs.items():
        try:
            envpool.make_spec(env_id, **{name: value})
        except TypeError:
            config = envpool.make_spec(env_id).config
            if hasattr(config, name):
                own = getattr(config, name)
                return f"{name}={value!r}; {type(own).__name__} is needed, such as {own!r}"
        except Exception:  # told by the caller, in EnvPool's words
            continue
    return None


class PoolOfOne(gymnasium.Env[Any, Any]):
    """A pool of one environment, which is made anew when it is seeded.

    EnvPool would reset in the step after an episode's end. The reset comes before, so it does not.
    """

    def __init__(self, envpool: ModuleType, env_id: str, kwargs: dict[str, Any]) -> None:
        spec = envpool.make_spec(env_id, **kwargs)  # takes no pool to ask
        if (players := spec.config.max_num_players) > 1:
            raise ConfigurationError(
                f"EnvPool's environment {env_id!r} has {players} players, but a policy acts for "
                "one: take a game of one player, or PettingZooEnvs"
            )
        self.spec = EnvSpec(env_id)
        self.observation_space, self.action_space = _spaces(spec)
        self._envpool, self._kwargs = envpool, kwargs
        self._pool: Any = None

    def reset(self, *, seed: int | None = None, **_: object) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, with a seed in a new pool."""
        if seed is not None:
            self.close()
            assert self.spec is not None
            self._pool = self._envpool.make_gymnasium(
                self.spec.id, num_envs=1, num_threads=1, seed=seed, **self._kwargs
            )
            _spaces(self._pool)  # which it keeps
        observation, _ = self._pool.reset()
        return _only(observation), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Step the environment."""
        observation, reward, terminated, truncated, _ = self._pool.step(np.asarray(action)[None])
        return _only(observation), float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def render(self) -> Any:  # noqa: ANN401
        """Return an image, uint8 ``[height, width, 3]``."""
        return self._pool.render()[0]

    def close(self) -> None:
        """Stop the pool's thread."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _spaces(of: Any) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:  # noqa: ANN401
    """Return the spaces of a pool, or of its spec, without what Gymnasium says of their bounds."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*precision lowered by casting")
        return of.observation_space, of.action_space


def _only(batch: Array | dict[str, Any]) -> Any:  # noqa: ANN401
    """Return the one observation of a batch."""
    if isinstance(batch, dict):
        return {key: _only(each) for key, each in batch.items()}
    return batch[0]
