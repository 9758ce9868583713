"""Rounds on their way to a GPU; what else is handed out: ``torchrl_contract/test_batches.py``."""

import torch
from tensordict import TensorDict

from hts_torchrl.collectors.handing_out import on_device
from tests.graphs import needs_gpu

GPU = torch.device("cuda:0")


class Round:
    """Notes what is done to it."""

    def __init__(self, *done) -> None:
        self.done = done

    def pin_memory(self, num_threads):
        return Round(*self.done, ("pinned", num_threads))

    def to(self, device, **settings):
        return Round(*self.done, (device, settings))


def test_a_round_goes_to_a_gpu_through_page_locked_memory_without_waiting():
    assert on_device(Round(), GPU).done == (("pinned", 0), (GPU, {"non_blocking": True}))


def test_other_devices_are_waited_for():
    device = torch.device("meta")
    assert on_device(Round(), device).done == ((device, {}),)


class TestOnAGPU:
    pytestmark = needs_gpu

    def test_a_storage_may_be_overwritten_as_soon_as_its_round_is_handed_out(self):
        storage = torch.zeros(64, 128, 4, 84, 84, dtype=torch.uint8)
        batch = TensorDict({"observation": storage}, [64, 128], names=[None, "time"])
        for value in range(1, 6):
            storage.fill_(value)
            moved = on_device(batch, GPU)
            storage.fill_(255)
            assert (moved["observation"] == value).all()
            assert moved.names == [None, "time"]
