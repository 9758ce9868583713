"""A versioned copy of the policy's weights in shared memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from hts_torchrl.compat.torch import norms
from hts_torchrl.errors import ConfigurationError, ProtocolError
from hts_torchrl.policy.limits import require_tensors
from hts_torchrl.shared.arrays import Layout, SharedArrays
from hts_torchrl.specs import Array

_ALIGNMENT = 64


class PolicyWeights:
    """Two slots of weights: ``acting``, which actors load, and the one that is published into.

    **Writer**: the learner's process (:meth:`publish` between, :meth:`exchange` at rendezvous).
    **Readers**: actors (:meth:`load`). **Visible when**: published weights become the acting ones
    at the rendezvous and not before: the collector exchanges the slots while no environment waits
    for an action, and starts the round after that.

    Example:
        >>> policy, replica = nn.Linear(4, 2), nn.Linear(4, 2)
        >>> weights = PolicyWeights(SharedArrays(PolicyWeights.layout(policy)), policy)
        >>> weights.publish(policy.state_dict(), version=3)     # the learner
        >>> weights.exchange()                                  # at the rendezvous
        >>> weights.load(replica)                               # an actor
    """

    def __init__(self, arrays: SharedArrays, module: nn.Module) -> None:
        self._acting: Array = arrays["weights_acting"]
        slots = torch.from_numpy(arrays["weights"])
        self._slots = [_views(slots[slot], module.state_dict()) for slot in range(2)]
        self._parameters = dict(module.named_parameters(remove_duplicate=False)).keys()
        buffers = dict(module.named_buffers(remove_duplicate=False))
        self._not_saved = buffers.keys() - module.state_dict().keys()
        """Buffers that are not persistent, which actors keep as they are."""
        self._published: int | None = None
        self._versions = [-1, -1]
        self._loaded: list[int] = []
        """Version and slot of the weights that were loaded last."""

    @staticmethod
    def layout(module: nn.Module) -> Layout:
        """Two slots of raw bytes, and (version, slot) of the acting weights.

        Raises:
            ConfigurationError: as :func:`require_tensors`, and for a tensor that is expanded.
        """
        require_tensors(module)
        state = module.state_dict()
        for name, tensor in state.items():
            steps = zip(tensor.stride(), tensor.shape, strict=True)
            if any(step == 0 and length > 1 for step, length in steps):
                raise ConfigurationError(
                    f"the policy's {name!r} is expanded: its elements share memory, and an actor "
                    "can load none into it; keep tensor.expand(...).clone()"
                )
        size = sum(map(_padded, state.values()))
        return {"weights": ((2, max(size, 1)), "uint8"), "weights_acting": ((2,), "int64")}

    @property
    def acting_version(self) -> int:
        """Number of updates in the acting weights."""
        return int(self._acting[0])

    @property
    def newest_version(self) -> int:
        """Number of updates in the weights that were published last."""
        return self.acting_version if self._published is None else self._published

    def publish(self, state: Mapping[str, Tensor], version: int | None = None) -> None:
        """Copy weights for the round that starts next.

        Args:
            state: tensors by ``state_dict`` name, on any device.
            version: number of updates in them; None is one more than the newest.

        Raises:
            ConfigurationError: if a name is missing or unknown, a shape or dtype is not that of the
                policy, or a value is not finite; what was published before is kept then.
        """
        newest = self.newest_version + 1 if version is None else version
        self._fill(1 - int(self._acting[1]), state, newest)
        self._published = newest

    def replace_newest(self, state: Mapping[str, Tensor]) -> None:
        """Copy weights over the newest ones, whose version they keep; no actor may have them yet.

        Raises:
            ConfigurationError: as :meth:`publish`.
        """
        self._fill(self._newest_slot, state, self.newest_version)

    def are_newest(self, state: Mapping[str, Tensor]) -> bool:
        """Return whether weights are those that were published last."""
        views = self._slots[self._newest_slot]
        return all(torch.equal(view, state[name].to(view)) for name, view in views.items())

    @property
    def _newest_slot(self) -> int:
        acting = int(self._acting[1])
        return acting if self._published is None else 1 - acting

    def _fill(self, slot: int, state: Mapping[str, Tensor], version: int) -> None:
        self._require_fitting(state)
        self._versions[slot] = -1  # until all of them are there
        with torch.no_grad():
            for name, view in self._slots[slot].items():
                view.copy_(state[name])
        self._versions[slot] = version

    def _require_fitting(self, state: Mapping[str, Tensor]) -> None:
        """Refuse what ``copy_`` would broadcast, or what no policy can act with."""
        own = self._slots[0]
        for verb, names in (
            ("lack", own.keys() - state.keys()),
            ("have", state.keys() - own.keys() - self._not_saved),
        ):
            if names:
                raise ConfigurationError(
                    f"the weights {verb} {min(names, key=str)!r} (and {len(names) - 1} more "
                    "names); those of the collector's policy are needed"
                )
        for name, view in own.items():
            given = state[name]
            if not isinstance(given, Tensor) or given.shape != view.shape:
                found = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
                raise ConfigurationError(
                    f"the weights' {name!r} has shape {found}; {tuple(view.shape)} is needed"
                )
            if not torch.can_cast(given.dtype, view.dtype):
                raise ConfigurationError(
                    f"the weights' {name!r} is {given.dtype}, which {view.dtype} cannot hold"
                )
        self._require_finite({name: state[name].to(view.dtype) for name, view in own.items()})

    def _require_finite(self, state: Mapping[str, Tensor]) -> None:
        """Refuse NaN, and in parameters infinity: a buffer may be a mask of -inf."""
        # torch has no norm, and no isfinite, of numbers of a byte.
        floats = {
            name: tensor.float() if tensor.element_size() == 1 else tensor
            for name, tensor in state.items()
            if tensor.is_floating_point()
        }
        # In one question, which a GPU is waited for.
        if not floats or torch.stack(norms(list(floats.values()))).isfinite().all():
            return
        for name, tensor in floats.items():
            # Element by element, as the norm of large numbers overflows.
            broken = ~tensor.isfinite() if name in self._parameters else tensor.isnan()
            if broken.any():
                raise ConfigurationError(
                    f"the weights' {name!r} is not finite: {int(broken.sum())} of its "
                    f"{tensor.numel()} elements are NaN or infinite"
                )

    def exchange(self) -> None:
        """Make the published weights, if any, the acting ones.

        Raises:
            ProtocolError: if Ctrl-C has ended a publication over others that were there already.
        """
        if self._published is not None:
            slot = 1 - int(self._acting[1])
            if self._versions[slot] < 0:
                raise ProtocolError(
                    "the weights were not published to their end: publish them again, with "
                    "update_policy_weights_()"
                )
            self._acting[:] = self._published, slot
            self._published = None

    def copy_of(self, version: int) -> dict[str, Tensor]:
        """Return the weights of a version that is in one of the slots, for the learner's process.

        Raises:
            ProtocolError: if it is in neither.
        """
        if version not in self._versions:
            raise ProtocolError(f"version {version} of the weights is not there: {self._versions}")
        # The acting slot first: weights may be published under the number of those that act.
        slots = (int(self._acting[1]), 1 - int(self._acting[1]))
        slot = next(slot for slot in slots if self._versions[slot] == version)
        return {name: view.clone() for name, view in self._slots[slot].items()}

    def load(self, module: nn.Module) -> None:
        """Copy the acting weights into ``module``, unless they are those that it was given last."""
        acting = self._acting.tolist()
        # Others may act under the same number: after a state that was saved before a publication.
        if acting == self._loaded:
            return
        module.train()  # eval() may compute something from the weights, which is made anew then
        state = module.state_dict()
        for name, view in self._slots[acting[1]].items():
            state[name].copy_(view)
        module.eval()
        self._loaded = acting


def weights_by_name(source: object) -> Mapping[str, Tensor]:
    """Return weights by ``state_dict`` name, in whatever form they are handed over."""
    if isinstance(source, nn.Module):
        return source.state_dict()
    nested = Mapping | TensorDictBase
    if type(source) is dict and any(isinstance(each, nested) for each in source.values()):
        if workers := [name for name in source if not isinstance(name, str)]:
            raise ConfigurationError(f"weights for worker {workers[0]!r}: one policy acts")
        source = TensorDict(source)
    if isinstance(source, TensorDictBase):
        source = source.flatten_keys(".").to_dict()
    if not isinstance(source, Mapping):
        raise ConfigurationError(
            f"weights of type {type(source).__name__}; a module, its state_dict or a TensorDict of "
            "its weights is needed"
        )
    return source


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _views(slot: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Lay the state's tensors over one slot, in their own memory order."""
    views, offset = {}, 0
    for name, tensor in state.items():
        flat = slot[offset : offset + tensor.nbytes].view(tensor.dtype)
        strides = torch.empty_like(tensor, device="meta").stride()  # dense, keeps channels_last
        views[name] = flat.as_strided(tensor.shape, strides)
        offset += _padded(tensor)
    return views
