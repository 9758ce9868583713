"""Sums over chunks: the order of additions, shares of ranks, and what cannot be shared."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from hts_torchrl import ConfigurationError
from hts_torchrl.learner import gradient_chunks
from hts_torchrl.learner.gradient_chunks import GradientChunks, tree_sum

COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12)


def vectors(count):
    generator = torch.Generator().manual_seed(count)
    scales = 10.0 ** torch.randint(-3, 4, (count, 1), generator=generator)
    return torch.randn(count, 1000, generator=generator) * scales


def levels(arrays):
    """Pairs of neighbours, level by level, in numpy; what has no neighbour goes on as it is."""
    while len(arrays) > 1:
        pairs = [a + b for a, b in zip(arrays[::2], arrays[1::2], strict=False)]
        arrays = pairs + arrays[len(pairs) * 2 :]
    return arrays[0]


class Wire:
    """Stands for ranks that send one after another: each call tells what all have sent."""

    def __init__(self, monkeypatch):
        self.sent = []
        monkeypatch.setattr(gradient_chunks, "of_all_ranks", self.gather)

    def gather(self, tensor):
        self.sent.append(tensor)
        return self.sent


class TestTreeSum:
    @pytest.mark.parametrize("count", COUNTS)
    def test_adds_pairs_of_neighbours_level_by_level(self, count):
        given = vectors(count)
        assert np.array_equal(tree_sum(given).numpy(), levels(list(given.numpy())))

    def test_is_not_the_sum_from_left_to_right(self):
        given = vectors(8)
        assert not torch.equal(tree_sum(given), sum(given[1:], start=given[0]))

    def test_leaves_what_it_is_given(self):
        given = vectors(4)
        before = given.clone()
        tree_sum(given)
        assert torch.equal(given, before)


class TestMean:
    @pytest.mark.parametrize(
        ("count", "ranks"),
        [(c, r) for c in COUNTS for r in (1, 2, 3, 4) if c % r == 0],
    )
    def test_does_not_depend_on_the_number_of_ranks(self, monkeypatch, count, ranks):
        given, wire = vectors(count), Wire(monkeypatch)
        for rank in range(ranks):
            chunks = GradientChunks(count, rank=rank, world_size=ranks)
            mean = chunks.mean(given[list(chunks.own)])
        expected = levels(list(given.numpy())) / np.float32(count)
        assert np.array_equal(mean.numpy(), expected)
        assert len(wire.sent) == (ranks if ranks > 1 else 0)

    def test_a_rank_sends_one_vector_where_its_chunks_are_a_subtree(self, monkeypatch):
        wire = Wire(monkeypatch)
        GradientChunks(8, rank=0, world_size=2).mean(vectors(4))
        assert wire.sent[0].shape == (1, 1000)


class TestChunks:
    def test_are_neighbouring_environments_in_their_order(self):
        batch = TensorDict({"env": torch.arange(6)[:, None].expand(6, 3)}, [6, 3])
        chunks = GradientChunks(6, rank=1, world_size=2)
        assert list(chunks.own) == [3, 4, 5]
        assert [each["env"][:, 0].tolist() for each in chunks.of(batch)] == [[0, 1], [2, 3], [4, 5]]

    def test_one_is_the_round_itself(self):
        batch = TensorDict({}, [5, 3])
        assert GradientChunks(1).of(batch) == [batch]

    def test_ranks_must_divide_them(self):
        with pytest.raises(ConfigurationError, match="gradient_chunks=4 on 3 ranks; a multiple of"):
            GradientChunks(4, world_size=3)

    def test_they_must_divide_the_environments(self):
        with pytest.raises(ConfigurationError, match="gradient_chunks=4 does not divide the 6 env"):
            GradientChunks(4, world_size=2).of(TensorDict({}, [3, 1]))

    def test_there_is_at_least_one(self):
        with pytest.raises(ConfigurationError, match="gradient_chunks=0; 1 or more"):
            GradientChunks(0)
