"""The collector: rounds of experience as TensorDicts, collected while the caller learns."""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, TypeGuard

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase, composite_lp_aggregate
from torch import nn
from torchrl.collectors import BaseCollector

from hts_torchrl.buffers.board import Board
from hts_torchrl.buffers.counted_storage import CountedStorage
from hts_torchrl.buffers.journal import Journal
from hts_torchrl.config import CrewConfig, Precision, Recover, StartMethod
from hts_torchrl.envs.group import CreateEnv, EnvFactory, SeededGroup
from hts_torchrl.envs.layers import warn_of_statistics
from hts_torchrl.envs.make_group import make_group, number_of_envs
from hts_torchrl.errors import ConfigurationError, ProtocolError, WorkerKilled
from hts_torchrl.inference import PolicyInference
from hts_torchrl.policy import as_policy
from hts_torchrl.schedule import Schedule
from hts_torchrl.weights import PolicyWeights
from hts_torchrl.workers.actor import ActorSettings
from hts_torchrl.workers.crew import Crew
from hts_torchrl.workers.recruiter import Recruiter

_log = logging.getLogger(__name__)
# A worker that dies again and again, from want of memory say, would do so for ever.
_MOST_RECOVERIES = 3

Trace: TypeAlias = dict[str, list[tuple[float, float]]]


_PUBLISH = "publish weights with update_policy_weights_()"


def _is_nested(weights: object) -> TypeGuard[dict[Any, Any]]:
    nested = Mapping, TensorDictBase
    return type(weights) is dict and any(isinstance(w, nested) for w in weights.values())


class HTSCollector(BaseCollector):
    """Collects rounds of ``frames_per_batch`` environment steps, each while the one before is used.

    ``next`` on its iterator *is* the rendezvous: it waits for the running round, takes the weights
    that were published with :meth:`update_policy_weights_`, starts the next round in the
    background and returns the finished one. An ordinary loop is therefore concurrent::

        for batch in collector:
            loss_of(batch).backward()
            optimizer.step()
            collector.update_policy_weights_()

    A batch is a ``TensorDict[N, T]`` (N environments, T steps, the last dimension named ``time``)
    with the observation, all ``out_keys`` of the policy (such as the action, ``action_log_prob``
    ``[N, T]``, ``state_value`` ``[N, T, 1]`` and the distribution's parameters), ``reward``,
    ``done``, ``terminated``, ``truncated`` ``[N, T, 1]`` and the true next observation under
    ``next``, also where an episode ended; beside them ``("next", "episode_reward")`` and
    ``("next", "step_count")`` (raw score and steps of the game so far), ``("next",
    "episode_end")``, ``("collector", "traj_ids")`` and ``("collector", "policy_version")`` (updates
    in the acting weights), int64 ``[N, T]``.
    It is yours to keep, unless ``clone=False`` asks for a view.
    What a Gymnasium environment returns as ``info`` is not kept: wrap what is needed of it into the
    observation.

    The same seed gives the same bits whatever ``num_actors``, ``envs_per_executor``,
    ``step_barrier``, ``start_method`` and timing.

    Args:
        create_env_fn: an environment factory (``AtariEnvs``, ``GymEnvs``); or a function returning
            a ``gymnasium.Env``, a vector environment of ``envs_per_executor``, or a TorchRL
            ``EnvBase``, which is given the environment's index if it has an argument without a
            default; or an ``EnvBase``, of which each environment is a copy; or a list with a
            function or an ``EnvBase`` for each environment.
        policy: a TensorDict policy with one probabilistic module (``ProbabilisticActor``,
            ``ActorValueOperator``, ``hts_torchrl.models.ActorCritic``), or a plain module that maps
            the observation to logits (discrete) or to mean and standard deviation (continuous).
        policy_factory: makes the policy, where it cannot be pickled; instead of ``policy``.
        frames_per_batch: environment steps in a round, ``num_envs * alpha``.
        total_frames: steps in the whole run, rounded up to whole rounds; -1 is endless.
        num_envs: environments; None is the length of a list, and else 16.
        num_actors: actor processes; 0 runs everything in this process, the serial twin.
        envs_per_executor: environments that one executor process steps in lock step.
        delay: 1 collects the next round during the update; 0 only after it (A2C, PPO, PAAC).
        seed: decides every environment and every action.
        inference_batch_size: rows of every forward pass; None is ``min(8, num_envs)``.
        step_barrier: hold every environment at every step until all are there, as synchronous
            vector environments do: a baseline, with the same bits.
        precision: of the actors, in Lightning's words; give the learner the same.
        policy_device: where actors compute.
        start_method: ``forkserver`` or ``spawn``.
        timeout_s: seconds without a sign of life from an executor after which the run is given up.
        recover: ``fail`` raises when a worker was killed by a signal; ``replay`` starts the crew
            anew, plays the running games again and repeats the round: the bits are the same.
        first_env: global index of environment 0; ranks of a distributed run differ in it.
        debug: poison each storage before it is filled (every byte 0xFF: NaN in floats), and check
            that every cell of a finished round was written once; no bit changes by it.
        clone: hand out batches with memory of their own, copied while the next round runs; False
            hands out views of the shared memory, each valid until the following ``next`` only.

    Raises:
        ConfigurationError: for settings that cannot work; and from ``next``, if an environment
            returns what it has not declared.
        WorkerError: from ``next``, if a worker raised, died or went silent.
        ReplayError: if an environment that is restored does other things than before. In a worker
            process it is the cause of a ``WorkerError``.
    """

    init_random_frames = 0

    def __init__(  # noqa: PLR0913 - TorchRL's constructor, keyword only
        self,
        create_env_fn: CreateEnv | EnvFactory,
        policy: nn.Module | None = None,
        *,
        policy_factory: Callable[[], nn.Module] | None = None,
        frames_per_batch: int,
        total_frames: int = -1,
        num_envs: int | None = None,
        num_actors: int = 1,
        envs_per_executor: int = 1,
        delay: int = 1,
        seed: int = 0,
        inference_batch_size: int | None = None,
        step_barrier: bool = False,
        precision: Precision = "32-true",
        policy_device: str = "cpu",
        start_method: StartMethod = "forkserver",
        timeout_s: float = 120.0,
        recover: Recover = "fail",
        first_env: int = 0,
        debug: bool = False,
        clone: bool = True,
    ) -> None:
        super().__init__()
        self._crew: Crew | None = None
        self._board: Board | None = None
        self._closed = False
        num_envs = number_of_envs(create_env_fn, num_envs, first_env)
        self.schedule = Schedule.from_frames(
            frames_per_batch, total_frames=total_frames, num_envs=num_envs, delay=delay
        )
        self.config = CrewConfig(
            num_envs=num_envs,
            num_actors=num_actors,
            envs_per_executor=envs_per_executor,
            inference_batch_size=inference_batch_size,
            step_barrier=step_barrier,
            start_method=start_method,
            timeout_s=timeout_s,
            recover=recover,
            first_env=first_env,
            debug=debug,
        )
        if (policy is None) == (policy_factory is None):
            raise ConfigurationError("give a policy or a policy_factory, one of the two")
        self.total_frames = total_frames
        self.frames_per_batch = self.requested_frames_per_batch = frames_per_batch
        self.seed = seed
        self._clone = clone
        self._create_env_fn = create_env_fn
        group = make_group(create_env_fn, self._envs_of_executor(0))
        self.env_spec = group.spec
        self._steps_per_seed = group.steps_per_seed if isinstance(group, SeededGroup) else None
        blank = Journal.blank(group.spec.action, num_envs, steps_per_seed=self._steps_per_seed)
        self._journals = {0: blank}  # of the round of the last batch, and of the next
        warn_of_statistics(group)
        group.close()
        source = policy if policy is not None else policy_factory()  # type: ignore[misc]
        self.policy: TensorDictModuleBase = as_policy(source, self.env_spec)
        self._source = source
        self._policy_factory = policy_factory
        self._settings, self._outputs = self._probe(precision, policy_device)
        self._round = 0  # the next to be handed out
        self._started = -1  # the last to be started
        self._versions: dict[int, int] = {}  # of the weights that acted in the last rounds
        self._acting_weights: dict[str, Any] | None = None  # of a checkpoint, until its round runs
        self._frames = 0
        self._version = 0
        self._learner_busy_s = self._learner_waiting_s = self._skew_s = 0.0
        self._traced_round: int | None = None
        self._trace: Trace | None = None

    def _envs_of_executor(self, executor: int) -> list[int]:
        return [self.config.first_env + env for env in self.config.envs_of(executor)]

    def _probe(self, precision: Precision, device: str) -> tuple[ActorSettings, dict[Any, Any]]:
        """Find what the policy answers, and whether its answers depend on each row alone."""
        inference = PolicyInference(
            copy.deepcopy(self.policy),
            self.env_spec,
            batch_size=self.config.batch_size,
            device=device,
            precision=precision,
        )
        outputs = inference.outputs()
        batch_size = self.config.batch_size
        if batch_size > 1 and not inference.depends_on_row_alone():
            warnings.warn(
                "the policy's answer to an observation depends on the other rows of the batch (or "
                "on its place among them): actors answer one row at a time, exact but slower",
                stacklevel=3,
            )
            batch_size = 1
        return (
            ActorSettings(
                batch_size=batch_size,
                device=device,
                precision=precision,
                matmul_precision=torch.get_float32_matmul_precision(),
                deterministic=torch.are_deterministic_algorithms_enabled(),
                aggregate=composite_lp_aggregate(nowarn=True),
                extras=tuple(inference.extras),
            ),
            outputs,
        )

    def _leave_out_extras(self) -> None:
        """Store action, log-probability and value only: for a learner that reads no more."""
        self._outputs = {k: v for k, v in self._outputs.items() if k not in self._settings.extras}
        self._settings = replace(self._settings, extras=())

    def start(self) -> None:
        """Start the crew, if it is not yet running; the first ``next`` does so by itself."""
        if self._crew is not None:
            return
        self._refuse_if_closed()
        self._board = Board(
            self.env_spec,
            self._outputs,
            self.config,
            self.schedule,
            PolicyWeights.layout(self.policy),
        )
        self._weights = PolicyWeights(self._board.arena, self.policy)
        if self._acting_weights is not None:
            self._weights.publish(self._acting_weights, self._versions[self._round])
            self._weights.exchange()
        self._weights.publish(self.policy.state_dict(), self._version)
        if self._acting_weights is None:
            self._weights.exchange()
        self._batches = [self._tensordict(storage) for storage in range(2)]
        self._recruiter = self._recruit(self._board)
        self._crew = self._recruiter.crew(self._journals[self._round])

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ProtocolError("the collector was shut down: make a new one")

    def _recruit(self, board: Board) -> Recruiter:
        return Recruiter(
            board, self._create_env_fn, self._policy_maker(), self._settings, self.seed
        )

    def _policy_maker(self) -> Callable[[], nn.Module]:
        if self._policy_factory is not None:
            factory, spec = self._policy_factory, self.env_spec
            return lambda: as_policy(factory(), spec)
        policy = copy.deepcopy(self.policy).cpu()
        return lambda: policy

    def _tensordict(self, storage: int) -> TensorDict:
        """Lay a TensorDict over one storage, without copying."""
        assert self._board is not None
        shape = [self.schedule.num_envs, self.schedule.steps_per_round]
        arrays = self._board.storages[storage].arrays
        batch = TensorDict(
            {key: torch.from_numpy(array) for key, array in arrays.items()},
            shape,
            names=[None, "time"],
        )
        for key in ("done", "terminated", "truncated"):
            batch[key] = torch.zeros(*shape, 1, dtype=torch.bool)
        return batch

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield one batch a round; going on after a ``break`` continues the run."""
        self.start()
        schedule = self.schedule
        self._handed_out_s = time.perf_counter()
        while schedule.exists(self._round):
            self._refuse_if_closed()
            round_index = self._round
            if self._started < round_index:
                self._start_round(round_index)
            asked_s = time.perf_counter()
            self._learner_busy_s += asked_s - self._handed_out_s
            self._wait_round(round_index)
            self._check_cells(round_index)
            self._meet(round_index, asked_s)
            self._round += 1
            self._frames += schedule.frames_per_round
            if schedule.starts_before_update():
                if schedule.exists(round_index + 1):
                    self._start_round(round_index + 1)
                else:  # a longer run, which goes on from the end of this one, acts with them
                    self._exchange_weights(round_index + 1)
            self._note(round_index)
            batch = self._batch(round_index)
            if self._post_collect_hook is not None:
                self._post_collect_hook(batch)
            self._handed_out_s = time.perf_counter()
            self._learner_waiting_s += self._handed_out_s - asked_s
            yield batch
        self.shutdown()

    def _start_round(self, round_index: int) -> None:
        """Hand the published weights to the actors, then let the executors go."""
        assert self._crew is not None
        if self._pre_collect_hook is not None:
            self._pre_collect_hook()
        self._exchange_weights(round_index)
        self._started = round_index
        self._begin_round(round_index)

    def _exchange_weights(self, round_index: int) -> None:
        """Make the published weights those with which a round acts."""
        if self._acting_weights is None:
            self._weights.exchange()
        self._acting_weights = None
        before = {r: v for r, v in self._versions.items() if r == round_index - 1}
        self._versions = {**before, round_index: self._weights.acting_version}

    def _begin_round(self, round_index: int) -> None:
        assert self._crew is not None
        assert self._board is not None
        self._board.logbook.trace(round_index == self._traced_round)
        storage = self._board.storages[self.schedule.storage_of(round_index)]
        if isinstance(storage, CountedStorage):
            storage.poison()
        self._crew.start_round(round_index)

    def _check_cells(self, round_index: int) -> None:
        assert self._board is not None
        storage = self._board.storages[self.schedule.storage_of(round_index)]
        if isinstance(storage, CountedStorage):
            storage.check(round_index, self.config.first_env)

    def _wait_round(self, round_index: int) -> None:
        """Wait for a round, with as many crews as it takes."""
        assert self._crew is not None
        for recovery in range(1, _MOST_RECOVERIES + 2):
            try:
                self._crew.wait_round(round_index)
            except WorkerKilled as error:
                if self.config.recover == "fail" or recovery > _MOST_RECOVERIES:
                    raise
                _log.warning(
                    "%s: round %d is repeated by a new crew (recovery %d of at most %d)",
                    *(str(error), round_index, recovery, _MOST_RECOVERIES),
                )
                self._renew_crew(round_index)
            else:
                return

    def _renew_crew(self, round_index: int) -> None:
        """Begin a round again with other workers; weights and storages stay where they are."""
        assert self._crew is not None
        assert self._board is not None
        self._crew.shutdown()
        self._board.renew_signals()
        self._crew = self._recruiter.crew(self._journals[round_index])
        self._begin_round(round_index)

    def _note(self, round_index: int) -> None:
        """Write a finished round into the journal, before the caller can write into the batch."""
        assert self._board is not None
        journal = self._journals[round_index]
        storage = self._board.storages[self.schedule.storage_of(round_index)]
        following = journal.after(self.env_spec, storage.arrays)
        self._journals = {round_index: journal, round_index + 1: following}

    def _meet(self, round_index: int, asked_s: float) -> None:
        """Note how far apart the executors finished, and what a traced round consisted of."""
        assert self._board is not None
        logbook, executors = self._board.logbook, range(self.config.num_executors)
        finished_s = logbook.finished_s[executors]
        self._skew_s += float(finished_s.max() - finished_s.min())
        if round_index == self._traced_round:
            names = [f"executor {index}" for index in executors]
            names += [f"actor {index}" for index in range(self.config.num_actors)]
            self._trace = {name: logbook.spans(worker) for worker, name in enumerate(names)}
            self._trace["learner"] = [(self._handed_out_s, asked_s)]

    def _batch(self, round_index: int) -> TensorDictBase:
        batch = self._batches[self.schedule.storage_of(round_index)].copy()
        batch["next", "done"] = batch["next", "terminated"] | batch["next", "truncated"]
        version = torch.full(batch.shape, self._versions[round_index], dtype=torch.int64)
        batch["collector", "policy_version"] = version
        return batch.clone() if self._clone else batch

    @property
    def rounds(self) -> int:
        """Rounds that have been handed out since the start of the run."""
        return self._round

    @property
    def acting_weights(self) -> dict[str, torch.Tensor] | None:
        """The weights of a loaded state with which the next round will act, until it starts."""
        return self._acting_weights

    @property
    def policy_version(self) -> int:
        """Updates in the weights that were published last."""
        return self._weights.newest_version if self._board is not None else self._version

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
        given = [source for source in sources if source is not None]
        if len(given) > 1:
            raise ConfigurationError("give the weights once")
        state = self._state_of(given[0] if given else self.policy)
        self.start()
        self._weights.publish(state)

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

    def _state_of(self, source: object) -> Mapping[str, torch.Tensor]:
        """Return weights by ``state_dict`` name, in whatever form TorchRL hands them over."""
        if source is self._source:
            source = self.policy
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
                f"weights of type {type(source).__name__}; a module, its state_dict or a "
                "TensorDict of its weights is needed"
            )
        return source

    def trace_round(self, round_index: int) -> None:
        """Keep who works when in a round that has not yet started; :attr:`trace` has it then.

        Raises:
            ProtocolError: if that round has started.
        """
        if round_index <= self._started:
            raise ProtocolError(f"round {round_index} cannot be traced: it has started")
        self._traced_round = round_index

    @property
    def trace(self) -> Trace | None:
        """Spans of work in the traced round, by worker; None until it is finished.

        Each is ``(begin, end)`` in seconds of ``time.perf_counter``; whoever has no span waits.
        ``executor 3`` works when it steps, ``actor 0`` when it runs a pass, ``learner`` from one
        ``next`` to the other.
        """
        return self._trace

    def stats(self) -> dict[str, int | float | bool]:
        """Add to TorchRL's counters what the crew has waited for.

        Seconds at work and waiting, summed by role, since the start; ``rendezvous_skew_s``, the
        seconds between the first executor's end of a round and the last one's, summed over rounds;
        ``slowest_env``, the first environment of the executor that was last.
        """
        stats: dict[str, int | float | bool] = super().stats()
        stats["learner_busy_s"] = self._learner_busy_s
        stats["learner_waiting_s"] = self._learner_waiting_s
        if self._board is not None:
            logbook, executors = self._board.logbook, self.config.num_executors
            for role, rows in (("executors", slice(executors)), ("actors", slice(executors, None))):
                stats[f"{role}_busy_s"] = float(logbook.busy_s[rows].sum())
                stats[f"{role}_waiting_s"] = float(logbook.waiting_s[rows].sum())
            if self.config.num_actors > 0:
                stats["rendezvous_skew_s"] = self._skew_s
                last = int(logbook.finished_s[:executors].argmax())
                stats["slowest_env"] = self._envs_of_executor(last)[0]
        return stats

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Set the run's seed, before the first batch; returns it.

        Raises:
            ProtocolError: if the crew already runs.
            ConfigurationError: for a seed that is no integer, or one for all environments.
        """
        if static_seed or not isinstance(seed, int):
            raise ConfigurationError(
                f"set_seed({seed!r}, static_seed={static_seed}); an integer is needed, from which "
                "each environment has a seed of its own"
            )
        if self._crew is not None:
            raise ProtocolError(
                "set_seed after the crew was started: environments have their seeds"
            )
        self.seed = seed
        return seed

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return what a run needs to go on with the batch after the last, bit for bit.

        That is counters, the running games, and the weights that act in the running round. The
        newest weights are the caller's to keep.
        """
        return self.state_at(self._round)

    def state_at(self, round_index: int, *, envs: bool = True) -> OrderedDict[str, Any]:
        """Return the state of a run whose next batch is round ``round_index``.

        Args:
            round_index: the round of the last batch, which is then collected again, or the next.
            envs: whether to keep the running games; without them new ones will begin.

        Raises:
            ProtocolError: for another round.
        """
        if round_index not in self._journals:
            raise ProtocolError(
                f"round {round_index} cannot be begun again; {list(self._journals)} can"
            )
        frames = self._frames + (round_index - self._round) * self.schedule.frames_per_round
        state: OrderedDict[str, Any] = OrderedDict(
            policy_version=self.policy_version, frames=frames, round=round_index
        )
        if envs:
            arrays = self._journals[round_index].arrays()
            state["games"] = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self.schedule.starts_before_update() and round_index in self._versions:
            state["acting_version"] = version = self._versions[round_index]
            state["acting_weights"] = self._acting_weights or self._weights.copy_of(version)
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Go on where a state was taken: its environments are restored when the crew starts.

        A state without games begins new ones.

        Raises:
            ProtocolError: if the crew already runs.
            ConfigurationError: if the state is of fewer environments.
        """
        if self._crew is not None:
            raise ProtocolError("load_state_dict after the crew was started")
        if missing := {"policy_version", "frames"} - state_dict.keys():
            raise ConfigurationError(f"the state lacks {min(missing)!r}: it is no collector's")
        self._version = int(state_dict["policy_version"])
        self._frames = int(state_dict["frames"])
        self._round = int(state_dict.get("round", 0))
        self._started = self._round - 1
        self._journals = {self._round: self._restored_journal(state_dict.get("games"))}
        self._acting_weights = state_dict.get("acting_weights")
        self._versions = {}
        if self._acting_weights is not None:
            self._versions = {self._round: int(state_dict["acting_version"])}

    def _restored_journal(self, games: dict[str, torch.Tensor] | None) -> Journal:
        first, last = self.config.first_env, self.config.num_envs
        if games is None:  # no environment was seeded more often than it has made steps
            steps = self._round * self.schedule.steps_per_round
            action = self.env_spec.action
            return Journal.blank(
                action,
                last,
                steps_per_seed=self._steps_per_seed,
                round_index=self._round,
                first=steps,
            )
        arrays = {name: tensor.numpy() for name, tensor in games.items()}
        if len(arrays["seeds"]) < first + last:
            raise ConfigurationError(
                f"the state is of {len(arrays['seeds'])} environments, but {first + last} are "
                "wanted: give the same num_envs, or set resume_envs=false for new games"
            )
        envs = slice(first, first + last)
        return Journal.from_arrays(
            arrays, envs, steps_per_seed=self._steps_per_seed, round_index=self._round
        )

    def shutdown(
        self,
        timeout: float | None = None,  # noqa: ARG002
        close_env: bool = True,  # noqa: ARG002
        raise_on_error: bool = True,  # noqa: ARG002
    ) -> None:
        """Stop all workers and free the shared memory; may be called twice.

        The last batch stays valid. The arguments are TorchRL's and change nothing here.
        """
        self._closed = True
        if self._crew is not None:
            self._crew.shutdown()
        if self._board is not None:
            self._board.close()

    def __del__(self) -> None:
        """Leave no process behind."""
        try:  # noqa: SIM105 - contextlib may be gone with the interpreter
            self.shutdown()
        except Exception:
            pass
