"""The gradient at the behaviour weights, applied to the newest ones.

With theta_j the weights after j updates, a round that was collected by theta_{j-1} gives
``theta_{j+1} = theta_j + step(grad J(theta_{j-1}))``: an on-policy gradient, one step late
(equation 3 of the HTS-RL paper, Liu et al., 2020).

Prior work: Cleanba (Huang et al., 2023, arXiv 2310.00036) lags by the same one update, but takes
the gradient at the newest weights, as PPO's ``ratio`` does here, and promises no bits. PPO's
``displacement`` is the update of outer-PPO (Tan et al., 2024, arXiv 2411.00666) with an outer
learning rate of 1 and a delay of one round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from hts_torchrl.compat.torch import copy_all
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.policy.normalization import RunningStatistics


class DelayedGradient:
    """Puts behaviour weights into a module for a while, by value.

    The module's buffers that belong to its weights can be exchanged in the same way.

    Values are exchanged and never the parameters themselves: optimisers, distributed hooks and
    compiled graphs refer to the parameters.

    One round of A2C; PPO's ``displacement`` puts its optimiser steps between ``load_behaviour``
    and ``add_displacement`` instead::

        delayed.begin_round()           # parameters hold theta_j
        delayed.load_behaviour()        # theta_{j-1}: forward and backward
        delayed.restore_newest()        # theta_j: the optimiser steps to theta_{j+1}
        delayed.end_round()             # theta_j becomes the behaviour of the next round
        delayed.note_published()        # theta_{j+1} acts in the round after that
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters: list[Tensor] = list(parameters)
        self.behaviour: list[Tensor] = [p.detach().clone() for p in self.parameters]
        self.newest: list[Tensor] = [p.detach().clone() for p in self.parameters]
        self.acting: list[Tensor] = [p.detach().clone() for p in self.parameters]
        """Theta_j as it was published: a callback may have changed the parameters since."""
        self.holds_behaviour = False
        """Whether the parameters hold theta_{j-1}, or what steps have made of it."""
        self._replaced: list[Tensor] = []
        """What they held before that: theta_j, or what steps and callbacks have made of it."""

    def add(self, parameter: Tensor, behaviour: Tensor) -> None:
        """Take a further tensor, which has not moved since the last round began."""
        self.parameters.append(parameter)
        self.behaviour.append(behaviour.detach().to(parameter.device, copy=True))
        self.newest.append(parameter.detach().clone())
        self.acting.append(parameter.detach().clone())
        if self.holds_behaviour:
            self._replaced.append(parameter.detach().clone())

    @torch.no_grad()
    def set_behaviour(self, weights: Iterable[Tensor]) -> None:
        """Take theta_{j-1} from a run that was stopped, in the order of the parameters."""
        for behaviour, given in zip(self.behaviour, weights, strict=True):
            behaviour.copy_(given)

    @torch.no_grad()
    def begin_round(self) -> None:
        """Remember the newest weights, theta_j, which the parameters hold."""
        _copy(self.newest, self.parameters)
        self.holds_behaviour = False

    @torch.no_grad()
    def load_behaviour(self) -> None:
        """Put theta_{j-1} into the parameters."""
        if not self.holds_behaviour:
            self._replaced = [p.detach().clone() for p in self.parameters]
        _copy(self.parameters, self.behaviour)
        self._have_changed(holds_behaviour=True)

    @torch.no_grad()
    def restore_newest(self) -> None:
        """Put back what the parameters held: theta_j, or what was made of it; gradients stay."""
        _copy(self.parameters, self._replaced)
        self._have_changed(holds_behaviour=False)

    @torch.no_grad()
    def add_displacement(self) -> None:
        """Turn parameters that moved from theta_{j-1} into theta_j plus that displacement."""
        for parameter, behaviour, newest in zip(
            self.parameters, self.behaviour, self.newest, strict=True
        ):
            parameter.sub_(behaviour).add_(newest)
        self._have_changed(holds_behaviour=False)

    def _have_changed(self, *, holds_behaviour: bool) -> None:
        self.holds_behaviour = holds_behaviour
        if not holds_behaviour:
            self._replaced = []
        # Autocast keeps a parameter's cast to the end of its region, whatever the value is by then.
        torch.clear_autocast_cache()

    def end_round(self) -> None:
        """Make theta_j, as it was published, the behaviour weights of the next round."""
        self.behaviour, self.acting = self.acting, self.behaviour

    @torch.no_grad()
    def note_published(self) -> None:
        """Remember what the parameters hold, which the actors are given."""
        _copy(self.acting, self.parameters)


class DelayedWeights:
    """The behaviour weights and the newest weights of a policy, through all rounds of a run.

    Weights are the parameters that are trained and the buffers of the ``state_dict``, such as the
    statistics of a BatchNorm. A final observation is valued with both from the behaviour weights. A
    gradient is taken at the behaviour parameters, with the statistics by which observations were
    normalised then; other buffers move on.
    """

    def __init__(self, policy: nn.Module) -> None:
        kept = policy.state_dict()
        trained: dict[str, Tensor] = {
            name: p for name, p in policy.named_parameters() if p.requires_grad
        }
        buffers = {name: buffer for name, buffer in policy.named_buffers() if name in kept}
        of_inputs = {
            f"{path}.{name}"
            for path, module in policy.named_modules()
            if isinstance(module, RunningStatistics)
            for name, _ in module.named_buffers()
        }
        trained |= {name: buffers.pop(name) for name in list(buffers) if name in of_inputs}
        self._frozen = {n: p for n, p in policy.named_parameters() if n not in trained}
        self.parameters = DelayedGradient(trained.values())
        self._statistics = DelayedGradient(buffers.values())
        self._parameter_names, self._buffer_names = list(trained), list(buffers)
        self._counts = {name for name in of_inputs if name.endswith(".count")}
        self._frozen_behaviour: dict[str, Tensor] = {}
        """Of a run that goes on, where they may have moved before, until its first round ends."""
        self.published = False
        """Whether it was noted what actors have."""
        self._without_statistics: int | None = None
        """Version of the weights that had none; -1 if all have."""
        self._policy = policy

    def lack_statistics(self, version: int) -> bool:
        """Return whether weights that collected a round had seen nothing to normalise by.

        Only those of a run's first round may not have.

        Args:
            version: of the weights; the first call is before the first round begins.
        """
        if self._without_statistics is None:
            behaviour = zip(self._parameter_names, self.parameters.behaviour, strict=True)
            known = all(value > 0 for name, value in behaviour if name in self._counts)
            self._without_statistics = -1 if known else version
        return version == self._without_statistics

    def set_behaviour(self, weights: Mapping[str, Tensor]) -> None:
        """Take the weights with which a resumed run acts, by the policy's own names."""
        self.add_unfrozen()
        self.parameters.set_behaviour(weights[name] for name in self._parameter_names)
        self.statistics.set_behaviour(weights[name] for name in self._buffer_names)
        self._frozen_behaviour = {name: weights[name] for name in self._frozen}

    def begin_round(self) -> None:
        """Remember the newest weights, and those of parameters that are trained from now on.

        Raises:
            ConfigurationError: if a module or a parameter was put in another's place.
        """
        known = {id(each) for each in (*self.parameters.parameters, *self._frozen.values())}
        for name, parameter in self._policy.named_parameters():
            if id(parameter) not in known:
                raise ConfigurationError(
                    f"the policy's {name} is another parameter than when the run began, and the "
                    "optimizer does not have it: change its values in place, as "
                    "reset_parameters() and copy_() do"
                )
        self.add_unfrozen()
        self.parameters.begin_round()
        self.statistics.begin_round()

    def add_unfrozen(self) -> dict[str, Parameter]:
        """Take the parameters that are trained from now on, and have not moved in this round."""
        unfrozen = {name: p for name, p in self._frozen.items() if p.requires_grad}
        for name, parameter in unfrozen.items():
            del self._frozen[name]
            self.parameters.add(parameter, self._frozen_behaviour.get(name, parameter))
            self._parameter_names.append(name)
        return unfrozen

    @property
    def statistics(self) -> DelayedGradient:
        """Of the buffers that are there now: a module may have put others in their place."""
        self._statistics.parameters = [self._policy.get_buffer(name) for name in self._buffer_names]
        return self._statistics

    @contextlib.contextmanager
    def behaviour(self) -> Iterator[None]:
        """Put all behaviour weights into the policy for a while; parameters may be there before."""
        held = self.parameters.holds_behaviour
        if not held:
            self.parameters.load_behaviour()
        self.statistics.load_behaviour()
        try:
            yield
        finally:
            if not held:
                self.parameters.restore_newest()
            self.statistics.restore_newest()

    def newest(self) -> dict[str, Tensor]:
        """Return copies of the weights at the start of the round, by all of the policy's names.

        Modules may share a weight, and a checkpoint has it by each of its names.
        """
        newest = {
            id(now): before
            for each in (self.parameters, self.statistics)
            for now, before in zip(each.parameters, each.newest, strict=True)
        }
        kept = self._policy.state_dict(keep_vars=True)
        return {name: newest[id(now)].clone() for name, now in kept.items() if id(now) in newest}

    def moved_buffers(self) -> list[str]:
        """Return the names of the buffers that are not as at the start of the round."""
        values = self.statistics
        each = zip(self._buffer_names, values.parameters, values.newest, strict=True)
        return [name for name, now, before in each if not torch.equal(now, before)]

    def note_published(self) -> None:
        """Remember the weights that actors are given, for the round that starts next."""
        self.parameters.note_published()
        self.statistics.note_published()
        self.published = True

    def end_round(self, *, broadcast: bool) -> None:
        """Make the weights that act in the running round the behaviour weights of the next one.

        Args:
            broadcast: whether ranks have statistics of their own: those of rank 0, which are the
                ones that a checkpoint has, become those of all.
        """
        self.parameters.end_round()
        self.statistics.end_round()
        self._frozen_behaviour = {}
        if broadcast:
            for buffer in self.statistics.parameters:
                torch.distributed.broadcast(buffer, 0)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:  # torch refuses to copy nothing
        copy_all(targets, sources)
