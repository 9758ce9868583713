"""A replay buffer that the collector extends, as TorchRL's collectors do."""

import pytest
import torch
from torchrl.data import LazyTensorStorage, ListStorage, ReplayBuffer, SliceSampler
from torchrl.envs import MultiStepTransform, Reward2GoTransform

from hts_torchrl import ConfigurationError
from tests.runs import digest
from tests.torchrl_contract.test_batches import ENVS, ROUNDS, STEPS, collect

FRAMES = ENVS * STEPS * ROUNDS


def buffer(**settings) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(FRAMES, **settings), batch_size=16)


@pytest.fixture(scope="module")
def batches():
    """What is handed out without a buffer."""
    return list(collect())


def test_nothing_is_handed_out_and_each_transition_is_kept_once_in_order(batches):
    kept = buffer()
    assert list(collect(replay_buffer=kept)) == [None] * ROUNDS
    assert digest([kept[:]]) == digest([torch.cat([batch.reshape(-1) for batch in batches])])


def test_a_batch_is_there_when_the_iterator_has_returned():
    kept = buffer()
    collector = collect(replay_buffer=kept)
    for number, _ in enumerate(collector, 1):
        assert len(kept) == kept.write_count == collector.stats()["frames"] == 60 * number
        assert collector.getattr_rb("write_count") == 60 * number


def test_next_returns_none_and_extends_the_buffer():
    kept = buffer()
    collector = collect(replay_buffer=kept)
    assert collector.next() is None
    assert len(kept) == ENVS * STEPS
    collector.shutdown()


def test_start_is_refused_as_nobody_would_fill_the_buffer_in_a_thread():
    """A loop of TorchRL's would wait for ``write_count`` without end."""
    kept = buffer()
    collector = collect(replay_buffer=kept)
    with pytest.raises(ConfigurationError, match=r"start\(\) with a replay_buffer"):
        collector.start()
    assert [*collector] == [None] * ROUNDS


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_views_are_copied_for_the_buffer(batches, storage):
    """A list, which a buffer has that is given no storage, keeps what it gets."""
    kept = ReplayBuffer(storage=storage(FRAMES), batch_size=16)
    list(collect(replay_buffer=kept, clone=False))
    assert digest([kept[:].contiguous()]) == digest(
        [torch.cat([batch.reshape(-1) for batch in batches])]
    )


def test_steps_that_a_transform_keeps_for_the_next_batch_are_copied():
    def kept_steps(*, clone: bool) -> str:
        kept = ReplayBuffer(
            storage=LazyTensorStorage(FRAMES), transform=MultiStepTransform(3, 0.9), batch_size=16
        )
        list(collect(replay_buffer=kept, set_truncated=True, clone=clone))
        return digest([kept[:]])

    assert kept_steps(clone=False) == kept_steps(clone=True)


def test_a_buffer_with_a_dimension_for_time_gets_steps_of_all_rows():
    kept = buffer(ndim=2)
    list(collect(replay_buffer=kept))
    assert len(kept) == FRAMES


def test_it_gets_what_postproc_returns(batches):
    kept = buffer()
    list(collect(replay_buffer=kept, postproc=lambda batch: batch.select("action")))
    assert list(kept[:].keys()) == ["action"]
    assert torch.equal(kept[:]["action"], torch.cat([b["action"].flatten() for b in batches]))


@pytest.mark.parametrize("steps", [5, STEPS])
def test_split_trajectories_are_rows_of_a_list(steps):
    """In the first 5 steps no game ends, and there are as many trajectories as environments."""
    kept = ReplayBuffer(storage=ListStorage(100), collate_fn=lambda rows: rows)
    list(collect(replay_buffer=kept, split_trajs=True, frames_per_batch=ENVS * steps))
    rows = kept[:]
    assert {row.ndim for row in rows} == {1}
    assert sum(int(row["collector", "mask"].sum()) for row in rows) == FRAMES


def test_the_hook_sees_the_batch_before_the_buffer_has_it():
    kept, seen = buffer(), []
    hook = lambda batch: seen.append((len(kept), tuple(batch.shape)))  # noqa: E731
    list(collect(replay_buffer=kept, post_collect_hook=hook))
    assert seen == [(60 * number, (ENVS, STEPS)) for number in range(ROUNDS)]


def slices(**settings) -> SliceSampler:
    return SliceSampler(slice_len=2, **settings)


class TestOrder:
    """Of transitions in a buffer of one dimension, where environments follow each other."""

    @pytest.mark.parametrize(
        "readers",
        [
            {"sampler": slices(end_key=("next", "done"))},
            {"transform": MultiStepTransform(3, 0.9)},
            {"transform": Reward2GoTransform(0.9)},
        ],
        ids=["slices", "steps", "rewards"],
    )
    def test_what_goes_on_from_one_environment_to_another_is_refused(self, readers):
        kept = ReplayBuffer(storage=LazyTensorStorage(FRAMES), batch_size=16, **readers)
        with pytest.raises(ConfigurationError, match=r"ndim=2, or say set_truncated=True"):
            collect(replay_buffer=kept)

    @pytest.mark.parametrize(
        ("sampler", "ndim", "settings"),
        [
            (slices(end_key=("next", "done")), 1, {"set_truncated": True}),
            (slices(end_key=("next", "done")), 2, {}),
            (slices(traj_key=("collector", "traj_ids")), 1, {}),
            (slices(), 1, {}),
        ],
        ids=["truncated", "rows", "numbers", "found"],
    )
    def test_slices_are_of_one_trajectory(self, sampler, ndim, settings):
        storage = LazyTensorStorage(FRAMES, ndim=ndim)
        kept = ReplayBuffer(storage=storage, sampler=sampler, batch_size=FRAMES)
        list(collect(replay_buffer=kept, **settings))
        numbers = kept.sample()["collector", "traj_ids"].reshape(-1, 2)
        assert torch.equal(numbers[:, 0], numbers[:, 1])


class TestWholeTrajectories:
    def test_they_are_written_one_after_another_without_padding(self, batches):
        kept = buffer()
        handed_out = list(collect(replay_buffer=kept, trajs_per_batch=1))
        assert handed_out == [None] * ROUNDS
        ends = kept[:]["next", "done"].squeeze(-1)
        expected = torch.cat([batch.reshape(-1) for batch in batches])
        assert ends[-1]
        assert ends.sum() == expected["next", "done"].sum()
        numbers = kept[:]["collector", "traj_ids"]
        changes = numbers[1:] != numbers[:-1]
        assert torch.equal(changes, ends[:-1])

    @pytest.mark.parametrize(("per_write", "most"), [(1, 1), (2, 2), (None, 1000)])
    def test_so_many_are_written_at_once(self, per_write, most):
        sizes = []

        class Counted(ReplayBuffer):
            def extend(self, data, *args, **settings):
                sizes.append(data["collector", "traj_ids"].unique().numel())
                return super().extend(data, *args, **settings)

        kept = Counted(storage=LazyTensorStorage(FRAMES))
        list(collect(replay_buffer=kept, trajs_per_batch=1, trajs_per_write=per_write))
        assert max(sizes) <= most
        assert (max(sizes) > 1) is (per_write != 1)

    def test_slices_of_one_trajectory_can_be_sampled(self):
        sampler = SliceSampler(slice_len=4, traj_key=("collector", "traj_ids"), strict_length=False)
        kept = ReplayBuffer(storage=LazyTensorStorage(FRAMES), sampler=sampler, batch_size=16)
        list(collect(replay_buffer=kept, trajs_per_batch=1))
        sample = kept.sample()
        steps = sample["next", "step_count"].squeeze(-1)
        numbers = sample["collector", "traj_ids"]
        same = numbers[1:] == numbers[:-1]
        follows = steps[1:] == steps[:-1] + 1
        assert (follows | ~same | (steps[1:] <= steps[:-1])).all()
        assert follows.any()
