"""A YAML file that a person wrote: read without what YAML itself lets pass."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from hts_torchrl.errors import ConfigurationError, in_one_line

# No task comes near, and what a file's aliases stand for can be written out.
_MOST_DEPTH, _MOST_ENTRIES = 50, 100_000


def read_yaml(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    """Return what a file holds.

    Raises:
        OSError: if it cannot be read.
        ConfigurationError: in one line, without the path: if it is no YAML, has a name twice, nests
            more than 50 deep, or has aliases that stand for too much.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if (node := yaml.compose(text, yaml.SafeLoader)) is not None:
            _entries(node, {})
        return yaml.safe_load(text)
    except RecursionError as error:
        raise ConfigurationError("it nests too deeply") from error
    except (yaml.YAMLError, ValueError) as error:  # the latter of a date that is none, 2026-02-30
        raise ConfigurationError(in_one_line(error)) from error
    except (LookupError, AttributeError) as error:  # of PyYAML, from such as `!!bool maybe`
        raise ConfigurationError("a value is none of the type that its tag (!!) says") from error


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
        if twice := [name for name, times in Counter(names).items() if times > 1 and name != "<<"]:
            raise ConfigurationError(f"it has {twice[0]} twice")
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    known[node] = 0  # until it is known
    entries = 1 + sum(_entries(part, known, depth + 1) for part in parts)
    if entries > _MOST_ENTRIES:
        raise ConfigurationError(f"its aliases stand for more than {_MOST_ENTRIES} entries")
    known[node] = entries
    return entries
