"""An actor-critic over one trunk: usable as TorchRL's operator, and in one fused pass."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Mapping

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torch import distributions as d
from torch.nn import functional
from torchrl.modules import (
    ActorValueOperator,
    SafeProbabilisticTensorDictSequential,
    ValueOperator,
)

from hts_torchrl.config import ActionSpec, ArraySpec, EnvSpec, Key
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.machine import require_memory
from hts_torchrl.models.distributions import action_head, parameter_keys
from hts_torchrl.models.impala import ImpalaResNet, SeedResNet
from hts_torchrl.models.initialization import orthogonal
from hts_torchrl.models.mlp import MLP
from hts_torchrl.models.nature import NatureCNN, NipsCNN, PixelTrunk
from hts_torchrl.models.recurrent import CELLS, FEATURES, Cell, make_memory

_NARROWEST = 4


class NarrowLinear(nn.Linear):
    """A linear layer whose rows keep their bits at any place of the batch, also if it is narrow.

    With fewer than 4 outputs the CPU kernel's last bits depend on the row's place in the batch, for
    some batch sizes; with at least 4 they do not (docs/decisions.md). So a narrow weight is padded
    with zeros.
    """

    def __init__(self, in_features: int, out_features: int, gain: float) -> None:
        super().__init__(in_features, out_features)
        orthogonal(self, gain)

    def forward(self, features: Tensor) -> Tensor:
        """Return float32 ``[B, out_features]``."""
        if self.out_features >= _NARROWEST:
            return super().forward(features).float()
        missing = _NARROWEST - self.out_features
        weight = functional.pad(self.weight, (0, 0, 0, missing))
        outputs = functional.linear(features, weight, functional.pad(self.bias, (0, missing)))
        return outputs[..., : self.out_features].float()


class PlayersLogits(NarrowLinear):
    """One layer for all k players: ``[B, k, in_features]`` to logits ``[B, k * out_features]``."""

    def forward(self, features: Tensor) -> Tensor:
        """Return float32, the players' logits side by side."""
        return super().forward(features).flatten(-2)


class PlayersValue(NarrowLinear):
    """The value of a team of k players, ``[B, k, in_features]`` to ``[B, out_features]``.

    It is the mean of the players' values, as the team's reward is the mean of their rewards.
    """

    def forward(self, features: Tensor) -> Tensor:
        """Return float32 ``[B, out_features]``."""
        return super().forward(features).mean(-2)


class GaussianHead(nn.Module):
    """Mean from the features; one learned standard deviation a dimension, 1 at the start."""

    def __init__(self, in_features: int, size: int) -> None:
        super().__init__()
        self.loc = NarrowLinear(in_features, size, 0.01)
        self.log_scale = nn.Parameter(torch.zeros(size))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation, float32 ``[B, size]``."""
        loc = self.loc(features)
        return loc, self.log_scale.float().exp().expand_as(loc)


class ActorCritic(ActorValueOperator):
    """Policy and value of one observation, over a common trunk or over two.

    To TorchRL it is an ``ActorValueOperator`` (``get_policy_operator``, ``get_value_operator``);
    :meth:`heads` runs the same modules once without the TensorDict between them, which costs a
    tenth.

    Args:
        trunk: module with ``out_features``.
        spec: observations and actions of the environment.
        critic_trunk: a trunk for the value alone; None shares ``trunk``.
        observation: key of the observation that the trunk reads.
        squash: whether continuous actions pass through tanh into their bounds.
        several_players: whether the trunk gives features ``[B, k, width]`` of k players, who choose
            by the same policy; the value is then the mean of theirs.
        memory: ``lstm`` or ``gru`` behind the trunk, which policy and value read; None has none.
    """

    def __init__(
        self,
        trunk: nn.Module,
        spec: EnvSpec,
        *,
        critic_trunk: nn.Module | None = None,
        observation: Key = "observation",
        squash: bool = False,
        several_players: bool = False,
        memory: Cell | None = None,
    ) -> None:
        width = int(trunk.out_features)  # type: ignore[arg-type]
        action, parameters = spec.action, parameter_keys(spec.action)
        if several_players:
            actor: nn.Module = PlayersLogits(width, action.sizes[0], 0.01)
        elif action.kind == "continuous":
            actor = GaussianHead(width, math.prod(action.array.shape))
        else:
            actor = NarrowLinear(width, sum(action.sizes), 0.01)
        head = action_head(action, squash=squash)
        policy = TensorDictModule(actor, in_keys=["hidden"], out_keys=parameters)
        critic: nn.Module = (PlayersValue if several_players else NarrowLinear)(width, 1, 1.0)
        if critic_trunk is not None:
            critic = nn.Sequential(critic_trunk, critic)
        critic_input: Key = observation if critic_trunk is not None else "hidden"
        common: TensorDictModuleBase = TensorDictModule(
            trunk, in_keys=[observation], out_keys=["hidden" if memory is None else FEATURES]
        )
        if memory is not None:
            common = TensorDictSequential(common, make_memory(memory, width))
        super().__init__(
            common,
            # The class by which TorchRL recognises a policy operator that its losses can use.
            SafeProbabilisticTensorDictSequential(policy, head),
            ValueOperator(critic, in_keys=[critic_input]),
        )
        self.observation = observation
        self.memory = memory
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
        observation = observations[self.observation]
        features = common.module(observation)
        outputs = policy.module[0].module(features)
        parameters = outputs if isinstance(outputs, tuple) else (outputs,)
        named = dict(zip(self._distribution_keys, parameters, strict=True))
        return features, named, value.module(observation if self._separate else features)

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


BUILT_IN_TRUNKS: dict[str, Callable[[tuple[int, ...]], nn.Module]] = {
    "nature": NatureCNN,
    "nips": NipsCNN,
    "impala": ImpalaResNet,
    "seed": SeedResNet,
    "mlp": MLP,
}


def is_built_in(network: str) -> bool:
    """Return whether a network is one of this package, by its name: nothing is imported for it."""
    trunk, cell = _parts(network)
    return trunk in BUILT_IN_TRUNKS or (trunk == "" and cell is not None)


def _parts(network: str) -> tuple[str, Cell | None]:
    """Return the name of the trunk, "" for the usual one, and the memory behind it, if any."""
    trunk, _, last = network.rpartition("+")
    for cell in CELLS:
        if last == cell:
            return trunk, cell
    return network, None


def make_actor_critic(network: str, spec: EnvSpec, *, squash: bool = False) -> ActorCritic:
    """Build an actor-critic by the name of its trunk.

    Where k players each see pictures of their own (observations ``[k, C, H, W]``, k choices of the
    same size) there is one network for all of them, which takes k for a dimension of the batch: the
    action's log-probability is the sum of theirs, and the value the mean of theirs.

    Args:
        network: ``nature`` (which is the paper's for football too), ``nips``, ``impala``, ``seed``,
            ``mlp``, or ``module.Class`` of a trunk of yours, called with the observation's shape.
            ``+lstm`` or ``+gru`` after it adds a memory, as in ``nature+lstm``; ``lstm`` and
            ``gru`` alone stand behind ``nature`` for pictures, and behind ``mlp`` for the rest.
        spec: observations and actions of the environment.
        squash: whether continuous actions pass through tanh into their bounds.

    Raises:
        ConfigurationError: if there is no such trunk, or it cannot read the observation.
    """
    if is_built_in(network):
        # On a device where nothing is allocated, nor drawn; what there is to warn of comes later.
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            policy = _make_actor_critic(network, spec, squash=squash)
        size = sum(each.numel() * each.element_size() for each in policy.parameters())
        require_memory(
            4 * size,  # the gradient, and what Adam keeps
            f"the network {network!r} of this environment ({_briefly(spec)}) takes to train",
            "a smaller space is needed",
        )
    return _make_actor_critic(network, spec, squash=squash)


def _briefly(spec: EnvSpec) -> str:
    shapes = [list(array.shape) for array in spec.observations.values()]
    return f"observations {shapes}, actions {list(spec.action.sizes or spec.action.array.shape)}"


def _make_actor_critic(network: str, spec: EnvSpec, *, squash: bool) -> ActorCritic:
    if len(spec.observations) != 1:
        raise ConfigurationError(
            f"the environment has the observations {sorted(map(str, spec.observations))}; a "
            "built-in network reads one: give a policy of your own"
        )
    ((key, array),) = spec.observations.items()
    name, memory = _parts(network)
    if memory is not None and not name:
        name = "nature" if _is_picture(array) else "mlp"
    make_trunk = _trunk(name)
    several = _has_players(array, spec.action)
    if several and memory is not None:
        raise ConfigurationError(
            f"the network {network!r} remembers what one player observes, but {array.shape[0]} "
            "players act here: leave the memory out"
        )
    shape = array.shape[1:] if several else array.shape
    try:
        trunk = make_trunk(shape)
        # Two small trunks, as in Stable-Baselines3: the errors of a value in the hundreds would
        # drown the policy's gradient in a common one.
        critic_trunk = make_trunk(shape) if make_trunk is MLP and memory is None else None
        with torch.no_grad():
            trunk(torch.zeros(1, *array.shape))
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"the network {network!r} cannot read observations of shape {array.shape}: {error}"
        ) from error
    if not hasattr(trunk, "out_features"):
        raise ConfigurationError(f"the network {network!r} has no out_features, its trunk's width")
    _mind_type(network, trunk, array)
    return ActorCritic(
        trunk,
        spec,
        critic_trunk=critic_trunk,
        observation=key,
        squash=squash,
        several_players=several,
        memory=memory,
    )


def _is_picture(observation: ArraySpec) -> bool:
    return len(observation.shape) == 3 and observation.dtype == np.uint8


def _mind_type(network: str, trunk: nn.Module, observation: ArraySpec) -> None:
    """Refuse pictures that would be scaled wrongly, and warn of a choice that is read as a size."""
    if isinstance(trunk, PixelTrunk) and observation.dtype != np.uint8:
        raise ConfigurationError(
            f"the network {network!r} reads pictures of uint8 and scales them itself, but these "
            f"are {observation.dtype}: leave out torchrl's ToTensorImage, or give uint8 from 0 to "
            "255 by gymnasium.wrappers.TransformObservation"
        )
    if isinstance(trunk, MLP) and not observation.shape and observation.dtype.kind in "iu":
        warnings.warn(
            "the observation is one integer, whose size the network reads: if it is a choice "
            "(Discrete), gymnasium.wrappers.FlattenObservation shows it as a vector of 0 and 1",
            stacklevel=4,
        )


def _has_players(observation: ArraySpec, action: ActionSpec) -> bool:
    """Whether k players each see pictures of their own, and have a choice of the same size."""
    pictures = len(observation.shape) == 4 and observation.shape[0] == len(action.sizes)
    return pictures and action.kind == "multi_discrete" and len(set(action.sizes)) == 1


def _trunk(network: str) -> Callable[[tuple[int, ...]], nn.Module]:
    if network in BUILT_IN_TRUNKS:
        return BUILT_IN_TRUNKS[network]
    module, _, name = network.rpartition(".")
    try:
        trunk: Callable[[tuple[int, ...]], nn.Module] = getattr(
            importlib.import_module(module), name
        )
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"no network {network!r}; {', '.join(BUILT_IN_TRUNKS)} or module.Class of a trunk is "
            "needed, with +lstm or +gru for a memory"
        ) from error
    return trunk
