"""EnvPool's football engine, gfootball's, and gfootball's own environment: the same games?

Run: python benchmarks/football_engines.py [--steps 1000] [--seeds 1 2] [--scenarios 5_vs_5 ...]
                                           [--players 1]

The same seeds and actions are given to three: our rules over EnvPool's engine, our rules over
gfootball's, and gfootball's own `FootballEnv` with its minimap and its `CheckpointRewardWrapper`.
(EnvPool's engine controls one player; with more it is left out.)
Counted are the steps in which all three agree in the observation, the score, the end of the episode
and the reward with checkpoints (to 1e-6), those in which the reward has the same bits too, and the
episodes of equal return. The exit status is 1 if anything but the reward's last bits differs.

Needs `scripts/install_gfootball.sh`, and for gfootball's own environment
`pip install gym six absl-py opencv-python-headless`.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import dataclass, fields

import numpy as np

from hts_torchrl.envs.football.envpool_engine import EnvPoolEngine
from hts_torchrl.envs.football.game import CheckpointRewards, Engine, Game, draw_minimap
from hts_torchrl.envs.football.gfootball_engine import GFootballEngine

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Gym and gfootball are from before what these warn of
    from gfootball.env import config, football_env, observation_preprocessing, wrappers


@dataclass
class Outcome:
    """What a step, or a reset, led to."""

    minimaps: np.ndarray  # uint8 [k, 72, 96, 4]
    rewards: np.ndarray  # float32 [k], with checkpoints
    score: float = 0.0
    done: bool = False


class Ours:
    """Our rules, minimap and checkpoints over an engine."""

    def __init__(self, engine: type[Engine], scenario: str, num_players: int = 1) -> None:
        self._game = Game(engine(scenario, num_players), scenario)
        self._checkpoints = [CheckpointRewards(player) for player in range(num_players)]

    def reset(self, episode: int, seed: int) -> Outcome:
        self._game.reset(episode=episode, seed=seed)
        for each in self._checkpoints:
            each.reset()
        return Outcome(self._minimaps(), np.zeros(len(self._checkpoints), np.float32))

    def step(self, actions: list[int]) -> Outcome:
        score = self._game.step(*actions)
        rewards = [each.reward(score, self._game.pitch) for each in self._checkpoints]
        done = self._game.terminated or self._game.truncated
        return Outcome(self._minimaps(), np.array(rewards, np.float32), score, done)

    def _minimaps(self) -> np.ndarray:
        planes = np.empty((len(self._checkpoints), 4, 72, 96), np.uint8)
        for player, minimap in enumerate(planes):
            draw_minimap(self._game.pitch, minimap, player)
        return planes.transpose(0, 2, 3, 1)

    def close(self) -> None:
        self._game.close()


class Theirs:
    """gfootball's environment, minimap and checkpoints; Gym's part in its wrappers is not used."""

    def __init__(self, scenario: str, num_players: int = 1) -> None:
        players = [f"agent:left_players={num_players}"]
        self._config = config.Config({"level": scenario, "players": players})
        self._env = football_env.FootballEnv(self._config)
        self._num_players = num_players

    def reset(self, episode: int, seed: int) -> Outcome:
        self._config["episode_number"] = episode - 1  # to which the reset adds 1
        self._config["game_engine_random_seed"] = seed
        self._config["reverse_team_processing"] = bool(seed % 2)
        observation = self._env.reset()
        self._checkpoints = wrappers.CheckpointRewardWrapper(self._env)
        minimaps = observation_preprocessing.generate_smm(observation)
        return Outcome(minimaps, np.zeros(self._num_players, np.float32))

    def step(self, actions: list[int]) -> Outcome:
        observation, rewards, done, info = self._env.step(actions)
        minimaps = observation_preprocessing.generate_smm(observation)
        rewards = self._checkpoints.reward(rewards)
        return Outcome(minimaps, rewards, info["score_reward"], done)

    def close(self) -> None:
        self._env.close()


@dataclass
class Counts:
    """In how many steps and episodes all sides agree."""

    steps: int = 0
    observation: int = 0
    score: int = 0
    end: int = 0
    reward: int = 0
    reward_bits: int = 0
    episodes: int = 0
    returns: int = 0

    def add(self, first: Outcome, *others: Outcome) -> None:
        self.steps += 1
        self.observation += all(np.array_equal(first.minimaps, o.minimaps) for o in others)
        self.score += all(first.score == other.score for other in others)
        self.end += all(first.done == other.done for other in others)
        self.reward += all(np.allclose(first.rewards, o.rewards, 0, 1e-6) for o in others)
        self.reward_bits += all(np.array_equal(first.rewards, o.rewards) for o in others)

    @property
    def agree(self) -> bool:
        in_steps = (self.observation, self.score, self.end, self.reward)
        return set(in_steps) == {self.steps} and self.returns == self.episodes


def compare(sides: list[Ours | Theirs], steps: int, seed: int, num_players: int = 1) -> Counts:
    """Play on all sides; the episode that is cut off at the end counts too."""
    random, counts = np.random.default_rng(seed), Counts()
    while counts.steps < steps:
        start = {"episode": int(random.integers(2)), "seed": int(random.integers(2_000_000_001))}
        outcomes = [side.reset(**start) for side in sides]
        first = outcomes[0]
        assert all(np.array_equal(first.minimaps, outcome.minimaps) for outcome in outcomes)
        returns = np.zeros((len(sides), num_players))
        while counts.steps < steps and not first.done:
            actions = [_action(random) for _ in range(num_players)]
            outcomes = [side.step(actions) for side in sides]
            counts.add(*outcomes)
            returns += [outcome.rewards for outcome in outcomes]
            first = outcomes[0]
        counts.episodes += 1
        counts.returns += bool(np.allclose(returns, returns[0], 0, 1e-6))
    return counts


def _action(random: np.random.Generator) -> int:
    """Mostly towards their goal, with shots, so that games end in many ways."""
    return int(random.choice([5, 5, 5, 4, 6, 12, random.integers(19)]))


def sides_of(scenario: str, num_players: int = 1) -> list[Ours | Theirs]:
    """Return all that can play it."""
    several = [Ours(GFootballEngine, scenario, num_players), Theirs(scenario, num_players)]
    return [Ours(EnvPoolEngine, scenario), *several] if num_players == 1 else several


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--scenarios", nargs="+", default=GFootballEngine.scenarios())
    parser.add_argument("--players", type=int, default=1)
    arguments = parser.parse_args()
    names = [field.name for field in fields(Counts)]
    print(f"{'scenario':40}", *(f"{name:>11}" for name in names))
    total = Counts()
    for scenario in arguments.scenarios:
        sides = sides_of(scenario, arguments.players)
        for seed in arguments.seeds:
            counts = compare(sides, arguments.steps, seed, arguments.players)
            numbers = [getattr(counts, name) for name in names]
            print(f"{scenario:40}", *(f"{number:11}" for number in numbers), flush=True)
            for name, number in zip(names, numbers, strict=True):
                setattr(total, name, getattr(total, name) + number)
        for side in sides:
            side.close()
    print(f"{'all':40}", *(f"{getattr(total, name):11}" for name in names))
    return 0 if total.agree else 1


if __name__ == "__main__":
    sys.exit(main())
