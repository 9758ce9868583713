"""Settings of a run as plain data: what a checkpoint tells of them, and how two runs differ."""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.settings import loadable, taking

Changes: TypeAlias = dict[str, tuple[Any, Any]]
"""Name of a setting: its value in the checkpoint, and the one it would have now."""

_PACKAGE = __name__.partition(".")[0]


def class_name(thing: object) -> str:
    """Return the name of a class or function; without its module if it is of this package."""
    named: Any = thing if inspect.isclass(thing) or inspect.isroutine(thing) else type(thing)
    own = named.__module__.partition(".")[0] == _PACKAGE
    return str(named.__qualname__ if own else f"{named.__module__}.{named.__qualname__}")


def described(thing: object) -> dict[str, Any]:
    """Return the class and its arguments in the words of a config file, as plain data.

    Arguments are those that the object keeps as attributes of the same names, as a dataclass does.
    """
    try:
        arguments = [*inspect.signature(type(thing)).parameters]
    except ValueError:  # of a class in C that tells none
        arguments = []
    values = {name: getattr(thing, name) for name in arguments if hasattr(thing, name)}
    return {"class_path": class_name(thing), "init_args": plain(values)}


def plain(value: object) -> Any:  # noqa: ANN401
    """Return a value as a checkpoint can hold it.

    Of a class, a function and a member of an enum that is the name, of another object the type's,
    in ``<>``; a dataclass is described.
    """
    value = loadable(value)
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, Enum):
        return f"<{type(value).__name__}.{value.name}>"
    named = inspect.isclass(value) or inspect.isroutine(value)
    if is_dataclass(value) and not named:
        return described(value)
    is_plain = value is None or type(value) in (bool, int, float, str)
    return value if is_plain else f"<{class_name(value) if named else type(value).__name__}>"


def for_loggers(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters with dataclasses as plain data: loggers refuse frozen ones."""
    given = hyperparameters.items()
    return {name: described(each) if is_dataclass(each) else each for name, each in given}


def is_type_name(value: object) -> bool:
    """Return whether a checkpoint holds this in the place of what is not plain."""
    return isinstance(value, str) and value.startswith("<") and value.endswith(">")


def changes(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Changes:
    """Return the settings that both have with different values."""
    before, now = _flat(saved), _flat(own)
    return {
        name: (before[name], value)
        for name, value in now.items()
        if name in before and before[name] != value
    }


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return class and arguments side by side, by the names that flags have."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and "class_path" in value:
            flat[name] = value["class_path"]
            arguments = value.get("init_args", {})
            flat |= {f"{name}.{field}": each for field, each in arguments.items()}
        else:
            flat[name] = value
    return flat


def refuse(differing: Changes) -> None:
    """Refuse settings that decide bits and are not the checkpoint's."""
    if differing:
        raise ConfigurationError(
            f"{_told(differing)}: bits depend on this; keep the checkpoint's, or set "
            "data.accept_changes=true if the change is meant"
        )


def told(differing: Changes, update: int) -> str:
    """Return the line for the log that says what changes, and from which update on."""
    return f"from update {update} on: {_told(differing)} (data.accept_changes)"


def _told(differing: Changes) -> str:
    return "; ".join(
        f"{name}={now!r}, the checkpoint has {was!r}" for name, (was, now) in differing.items()
    )


def known_arguments(
    make: Callable[..., Any],
    given: object,
    where: str,
    *,
    besides: tuple[str, ...] = (),
    remedy: str = "",
) -> dict[str, Any]:
    """Return what a file says of a constructor's arguments; warn of names that it does not have.

    Args:
        make: a class, or a function; its annotations are what counts. An argument without one takes
            plain data that names no class.
        given: of the file, whatever that is.
        where: the names' beginning, for messages.
        besides: arguments that no file may give.
        remedy: what to do about a value of another type, with ``{}`` for the name.

    Raises:
        ConfigurationError: if a value is none of the type that its argument has.
    """
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{where}={_short(given)}: settings by name are needed")
    makers = [each.__init__ for each in taking(make)] if inspect.isclass(make) else [make]  # type: ignore[misc]
    hints = {name: hint for each in reversed(makers) for name, hint in _hints(each).items()}
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    known = {
        name: hints.get(name, inspect.Parameter.empty)
        for name, parameter in inspect.signature(make).parameters.items()
        if name not in besides and parameter.kind not in several
    }
    for name, value in given.items():
        if name in known and not _fits(value, known[name]):
            raise ConfigurationError(
                f"{where}.{name}={_short(value)}: a value of another type is needed"
                f"{remedy.format(name)}"
            )
    if unknown := [_short(name) for name in given if name not in known]:
        warnings.warn(
            f"{where} has a setting {unknown[0]} (and {len(unknown) - 1} more) that "
            f"{make.__name__.strip('_')} does not show: it is left out, unless you give it",
            stacklevel=4,
        )
    return {name: value for name, value in given.items() if name in known}


def _hints(maker: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a constructor's arguments; none if it names some for checkers alone."""
    try:
        return get_type_hints(maker)
    except NameError:
        return {}


def _fits(value: object, hint: Any) -> bool:  # noqa: ANN401 - a type hint is any object
    if hint is inspect.Parameter.empty or hint is Any:
        return _names_nothing(value)
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if get_origin(hint) is Literal:
        return any(type(value) is type(each) and value == each for each in get_args(hint))
    if hint in (list, tuple) or get_origin(hint) is tuple:
        return type(value) is list and _names_nothing(value)
    if dict in (hint, get_origin(hint)):  # no interpolation in it either, however deep
        names = all(type(name) is str for name in value) if type(value) is dict else False
        return names and "${" not in repr(value)
    if get_origin(hint) is list:
        return type(value) is list and all(_fits(each, *get_args(hint)) for each in value)
    if hint is str:  # an interpolation would read other settings, or the environment
        return type(value) is str and "${" not in value
    if inspect.isclass(hint) and issubclass(hint, int | float) and hint is not bool:
        return type(value) is int or (type(value) is float and issubclass(hint, float))
    return type(value) is hint and hint in (bool, types.NoneType)


def _names_nothing(value: object) -> bool:
    """Return whether a value is plain data, without a class, another setting, or ``<type>``."""
    if type(value) is dict:
        return all(map(_names_nothing, (*value, *value.values())))
    if type(value) is list:
        return all(map(_names_nothing, value))
    if type(value) is str:
        return "${" not in value and "class_path" not in value and not is_type_name(value)
    return type(value) in (bool, int, float, types.NoneType)


def _short(value: object) -> str:
    """Return a value for a message; of a stranger's, not more than a line."""
    if not isinstance(value, str | int | float | bool | types.NoneType):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
