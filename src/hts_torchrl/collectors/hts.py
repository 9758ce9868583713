"""The collector: rounds of experience as TensorDicts, collected while the caller learns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from hts_torchrl.collectors.handing_out import extend
from hts_torchrl.collectors.progress import Progress
from hts_torchrl.collectors.round_runner import MakePool, RoundRunner
from hts_torchrl.collectors.run_times import RunTimes
from hts_torchrl.collectors.torchrl_contract import ContractCollector
from hts_torchrl.collectors.torchrl_settings import FIXED, Device, TorchRLSettings
from hts_torchrl.config import CollectorSettings, Precision
from hts_torchrl.envs.group import CreateEnv, EnvFactory, SeededGroup, closed_at_end
from hts_torchrl.envs.kept_process import process_kept
from hts_torchrl.envs.layers import warn_of_statistics
from hts_torchrl.envs.make_group import arranged, make_group, number_of_envs
from hts_torchrl.errors import ConfigurationError, ProtocolError, require
from hts_torchrl.policy.as_policy import Policy, as_policy, made_by
from hts_torchrl.policy.forward import with_parts
from hts_torchrl.policy.limits import copied
from hts_torchrl.policy.memory import with_memory
from hts_torchrl.policy.shared_weights import weights_by_name
from hts_torchrl.settings import plain_value, takes_settings
from hts_torchrl.specs import EnvSpec
from hts_torchrl.workers.actor_settings import ActorSettings, find_settings
from hts_torchrl.workers.make_pool import make_pool


@takes_settings(CollectorSettings, TorchRLSettings, silently=FIXED)
class HTSCollector(ContractCollector):
    """Collects rounds of ``frames_per_batch`` environment steps while you learn from the last one.

    ``next`` on its iterator *is* the rendezvous: it waits for the running round, takes the weights
    that were published with :meth:`update_policy_weights_`, starts the next round in the
    background, and returns the finished one. So a plain loop overlaps rollout and update::

        for batch in collector:
            loss_of(batch).backward()
            optimizer.step()
            collector.update_policy_weights_()

    A batch is a ``TensorDict[N, T]`` (N environments, T steps, the last dimension named ``time``):

    - the observation, and all ``out_keys`` of the policy: the action, ``action_log_prob`` float32
      ``[N, T]``, ``state_value`` float32 ``[N, T, 1]``, the distribution's parameters and others;
    - ``done``, ``terminated`` and ``truncated``, bool ``[N, T, 1]``, here and under ``next``;
    - under ``next`` the true next observation, even where an episode ended, ``reward`` and
      ``episode_reward`` (raw score of the game so far), float32, ``step_count`` (steps of the game
      so far), int64, and ``episode_end``, bool, ``[N, T, 1]`` each;
    - ``("collector", "traj_ids")`` and ``("collector", "policy_version")`` (updates in the acting
      weights), int64 ``[N, T]``;
    - a policy's memory as it was read, and under ``next`` as it was written, with ``is_init``, bool
      ``[N, T, 1]``, for a policy that reads it.

    A batch stays valid, unless ``clone=False`` asks for a view. A Gymnasium environment's ``info``
    is not kept: use a wrapper to add what you need of it to the observation.

    The same seed gives the same bits for any ``num_actors``, ``envs_per_executor``,
    ``step_barrier``, ``start_method`` and timing.

    Arguments of TorchRL's ``Collector`` that are not listed are accepted with values that have no
    effect here, and refused with others.

    Args:
        create_env_fn: an environment factory (``AtariEnvs``, ``GymEnvs``); or a function returning
            a ``gymnasium.Env``, a vector environment of ``envs_per_executor``, or a TorchRL
            ``EnvBase``; or an ``EnvBase``, which is copied for each environment; or a list with a
            function or an ``EnvBase`` for each environment. A function with an argument without a
            default is given the environment's index. An ``EnvBase`` of batch size
            ``[envs_per_executor]`` is all environments of an executor.
        policy: a TensorDict policy with one probabilistic module (``ProbabilisticActor``,
            ``ActorValueOperator``, ``hts_torchrl.ActorCritic``), or one that writes the
            action itself (``QValueActor``, ``RandomPolicy``), with or without exploration modules;
            or a plain module that maps the observation to logits (discrete), or to the action or to
            mean and standard deviation (continuous); or a function of a TensorDict ``[B]``, which
            writes the action there or returns another one. What it writes under ``next`` and reads
            at the root is its memory. With a ``CompositeDistribution`` it writes each of several
            actions under the environment's key.
        policy_factory: makes the policy if it cannot be pickled; instead of ``policy``.
        num_envs: number of environments; None is the length of a list, otherwise 16.
        precision: of the actors, as in Lightning; give the learner the same.
        policy_device: device of the actors; None is ``device``, or the CPU.
        clone: return batches as copies, made while the next round runs; False returns views of the
            shared memory, each valid only until the following ``next``.
        all_outputs: store all outputs of the policy; False stores only action, log-probability and
            value.

    Raises:
        ConfigurationError: for settings that cannot work; and from ``next``, if an environment
            returns something outside its spaces.
        WorkerError: from ``next``, if a worker raised, died or hung.
        ReplayError: if a restored environment behaves differently than before. In a worker
            process it is the cause of a ``WorkerError``.
    """

    def __init__(  # noqa: PLR0913 - TorchRL's constructor, keyword only
        self,
        create_env_fn: CreateEnv | EnvFactory,
        policy: Policy | None = None,
        *,
        policy_factory: Callable[[], Policy] | None = None,
        num_envs: int | None = None,
        precision: Precision = "32-true",
        policy_device: Device | None = None,
        clone: bool = True,
        all_outputs: bool = True,
        **settings: Any,  # noqa: ANN401
    ) -> None:
        super().__init__()
        clone = plain_value("clone", clone, "bool")
        all_outputs = plain_value("all_outputs", all_outputs, "bool")
        self._runner: RoundRunner | None = None
        self._closed = False
        default = torch.get_default_device()
        require(default.type == "cpu", f"torch.set_default_device({str(default)!r})", "'cpu'")
        settings = self._take_arguments(settings)
        self._create_env_fn = create_env_fn = arranged(
            create_env_fn, self._torchrl.create_env_kwargs, self._torchrl.max_frames_per_traj
        )
        num_envs = number_of_envs(create_env_fn, num_envs, settings.get("first_env", 0))
        self.config = CollectorSettings(num_envs=num_envs, **settings)
        self.schedule = self.config.schedule
        if (policy is None) == (policy_factory is None):
            raise ConfigurationError(
                "give a policy or a policy_factory, one of the two; torchrl's RandomPolicy() is "
                "what its Collector takes where neither is given"
            )
        makes = callable(policy_factory) and not isinstance(policy_factory, nn.Module)
        kind = f"policy_factory of type {type(policy_factory).__name__}"
        require(policy_factory is None or makes, kind, "a function that makes the policy")
        for name in ("backend", "num_collectors", "backend_options"):
            setattr(self, name, getattr(self.config, name))
        self.total_frames, self.seed = self.config.total_frames, self.config.seed
        self.frames_per_batch = self.requested_frames_per_batch = self.config.frames_per_batch
        self._policy_factory = policy_factory
        self.env_spec, steps_per_seed = self._try_environments()
        self._factory_draws = torch.get_rng_state()
        """From where a factory draws here, and in each actor: not all of it may be in weights."""
        self._source = policy if policy is not None else policy_factory()  # type: ignore[misc]
        self.policy = as_policy(self._source, self.env_spec)
        self.env_spec = with_parts(self.policy, with_memory(self.policy, self.env_spec))
        self.policy_device = self._torchrl.policy_device(
            policy_device, on_nodes=bool(self.config.num_nodes)
        )
        self.compile_policy = self.config.compile_policy
        asked = ActorSettings(
            batch_size=self.config.batch_size,
            device=self.policy_device,
            precision=precision,
            cudagraph=self._torchrl.cudagraph(self.policy_device),
            compile_policy=self.config.compile_arguments,
            greedy=self._torchrl.greedy(self.env_spec),
            random_rounds=self._torchrl.random_rounds(self.env_spec, self.frames_per_batch),
        )
        self._actor, self._outputs = find_settings(
            self.policy, self.env_spec, asked, all_outputs=all_outputs
        )
        self._set_form(self.schedule, clone=clone)
        self._progress = Progress(self.config, self.env_spec, steps_per_seed)
        self._times = RunTimes(self.config)

    def _try_environments(self) -> tuple[EnvSpec, int | None]:
        """Return the spec of the first executor's environments, and how long a seed lasts."""
        with (
            process_kept(),
            closed_at_end(make_group(self._create_env_fn, self.config.global_envs_of(0))) as group,
        ):
            warn_of_statistics(group)
            return group.spec, group.steps_per_seed if isinstance(group, SeededGroup) else None

    def start(self) -> None:
        """Start the worker pool, if it is not yet running; the first ``next`` does so by itself.

        Raises:
            ConfigurationError: with a ``replay_buffer``, which TorchRL's would fill in a thread.
        """
        if self.replay_buffer is not None:
            raise ConfigurationError(
                "start() with a replay_buffer: TorchRL's fills it in a thread, with data of any "
                "age; iterate over the collector, which extends the buffer by each round"
            )
        self._running()

    def _running(self) -> RoundRunner:
        """Return the runner of rounds, started if there is none."""
        if self._runner is None:
            self._refuse_if_closed()
            # Tensors that were made in that mode cannot be written to outside it.
            with torch.inference_mode(mode=False):
                self._runner = RoundRunner(
                    self.config,
                    self.env_spec,
                    self._outputs,
                    self.policy,
                    progress=self._progress,
                    times=self._times,
                    make_pool=self._pool_maker(),
                )
        return self._runner

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ProtocolError("the collector was shut down: make a new one")

    def _pool_maker(self) -> MakePool:
        """Return what makes the worker pool; a subclass may return another."""
        return partial(
            make_pool,
            create_env_fn=self._create_env_fn,
            make_policy=self._policy_maker(),
            settings=self._actor,
            seed=self.seed,
        )

    def _policy_maker(self) -> Callable[[], nn.Module]:
        if self._policy_factory is not None:
            return partial(made_by, self._policy_factory, self.env_spec, self._factory_draws)
        policy = copied(self.policy).cpu()
        return lambda: policy

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield one batch per round; iterating again after a ``break`` continues the run."""
        runner = self._running()
        self._times.begin()
        while self.schedule.exists(self._progress.round_index):
            self._refuse_if_closed()
            try:
                batch = runner.next_batch(self.pre_collect_hook, self._hand_out)
            except Exception:
                self._refuse_if_closed()  # meanwhile: by a hook, a signal's answer, another thread
                raise
            if self.replay_buffer is not None and not self._ignore_rb:
                extend(self.replay_buffer, batch, None if self.split_trajs else self._shape)
                batch = None
            self._times.hand_out()
            yield batch
        self.shutdown()

    def _hand_out(self, batch: TensorDictBase) -> TensorDictBase:
        batch = self._handing_out.hand_out(batch)
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        return batch

    @property
    def acting_weights(self) -> dict[str, torch.Tensor] | None:
        """The weights of a loaded state with which the next round will act, until it starts."""
        return self._progress.acting_weights

    @property
    def policy_version(self) -> int:
        """Updates in the weights that were published last."""
        if self._runner is None:
            return self._progress.first_version
        return self._runner.weights.newest_version

    def update_policy_weights_(
        self,
        policy_or_weights: TensorDictBase | nn.Module | dict[str, Any] | None = None,
        *,
        weights: TensorDictBase | dict[str, Any] | None = None,
        policy: nn.Module | None = None,
        model_id: str | None = None,
        weights_dict: dict[str, Any] | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Publish weights; the round that starts at the next rendezvous acts with them.

        Args:
            policy_or_weights: a module, its ``state_dict``, or its weights as a TensorDict; None
                takes the policy that the collector was given.
            weights: the same by keyword.
            policy: the same by keyword.
            model_id: TorchRL's name of the policy, which is ``policy``.
            weights_dict: the same by that name.
            kwargs: TorchRL's others, which can only be None.

        Raises:
            ConfigurationError: if the weights are not those of a policy like the collector's, by
                name, shape and type, or not finite; or an argument for many policies is given. What
                was published before is kept then.
        """
        named = weights_dict or {}
        if unknown := [name for name in (model_id or "policy", *named) if name != "policy"]:
            raise ConfigurationError(
                f"model_id or weights_dict: no {unknown[0]!r} acts, only 'policy' does"
            )
        if any(value is not None for value in kwargs.values()):
            raise ConfigurationError(
                f"arguments {sorted(kwargs)} are not supported: one policy acts"
            )
        sources = (policy_or_weights, weights, policy, named.get("policy"))
        given = [source for source in sources if source is not None] or [self.policy]
        if len(given) > 1:
            raise ConfigurationError("give the weights once")
        source = self.policy if given[0] is self._source else given[0]
        self._running().weights.publish(weights_by_name(source))

    def reset(self, index: object = None) -> None:
        """Begin new games in all environments; the next batch has them from its first step on.

        The running round is discarded and collected again, by new workers and with the
        same weights, so this takes as long as a start. Trajectories that ``trajs_per_batch`` holds
        back are dropped. The same seed and the same point of the run give the same games.

        Args:
            index: TorchRL's, of environments in a batch.

        Raises:
            ConfigurationError: for an index.
            ProtocolError: if the collector was shut down.
        """
        if index is not None:
            raise ConfigurationError("reset(index): all environments begin new games, or none does")
        self._refuse_if_closed()
        self._progress.begin_games()
        self._flush_trajectory_assembly()
        if self._runner is None:
            return
        try:
            self._runner.renew_pool()
        except BaseException:  # such as Ctrl-C: the workers of before are gone
            self.shutdown()
            raise

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
        if self._runner is not None:
            self._runner.shutdown()

    def __del__(self) -> None:
        """Leave no process behind."""
        try:  # noqa: SIM105 - contextlib may be gone with the interpreter
            self.shutdown()
        except Exception:
            pass
