"""From whatever the user gave to a group of environments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from typing import Any

import cloudpickle
from gymnasium.wrappers import TimeLimit

from hts_torchrl.config import CollectorSettings
from hts_torchrl.envs.adapter import AdapterGroup, GymAdapter, SerialGroup
from hts_torchrl.envs.group import (
    CreateEnv,
    EnvFactory,
    EnvGroup,
    closed_at_end,
    closed_if_refused,
)
from hts_torchrl.envs.kept_process import process_kept
from hts_torchrl.envs.layers import is_a
from hts_torchrl.envs.observed import OF_OLD_GYM, called
from hts_torchrl.envs.own_generators import making
from hts_torchrl.envs.registered import made
from hts_torchrl.envs.vector import VectorAdapter
from hts_torchrl.errors import ConfigurationError, in_one_line, require
from hts_torchrl.settings import plain_value
from hts_torchrl.specs import EnvSpec


def make_group(
    create_env_fn: CreateEnv | EnvFactory,
    indices: Sequence[int],
    *,
    render: bool = False,
    any_size: bool = False,
) -> EnvGroup:
    """Make the group of the environments ``indices``, from whatever the user gave.

    Args:
        create_env_fn: an ``EnvFactory``; a function returning a ``gymnasium.Env``, a TorchRL
            ``EnvBase`` or a vector environment with as many environments as ``indices``, which is
            given the environment's index if it has an argument without a default; a TorchRL
            ``EnvBase``, which is copied; or a list with a function or an ``EnvBase`` for each
            environment. An ``EnvBase`` may be a batch of as many as ``indices``.
        indices: global indices of the environments.
        render: whether :meth:`EnvGroup.render` will be called.
        any_size: whether a vector environment or a batch may have another number of environments
            than ``indices``, and a list fewer; the group then has all of it, from the first index
            on.

    Raises:
        ConfigurationError: if that cannot be made a group.
    """
    if isinstance(create_env_fn, EnvFactory):
        return create_env_fn.group(indices, render=render)
    if _is_list(create_env_fn) and len(create_env_fn) == 0:  # type: ignore[arg-type]
        raise ConfigurationError("create_env_fn is an empty list: give a function for each env")
    if any_size and _is_list(create_env_fn):
        indices = indices[: len(create_env_fn)]  # type: ignore[arg-type]
    envs: list[Any] = []
    with closed_if_refused(envs):
        for index, maker in zip(indices, _makers(create_env_fn, indices), strict=True):
            envs.append(_make(maker, index))
            if size := _batch_size(envs[0]):
                if any_size:
                    indices = range(indices[0], indices[0] + size)
                break
        if len(envs) < len(indices) and _is_list(create_env_fn):
            raise ConfigurationError(
                "create_env_fn is a list, which has a function for each environment, but the first "
                "returned a vector environment or a batch: give one function instead, or single "
                "environments"
            )
        return _group(envs, indices)


@dataclass(frozen=True)
class Limited:
    """What makes one environment, and the steps after which each of its games is truncated."""

    maker: Any
    most_steps: int

    def limit(self, env: Any) -> Any:  # noqa: ANN401
        """Return an environment that ends its games in time."""
        if is_a(env, "gymnasium.Env"):
            return TimeLimit(env, self.most_steps)
        if is_a(env, "torchrl.EnvBase"):
            from hts_torchrl.envs.torchrl import limited  # noqa: PLC0415 - it imports torch

            return limited(env, self.most_steps)
        raise ConfigurationError(
            f"max_frames_per_traj={self.most_steps} of a {type(env).__name__}: a gymnasium.Env or "
            "a TorchRL EnvBase is needed; a vector environment is made with its own limit"
        )


def arranged(
    create_env_fn: CreateEnv | EnvFactory,
    kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    most_steps: int | None,
) -> CreateEnv | EnvFactory:
    """Return what makes the same environments with further arguments, and a limit of their games.

    Args:
        create_env_fn: what makes them.
        kwargs: arguments by keyword, of all functions or a list with those of each; None or none
            at all leaves it as it is.
        most_steps: after which a game is truncated; None or less than 1 is no limit.

    Raises:
        ConfigurationError: if it takes none of them.
    """
    limit = most_steps if most_steps is not None and most_steps >= 1 else None
    if not kwargs and limit is None:
        return create_env_fn
    if isinstance(create_env_fn, EnvFactory):
        setting = "create_env_kwargs" if kwargs else f"max_frames_per_traj={limit}"
        raise ConfigurationError(
            f"{setting} of a {type(create_env_fn).__name__}: say it to the factory, as in "
            "GymEnvs('CartPole-v1', {'max_episode_steps': 50})"
        )
    given: Any = create_env_fn
    makers: list[Any] = list(given) if _is_list(given) else [given]
    if kwargs:
        several: list[Any] = list(kwargs) if _is_list(kwargs) else [kwargs] * len(makers)
        if len(several) != len(makers) or not all(isinstance(each, Mapping) for each in several):
            raise ConfigurationError(
                f"create_env_kwargs of type {type(kwargs).__name__}; a dict is needed, or a list "
                f"with one for each function of create_env_fn, which are {len(makers)} here"
            )
        makers = list(map(_with_kwargs, makers, several))
    if limit is not None:
        makers = [Limited(maker, limit) for maker in makers]
    return makers if _is_list(given) else makers[0]


def _with_kwargs(maker: Any, kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    makes = callable(maker) and not is_a(maker, "torchrl.EnvBase")
    told = f"create_env_kwargs of a {type(maker).__name__}"
    require(makes, told, "a function that makes an environment")
    return partial(maker, **kwargs)


def env_spec_of(create_env_fn: CreateEnv | EnvFactory, index: int = 0) -> EnvSpec:
    """Return observations and actions of an environment, which is made for this and closed.

    Example:
        >>> import gymnasium
        >>> env_spec_of(lambda: gymnasium.make("CartPole-v1")).observations["observation"].shape
        (4,)

    Args:
        create_env_fn: as :class:`HTSCollector` takes it.
        index: of the environment.

    Raises:
        ConfigurationError: if no environment can be made from it.
    """
    with (
        process_kept(),
        closed_at_end(make_group(create_env_fn, [index], any_size=True)) as group,
    ):
        return group.spec


def number_of_envs(
    create_env_fn: CreateEnv | EnvFactory, num_envs: int | None, first_env: int = 0
) -> int:
    """Return how many environments there are: as many as a list has, or else as many as asked for.

    Args:
        create_env_fn: what makes them.
        num_envs: what was asked for; None is the length of a list, and else 16.
        first_env: index in the list of the first of them; a list may then be that of all ranks.

    Raises:
        ConfigurationError: if a list has another number.
    """
    if not _is_list(create_env_fn):
        return CollectorSettings.num_envs if num_envs is None else num_envs
    for name, given in (("num_envs", num_envs), ("first_env", first_env)):
        plain_value(name, given, "int | None")
    listed = len(create_env_fn) - first_env  # type: ignore[arg-type]
    number = listed if num_envs is None else num_envs
    if number < 1 or number > listed or (number < listed and first_env == 0):
        raise ConfigurationError(
            f"create_env_fn lists {listed} environments from first_env={first_env} on, but "
            f"num_envs={num_envs}: give one function each, and leave num_envs out"
        )
    return number


def _is_list(create_env_fn: object) -> bool:
    return isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str)


def _makers(create_env_fn: Any, indices: Sequence[int]) -> list[Any]:  # noqa: ANN401
    if not _is_list(create_env_fn):
        return [create_env_fn] * len(indices)
    if max(indices) >= len(create_env_fn):
        raise ConfigurationError(
            f"create_env_fn lists {len(create_env_fn)} environments, but environment "
            f"{max(indices)} is wanted: give one function each, or lower num_envs"
        )
    return [create_env_fn[index] for index in indices]


def _make(maker: Any, index: int) -> Any:  # noqa: ANN401
    if isinstance(maker, Limited):
        return maker.limit(_make(maker.maker, index))
    kind = type(maker).__name__
    if is_a(maker, "torchrl.EnvBase"):
        return _copy(maker, kind)
    if is_a(maker, "gymnasium.Env") or is_a(maker, "gymnasium.VectorEnv"):
        raise ConfigurationError(
            f"create_env_fn is a {kind}, which is one environment; give a function that makes it: "
            "`lambda: gymnasium.make(...)`"
        )
    if not callable(maker):
        hint = f": GymEnvs({maker!r}) makes it" if isinstance(maker, str) else ""
        raise ConfigurationError(
            f"create_env_fn is a {kind}; a function that returns an environment, a TorchRL "
            f"EnvBase, or a list of these, is needed{hint}"
        )
    with called("create_env_fn", index), making(index):
        return made(partial(maker, index) if _takes_index(maker) else maker)


def _batch_size(env: Any) -> int:  # noqa: ANN401
    """Return how many environments it is already; 0 if it is a single one."""
    if is_a(env, "torchrl.EnvBase"):
        return int(env.batch_size.numel()) if env.batch_size else 0
    return int(env.num_envs) if is_a(env, "gymnasium.VectorEnv") else 0


def _copy(env: Any, kind: str) -> Any:  # noqa: ANN401
    try:
        return cloudpickle.loads(cloudpickle.dumps(env))
    except Exception as error:
        raise ConfigurationError(
            f"create_env_fn is a {kind} that cannot be copied ({type(error).__name__}: "
            f"{in_one_line(error)}); give a function that makes it: `lambda: {kind}(...)`"
        ) from error


def _takes_index(maker: Any) -> bool:  # noqa: ANN401
    """Return whether a function wants an argument: one with a default keeps it, as in TorchRL.

    ``*args, **kwargs`` want none: they are handed on, as by classes derived from another's
    environment, whose first setting the index would be.
    """
    call = maker if isinstance(maker, partial) else partial(maker)
    if isinstance(call.func, type) and type(call.func).__call__ is not type.__call__:
        # The signature would be that of the metaclass, as TorchRL's environments have one.
        call = partial(call.func.__init__, None, *call.args, **call.keywords)  # type: ignore[misc]
    try:
        parameters = [*inspect.signature(call).parameters.values()]
    except ValueError:  # written in C
        return True
    by_name = Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD
    first = next((each for each in parameters if each.kind not in by_name), None)
    if first is None or first.default is not Parameter.empty:
        return False
    hands_on = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
    return (first.kind, parameters[-1].kind) != hands_on


def _group(envs: list[Any], indices: Sequence[int]) -> EnvGroup:
    """Make the group of the kind that all of them are."""
    kinds = ("gymnasium.VectorEnv", "gymnasium.Env", "torchrl.EnvBase")
    kind = next((kind for kind in kinds if is_a(envs[0], kind)), None)
    for env in envs:
        if kind is None or not is_a(env, kind):
            wanted = "a gymnasium.Env, a gymnasium VectorEnv or a TorchRL EnvBase"
            alike = f"another {kind}, as the first is," if kind else wanted
            hint = f"; {OF_OLD_GYM}" if is_a(env, "gym.Env") else ""
            raise ConfigurationError(
                f"create_env_fn returned a {type(env).__name__}; {alike} is needed{hint}"
            )
    if kind == "gymnasium.VectorEnv":
        return AdapterGroup([VectorAdapter(envs[0], indices)])
    if kind == "gymnasium.Env":
        return SerialGroup([*map(GymAdapter, envs, indices)])
    from hts_torchrl.envs.torchrl import group_of  # noqa: PLC0415 - it imports torch

    return group_of(envs, indices)
