"""Config files that build on others, and the checkpoint that they or the command line name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hts_torchrl.errors import ConfigurationError

# No task comes near, and what a config's aliases stand for can be written out.
_MOST_DEPTH, _MOST_ENTRIES = 50, 100_000


def expand_configs(arguments: Sequence[str]) -> list[str]:
    """Return command-line arguments in which every config file stands by itself.

    The files that a config names under ``base`` come before it, and theirs before them.

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
        configs += _with_bases(Path(value))
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
    if path.resolve() in above:
        raise ConfigurationError(f"--config={path}: it builds on itself")
    content = _content(path)
    if not isinstance(content, dict):
        told = "empty" if content is None else f"a {type(content).__name__}"
        raise ConfigurationError(f"--config={path}: it is {told}; settings by name are needed")
    bases = content.get("base") or []
    named = [bases] if isinstance(bases, str) else bases
    if not isinstance(named, list) or not all(isinstance(base, str) for base in named):
        raise ConfigurationError(f"--config={path}: base={bases}; one file or a list is needed")
    above = (*above, path.resolve())
    return [file for base in named for file in _with_bases(path.parent / base, above)] + [path]


def _content(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    try:
        text = path.read_text(encoding="utf-8")
        if (node := yaml.compose(text, yaml.SafeLoader)) is not None:
            _entries(node, {})
        return yaml.safe_load(text)
    except RecursionError as error:
        raise ConfigurationError(f"--config={path}: it nests too deeply") from error
    except ConfigurationError as error:
        raise ConfigurationError(f"--config={path}: {error}") from error
    except OSError as error:
        raise ConfigurationError(f"--config={path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeError) as error:
        raise ConfigurationError(f"--config={path}: {' '.join(str(error).split())}") from error


def _entries(node: yaml.Node, known: dict[yaml.Node, int], depth: int = 0) -> int:
    """Return the entries of a node with all its aliases written out, before they are.

    Raises:
        ConfigurationError: if there are too many, or an alias stands for what it is part of.
    """
    if node in known:
        if not known[node]:
            raise ConfigurationError("an alias stands for what it is part of")
        return known[node]
    if depth > _MOST_DEPTH:
        raise ConfigurationError("it nests too deeply")
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
        names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
        if twice := [name for name in names if names.count(name) > 1 and name != "<<"]:
            raise ConfigurationError(f"it has {twice[0]} twice")
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    known[node] = 0  # until it is known
    entries = 1 + sum(_entries(part, known, depth + 1) for part in parts)
    if entries > _MOST_ENTRIES:
        raise ConfigurationError(f"its aliases stand for more than {_MOST_ENTRIES} entries")
    known[node] = entries
    return entries


def checkpoint_of(arguments: Sequence[str]) -> str | None:
    """Return the last ``--ckpt_path`` of expanded arguments, or else that of the last config."""
    named: dict[str, Any] = {}
    for index, argument in enumerate(arguments):
        flag, separator, value = argument.partition("=")
        if not separator:
            value = "".join(arguments[index + 1 : index + 2])
        if flag == "--ckpt_path":
            named[flag] = value
        elif flag == "--config":
            content = _content(Path(value))
            if isinstance(content, dict) and "ckpt_path" in content:
                named[flag] = content["ckpt_path"]
    path = named.get("--ckpt_path", named.get("--config"))
    return path if isinstance(path, str) and path != "null" else None
