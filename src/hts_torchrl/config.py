"""Settings of a run's collector and of its workers; validated where they are made."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, get_args

from hts_torchrl.errors import ConfigurationError, require, require_type
from hts_torchrl.schedule import Schedule
from hts_torchrl.settings import plain_value

Precision: TypeAlias = Literal["32-true", "bf16-mixed", "bf16-true", "64-true"]
PRECISIONS: tuple[Precision, ...] = ("32-true", "bf16-mixed")
"""The Trainer's, in which actors can compute, too."""
StartMethod: TypeAlias = Literal["forkserver", "spawn"]
Collection: TypeAlias = Literal["rounds", "actors", "server"]
Recover: TypeAlias = Literal["fail", "replay"]
Backend: TypeAlias = Literal["direct", "ray"]

MOST_ENVS = 65_536
"""In one process; also rows of a forward pass and games of an evaluation."""


def default_batch_size(num_envs: int) -> int:
    """Return the rows of a forward pass where nobody has set them; the last bits depend on it."""
    return min(8, num_envs)


def take_plain_values(settings: Any) -> None:  # noqa: ANN401 - any dataclass
    """Make values Python's own, as a checkpoint takes them, and 1e6 an integer.

    Raises:
        ConfigurationError: naming a setting that is no number, or not True or False, where one is
            needed.
    """
    for setting in fields(settings):
        value = plain_value(setting.name, getattr(settings, setting.name), str(setting.type))
        object.__setattr__(settings, setting.name, value)


@dataclass(frozen=True, kw_only=True)
class CollectorSettings:
    """All that decides what a collector collects, and by which workers.

    A setting is declared here and nowhere else: :class:`HTSCollector`, :class:`HTSDataModule`, the
    command line and the workers take it from here.

    Example:
        >>> settings = CollectorSettings(frames_per_batch=80, num_envs=16, total_frames=160)
        >>> settings.schedule.num_rounds
        2
    """

    num_envs: int = 16
    """number of environments, of all ranks together."""
    num_actors: int = 1
    """actor processes of each rank; 0 runs everything in this process, the serial twin."""
    envs_per_executor: int = 1
    """environments that one executor process steps together."""
    inference_batch_size: int | None = None
    """rows of every forward pass; None is ``min(8, num_envs)``. The last bits depend on it."""
    step_barrier: bool = False
    """wait for all environments at every step, like a synchronous vector environment: a baseline
    with the same bits."""
    start_method: StartMethod = "forkserver"
    """how worker processes start: ``forkserver`` or ``spawn``."""
    timeout_s: float = 120.0
    """seconds without progress of an executor after which the run ends with an error."""
    recover: Recover = "fail"
    """``fail`` ends the run when a signal has killed a worker; ``replay`` restarts the worker pool,
    replays the running games and repeats the round, with the same bits."""
    reward_discount: float | None = None
    """store ``("next", "discounted_return")``: the sum so far, times this, plus the reward of the
    step; 0 before a trajectory. Rewards are scaled by its deviation. None stores none."""
    first_env: int = 0
    """global index of environment 0; ranks of a distributed run differ in it."""
    backend: Backend | None = None
    """where environments and actors run: None and ``direct`` on this machine, ``ray`` on rollout
    nodes of a Ray cluster, with the same bits."""
    num_collectors: int | None = None
    """rollout nodes with ``backend=ray``, each with its slice of the environments and
    ``num_actors`` actors; None is 1."""
    backend_options: dict[str, Any] | None = None
    """with ``backend=ray``: ``ray_init_config``, arguments of ``ray.init``; ``remote_configs``,
    arguments of ``ray.remote`` for all nodes, or a list of them."""
    debug: bool = False
    """fill each storage with 0xFF bytes (NaN in floats) before its round, and check that every cell
    of a finished round was written exactly once; changes no bit."""
    frames_per_batch: int
    """environment steps in a round: ``num_envs`` times the steps of each."""
    total_frames: int = -1
    """steps in the whole run, rounded up to whole rounds; -1 is endless."""
    delay: int = 1
    """1 collects the next round during the update; 0 only after it (A2C, PPO, PAAC)."""
    seed: int = 0
    """determines every environment and every action."""
    compile_policy: bool | dict[str, Any] | None = None
    """True compiles each actor's pass with ``torch.compile``: faster for small networks, with other
    last bits; needs a C++ compiler. A dict sets ``mode``, ``options`` or ``backend``."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        take_plain_values(self)
        _ = self.schedule
        self._refuse_counts()
        for name, kind in (("start_method", StartMethod), ("recover", Recover)):
            value, known = getattr(self, name), get_args(kind)
            require(value in known, f"{name}={value!r}", " or ".join(map(repr, known)))
        discount = self.reward_discount
        sound = discount is None or 0 <= discount <= 1
        require(sound, f"reward_discount={discount}", "None, or 0 to 1,")
        # NaN is not positive either.
        require(self.timeout_s > 0, f"timeout_s={self.timeout_s}", "a positive time")
        wanted = "True, False, or a dict of torch.compile's arguments"
        require_type("compile_policy", self.compile_policy, bool | dict | None, wanted)
        self._refuse_backend()

    def _refuse_backend(self) -> None:
        """Refuse what no backend does, in the words of TorchRL's arguments."""
        backend, nodes, options = self.backend, self.num_collectors, self.backend_options
        if backend not in (None, "direct", "ray"):
            raise ConfigurationError(
                f"backend={backend!r} is not supported, only None, 'direct' or 'ray': workers are "
                "processes of this machine, or of the rollout nodes of a Ray cluster"
            )
        counted = nodes is None or (type(nodes) is int and nodes >= 1)
        require(counted, f"num_collectors={nodes!r}", "a number of rollout nodes, 1 or more,")
        if backend != "ray":
            if nodes not in (None, 1) or options:
                given = f"backend_options={options}" if options else f"num_collectors={nodes}"
                raise ConfigurationError(
                    f"{given}: this is for rollout nodes; give backend='ray', or leave it out, as "
                    "num_envs and envs_per_executor say how many processes step environments"
                )
            return
        known = ("ray_init_config", "remote_configs")
        require_type("backend_options", options, dict | None, "a dict")
        for name in (options or {}).keys() - set(known):
            raise ConfigurationError(
                f"backend_options[{name!r}]: backend='ray' knows {' and '.join(known)} only"
            )
        if self.num_envs % (self.num_nodes * self.envs_per_executor):
            raise ConfigurationError(
                f"num_envs={self.num_envs} is no multiple of num_collectors={self.num_nodes} times "
                f"envs_per_executor={self.envs_per_executor}: each rollout node has as many"
            )
        if self.num_actors > self.envs_per_node:
            raise ConfigurationError(
                f"num_actors={self.num_actors} is more than the {self.envs_per_node} environments "
                f"of each of num_collectors={self.num_nodes} rollout nodes"
            )
        if self.step_barrier:
            raise ConfigurationError(
                "step_barrier with backend='ray': rollout nodes meet at the end of a round only"
            )
        if self.compile_arguments is not None:
            raise ConfigurationError(
                "compile_policy with backend='ray': rollout nodes compile no policy; leave it out"
            )

    def _refuse_counts(self) -> None:
        for name in ("num_envs", "inference_batch_size"):
            if (getattr(self, name) or 0) > MOST_ENVS:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)}; at most {MOST_ENVS} is possible"
                )
        rows = self.inference_batch_size
        require(rows is None or rows >= 1, f"inference_batch_size={rows}", "at least 1")
        require(self.first_env >= 0, f"first_env={self.first_env}", "0 or more")
        least = {"num_actors": (0, "0 or more"), "envs_per_executor": (1, "at least 1")}
        for name, (fewest, wanted) in least.items():
            count = getattr(self, name)
            require(count >= fewest, f"{name}={count}", wanted)
            if count > self.num_envs:
                raise ConfigurationError(f"{name}={count} is more than num_envs={self.num_envs}")
        if self.num_envs % self.envs_per_executor:
            raise ConfigurationError(
                f"num_envs={self.num_envs} is no multiple of "
                f"envs_per_executor={self.envs_per_executor}"
            )
        if self.step_barrier and self.num_actors > 1:
            raise ConfigurationError(
                f"step_barrier with num_actors={self.num_actors}; at a barrier one actor answers "
                "all environments: 1 is needed"
            )

    @property
    def num_executors(self) -> int:
        """Executor processes."""
        return self.num_envs // self.envs_per_executor

    @property
    def num_nodes(self) -> int:
        """Rollout nodes that are not this process; 0 where workers are those of this machine."""
        return (self.num_collectors or 1) if self.backend == "ray" else 0

    @property
    def envs_per_node(self) -> int:
        """Environments of each rollout node."""
        return self.num_envs // max(1, self.num_nodes)

    @property
    def batch_size(self) -> int:
        """Rows of every forward pass."""
        return self.inference_batch_size or default_batch_size(self.num_envs)

    def envs_of(self, executor: int) -> tuple[int, ...]:
        """Local indices of the environments of one executor."""
        first = executor * self.envs_per_executor
        return tuple(range(first, first + self.envs_per_executor))

    def global_envs_of(self, executor: int) -> list[int]:
        """Indices of the environments of one executor among those of all ranks."""
        return [self.first_env + env for env in self.envs_of(executor)]

    @property
    def compile_arguments(self) -> dict[str, Any] | None:
        """Arguments of ``torch.compile`` for the actors' pass; None compiles nothing."""
        if isinstance(self.compile_policy, dict):
            return self.compile_policy
        return {} if self.compile_policy else None

    @property
    def schedule(self) -> Schedule:
        """The rounds of the run."""
        return Schedule.from_frames(
            self.frames_per_batch,
            total_frames=self.total_frames,
            num_envs=self.num_envs,
            delay=self.delay,
        )

    def of_rank(self, rank: int, ranks: int) -> CollectorSettings:
        """Return the settings of one rank's collector: an equal share of neighbouring environments.

        The rows of a forward pass are those of the whole run, as the last bits depend on them. No
        bit depends on workers: a rank has no more actors, and no larger executors, than
        environments.

        Args:
            rank: 0 and up.
            ranks: of the run, which has an end.

        Raises:
            ConfigurationError: if environments cannot be shared so, or a rank's not by executors.
        """
        if ranks == 1:
            return self
        if self.num_envs % ranks:
            raise ConfigurationError(
                f"num_envs={self.num_envs} on {ranks} ranks; a multiple of {ranks} is needed, as "
                "each rank has equally many environments"
            )
        num_envs, frames = self.num_envs // ranks, self.frames_per_batch // ranks
        assert self.schedule.num_rounds is not None
        try:
            return replace(
                self,
                num_envs=num_envs,
                num_actors=min(self.num_actors, num_envs),
                envs_per_executor=min(self.envs_per_executor, num_envs),
                frames_per_batch=frames,
                total_frames=frames * self.schedule.num_rounds,
                inference_batch_size=self.batch_size,
                first_env=self.first_env + rank * num_envs,
            )
        except ConfigurationError as error:
            raise ConfigurationError(f"on each of {ranks} ranks: {error}") from error

    def of_node(self, node: int) -> CollectorSettings:
        """Return the settings of one rollout node, whose slice is collected on its own machine."""
        return replace(
            self,
            num_envs=self.envs_per_node,
            frames_per_batch=self.frames_per_batch // self.num_nodes,
            total_frames=-1,
            first_env=self.first_env + node * self.envs_per_node,
            backend=None,
            num_collectors=None,
            backend_options=None,
        )
