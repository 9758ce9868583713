"""Games of several agents, by PettingZoo's parallel interface: each agent is an environment."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hts_torchrl.envs.action_maker import action_maker
from hts_torchrl.envs.adapter import EnvAdapter, SerialGroup, Step
from hts_torchrl.envs.group import EnvFactory, EnvGroup, Observation, closed_if_refused
from hts_torchrl.envs.observed import (
    DeclaredSpace,
    Undeclared,
    as_flag,
    as_returned,
    as_reward,
    called,
)
from hts_torchrl.envs.own_generators import making
from hts_torchrl.envs.spaces import env_spec
from hts_torchrl.errors import ConfigurationError, require
from hts_torchrl.specs import Array

_STEP = ("observations", "rewards", "terminations", "truncations", "infos")


@dataclass(frozen=True)
class PettingZooEnvs(EnvFactory):
    """Games whose A agents act at the same time, with one policy.

    Each agent is one environment of the collector: rows ``A * g`` to ``A * g + A - 1`` of a batch
    are the agents of game ``g``, in the order of ``possible_agents``, each with its own trajectory.
    So ``num_envs`` and ``envs_per_executor`` must be multiples of A. A game has the seed of its
    first agent.

    All agents must have the same spaces, be there from the start, and end with the game. If one
    leaves early, wrap the game in SuperSuit's ``black_death_v3``, in a function of yours.

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
        adapters: list[EnvAdapter] = []
        try:
            with closed_if_refused(games):
                with making(0):  # whichever game is the first of this process
                    make = self.id if callable(self.id) else _function(self.id)
                first, end = indices[0], indices[0] + len(indices)
                while first < end:
                    with called("parallel_env", list(indices)), making(first):
                        games.append(make(**kwargs))
                    agents = games[-1].possible_agents
                    require(len(agents) > 0, f"possible_agents={agents}", "one agent or more")
                    adapters.append(AgentsAdapter(games[-1], range(first, first + len(agents))))
                    first += len(agents)
                return SerialGroup(adapters)
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


class AgentsAdapter(EnvAdapter):
    """A game of R agents, who all end with it; it has the first one's seed."""

    def __init__(self, game: Any, indices: Sequence[int]) -> None:  # noqa: ANN401
        self._agents = list(game.possible_agents)
        spaces = {
            name: (game.observation_space(name), game.action_space(name)) for name in self._agents
        }
        super().__init__(game, indices, env_spec(*spaces[self._agents[0]]))
        for name, pair in spaces.items():
            if (spec := env_spec(*pair)) != self.spec:
                raise ConfigurationError(
                    f"agent {name!r} has {spec}, but agent {self._agents[0]!r} has {self.spec}: "
                    "one policy acts for all; SuperSuit's pad_observations_v0 and "
                    "pad_action_space_v0 make them alike"
                )
        self._action_of = [action_maker(action) for _, action in spaces.values()]
        self._spaces = [
            DeclaredSpace(space, self.spec.observations) for space, _ in spaces.values()
        ]

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Begin a game."""
        with self._resetting:
            returned = self.env.reset(seed=seeds[0] if seeds else None)
            observations, _ = as_returned(returned, ("observations", "infos"))
            return self._entries(observations)

    def _entries(self, observations: Mapping[str, Any]) -> Observation:
        """Return what the agents observe, in their order."""
        if unknown := [name for name in observations if name not in self._agents]:
            raise Undeclared(
                f"agent {unknown[0]!r} observes something, but is none of the possible_agents "
                f"{self._agents}: nobody would act for it"
            )
        if missing := [name for name in self._agents if name not in observations]:
            raise Undeclared(
                f"agent {missing[0]!r} observes nothing, but every agent must act from the start "
                "to the end of a game"
            )
        agents = zip(self._agents, self._spaces, strict=True)
        each = [space.entries(observations[name]) for name, space in agents]
        return {key: np.stack([entries[key] for entries in each]) for key in self.spec.observations}

    def step(self, action: Array) -> Step:
        """Play a step of the game."""
        names = self._agents
        with self._stepping:
            actions = zip(names, action, self._action_of, strict=True)
            answers = {name: action_of(own) for name, own, action_of in actions}
            returned = as_returned(self.env.step(answers), _STEP)
            observations, rewards, terminates, truncates, _ = returned
            entries = self._entries(observations)
            reward = np.array([as_reward(rewards[name]) for name in names])
            terminated = np.array([as_flag("terminated", terminates[name]) for name in names])
            truncated = np.array([as_flag("truncated", truncates[name]) for name in names])
            ends = terminated | truncated
            if ends.any() and not ends.all():
                raise Undeclared(
                    f"agent {names[int(ends.argmax())]!r} left the game before "
                    f"{names[int(ends.argmin())]!r}, but all must end together; SuperSuit's "
                    "black_death_v3 keeps it in the game, with observations of zeros"
                )
        return entries, reward, reward, terminated, truncated
