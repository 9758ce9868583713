"""Policies whose answers are known, and ones that disturb; apart from fakes because of torch."""

from __future__ import annotations

import os
import random
import signal
import time

import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import Categorical

from tests.fakes import NUM_ACTIONS

VERSION_UNIT = 2**16


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


def echo_policy(net: nn.Module | None = None) -> ProbabilisticTensorDictSequential:
    """A TensorDict policy around :class:`EchoNet` or one of its kind."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net or EchoNet(), ["observation"], ["logits", "state_value"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )


def echo_weights(version: int) -> dict[str, torch.Tensor]:
    """Weights of :func:`echo_policy` that name their version."""
    name = next(iter(echo_policy().state_dict()))
    return {name: torch.tensor(float(version))}
