"""Silence is measured from what workers write, and their stacks can be asked for."""

import contextlib
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest

from hts_torchrl.workers.diagnostics import Silence, StackPipe


@pytest.fixture
def now(monkeypatch):
    """A clock that stands still until a test turns it."""
    clock = SimpleNamespace(s=100.0)
    monkeypatch.setattr("hts_torchrl.workers.diagnostics.time.monotonic", lambda: clock.s)
    return clock


@pytest.fixture
def signs():
    return np.zeros((3, 4))


@pytest.fixture
def silence(now, signs):  # noqa: ARG001
    return Silence(SimpleNamespace(signs=signs.copy))


def test_silence_lasts_since_the_beginning_where_nothing_is_heard(silence, now):
    now.s += 7
    assert silence.lasts_s().tolist() == [7, 7, 7]


@pytest.mark.parametrize("sign", range(4))
def test_any_sign_ends_the_silence_of_its_worker_alone(silence, now, signs, sign):
    now.s += 7
    signs[1, sign] += 1
    assert silence.lasts_s().tolist() == [7, 0, 7]


def test_one_sign_counts_once(silence, now, signs):
    signs[1, 0] += 1
    silence.lasts_s()
    now.s += 7
    assert silence.lasts_s().tolist() == [7, 7, 7]


def test_a_pause_of_this_process_is_nobodys_silence(silence, now):
    """As after SIGSTOP and SIGCONT to all processes of a job."""
    now.s += 7
    silence.lasts_s()
    now.s += 600
    assert silence.lasts_s().tolist() == [7, 7, 7]
    now.s += 2
    assert silence.lasts_s().tolist() == [9, 9, 9]


pytestmark = pytest.mark.processes


def outermost(stacks, ready):
    stacks.answer()
    innermost(ready)


def innermost(ready):
    ready.send("")
    time.sleep(3600)


@pytest.fixture
def stacks():
    stacks = StackPipe()
    yield stacks
    stacks.close()


@pytest.fixture
def process(stacks):
    reader, writer = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=outermost, args=(stacks, writer), daemon=True)
    process.start()
    reader.recv()
    yield process
    process.kill()
    process.join()
    reader.close()
    writer.close()


def test_the_stack_begins_with_the_innermost_call(stacks, process):
    functions = [line.rpartition(" in ")[2] for line in stacks.ask(process).splitlines()]
    assert functions.index("innermost") + 1 == functions.index("outermost")
    assert functions[-1] == "<module>"


def test_a_worker_answers_whenever_it_is_asked(stacks, process):
    stacks_seen = [stacks.ask(process) for _ in range(20)]
    assert all(stack.startswith("Stack (most recent call first):\n") for stack in stacks_seen)
    assert all(stack.count(" in innermost\n") == 1 for stack in stacks_seen)


def test_the_writing_end_tells_when_all_workers_are_gone(stacks, process):
    assert not stacks.wait_for_writers(0.0)
    process.kill()
    assert stacks.wait_for_writers(60.0)


def test_a_dead_worker_gives_no_stack(stacks, process):
    process.kill()
    process.join()
    assert stacks.ask(process) == ""


def test_a_stopped_worker_gives_no_stack(stacks, process, monkeypatch):
    monkeypatch.setattr("hts_torchrl.workers.diagnostics._PATIENCE_S", 0.2)
    os.kill(process.pid, signal.SIGSTOP)
    assert stacks.ask(process) == ""


def test_a_full_pipe_does_not_hold_a_worker_that_somebody_else_has_asked(stacks, process):
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(stacks._writer.fileno(), b"x" * 4096)
    os.kill(process.pid, signal.SIGUSR1)
    stack = stacks.ask(process)
    assert " in innermost" in stack
    assert "x" * 10 not in stack
