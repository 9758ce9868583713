"""Files that are replaced whole: what was there stays until the new one is on the disk."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(place: Path) -> Iterator[Path]:
    """Give a name in the folder of ``place``; what is written there takes its place, or nothing.

    The folder is made if it is not there.

    Example:
        >>> with replacing(Path("score")) as new:
        ...     _ = new.write_text("12.5")
        >>> Path("score").read_text()
        '12.5'
    """
    if not place.name:  # the working folder, or the root
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(place))
    place.parent.mkdir(parents=True, exist_ok=True)
    # Lightning takes whatever has ``ckpt_2`` in its name for a job's second checkpoint.
    new = place.with_name(f".{place.name.replace('_', '~')}.new")
    new.unlink(missing_ok=True)  # of a process that crashed here
    try:
        yield new
        _sync(new)
        new.replace(place)
        _sync(place.parent)
    finally:
        new.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems refuse this of a folder; the file itself is written by then.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
