"""Names of arrays from TensorDict keys."""

from __future__ import annotations

from hts_torchrl.config import Key


def array_name(key: Key) -> str:
    """Return one string for a key: a path's names joined by dots."""
    return key if isinstance(key, str) else ".".join(key)
