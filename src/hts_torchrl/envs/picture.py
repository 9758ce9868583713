"""What an environment draws, as a video takes it."""

from __future__ import annotations

import numpy as np

from hts_torchrl.envs.group import EnvGroup
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.specs import Array

_SMALLEST = 160
"""Pixels; MinAtar draws ten."""


def picture_of(group: EnvGroup) -> Array:
    """Return the picture of a group's first environment, enlarged if it is small.

    Returns:
        uint8 ``[height, width]`` or ``[height, width, channels]``.

    Raises:
        ConfigurationError: if the environment draws none, or cannot on this machine.
    """
    if not hasattr(group, "render"):
        raise ConfigurationError(
            f"{type(group).__name__} has no render(), so there are no pictures of it"
        )
    try:
        picture = np.asarray(group.render())
    except ConfigurationError:
        raise
    except Exception as error:  # of whatever an environment draws with
        name = f"{type(error).__module__}.{type(error).__name__}".removeprefix("builtins.")
        reason = " ".join(f"{name}: {error}".split()).rstrip(": ")
        hint = "; without a screen, set MUJOCO_GL=egl or osmesa" if "OpenGL" in reason else ""
        raise ConfigurationError(f"the environment draws no picture: {reason}{hint}") from error
    if picture.dtype.kind not in "biuf" or not (
        picture.ndim == 2 or (picture.ndim == 3 and picture.shape[2] in (1, 3, 4))
    ):
        what = (
            f"{picture.dtype} {list(picture.shape)}" if picture.ndim else repr(picture.item())[:80]
        )
        raise ConfigurationError(
            f"the environment draws {what}, and no picture [height, width, 3]: its render() must "
            "return one where render_mode is 'rgb_array'"
        )
    if picture.dtype.kind == "f" and picture.max(initial=0.0) <= 1:
        picture = picture * 255
    times = -(-_SMALLEST // max(1, min(picture.shape[:2])))
    return picture.clip(0, 255).astype(np.uint8).repeat(times, 0).repeat(times, 1)
