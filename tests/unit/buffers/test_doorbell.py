import threading
from multiprocessing import Pipe

import pytest

from hts_torchrl.buffers.doorbell import CrewStopped, Doorbell


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
    with pytest.raises(CrewStopped):
        bell.wait(1, ends[0])


def test_a_closed_lifeline_counts_more_than_a_ring(bell, ends):
    bell.ring()
    ends[1].close()
    with pytest.raises(CrewStopped):
        bell.wait(1, ends[0])


def test_a_closed_lifeline_ends_a_sleep_that_has_begun(bell, ends):
    raised = []

    def wait() -> None:
        try:
            bell.wait(1, ends[0])
        except CrewStopped as error:
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
