import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.workers.starting import children_environment, deaf_children, start_process


def test_children_start_with_one_thread(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with children_environment():
        inside = os.environ["OMP_NUM_THREADS"]
    assert (inside, os.environ.get("OMP_NUM_THREADS")) == ("1", None)


def test_a_number_of_threads_that_the_user_chose_is_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with children_environment():
        assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_what_workers_start_looks_for_modules_as_usual(monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with children_environment() as variables:
        inside = os.environ["PYTHONSAFEPATH"]
    assert inside == "1"
    assert "PYTHONSAFEPATH" not in {**os.environ, **variables}


@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_children_do_not_die_of_a_signal_to_the_whole_group_while_they_start(name):
    """Theirs is to wait for what the parent makes of it."""
    with deaf_children():
        child = subprocess.run(["sh", "-c", f"kill -{name} $$; echo alive"], stdout=subprocess.PIPE)
    assert child.stdout == b"alive\n"


def test_ctrl_c_comes_through_when_the_children_have_started():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    started = False
    try:
        with pytest.raises(KeyboardInterrupt), deaf_children():  # noqa: PT012
            signal.raise_signal(signal.SIGINT)
            started = True
    finally:
        signal.signal(signal.SIGINT, before)
    assert started


def test_a_socket_whose_path_is_too_long_is_told_as_the_setting_that_it_is(monkeypatch):
    def start(_):
        raise OSError("AF_UNIX path too long")

    process = SimpleNamespace(start=lambda: start(None))
    monkeypatch.setattr("tempfile.tempdir", "/long")
    with pytest.raises(ConfigurationError, match="TMPDIR=/long: it is too long for the socket"):
        start_process(process)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOENT])
def test_a_folder_that_takes_no_socket_is_told_with_the_reason(number, monkeypatch):
    """A FAT file system, a folder of the host's system, and one that was cleared away."""

    def start():
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tempfile.tempdir", "/shared")
    told = rf"^TMPDIR=/shared: no socket .* \({os.strerror(number)}\); another one is needed"
    with pytest.raises(ConfigurationError, match=told):
        start_process(SimpleNamespace(start=start))


@pytest.mark.parametrize("error", [OSError(errno.EAGAIN, "no fork"), EOFError("unexpected EOF")])
def test_a_limit_on_processes_is_told_as_one(error, monkeypatch):
    """Of the caller itself; or of the fork server, which then ends, with every further one."""

    def start():
        raise error

    monkeypatch.setattr("hts_torchrl.workers.starting._SERVER_ENDS_S", 0.0)
    monkeypatch.setattr("resource.getrlimit", lambda _: (123, 456))
    with pytest.raises(ConfigurationError, match=r"ulimit -u is 123.* or envs_per_executor$"):
        start_process(SimpleNamespace(start=start))


def _start_another():
    """Start a process by a fork server, in a process that was forked from one that has one."""
    child = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    start_process(child)
    child.join()
    sys.exit(child.exitcode)


@pytest.mark.processes
def test_a_process_that_was_forked_beside_a_fork_server_starts_processes():
    server = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    server.start()
    server.join()
    forked = multiprocessing.get_context("fork").Process(target=_start_another)
    forked.start()
    forked.join()
    assert (server.exitcode, forked.exitcode) == (0, 0)
