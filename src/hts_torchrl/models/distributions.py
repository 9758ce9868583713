"""The distribution of each kind of action."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict.nn import ProbabilisticTensorDictModule
from torch import Tensor
from torch import distributions as d
from torchrl.modules import IndependentNormal, OneHotCategorical, TanhNormal
from torchrl.modules.distributions.utils import rsample_and_log_prob

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.specs import ActionSpec


class MultiCategorical(d.Independent):  # type: ignore[type-arg]
    """Independent categorical choices of different sizes; actions int64 ``[..., K]``.

    Args:
        logits: ``[..., sum(sizes)]``, the choices side by side.
        sizes: number of categories of each of the K choices.
    """

    def __init__(
        self, logits: Tensor, sizes: Sequence[int], validate_args: bool | None = None
    ) -> None:
        padded = logits.new_full((*logits.shape[:-1], len(sizes), max(sizes)), -torch.inf)
        for choice, part in enumerate(torch.split(logits, list(sizes), -1)):
            padded[..., choice, : part.shape[-1]] = part
        super().__init__(d.Categorical(logits=padded, validate_args=False), 1, validate_args)


class ChoicesAndNumbers(d.Distribution):
    """Independent choices, and Gaussian numbers; actions float32 ``[..., K]``, the choices first.

    Args:
        logits: ``[..., sum(sizes)]``, the choices side by side.
        loc: mean of the numbers, ``[..., C]``.
        scale: their standard deviation.
        sizes: number of categories of each choice.
        validate_args: as torch's distributions take it.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        logits: Tensor,
        loc: Tensor,
        scale: Tensor,
        *,
        sizes: Sequence[int],
        validate_args: bool | None = None,
    ) -> None:
        self.choices = MultiCategorical(logits, sizes, validate_args=False)
        self.numbers = IndependentNormal(loc, scale, validate_args=False)
        self.num_choices, self.num_numbers = len(sizes), loc.shape[-1]
        event = torch.Size([self.num_choices + self.num_numbers])
        super().__init__(loc.shape[:-1], event, validate_args)

    def joined(self, choices: Tensor, numbers: Tensor) -> Tensor:
        """Return the action of both parts."""
        return torch.cat([choices.to(numbers.dtype), numbers], -1)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return actions by torch's generator."""
        shape = torch.Size(sample_shape)
        return self.joined(self.choices.sample(shape), self.numbers.sample(shape))

    def log_prob(self, action: Tensor) -> Tensor:
        """Return the sum over both parts."""
        choices, numbers = torch.split(action, [self.num_choices, self.num_numbers], -1)
        parts = (self.choices, choices.long()), (self.numbers, numbers)
        first, second = (dist.log_prob(part) for dist, part in parts)
        return torch.as_tensor(first + second)

    def entropy(self) -> Tensor:
        """Return the sum over both parts."""
        first, second = (dist.entropy() for dist in (self.choices, self.numbers))
        return torch.as_tensor(first + second)

    @property
    def mode(self) -> Tensor:
        """The most probable category of each choice, and the means."""
        return self.joined(self.choices.mode, self.numbers.mode)

    deterministic_sample = mode
    """The mode, also for TorchRL's collectors."""


@d.register_kl(ChoicesAndNumbers, ChoicesAndNumbers)  # type: ignore[no-untyped-call,untyped-decorator]
def _kl_of_both_parts(one: ChoicesAndNumbers, other: ChoicesAndNumbers) -> Tensor:
    choices = d.kl_divergence(one.choices, other.choices)
    return choices + d.kl_divergence(one.numbers, other.numbers)


def entropy_of(distribution: d.Distribution) -> Tensor:
    """Return entropies of B distributions; without closed form, estimated by one sample each.

    Raises:
        NotImplementedError: if there is no reparametrised sample either.
    """
    with contextlib.suppress(NotImplementedError):
        return distribution.entropy()
    # Not log_prob(rsample()): a squashed sample has lost by rounding what it was made of.
    return torch.as_tensor(-rsample_and_log_prob(distribution)[1])


def parameter_keys(action: ActionSpec) -> list[str]:
    """Return the keys of the parameters of an action's distribution."""
    match action.kind:
        case "continuous":
            return ["loc", "scale"]
        case "mixed":
            return ["logits", "loc", "scale"]
    return ["logits"]


def action_head(action: ActionSpec, *, squash: bool = False) -> ProbabilisticTensorDictModule:
    """Return the module that makes the distribution of an action, for TorchRL's losses too.

    Args:
        action: what the environment accepts.
        squash: whether a continuous action passes through tanh into its bounds.

    Raises:
        ConfigurationError: if there are no bounds between which it could be squashed.
    """
    if squash:
        _require_bounds(action)
    kwargs: dict[str, Any] = {"validate_args": False}
    match action.kind:
        case "discrete":
            distribution: type[d.Distribution] = d.Categorical
        case "one_hot":
            distribution, kwargs = OneHotCategorical, {}
        case "multi_discrete":
            distribution, kwargs["sizes"] = MultiCategorical, action.sizes
        case "mixed":
            distribution, kwargs["sizes"] = ChoicesAndNumbers, action.sizes
        case "continuous" if squash:
            distribution = TanhNormal
            # No buffers: those of a learner's GPU would stay there in an actor's copy.
            low, high = (torch.as_tensor(each, device="cpu") for each in (action.low, action.high))
            kwargs = {"low": low, "high": high, "event_dims": len(action.array.shape)}
        case "continuous":
            distribution, kwargs["event_dim"] = IndependentNormal, len(action.array.shape)
    return ProbabilisticTensorDictModule(
        in_keys=parameter_keys(action),
        out_keys=[action.key],
        distribution_class=distribution,
        distribution_kwargs=kwargs,
        return_log_prob=True,
        default_interaction_type="random",
    )


def _require_bounds(action: ActionSpec) -> None:
    if action.kind != "continuous":
        raise ConfigurationError(
            f"squash=true, but the action is {action.kind}: only continuous actions are squashed"
        )
    low, high = action.low, action.high
    if low is not None and high is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            width = high - low
        if ((width > 0) & (width < np.inf)).all():
            return
    bounds = None if low is None or high is None else (low.tolist(), high.tolist())
    raise ConfigurationError(
        f"squash=true, but the action's bounds are {bounds}: each must be finite, and the lower "
        "one below the upper one; set squash=false, or bound the environment's action space"
    )
