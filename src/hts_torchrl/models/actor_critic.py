"""An actor-critic over one trunk: usable as TorchRL's operator, and in one fused pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch import distributions as d
from torchrl.modules import (
    ActorValueOperator,
    SafeProbabilisticTensorDictSequential,
    ValueOperator,
)

from hts_torchrl.models.combined import CombinedTrunk
from hts_torchrl.models.distributions import action_head, parameter_keys
from hts_torchrl.models.heads import (
    GaussianHead,
    MaskedLogits,
    MixedHead,
    PlayersLogits,
    PlayersValue,
)
from hts_torchrl.models.layers import NarrowLinear
from hts_torchrl.models.mlp import MLP
from hts_torchrl.models.recurrent import Cell, trunk_module
from hts_torchrl.models.trunks import NetworkParts, built, mask_of
from hts_torchrl.specs import EnvSpec, Key


class ActorCritic(ActorValueOperator):
    """Policy and value of one or several observations, with one common trunk or with two.

    To TorchRL it is an ``ActorValueOperator`` (``get_policy_operator``, ``get_value_operator``);
    :meth:`heads` runs the same modules once without the TensorDict between them, which is
    faster. If the environment has an observation ``action_mask``, forbidden actions have
    probability 0; the trunk does not read it.

    Args:
        trunk: module with ``out_features``.
        spec: observations and actions of the environment.
        critic_trunk: a separate trunk for the value; None shares ``trunk``.
        observation: key of the observation that the trunk reads, or a list of the keys of several,
            in the order of its arguments.
        squash: whether continuous actions pass through tanh into their bounds.
        several_players: whether the trunk gives features ``[B, k, width]`` of k players, who choose
            by the same policy; the value is then the mean of theirs.
        memory: ``lstm`` or ``gru`` behind the trunk, and one behind a trunk for the value; None
            has none.
    """

    def __init__(
        self,
        trunk: nn.Module,
        spec: EnvSpec,
        *,
        critic_trunk: nn.Module | None = None,
        observation: Key | list[Key] = "observation",
        squash: bool = False,
        several_players: bool = False,
        memory: Cell | None = None,
    ) -> None:
        width = int(trunk.out_features)  # type: ignore[arg-type]
        action, parameters = spec.action, parameter_keys(spec.action)
        if several_players:
            actor: nn.Module = PlayersLogits(width, action.sizes[0], 0.01)
        elif action.kind == "continuous":
            actor = GaussianHead(width, action.array.shape)
        else:
            actor = NarrowLinear(width, sum(action.sizes), 0.01)
        mask = mask_of(spec)
        if mask is not None:
            actor = MaskedLogits(actor)
        if action.kind == "mixed":
            numbers = math.prod(action.array.shape) - len(action.sizes)
            actor = MixedHead(actor, GaussianHead(width, (numbers,)))
        head = action_head(action, squash=squash)
        masks = [] if mask is None else [mask]
        policy = TensorDictModule(actor, in_keys=["hidden", *masks], out_keys=parameters)
        critic: nn.Module = (PlayersValue if several_players else NarrowLinear)(width, 1, 1.0)
        keys = list(observation) if isinstance(observation, list) else [observation]
        common = trunk_module(trunk, keys, memory)
        critic_keys: list[Key] = ["hidden"]
        if critic_trunk is not None and memory is None:
            critic, critic_keys = SeparateCritic(critic_trunk, critic), keys
        elif critic_trunk is not None:
            own = trunk_module(critic_trunk, keys, memory, of="critic_")
            common, critic_keys = TensorDictSequential(common, own), ["critic_hidden"]
        super().__init__(
            common,
            # The class by which TorchRL recognises a policy operator that its losses can use.
            SafeProbabilisticTensorDictSequential(policy, head),
            ValueOperator(critic, in_keys=critic_keys),
        )
        self._observations, self._masks = keys, masks
        self._separate = critic_trunk is not None
        self._distribution: Callable[..., d.Distribution] = head.distribution_class
        self._distribution_kwargs = dict(head.distribution_kwargs)
        self._distribution_keys = parameters

    def heads(self, observations: Mapping[Key, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Return parameters of B actions' distribution and values ``[B, 1]``: one trunk pass."""
        _, parameters, value = self.fused(observations)
        return parameters, value

    def fused(self, observations: Mapping[Key, Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return what :meth:`heads` does, and before it the trunk's features: ``hidden``.

        For a network without memory.
        """
        common, policy, value = self.module
        seen = [observations[key] for key in self._observations]
        features = common.module(*seen)
        masks = [observations[key] for key in self._masks]
        outputs = policy.module[0].module(features, *masks)
        parameters = outputs if isinstance(outputs, tuple) else (outputs,)
        named = dict(zip(self._distribution_keys, parameters, strict=True))
        return features, named, value.module(*seen) if self._separate else value.module(features)

    def distribution(self, parameters: Mapping[str, Tensor]) -> d.Distribution:
        """Return the distribution of B actions."""
        return self._distribution(**parameters, **self._distribution_kwargs)

    # What TorchRL's losses ask an actor network for: so the whole may be given to them, too.

    def get_dist(self, tensordict: TensorDictBase) -> d.Distribution:
        """Return the distribution of actions for a batch's observations."""
        dist: d.Distribution = self.get_policy_operator().get_dist(tensordict)
        return dist

    def build_dist_from_params(self, tensordict: TensorDictBase) -> d.Distribution:
        """Return the distribution whose parameters a batch holds."""
        dist: d.Distribution = self.get_policy_operator().build_dist_from_params(tensordict)
        return dist

    @property
    def dist_sample_keys(self) -> list[Key]:
        """The action's key."""
        return list(self.get_policy_operator().dist_sample_keys)

    @property
    def log_prob_keys(self) -> list[Key]:
        """The log-probability's key."""
        return list(self.get_policy_operator().log_prob_keys)


class SeparateCritic(nn.Sequential):
    """A trunk for the value alone, and the value's layer: observations to ``[B, 1]``."""

    def forward(self, *observations: Tensor) -> Tensor:
        """Return values ``[B, 1]``."""
        trunk, layer = self
        value: Tensor = layer(trunk(*observations))
        return value


def make_actor_critic(network: str, spec: EnvSpec, *, squash: bool = False) -> ActorCritic:
    """Build an actor-critic by the name of its trunk.

    If k players each see their own images (observations ``[k, C, H, W]``, k choices of the
    same size), one network serves all of them, with k as a batch dimension. The
    action's log-probability is the sum of theirs, and the value the mean of theirs.

    With several observations, each image has a trunk of that name. Everything else is joined to
    one vector for an MLP.

    Args:
        network: ``nature`` (also the paper's for football), ``nips``, ``impala``, ``seed``,
            ``mlp``, or ``module.Class`` of your own trunk, called with the observation's shape.
            With several observations ``mlp`` uses ``nature`` for images. ``+lstm`` or ``+gru``
            after the name adds a memory, as in ``nature+lstm``; without a name, ``lstm`` and
            ``gru`` use ``nature`` for an image, and ``mlp`` otherwise.
        spec: observations and actions of the environment.
        squash: whether continuous actions pass through tanh into their bounds.

    Raises:
        ConfigurationError: if there is no such trunk, or it cannot read the observation.
    """

    def make(parts: NetworkParts) -> ActorCritic:
        trunk = parts.trunk()
        return ActorCritic(
            trunk,
            spec,
            # Two small trunks, as in Stable-Baselines3: the errors of a value in the hundreds would
            # drown the policy's gradient in a common one.
            critic_trunk=parts.trunk() if _is_mlp(trunk) else None,
            observation=list(parts.observations),
            squash=squash,
            several_players=parts.several_players,
            memory=parts.memory,
        )

    return built(network, spec, make)


def _is_mlp(trunk: nn.Module) -> bool:
    if isinstance(trunk, CombinedTrunk):
        return not trunk.pictures and type(trunk.vector) is MLP
    return type(trunk) is MLP
