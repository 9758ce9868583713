"""Which picture each trunk of a policy reads."""

from __future__ import annotations

from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from hts_torchrl.config import EnvSpec, Key
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.combined import is_picture
from hts_torchrl.models.nature import PixelTrunk


def pixel_trunks(policy: nn.Module, spec: EnvSpec) -> list[tuple[Key, PixelTrunk]]:
    """Return the pictures that a policy reads with this package's trunks, and these.

    Args:
        policy: of TensorDict modules, whose ``in_keys`` tell what each reads.
        spec: of the environment.

    Raises:
        ConfigurationError: if a module has not one trunk for each picture.
    """
    found: list[tuple[Key, PixelTrunk]] = []
    for module in policy.modules():
        if not isinstance(module, TensorDictModule) or isinstance(module, TensorDictSequential):
            continue
        trunks = [each for each in module.modules() if isinstance(each, PixelTrunk)]
        seen = spec.observations
        pictures = [key for key in module.in_keys if key in seen and is_picture(seen[key])]
        if trunks and len(trunks) != len(pictures):
            raise ConfigurationError(
                f"normalize_observation=true: a module with {len(trunks)} trunks of pictures reads "
                f"{len(pictures)} pictures ({pictures}); one trunk for each is needed"
            )
        found += zip(pictures, trunks, strict=False)
    return found
