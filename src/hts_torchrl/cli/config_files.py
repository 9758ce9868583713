"""Config files that build on others, and the checkpoint that they or the command line name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hts_torchrl.errors import ConfigurationError, naming
from hts_torchrl.yaml_file import read_yaml

_PACKAGE = Path(__file__).resolve().parents[1]
_OWN = (_PACKAGE / "configs", _PACKAGE.parents[1] / "configs")
"""This package's config files: as it is installed, and in a checkout."""


def expand_configs(arguments: Sequence[str]) -> list[str]:
    """Return command-line arguments in which every config file stands by itself.

    The files that a config names under ``base`` come before it, and theirs before them. Where
    ``configs/...`` is not there, it is the file of this package.

    Raises:
        ConfigurationError: if a file is not there or is no YAML.
    """
    expanded: list[str] = []
    configs: list[Path] = []
    waiting = list(arguments)
    while waiting:
        flag, separator, value = _parted(waiting.pop(0))
        if flag == "--base" and value != "null":  # which another rank's arguments have
            raise ConfigurationError(
                "--base: it belongs into a config file; --config takes several"
            )
        if flag not in ("-c", "--config"):
            expanded.append(flag + separator + value)
            continue
        if not separator and waiting:
            value = waiting.pop(0)
        if not value:
            raise ConfigurationError(f"{flag}: the name of a file is needed")
        configs += _with_bases(_file_of(value, Path()))
    if not configs:
        return expanded
    # After the files, so that the config that a run saves does not look for theirs.
    flags = [flag for path in configs for flag in ("--config", str(path))] + ["--base=null"]
    return expanded[:1] + flags + expanded[1:]


def _parted(argument: str) -> tuple[str, str, str]:
    """Return a flag, what parts it from its value, and its value: ``-cmine.yaml`` has none."""
    if argument.startswith("-c") and not argument.startswith("-c="):
        return "-c", "" if argument == "-c" else "=", argument[2:]
    return argument.partition("=")


def _with_bases(path: Path, above: tuple[Path, ...] = ()) -> list[Path]:
    content = _content(path)
    if path.resolve() in above:
        raise ConfigurationError(f"--config={path}: it builds on itself")
    if not isinstance(content, dict):
        told = "empty" if content is None else f"a {type(content).__name__}"
        raise ConfigurationError(f"--config={path}: it is {told}; settings by name are needed")
    for section in ("data", "trainer"):  # jsonargparse takes the defaults for what is no mapping
        value = content.get(section)
        if not isinstance(value, dict | str | None):  # text names a file of the section
            raise ConfigurationError(
                f"--config={path}: {section}={value}; settings by name are needed"
            )
    data = content.get("data")
    if "data.seed" in content or (isinstance(data, dict) and "seed" in data):
        raise ConfigurationError(f"--config={path}: data.seed is seed_everything: give that")
    bases = content.get("base") or []
    named = [bases] if isinstance(bases, str) else bases
    if not isinstance(named, list) or not all(isinstance(base, str) for base in named):
        raise ConfigurationError(f"--config={path}: base={bases}; one file or a list is needed")
    above = (*above, path.resolve())
    files = [_file_of(base, path.parent) for base in named]
    return [each for file in files for each in _with_bases(file, above)] + [path]


def _file_of(name: str, beside: Path) -> Path:
    """Return the file of a name beside others, or else the file of this package."""
    path, parts = beside / name, Path(name).parts
    if parts[:1] != ("configs",) or path.exists():
        return path
    own = next((each for each in _OWN if each.is_dir()), _OWN[0]).joinpath(*parts[1:])
    return own if own.is_file() else path


def _content(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    with naming("--config", path):
        if path.is_fifo():  # as of <(...), or of /dev/stdin behind a pipe
            raise ConfigurationError("a pipe is read only once; a file is needed")
        return read_yaml(path)


def files_with(setting: str, arguments: Sequence[str]) -> list[str]:
    """Return the config files of expanded arguments that have a setting, unless a flag has it.

    Args:
        setting: as a flag names it, without its dashes, such as ``model.learning_rate``.
        arguments: of the command line, as :func:`expand_configs` returns them.
    """
    if not setting or _has_flag(setting, arguments):
        return []
    files = [path for flag, path in pairwise(arguments) if flag == "--config"]
    return [path for path in files if any(_is(name, setting) for name, _ in _settings_in(path))]


def is_given(setting: str, arguments: Sequence[str]) -> bool:
    """Return whether a flag or a config file gives a setting, or a part of it."""
    return _has_flag(setting, arguments) or bool(files_with(setting, arguments))


def _has_flag(setting: str, arguments: Sequence[str]) -> bool:
    flags = (each.partition("=")[0].removeprefix("--").removesuffix("+") for each in arguments)
    return any(_is(flag.replace(".init_args.", "."), setting) for flag in flags)


def _is(name: str, setting: str) -> bool:
    return name == setting or name.startswith(f"{setting}.")


def classes_given(setting: str, arguments: Sequence[str]) -> list[object]:
    """Return what flags and config files name as the class of a setting, such as ``data.env``."""
    names = (setting, f"{setting}.class_path")
    return [value for name in names for values in _values_of(name, arguments) for value in values]


def _values_of(setting: str, arguments: Sequence[str]) -> tuple[list[Any], list[Any]]:
    """Return all values of a setting in expanded arguments: of flags, and of config files."""
    flags: list[Any] = []
    files: list[Any] = []
    for argument, following in pairwise([*arguments, ""]):
        flag, separator, value = argument.partition("=")
        value = value if separator else following
        if flag == f"--{setting}":
            flags.append(value)
        elif flag == "--config":
            files += [held for name, held in _settings_in(value) if name == setting]
    return flags, files


def _settings_in(path: str) -> Iterator[tuple[str, Any]]:
    """Yield all settings of a file, by the names that flags have; entries of a list share one."""
    return _settings(_content(Path(path)))


def _settings(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    yield name, content
    for part, value in content.items() if isinstance(content, dict) else ():
        is_of_class = part in ("init_args", "dict_kwargs")
        yield from _settings(value, name if is_of_class else f"{name}.{part}".removeprefix("."))
    for value in content if isinstance(content, list) else ():
        yield from _settings(value, name)


def checkpoint_of(arguments: Sequence[str]) -> str | None:
    """Return the last ``--ckpt_path`` of expanded arguments, or else that of the last config."""
    flags, files = _values_of("ckpt_path", arguments)
    path = (flags or files or [None])[-1]
    return path if isinstance(path, str) and path != "null" else None
