"""What TorchRL asks of a collector besides rounds and weights."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields
from numbers import Integral
from typing import Any

import numpy as np
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors import BaseCollector
from torchrl.data import Composite, ListStorage, TensorSpec

from hts_torchrl.collectors.handing_out import HandingOut
from hts_torchrl.collectors.progress import Progress
from hts_torchrl.collectors.round_runner import RoundRunner, batch_over
from hts_torchrl.collectors.run_times import RunTimes, Trace
from hts_torchrl.collectors.torchrl_settings import TorchRLSettings, without_fixed
from hts_torchrl.config import CollectorSettings
from hts_torchrl.envs.torchrl_specs import tensor_spec_of
from hts_torchrl.errors import ConfigurationError, ProtocolError
from hts_torchrl.policy.as_policy import Policy
from hts_torchrl.policy.composite import VECTOR
from hts_torchrl.schedule import Schedule
from hts_torchrl.shared.rollout import storage_specs
from hts_torchrl.specs import ArraySpec, EnvSpec, Key

_PUBLISH = "publish weights with update_policy_weights_()"


class ContractCollector(BaseCollector):
    """TorchRL's attributes, states and questions, through which no round and no weights pass."""

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
    seed: int
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
        """Keep TorchRL's arguments as attributes of their names; return the others."""
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
        self._torchrl.require_rows_apart(schedule.num_envs)
        # A list, the storage of a buffer that is given none, keeps the rows that it gets. So may a
        # transform: MultiStepTransform keeps the last steps.
        clone |= isinstance(getattr(self.replay_buffer, "storage", None), ListStorage)
        clone |= bool(getattr(self.replay_buffer, "transform", None))
        clone &= not self._torchrl.return_same_td
        self._handing_out = HandingOut(self._torchrl, self.env_spec, clone=clone)
        self.postproc = self._handing_out.postproc
        self._shape = (schedule.num_envs, schedule.steps_per_round)

    def fake_tensordict(self) -> TensorDictBase:
        """Return zeros in the form of a batch; no environment is stepped.

        ``postproc`` is called with them: one that keeps statistics takes note of zeros.
        """
        discounted = self.config.reward_discount is not None
        specs = storage_specs(self.env_spec, self._outputs, discounted=discounted)
        arrays = {
            key: np.zeros((*self._shape, *array.shape), array.dtype) for key, array in specs.items()
        }
        return self._handing_out.form(batch_over(arrays, self.env_spec))

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Set the run's seed, before the first batch; returns it.

        Raises:
            ProtocolError: if the worker pool already runs.
            ConfigurationError: for a seed that is no integer, or one for all environments.
        """
        if static_seed or not isinstance(seed, Integral):
            raise ConfigurationError(
                f"set_seed({seed!r}, static_seed={static_seed}); an integer is needed, from which "
                "each environment has a seed of its own"
            )
        if self._runner is not None:
            raise ProtocolError(
                "set_seed after the worker pool was started: environments have their seeds"
            )
        self.seed = int(seed)
        return self.seed

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return what a run needs to go on with the batch after the last, bit for bit.

        That is counters, the running games and the weights that act in the running round. The
        newest, which TorchRL's ``policy_state_dict`` has, are the caller's to load.
        """
        state = self.state_at(self._progress.round_index)
        if self._runner is None:
            newest = copy.deepcopy(self.policy.state_dict())
        else:
            newest = self._runner.weights.copy_of(self.policy_version)
        return OrderedDict(policy_state_dict=newest, iter=self._iter, **state)

    def state_at(self, round_index: int, *, envs: bool = True) -> OrderedDict[str, Any]:
        """Return the state of a run whose next batch is round ``round_index``.

        Args:
            round_index: the round of the last batch, which is then collected again, or the next.
            envs: whether to keep the running games; without them new ones will begin.

        Raises:
            ProtocolError: for another round.
            ConfigurationError: with ``trajs_per_batch``.
        """
        if self.trajs_per_batch is not None:
            raise ConfigurationError(
                "with trajs_per_batch no state is complete: the steps of games that have not ended "
                "are held back; collect rounds instead, and split them with split_trajs"
            )
        progress = self._progress
        state = progress.state_at(round_index, envs=envs)
        state["policy_version"] = self.policy_version
        if self.schedule.starts_before_update() and round_index in progress.versions:
            state["acting_version"] = version = progress.versions[round_index]
            acting = progress.acting_weights
            if acting is None:
                assert self._runner is not None  # it has published them
                acting = self._runner.weights.copy_of(version)
            state["acting_weights"] = acting
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where a state was taken: its environments are restored when the worker pool starts.

        A state without games begins new ones.

        Raises:
            ProtocolError: if the worker pool already runs.
            ConfigurationError: if the state is of fewer environments.
        """
        if self._runner is not None:
            raise ProtocolError("load_state_dict after the worker pool was started")
        self._progress.load(state_dict)

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

    def getattr_policy(self, attr: str) -> Any:  # noqa: ANN401
        """Return an attribute of the policy in this process, of which actors have copies."""
        return getattr(self.policy, attr)

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

    def receive_weights(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Publish weights as :meth:`update_policy_weights_` does: what acts are copies."""
        self.update_policy_weights_(*args, **kwargs)

    def register_scheme_receiver(self, *_: object, **__: object) -> None:
        """Refuse: no parent collector sends weights."""
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
