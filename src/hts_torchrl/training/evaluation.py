"""Whole episodes of a policy, apart from training: raw scores."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import nn

from hts_torchrl.config import Precision, default_batch_size
from hts_torchrl.envs.group import Array, CreateEnv, EnvFactory, EnvGroup
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.policy.forward import with_parts
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.policy.memory import with_memory
from hts_torchrl.rng import draws_of, env_seed
from hts_torchrl.shared.memory import Memory

_CHUNK = 1024


@dataclass(frozen=True)
class Evaluation:
    """What to play: ``episodes`` games, each in an environment of its own.

    The same evaluation of the same weights gives the same scores: environments and draws depend on
    ``seed`` alone, and are others than those of training with that seed.
    """

    create_env_fn: CreateEnv | EnvFactory
    episodes: int
    seed: int
    greedy: bool = False
    precision: Precision = "32-true"
    device: str = "cpu"

    def run(self, policy: nn.Module) -> EpisodeScores:
        """Play until every environment has finished its first game."""
        group = make_group(self.create_env_fn, range(self.episodes))
        scores = np.zeros(self.episodes, np.float64)
        lengths = np.zeros(self.episodes, np.int64)
        running = np.ones(self.episodes, bool)
        try:
            for score, ended in self._steps(group, policy):
                scores += score * running
                lengths += running
                running &= ~ended
                if not running.any():
                    break
        finally:
            group.close()
        return EpisodeScores(scores, lengths)

    def frames(self, policy: nn.Module) -> Iterator[Array]:
        """Yield the pictures of one game, uint8 ``[height, width, 3]``."""
        group = make_group(self.create_env_fn, [0], render=True)
        try:
            for _, ended in self._steps(group, policy):
                yield group.render()
                if ended[0]:
                    return
        finally:
            group.close()

    def _steps(self, group: EnvGroup, policy: nn.Module) -> Iterator[tuple[Array, Array]]:
        """Yield score and end of game of every step, without end."""
        envs = range(group.num_envs)
        spec = with_parts(policy, with_memory(policy, group.spec))
        memory = Memory.blank(spec.memory, group.num_envs)
        inference = PolicyInference(
            copy.deepcopy(policy),
            spec,
            batch_size=default_batch_size(group.num_envs),
            device=self.device,
            precision=self.precision,
        )
        action = spec.action
        draw = draws_of(action.kind, len(action.sizes))
        seeds = [env_seed(self.seed, env, "evaluation") for env in envs]
        observation = group.reset(seeds)
        first = 0
        while True:
            draws = np.stack(
                [draw(seed, env, first, _CHUNK, action.num_draws) for env, seed in enumerate(seeds)]
            )
            for step in range(_CHUNK):
                inputs = observation | memory.arrays
                answers = inference.answer(inputs, draws[:, step], greedy=self.greedy)
                transition = group.step(answers[action.key])
                memory.carry(answers, transition.terminated | transition.truncated)
                observation = transition.next_observation
                # Games of several agents are whole, and may have more of them than are counted.
                yield transition.score[: self.episodes], transition.episode_end[: self.episodes]
            first += _CHUNK


@dataclass(frozen=True)
class EpisodeScores:
    """Raw score and length in steps of each game."""

    scores: Array
    lengths: Array
