"""Uniform draws keyed by (seed, environment, step): the randomness of every action.

They come from a counter-based generator (Philox4x64-10; Salmon et al., 2011), so the draw of any
step can be made without those before it. What a learner draws is keyed by (seed, update).
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np

_WORDS_PER_COUNT = 4


def uniform_draws(
    seed: int, env: int, first_step: int, num_steps: int, width: int
) -> np.ndarray[Any, Any]:
    """Return float64 draws ``[num_steps, width]`` in the open interval (0, 1).

    They are of an environment, by its global index, from its step ``first_step`` in the run on.

    Example:
        >>> bool((uniform_draws(0, 3, 5, 1, 2) == uniform_draws(0, 3, 0, 9, 2)[5]).all())
        True
    """
    counts = -(-width // _WORDS_PER_COUNT)
    key = np.array([seed % 2**64, env], np.uint64)
    generator = np.random.Philox(counter=first_step * counts, key=key)
    words = generator.random_raw(num_steps * counts * _WORDS_PER_COUNT)
    words = words.reshape(num_steps, counts * _WORDS_PER_COUNT)[:, :width]
    # 51 bits, so that a draw times a sum of probabilities stays below that sum after rounding.
    return ((words >> np.uint64(13)) + 0.5) * 2.0**-51


def action_draws(
    choices: int, seed: int, env: int, first_step: int, num_steps: int, width: int
) -> np.ndarray[Any, Any]:
    """Return draws ``[num_steps, width]``: uniform for choices, and standard normal for numbers.

    The latter come by the Box-Muller transform, which takes a fixed number of uniform draws. It
    runs where the environment lives and not on a batch: there its last bits would depend on the
    row's place.

    The first ``choices`` of a step are uniform; all else is as in :func:`uniform_draws`.
    """
    pairs = -(-(width - choices) // 2)
    both = uniform_draws(seed, env, first_step, num_steps, choices + 2 * pairs)
    uniform = both[:, choices:]
    radius = np.sqrt(-2.0 * np.log(uniform[:, :pairs]))
    angle = 2.0 * np.pi * uniform[:, pairs:]
    parts = [both[:, :choices], radius * np.cos(angle), radius * np.sin(angle)]
    return np.concatenate(parts, 1)[:, :width]


def env_seed(seed: int, env: int, stream: str = "train", *, number: int = 0) -> int:
    """Return the 31-bit seed with which environment ``env`` is reset for the ``number``-th time.

    A ``stream`` keeps environments of training and evaluation apart.
    """
    entropy = (seed % 2**64, env, *stream.encode())
    sequence = np.random.SeedSequence(entropy, spawn_key=(number,) if number else ())
    return int(sequence.generate_state(1)[0] >> 1)


def update_seed(seed: int, update: int, part: int, rank: int = 0) -> int:
    """Return the 63-bit seed of what the learner draws in a part of an update.

    Each rank of a distributed run draws for samples of its own.
    """
    # A hundredth of the time that a SeedSequence takes: this runs once a part.
    key = struct.pack("<Q3q", seed % 2**64, update, part, rank)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
