import errno
import os
import re
import stat
from pathlib import Path

import pytest

from hts_torchrl.durable_file import replacing


def test_what_was_written_takes_the_place(tmp_path):
    place = tmp_path / "score"
    place.write_text("old")
    with replacing(place) as new:
        new.write_text("new")
        assert place.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["score"]
    assert place.read_text() == "new"


def test_an_exception_leaves_what_was_there_and_nothing_else(tmp_path):
    place = tmp_path / "score"
    place.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(place) as new:  # noqa: PT012 - half is written
        new.write_text("ne")
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["score"]
    assert place.read_text() == "old"


def test_what_a_crashed_process_left_is_no_obstacle(tmp_path):
    (tmp_path / ".score.new").write_text("half of another")
    with replacing(tmp_path / "score") as new:
        assert not new.exists()
        new.write_text("new")
    assert (tmp_path / "score").read_text() == "new"


def test_a_place_without_a_name_is_refused():
    with pytest.raises(IsADirectoryError), replacing(Path()):
        pass


def refusing(number: int, folders: bool):
    """What stands for ``os.fsync`` where a file system refuses it of folders, or of files."""

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == folders:
            raise OSError(number, os.strerror(number))

    return fsync


def test_a_file_system_that_cannot_write_a_folder_through_is_no_obstacle(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", refusing(errno.EINVAL, folders=True))
    with replacing(tmp_path / "score") as new:
        new.write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["score"]


@pytest.mark.parametrize(("number", "folders"), [(errno.EIO, True), (errno.EINVAL, False)])
def test_other_failures_to_write_through_are_told(tmp_path, monkeypatch, number, folders):
    monkeypatch.setattr(os, "fsync", refusing(number, folders))
    told = re.escape(os.strerror(number))
    with pytest.raises(OSError, match=told), replacing(tmp_path / "score") as new:
        new.write_text("new")
