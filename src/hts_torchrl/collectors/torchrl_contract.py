"""TorchRL's collector interface, but for what collects: batches, counters, weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeGuard

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.collectors import BaseCollector
from torchrl.data import Composite, TensorSpec

from hts_torchrl.collectors.handing_out import HandingOut, extend, require_rows_apart
from hts_torchrl.collectors.progress import Progress
from hts_torchrl.collectors.round_runner import RoundRunner
from hts_torchrl.collectors.run_times import RunTimes, Trace
from hts_torchrl.collectors.torchrl_arguments import without_fixed
from hts_torchrl.collectors.torchrl_settings import TorchRLSettings
from hts_torchrl.config import CollectorSettings
from hts_torchrl.envs.action_spec import tensor_spec_of
from hts_torchrl.errors import ConfigurationError, ProtocolError
from hts_torchrl.policy.as_policy import Policy
from hts_torchrl.policy.composite import VECTOR
from hts_torchrl.schedule import Schedule
from hts_torchrl.shared.rollout import storage_specs
from hts_torchrl.specs import IS_INIT, ArraySpec, EnvSpec, Key

_PUBLISH = "publish weights with update_policy_weights_()"


class ContractCollector(BaseCollector):
    """Hands out rounds in the form that TorchRL's arguments ask for, and keeps its attributes.

    It takes weights in every form in which TorchRL hands them over, and refuses other schemes.
    """

    policy: TensorDictModuleBase
    _source: Policy
    """What the policy was made from, by which callers may know it."""
    reset_at_each_iter = False
    extend_buffer = True
    _ignore_rb = False
    """TorchRL's name: whole trajectories go into the buffer in place of rounds."""
    config: CollectorSettings
    _progress: Progress
    _times: RunTimes
    _runner: RoundRunner | None
    env_spec: EnvSpec
    _outputs: dict[Key, ArraySpec]

    @property
    def rounds(self) -> int:
        """Rounds that have been handed out since the start of the run."""
        return self._progress.round_index

    @property
    def _frames(self) -> int:
        """Environment steps handed out: TorchRL's counter."""
        return self._progress.frames

    @property
    def _iter(self) -> int:
        """The last batch, counted from 0: TorchRL's counter."""
        return self.rounds - 1

    def _take_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Keep TorchRL's arguments as attributes of their names; return the others.

        Raises:
            ConfigurationError: for those that are not supported, or contradict themselves.
        """
        rest = without_fixed(arguments)
        names = {field.name for field in fields(TorchRLSettings)}
        self._torchrl = TorchRLSettings(**{name: rest.pop(name) for name in names & rest.keys()})
        for name in sorted(names):
            setattr(self, name, getattr(self._torchrl, name))
        self.storing_device = self._torchrl.batch_device
        self.traj_format = self._torchrl.traj_format or "padded"
        self.init_random_frames = self._torchrl.random_frames
        return rest

    def _set_form(self, schedule: Schedule, *, clone: bool) -> None:
        require_rows_apart(self._torchrl, schedule.num_envs)
        clone = clone and not self._torchrl.return_same_td
        self._handing_out = HandingOut(self._torchrl, self.env_spec, clone=clone)
        self._same: TensorDictBase | None = None
        self.postproc = self._handing_out.postproc
        self._shape = (schedule.num_envs, schedule.steps_per_round)

    def _hand_out(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Return a round in the form asked for; None if the replay buffer got it."""
        batch = self._handing_out.form(batch)
        if self._torchrl.return_same_td:
            batch = self._same = batch.clone() if self._same is None else self._same.update_(batch)
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        if self.replay_buffer is None or self._ignore_rb:
            return batch
        extend(self.replay_buffer, batch, self._shape)
        return None

    def fake_tensordict(self) -> TensorDictBase:
        """Return zeros in the form of a batch; no environment is stepped."""
        discounted = self.config.reward_discount is not None
        specs = storage_specs(self.env_spec, self._outputs, discounted=discounted)
        batch = TensorDict(
            {
                key: torch.from_numpy(np.zeros((*self._shape, *array.shape), array.dtype))
                for key, array in specs.items()
            },
            self._shape,
            names=[None, "time"],
        )
        flags: list[Key] = ["done", "terminated", "truncated", ("next", "done")]
        if self.env_spec.memory.reads_is_init:
            flags.append(("next", IS_INIT))
        for key in flags:
            batch[key] = torch.zeros(*self._shape, 1, dtype=torch.bool)
        batch["collector", "policy_version"] = torch.zeros(self._shape, dtype=torch.int64)
        return self._handing_out.form(batch)

    def _refuse_state_of_trajectories(self) -> None:
        if self.trajs_per_batch is not None:
            raise ConfigurationError(
                "with trajs_per_batch no state is complete: the steps of games that have not ended "
                "are held back; collect rounds instead, and split them with split_trajs"
            )

    def get_policy_version(self) -> int:
        """Return the updates in the weights that were published last."""
        return int(self.policy_version)

    def getattr_env(self, attr: str) -> TensorSpec:
        """Return what environments accept, which TorchRL's trainers ask for.

        Args:
            attr: ``action_spec`` or ``full_action_spec``; each is of one environment, as TorchRL's
                ``_unbatched`` ones, and has the parts of an action that the policy writes apart.

        Raises:
            AttributeError: for another name: environments live where executors run.
        """
        action = self.env_spec.action
        apart = action.key == VECTOR
        full = Composite()
        for key, part in (action.parts if apart else {action.key: action}).items():
            full[key] = tensor_spec_of(part)
        match attr.removesuffix("_unbatched"):
            case "action_spec":
                return full if apart else full[action.key]
            case "full_action_spec":
                return full
        raise AttributeError(
            f"{attr!r} of the environments, which live where executors run: 'action_spec' and "
            "'full_action_spec' are known"
        )

    def getattr_rb(self, attr: str) -> Any:  # noqa: ANN401
        """Return an attribute of the replay buffer.

        Raises:
            ConfigurationError: if the collector has none, as TorchRL's trainers ask for one that
                ``start()`` fills.
        """
        if self.replay_buffer is None:
            raise ConfigurationError(
                f"getattr_rb({attr!r}): the collector has no replay_buffer, and no start() fills "
                "one; leave async_collection=True out, as rounds are collected meanwhile anyway"
            )
        return getattr(self.replay_buffer, attr)

    def enable_profile(self, **settings: Any) -> None:  # noqa: ANN401
        """Profile rounds as TorchRL does, with everything in this process only.

        Raises:
            ConfigurationError: where workers collect, whom the profiler would not see.
        """
        if self.config.num_actors > 0 or self.config.num_nodes:
            raise ConfigurationError(
                "enable_profile sees this process, not the workers: give num_actors=0, or ask "
                "trace_round(n) who works when"
            )
        super().enable_profile(**settings)

    def trace_round(self, round_index: int) -> None:
        """Keep who works when in a round that has not yet started; :attr:`trace` has it then.

        Raises:
            ProtocolError: if that round has started.
            ConfigurationError: where workers are on rollout nodes, each with a clock of its own.
        """
        if self.config.num_nodes:
            raise ConfigurationError(
                "trace_round sees the workers of this machine, not those of rollout nodes: leave "
                "backend='ray' out"
            )
        if round_index <= self._progress.started:
            raise ProtocolError(f"round {round_index} cannot be traced: it has started")
        self._times.traced_round = round_index

    @property
    def trace(self) -> Trace | None:
        """Spans of work in the traced round, by worker; None until it is finished.

        Each is ``(begin, end)`` in seconds of ``time.perf_counter``; whoever has no span waits.
        ``executor 3`` works when it steps, ``actor 0`` when it runs a pass, ``learner`` from one
        ``next`` to the other.
        """
        return self._times.trace or None

    def stats(self) -> dict[str, int | float | bool]:
        """Add to TorchRL's counters what the worker pool has waited for.

        Seconds at work and waiting, summed by role, since the start; ``rendezvous_skew_s``, the
        seconds between the first executor's end of a round and the last one's, summed over rounds;
        ``slowest_env``, the first environment of the executor that was last.
        """
        stats = {**super().stats(), **self._times.learner_stats()}
        if self._runner is not None:
            stats |= self._times.worker_stats(self._runner.shared.status)
        return stats

    @abstractmethod
    def _publish(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Publish weights by ``state_dict`` name."""

    def update_policy_weights_(
        self,
        policy_or_weights: TensorDictBase | nn.Module | dict[str, Any] | None = None,
        *,
        weights: TensorDictBase | dict[str, Any] | None = None,
        policy: nn.Module | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Publish weights; the round that starts at the next rendezvous acts with them.

        Args:
            policy_or_weights: a module, its ``state_dict``, or its weights as a TensorDict; None
                takes the policy that the collector was given.
            weights: the same by keyword.
            policy: the same by keyword.
            kwargs: TorchRL's ``model_id`` and ``weights_dict``, which can name ``policy`` only.

        Raises:
            ConfigurationError: if the weights are not those of a policy like the collector's, by
                name, shape and type, or not finite; or an argument for many policies is given. What
                was published before is kept then.
        """
        if kwargs.pop("model_id", None) not in (None, "policy"):
            raise ConfigurationError("model_id: one policy acts, whose name is 'policy'")
        named = kwargs.pop("weights_dict", None) or {}
        if unknown := [name for name in named if name != "policy"]:
            raise ConfigurationError(f"weights_dict: no {unknown[0]!r} acts, only 'policy' does")
        if any(value is not None for value in kwargs.values()):
            raise ConfigurationError(
                f"arguments {sorted(kwargs)} are not supported: one policy acts"
            )
        sources = (policy_or_weights, weights, policy, named.get("policy"))
        given = [source for source in sources if source is not None] or [self.policy]
        if len(given) > 1:
            raise ConfigurationError("give the weights once")
        self._publish(_by_name(self.policy if given[0] is self._source else given[0]))

    def receive_weights(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Publish weights as :meth:`update_policy_weights_` does: what acts are copies."""
        self.update_policy_weights_(*args, **kwargs)

    def register_scheme_receiver(self, *_: object, **__: object) -> None:
        """Refuse: no parent collector sends weights.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(f"weight sync schemes are not supported: {_PUBLISH}")

    @property
    def weight_updater(self) -> None:
        """None: :meth:`update_policy_weights_` alone publishes weights.

        Raises:
            ConfigurationError: when another is set.
        """

    @weight_updater.setter
    def weight_updater(self, value: object) -> None:
        if value is not None:
            raise ConfigurationError(f"a weight_updater is not supported: {_PUBLISH}")


def _by_name(source: object) -> Mapping[str, torch.Tensor]:
    """Return weights by ``state_dict`` name, in whatever form they are handed over."""
    if isinstance(source, nn.Module):
        return source.state_dict()
    if _is_nested(source):
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


def _is_nested(weights: object) -> TypeGuard[dict[Any, Any]]:
    nested = Mapping, TensorDictBase
    return type(weights) is dict and any(isinstance(w, nested) for w in weights.values())
