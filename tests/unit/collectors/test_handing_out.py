"""Rounds on their way to a GPU; what else is handed out: ``torchrl_contract/test_batches.py``."""

import torch
from tensordict import TensorDict

from hts_torchrl.collectors.handing_out import in_one_copy, on_device
from tests.graphs import needs_gpu

GPU = torch.device("cuda:0")


def round_of(storage: torch.Tensor) -> TensorDict:
    entries = {"observation": storage, "next": {"done": torch.zeros(*storage.shape[:2], 1).bool()}}
    batch = TensorDict(entries, storage.shape[:2], names=[None, "time"])
    batch["next", "done"][:, 1] = True
    return batch


class Elsewhere:
    """Notes where it is asked to go."""

    def to(self, *asked, **settings):
        return asked, settings


def test_one_copy_has_all_entries_of_a_round_and_none_of_its_memory():
    storage = torch.arange(3 * 4 * 5).reshape(3, 4, 5)
    batch = round_of(storage[:, ::2])  # a view that skips steps
    expected = batch.clone()
    moved = in_one_copy(batch, torch.device("cpu"))
    storage.fill_(-1)
    batch["next", "done"].fill_(False)
    assert (moved == expected).all()
    assert (moved.names, moved.device) == ([None, "time"], torch.device("cpu"))
    assert moved["next", "done"].dtype == torch.bool
    memory = {each.untyped_storage().data_ptr() for each in moved.values(True, True)}
    assert len(memory) == 1


def test_other_devices_are_waited_for():
    device = torch.device("meta")
    assert on_device(Elsewhere(), device) == ((device,), {})


class TestOnAGPU:
    pytestmark = needs_gpu

    def test_a_storage_may_be_overwritten_as_soon_as_its_round_is_handed_out(self):
        storage = torch.zeros(64, 128, 4, 84, 84, dtype=torch.uint8)
        batch = round_of(storage)
        for value in range(1, 6):
            storage.fill_(value)
            moved = on_device(batch, GPU)
            storage.fill_(255)
            assert (moved["observation"] == value).all()
            assert moved.names == [None, "time"]
            assert moved["next", "done"].sum() == 64
