import contextlib
import threading
import time
from multiprocessing import Pipe

import numpy as np
import pytest

from hts_torchrl.buffers.doorbell import CrewStopped
from hts_torchrl.buffers.ready_queue import ReadyQueue


@pytest.fixture
def queue():
    queue = ReadyQueue()
    yield queue
    queue.close()


@pytest.fixture
def ends():
    """Both ends of a lifeline: the worker's and the parent's."""
    reader, writer = Pipe(duplex=False)
    yield reader, writer
    reader.close()
    writer.close()


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_one_take_brings_all_that_waits(queue, ends):
    queue.put(numbers(3, 1))
    queue.put(numbers(2))
    assert queue.take(8, ends[0]).tolist() == [3, 1, 2]


def test_a_take_brings_at_most_what_was_asked_for(queue, ends):
    queue.put(numbers(0, 1, 2))
    taken = [queue.take(2, ends[0]).tolist(), queue.take(2, ends[0]).tolist()]
    assert taken == [[0, 1], [2]]


def test_a_take_of_all_sleeps_until_the_last_is_announced(queue, ends):
    queue.put(numbers(2, 0))
    last = threading.Timer(0.05, queue.put, [numbers(1)])
    last.start()
    assert queue.take_all(3, ends[0]).tolist() == [2, 0, 1]
    last.join()


def test_a_take_of_all_leaves_what_is_more(queue, ends):
    queue.put(numbers(0, 1, 2))
    assert queue.take_all(2, ends[0]).tolist() == [0, 1]
    assert queue.take_waiting(8).tolist() == [2]


def test_a_take_that_does_not_wait_brings_nothing_from_an_empty_queue(queue):
    assert queue.take_waiting(8).tolist() == []


def test_large_numbers_keep_their_value(queue):
    queue.put(numbers(2**31 - 1))
    assert queue.take_waiting(1).tolist() == [2**31 - 1]


def test_a_worker_leaves_when_the_lifeline_is_closed(queue, ends):
    ends[1].close()
    with pytest.raises(CrewStopped):
        queue.take(8, ends[0])


def test_a_taker_who_was_too_late_waits_for_the_next(queue, ends, monkeypatch):
    """The queue is announced as readable, but another actor has emptied it."""
    monkeypatch.setattr(
        "hts_torchrl.buffers.ready_queue.sleep_until_readable",
        lambda *_: queue.put(numbers(5)) if seen else seen.append(True),
    )
    seen: list[bool] = []
    assert queue.take(8, ends[0]).tolist() == [5]


def test_two_takers_share_out_every_number_once(queue, ends):
    taken: list[int] = []

    def take() -> None:
        with contextlib.suppress(CrewStopped):
            while True:
                taken.extend(queue.take(3, ends[0]).tolist())

    takers = [threading.Thread(target=take) for _ in range(2)]
    for taker in takers:
        taker.start()
    for first in range(0, 3000, 3):
        queue.put(numbers(first, first + 1, first + 2))
    while len(taken) < 3000:
        time.sleep(0.001)
    ends[1].close()
    for taker in takers:
        taker.join(10)
    assert sorted(taken) == list(range(3000))
