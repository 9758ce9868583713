"""Seeds, signals, one thread, and a check after each test that nothing is left behind."""

from __future__ import annotations

import gc
import multiprocessing
import random
import signal
import tempfile
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
import torch


def pytest_collection_finish() -> None:
    """Exclude what was imported from garbage collections, each of which takes a second with it.

    Use one thread of torch, also in the fixtures of modules, which come before those of tests.
    """
    gc.collect()
    gc.freeze()
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_torch_thread():
    """Also after a test with TorchRL's SerialEnv, which leaves more."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _fork_server_with_torch():
    """Import once what each actor would import for seconds.

    Not where there is a GPU: TorchRL counts GPUs when it is imported, and where that starts CUDA no
    child that was forked afterwards can use it.
    """
    if torch.cuda.is_available():
        yield
        return
    preload = forkserver.set_forkserver_preload
    heavy = ["hts_torchrl.workers.actor", "torchrl.modules"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "set_forkserver_preload", lambda names: preload(names + heavy))
        yield


@pytest.fixture(autouse=True, scope="session")
def _folder_of_programs():
    """A program that a test kills leaves its temporary files: not beyond the tests."""
    tempfile.gettempdir()  # this process keeps its own
    with (
        tempfile.TemporaryDirectory(prefix="hts", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        yield


@pytest.fixture(autouse=True)
def _seeds():
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - some tests show that the global generator is not read
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _signals():
    """Put back what answers signals: Lightning and TorchRL's Trainer leave answers of their own."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def shared_memories() -> set[str]:
    """Open descriptors of this process that hold shared arrays."""
    found = set()
    for link in Path("/proc/self/fd").glob("*"):
        try:
            if "hts_torchrl" in str(link.readlink()):
                found.add(link.name)
        except OSError:  # closed since
            continue
    return found


@pytest.fixture(autouse=True)
def _nothing_left_behind(request):
    """Fail if a test leaves a worker process, or shared arrays that nobody can reach any more."""
    children, memories = set(multiprocessing.active_children()), shared_memories()
    yield
    left = set(multiprocessing.active_children()) - children
    for process in left:
        process.kill()
        process.join()
    assert not left, f"processes left behind: {sorted(process.name for process in left)}"
    if request.node.funcargs is not None:  # as it is when Ctrl-C has ended the tests
        request.node.funcargs.clear()  # the values of the test's fixtures, torn down by now
    if shared_memories() - memories:
        gc.collect()
    assert shared_memories() <= memories, "shared memory left behind"
