"""The part of TorchRL's collector interface that is about batches and counters."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import fields
from typing import Any

from tensordict import TensorDictBase

from hts_torchrl.collectors.handing_out import HandingOut, extend
from hts_torchrl.collectors.one_policy import OnePolicyCollector
from hts_torchrl.collectors.torchrl_arguments import without_fixed
from hts_torchrl.collectors.torchrl_settings import TorchRLSettings
from hts_torchrl.config import EnvSpec
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.schedule import Schedule


class ContractCollector(OnePolicyCollector):
    """Hands out rounds in the form that TorchRL's arguments ask for, and keeps its attributes."""

    init_random_frames = 0
    reset_at_each_iter = False
    extend_buffer = True
    _ignore_rb = False
    """TorchRL's name: whole trajectories go into the buffer in place of rounds."""
    _handing_out: HandingOut

    @property
    @abstractmethod
    def rounds(self) -> int:
        """Rounds that have been handed out since the start of the run."""

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
        return rest

    def _set_form(self, env_spec: EnvSpec, *, clone: bool, schedule: Schedule) -> None:
        self._handing_out = HandingOut(self._torchrl, env_spec, clone=clone)
        self.postproc = self._handing_out.postproc
        self._shape = (schedule.num_envs, schedule.steps_per_round)

    def _hand_out(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Return a round in the form asked for; None if the replay buffer got it."""
        batch = self._handing_out.form(batch)
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        if self.replay_buffer is None or self._ignore_rb:
            return batch
        extend(self.replay_buffer, batch, self._shape)
        return None

    def _refuse_state_of_trajectories(self) -> None:
        if self.trajs_per_batch is not None:
            raise ConfigurationError(
                "with trajs_per_batch no state is complete: the steps of games that have not ended "
                "are held back; collect rounds instead, and split them with split_trajs"
            )

    def get_policy_version(self) -> int:
        """Return the updates in the weights that were published last."""
        return int(self.policy_version)

    def enable_profile(self, **settings: Any) -> None:  # noqa: ANN401
        """Profile rounds as TorchRL does, with everything in this process only.

        Raises:
            ConfigurationError: where workers collect, whom the profiler would not see.
        """
        if self.config.num_actors > 0:
            raise ConfigurationError(
                "enable_profile sees this process, not the workers: give num_actors=0, or ask "
                "trace_round(n) who works when"
            )
        super().enable_profile(**settings)
