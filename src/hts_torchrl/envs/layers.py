"""What an environment is made of: wrappers and transforms, told by name without their imports."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from hts_torchrl.compat import TORCHRL_WRAPPED

_INSIDE = ("env", TORCHRL_WRAPPED, "base_env", "transform")
_STATISTICS = (
    "gymnasium.NormalizeObservation",
    "gymnasium.NormalizeReward",
    "torchrl.VecNorm",
    "torchrl.VecNormV2",
)


def layers_of(env: Any) -> Iterator[Any]:  # noqa: ANN401
    """Yield an environment, and each wrapper, transform and environment inside it.

    What a vector environment keeps in processes of its own is not seen, nor what is in a batch of
    TorchRL's, which makes its environments later.
    """
    seen: set[int] = set()
    rest = [env]
    while rest:
        layer = rest.pop()
        if layer is None or id(layer) in seen:
            continue
        seen.add(id(layer))
        yield layer
        if is_a(layer, "torchrl.BatchedEnvBase"):
            continue
        if is_a(layer, "torchrl.TransformedEnv"):
            # What it lacks it asks of the one inside, and a ParallelEnv of its workers, who end
            # where they lack it, too.
            rest += [layer.base_env, layer.transform]
            continue
        rest += [getattr(layer, name, None) for name in _INSIDE]
        for name in ("envs", "transforms"):
            several = getattr(layer, name, None)
            rest += several if isinstance(several, Iterable) else [several]


def warn_of_statistics(env: Any) -> None:  # noqa: ANN401
    """Warn the caller's caller of statistics that no environment shares with another."""
    if names := running_statistics(env):
        warnings.warn(
            f"running statistics in {' and '.join(names)}: every environment has its own, an "
            "evaluation begins them anew, and a resumed run with them cannot play its games again "
            "(resume_envs=False begins new ones). HTSDataModule(normalize_observation=True, "
            "normalize_reward=True) has common ones; or use fixed ones (torchrl's ObservationNorm "
            "with loc and scale, gymnasium.wrappers.TransformObservation and TransformReward)",
            stacklevel=5,  # a method, __init__ of a class that takes settings, and its caller
        )


def is_a(layer: Any, name: str) -> bool:  # noqa: ANN401
    """Return whether an object is of a class, such as ``torchrl.EnvBase``, of some library."""
    library, _, kind = name.partition(".")
    return any(
        base.__name__ == kind and base.__module__.partition(".")[0] == library
        for base in type(layer).__mro__
    )


def running_statistics(env: Any) -> list[str]:  # noqa: ANN401
    """Name the layers that normalise by running statistics of their own, which are not frozen."""
    return sorted(
        {
            type(layer).__name__
            for layer in layers_of(env)
            if any(is_a(layer, name) for name in _STATISTICS)
            and getattr(layer, "update_running_mean", True)
            and not getattr(layer, "frozen", False)
        }
    )
