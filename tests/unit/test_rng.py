import hashlib
import itertools
import math
from functools import partial

import numpy as np
import pytest

from hts_torchrl.rng import (
    action_draws,
    env_seed,
    uniform_draws,
    update_seed,
)
from tests import philox

normal_draws = partial(action_draws, 0)
DRAWS = pytest.mark.parametrize("draws", [uniform_draws, normal_draws, partial(action_draws, 1)])


PI = [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89]
# Of the file kat_vectors of Random123, the authors' own implementation: counter, key, words.
KNOWN = {
    "zeros": (
        0,
        (0, 0),
        [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B],
    ),
    "ones": (
        2**256 - 1,
        (2**64 - 1, 2**64 - 1),
        [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0],
    ),
    "pi": (
        sum(word << 64 * place for place, word in enumerate(PI)),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        [0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6],
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_tests_own_philox_gives_the_known_answers(name):
    counter, key, words = KNOWN[name]
    assert philox.philox(counter, key) == words


@pytest.mark.parametrize("name", ["ones", "pi"])
def test_uniform_draws_are_the_known_answers_of_philox(name):
    """A step of up to four draws has one counter, from 1 on."""
    counter, key, words = KNOWN[name]
    drawn = uniform_draws(*key, counter - 1, 1, 4)
    assert drawn[0].tolist() == [((word >> 13) + 0.5) / 2**51 for word in words]


def test_a_step_with_more_than_four_draws_has_a_counter_for_each_four():
    expected = [philox.uniform(7, 3, step, 9) for step in (5, 6)]
    assert uniform_draws(7, 3, 5, 2, 9).tolist() == expected


def test_normal_draws_are_those_of_box_and_muller():
    one, two, three, four = philox.uniform(7, 3, 5, 4)
    expected = [
        math.sqrt(-2 * math.log(one)) * math.cos(2 * math.pi * three),
        math.sqrt(-2 * math.log(two)) * math.cos(2 * math.pi * four),
        math.sqrt(-2 * math.log(one)) * math.sin(2 * math.pi * three),
    ]
    assert normal_draws(7, 3, 5, 1, 3)[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_mixed_draws_are_uniform_for_choices_and_of_other_counters_for_numbers():
    one, two, three, four = philox.uniform(7, 3, 5, 4)
    expected = [
        one,
        two,
        math.sqrt(-2 * math.log(three)) * math.cos(2 * math.pi * four),
        math.sqrt(-2 * math.log(three)) * math.sin(2 * math.pi * four),
    ]
    assert action_draws(2, 7, 3, 5, 1, 4)[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_draws_of_choices_alone_are_uniform():
    for width in (1, 2, 5):
        both = action_draws(width, 7, 3, 5, 2, width), uniform_draws(7, 3, 5, 2, width)
        assert np.array_equal(*both)


@DRAWS
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 9])
def test_a_step_has_its_draws_however_many_steps_are_made_at_once(draws, width):
    whole = draws(7, 3, 0, 12, width)
    parts = [draws(7, 3, first, 4, width) for first in (0, 4, 8)]
    assert np.array_equal(whole, np.concatenate(parts))


@DRAWS
@pytest.mark.parametrize("width", [1, 4, 5])
def test_no_two_steps_environments_or_seeds_share_a_draw(draws, width):
    many = [draws(seed, env, 0, 50, width) for seed in range(3) for env in range(5)]
    assert len(np.unique(np.concatenate(many))) == 3 * 5 * 50 * width


@DRAWS
def test_the_global_generator_is_neither_read_nor_moved(draws):
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    first = draws(0, 0, 0, 4, 1)
    assert np.array_equal(np.random.get_state()[1], before)  # noqa: NPY002
    np.random.seed(5)  # noqa: NPY002
    assert np.array_equal(draws(0, 0, 0, 4, 1), first)


@DRAWS
def test_shape_is_steps_by_width(draws):
    assert draws(0, 0, 0, 6, 3).shape == (6, 3)


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 - 1])
def test_every_64_bit_seed_is_accepted(seed):
    assert uniform_draws(seed, 0, 0, 1, 1).shape == (1, 1)


def test_a_run_of_trillions_of_steps_does_not_exhaust_the_counter():
    late = uniform_draws(0, 0, 10**13, 3, 5)
    assert np.array_equal(late[1:], uniform_draws(0, 0, 10**13 + 1, 2, 5))


class ExtremeGenerator:
    """Stands for Philox, with words that are all zeros or all ones."""

    word = 0

    def __init__(self, **_: object) -> None:
        pass

    def random_raw(self, count: int) -> np.ndarray:
        return np.full(count, self.word, np.uint64)


@pytest.mark.parametrize("word", [0, 2**64 - 1])
def test_the_extreme_words_of_the_generator_stay_between_0_and_1(monkeypatch, word):
    monkeypatch.setattr(ExtremeGenerator, "word", word)
    monkeypatch.setattr(np.random, "Philox", ExtremeGenerator)
    assert 0.0 < uniform_draws(0, 0, 0, 1, 1).item() < 1.0


def test_the_largest_draw_times_any_sum_stays_below_the_sum(monkeypatch):
    monkeypatch.setattr(ExtremeGenerator, "word", 2**64 - 1)
    monkeypatch.setattr(np.random, "Philox", ExtremeGenerator)
    largest = uniform_draws(0, 0, 0, 1, 1).item()
    sums = 1.0 + np.arange(-64, 65) * 2.0**-52
    assert (largest * sums < sums).all()


@pytest.mark.parametrize("word", [0, 2**64 - 1])
def test_extreme_words_give_finite_normal_draws(monkeypatch, word):
    monkeypatch.setattr(ExtremeGenerator, "word", word)
    monkeypatch.setattr(np.random, "Philox", ExtremeGenerator)
    assert np.isfinite(normal_draws(0, 0, 0, 1, 2)).all()


def test_uniform_draws_fill_twenty_equal_bins_equally():
    values = uniform_draws(1, 2, 0, 20_000, 5).ravel()
    counts, _ = np.histogram(values, 20, (0.0, 1.0))
    expected = len(values) / 20
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 50  # 19 degrees of freedom: exceeded once in 7000 seeds


@pytest.mark.parametrize("lag", [1, 4])
def test_uniform_draws_of_consecutive_steps_are_uncorrelated(lag):
    values = uniform_draws(1, 2, 0, 50_000, 1).ravel()
    assert abs(np.corrcoef(values[lag:], values[:-lag])[0, 1]) < 0.02


def test_draws_of_neighbouring_environments_are_uncorrelated():
    rows = np.stack([uniform_draws(1, env, 0, 20_000, 1).ravel() for env in range(4)])
    assert np.abs(np.corrcoef(rows) - np.eye(4)).max() < 0.03


def test_normal_draws_have_the_moments_of_the_standard_normal():
    values = normal_draws(1, 2, 0, 50_000, 3)
    moments = [(values**power).mean() for power in range(1, 5)]
    assert moments == pytest.approx([0.0, 1.0, 0.0, 3.0], abs=0.05)


def test_components_of_one_normal_draw_are_uncorrelated():
    rows = normal_draws(1, 2, 0, 50_000, 4).T
    assert np.abs(np.corrcoef(rows) - np.eye(4)).max() < 0.02


def test_environment_seeds_fit_every_simulator():
    seeds = [env_seed(seed, env) for seed in (0, -1, 2**64 - 1) for env in range(100)]
    assert min(seeds) >= 0
    assert max(seeds) < 2**31


def test_environments_streams_and_seeds_are_seeded_apart():
    seeds = {
        env_seed(seed, env, stream)
        for seed in range(4) for env in range(50) for stream in ("train", "evaluation")
    }  # fmt: skip
    assert len(seeds) == 4 * 50 * 2


# As NumPy's SeedSequence gave them when they were written down: a run of yesterday must come again.
@pytest.mark.parametrize(
    ("arguments", "seeds"),
    [
        ((0, 0), [514218651, 1568081619, 4872604, 1308096438]),
        ((7, 3), [329398229, 1305472572, 764793435, 278559799]),
        ((-1, 2), [1269553893, 1294199626, 878142225, 1974617407]),
        ((7, 3, "evaluation"), [1618387478]),
    ],
)
def test_environment_seeds_are_those_of_earlier_runs(arguments, seeds):
    assert [env_seed(*arguments, number=number) for number in range(len(seeds))] == seeds


@pytest.mark.parametrize("seed", [0, 7, 2**40, -1])
def test_environment_seeds_hash_seed_environment_stream_and_number(seed):
    for number in range(3):
        assert env_seed(seed, 9, number=number) == philox.env_seed(seed, 9, number)


def test_no_two_games_of_a_run_have_the_same_seed():
    seeds = {env_seed(1, env, number=number) for env in range(20) for number in range(50)}
    assert len(seeds) == 20 * 50


def test_seeds_of_updates_parts_and_ranks_differ():
    keys = itertools.product([-1, 0, 1, 2**32], range(4), range(4), range(3))
    seeds = {update_seed(*key) for key in keys}
    assert len(seeds) == 4 * 4 * 4 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Torch's CPU generator takes the lower half.
    assert len({seed % 2**32 for seed in seeds}) == len(seeds)


def test_the_seed_of_an_update_is_the_same_in_every_version():
    key = (5).to_bytes(8, "little") + bytes([7, *[0] * 7, 2, *[0] * 7]) + bytes(8)
    expected = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") // 2
    assert update_seed(5, 7, 2) == expected
