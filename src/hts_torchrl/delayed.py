"""The gradient at the behaviour weights, applied to the newest ones.

With theta_j the weights after j updates, a round that was collected by theta_{j-1} gives
``theta_{j+1} = theta_j + step(grad J(theta_{j-1}))``: an on-policy gradient, one step late
(equation 3 of the HTS-RL paper).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class DelayedGradient:
    """Puts behaviour weights into a module for a while, by value.

    The module's buffers that belong to its weights can be exchanged in the same way.

    Values are exchanged and never the parameters themselves: optimisers, distributed hooks and
    compiled graphs hold on to the parameters.

    One round of A2C; PPO's ``displacement`` puts its optimiser steps between ``load_behaviour``
    and ``add_displacement`` instead::

        delayed.begin_round()           # parameters hold theta_j
        delayed.load_behaviour()        # theta_{j-1}: forward and backward
        delayed.restore_newest()        # theta_j: the optimiser steps to theta_{j+1}
        delayed.end_round()             # theta_j becomes the behaviour of the next round
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters: list[Tensor] = list(parameters)
        self.behaviour: list[Tensor] = [p.detach().clone() for p in self.parameters]
        self.newest: list[Tensor] = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def set_behaviour(self, weights: Iterable[Tensor]) -> None:
        """Take theta_{j-1} from a run that was stopped, in the order of the parameters."""
        for behaviour, given in zip(self.behaviour, weights, strict=True):
            behaviour.copy_(given)

    @torch.no_grad()
    def begin_round(self) -> None:
        """Remember the newest weights, theta_j."""
        _copy(self.newest, self.parameters)

    @torch.no_grad()
    def load_behaviour(self) -> None:
        """Put theta_{j-1} into the parameters."""
        _copy(self.parameters, self.behaviour)

    @torch.no_grad()
    def restore_newest(self) -> None:
        """Put theta_j back into the parameters; gradients stay."""
        _copy(self.parameters, self.newest)

    @torch.no_grad()
    def add_displacement(self) -> None:
        """Turn parameters that moved from theta_{j-1} into theta_j plus that displacement."""
        for parameter, behaviour, newest in zip(
            self.parameters, self.behaviour, self.newest, strict=True
        ):
            parameter.sub_(behaviour).add_(newest)

    def end_round(self) -> None:
        """Make theta_j the behaviour weights of the next round."""
        self.behaviour, self.newest = self.newest, self.behaviour


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:  # torch refuses to copy nothing
        torch._foreach_copy_(targets, sources)
