"""What environments return, held against what they declared: anything else is refused."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import spaces

from hts_torchrl.envs.group import Observation, Transition
from hts_torchrl.envs.spaces import Path, key_of, leaves_of
from hts_torchrl.errors import ConfigurationError, in_one_line
from hts_torchrl.specs import Array, ArraySpec, EnvSpec, Key

OF_OLD_GYM = (
    "shimmy's GymV21CompatibilityV0 and GymV26CompatibilityV0 wrap environments of the old Gym"
)
_OTHER_RESET = re.compile(r"reset\(\) (got an unexpected|missing \d+ required) .*'(seed|options)'")


class Undeclared(ConfigurationError):
    """An environment returned something else than it declares, or than its interface says."""


def as_declared(key: Key, value: Any, spec: ArraySpec) -> Array:  # noqa: ANN401
    """Return one entry of an observation as an array of the declared shape and type.

    Its own type must be one that the declared type holds without loss: float32 where float64 is
    declared, and not the other way round; other integers where their values fit. Numbers that carry
    no type (a list of floats) take the declared one. A batch's spec has one environment's choices.

    Raises:
        Undeclared: if the entry is another than was declared, or is none of the choices.
    """
    array = value if isinstance(value, np.ndarray) else _typed(value, spec.dtype)
    same_type = array.dtype == spec.dtype
    if array.shape != spec.shape or not (same_type or _holds(spec.dtype, array)):
        found = "missing" if value is None else kind_of(array)
        raise Undeclared(f"{key!r} is {found}, but {spec} is declared")
    if spec.choices:
        _require_known(key, array, spec.choices)
    return array if same_type else array.astype(spec.dtype)


def array_of(value: Any) -> Array:  # noqa: ANN401
    """Return as an array what an environment returned; rows of unequal length are None.

    Raises:
        Undeclared: if numpy cannot read it, as a tensor of torch that requires a gradient.
    """
    try:
        return np.asarray(value)
    except ValueError:
        return np.asarray(None)
    except (RuntimeError, TypeError) as error:
        raise Undeclared(f"a {type(value).__name__}: {in_one_line(error)}") from error


def _typed(value: Any, declared: np.dtype[Any]) -> Array:  # noqa: ANN401
    array = array_of(value)
    typeless = not hasattr(value, "dtype") and array.dtype.kind in "fiu"
    return array.astype(declared) if typeless and declared.kind == "f" else array


def _holds(declared: np.dtype[Any], array: Array) -> bool:
    if np.can_cast(array.dtype, declared):
        return True
    both_integers = array.dtype.kind in "iu" and declared.kind in "iu"
    return both_integers and bool((array.astype(declared) == array).all())


def _require_known(key: Key, array: Array, choices: Sequence[range]) -> None:
    """Refuse the first environment's entry that is none of the choices."""
    rows = array.reshape(-1, len(choices))
    first, after = [each.start for each in choices], [each.stop for each in choices]
    unknown = ((rows < first) | (rows >= after)).any(1)
    if unknown.any():
        row = rows[int(unknown.argmax())]
        raise Undeclared(
            f"{key!r} is {row if len(row) > 1 else row[0]}, but {' '.join(map(str, choices))} is "
            "declared"
        )


# A union would be built in every step.
_NUMBERS = (float, int, np.floating, np.integer)
_FLAGS = (bool, np.bool_)
_SEVERAL = (tuple, list)
_KINDS = {
    **dict.fromkeys(("reward", "score"), "fiu"),
    **dict.fromkeys(("terminated", "truncated", "episode_end"), "b"),
}
"""Of numpy types, for what a transition has one of for each environment."""


def as_reward(reward: Any) -> float:  # noqa: ANN401
    """Return the reward of one step.

    Raises:
        Undeclared: if it is not one number.
    """
    if isinstance(reward, _NUMBERS):
        return float(reward)
    array = array_of(reward)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise Undeclared(
            f"the reward is {kind_of(reward)}, but one number is needed: where it has several "
            "objectives, gymnasium.wrappers.TransformReward or mo-gymnasium's LinearReward weighs "
            "them into one"
        )
    return float(array.item())


def as_flag(name: str, value: Any) -> bool:  # noqa: ANN401
    """Return whether a step ended the episode in this way.

    Raises:
        Undeclared: if that is not one truth value.
    """
    if isinstance(value, _FLAGS):
        return bool(value)
    array = array_of(value)
    if array.size != 1 or array.dtype.kind not in "biu":
        raise Undeclared(f"{name} is {kind_of(value)}, but True or False is needed")
    return bool(array.item())


def as_returned(value: Any, names: Sequence[str]) -> Sequence[Any]:  # noqa: ANN401
    """Return what a call of Gymnasium's interface returned.

    Raises:
        Undeclared: if these are not as many values, as from environments of the old Gym.
    """
    several = isinstance(value, _SEVERAL)
    if not several or len(value) != len(names):
        found = f"{len(value)} values" if several else kind_of(value)
        raise Undeclared(f"{found}, but Gymnasium's ({', '.join(names)}) are needed; {OF_OLD_GYM}")
    returned: Sequence[Any] = value
    return returned


def kind_of(value: Any) -> str:  # noqa: ANN401
    """Return type and shape of an array, and the type of anything else, for messages."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _at(observation: Any, path: Path) -> Any:  # noqa: ANN401
    for name in path:
        try:
            observation = observation[name]
        except (LookupError, TypeError):
            return None
    return observation


class DeclaredSpace:
    """The observation space of a Gymnasium environment, as a gate for what it returns.

    Args:
        space: of one environment.
        specs: the same by key; those of a batch take a batch.
    """

    def __init__(self, space: spaces.Space[Any], specs: dict[Key, ArraySpec]) -> None:
        # Gymnasium takes a list for a tuple, too.
        forms = {spaces.Dict: (dict,), spaces.Tuple: (tuple, list)}
        self._form = next((forms[kind] for kind in forms if isinstance(space, kind)), None)
        self._specs = specs
        self._paths = {key_of(path): path for path in leaves_of(space)}

    def entries(self, observation: Any) -> Observation:  # noqa: ANN401
        """Return the entries of an observation by key.

        Raises:
            Undeclared: if it is no dictionary or tuple, but such a space was declared; or
                if an entry is missing, or is another than was declared (:func:`as_declared`).
        """
        if self._form is not None and not isinstance(observation, self._form):
            raise Undeclared(
                f"a {type(observation).__name__} came, but a {self._form[0].__name__} is declared"
            )
        return {
            key: as_declared(key, _at(observation, self._paths[key]), spec)
            for key, spec in self._specs.items()
        }


class DeclaredGroup:
    """What a group's environments declared, as a gate for what it returns.

    Args:
        spec: of one environment.
        envs: global indices of the E environments.
    """

    def __init__(self, spec: EnvSpec, envs: Sequence[int]) -> None:
        self._spec, self._envs = spec, list(envs)
        self._declared = {
            key: replace(array, shape=(len(envs), *array.shape))
            for key, array in spec.observations.items()
        }
        self._calls = {n: called(n, self._envs) for n in ("reset", "step")}
        key, sizes = spec.action_mask, spec.action.sizes
        fits = key is not None and spec.observations[key].shape == (sum(sizes),)
        self._mask = key if fits else None

    def require_transition(self, transition: Transition, *, is_first: bool) -> None:
        """Refuse a step that cells would broadcast or convert, or after which nothing can be done.

        The form of its numbers is looked at in the first step of a round: it stays as it is.

        Raises:
            ConfigurationError: naming the environments; so does the other one.
        """
        if is_first:
            self._require_one_each(transition)
        ends = transition.episode_end
        if np.count_nonzero(ends):  # a third of the time of any()
            goes_on = ends & ~(transition.terminated | transition.truncated)
            if goes_on.any():
                raise ConfigurationError(
                    f"environment {self._envs[int(goes_on.argmax())]} ends a game (episode_end) "
                    "that is neither terminated nor truncated: one of the two is needed, as values "
                    "would be taken from the next game"
                )
        self.require_observation(transition.next_observation, "step")
        if transition.observation is not transition.next_observation:
            self._require_arrays(transition.observation, "step")

    def require_observation(self, observation: Observation, call: str) -> None:
        """Refuse arrays ``[E, ...]`` that ``call`` returned, if they cannot be acted on."""
        self._require_arrays(observation, call)
        if self._mask is None:
            return
        first = np.cumsum([0, *self._spec.action.sizes[:-1]])
        allowed = np.logical_or.reduceat(observation[self._mask] != 0, first, axis=1).all(1)
        if not allowed.all():
            raise ConfigurationError(
                f"environment {self._envs[int(allowed.argmin())]} allows no action by its "
                f"{self._mask!r}, but has to be acted on: at least one element of each choice must "
                "be true"
            )

    def _require_arrays(self, observation: Observation, call: str) -> None:
        with self._calls[call]:
            if not isinstance(observation, Mapping):
                kind = type(observation).__name__
                raise Undeclared(f"a {kind} came, but a dict of arrays by key is declared")
            for key, spec in self._declared.items():
                as_declared(key, observation.get(key), spec)

    def _require_one_each(self, transition: Transition) -> None:
        """Refuse numbers that would be broadcast, or flags that would be taken for places."""
        count = len(self._envs)
        with self._calls["step"]:
            for name, kinds in _KINDS.items():
                array = getattr(transition, name)
                fits = isinstance(array, np.ndarray) and array.shape == (count,)
                if not fits or array.dtype.kind not in kinds:
                    wanted = f"{'bool' if kinds == 'b' else 'float32'} [{count}]"
                    raise Undeclared(f"{name} is {kind_of(array)}; {wanted} is needed")


class called:
    """Name the call and the environments in whatever is raised inside, as a note."""

    def __init__(self, call: str, envs: int | Sequence[int]) -> None:
        some = f"environment{'s' * (not isinstance(envs, int))} {envs}"
        self._place = f"{call}() of {some}"

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Name the environments in what was raised.

        Raises:
            ConfigurationError: if the call would end the process as if all had gone well, returned
                what is not declared, or is ``reset`` and takes no seed or options.
            RuntimeError: if it raised what would end the caller's loop as if all had gone well.
        """
        if error is None:
            return
        place = self._place
        if isinstance(error, Undeclared):
            message = f"{place} returned what is not declared: {error}"
            raise ConfigurationError(message) from None
        if isinstance(error, SystemExit) and not error.code:
            raise ConfigurationError(f"{place} calls sys.exit(); raise an error there instead")
        if isinstance(error, StopIteration):
            raise RuntimeError(f"{place} raised StopIteration") from error
        if isinstance(error, TypeError) and _OTHER_RESET.search(str(error)):
            raise ConfigurationError(
                f"{place}: {error}; Gymnasium's reset(self, *, seed=None, options=None) is needed"
            ) from None
        with contextlib.suppress(Exception):  # of a class that takes no notes
            error.add_note(f"raised by {place}")
