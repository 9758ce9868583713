"""Several actions of a step as one array, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.specs import ActionSpec, Array, ArraySpec, Key

_MOST_CHOICES = 2**24
"""Up to which float32 holds every integer."""


def joined(parts: Mapping[Key, ActionSpec]) -> ActionSpec:
    """Return the action that has all choices of the parts first, and then all of their numbers.

    It is ``multi_discrete`` without numbers, ``continuous`` without choices, and else ``mixed``.

    Args:
        parts: at least one, by the environment's names, each of another kind than ``mixed``.

    Raises:
        ConfigurationError: if there is no part, or more choices than can stand beside numbers.
    """
    if not parts:
        raise ConfigurationError("the action has no parts")
    own = dict(parts)
    sizes = tuple(size for part in own.values() for size in part.sizes)
    numbers = [part for part in own.values() if not part.sizes]
    if not numbers:
        array = ArraySpec((len(sizes),), np.dtype(np.int64))
        return ActionSpec("multi_discrete", array, sizes, parts=own)
    if max(sizes, default=0) > _MOST_CHOICES:
        raise ConfigurationError(
            f"the action has a choice of {max(sizes)} beside numbers; at most {_MOST_CHOICES} is "
            "possible"
        )
    low = np.concatenate([_bound(part, part.low, -np.inf) for part in numbers])
    high = np.concatenate([_bound(part, part.high, np.inf) for part in numbers])
    array = ArraySpec((len(sizes) + len(low),), np.dtype(np.float32))
    return ActionSpec("mixed" if sizes else "continuous", array, sizes, low, high, parts=own)


def _bound(part: ActionSpec, bound: Array | None, infinity: float) -> Array:
    given = infinity if bound is None else bound
    return np.broadcast_to(given, part.array.shape).reshape(-1).astype(np.float32)


def columns(parts: Sequence[ActionSpec]) -> Iterator[slice]:
    """Yield where each part stands in the joined action, and in what is drawn for it."""
    choice, number = 0, sum(len(part.sizes) for part in parts)
    for part in parts:
        if part.sizes:
            first, choice = choice, choice + len(part.sizes)
            yield slice(first, choice)
        else:
            first, number = number, number + int(np.prod(part.array.shape))
            yield slice(first, number)


def split(action: Array, parts: Sequence[ActionSpec]) -> Iterator[Array]:
    """Yield each part's own action, ``[..., *shape]``, in memory of its own."""
    batch = action.shape[:-1]
    for part, place in zip(parts, columns(parts), strict=True):
        taken = action[..., place]
        if part.kind == "one_hot":
            taken = taken == np.arange(part.sizes[0])
        yield taken.reshape((*batch, *part.array.shape)).astype(part.array.dtype)
