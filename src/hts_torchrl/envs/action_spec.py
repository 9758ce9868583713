"""What an environment accepts, as one of TorchRL's specs. Imports torch."""

from __future__ import annotations

import torch
from torchrl.data import Bounded, Categorical, MultiCategorical, OneHot, TensorSpec, Unbounded

from hts_torchrl.specs import ActionSpec


def tensor_spec_of(action: ActionSpec, *batch_size: int) -> TensorSpec:
    """Return the spec of one action, or of a batch; unbounded for choices and numbers together.

    Args:
        action: what the environment accepts.
        batch_size: shape of the batch.
    """
    shape = (*batch_size, *action.array.shape)
    match action.kind:
        case "discrete":
            return Categorical(action.sizes[0], shape=shape)
        case "one_hot":
            return OneHot(action.sizes[0], shape=shape)
        case "multi_discrete":
            return MultiCategorical(action.sizes, shape=shape)
    if action.kind == "mixed" or action.low is None or action.high is None:
        return Unbounded(shape, dtype=getattr(torch, action.array.dtype.name))
    low, high = (torch.as_tensor(bound).expand(shape) for bound in (action.low, action.high))
    return Bounded(low, high, shape=shape, dtype=low.dtype)
