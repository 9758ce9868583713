"""Checkpoints that a crash cannot tear, and that show when they are damaged."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from hts_torchrl.durable_file import replacing
from hts_torchrl.errors import CheckpointError, ConfigurationError, reason_of

_SHA256 = re.compile("[0-9a-fA-F]{64}")


class DurableCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint next to its final place, and moves it there once it is on the disk.

    Give it to a Trainer as a plugin; the command line does. In this order, each synced::

        <name>.previous    a second name for the existing file, if it is whole
        <name>.digests     of the new file and of that one (``sha256sum -c`` reads them)
        <name>             the new file, by a rename in the same folder

    So there is always a whole file with a known digest. The first file of a name comes before its
    digests, which alone would look like a checkpoint to Lightning. Lightning's own
    ``TorchCheckpointIO`` uses a temporary file that may be on another file system, from
    where a move is a copy. Loading checks the digest, falls back to ``<name>.previous`` with a
    warning, and reads only tensors and plain values. Paths with a scheme (``s3://``) are left to
    Lightning.
    """

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any | None = None,  # noqa: ANN401
    ) -> None:
        """Write a checkpoint.

        Raises:
            CheckpointError: if it cannot be written; what was at ``path`` is still there.
        """
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place = Path(path)
        is_first = not _digests(place).is_file()
        try:
            with replacing(place) as new:
                torch.save(checkpoint, new)
                _keep_previous(place)
                if not is_first:
                    _record(place, new)
            if is_first:
                _record(place, place)
        except OSError as error:
            raise CheckpointError(f"cannot write the checkpoint {place}: {error}") from error
        except RuntimeError as error:  # torch's words for it name no disk
            raise CheckpointError(
                f"cannot write the checkpoint {place}: is the disk full, or the size of files "
                f"limited (ulimit -f)? ({error})"
            ) from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, _: storage,  # noqa: ANN401
        weights_only: bool | None = True,
    ) -> dict[str, Any]:
        """Read a checkpoint, or the previous one if it is damaged.

        Raises:
            ConfigurationError: if both are damaged.
        """
        whole = path if "://" in str(path) else whole_checkpoint(Path(path))
        return super().load_checkpoint(whole, map_location, weights_only is not False)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, its digests and its previous file."""
        super().remove_checkpoint(path)
        if "://" not in str(path):
            _previous(Path(path)).unlink(missing_ok=True)
            _digests(Path(path)).unlink(missing_ok=True)


def whole_checkpoint(path: Path) -> Path:
    """Return ``path``, or the checkpoint before it (with a warning) if ``path`` is damaged.

    Raises:
        ConfigurationError: if there is no file, or no undamaged one, or it cannot be told.
    """
    if not path.name:  # a folder: this one, or the root
        raise ConfigurationError(f"{path}: there is no such file")
    if path.is_symlink():  # as ModelCheckpoint(save_last="link") makes it
        path = Path(os.path.realpath(path))  # which, unlike resolve(), takes a link to itself
    previous = _previous(path)
    if path.is_file() and _is_whole(path):
        return path
    if previous.is_file() and _digest(previous) in _known_digests(path):
        problem = "damaged" if path.is_file() else "missing"
        warnings.warn(f"{path} is {problem}: resuming from {previous}", stacklevel=2)
        return previous
    if not path.is_file():
        raise ConfigurationError(f"{path}: there is no such file")
    raise ConfigurationError(
        f"{path}: this is damaged (its SHA-256 is not in {_digests(path).name}), and there is no "
        "earlier one"
    )


def _keep_previous(place: Path) -> None:
    """Give the file in place a second name, if it is whole; else remove a damaged one before it."""
    previous = _previous(place)
    try:
        known = _known_digests(place)
    except ConfigurationError:  # which is no reason not to save
        known = set()
    if place.is_file() and (not known or _digest(place) in known):
        with replacing(previous) as link:
            try:
                os.link(place.resolve(), link)
            except OSError:  # a file system without hard links
                shutil.copyfile(place.resolve(), link)
    elif previous.is_file() and _digest(previous) not in known:
        previous.unlink()


def _record(place: Path, written: Path) -> None:
    """Write the digests of a checkpoint's new file, wherever that is, and of the one before it."""
    files = {written: place, _previous(place): _previous(place)}
    with replacing(_digests(place)) as lines:
        digests = [f"{_digest(file)}  {of.name}\n" for file, of in files.items() if file.is_file()]
        lines.write_text("".join(digests))


def _is_whole(path: Path) -> bool:
    """Return whether the digest is the recorded one; a file without a record is believed."""
    known = _known_digests(path)
    return not known or _digest(path) in known


def _known_digests(path: Path) -> set[str]:
    """Return the digests of both files: a crash between two renames leaves the older in place.

    Raises:
        ConfigurationError: if the file of the digests is there, but has none or cannot be read.
    """
    place = _digests(path)
    if not place.is_file():
        return set()
    try:
        known = {line.split()[0] for line in place.read_text("utf-8").splitlines() if line.strip()}
    except OSError as error:
        reason = reason_of(error, place)
        raise ConfigurationError(f"{path}: {place.name} cannot be read: {reason}") from error
    except UnicodeError:
        known = set()
    if not known or not all(_SHA256.fullmatch(digest) for digest in known):
        raise ConfigurationError(
            f"{path}: whether this is whole is not known, because {place.name} is damaged: it has "
            "no SHA-256 digests; remove it to resume without the check"
        )
    return known


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digests(path: Path) -> Path:
    # Lightning reads the number of an ``hpc_ckpt_1.ckpt`` from all digits in such names.
    return path.with_name(path.name + ".digests")


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".previous")
