"""Actions under keys of their own: policies with TensorDict's ``CompositeDistribution``.

Environments take one vector (:func:`~hts_torchrl.envs.joined_action.joined`), whose parts such a
policy writes apart. Shapes: B rows; K elements of the vector.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase, unravel_key
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    set_composite_lp_aggregate,
)
from torch import Tensor
from torch import distributions as d

from hts_torchrl.envs.joined_action import columns, split
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.distributions import entropy_of
from hts_torchrl.specs import ActionSpec, Key

VECTOR: Key = ("collector", "action")
"""Where a batch has the vector that environments took, beside the parts that a policy wrote."""


class SeveralActions(d.Distribution):
    """A ``CompositeDistribution`` whose actions are a TensorDict ``[B]``, with one number a row.

    Log-probability and entropy are sums over the parts, ``[B]``, whichever value tensordict's
    ``composite_lp_aggregate`` has. An entropy without closed form is estimated by one sample.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, composite: CompositeDistribution) -> None:
        self._composite = composite
        self.parts: dict[Key, d.Distribution] = composite.dists
        super().__init__(composite.batch_shape, validate_args=False)

    def log_prob(self, action: TensorDictBase) -> Tensor:
        """Return the sum over the parts."""
        with set_composite_lp_aggregate(True):
            return torch.as_tensor(self._composite.log_prob(action))

    def entropy(self) -> Tensor:
        """Return the sum over the parts."""
        entropies = [entropy_of(part) for part in self.parts.values()]
        return torch.stack([e.reshape(*self.batch_shape, -1).sum(-1) for e in entropies]).sum(0)

    def __repr__(self) -> str:
        """Name the parts."""
        return repr(self._composite)


def distribution_of(
    head: ProbabilisticTensorDictModule, parameters: TensorDictBase
) -> d.Distribution:
    """Return what a probabilistic module makes of parameters ``[B]``: B distributions."""
    distribution: d.Distribution = head.get_dist(parameters)
    if isinstance(distribution, CompositeDistribution):
        return SeveralActions(distribution)
    return distribution


class ActionParts:
    """The parts of an action by the keys to which a policy writes them; one, if it is whole.

    A part that the environment names ``gear`` may be written to ``("action", "gear")``, too.

    Raises:
        ConfigurationError: if the policy writes to other keys.
    """

    def __init__(self, head: ProbabilisticTensorDictModule, action: ActionSpec) -> None:
        written = list(map(unravel_key, head.dist_sample_keys))
        own = dict(action.parts)
        nested: dict[Key, ActionSpec] = {
            unravel_key(("action", key)): part for key, part in own.items()
        }
        forms: list[dict[Key, ActionSpec]] = [{action.key: action}, own, nested]
        fitting = [form for form in forms if form.keys() == set(written)]
        if not fitting:
            needed = " or ".join(" and ".join(map(repr, form)) for form in forms if form)
            raise ConfigurationError(
                f"the policy writes its action to {' and '.join(map(repr, written))}; {needed} is "
                "needed"
            )
        self.specs = fitting[0]
        self._action = action
        self.is_whole = self.specs is forms[0]
        places = [slice(None)] if self.is_whole else columns([*self.specs.values()])
        self.places = dict(zip(self.specs, places, strict=True))
        """Where each part stands in the vector, and among its draws."""

    def joined(self, parts: dict[Key, Tensor]) -> Tensor:
        """Return the vector ``[B, K]`` of parts ``[B, ...]``, of an action that is not whole."""
        dtype = torch.int64 if self._action.kind == "multi_discrete" else torch.float32
        flat = {
            key: parts[key].argmax(-1) if spec.kind == "one_hot" else parts[key]
            for key, spec in self.specs.items()
        }
        order = sorted(self.specs, key=lambda key: self.places[key].start)
        return torch.cat([flat[key].reshape(len(flat[key]), -1).to(dtype) for key in order], -1)

    def apart(self, vector: Tensor) -> dict[Key, Tensor]:
        """Return the parts ``[B, ...]`` of a vector ``[B, K]``."""
        if self.is_whole:
            return {self._action.key: vector}
        arrays = split(vector.cpu().numpy(), [*self.specs.values()])
        return {
            key: torch.from_numpy(array).to(vector.device)
            for key, array in zip(self.specs, arrays, strict=True)
        }
