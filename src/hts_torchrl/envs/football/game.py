"""The rules of a football episode, over any engine that reports what is on the pitch.

Coordinates are the engine's: x from -1 (our goal) to 1 (theirs), y from -0.42 to 0.42.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from hts_torchrl.specs import Array

Point: TypeAlias = tuple[float, float]

PLANES, HEIGHT, WIDTH = 4, 72, 96
_Y_MAX = 1 / 2.25

# What the engine calls the 19 actions of gfootball's default action set.
ENGINE_ACTIONS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 18, 20, 30, 14, 19, 31)
_IDLE, _LEFT, _RIGHT, _SHORT_PASS = 0, 1, 5, 11
_NORMAL_MODE, _US, _NOBODY = 0, 0, -1
PHYSICS_STEPS = 10
"""In a step, by gfootball's default: the physics runs at 100 Hz, the agent at 10 Hz."""


@dataclass(frozen=True)
class Pitch:
    """What the engine reports after one of its steps."""

    left: Sequence[Point]
    """Where the players of our team are."""
    right: Sequence[Point]
    """Where their players are."""
    ball: Point
    active: Sequence[int]
    """The players that are controlled, indices of ``left``; -1 is none."""
    owner_team: int
    """Who has the ball: 0 we, 1 they, -1 nobody."""
    owner: int
    """Which of their players has it, -1 none."""
    goals: tuple[int, int]
    """Ours and theirs."""
    mode: int
    """0 in normal play; kick-off, corner, throw-in and the like have other numbers."""
    in_play: bool
    """Whether actions count; if not, the engine is to be stepped on without one."""
    clock: int
    """Steps since the episode began."""

    def has_ball(self, player: int) -> bool:
        """Whether a controlled player, of ``active`` the given one, has the ball."""
        return self.owner_team == _US and self.owner == self.active[player]


class Engine(ABC):
    """Plays one scenario: ``reset``, then ``act`` and ``step`` by turns, and ``pitch`` to look.

    A native engine keeps its memory to the end of the process (50 MB), also after it was deleted.
    So one that is done with waits for the next to be asked for, and a reset makes it as new.
    """

    max_steps: int
    """Steps after which the clock ends an episode."""
    _spare: ClassVar[list[Any]]
    """Of each class, native engines that are done with."""

    def __init__(self, scenario: str, num_players: int = 1) -> None:
        self._scenario, self._num_players = scenario, num_players
        self._engine: Any = self._spare.pop() if self._spare else self._native()

    @abstractmethod
    def _native(self) -> Any:  # noqa: ANN401
        """Make a native engine of :data:`PHYSICS_STEPS`."""

    @staticmethod
    @abstractmethod
    def scenarios() -> list[str]:
        """Return the names of all scenarios."""

    @staticmethod
    @abstractmethod
    def most_players(scenario: str) -> int:
        """Return how many players of our team can be controlled."""

    @abstractmethod
    def reset(self, *, episode: int, seed: int) -> None:
        """Set the scenario up; where both teams may kick off, they do by turns of ``episode``.

        ``seed`` decides all that is random in it.
        """

    @abstractmethod
    def act(self, action: int, player: int = 0) -> None:
        """Press a button of a controlled player, one of ``ENGINE_ACTIONS``."""

    def step(self) -> None:
        """Go on by one step, which is ten of the physics."""
        self._engine.step()

    @abstractmethod
    def pitch(self) -> Pitch:
        """Tell what is on the pitch."""

    def close(self) -> None:
        """Leave the native engine to the next one that needs it."""
        if self._engine is not None:
            self._spare.append(self._engine)
            self._engine = None


class Game:
    """Episodes of one scenario by the rules of gfootball's ``FootballEnvCore``.

    Academy scenarios end with a goal of either side, with the ball out of play and (all but the
    corner) with a change of possession; all end by the clock, and full matches by nothing else.

    Its caller's loop::

        game.reset(episode=1, seed=3)
        while not (game.terminated or game.truncated):
            score = game.step(action)
        game.close()
    """

    def __init__(self, engine: Engine, scenario: str) -> None:
        self._engine = engine
        self._academy = scenario.startswith("academy_")
        self._possession_counts = self._academy and scenario != "academy_corner"

    def reset(self, *, episode: int, seed: int) -> None:
        """Begin an episode; all that is random in it comes from the seed (:class:`Engine`)."""
        self._engine.reset(episode=episode, seed=seed)
        self._look()
        self.terminated = self.truncated = False
        self._mode_before, self._owner_before = -1, _NOBODY
        self._lead = self._held_up = 0

    def _look(self) -> None:
        self.pitch = self._engine.pitch()
        while not self.pitch.in_play:
            self._engine.step()
            self.pitch = self._engine.pitch()

    def step(self, *actions: int) -> float:
        """Play one of the 19 actions with each player; return by how much our lead has grown."""
        for player, action in enumerate(actions):
            forced = self._forced_action(player)
            self._engine.act(ENGINE_ACTIONS[action] if forced is None else forced, player)
        self._engine.step()
        self._look()
        pitch = self.pitch
        self.terminated = self._academy and self._is_over()
        self.truncated = pitch.clock >= self._engine.max_steps and not self.terminated
        self._mode_before = pitch.mode
        if pitch.owner_team != _NOBODY:
            self._owner_before = pitch.owner_team
        self._held_up = 0 if pitch.mode == _NORMAL_MODE else self._held_up + 1
        lead_before, self._lead = self._lead, pitch.goals[0] - pitch.goals[1]
        return float(self._lead - lead_before)

    def _forced_action(self, player: int) -> int | None:
        """Return what resumes a game that was held up for 20 steps, at a kick-off or the like."""
        if self._held_up < 20:
            return None
        if self._held_up == 20:
            return _SHORT_PASS
        if not self.pitch.has_ball(player):
            return _IDLE
        return _RIGHT if self._held_up < 30 else _LEFT

    def _is_over(self) -> bool:
        pitch = self.pitch
        out = pitch.mode != _NORMAL_MODE and self._mode_before == _NORMAL_MODE
        nobody = _NOBODY in (pitch.owner_team, self._owner_before)
        lost = self._possession_counts and not nobody and pitch.owner_team != self._owner_before
        return any(pitch.goals) or out or lost

    def close(self) -> None:
        """Give the engine back."""
        self._engine.close()


class CheckpointRewards:
    """The dense reward of gfootball's ``CheckpointRewardWrapper`` (Kurach et al., 2020).

    There are ten circles around their goal, the widest of radius 0.99 and the narrowest of 0.19.
    Each is worth 0.1, once an episode, when the controlled player has the ball within it; our first
    goal brings those that are left. Each controlled player collects its own.
    """

    _COUNT, _REWARD = 10, 0.1

    def __init__(self, player: int = 0) -> None:
        self._player = player
        self._collected = 0

    def reset(self) -> None:
        """Begin an episode."""
        self._collected = 0

    def reward(self, score: float, pitch: Pitch) -> float:
        """Return the score of a step and its additional reward.

        The sum is in double precision; gfootball's, in single, differs by less than 1e-6.
        """
        if score == 1:
            left, self._collected = self._COUNT - self._collected, self._COUNT
            return score + self._REWARD * left
        if not pitch.has_ball(self._player):
            return score
        distance = ((pitch.ball[0] - 1) ** 2 + pitch.ball[1] ** 2) ** 0.5
        step = 0.8 / (self._COUNT - 1)
        while self._collected < self._COUNT and distance <= 0.99 - step * self._collected:
            score += self._REWARD
            self._collected += 1
        return score


def draw_minimap(pitch: Pitch, planes: Array, player: int = 0) -> None:
    """Draw gfootball's minimap ("extracted"), each object one pixel of 255.

    Args:
        pitch: what is on it.
        planes: to be filled, uint8 ``[4, 72, 96]``: our team, theirs, the ball, the active player.
        player: which of the controlled players is shown as the active one.
    """
    planes[...] = 0
    index = pitch.active[player]
    active = [pitch.left[index]] if index >= 0 else []
    for plane, points in zip(planes, (pitch.left, pitch.right, [pitch.ball], active), strict=True):
        x, y = np.array(points, np.float64).reshape(-1, 2).T
        column = ((x + 1) / 2 * WIDTH).astype(np.int64).clip(0, WIDTH - 1)
        row = ((y + _Y_MAX) / (2 * _Y_MAX) * HEIGHT).astype(np.int64).clip(0, HEIGHT - 1)
        plane[row, column] = 255
