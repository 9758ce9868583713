"""The running games of a group, played again in lock step and compared with what they were."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hts_torchrl.buffers.arena import Array
from hts_torchrl.buffers.journal import Game, checksum_of_observation, checksum_of_rewards
from hts_torchrl.config import EnvSpec
from hts_torchrl.envs.group import Transition
from hts_torchrl.errors import ReplayError


class Replay:
    """The actions of games of unequal length, set flush at their ends, and the check of each step.

    A group steps all its environments at once, so the one with the longest game goes first. The
    others take any actions meanwhile, and begin their games anew when their turn comes::

        for step in range(replay.longest):
            restart the environments of replay.beginning(step)
            replay.verify(step, group.step(replay.actions(step)))
        restart the environments of replay.beginning(replay.longest)
    """

    def __init__(
        self, games: Sequence[Game], envs: Sequence[int], spec: EnvSpec, *, by_game: bool
    ) -> None:
        self._games = list(games)
        self._envs = list(envs)
        self._spec = spec
        self._by_game = by_game
        self.longest = max(len(game.actions) for game in games)
        self._starts = [self.longest - len(game.actions) for game in games]
        self._filler = max(games, key=lambda game: len(game.actions)).actions
        self._checks = [dict(game.checks.tolist()) for game in games]
        self._sums = [0] * len(games)

    def beginning(self, step: int) -> list[int]:
        """Return the rows whose games begin at a step and not with the first."""
        return [row for row, start in enumerate(self._starts) if step and start == step]

    def actions(self, step: int) -> Array:
        """Return the actions ``[G, ...]`` of a step."""
        chosen = [
            game.actions[step - start] if step >= start else self._filler[step]
            for game, start in zip(self._games, self._starts, strict=True)
        ]
        return np.stack(chosen).astype(self._spec.action.array.dtype)

    def verify(self, step: int, transition: Transition) -> None:
        """Compare a step with the journal.

        Raises:
            ReplayError: if a game ended in it that did not, or the checksum of a round is another.
        """
        for row, start in enumerate(self._starts):
            if step < start:
                continue
            played = step - start + 1
            self._sums[row] = checksum_of_rewards(self._sums[row], transition.reward[row : row + 1])
            expected = self._checks[row].get(played)
            if expected is not None:
                seen = (
                    transition.observation[key][row].astype(array.dtype)
                    for key, array in self._spec.observations.items()
                )
                self._sums[row] = checksum_of_observation(self._sums[row], seen)
            if self._by_game and transition.episode_end[row]:
                self._refuse(row, f"ended with its step {played}")
            if expected is not None and self._sums[row] != expected:
                self._refuse(row, f"was another by its step {played}")

    def _refuse(self, row: int, what: str) -> None:
        raise ReplayError(
            f"environment {self._envs[row]} does not replay: its game {self._games[row].index}, "
            f"played again with the same seed and actions, {what}; where the course of a game "
            "depends on more than these, resume_envs=false goes on with new games"
        )
