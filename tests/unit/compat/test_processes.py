"""What multiprocessing does not document, against the Python that runs the tests."""

import faulthandler
import multiprocessing
import os
import socket
import subprocess
import sys
from multiprocessing import forkserver, popen_forkserver

import pytest

from hts_torchrl.compat import processes


def test_a_process_that_is_lost_has_a_status_of_its_own(monkeypatch):
    process = popen_forkserver.Popen.__new__(popen_forkserver.Popen)
    process.returncode, process.sentinel = None, 0

    def hang_up(_):
        raise EOFError

    monkeypatch.setattr(forkserver, "read_signed", hang_up)
    monkeypatch.setattr("multiprocessing.connection.wait", lambda *_: True)
    assert process.poll() == processes.LOST


def test_a_fork_server_hands_over_no_more_descriptors():
    assert forkserver.MAXFDS_TO_SEND == processes.MOST_DESCRIPTORS


def test_a_path_that_is_too_long_is_told_so(tmp_path):
    with (
        socket.socket(socket.AF_UNIX) as server,
        pytest.raises(OSError, match=processes.PATH_TOO_LONG),
    ):
        server.bind(str(tmp_path / ("x" * 200)))


def _write_stack(writer):
    faulthandler.dump_traceback(writer.fileno(), all_threads=False)


@pytest.mark.processes
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_stack_of_a_child_ends_where_python_began_it(method):
    context = multiprocessing.get_context(method)
    reader, writer = multiprocessing.Pipe(duplex=False)
    with reader, writer:
        child = context.Process(target=_write_stack, args=(writer,))
        child.start()
        child.join()
        stack = os.read(reader.fileno(), 65_536)
    child.close()
    assert stack.endswith(processes.FIRST_FRAME)


SCRIPT = """
import multiprocessing, os, sys
from hts_torchrl.compat.processes import without_main_module
print("script", flush=True)
if __name__ == "__main__":
    with without_main_module():
        child = multiprocessing.get_context("spawn").Process(target=os.getpid)
        child.start()
    child.join()
"""


@pytest.mark.processes
def test_a_child_does_not_run_the_users_script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], stdout=subprocess.PIPE, check=True
    )
    assert run.stdout.split() == [b"script"]


def test_the_main_module_is_back_even_after_an_exception():
    main = sys.modules["__main__"]
    with pytest.raises(ValueError, match="oh"), processes.without_main_module():  # noqa: PT012
        assert sys.modules["__main__"] is not main
        raise ValueError("oh")
    assert sys.modules["__main__"] is main
