"""Running means and variances: of what a policy observes, of rewards, and of values.

They are buffers, and so travel with the weights. They change between rounds only, by all that the
finished round holds. Shapes: N environments, T steps of a round; B rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn

from hts_torchrl.compat.torch import of_all_ranks
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.combined import is_image
from hts_torchrl.models.pixel_trunks import PixelConv2d, PixelTrunk
from hts_torchrl.specs import EnvSpec, Key

_MOST = 10.0
_EPSILON = 1e-8


class RunningStatistics(nn.Module):
    """Mean and variance of all rows so far, float64, merged as Chan et al. (1979) merge samples.

    Before the first rows the mean is 0 and the variance 1.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, *chunks: Tensor) -> None:
        """Take note of rows ``[B, *shape]``; those of other ranks too, in the order of the ranks.

        All ranks must call it, and then have the same statistics.

        Args:
            chunks: of rows, merged one after another; the last bits depend on how they are cut.
        """
        moments = []
        for rows in chunks:
            variance, mean = torch.var_mean(rows.double(), dim=0, correction=0)
            count = self.count.new_full((), len(rows))
            moments.append(torch.stack([mean, variance, count.expand_as(mean)]))
        for mean, variance, counts in torch.cat(of_all_ranks(torch.stack(moments))):
            count = counts.flatten()[0]
            total = self.count + count
            delta = mean - self.mean
            squares = self.variance * self.count + variance * count
            squares += delta.square() * self.count * count / total
            self.mean += delta * count / total
            self.variance.copy_(squares / total)
            self.count.copy_(total)

    def deviation(self) -> Tensor:
        """Return the standard deviation, float32."""
        return (self.variance + _EPSILON).sqrt().float()

    def normalized(self, rows: Tensor) -> Tensor:
        """Return rows with mean 0 and variance 1, float32, cut off at 10 deviations."""
        centred = rows.float() - self.mean.float()
        return _cut_off(centred / self.deviation())

    def scaled(self, rows: Tensor) -> Tensor:
        """Return rows with variance 1 and the mean they have, cut off at 10 deviations."""
        return _cut_off(rows / self.deviation())

    def restored(self, normalized: Tensor) -> Tensor:
        """Return the rows whose :meth:`normalized` these are."""
        return normalized * self.deviation() + self.mean.float()


def _cut_off(rows: Tensor) -> Tensor:
    """Return rows cut off at 10 deviations; infinity becomes NaN, which the gradients show."""
    return rows.clamp(-_MOST, _MOST).add_(rows, alpha=0)


class ObservationNormalizer(TensorDictModuleBase):
    """Normalises observations: those of floats element by element, in their place.

    An image that a :class:`~hts_torchrl.models.pixel_trunks.PixelTrunk` reads is normalised by one
    mean and one deviation of all its pixels, within the trunk's first convolution. Its statistics
    are of the last step of each round.

    Raises:
        ConfigurationError: if there is nothing to normalise.
    """

    def __init__(self, spec: EnvSpec, policy: nn.Module) -> None:
        super().__init__()
        shapes = {
            key: array.shape
            for key, array in spec.observations.items()
            if array.dtype.kind == "f" and key != spec.action_mask
        }
        self._images = [
            (key, _statistics_of_pixels(trunk)) for key, trunk in pixel_trunks(policy, spec)
        ]
        if not (shapes or self._images):
            seen = ", ".join(f"{key!r} {array}" for key, array in spec.observations.items())
            raise ConfigurationError(
                f"normalize_observation=true, but there is nothing to normalise ({seen}): floats "
                "are, and images that a network of this package reads"
            )
        self.in_keys = self.out_keys = list(shapes)
        self.statistics = nn.ModuleList(RunningStatistics(shape) for shape in shapes.values())

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Replace observations ``[..., *shape]`` by normalised ones."""
        for key, statistics in self._pairs():
            tensordict.set(key, statistics.normalized(tensordict.get(key)))
        return tensordict

    def of(self, inputs: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Return inputs by key, with normalised observations."""
        return {**inputs, **{key: each.normalized(inputs[key]) for key, each in self._pairs()}}

    def update(self, *chunks: TensorDictBase) -> None:
        """Take note of a finished round, in chunks of its environments, ``[N, T]`` each."""
        for key, statistics in self._pairs():
            statistics.update(*(chunk[key].flatten(0, 1) for chunk in chunks))
        for key, statistics in self._images:
            statistics.update(*(chunk[key][:, -1].flatten() for chunk in chunks))

    def _pairs(self) -> list[tuple[Key, RunningStatistics]]:
        each = cast("list[RunningStatistics]", list(self.statistics))
        return list(zip(self.in_keys, each, strict=True))


def _statistics_of_pixels(trunk: PixelTrunk) -> RunningStatistics:
    """Return the statistics of a trunk's first convolution, which begin at pixels from 0 to 255."""
    first = next(module for module in trunk.modules() if isinstance(module, PixelConv2d))
    if first.statistics is None:
        statistics = RunningStatistics()
        statistics.variance.fill_(255.0**2)
        first.register_module("statistics", statistics)
    return cast("RunningStatistics", first.statistics)


class NormalizedPolicy(TensorDictSequential):
    """A policy with normalised observations, as ``data.normalize_observation`` trains it.

    Args:
        policy: a TensorDict policy, which reads the normalised observations.
        spec: of the environment.

    Raises:
        ConfigurationError: if there is nothing to normalise.
    """

    def __init__(self, policy: TensorDictModuleBase, spec: EnvSpec) -> None:
        super().__init__(ObservationNormalizer(spec, policy), policy)

    @property
    def normalizer(self) -> ObservationNormalizer:
        """What stands before the policy."""
        return cast("ObservationNormalizer", self.module[0])

    @property
    def policy(self) -> TensorDictModuleBase:
        """The policy itself."""
        return cast("TensorDictModuleBase", self.module[1])


def pixel_trunks(policy: nn.Module, spec: EnvSpec) -> list[tuple[Key, PixelTrunk]]:
    """Return the images that a policy's modules read with this package's trunks, and these.

    Raises:
        ConfigurationError: if a module has not one trunk for each image.
    """
    found: list[tuple[Key, PixelTrunk]] = []
    for module in policy.modules():
        if not isinstance(module, TensorDictModule) or isinstance(module, TensorDictSequential):
            continue
        trunks = [each for each in module.modules() if isinstance(each, PixelTrunk)]
        seen = spec.observations
        images = [key for key in module.in_keys if key in seen and is_image(seen[key])]
        if trunks and len(trunks) != len(images):
            raise ConfigurationError(
                f"normalize_observation=true: a module with {len(trunks)} trunks of images reads "
                f"{len(images)} images ({images}); one trunk for each is needed"
            )
        found += zip(images, trunks, strict=False)
    return found
