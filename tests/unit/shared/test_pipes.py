"""Rings are counted, waiting environments come in order, and both end with the lifeline."""

import contextlib
import threading
import time
from multiprocessing import Pipe

import numpy as np
import pytest

from hts_torchrl.shared.pipes import Doorbell, PoolStopped, ReadyQueue


@pytest.fixture
def bell():
    bell = Doorbell()
    yield bell
    bell.close()


@pytest.fixture
def ends():
    """Both ends of a lifeline: the worker's and the parent's."""
    reader, writer = Pipe(duplex=False)
    yield reader, writer
    reader.close()
    writer.close()


def test_a_wait_ends_when_enough_rings_have_come(bell, ends):
    bell.ring()
    bell.ring(2)
    bell.wait(3, ends[0])


def test_rings_beyond_those_waited_for_are_kept(bell, ends):
    bell.ring(3)
    for _ in range(3):
        bell.wait(1, ends[0])


def test_a_wait_sleeps_until_the_last_ring(bell, ends):
    woken = threading.Event()
    waiter = threading.Thread(target=lambda: (bell.wait(2, ends[0]), woken.set()))
    waiter.start()
    bell.ring()
    assert not woken.wait(0.05)
    bell.ring()
    assert woken.wait(10)
    waiter.join()


def test_no_ring_means_no_wait(bell, ends):
    bell.wait(0, ends[0])


def test_a_worker_leaves_when_the_lifeline_is_closed(bell, ends):
    ends[1].close()
    with pytest.raises(PoolStopped):
        bell.wait(1, ends[0])


def test_a_closed_lifeline_counts_more_than_a_ring(bell, ends):
    bell.ring()
    ends[1].close()
    with pytest.raises(PoolStopped):
        bell.wait(1, ends[0])


def test_a_closed_lifeline_ends_a_sleep_that_has_begun(bell, ends):
    raised = []

    def wait() -> None:
        try:
            bell.wait(1, ends[0])
        except PoolStopped as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    ends[1].close()
    waiter.join(10)
    assert raised


def test_the_actors_copy_rings_the_same_bell(bell, ends):
    bell.for_ringing().ring()
    bell.wait(1, ends[0])


def test_the_actors_copy_has_no_reading_end(bell):
    assert not hasattr(bell.for_ringing(), "_reader")


@pytest.fixture
def queue():
    queue = ReadyQueue()
    yield queue
    queue.close()


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


def test_whoever_waits_in_the_queue_leaves_when_the_lifeline_is_closed(queue, ends):
    ends[1].close()
    with pytest.raises(PoolStopped):
        queue.take(8, ends[0])


def test_a_taker_who_was_too_late_waits_for_the_next(queue, ends, monkeypatch):
    """The queue is announced as readable, but another actor has emptied it."""
    monkeypatch.setattr(
        "hts_torchrl.shared.pipes.sleep_until_readable",
        lambda *_: queue.put(numbers(5)) if seen else seen.append(True),
    )
    seen: list[bool] = []
    assert queue.take(8, ends[0]).tolist() == [5]


def test_two_takers_share_out_every_number_once(queue, ends):
    taken: list[int] = []

    def take() -> None:
        with contextlib.suppress(PoolStopped):
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
