"""From answers of the policy to actions of a Gymnasium space."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from hts_torchrl.envs.joined_action import split
from hts_torchrl.envs.spaces import action_of, leaves_of
from hts_torchrl.specs import ActionSpec, Array


def action_maker(space: spaces.Space[Any]) -> Callable[[Array], Any]:
    """Return what turns an answer of the policy into what the environment accepts.

    That has memory of its own. Choices have the shape of the space, and begin where it begins.
    Numbers are clipped to the bounds, as in Stable-Baselines3, and have the dtype of the space; the
    storage keeps the action that was sampled.

    Args:
        space: of one environment, which is given one answer, or a batch of them. An answer to a
            ``Dict`` or ``Tuple`` has all parts in one.
    """
    leaves = [*leaves_of(space).values()]
    parts = [action_of(leaf) for leaf in leaves]
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return lambda action: _env_action(parts[0], action, space)

    def nested(action: Array) -> Any:  # noqa: ANN401
        arrays = zip(parts, split(action, parts), leaves, strict=True)
        return _in_form_of(space, iter([_env_action(*each) for each in arrays]))

    return nested


def _in_form_of(space: spaces.Space[Any], leaves: Iterator[Any]) -> Any:  # noqa: ANN401
    if isinstance(space, spaces.Dict):
        return {name: _in_form_of(part, leaves) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_in_form_of(part, leaves) for part in space.spaces)
    return next(leaves)


def _env_action(spec: ActionSpec, action: Array, space: spaces.Space[Any]) -> Any:  # noqa: ANN401
    if spec.kind == "continuous":
        low, high = space.low, space.high  # type: ignore[attr-defined] # of a Box
        return np.asarray(np.clip(action, low, high), dtype=space.dtype)
    if space.shape != spec.array.shape:
        batch = action.shape[: action.ndim - len(spec.array.shape)]
        action = action.reshape((*batch, *space.shape))  # type: ignore[misc] # it has a shape
    if isinstance(space, spaces.Box):
        return np.asarray(action + space.low.astype(np.int64), dtype=space.dtype)
    chosen = action + getattr(space, "start", 0)
    return chosen if chosen.dtype == space.dtype else chosen.astype(space.dtype)
