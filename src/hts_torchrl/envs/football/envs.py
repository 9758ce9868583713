"""Google Research Football (Kurach et al., 2020): the paper's eleven tasks, and full matches."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from gymnasium import spaces

from hts_torchrl.config import take_plain_values
from hts_torchrl.envs.adapter import EnvAdapter, SerialGroup, Step
from hts_torchrl.envs.football.game import (
    ENGINE_ACTIONS,
    HEIGHT,
    PLANES,
    WIDTH,
    CheckpointRewards,
    Engine,
    Game,
    draw_minimap,
)
from hts_torchrl.envs.group import EnvFactory, EnvGroup, Observation
from hts_torchrl.envs.spaces import env_spec
from hts_torchrl.errors import ConfigurationError, require, require_counts, require_type
from hts_torchrl.specs import Array

Rewards = Literal["scoring", "scoring,checkpoints"]
EngineName = Literal["envpool", "gfootball"]

# Other names of scenarios: the paper's, where "academy_" before it does not do.
_ALIASES = {
    "rsk": "academy_run_to_score_with_keeper",
    "psk": "academy_pass_and_shoot_with_keeper",
    "rpsk": "academy_run_pass_and_shoot_with_keeper",
    "3_vs_1": "academy_3_vs_1_with_keeper",
    "lazy": "academy_single_goal_versus_lazy",
    "11_vs_11_easy": "11_vs_11_easy_stochastic",
}


@dataclass(frozen=True)
class FootballEnvs(EnvFactory):
    """Environments of one football scenario.

    Observations are uint8 ``[4 * frame_stack, 72, 96]``, channels first: gfootball's minimap with
    the planes of our team, theirs, the ball and the controlled player, the oldest frame first.
    There are 19 actions. ``terminated`` means a goal, or that the ball is out of play or lost;
    ``truncated`` means that time is over. The score is our goals minus theirs, for any reward.

    With k > 1 players observations are ``[k, 4 * frame_stack, 72, 96]``, which differ in the active
    player, and an action is k of the 19. Each player is rewarded as in gfootball, for goals and for
    the checkpoints that it reached itself; ``reward`` is the mean over the players.

    The engine ``envpool`` needs ``pip install 'hts-torchrl[football]'``; ``gfootball``, the
    original, needs ``scripts/install_gfootball.sh``. Both play the same games, bit for bit.

    Example:
        >>> from hts_torchrl import FootballEnvs, env_spec_of
        >>> env_spec_of(FootballEnvs("empty_goal_close")).action.sizes
        (19,)
    """

    scenario: str
    """gfootball's name, ``academy_empty_goal_close``, or the paper's, ``empty_goal_close``."""
    rewards: Rewards = "scoring,checkpoints"
    """Rewards for goals only, or also for the ten checkpoints on the way to the goal."""
    frame_stack: int = 4
    """Minimaps in one observation."""
    engine: EngineName = "envpool"
    """EnvPool's engine, or the original, which can control several players."""
    num_players: int = 1
    """Controlled players."""

    def __post_init__(self) -> None:
        """Refuse settings of which there is nothing."""
        take_plain_values(self)
        require_type("scenario", self.scenario, str, "a name, such as empty_goal_close,")
        rewards, engines = get_args(Rewards), get_args(EngineName)
        require(self.rewards in rewards, f"rewards={self.rewards!r}", " or ".join(rewards))
        require(self.engine in engines, f"engine={self.engine!r}", " or ".join(engines))
        require_counts(self, "frame_stack", "num_players")

    @property
    def preload(self) -> tuple[str, ...]:
        """The module of the engine."""
        return (f"hts_torchrl.envs.football.{self.engine}_engine",)

    def group(self, indices: Sequence[int], *, render: bool = False) -> EnvGroup:  # noqa: ARG002
        """Make the environments of the given indices (:class:`EnvFactory`).

        Raises:
            ConfigurationError: if there is no such scenario, its team has fewer players, or the
                engine is not installed.
        """
        engine = _engine(self.engine)
        scenario = _scenario(self.scenario, engine.scenarios())
        most = engine.most_players(scenario)
        if self.num_players > most:
            raise ConfigurationError(
                f"num_players={self.num_players}; engine={self.engine!r} controls at most {most} "
                f"in {scenario}"
            )
        return SerialGroup([FootballAdapter(self, scenario, index) for index in indices])


def _engine(name: EngineName) -> type[Engine]:
    kind, what, install = {
        "envpool": ("EnvPoolEngine", "EnvPool", "pip install 'hts-torchrl[football]'"),
        "gfootball": ("GFootballEngine", "gfootball", "bash scripts/install_gfootball.sh"),
    }[name]
    try:
        module = importlib.import_module(f"{__package__}.{name}_engine")  # takes a second
    except ImportError as error:
        raise ConfigurationError(f"football needs {what} ({error}): {install}") from error
    engine: type[Engine] = getattr(module, kind)
    return engine


def _scenario(name: str, known: Sequence[str]) -> str:
    wanted = name.lower().replace(" ", "_").replace("-", "_")
    names = {scenario.removeprefix("academy_"): scenario for scenario in known}
    names |= _ALIASES | {scenario: scenario for scenario in known}
    if wanted not in names:
        near = difflib.get_close_matches(wanted, names, n=3)
        hint = f"near to it: {', '.join(near)}" if near else f"there are: {', '.join(known)}"
        raise ConfigurationError(f"football has no scenario {name!r}; {hint}")
    return names[wanted]


class FootballAdapter(EnvAdapter):
    """A game of football. Its engine is taken at the reset: to ask for the spec costs none."""

    def __init__(self, factory: FootballEnvs, scenario: str, index: int) -> None:
        players, stack, choices = factory.num_players, factory.frame_stack, len(ENGINE_ACTIONS)
        minimaps = (PLANES * stack, HEIGHT, WIDTH)
        several = spaces.MultiDiscrete([choices] * players)
        actions = several if players > 1 else spaces.Discrete(choices)
        shape = (players, *minimaps) if players > 1 else minimaps
        super().__init__(None, index, env_spec(spaces.Box(0, 255, shape, np.uint8), actions))
        self.parts = []
        self.scenario = scenario
        self._engine, self._stack, self._players = _engine(factory.engine), stack, players
        self._seen = np.zeros((players, *minimaps), np.uint8)
        self._random = np.random.default_rng(0)  # replaced by the first reset
        self._with_checkpoints = factory.rewards != "scoring"
        self._checkpoints = [CheckpointRewards(player) for player in range(players)]

    def _observation(self) -> Observation:
        return {"observation": self._seen[0] if self._players == 1 else self._seen}

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Begin a game; all that is random in it comes from the seed."""
        if self.env is None:
            self.env = Game(self._engine(self.scenario, self._players), self.scenario)
        if seeds:
            self._random = np.random.default_rng(seeds[0])
        # With one seed for all of them, the episodes of an academy scenario would all be the same.
        seed, kick_off = self._random.integers([2_000_000_001, 2])
        self.env.reset(episode=int(kick_off), seed=int(seed))
        for player, checkpoints in enumerate(self._checkpoints):
            checkpoints.reset()
            minimap = self._seen[player, -PLANES:]
            draw_minimap(self.env.pitch, minimap, player)
            self._seen[player] = np.tile(minimap, (self._stack, 1, 1))
        return self._observation()

    def step(self, action: Array) -> Step:
        """Play a step of the game."""
        game = self.env
        reward = score = game.step(*action.reshape(-1).tolist())
        if self._with_checkpoints:
            rewards = [each.reward(score, game.pitch) for each in self._checkpoints]
            reward = sum(rewards) / self._players
        self._seen[:, :-PLANES] = self._seen[:, PLANES:]
        for player in range(self._players):
            draw_minimap(game.pitch, self._seen[player, -PLANES:], player)
        return self._observation(), reward, score, game.terminated, game.truncated

    def render(self) -> Array:
        """Return the minimap in colour, uint8 ``[576, 768, 3]``."""
        if self.env is None:
            raise ConfigurationError("reset the group before its image is asked for")
        image = np.full((HEIGHT, WIDTH, 3), (40, 110, 40), np.uint8)
        ours, theirs, ball, _ = self._seen[0, -PLANES:] > 0
        active = self._seen[:, -1].any(0)
        for plane, colour in (
            (ours, (90, 160, 255)),
            (theirs, (230, 60, 60)),
            (active, (255, 230, 60)),
            (ball, (255, 255, 255)),
        ):
            image[plane] = colour
        return image.repeat(8, 0).repeat(8, 1)

    def close(self) -> None:
        """Give the engine back."""
        if self.env is not None:
            self.env.close()
            self.env = None
