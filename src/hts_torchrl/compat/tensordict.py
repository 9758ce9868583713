"""What tensordict keeps private: the generator of a probabilistic module."""

from __future__ import annotations

from typing import Any

from tensordict.nn import ProbabilisticTensorDictModule


def drawing_options(head: ProbabilisticTensorDictModule) -> dict[str, Any]:
    """Return how a probabilistic module draws when called, by argument; None is the default."""
    generator = head._generator if head._generator_key is None else head._generator_key
    return {"num_samples": head.num_samples, "generator": generator}
