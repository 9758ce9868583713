"""Games of several agents, by PettingZoo's parallel interface: each agent is an environment."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hts_torchrl.envs.group import (
    EnvFactory,
    EnvGroup,
    Observation,
    Transition,
    called,
    close_each,
    closed_if_refused,
    require_apart,
)
from hts_torchrl.envs.gym import store
from hts_torchrl.envs.observed import DeclaredSpace, as_flag, as_returned, as_reward, observing
from hts_torchrl.envs.own_generators import OwnGenerators, making
from hts_torchrl.envs.spaces import action_maker, env_spec
from hts_torchrl.errors import ConfigurationError, require
from hts_torchrl.specs import Array

_RESET = ("observations", "infos")
_STEP = ("observations", "rewards", "terminations", "truncations", "infos")


@dataclass(frozen=True)
class PettingZooEnvs(EnvFactory):
    """Games whose A agents act at once, and all by the same policy.

    Each agent is one environment of the collector: rows ``A * g`` to ``A * g + A - 1`` of a batch
    are the agents of game ``g``, in the order of ``possible_agents``, each with its own trajectory.
    So ``num_envs`` and ``envs_per_executor`` must be multiples of A. A game has the seed of its
    first agent.

    All agents must have the same spaces, be there from the start, and end with the game. Where one
    leaves early, SuperSuit's ``black_death_v3``, around the game in a function of yours, keeps it.

    Example::

        PettingZooEnvs("pettingzoo.sisl.pursuit_v5", {"n_pursuers": 4})
    """

    id: str | Callable[..., Any]
    """Module with a ``parallel_env``, ``module:function``, or the function that makes a game."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of that function."""

    def __post_init__(self) -> None:
        """Refuse arguments without names."""
        require(isinstance(self.kwargs, Mapping), f"kwargs={self.kwargs!r}", "a mapping")

    def group(self, indices: Sequence[int], *, render: bool = False) -> EnvGroup:
        """Make the games of the given environments, the last of them whole (:class:`EnvFactory`).

        Raises:
            ConfigurationError: if there is no such game, or its agents cannot share a policy.
        """
        kwargs = {**self.kwargs, **({"render_mode": "rgb_array"} if render else {})}
        games: list[Any] = []
        try:
            with closed_if_refused(games):
                make = self.id if callable(self.id) else _function(self.id)
                rows = 0
                while rows < len(indices):
                    with called("parallel_env", list(indices)), making(indices[0] + rows):
                        games.append(make(**kwargs))
                    agents = games[0].possible_agents
                    require(len(agents) > 0, f"possible_agents={agents}", "one agent or more")
                    rows += len(agents)
                return AgentsGroup(games, indices[0])
        except (ImportError, AttributeError, TypeError, ValueError, AssertionError) as error:
            if not str(error):  # the traceback alone tells what it is
                raise
            raise ConfigurationError(f"game {self.id!r}: {error}") from error


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    games = importlib.import_module(module)
    if not function and hasattr(games, "env") and not hasattr(games, "parallel_env"):
        raise ConfigurationError(
            "its agents take turns (PettingZoo's AEC interface); only games of the parallel "
            "interface, in which all agents act at once, are supported"
        )
    make: Callable[..., Any] = getattr(games, function or "parallel_env")
    return make


class AgentsGroup:
    """Games played one after another in each step, a row for each agent (a :class:`SeededGroup`).

    All agents of a game end with it, so their rows begin anew together.
    """

    steps_per_seed = 0
    next_seed: Callable[[int], int | None] | None = None

    def __init__(self, games: Sequence[Any], first_index: int) -> None:
        self.games = list(games)
        self.agents = list(games[0].possible_agents)
        require_apart({first_index + n * len(self.agents): [g] for n, g in enumerate(self.games)})
        self.num_envs = len(self.games) * len(self.agents)
        spaces = {
            name: (games[0].observation_space(name), games[0].action_space(name))
            for name in self.agents
        }
        self.spec = env_spec(*spaces[self.agents[0]])
        for name, pair in spaces.items():
            if (spec := env_spec(*pair)) != self.spec:
                raise ConfigurationError(
                    f"agent {name!r} has {spec}, but agent {self.agents[0]!r} has {self.spec}: one "
                    "policy acts for all; SuperSuit's pad_observations_v0 and pad_action_space_v0 "
                    "make them alike"
                )
        self._action_of = [action_maker(action) for _, action in spaces.values()]
        self._declared = [
            DeclaredSpace(space, self.spec.observations) for space, _ in spaces.values()
        ]
        self._next: Observation = {
            key: np.empty((self.num_envs, *spec.shape), spec.dtype)
            for key, spec in self.spec.observations.items()
        }
        self._generators = [OwnGenerators() for _ in self.games]
        self._indices = [[first_index + row for row in rows] for rows in self._rows]

    @property
    def _rows(self) -> list[range]:
        """The rows of each game."""
        count = len(self.agents)
        return [range(game * count, game * count + count) for game in range(len(self.games))]

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Seed and reset every game.

        Raises:
            ConfigurationError: if there are seeds for another number of environments.
        """
        if len(seeds) != self.num_envs:
            raise ConfigurationError(
                f"{len(self.agents)} agents share a game, but these are {len(seeds)} environments: "
                f"set num_envs and envs_per_executor to multiples of {len(self.agents)}"
            )
        return self.restart(range(self.num_envs), seeds)

    def restart(self, rows: Sequence[int], seeds: Sequence[int]) -> Observation:
        """Seed and reset some games, all of whose rows are given."""
        seed_of = dict(zip(rows, seeds, strict=True))
        for game, own in enumerate(self._rows):
            if own[0] in seed_of:
                assert seed_of.keys() >= set(own), "a game begins for all of its agents"
                self._begin(game, int(seed_of[own[0]]))
        return self._next

    def _begin(self, game: int, seed: int | None) -> None:
        with observing("reset", self._indices[game]), self._generators[game] as generators:
            if seed is not None:
                generators.seed(seed)
            observations, _ = as_returned(self.games[game].reset(seed=seed), _RESET)
            self._store(game, observations)

    def _store(self, game: int, observations: Mapping[str, Any]) -> None:
        _require_all(self.agents, observations)
        rows = zip(self._rows[game], self.agents, self._declared, strict=True)
        for row, name, declared in rows:
            store(declared.entries(observations[name]), self._next, row)

    def step(self, actions: Array) -> Transition:
        """Play a step of each game, and begin a new one where it ended."""
        reward = np.zeros(self.num_envs, np.float32)
        terminated, truncated = np.zeros((2, self.num_envs), bool)
        for game, rows in enumerate(self._rows):
            with observing("step", self._indices[game]), self._generators[game]:
                returned = as_returned(self.games[game].step(self._answers(actions[rows])), _STEP)
                observations, rewards, terminates, truncates, _ = returned
                self._store(game, observations)
                for row, name in zip(rows, self.agents, strict=True):
                    reward[row] = as_reward(rewards[name])
                    terminated[row] = as_flag("terminated", terminates[name])
                    truncated[row] = as_flag("truncated", truncates[name])
                _require_common_end(self.agents, (terminated | truncated)[rows])
        ends = terminated | truncated
        after = self._next
        if ends.any():
            after = {key: array.copy() for key, array in self._next.items()}
            self._begin_again(ends)
        return Transition(after, self._next, reward, reward, terminated, truncated, ends)

    def _answers(self, actions: Array) -> dict[str, Any]:
        """Return the actions of one game by agent."""
        agents = zip(self.agents, actions, self._action_of, strict=True)
        return {name: action_of(action) for name, action, action_of in agents}

    def _begin_again(self, ends: Array) -> None:
        for game, rows in enumerate(self._rows):
            if ends[rows[0]]:
                # Every agent counts its seeds; that of the first is the game's.
                seeds = [None if self.next_seed is None else self.next_seed(row) for row in rows]
                self._begin(game, seeds[0])

    def render(self) -> Array:
        """Return the first game's picture.

        Raises:
            ConfigurationError: if the game, which may be of any class, draws none.
        """
        if not hasattr(self.games[0], "render"):
            raise ConfigurationError(
                f"{type(self.games[0]).__name__} has no render(), so there are no pictures of it"
            )
        return np.asarray(self.games[0].render())

    def close(self) -> None:
        """Close every game."""
        close_each({rows[0]: game for rows, game in zip(self._indices, self.games, strict=True)})


def _require_all(agents: Sequence[str], observations: Iterable[str]) -> None:
    if unknown := [name for name in observations if name not in agents]:
        raise ConfigurationError(
            f"agent {unknown[0]!r} observes something, but is none of the possible_agents "
            f"{list(agents)}: nobody would act for it"
        )
    missing = [name for name in agents if name not in observations]
    if missing:
        raise ConfigurationError(
            f"agent {missing[0]!r} observes nothing, but every agent must act from the start to "
            "the end of a game"
        )


def _require_common_end(agents: Sequence[str], ends: Array) -> None:
    if ends.any() and not ends.all():
        raise ConfigurationError(
            f"agent {agents[int(ends.argmax())]!r} left the game before "
            f"{agents[int(ends.argmin())]!r}, but all must end together; SuperSuit's "
            "black_death_v3 keeps it in the game, with observations of zeros"
        )
