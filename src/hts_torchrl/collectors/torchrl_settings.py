"""Arguments of TorchRL's ``Collector``: those that act alike, and those that change nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from torch import nn
from torchrl.data import ReplayBuffer
from torchrl.envs import MultiStepTransform, Reward2GoTransform

from hts_torchrl.compat.torchrl import samples_by_ends
from hts_torchrl.config import take_plain_values
from hts_torchrl.errors import ConfigurationError, require, require_counts
from hts_torchrl.policy.exploration import RandomActions
from hts_torchrl.specs import EnvSpec

Device: TypeAlias = torch.device | str | int
_GREEDY = (InteractionType.DETERMINISTIC, InteractionType.MODE)

_BY_ENDS = (MultiStepTransform, Reward2GoTransform)
"""Transforms of a buffer that sum up what is put there, from one transition to the next."""
_BOOLEAN = "a boolean is needed"
_PUBLISH = "weights are published with update_policy_weights_()"

FIXED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "sync": ((None, True), "every round is synchronous"),
    "env_device": ((None, "cpu"), "environments run on the CPU"),
    "reset_at_each_iter": ((False,), "games continue in the next round, which is already running"),
    "reset_when_done": ((True,), "a game that has ended is followed by another"),
    "interruptor": ((None,), "a round always has all of its steps"),
    "use_buffers": ((None, True, False), _BOOLEAN),
    "extend_buffer": ((True,), "a buffer is extended by whole rounds"),
    "trust_policy": ((None, True, False), _BOOLEAN),
    "no_cuda_sync": ((False, True), _BOOLEAN),
    "weight_updater": ((None,), _PUBLISH),
    "weight_sync_schemes": ((None,), _PUBLISH),
    "weight_recv_schemes": ((None,), _PUBLISH),
    "auto_register_policy_transforms": ((None, True, False), _BOOLEAN),
}
"""Arguments with the values that say what happens anyway, and why no other is possible."""


def without_fixed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are not in the table :data:`FIXED`.

    Raises:
        ConfigurationError: for one of the table with a value that is not accepted.
    """
    for name in FIXED.keys() & arguments.keys():
        value, (accepted, reason) = arguments[name], FIXED[name]
        plain = str(value) if name == "env_device" and value is not None else value
        if not any(type(plain) is type(each) and plain == each for each in accepted):
            shown = value if isinstance(value, bool | int | str) else type(value).__name__
            raise ConfigurationError(
                f"{name}={shown!r} is not supported, only {' or '.join(map(repr, accepted))}: "
                f"{reason}"
            )
    return {name: value for name, value in arguments.items() if name not in FIXED}


@dataclass(frozen=True, kw_only=True)
class TorchRLSettings:
    """Settings of TorchRL's collector that have the same effect here.

    Except for three that say how actors act, they take effect in the caller's process or where
    environments are made, so that the rounds themselves keep their bits.
    """

    device: Device | None = None
    """of actors and batches, unless ``policy_device`` or ``storing_device`` is given."""
    storing_device: Device | None = None
    """device of the batches."""
    create_env_kwargs: dict[str, Any] | list[dict[str, Any]] | None = None
    """arguments by keyword for the function, or functions, that make environments; or a list with
    those of each function."""
    max_frames_per_traj: int | None = None
    """steps after which a game is truncated; None or less than 1 is no limit."""
    exploration_type: InteractionType | None = InteractionType.RANDOM
    """``RANDOM`` samples actions; ``DETERMINISTIC`` takes TorchRL's deterministic action, which is
    the greedy one of discrete actions, as with ``MODE``."""
    init_random_frames: int | None = None
    """number of first steps, rounded up to whole rounds, with uniformly random actions; None and
    -1 are 0. The policy writes everything else, even the log-probability of these actions."""
    cudagraph_policy: bool | None = None
    """replay each pass of an actor on a GPU as one CUDA graph, with the bits of a plain pass."""
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = None
    """applied to each batch before it is returned; also a ``torchrl`` transform."""
    split_trajs: bool | None = None
    """return a row for each trajectory, padded, with ``("collector", "mask")``."""
    track_traj_ids: bool = True
    """False leaves out ``("collector", "traj_ids")``."""
    track_policy_version: bool = False
    """also write the version of the acting weights to ``"policy_version"``."""
    set_truncated: bool = False
    """mark the last step of each row as truncated, and so done."""
    compact_obs: bool = False
    """leave out observations under ``next``."""
    return_same_td: bool = False
    """return the same TensorDict each time; its tensors are overwritten by the next batch."""
    replay_buffer: ReplayBuffer | None = None
    """extended by the transitions of each batch; the collector then yields None."""
    trajs_per_batch: int | None = None
    """return this number of whole trajectories at once instead of rounds."""
    trajs_per_write: int | None = None
    """whole trajectories by which a buffer is extended at once; None is all available ones."""
    traj_format: Literal["padded", "cat"] | None = None
    """form of whole trajectories: ``padded`` rows or one after another (``cat``)."""
    worker_idx: int | None = None
    """kept as an attribute; the ranks of a run differ in ``first_env``."""
    pre_collect_hook: Callable[[], None] | None = None
    """called before each round is started."""
    post_collect_hook: Callable[[TensorDictBase], None] | None = None
    """called with each batch before it is handed out."""

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if not self.track_traj_ids and (self.split_trajs or self.trajs_per_batch is not None):
            raise ConfigurationError(
                "track_traj_ids=False leaves out what split_trajs and trajs_per_batch tell "
                "trajectories by"
            )
        if self.split_trajs and self.trajs_per_batch is not None:
            raise ConfigurationError("give split_trajs or trajs_per_batch, one of the two")
        names = ("split_trajs", "trajs_per_batch", "replay_buffer")
        # An empty buffer has a length of 0.
        others = [name for name in names if getattr(self, name) not in (None, False)]
        if self.return_same_td and others:
            raise ConfigurationError(
                f"return_same_td=True needs batches of one shape: leave out {others[0]}"
            )
        kwargs = self.create_env_kwargs
        take_plain_values(self)
        object.__setattr__(self, "create_env_kwargs", kwargs)  # the user's own, whatever they are
        frames = self.init_random_frames
        counted = frames is None or (type(frames) is int and frames >= -1)
        require(counted, f"init_random_frames={frames!r}", "a number of steps")
        for name in ("postproc", "pre_collect_hook", "post_collect_hook"):
            hook = getattr(self, name)
            fits = hook is None or callable(hook)
            require(fits, f"{name} of type {type(hook).__name__}", "a function")
        buffer = self.replay_buffer
        fits = buffer is None or hasattr(buffer, "extend")
        require(fits, f"replay_buffer of type {type(buffer).__name__}", "a ReplayBuffer")
        self._require_trajectories()

    def _require_trajectories(self) -> None:
        require_counts(self, "trajs_per_batch", "trajs_per_write")
        if self.traj_format not in (None, "padded", "cat"):
            raise ConfigurationError(f"traj_format={self.traj_format!r} must be 'padded' or 'cat'")
        if self.trajs_per_batch is None and self.traj_format == "cat":
            raise ConfigurationError("traj_format='cat' says nothing without trajs_per_batch")
        to_buffer = self.trajs_per_batch is not None and self.replay_buffer is not None
        if self.trajs_per_write is not None and not to_buffer:
            raise ConfigurationError(
                "trajs_per_write says nothing without trajs_per_batch and replay_buffer"
            )
        if self.trajs_per_batch is not None and not to_buffer and self.traj_format is None:
            warnings.warn(
                "trajs_per_batch hands out padded trajectories, which will change to 'cat' in "
                "torchrl v0.16: say traj_format='padded' or 'cat'",
                FutureWarning,
                stacklevel=7,  # of this record, of the collector, and of what checks names
            )

    def policy_device(self, given: Device | None, *, on_nodes: bool) -> str:
        """Return where actors compute: as given, or else on ``device``, or else on the CPU.

        Raises:
            ConfigurationError: for another than the CPU of rollout nodes.
        """
        device = str(first_device(policy_device=given, device=self.device) or "cpu")
        if on_nodes and torch.device(device).type != "cpu":
            raise ConfigurationError(
                f"policy_device={device!r} with backend='ray': actors compute on the CPUs of "
                "rollout nodes; give policy_device='cpu'"
            )
        return device

    def cudagraph(self, policy_device: str) -> bool:
        """Return whether actors, which compute on ``policy_device``, replay CUDA graphs.

        Raises:
            ConfigurationError: if that is no GPU, or they are to draw random actions first.
        """
        if not self.cudagraph_policy:
            return False
        if torch.device(policy_device).type != "cuda":
            raise ConfigurationError(
                f"cudagraph_policy=True: actors compute on {policy_device!r}, but CUDA graphs need "
                "a GPU: give policy_device='cuda', or leave it out"
            )
        if self.random_frames:
            raise ConfigurationError(
                f"cudagraph_policy=True and init_random_frames={self.random_frames}: random "
                "actions are drawn row by row, which no CUDA graph can hold; give one of the two"
            )
        return True

    def require_rows_apart(self, num_envs: int) -> None:
        """Refuse a buffer that would go on from one environment's last step to another's first.

        Transitions are put there environment by environment, and only some of the last have an end.
        """
        buffer, whole = self.replay_buffer, self.split_trajs or self.trajs_per_batch
        if buffer is None or num_envs == 1 or self.set_truncated or whole:
            return
        sampler, transform = getattr(buffer, "sampler", None), getattr(buffer, "transform", None)
        readers: list[object] = [sampler] if samples_by_ends(sampler) else []
        if isinstance(transform, nn.Module):
            readers += [each for each in transform.modules() if isinstance(each, _BY_ENDS)]
        if readers and getattr(buffer.storage, "ndim", 1) == 1:
            raise ConfigurationError(
                f"the replay_buffer's {type(readers[0]).__name__} tells trajectories by their "
                f"ends, but the rows of {num_envs} environments follow each other there: give its "
                "storage ndim=2, or say set_truncated=True"
            )

    @property
    def batch_device(self) -> torch.device | None:
        """Where batches lie; None leaves them where they are, and does not name it."""
        return first_device(storing_device=self.storing_device, device=self.device)

    def greedy(self, env_spec: EnvSpec) -> bool:
        """Return whether actors answer greedy actions instead of sampled ones.

        Raises:
            ConfigurationError: for another kind of exploration.
        """
        kind = self.exploration_type or InteractionType.RANDOM
        spread = kind == InteractionType.MODE and env_spec.action.kind == "continuous"
        fits = not spread and kind in (*_GREEDY, InteractionType.RANDOM)
        told = f"exploration_type={kind!r} of {env_spec.action.kind} actions"
        require(fits, told, "ExplorationType.RANDOM or DETERMINISTIC")
        return kind in _GREEDY

    @property
    def random_frames(self) -> int:
        """Steps that take random actions, as they were asked for."""
        return max(0, self.init_random_frames or 0)

    def random_rounds(self, env_spec: EnvSpec, frames_per_round: int) -> int:
        """Return in how many rounds actors answer uniform actions.

        Raises:
            ConfigurationError: if there is nothing to draw between.
        """
        if self.random_frames:
            RandomActions(env_spec)
        return -(-self.random_frames // frames_per_round)


def first_device(**given: Device | None) -> torch.device | None:
    """Return the first device that a setting names; None if none does.

    Raises:
        ConfigurationError: naming the setting, for a device that this machine does not have.
    """
    for setting, device in given.items():
        try:
            if device is not None:
                return torch.empty(0, device=device).device
        except (AssertionError, RuntimeError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigurationError(
                f"{setting}={device!r}; a device of this machine is needed ({reason})"
            ) from error
    return None
