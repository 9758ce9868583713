"""From a finished round to what the caller gets, in the caller's process.

Shapes: N environments, T steps.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torchrl.collectors.utils import split_trajectories
from torchrl.data import ReplayBuffer

from hts_torchrl.collectors.torchrl_settings import TorchRLSettings
from hts_torchrl.deferred_interrupt import DeferredInterrupt
from hts_torchrl.errors import require
from hts_torchrl.specs import EnvSpec, Key, next_key, path_of


class HandingOut:
    """Gives rounds the form that TorchRL's settings ask for, while the next one runs.

    Raises:
        ConfigurationError: if an observation has the name of what they add.
    """

    def __init__(self, settings: TorchRLSettings, env_spec: EnvSpec, *, clone: bool) -> None:
        self._settings, self._clone = settings, clone
        observed = "policy_version" in {path_of(key)[0] for key in env_spec.observations}
        both = "track_policy_version=True and an observation 'policy_version'"
        require(not (observed and settings.track_policy_version), both, "another name of that")
        self._left_out: list[Key] = []
        if settings.compact_obs:
            self._left_out += [next_key(key) for key in env_spec.observations]
        if not settings.track_traj_ids:
            self._left_out.append(("collector", "traj_ids"))
        self._device = settings.batch_device
        move = getattr(settings.postproc, "to", None)  # of a module or a transform, as in TorchRL
        moved = None if move is None or self._device is None else move(self._device)
        self.postproc = moved or settings.postproc
        self._same: TensorDictBase | None = None

    def hand_out(self, batch: TensorDictBase) -> TensorDictBase:
        """Return what the caller gets of a round; one TensorDict each time if it asks for that."""
        batch = self.form(batch)
        if self._settings.return_same_td:
            batch = self._same = batch.clone() if self._same is None else self._same.update_(batch)
        return batch

    def form(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the form in which a round ``[N, T]`` is handed out; it is not changed itself.

        With ``split_trajs`` that is ``[trajectories, longest]``; ``postproc`` may return anything.
        """
        if self._clone and (self._device is None or self._device.type == "cpu"):
            batch = batch.clone()
        if self._device is not None:
            batch = on_device(batch, self._device)
        self._mark(batch)
        if self._left_out:
            batch = batch.exclude(*self._left_out)
        if self._settings.split_trajs:
            batch = split_trajectories(batch, prefix="collector")
        if self.postproc is not None:
            batch = self.postproc(batch)
        if not isinstance(batch, TensorDictBase):
            return batch
        # Names that begin with `_`: as in TorchRL, `postproc` reads and writes such.
        private = [key for key in batch.keys(True) if any(n.startswith("_") for n in path_of(key))]
        return batch.exclude(*private) if private else batch

    def _mark(self, batch: TensorDictBase) -> None:
        """Set entries; those of a view are replaced, not written to."""
        if self._settings.set_truncated:
            last = torch.zeros_like(batch["next", "truncated"])
            last[:, -1] = True
            for name in ("truncated", "done"):
                batch["next", name] = batch["next", name] | last
        if self._settings.track_policy_version:
            version = batch["collector", "policy_version"]
            batch["policy_version"] = batch["next", "policy_version"] = version


def on_device(batch: TensorDictBase, device: torch.device) -> TensorDictBase:
    """Return a round on a device: for the CPU it names that, for others it is a copy there.

    When a copy is returned, the round's own memory is read no more. For a GPU it was copied to
    page-locked memory, from which the GPU takes it while the caller goes on: work that is given to
    the same stream waits for it. torch's allocator gives that memory to no other tensor before.
    """
    if device.type == "cuda":
        return batch.pin_memory(num_threads=0).to(device, non_blocking=True)
    return batch.to(device)


def extend(buffer: ReplayBuffer, batch: TensorDictBase, rows: tuple[int, int] | None) -> None:
    """Put a batch into a buffer: transition by transition, unless it has dimensions for rows.

    A batch of another shape than ``rows``, ``(N, T)``, as ``postproc`` may return one, is put there
    as it is; so is any where that is None. Ctrl-C waits meanwhile: the batch is counted already,
    and a part of it would leave rows behind that nobody has written.
    """
    interrupt, dimensions = DeferredInterrupt(), getattr(buffer.storage, "ndim", 1)
    interrupt.hold()
    try:
        if dimensions == 1 and tuple(batch.shape) == rows:
            batch = batch.reshape(-1)
        buffer.extend(batch)
    finally:
        interrupt.release()
