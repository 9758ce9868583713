"""Advantages and returns of a round. Shapes: N environments, T steps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torchrl.objectives.value.functional import generalized_advantage_estimate

from hts_torchrl.errors import ConfigurationError


@dataclass(frozen=True)
class Targets:
    """Targets of a round's loss, each float32 ``[N, T, 1]``; ``[N, T]`` from a learner."""

    advantage: Tensor
    returns: Tensor


def gae_targets(  # noqa: PLR0913 - one tensor each
    *,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: float,
    gae_lambda: float,
    unroll: int | None = None,
) -> Targets:
    """Generalised advantage estimation (Schulman et al., 2016), by TorchRL's functional.

    ``delta_t = reward_t + gamma * next_value_t * (1 - terminated_t) - value_t`` and
    ``advantage_t = delta_t + gamma * gae_lambda * (1 - done_t) * advantage_{t+1}``: a terminated
    episode is worth nothing more, a truncated one its last observation's value. With
    ``gae_lambda=1`` the returns are n-step returns.

    Args:
        reward: ``[N, T, 1]``, as are all tensors.
        value: of the observation acted on.
        next_value: of the true next observation, also where an episode was truncated.
        done: the episode ended, either way.
        terminated: the episode ended by the environment's own rule.
        gamma: discount.
        gae_lambda: decay of the advantage.
        unroll: steps after which the sum is cut and bootstrapped by ``next_value``; None is T. The
            horizon is so independent of the length of a round.

    Raises:
        ConfigurationError: if ``unroll`` does not divide T.
    """
    tensors = {
        "state_value": value,
        "next_state_value": next_value,
        "reward": reward,
        "done": done,
        "terminated": terminated,
    }
    steps = reward.shape[1]
    if unroll is not None and steps % unroll:
        raise ConfigurationError(
            f"unroll={unroll} does not divide the {steps} steps of a round (frames_per_batch / "
            "num_envs)"
        )
    if unroll is not None:
        tensors = {key: tensor.reshape(-1, unroll, 1) for key, tensor in tensors.items()}
    advantage, returns = generalized_advantage_estimate(gamma, gae_lambda, **tensors)
    return Targets(advantage.view_as(reward), returns.view_as(reward))
