"""What is needed to play the running games again: their actions, and checksums of what they did."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from hts_torchrl.buffers.arena import Array
from hts_torchrl.buffers.rollout_storage import next_key
from hts_torchrl.config import ActionSpec, EnvSpec, Key


@dataclass(frozen=True)
class Game:
    """The running game of one environment, from its first action on."""

    index: int
    """Games that began before it in this environment; decides its seed."""
    trajectory: int
    """Trajectories that ended before it in this environment."""
    actions: Array
    """``[S, ...]``, in the smallest type that holds them."""
    checks: Array = field(default_factory=lambda: np.empty((0, 2), np.int64))
    """int64 ``[K, 2]``: steps of the game, and the checksum over them, at the end of each round."""

    def after(self, actions: Array, rewards: Array, seen: Iterable[Array]) -> Game:
        """Return the game after further steps; ``seen`` is what the last of them led to."""
        if not len(actions):
            return self
        checksum = int(self.checks[-1, 1]) if len(self.checks) else 0
        checksum = checksum_of_observation(checksum_of_rewards(checksum, rewards), seen)
        actions = np.concatenate([self.actions, actions.astype(self.actions.dtype)])
        checks = np.concatenate([self.checks, [[len(actions), checksum]]])
        return replace(self, actions=actions, checks=checks)


def checksum_of_rewards(before: int, rewards: Array) -> int:
    """Continue a checksum over the rewards of some steps."""
    return zlib.crc32(np.ascontiguousarray(rewards, np.float32).data, before)


def checksum_of_observation(before: int, arrays: Iterable[Array]) -> int:
    """Continue a checksum over one observation, its arrays in the order of the specification."""
    for array in arrays:
        before = zlib.crc32(np.ascontiguousarray(array).data, before)
    return before


@dataclass(frozen=True)
class Journal:
    """The running game of every environment, as it was when round ``round_index`` began.

    It is written from what lies in a storage anyway, and never changed: :meth:`after` returns the
    one of the next round. So whoever holds one can begin its round again, at any time.

    Where a group cannot begin a game with a seed (``by_game`` is false), everything since the start
    of the run counts as one game.
    """

    round_index: int
    games: tuple[Game, ...]
    by_game: bool

    @classmethod
    def blank(
        cls,
        action: ActionSpec,
        num_envs: int,
        *,
        by_game: bool,
        round_index: int = 0,
        first: int = 0,
    ) -> Self:
        """Return a journal in which each environment is about to begin its game ``first``."""
        dtype = np.min_scalar_type(max(action.sizes) - 1) if action.sizes else action.array.dtype
        none = np.empty((0, *action.array.shape), dtype)
        return cls(round_index, (Game(first, first, none),) * num_envs, by_game)

    def after(self, spec: EnvSpec, arrays: Mapping[Key, Array]) -> Self:
        """Return the journal after its round, which ``arrays`` ``[N, T, ...]`` hold."""
        games = tuple(self._game_after(env, spec, arrays) for env in range(len(self.games)))
        return replace(self, round_index=self.round_index + 1, games=games)

    def _game_after(self, env: int, spec: EnvSpec, arrays: Mapping[Key, Array]) -> Game:
        game, first = self.games[env], 0
        ended = np.flatnonzero(arrays["next", "episode_end"][env])
        if self.by_game and len(ended):
            last = int(ended[-1])
            first = last + 1
            trajectory = int(arrays["collector", "traj_ids"][env, last]) // len(self.games)
            game = Game(game.index + len(ended), trajectory + 1, game.actions[:0])
        return game.after(
            arrays["action"][env, first:],
            arrays["next", "reward"][env, first:],
            (arrays[next_key(key)][env, -1] for key in spec.observations),
        )

    def arrays(self) -> dict[str, Array]:
        """Return all games as arrays, by name; those of several ranks can be concatenated."""
        numbers = {
            "game": [game.index for game in self.games],
            "trajectory": [game.trajectory for game in self.games],
            "num_actions": [len(game.actions) for game in self.games],
            "num_checks": [len(game.checks) for game in self.games],
        }
        return {
            **{name: np.array(values, np.int64) for name, values in numbers.items()},
            "actions": np.concatenate([game.actions for game in self.games]),
            "checks": np.concatenate([game.checks for game in self.games]),
        }

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Array], envs: slice, *, by_game: bool, round_index: int
    ) -> Self:
        """Return the journal of the environments ``envs``, from what :meth:`arrays` returned."""
        actions = np.split(arrays["actions"], np.cumsum(arrays["num_actions"])[:-1])
        checks = np.split(arrays["checks"], np.cumsum(arrays["num_checks"])[:-1])
        columns = zip(arrays["game"], arrays["trajectory"], actions, checks, strict=True)
        games = [Game(int(index), int(trajectory), *rest) for index, trajectory, *rest in columns]
        return cls(round_index, tuple(games[envs]), by_game)
