"""Draws and seeds by the definitions of their generators, without the package's own functions."""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_KEY_STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_MASK = 2**64 - 1


def philox(counter: int, key: tuple[int, int]) -> list[int]:
    """Philox4x64-10 (Salmon et al., 2011): four words of 64 bits for a counter of 256."""
    a, b, c, d = (counter >> 64 * word & _MASK for word in range(4))
    one, other = key
    for _ in range(10):
        left, right = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, b = (right >> 64) ^ b ^ one, right & _MASK
        c, d = (left >> 64) ^ d ^ other, left & _MASK
        one, other = one + _KEY_STEPS[0] & _MASK, other + _KEY_STEPS[1] & _MASK
    return [a, b, c, d]


def uniform(seed: int, env: int, step: int, width: int) -> list[float]:
    """The draws of one step: each step has counters of its own, counted from 1."""
    blocks = -(-width // 4)
    first = 1 + step * blocks
    key = seed % 2**64, env
    words = [word for block in range(blocks) for word in philox(first + block, key)]
    return [((word >> 13) * 2 + 1) / 2**52 for word in words[:width]]


def normal(seed: int, env: int, step: int, width: int) -> list[float]:
    """Box-Muller: the first half of the uniform draws are radii, the others angles."""
    pairs = -(-width // 2)
    drawn = np.array(uniform(seed, env, step, 2 * pairs))
    radius = np.sqrt(-2.0 * np.log(drawn[:pairs]))
    angle = 2.0 * np.pi * drawn[pairs:]
    return [*(radius * np.cos(angle)), *(radius * np.sin(angle))][:width]


def env_seed(seed: int, env: int, number: int = 0, stream: bytes = b"train") -> int:
    """31 bits of NumPy's hash of: both halves of the seed, environment, stream, and number."""
    low, high = seed % 2**32, (seed >> 32) % 2**32
    halves = [low, high] if high else [low]
    numbers = [number] if number else []
    words = np.array([*halves, env, *stream, *numbers], np.uint32)
    return int(np.random.SeedSequence(words).generate_state(1)[0]) >> 1
