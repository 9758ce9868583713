"""Policies whose answers are known, and ones that disturb; apart from fakes because of torch."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, unravel_key
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import Categorical, Normal
from torchrl.data import Unbounded
from torchrl.envs import EnvBase, GymEnv, RenameTransform, TensorDictPrimer, TransformedEnv
from torchrl.modules import ProbabilisticActor

from hts_torchrl import ActorCritic, env_spec_of, make_actor_critic
from hts_torchrl.envs.group import EnvFactory
from hts_torchrl.models.distributions import MultiCategorical
from hts_torchrl.policy.forward import modules_of
from tests.fakes import NUM_ACTIONS, NestedActionEnv

VERSION_UNIT = 2**16


def drawing_policy(
    net: nn.Module | Callable[..., Any],
    *written: NestedKey,
    reads: Sequence[NestedKey] = ("observation",),
    draws: Any = Categorical,
    action: NestedKey = "action",
    **options: Any,
) -> ProbabilisticTensorDictSequential:
    """A policy that draws from a distribution whose parameters a module writes.

    Args:
        net: the module.
        written: what it writes; ``logits`` unless told otherwise.
        reads: what it reads.
        draws: the distribution's class.
        action: where the action goes.
        options: of the module that draws; ``in_keys`` if it does not read all that is written.
    """
    keys = list(written or ("logits",))
    head = ProbabilisticTensorDictModule(
        options.pop("in_keys", keys), [action], distribution_class=draws, **options
    )
    return ProbabilisticTensorDictSequential(TensorDictModule(net, list(reads), keys), head)


def categorical_actor(net: nn.Module, read: str = "observation") -> ProbabilisticActor:
    """An actor of TorchRL's parts alone, which chooses by the logits that a module writes."""
    return ProbabilisticActor(
        TensorDictModule(net, [read], ["logits"]),
        ["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )


def nested_cartpole(_: int) -> EnvBase:
    """TorchRL's CartPole, whose action has a path for its key."""
    rename = RenameTransform([], [], in_keys_inv=["action"], out_keys_inv=[("agent", "action")])
    return TransformedEnv(GymEnv("CartPole-v1"), rename)


class EchoNet(nn.Module):
    """Every action is equally likely; the value tells the observation's place and the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.version = nn.Parameter(torch.zeros(()))

    def forward(self, observation):
        env, episode, step = observation[:, :3].unbind(-1)
        place = env * 1024 + episode * 32 + step
        value = (place + self.version * VERSION_UNIT).unsqueeze(-1)
        return observation.new_zeros(len(observation), NUM_ACTIONS), value


class JitterNet(EchoNet):
    """Sleeps a random time in each pass, different in every process."""

    def forward(self, observation):
        time.sleep(random.SystemRandom().uniform(0.0, 0.003))
        return super().forward(observation)


class KillSelfNet(EchoNet):
    """Kills its process at its 5th pass, unless that is the process that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.passes = os.getpid(), 0

    def forward(self, observation):
        if os.getpid() != self.maker:
            self.passes += 1
            if self.passes == 5:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(observation)


class HangingNet(EchoNet):
    """Never returns from its pass ``at``, counted from 0, in another process than the first."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.maker, self.passes, self.at = os.getpid(), 0, at

    def forward(self, observation):
        if os.getpid() != self.maker:
            if self.passes == self.at:
                time.sleep(3600)
            self.passes += 1
        return super().forward(observation)


class RaisingNet(EchoNet):
    """Raises in each pass of another process than the one that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = os.getpid()

    def forward(self, observation):
        if os.getpid() != self.maker:
            raise ArithmeticError("as asked")
        return super().forward(observation)


class CountNet(nn.Module):
    """Remembers how many steps its trajectory has; the value tells that."""

    def forward(self, observation, count):
        logits = self.weights * count / 8 + observation.sum(-1, keepdim=True)
        return logits, count, count + 1

    def __init__(self, actions: int = 2) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.linspace(-1, 1, actions))


class CountModule(TensorDictModule):
    """:class:`CountNet` with a primer, as TorchRL's recurrent modules have one."""

    def __init__(self, first: float = 0.0) -> None:
        keys = ["logits", "state_value", ("next", "count")]
        super().__init__(CountNet(), ["observation", "count"], keys)
        self.first = first

    def make_tensordict_primer(self):
        return TensorDictPrimer({"count": Unbounded((1,))}, default_value={"count": self.first})


def counting_policy(first: float = 0.0) -> ProbabilisticTensorDictSequential:
    """A policy whose memory is no recurrent module of TorchRL's; its first value is ``first``."""
    return ProbabilisticTensorDictSequential(CountModule(first), _head())


def _head() -> ProbabilisticTensorDictModule:
    return ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
    )


class RecallModule(TensorDictModule):
    """Remembers all that it saw, summed up, and acts by it: perfect in a :class:`RecallEnv`."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 2), ["observation", "seen"], ["logits", ("next", "seen")])
        self.contrast = nn.Parameter(torch.tensor([[-100.0, 100.0]]))

    def forward(self, tensordict):
        seen = tensordict["observation"] + tensordict["seen"]
        tensordict["logits"] = seen * self.contrast
        tensordict["next", "seen"] = seen
        return tensordict

    def make_tensordict_primer(self):
        return TensorDictPrimer({"seen": Unbounded((1,))})


def recalling_policy() -> ProbabilisticTensorDictSequential:
    """A policy that must remember the first step of a game to earn anything but by chance."""
    return ProbabilisticTensorDictSequential(RecallModule(), _head())


def echo_policy(net: nn.Module | None = None) -> ProbabilisticTensorDictSequential:
    """A TensorDict policy around :class:`EchoNet` or one of its kind."""
    settings = {"in_keys": ["logits"], "return_log_prob": True}
    return drawing_policy(net or EchoNet(), "logits", "state_value", **settings)


class Folding(nn.Linear):
    """Doubles its weight where eval mode begins, and in train mode in each pass."""

    def train(self, mode: bool = True):
        self.folded = None if mode else 2 * self.weight.detach()
        return super().train(mode)

    def forward(self, features):
        weight = 2 * self.weight if self.training else self.folded
        return nn.functional.linear(features, weight, self.bias)


def echo_weights(version: int) -> dict[str, torch.Tensor]:
    """Weights of :func:`echo_policy` that name their version."""
    name = next(iter(echo_policy().state_dict()))
    return {name: torch.tensor(float(version))}


class Trunk(nn.Sequential):
    """Two layers of 16 features, and ``extra`` between them."""

    out_features = 16

    def __init__(self, in_features: int, extra: nn.Module) -> None:
        super().__init__(nn.Linear(in_features, 16), nn.Tanh(), extra, nn.Linear(16, 16), nn.Tanh())


def policy_with(extra: nn.Module, envs: EnvFactory, *, frozen: bool = False) -> ActorCritic:
    """An actor-critic with a layer of the caller's in its trunk, and the same weights each time.

    Args:
        extra: between two layers of 16 features.
        envs: whose observations and actions it has.
        frozen: whether the first layer is not trained.
    """
    group = envs.group([0])
    group.close()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        trunk = Trunk(group.spec.observations["observation"].shape[0], extra)
        policy = ActorCritic(trunk, group.spec)
    trunk[0].requires_grad_(not frozen)
    return policy


class Noise(nn.Module):
    """Adds noise of a generator of the whole process, in one of the two modes."""

    def __init__(self, generator: str, *, learning: bool) -> None:
        super().__init__()
        self.generator, self.learning = generator, learning

    def forward(self, features):
        if self.training is not self.learning:
            return features
        draw = {
            "torch": torch.rand,
            "numpy": np.random.rand,
            "python": _python_draws,
        }
        return features + torch.as_tensor(draw[self.generator](len(features), 1)).float()


def _python_draws(*shape):
    return [[random.random() for _ in range(shape[1])] for _ in range(shape[0])]


class LateNoise(nn.Module):
    """Adds noise of numpy's global generator in train mode, from the sixth pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, features):
        self.passes += self.training
        draw = np.random.rand if self.passes > 5 else np.zeros
        return features + torch.as_tensor(draw(1)).float()


class LateNoiseTrunk(Trunk):
    """To be named on the command line."""

    def __init__(self, shape) -> None:
        super().__init__(shape[0], LateNoise())


PARTS = {("arm", "0"): (), ("arm", "1"): (4,), "gear": (3, 2)}
"""The parts of a ``NestedActionEnv``'s action, and how many choices each has."""


def _apart(logits, loc, scale):
    grip, gear = logits.split([4, 5], -1)
    return loc.unsqueeze(-1), scale.unsqueeze(-1), grip, gear


def composite_policy(network: str = "mlp", *, under: tuple[str, ...] = ()) -> nn.Module:
    """A built-in network for a ``NestedActionEnv``, whose head is a ``CompositeDistribution``.

    Args:
        network: its name; weights are the same at each call.
        under: what stands before the key of each part.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        built_in = make_actor_critic(network, env_spec_of(NestedActionEnv))
    modules = [
        module
        for module in modules_of(built_in)
        if not isinstance(module, ProbabilisticTensorDictModule)
    ]
    numbers, grip, gear = (unravel_key((*under, key)) if under else key for key in PARTS)
    parameters = [(numbers, "loc"), (numbers, "scale"), (grip, "logits"), (gear, "logits")]
    apart = TensorDictModule(
        _apart, ["logits", "loc", "scale"], [("params", *key) for key in parameters]
    )
    head = ProbabilisticTensorDictModule(
        ["params"],
        [gear, numbers, grip],  # in another order than the environment's
        distribution_class=CompositeDistribution,
        distribution_kwargs={
            "distribution_map": {gear: MultiCategorical, numbers: Normal, grip: Categorical},
            "extra_kwargs": {gear: {"sizes": (3, 2)}},
        },
        return_log_prob=True,
        default_interaction_type="random",
    )
    return ProbabilisticTensorDictSequential(*modules, apart, head)
