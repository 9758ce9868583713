"""The pool of rollout nodes: slices of the environments, each on a node of a Ray cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from dataclasses import dataclass
from typing import Any

from hts_torchrl.errors import (
    ConfigurationError,
    ProtocolError,
    WorkerError,
    WorkerKilled,
    WorkerPlace,
)
from hts_torchrl.shared.action_log import ActionLog
from hts_torchrl.shared.buffers import SharedBuffers
from hts_torchrl.workers.ray_cluster import RayCluster
from hts_torchrl.workers.rollout_node import NodeKind, NodeRound

_log = logging.getLogger(__name__)
_LOOK_S = 1.0
# Nodes of one machine are lost together, and told of one after another.
_TOGETHER_S = 1.0
# More than Ray takes to give up a machine. Until then it may place a new node there.
_GIVEN_UP_S = 120.0


@dataclass
class _Placed:
    """One rollout node, as this process knows it; replies are Ray's references."""

    handle: Any
    asked_s: float
    kind: Any
    """Reply to the newest question with what it computes, which is a sign of life."""
    started: Any
    """Reply that its pool has started; None when that was read."""
    playing: Any = None
    """Reply with the running round; None when that was taken over."""
    known: bool = False
    """Whether its first reply was read: it runs, with the learner's versions."""
    replaces: bool = False
    """Whether it takes the place of a lost node."""


class RayPool:
    """Rollout nodes that play the slices of a round, for the collector in this process.

    Node i of k has the environments ``i * N / k`` to ``(i + 1) * N / k - 1``: their draws and seeds
    come from their global indices, so no bit depends on k, or on where a node is placed. A finished
    slice travels through Ray's object store, and is copied into the round's storage here. Weights
    are put into the object store once a round.

    Args:
        shared: of the collector; nobody else maps it.
        action_log: of the round with which the pool begins.
        parts: pickled arguments by keyword of :func:`make_pool`, for the nodes.

    Raises:
        ConfigurationError: if Ray is not there, or refuses its options.
    """

    def __init__(self, shared: SharedBuffers, action_log: ActionLog, parts: bytes) -> None:
        self._shared, self._parts = shared, parts
        config = shared.config
        self._weights: tuple[int, Any] | None = None
        self._round_index = -1
        self._begun_s = 0.0
        self._lost: dict[int, str] = {}
        """Nodes that have died, and of what."""
        self._nodes: dict[int, _Placed] = {}
        self._cluster = RayCluster(config.backend_options or {}, config.num_nodes)
        self._ray = self._cluster.ray
        try:
            self._place(list(range(config.num_nodes)), action_log)
        except BaseException:
            self.shutdown()
            raise

    def _place(self, nodes: list[int], action_log: ActionLog, *, replaces: bool = False) -> None:
        """Ask for nodes whose environments are where the action log says."""
        games, shared = action_log.arrays(), self._shared
        layout = {name: shared.arrays.layout[name] for name in ("weights", "weights_acting")}
        for node in nodes:
            played = ActionLog.from_arrays(
                games,
                self._rows(node),
                shared.spec.memory,
                steps_per_seed=action_log.steps_per_seed,
                round_index=action_log.round_index,
            )
            handle = self._cluster.place(node)
            self._nodes[node] = _Placed(
                handle,
                time.monotonic(),
                self._cluster.ask(handle),
                handle.start.remote(
                    settings=shared.config.of_node(node),
                    spec=shared.spec,
                    outputs=shared.outputs,
                    weights_layout=layout,
                    action_log=played,
                    parts=self._parts,
                ),
                replaces=replaces,
            )

    def _rows(self, node: int) -> slice:
        count = self._shared.config.envs_per_node
        return slice(node * count, (node + 1) * count)

    def start_round(self, round_index: int) -> None:
        """Let all nodes begin a round, with the weights that act in it."""
        if any(node.playing is not None for node in self._nodes.values()):
            raise ProtocolError(
                f"round {round_index} starts before {self._round_index} was waited for"
            )
        self._round_index, self._begun_s = round_index, time.perf_counter()
        version, slot = self._shared.arrays["weights_acting"].tolist()
        self._weights = version, self._ray.put(self._shared.arrays["weights"][slot])
        for node in self._nodes:
            self._play(node)

    def _play(self, node: int) -> None:
        assert self._weights is not None
        placed, (version, weights) = self._nodes[node], self._weights
        placed.playing = placed.handle.play.remote(self._round_index, version, weights)

    def wait_round(self, round_index: int) -> None:
        """Sleep until every node has played its slice, and take it over; released by the nodes.

        Raises:
            ConfigurationError: if a node refused what the user gave, or has other versions.
            WorkerKilled: if a node has died or shows no sign of life for ``timeout_s``, or a worker
                of it was ended by a signal.
            WorkerError: if a worker of a node failed otherwise, or a node found no place.
        """
        if round_index != self._round_index:
            raise ProtocolError(f"waiting for round {round_index}, but {self._round_index} runs")
        while self._playing():
            if not self._take_over_first(1, _LOOK_S):
                self._look_for_signs_of_life()
            if self._lost:  # one loss may be that of several nodes
                self._take_over_first(len(self._nodes), _TOGETHER_S)
                node, cause = next(iter(self._lost.items()))
                raise WorkerKilled(self._place_of(node), cause)

    def _playing(self) -> dict[Any, int]:
        """Return the nodes of the running round by their replies."""
        return {
            placed.playing: node
            for node, placed in self._nodes.items()
            if placed.playing is not None and node not in self._lost
        }

    def _take_over_first(self, count: int, timeout_s: float) -> bool:
        """Take over from the first so many nodes that end in time; tell whether any has."""
        if not (playing := self._playing()):
            return False
        ready, _ = self._ray.wait(
            list(playing), num_returns=min(count, len(playing)), timeout=timeout_s
        )
        for reply in ready:
            self._take_over(playing[reply])
        return bool(ready)

    def _take_over(self, node: int) -> None:
        """Put a node's slice into the round's storage, or note that the node is lost."""
        placed = self._nodes[node]
        errors = self._ray.exceptions
        try:
            self._meet(node)
            if placed.started is not None:
                self._ray.get(placed.started)
                placed.started = None
            self._store(node, self._ray.get(placed.playing))
            placed.playing = None
        except errors.RayTaskError as error:
            self._raise_failure(node, error)
        except errors.RayError as error:  # of the node, its machine, or its part of the store
            self._lost[node] = f"was lost: {_first_line(error)}"

    def _raise_failure(self, node: int, error: Any) -> None:  # noqa: ANN401 - of Ray
        """Raise what a node raised, and say which; a killed worker loses the node."""
        cause, where = error.cause, self._place_of(node)
        if isinstance(cause, WorkerError):
            place = dataclasses.replace(cause.place, role=f"node {node}, {cause.place.role}")
            if isinstance(cause, WorkerKilled):
                self._lost[node] = f"lost a worker ({place}: {cause.cause})"
                return
            raise WorkerError(place, cause.cause) from None
        if isinstance(cause, ConfigurationError):
            raise ConfigurationError(f"{cause} (in node {node})") from None
        raise WorkerError(where, f"raised\n{error}") from None

    def _store(self, node: int, played: NodeRound) -> None:
        """Copy a slice to its rows; numbers of trajectories count all environments here."""
        shared, rows = self._shared, self._rows(node)
        half = shared.schedule.storage_of(self._round_index)
        for name, array in played.arrays.items():
            shared.arrays[name][half, rows] = array
        ids = shared.arrays["rollout/collector.traj_ids"][half, rows]
        own = shared.config.envs_per_node
        ids[...] = ids // own * shared.config.num_envs + ids % own + rows.start
        self._book(node, played)

    def _book(self, node: int, played: NodeRound) -> None:
        """Keep the seconds of a node's workers; actors of all nodes share the rows of one."""
        status, config = self._shared.status, self._shared.config
        own = config.envs_per_node // config.envs_per_executor
        executors, actors = slice(node * own, (node + 1) * own), slice(config.num_executors, None)
        status.rounds[executors] = self._round_index
        status.steps[executors] = self._shared.schedule.steps_per_round
        status.finished_s[executors] = self._begun_s + played.finished_s[:own]
        for name in ("busy_s", "waiting_s"):
            booked, seconds = getattr(status, name), getattr(played, name)
            booked[executors] += seconds[:own]
            booked[actors] += seconds[own:]

    def _place_of(self, node: int) -> WorkerPlace:
        rows, first = self._rows(node), self._shared.config.first_env
        envs = tuple(range(first + rows.start, first + rows.stop))
        return WorkerPlace("node", node, envs, self._round_index, None)

    def _require_alike(self, node: int, kind: NodeKind) -> None:
        """Refuse other versions than the learner's, and warn of another processor."""
        learner = NodeKind.of_this_process()
        for package in ("torch", "hts_torchrl"):
            here, there = getattr(learner, package), getattr(kind, package)
            if here != there:
                raise ConfigurationError(
                    f"node {node} has {package} {there}, and the learner {here}: install the same "
                    "versions on all machines"
                )
        if kind.cpu != learner.cpu:
            _log.warning(
                "node %d computes on %s, and the learner's machine is %s: the last bits of a pass "
                "may differ between the two, and with them those of runs that place nodes "
                "otherwise",
                *(node, kind.cpu, learner.cpu),
            )

    def _meet(self, node: int) -> None:
        """Read a node's first reply."""
        placed = self._nodes[node]
        if not placed.known:
            self._require_alike(node, self._ray.get(placed.kind))
            placed.known = True

    def _look_for_signs_of_life(self) -> None:
        """Lose the nodes that no longer answer in time; give up on those that never did.

        A node answers while it plays. What its workers do is watched by its own pool.
        """
        timeout_s, now_s = self._shared.config.timeout_s, time.monotonic()
        for node in self._playing().values():
            placed = self._nodes[node]
            found_late = placed.replaces and not placed.known
            patience_s = max(timeout_s, _GIVEN_UP_S) if found_late else timeout_s
            if self._ray.wait([placed.kind], timeout=0)[0]:
                with contextlib.suppress(self._ray.exceptions.RayError):  # its round tells of it
                    self._meet(node)
                placed.kind, placed.asked_s = self._cluster.ask(placed.handle), now_s
            elif now_s - placed.asked_s > patience_s and not placed.known:
                raise WorkerError(
                    self._place_of(node),
                    f"did not start within {patience_s:g} s; free in the cluster: "
                    f"{self._cluster.resources()}; lower num_collectors or remote_configs, add "
                    "machines, or raise timeout_s",
                )
            elif now_s - placed.asked_s > patience_s:
                self._lost[node] = f"shows no sign of life for {timeout_s:g} s"

    def replace_dead_nodes(self, action_log: ActionLog) -> bool:
        """Replace the nodes that were lost, and let the new ones play the running round.

        Returns:
            Whether there were any; else all workers are to be replaced.
        """
        if not self._lost:
            return False
        nodes, self._lost = sorted(self._lost), {}
        self._cluster.stop([self._nodes[node].handle for node in nodes])
        self._place(nodes, action_log, replaces=True)
        for node in nodes:
            self._play(node)
        return True

    def shutdown(self) -> None:
        """End all nodes, and leave the cluster; may be called twice."""
        try:
            self._cluster.stop([placed.handle for placed in self._nodes.values()])
        finally:
            self._nodes.clear()
            self._weights = None
            self._cluster.leave()


def _first_line(error: Exception) -> str:
    """Return the beginning of what Ray tells of a loss; further lines are about its logs."""
    line = next(iter(str(error).splitlines()), "").rstrip(". ")
    return line or type(error).__name__
