"""From whatever the user gave to a group of environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hts_torchrl.envs.group import CreateEnv, EnvFactory, EnvGroup, called
from hts_torchrl.envs.gym import SerialGroup, VectorGroup
from hts_torchrl.errors import ConfigurationError


def make_group(
    create_env_fn: CreateEnv | EnvFactory, indices: Sequence[int], *, render: bool = False
) -> EnvGroup:
    """Make the group of the environments ``indices``, from whatever the user gave.

    Args:
        create_env_fn: an ``EnvFactory``; or a function of the environment's index, or a list with
            one such function for each environment, returning a ``gymnasium.Env``, a TorchRL
            ``EnvBase`` or a vector environment with as many environments as ``indices``.
        indices: global indices of the environments.
        render: whether :meth:`EnvGroup.render` will be called.

    Raises:
        ConfigurationError: if that cannot be made a group.
    """
    if isinstance(create_env_fn, EnvFactory):
        return create_env_fn.group(indices, render=render)
    if isinstance(create_env_fn, Sequence):
        if max(indices) >= len(create_env_fn):
            raise ConfigurationError(
                f"create_env_fn lists {len(create_env_fn)} environments, but environment "
                f"{max(indices)} is wanted: give one function each, or lower num_envs"
            )
        makers = [create_env_fn[index] for index in indices]
    elif callable(create_env_fn):
        makers = [create_env_fn] * len(indices)
    else:
        raise ConfigurationError(
            f"create_env_fn is a {type(create_env_fn).__name__}; a function of the environment's "
            "index, or a list of such functions, is needed"
        )
    first = _make(makers[0], indices[0])
    kinds = {base.__module__.split(".")[0] + "." + base.__name__ for base in type(first).__mro__}
    if "gymnasium.VectorEnv" in kinds:
        return VectorGroup(first, indices)
    rest = [_make(maker, index) for maker, index in zip(makers[1:], indices[1:], strict=True)]
    if "gymnasium.Env" in kinds:
        return SerialGroup([first, *rest], indices)
    if "torchrl.EnvBase" in kinds:
        from hts_torchrl.envs.torchrl import EnvBaseGroup  # noqa: PLC0415 - it imports torch

        return EnvBaseGroup([first, *rest], indices)
    raise ConfigurationError(
        f"create_env_fn returned a {type(first).__name__}; a gymnasium.Env, a gymnasium VectorEnv "
        "or a TorchRL EnvBase is needed"
    )


def _make(maker: Callable[[int], Any], index: int) -> Any:  # noqa: ANN401
    with called("create_env_fn", index):
        return maker(index)
