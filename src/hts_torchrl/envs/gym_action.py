"""From an answer of the policy to what a Gymnasium environment accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np

from hts_torchrl.envs.joined_action import split
from hts_torchrl.envs.spaces import action_of, leaves_of
from hts_torchrl.specs import ActionSpec, Array


def action_maker(spec: ActionSpec, space: gymnasium.Space[Any]) -> Callable[[Array], Any]:
    """Return what turns an answer of the policy into what the environment accepts.

    Args:
        spec: of the action.
        space: the environment's own; an answer to a ``Dict`` or ``Tuple`` has all parts in one.
    """
    if not isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple):
        return lambda action: env_action(spec, action, space)
    leaves = [*leaves_of(space).values()]
    parts = [action_of(leaf) for leaf in leaves]

    def nested(action: Array) -> Any:  # noqa: ANN401
        arrays = zip(parts, split(action, parts), leaves, strict=True)
        return _in_form_of(space, iter([env_action(*each) for each in arrays]))

    return nested


def _in_form_of(space: gymnasium.Space[Any], leaves: Iterator[Any]) -> Any:  # noqa: ANN401
    if isinstance(space, gymnasium.spaces.Dict):
        return {name: _in_form_of(part, leaves) for name, part in space.spaces.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(_in_form_of(part, leaves) for part in space.spaces)
    return next(leaves)


def env_action(spec: ActionSpec, action: Array, space: gymnasium.Space[Any]) -> Any:  # noqa: ANN401
    """Turn an answer of the policy into what the environment accepts, in memory of its own.

    Choices have the shape of the space, and begin where it begins. Continuous actions are clipped
    to the bounds, as in Stable-Baselines3, and have the dtype of the space; the storage keeps the
    action that was drawn.

    Args:
        spec: of the action.
        action: the answer for one environment, or those for a batch.
        space: of one environment.
    """
    if spec.kind == "continuous":
        low, high = space.low, space.high  # type: ignore[attr-defined] # of a Box
        return np.asarray(np.clip(action, low, high), dtype=space.dtype)
    if space.shape != spec.array.shape:
        batch = action.shape[: action.ndim - len(spec.array.shape)]
        action = action.reshape((*batch, *space.shape))  # type: ignore[misc] # it has a shape
    if isinstance(space, gymnasium.spaces.Box):
        return np.asarray(action + space.low.astype(np.int64), dtype=space.dtype)
    chosen = action + getattr(space, "start", 0)
    return chosen if chosen.dtype == space.dtype else chosen.astype(space.dtype)
