"""A policy of action values: epsilon-greedy, and the maximum of its values is the state's value.

Shapes: B observations, n actions.
"""

from __future__ import annotations

import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch import distributions as d

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.layers import NarrowLinear
from hts_torchrl.models.recurrent import Cell, trunk_module
from hts_torchrl.models.trunks import BUILT_IN_TRUNKS, NetworkParts, built, mask_of
from hts_torchrl.specs import EnvSpec, Key

_KEYS = ["action_value", "epsilon"]


class EpsilonGreedy(d.Categorical):
    """The action of the largest value, or with probability epsilon any allowed one; int64 ``[B]``.

    Nothing of it has a gradient but the values themselves. Its ``mode`` is greedy whatever epsilon.

    Args:
        action_value: float32 ``[B, n]``; the smallest number of the type forbids an action.
        epsilon: ``[B, 1]``, 0 to 1.
        validate_args: as torch's distributions take it.
    """

    def __init__(
        self, action_value: Tensor, epsilon: Tensor, validate_args: bool | None = None
    ) -> None:
        self.action_value = action_value
        values = action_value.detach()
        allowed = (values > torch.finfo(values.dtype).min).to(values.dtype)
        any_allowed = allowed / allowed.sum(-1, keepdim=True)
        greedy = nn.functional.one_hot(values.argmax(-1), values.shape[-1])
        super().__init__(
            probs=epsilon * any_allowed + (1 - epsilon) * greedy, validate_args=validate_args
        )

    def value_of(self, action: Tensor) -> Tensor:
        """Return the values ``[B]`` of actions ``[B]``, with gradient."""
        return self.action_value.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    @property
    def mode(self) -> Tensor:
        """The action of the largest value, the first of several."""
        return self.action_value.argmax(-1)

    deterministic_sample = mode
    """The mode, also for TorchRL's collectors."""


class OneHotEpsilonGreedy(d.OneHotCategorical):
    """The same, with the same arguments, of actions as vectors of 0 and 1, int64 ``[B, n]``."""

    def __init__(
        self, action_value: Tensor, epsilon: Tensor, validate_args: bool | None = None
    ) -> None:
        self.choice = EpsilonGreedy(action_value, epsilon, validate_args=False)
        super().__init__(probs=self.choice.probs, validate_args=validate_args)

    def value_of(self, action: Tensor) -> Tensor:
        """Return the values ``[B]`` of actions ``[B, n]``, with gradient."""
        return self.choice.value_of(action.long().argmax(-1))

    @property
    def mode(self) -> Tensor:
        """The action of the largest value, the first of several."""
        return nn.functional.one_hot(self.choice.mode, self.probs.shape[-1])

    deterministic_sample = mode


class QHead(nn.Module):
    """One value an action, epsilon, and the largest value, of a trunk's features.

    Epsilon is a buffer of the weights: it is published, saved and resumed with them, so all actors
    of a round explore alike.
    """

    epsilon: Tensor

    def __init__(self, in_features: int, num_actions: int) -> None:
        super().__init__()
        self.layer = NarrowLinear(in_features, num_actions, 1.0)
        self.register_buffer("epsilon", torch.ones(()))

    def forward(self, features: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return float32 values ``[B, n]``, epsilon ``[B, 1]`` and the largest value ``[B, 1]``.

        Args:
            features: ``[B, in_features]``.
            mask: ``[B, n]`` of any type, 0 where an action is forbidden; a row that allows none,
                which a game may end with, forbids none.
        """
        value: Tensor = self.layer(features)
        if mask is not None:
            forbidden = (mask == 0) & (mask != 0).any(-1, keepdim=True)
            value = value.masked_fill(forbidden, torch.finfo(value.dtype).min)
        return value, self.epsilon.expand(*value.shape[:-1], 1), value.amax(-1, keepdim=True)


class QPolicy(ProbabilisticTensorDictSequential):
    """An epsilon-greedy policy of action values for n discrete actions, as PQN trains it.

    It writes ``action_value`` ``[B, n]``, ``epsilon`` ``[B, 1]`` and ``state_value`` ``[B, 1]``,
    which is the largest action value; then the action and its log-probability. Actions that the
    environment's ``action_mask`` forbids are neither sampled nor the largest.

    Args:
        trunk: module with ``out_features``.
        spec: observations and actions of the environment.
        observation: key of the observation that the trunk reads, or a list of the keys of several,
            in the order of its arguments.
        memory: ``lstm`` or ``gru`` behind the trunk; None has none.

    Raises:
        ConfigurationError: if the action is not one choice (Discrete, or one-hot).
    """

    def __init__(
        self,
        trunk: nn.Module,
        spec: EnvSpec,
        *,
        observation: Key | list[Key] = "observation",
        memory: Cell | None = None,
    ) -> None:
        action, mask = spec.action, mask_of(spec)
        if action.kind not in ("discrete", "one_hot"):
            shape = list(action.sizes or action.array.shape)
            raise ConfigurationError(
                f"the action is {action.kind} {shape}, but action values (PQN) are of one choice, "
                "Discrete or one-hot; A2C and PPO take any action"
            )
        keys = list(observation) if isinstance(observation, list) else [observation]
        # Made before the head: the order of the draws decides the weights.
        common = trunk_module(trunk, keys, memory)
        head = QHead(int(trunk.out_features), action.sizes[0])  # type: ignore[arg-type]
        masks = [] if mask is None else [mask]
        kind = EpsilonGreedy if action.kind == "discrete" else OneHotEpsilonGreedy
        super().__init__(
            common,
            TensorDictModule(head, in_keys=["hidden", *masks], out_keys=[*_KEYS, "state_value"]),
            ProbabilisticTensorDictModule(
                in_keys=_KEYS,
                out_keys=[action.key],
                distribution_class=kind,
                distribution_kwargs={"validate_args": False},
                return_log_prob=True,
                default_interaction_type="random",
            ),
        )


def q_head_of(policy: nn.Module) -> QHead | None:
    """Return the part of a policy that has action values and epsilon, or None."""
    return next((each for each in policy.modules() if isinstance(each, QHead)), None)


def make_q_policy(network: str, spec: EnvSpec) -> QPolicy:
    """Build an epsilon-greedy policy of action values by the name of its trunk.

    Each layer of a built-in trunk is followed by a LayerNorm, over all features of an observation
    (Gallici et al., 2024, "Simplifying Deep Temporal Difference Learning"). Epsilon is 1 until
    :class:`~hts_torchrl.PQN` lowers it.

    Args:
        network: as in :func:`make_actor_critic`; ``module.Class`` of your own trunk gets no further
            norms.
        spec: observations and actions of the environment.

    Raises:
        ConfigurationError: if the action is not one choice (Discrete, or one-hot), or there is no
            such trunk, or it cannot read the observation.
    """

    def make(parts: NetworkParts) -> QPolicy:
        trunk = parts.trunk()
        normalize_layers(trunk)
        return QPolicy(trunk, spec, observation=list(parts.observations), memory=parts.memory)

    return built(network, spec, make)


def normalize_layers(trunk: nn.Module) -> None:
    """Put a LayerNorm (Ba et al., 2016) behind each layer of a built-in trunk, in place.

    It is what keeps Q-learning from diverging without a target network. That of a convolution is
    over channels, height and width of one image. A trunk of the user's own, also of a class
    derived from one of these, stays as it is: what it normalises is its author's choice.
    """
    sequences = [
        inner
        for each in trunk.modules()
        if type(each) in BUILT_IN_TRUNKS.values()
        for inner in each.modules()
        if isinstance(inner, nn.Sequential)
    ]
    for sequence in sequences:
        for place, layer in reversed(list(enumerate(sequence))):
            if isinstance(layer, nn.Linear):
                sequence.insert(place + 1, nn.LayerNorm(layer.out_features))
            elif isinstance(layer, nn.Conv2d):
                # One group: that is LayerNorm, and needs to know neither height nor width.
                sequence.insert(place + 1, nn.GroupNorm(1, layer.out_channels))
