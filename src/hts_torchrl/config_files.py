"""Config files that build on others, and the one that a checkpoint was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from hts_torchrl.errors import ConfigurationError


def expand_configs(arguments: Sequence[str]) -> list[str]:
    """Return command-line arguments in which every config file stands by itself.

    The files that a config names under ``base`` come before it, and theirs before them. Where no
    config is given, that of the run to which ``--ckpt_path`` belongs is taken.

    Raises:
        ConfigurationError: if a file is not there or is no YAML.
    """
    expanded: list[str] = []
    configs: list[Path] = []
    waiting = list(arguments)
    while waiting:
        flag, separator, value = waiting.pop(0).partition("=")
        if flag == "--base" and value != "null":  # which another rank's arguments have
            raise ConfigurationError(
                "--base: it belongs into a config file; --config takes several"
            )
        if flag not in ("-c", "--config"):
            expanded.append(flag + separator + value)
            continue
        if not separator and waiting:
            value = waiting.pop(0)
        configs += _with_bases(Path(value))
    configs = configs or _config_of_checkpoint(expanded)
    if not configs:
        return expanded
    # After the files, so that the config that a run saves does not look for theirs.
    flags = [flag for path in configs for flag in ("--config", str(path))] + ["--base=null"]
    return expanded[:1] + flags + expanded[1:]


def _with_bases(path: Path, above: tuple[Path, ...] = ()) -> list[Path]:
    if path.resolve() in above:
        raise ConfigurationError(f"--config={path}: it builds on itself")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--config={path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeError) as error:
        raise ConfigurationError(f"--config={path}: {' '.join(str(error).split())}") from error
    bases = (content.get("base") or []) if isinstance(content, dict) else []
    named = [bases] if isinstance(bases, str) else bases
    if not isinstance(named, list) or not all(isinstance(base, str) for base in named):
        raise ConfigurationError(f"--config={path}: base={bases}; one file or a list is needed")
    above = (*above, path.resolve())
    return [file for base in named for file in _with_bases(path.parent / base, above)] + [path]


def _config_of_checkpoint(arguments: Sequence[str]) -> list[Path]:
    """Find ``config.yaml`` in the run's folder, which holds the folder of its checkpoints."""
    for index, argument in enumerate(arguments):
        flag, separator, value = argument.partition("=")
        if flag == "--ckpt_path":
            path = Path(value if separator else "".join(arguments[index + 1 : index + 2]))
            config = path.parent.parent / "config.yaml"
            return [config] if config.is_file() else []
    return []
