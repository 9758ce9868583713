"""From a distribution to its greedy action."""

from __future__ import annotations

import contextlib

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType
from tensordict.nn.probabilistic import DETERMINISTIC_REGISTER
from torch import Tensor
from torch import distributions as d
from torch.nn.functional import one_hot

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.policy.composite import SeveralActions
from hts_torchrl.policy.sampling import ONE_HOT, numbers_its_choices


def mode(dist: d.Distribution) -> Tensor | TensorDictBase:
    """Return the greedy action: what TensorDict's ``InteractionType.DETERMINISTIC`` asks for.

    That is the distribution's ``deterministic_sample`` if it has one, and else its mean or its
    mode. A transformed distribution without these transforms its base's. Of several actions it is a
    TensorDict ``[B]``, by their keys.

    Raises:
        ConfigurationError: if there is none.
    """
    if isinstance(dist, SeveralActions):
        return TensorDict({key: mode(part) for key, part in dist.parts.items()}, dist.batch_shape)
    if isinstance(dist, ONE_HOT) and not _has_own_mode(dist):
        # The libraries' own may have several ones.
        return one_hot(dist.probs.argmax(-1), dist.probs.shape[-1])
    if hasattr(dist, "deterministic_sample"):
        return torch.as_tensor(dist.deterministic_sample)
    names = ("mean", "mode") if _answers_mean(dist) else ("mode", "mean")
    for name in names:
        with contextlib.suppress(AttributeError, NotImplementedError):
            return torch.as_tensor(getattr(dist, name))
    if isinstance(dist, d.TransformedDistribution):
        return torch.as_tensor(d.ComposeTransform(dist.transforms)(mode(dist.base_dist)))
    raise ConfigurationError(
        f"a {type(dist).__name__} has no greedy action: it needs a deterministic_sample, as "
        "torchrl's distributions have it"
    )


def _has_own_mode(dist: d.Distribution) -> bool:
    """Return whether a one-hot distribution's own greedy action counts: it is no library's."""
    names = ("deterministic_sample", "mode")
    owners = (kind for kind in type(dist).__mro__ if any(name in vars(kind) for name in names))
    library = next(owners).__module__.partition(".")[0]
    return library not in ("torch", "torchrl", "tensordict") or numbers_its_choices(dist)


def _answers_mean(dist: d.Distribution) -> bool:
    """Return whether TensorDict takes the mean, of what has no ``deterministic_sample``."""
    kind = type(dist.base_dist if isinstance(dist, d.Independent) else dist)
    if kind in DETERMINISTIC_REGISTER:
        return bool(DETERMINISTIC_REGISTER[kind] == InteractionType.MEAN)
    try:
        return isinstance(dist.support, type(d.constraints.real))
    except NotImplementedError:
        return True
