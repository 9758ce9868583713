"""Google Research Football (Kurach et al., 2020): the paper's eleven tasks, and full matches."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

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
from hts_torchrl.envs.group import EnvFactory, EnvGroup, Observation, Transition
from hts_torchrl.errors import ConfigurationError, require
from hts_torchrl.specs import ActionSpec, Array, ArraySpec, EnvSpec

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
    There are 19 actions. ``terminated`` means a goal, the ball out of play or lost; ``truncated``
    the end of time. The score is ours less theirs in goals, whatever the reward.

    With k > 1 players observations are ``[k, 4 * frame_stack, 72, 96]``, which differ in the active
    player, and an action is k of the 19. Each player is rewarded as in gfootball, for goals and for
    the checkpoints that it reached itself; ``reward`` is the mean over the players.

    The engine ``envpool`` needs ``pip install 'hts-torchrl[football]'``; ``gfootball``, the
    original, needs ``scripts/install_gfootball.sh``. Both play the same games, to the bit.

    Example:
        >>> from hts_torchrl import FootballEnvs, env_spec_of
        >>> env_spec_of(FootballEnvs("empty_goal_close")).action.sizes
        (19,)
    """

    scenario: str
    """gfootball's name, ``academy_empty_goal_close``, or the paper's, ``empty_goal_close``."""
    rewards: Rewards = "scoring,checkpoints"
    """Learn from goals, or also from the ten checkpoints on the way to one."""
    frame_stack: int = 4
    """Minimaps in one observation."""
    engine: EngineName = "envpool"
    """What plays: EnvPool's engine, or the original, which controls several players if wanted."""
    num_players: int = 1
    """Controlled players."""

    def __post_init__(self) -> None:
        """Refuse settings of which there is nothing."""
        rewards, engines = get_args(Rewards), get_args(EngineName)
        require(self.rewards in rewards, f"rewards={self.rewards!r}", " or ".join(rewards))
        require(self.frame_stack >= 1, f"frame_stack={self.frame_stack}", "1 or more")
        require(self.engine in engines, f"engine={self.engine!r}", " or ".join(engines))
        require(self.num_players >= 1, f"num_players={self.num_players}", "1 or more")

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
        return FootballGroup(self, scenario, len(indices))


def _engine(name: EngineName) -> type[Engine]:
    try:
        if name == "gfootball":
            from hts_torchrl.envs.football.gfootball_engine import GFootballEngine  # noqa: PLC0415

            return GFootballEngine
        from hts_torchrl.envs.football.envpool_engine import EnvPoolEngine  # noqa: PLC0415 - takes a second
    except ImportError as error:
        what, install = {
            "envpool": ("EnvPool", "pip install 'hts-torchrl[football]'"),
            "gfootball": ("gfootball", "bash scripts/install_gfootball.sh"),
        }[name]
        raise ConfigurationError(f"football needs {what} ({error}): {install}") from error
    return EnvPoolEngine


def _scenario(name: str, known: Sequence[str]) -> str:
    wanted = name.lower().replace(" ", "_").replace("-", "_")
    names = {scenario.removeprefix("academy_"): scenario for scenario in known}
    names |= _ALIASES | {scenario: scenario for scenario in known}
    if wanted not in names:
        near = difflib.get_close_matches(wanted, names, n=3)
        hint = f"near to it: {', '.join(near)}" if near else f"there are: {', '.join(known)}"
        raise ConfigurationError(f"football has no scenario {name!r}; {hint}")
    return names[wanted]


def _spec(stack: int, players: int) -> EnvSpec:
    choices, one_player = len(ENGINE_ACTIONS), (PLANES * stack, HEIGHT, WIDTH)
    pixels, integers = np.dtype(np.uint8), np.dtype(np.int64)
    if players == 1:
        action = ActionSpec("discrete", ArraySpec((), integers), (choices,))
        return EnvSpec({"observation": ArraySpec(one_player, pixels)}, action)
    action = ActionSpec("multi_discrete", ArraySpec((players,), integers), (choices,) * players)
    return EnvSpec({"observation": ArraySpec((players, *one_player), pixels)}, action)


class FootballGroup:
    """Games played one after another in each step (a :class:`SeededGroup`).

    Their engines are taken at the reset: to ask for the spec costs none.
    """

    steps_per_seed = 0
    next_seed: Callable[[int], int | None] | None = None

    def __init__(self, factory: FootballEnvs, scenario: str, num_envs: int) -> None:
        self.num_envs = num_envs
        self._scenario = scenario
        self._with_checkpoints = factory.rewards != "scoring"
        self._stack, self._players = factory.frame_stack, factory.num_players
        self._engine = _engine(factory.engine)
        self.spec = _spec(self._stack, self._players)
        minimaps = (num_envs, self._players, PLANES * self._stack, HEIGHT, WIDTH)
        self._next = np.zeros(minimaps, np.uint8)
        self._games: list[Game] = []
        self._checkpoints = [
            [CheckpointRewards(p) for p in self._each_player] for _ in range(num_envs)
        ]

    @property
    def _each_player(self) -> range:
        return range(self._players)

    @property
    def _observation(self) -> Observation:
        return {"observation": self._next[:, 0] if self._players == 1 else self._next}

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Seed and reset every environment."""
        engines = [self._engine(self._scenario, self._players) for _ in seeds]
        self._games = [Game(engine, self._scenario) for engine in engines]
        self._random = [np.random.default_rng(0)] * self.num_envs  # replaced at once
        return self.restart(range(self.num_envs), seeds)

    def restart(self, rows: Sequence[int], seeds: Sequence[int]) -> Observation:
        """Begin new games in some environments; all that is random in them comes from the seeds."""
        for row, seed in zip(rows, seeds, strict=True):
            self._begin(row, int(seed))
        return self._observation

    def _begin(self, row: int, new_seed: int | None) -> None:
        if new_seed is not None:
            self._random[row] = np.random.default_rng(new_seed)
        # With one seed for all of them, the episodes of an academy scenario would all be the same.
        seed, kick_off = self._random[row].integers([2_000_000_001, 2])
        self._games[row].reset(episode=int(kick_off), seed=int(seed))
        for player, checkpoints in enumerate(self._checkpoints[row]):
            checkpoints.reset()
            minimap = self._next[row, player, -PLANES:]
            draw_minimap(self._games[row].pitch, minimap, player)
            self._next[row, player] = np.tile(minimap, (self._stack, 1, 1))

    def step(self, actions: Array) -> Transition:
        """Play a step of each game, and begin a new one where it ended."""
        score = np.zeros(self.num_envs, np.float32)
        reward = np.zeros(self.num_envs, np.float32)
        chosen = actions.reshape(self.num_envs, self._players).tolist()
        for row, game in enumerate(self._games):
            goals = game.step(*chosen[row])
            score[row] = reward[row] = goals
            if self._with_checkpoints:
                rewards = [each.reward(goals, game.pitch) for each in self._checkpoints[row]]
                reward[row] = sum(rewards) / self._players
            self._next[row, :, :-PLANES] = self._next[row, :, PLANES:]
            for player in self._each_player:
                draw_minimap(game.pitch, self._next[row, player, -PLANES:], player)
        terminated = np.array([game.terminated for game in self._games])
        truncated = np.array([game.truncated for game in self._games])
        ends = terminated | truncated
        following, after = self._observation, self._observation
        if ends.any():
            after = {"observation": after["observation"].copy()}
        for row in np.flatnonzero(ends).tolist():
            self._begin(row, None if self.next_seed is None else self.next_seed(row))
        return Transition(after, following, reward, score, terminated, truncated, ends)

    def render(self) -> Array:
        """Return the first environment's minimap in colour, uint8 ``[576, 768, 3]``."""
        if not self._games:
            raise ConfigurationError("reset the group before its picture is asked for")
        picture = np.full((HEIGHT, WIDTH, 3), (40, 110, 40), np.uint8)
        ours, theirs, ball, _ = self._next[0, 0, -PLANES:] > 0
        active = self._next[0, :, -1].any(0)
        for plane, colour in (
            (ours, (90, 160, 255)),
            (theirs, (230, 60, 60)),
            (active, (255, 230, 60)),
            (ball, (255, 255, 255)),
        ):
            picture[plane] = colour
        return picture.repeat(8, 0).repeat(8, 1)

    def close(self) -> None:
        """Give the engines back."""
        for game in self._games:
            game.close()
        self._games = []
