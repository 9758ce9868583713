"""From a distribution and a draw to an action, within its bounds.

The draw belongs to the environment, so neither the order of requests nor the batch around a row
decides anything, and no process-global state (generator, exploration type) is read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias, TypeVar

import torch
from tensordict import unravel_key
from tensordict.nn import OneHotCategorical as TensorDictOneHotCategorical
from tensordict.nn import ProbabilisticTensorDictModule
from torch import Tensor
from torch import distributions as d
from torch.nn.functional import one_hot
from torchrl.data import Bounded, TensorSpec
from torchrl.modules import (
    MaskedCategorical,
    MaskedOneHotCategorical,
    OneHotCategorical,
    SafeProbabilisticModule,
    TanhNormal,
)

from hts_torchrl.models.distributions import ChoicesAndNumbers
from hts_torchrl.specs import Key

Result = TypeVar("Result")
RowDistribution: TypeAlias = Callable[[int], d.Distribution]

ONE_HOT = (
    d.OneHotCategorical,
    OneHotCategorical,
    MaskedOneHotCategorical,
    TensorDictOneHotCategorical,
)
"""All but the first are kinds of ``d.Categorical``, whose actions are numbers."""
_KNOWN = {
    (kind.sample, kind.rsample)
    for kind in (
        *ONE_HOT,
        d.OneHotCategoricalStraightThrough,
        d.Categorical,
        MaskedCategorical,
        d.Normal,
        d.Independent,
        d.TransformedDistribution,
        TanhNormal,
        ChoicesAndNumbers,
    )
}
"""How the distributions sample that draws decide; a subclass with methods of its own is another."""


def sample(dist: d.Distribution, draws: Tensor, of_row: RowDistribution | None = None) -> Tensor:
    """Return the action ``[B, *event]`` that each row's draw decides.

    Categorical actions invert the cumulative distribution by a uniform draw; Gaussian ones
    (squashed or not) scale and shift a normal draw. Any other distribution, and a subclass of these
    that samples by methods of its own, samples row by row from a generator seeded by the row's
    draw, which is slower.

    Args:
        dist: batch of B distributions.
        draws: float64 ``[B, K]``, K numbers for each action: uniform in (0, 1), or standard normal
            for continuous actions; for choices and numbers together first these, then those.
        of_row: the distribution of one row alone, batch size 1; needed for "any other" only.

    Raises:
        NotImplementedError: for "any other" distribution without ``of_row``.
    """
    action = decided(dist, draws)
    if action is not None:
        return action
    if of_row is None:
        raise NotImplementedError(f"sampling from {type(dist).__name__} by draw")

    def sampled(row: int) -> Tensor:
        dist = of_row(row)
        return dist.rsample() if dist.has_rsample else dist.sample()  # as TorchRL

    action = torch.cat(by_row(draws, sampled))
    return action.long() if isinstance(dist, ONE_HOT) else action


def decided(dist: d.Distribution, draws: Tensor) -> Tensor | None:
    """Return the actions that draws ``[B, K]`` decide for all rows at once, as :func:`sample` says.

    None for "any other" distribution, at whatever depth.
    """
    if (type(dist).sample, type(dist).rsample) not in _KNOWN or numbers_its_choices(dist):
        return None
    match dist:
        case _ if isinstance(dist, ONE_HOT):
            index = _choose(dist.probs, draws)
            return None if index is None else one_hot(index, dist.probs.shape[-1])
        case d.Categorical():
            return _choose(dist.probs, draws)
        case ChoicesAndNumbers():
            uniform, normal = torch.split(draws, [dist.num_choices, dist.num_numbers], -1)
            return dist.joined(sample(dist.choices, uniform), sample(dist.numbers, normal))
        case d.TransformedDistribution():
            base = decided(dist.base_dist, draws)
            if base is None:
                return None
            action = d.ComposeTransform(dist.transforms)(base)
            return action if action.is_floating_point() == base.is_floating_point() else None
        case d.Independent():
            return decided(dist.base_dist, draws)
        case d.Normal():
            own = _one_each(draws, dist.loc.shape)
            return None if own is None else dist.loc + dist.scale * own.to(dist.loc.dtype)
    return None


def numbers_its_choices(dist: d.Distribution) -> bool:
    """Return whether a masked distribution was given ``indices``: its places are no actions."""
    try:
        return isinstance(dist, MaskedCategorical) and dist.mask is None
    except ValueError:  # torchrl's answer where it has indices in place of a mask
        return True


def _choose(probs: Tensor, draws: Tensor) -> Tensor | None:
    """Return the first choice whose cumulative probability is above the draw, ``[B, ...]``."""
    own = _one_each(draws, probs.shape[:-1])
    if own is None:
        return None
    values = probs.double()
    cumulative = _sums_of_first(values) if values.is_cuda else values.cumsum(-1)
    threshold = own.unsqueeze(-1) * cumulative[..., -1:]
    return (cumulative <= threshold).sum(-1).clamp_(max=probs.shape[-1] - 1)


def _one_each(draws: Tensor, shape: torch.Size) -> Tensor | None:
    """Return a draw for each of independent parts ``[B, ...]``; None if there are not as many."""
    return draws.reshape(shape) if draws.numel() == shape.numel() else None


class Projection:
    """Clamps numbers to the bounds of a module's spec, if it is ``safe``, as TorchRL does.

    Choices are in their spec already. A log-probability stays that of the sampled action.
    """

    def __init__(self, head: ProbabilisticTensorDictModule, device: torch.device) -> None:
        self._bounds: dict[Key, tuple[Tensor, Tensor]] = {
            key: (spec.space.low.to(device), spec.space.high.to(device))
            for key, spec in specs_of(head).items()
            if isinstance(spec, Bounded)
        }

    def __call__(self, actions: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Return actions ``[B, ...]`` by key, those out of bounds at the next bound."""
        projected = {}
        for key, (low, high) in self._bounds.items():
            projected[key] = torch.clamp(actions[key], low, high).to(actions[key].dtype)
        return actions | projected


def specs_of(head: ProbabilisticTensorDictModule) -> dict[Key, TensorSpec]:
    """Return the specs into which a module projects; none, if it is not ``safe``."""
    if not isinstance(head, SafeProbabilisticModule) or not head.safe:
        return {}
    given = {key: head.spec[key] for key in map(unravel_key, head.dist_sample_keys)}
    return {key: spec for key, spec in given.items() if spec is not None}


def _sums_of_first(values: Tensor) -> Tensor:
    """Return what ``cumsum(-1)`` does, of values that are not negative, for a GPU.

    torch has no deterministic ``cumsum`` there, and refuses it where one is asked for.
    """
    count = values.shape[-1]
    later = torch.ones(count, count, dtype=torch.bool, device=values.device).triu(1)
    return values.unsqueeze(-2).masked_fill(later, 0.0).sum(-1)


def by_row(draws: Tensor, of_row: Callable[[int], Result]) -> list[Result]:
    """Call a function with each row's number, after the row's draw has seeded torch's generators.

    The first of a row's draws ``[B, K]``, float64, is its seed.
    """
    results = []
    with borrowed_generators(draws.device):
        for row, draw in enumerate(draws):
            seed_generators(draws.device, int(draw[:1].view(torch.int64)))
            results.append(of_row(row))
    return results


def borrowed_generators(device: torch.device) -> AbstractContextManager[None]:
    """Put the generators that :func:`seed_generators` seeds back afterwards."""
    gpus = [device.index or 0] if device.type == "cuda" else []
    return torch.random.fork_rng(gpus, device_type="cuda")


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed torch's global generators: the CPU's, and the one of ``device`` if that is a GPU."""
    # These alone: torch.manual_seed takes 100 times longer and seeds every device.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
