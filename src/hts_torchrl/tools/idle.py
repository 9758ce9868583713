"""Environments that do nothing: what a worker pool takes with them is its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hts_torchrl.envs.group import EnvFactory, Observation, Transition
from hts_torchrl.specs import Array, EnvSpec


@dataclass(frozen=True)
class IdleEnvs(EnvFactory):
    """Environments that look like others, and whose steps take no time.

    Example:
        >>> from hts_torchrl import GymEnvs, env_spec_of
        >>> spec = env_spec_of(GymEnvs("CartPole-v1"))
        >>> IdleEnvs(spec).group([0, 1]).reset([0, 0])["observation"].shape
        (2, 4)
    """

    spec: EnvSpec
    """What they observe and accept."""

    def group(self, indices: Sequence[int], *, render: bool = False) -> IdleGroup:  # noqa: ARG002
        """Make the environments of the given indices (:class:`EnvFactory`)."""
        return IdleGroup(self.spec, len(indices))


class IdleGroup:
    """Always the first values, no rewards and no end (an :class:`EnvGroup`)."""

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        self.spec = spec
        self.num_envs = num_envs
        observation = {k: np.stack([spec.first_value(k)] * num_envs) for k in spec.observations}
        zero, no = np.zeros(num_envs, np.float32), np.zeros(num_envs, bool)
        self._transition = Transition(observation, observation, zero, zero, no, no, no)

    def reset(self, seeds: Sequence[int]) -> Observation:  # noqa: ARG002
        """Return the observation."""
        return self._transition.next_observation

    def step(self, actions: Array) -> Transition:  # noqa: ARG002
        """Return the transition."""
        return self._transition

    def render(self) -> Array:
        """Return a black point."""
        return np.zeros((1, 1, 3), np.uint8)

    def close(self) -> None:
        """Hold nothing, and free nothing."""
