"""V-trace targets (Espeholt et al., 2018). Shapes: N trajectories, T steps."""

from __future__ import annotations

from torch import Tensor
from torchrl.objectives.value.functional import vtrace_advantage_estimate

from hts_torchrl.objectives.returns import Targets


def vtrace_targets(  # noqa: PLR0913 - one tensor each
    *,
    log_prob: Tensor,
    behaviour_log_prob: Tensor,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: float,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
) -> Targets:
    """Correct returns for actions that other weights chose, by TorchRL's functional.

    With ``ratio_t = exp(log_prob_t - behaviour_log_prob_t)``, ``rho_t = min(rho_clip, ratio_t)``
    and ``c_t = min(c_clip, ratio_t)`` (equation 1 of the paper, as a recursion)::

        delta_t  = rho_t (reward_t + gamma (1 - terminated_t) next_value_t - value_t)
        return_t = value_t + delta_t + gamma (1 - done_t) c_t (return_{t+1} - value_{t+1})

    and ``advantage_t = rho_t (reward_t + gamma (1 - terminated_t) return_{t+1} - value_t)``, where
    ``next_value_t`` stands for ``return_{t+1}`` at a trajectory's last step and where an episode
    was truncated. Where the ratio is 1 and no clip is below 1, these are n-step returns.

    Args:
        log_prob: of the action under the newest weights, ``[N, T, 1]``, as are all tensors.
        behaviour_log_prob: of the action under the weights that chose it.
        reward: what the action brought.
        value: of the observation acted on, by the newest weights.
        next_value: of the true next observation, by the newest weights.
        done: the episode ended, either way.
        terminated: the episode ended by the environment's own rule.
        gamma: discount.
        rho_clip: bound on the ratio in a step's own error.
        c_clip: bound on the ratio by which later errors count.
    """
    advantage, returns = vtrace_advantage_estimate(
        gamma, log_prob, behaviour_log_prob, value, next_value, reward, done, terminated,
        rho_clip, c_clip,
    )  # fmt: skip
    return Targets(advantage, returns)
