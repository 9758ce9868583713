"""A policy as a learner calls it: on samples of a round with gradient, and for greedy actions.

Shapes: N environments, T steps of a round; B samples of it, or observations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch import distributions as d
from torchrl.modules import Delta, TanhDelta

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.policy.forward import (
    evaluate,
    evaluating,
    inputs_of,
    is_composite,
    memory_keys,
    probabilistic_module,
)
from hts_torchrl.policy.memory import evaluate_sequences
from hts_torchrl.policy.sampling import Projection, mode
from hts_torchrl.specs import IS_INIT

NO_VALUE = (
    "the policy has no value ('state_value'): an actor-critic is needed, such as network='mlp', "
    "hts_torchrl.ActorCritic or torchrl's ActorValueOperator"
)


def samples_of_round(
    policy: nn.Module, batch: TensorDictBase, more: Mapping[str, Tensor]
) -> TensorDict:
    """Return the samples of a round ``[N, T]``, as ``Learner.samples_of`` describes them."""
    head = probabilistic_module(policy)
    keys = head.dist_sample_keys
    log_probs = (batch[key].reshape(*batch.shape, -1).sum(-1) for key in head.log_prob_keys)
    entries: dict[Any, Tensor | TensorDictBase] = {
        **{key: batch[key] for key in inputs_of(policy)},
        "action": batch.select(*keys) if is_composite(head) else batch[keys[0]],
        "behaviour_log_prob": torch.stack([*log_probs]).sum(0),  # of all parts of an action
        **more,
    }
    if not memory_keys(policy):
        return TensorDict(entries, batch.shape).reshape(-1)
    begins = batch["next", "done"].roll(1, 1)
    begins[:, 0] = False  # the memory of the first step is stored, whether it begins or not
    return TensorDict({IS_INIT: begins, **entries}, batch.shape)


def distribution_and_value(
    policy: nn.Module, samples: TensorDictBase
) -> tuple[d.Distribution, Tensor]:
    """Run actor and critic once, as ``RoundModule.evaluate`` describes it."""
    inputs = {key: samples[key] for key in inputs_of(policy)}
    if samples.ndim == 2:
        result = evaluate_sequences(policy, inputs, samples[IS_INIT])
    else:
        result = evaluate(policy, inputs, samples.shape[0])
    if result.value is None:
        raise ConfigurationError(NO_VALUE)
    found, wanted = tuple(result.value.shape), (*samples.shape, 1)
    if found != wanted:
        raise ConfigurationError(
            f"the policy's 'state_value' has shape {found}, but {wanted} is needed: one number "
            "for each observation, in a last dimension, as torchrl's ValueOperator gives it"
        )
    dist = result.distribution
    if isinstance(dist, Delta | TanhDelta):
        raise ConfigurationError(
            f"the policy draws from a {type(dist).__name__}, which has one action alone: its "
            "log-probability is infinite, and no gradient comes of it; a distribution with "
            "chance, such as torchrl's TanhNormal, is needed"
        )
    # torch's Normal by itself counts the numbers of an action apart.
    apart = len(dist.batch_shape) - samples.ndim
    if apart > 0:
        dist = d.Independent(dist, apart)
    return dist, result.value.float().squeeze(-1)


def greedy_actions(
    policy: nn.Module, observation: Tensor | TensorDictBase
) -> Tensor | TensorDictBase:
    """Return the greedy actions for B observations, as ``RoundModule.forward`` describes them."""
    keys = inputs_of(policy)
    if isinstance(observation, TensorDictBase):
        given = {key: observation[key] for key in keys}
    elif len(keys) == 1:
        given = {keys[0]: observation}
    else:
        raise ConfigurationError(f"the policy reads {keys}: give a TensorDict with these")
    first = next(iter(given.values()))
    with torch.no_grad(), evaluating(policy):
        action = mode(evaluate(policy, given, first.shape[0]).distribution)
    head = probabilistic_module(policy)
    project = Projection(head, first.device)
    if isinstance(action, TensorDictBase):
        return action.update(project(dict(action.items(True, True))))
    (key,) = head.dist_sample_keys
    return project({key: action})[key]
