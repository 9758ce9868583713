"""Arguments of TorchRL's ``Collector`` that are accepted only where they change nothing here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hts_torchrl.errors import ConfigurationError


@dataclass(frozen=True)
class Fixed:
    """An argument with the values that say what happens anyway, and why no other is possible."""

    accepted: tuple[object, ...]
    reason: str


_PUBLISH = "weights are published with update_policy_weights_()"

FIXED: Mapping[str, Fixed] = {
    "sync": Fixed((None, True), "every round is synchronous"),
    "env_device": Fixed((None, "cpu"), "environments run on the CPU"),
    "reset_at_each_iter": Fixed((False,), "games go on in the next round, which runs already"),
    "reset_when_done": Fixed((True,), "a game that has ended is followed by another"),
    "interruptor": Fixed((None,), "a round always has all of its steps"),
    "use_buffers": Fixed((None, True, False), "a boolean is needed"),
    "extend_buffer": Fixed((True,), "a buffer is extended by whole rounds"),
    "trust_policy": Fixed((None, True, False), "a boolean is needed"),
    "no_cuda_sync": Fixed((False, True), "a boolean is needed"),
    "weight_updater": Fixed((None,), _PUBLISH),
    "weight_sync_schemes": Fixed((None,), _PUBLISH),
    "weight_recv_schemes": Fixed((None,), _PUBLISH),
    "auto_register_policy_transforms": Fixed((None, True, False), "a boolean is needed"),
}


def without_fixed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are not in the table :data:`FIXED`.

    Raises:
        ConfigurationError: for one of the table with a value that is not accepted.
    """
    for name in FIXED.keys() & arguments.keys():
        value, fixed = arguments[name], FIXED[name]
        plain = str(value) if name == "env_device" and value is not None else value
        if not any(type(plain) is type(each) and plain == each for each in fixed.accepted):
            accepted = " or ".join(map(repr, fixed.accepted))
            shown = value if isinstance(value, bool | int | str) else type(value).__name__
            raise ConfigurationError(
                f"{name}={shown!r} is not supported, only {accepted}: {fixed.reason}"
            )
    return {name: value for name, value in arguments.items() if name not in FIXED}
