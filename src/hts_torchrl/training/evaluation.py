"""Whole episodes of a policy, apart from training: raw scores."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from hts_torchrl.collectors.torchrl_settings import first_device
from hts_torchrl.compat.lightning import leaving_at_sigterm
from hts_torchrl.config import Precision, default_batch_size, take_plain_values
from hts_torchrl.envs.group import CreateEnv, EnvFactory, EnvGroup, closed_at_end
from hts_torchrl.envs.kept_process import process_kept
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.errors import ConfigurationError, require_counts
from hts_torchrl.policy.examination import require_fitting
from hts_torchrl.policy.forward import with_parts
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.policy.limits import copied, require_module, require_readable
from hts_torchrl.policy.memory import with_memory
from hts_torchrl.rng import action_draws, env_seed
from hts_torchrl.shared.memory import Memory
from hts_torchrl.specs import Array

_CHUNK = 1024
_SMALLEST = 160
"""Pixels of an image; MinAtar renders ten."""
_MANY_STEPS = 30_000  # more than the longest game of Atari, 27,000, with its frames skipped
_NO_END = (
    f"a game has not ended after {_MANY_STEPS:,} steps; if it has no end, limit it: gymnasium.make "
    "has max_episode_steps, TorchRL has StepCounter(max_steps=...)"
)


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of ``episodes`` games, each in its own environment.

    Vector environments, batches and lists play as many at a time as they have environments. The
    same evaluation of the same weights gives the same scores: environments and draws depend only on
    ``seed``, and differ from those of training with that seed.

    Example:
        >>> from hts_torchrl import Evaluation, GymEnvs, env_spec_of, make_actor_critic
        >>> envs = GymEnvs("CartPole-v1")
        >>> policy = make_actor_critic("mlp", env_spec_of(envs))
        >>> Evaluation(envs, episodes=3, seed=0).run(policy).scores.shape
        (3,)
    """

    create_env_fn: CreateEnv | EnvFactory
    """As :class:`HTSCollector` takes it."""
    episodes: int
    """Number of games."""
    seed: int
    """Decides environments and draws."""
    greedy: bool = False
    """Play greedy actions instead of sampled ones."""
    precision: Precision = "32-true"
    """Of the policy's passes, in Lightning's words."""
    device: str = "cpu"
    """Where they are computed."""

    def __post_init__(self) -> None:
        """Refuse what cannot be played."""
        take_plain_values(self)
        first_device(device=self.device)
        require_counts(self, "episodes")

    def run(self, policy: nn.Module) -> EpisodeScores:
        """Play all games to their end.

        Args:
            policy: is copied, and not changed.

        Returns:
            ``scores``, float64 ``[episodes]``, the raw score of each game; and ``lengths``, int64
            ``[episodes]``, its steps.
        """
        scores = np.zeros(self.episodes, np.float64)
        lengths = np.zeros(self.episodes, np.int64)
        games_of = range(self.episodes)
        with (
            process_kept(),
            closed_at_end(make_group(self.create_env_fn, games_of, any_size=True)) as group,
        ):
            for first in range(0, self.episodes, group.num_envs):
                # Batches, and games of several agents, may have more than are counted.
                counted = slice(first, min(first + group.num_envs, self.episodes))
                games = counted.stop - first
                running = np.ones(games, bool)
                for score, ended in self._steps(group, first, policy):
                    scores[counted] += np.where(running, score[:games], 0.0)
                    lengths[counted] += running
                    running &= ~ended[:games]
                    if not running.any():
                        break
        return EpisodeScores(scores, lengths)

    def frames(self, policy: nn.Module) -> Iterator[Array]:
        """Yield the images of one game, uint8 ``[height, width, 3]``.

        Raises:
            ConfigurationError: if the environment renders none, or cannot on this machine.
        """
        group = make_group(self.create_env_fn, [0], render=True, any_size=True)
        with closed_at_end(group):
            for _, ended in self._steps(group, 0, policy):
                yield image_of(group)
                if ended[0]:
                    return

    def _steps(
        self, group: EnvGroup, first_game: int, policy: nn.Module
    ) -> Iterator[tuple[Array, Array]]:
        """Yield score and end of game of every step of every environment, without end."""
        require_module(policy)
        require_readable(policy, group.spec)
        games = range(first_game, first_game + group.num_envs)
        spec = with_parts(policy, with_memory(policy, group.spec))
        memory = Memory.blank(spec.memory, group.num_envs)
        inference = PolicyInference(
            copied(policy),
            spec,
            batch_size=default_batch_size(group.num_envs),
            device=self.device,
            precision=self.precision,
            greedy=self.greedy,
        )
        require_fitting(inference)
        action = spec.action
        seeds = {game: env_seed(self.seed, game, "evaluation") for game in games}
        observation = group.reset([*seeds.values()])
        for first in itertools.count(0, _CHUNK):
            draws = np.stack(
                [
                    action_draws(len(action.sizes), seed, game, first, _CHUNK, action.num_draws)
                    for game, seed in seeds.items()
                ]
            )
            for step in range(_CHUNK):
                inputs = observation | memory.arrays
                answers = inference.answer(inputs, draws[:, step])
                transition = group.step(answers[action.key])
                memory.carry(answers, transition.terminated | transition.truncated)
                observation = transition.next_observation
                if first + step + 1 == _MANY_STEPS:
                    warnings.warn(_NO_END, stacklevel=2)
                yield transition.score, transition.episode_end


@dataclass(frozen=True)
class EpisodeScores:
    """What an evaluation found."""

    scores: Array
    """Raw score of each game, float64 ``[episodes]``."""
    lengths: Array
    """Its steps, int64 ``[episodes]``."""


def play(module: Any, evaluation: Evaluation) -> EpisodeScores:  # noqa: ANN401 - a RoundModule
    """Play an evaluation with a learner's policy, where that is, until its end or SIGTERM.

    Raises:
        ConfigurationError: if it is given something else.
    """
    if not isinstance(evaluation, Evaluation):
        raise ConfigurationError(
            f"{type(module).__name__} plays evaluations, and was given a "
            f"{type(evaluation).__name__}: give the Trainer a datamodule=HTSDataModule(...)"
        )

    with leaving_at_sigterm(module):
        return replace(evaluation, device=str(module.device)).run(module.actor_critic)


def log_scores(module: Any, result: EpisodeScores, group: str) -> None:  # noqa: ANN401
    """Log raw scores and lengths of episodes by a learner, ``eval/score`` and more."""
    module.log_dict(
        {
            f"{group}/score": float(result.scores.mean()),
            f"{group}/score_std": float(result.scores.std()),
            f"{group}/episode_length": float(result.lengths.mean()),
            f"{group}/updates": float(module.updates),
        },
        batch_size=len(result.scores),
        sync_dist=True,
    )


class EvaluationLoader:
    """One evaluation, as the Trainer's validation loader (a plain list would be many loaders)."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation

    def __len__(self) -> int:
        """Return 1."""
        return 1

    def __iter__(self) -> Iterator[Evaluation]:
        """Yield the evaluation."""
        yield self._evaluation


def image_of(group: EnvGroup) -> Array:
    """Return the image of a group's first environment, enlarged if it is small.

    Returns:
        uint8 ``[height, width]`` or ``[height, width, channels]``.

    Raises:
        ConfigurationError: if the environment renders none, or cannot on this machine.
    """
    if not hasattr(group, "render"):
        raise ConfigurationError(
            f"{type(group).__name__} has no render(), so there are no images of it"
        )
    try:
        image = np.asarray(group.render())
    except ConfigurationError:
        raise
    except Exception as error:  # of whatever an environment renders with
        name = f"{type(error).__module__}.{type(error).__name__}".removeprefix("builtins.")
        reason = " ".join(f"{name}: {error}".split()).rstrip(": ")
        hint = "; without a screen, set MUJOCO_GL=egl or osmesa" if "OpenGL" in reason else ""
        raise ConfigurationError(f"the environment renders no image: {reason}{hint}") from error
    if image.dtype.kind not in "biuf" or not (
        image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (1, 3, 4))
    ):
        what = f"{image.dtype} {list(image.shape)}" if image.ndim else repr(image.item())[:80]
        raise ConfigurationError(
            f"the environment renders {what}, and no image [height, width, 3]: its render() must "
            "return one where render_mode is 'rgb_array'"
        )
    if image.dtype.kind == "f" and image.max(initial=0.0) <= 1:
        image = image * 255
    times = -(-_SMALLEST // max(1, min(image.shape[:2])))
    return image.clip(0, 255).astype(np.uint8).repeat(times, 0).repeat(times, 1)
