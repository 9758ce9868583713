"""The real classes of a pool in one process, one step at a time, in whatever order is asked for.

Each process of the model is a thread that stops before every step until it is told to take it, so
only one of them ever moves. What they run is the code of the package: ``HTSCollector``,
``ProcessPool``, ``Executor``, ``Actor`` and all buffers and pipes; only processes
themselves, and how the kernel tells of their end, are played by :class:`StagedProcess` and
:class:`StagedPoll`. A crash is an exception that no code of the package catches.
"""

from __future__ import annotations

import array
import fcntl
import termios
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hts_torchrl import HTSCollector, WorkerError
from hts_torchrl.collectors import round_runner
from hts_torchrl.config import Recover
from hts_torchrl.policy.shared_weights import PolicyWeights
from hts_torchrl.shared import pipes
from hts_torchrl.shared.buffers import ActionBuffer, SharedBuffers
from hts_torchrl.shared.pipes import Doorbell, ReadyQueue
from hts_torchrl.workers import actor_settings, make_pool
from hts_torchrl.workers.executor import Executor
from hts_torchrl.workers.pool import ProcessPool
from tests.fakes import CoordinateEnvs
from tests.policies import VERSION_UNIT, echo_policy, echo_weights
from tests.protocol.explorer import Path
from tests.protocol.model import Protocol
from tests.protocol.players import (
    Differs,
    Player,
    StagedPoll,
    StagedProcess,
    sleep_until_readable,
    turn,
)
from tests.protocol.state import EXECUTORS, STORAGES, Answer, Cell, State, Step
from tests.runs import digest


class Stage:
    """One run of a collector, and everybody in it.

    Args:
        protocol: whose steps will be played.
        recover: the collector's setting.
        patch: ``pytest.MonkeyPatch`` of the package's classes.
    """

    def __init__(self, protocol: Protocol, recover: Recover, patch) -> None:
        self.batches: list = []
        self.players: dict[str, Player] = {}
        self._pool: ProcessPool | None = None
        self._patch(patch, protocol.most_recoveries)
        self.collector = make_collector(protocol, num_actors=2, recover=recover)
        self.collector.start()
        parent = self.players["parent"] = Player("parent", self._learn)
        parent.take("start")

    @property
    def shared(self) -> SharedBuffers:
        return self._pool._shared

    def _learn(self) -> None:
        """The loop of a user."""
        try:
            for batch in self.collector:
                turn("learn")
                self.batches.append(batch.clone())
                self.collector.update_policy_weights_(echo_weights(len(self.batches)))
                if digest([batch]) != digest(self.batches[-1:]):
                    raise Differs("the batch changed in the learner's hands")
        except WorkerError:
            self.collector.shutdown()
            raise

    def _patch(self, patch, most_recoveries: int) -> None:
        """Put a turn before each step; the code of the step stays."""

        def before(owner: type, method: str, at: Callable[..., str] | str) -> None:
            real = getattr(owner, method)

            def staged(self, *args, **kwargs):
                turn(at if isinstance(at, str) else at(self))
                return real(self, *args, **kwargs)

            patch.setattr(owner, method, staged)

        before(Executor, "put_state", "put")
        before(Executor, "step", "step")
        before(PolicyWeights, "load", "load")
        before(PolicyWeights, "exchange", "exchange")
        before(PolicyWeights, "publish", "publish")
        before(ActionBuffer, "put", "answer")
        before(round_runner.RoundRunner, "_note", "note")
        before(SharedBuffers, "renew_signals", "renew")
        before(Doorbell, "ring", self._ring)
        before(ReadyQueue, "put", lambda queue: "report" if self._reports(queue) else "announce")
        take_waiting = ReadyQueue.take_waiting

        def staged_take(queue, most):
            if not self._reports(queue):
                turn("take")
            return take_waiting(queue, most)

        patch.setattr(ReadyQueue, "take_waiting", staged_take)
        patch.setattr(pipes, "sleep_until_readable", sleep_until_readable)
        patch.setattr(make_pool, "ProcessPool", self._crew_class())
        patch.setattr(actor_settings, "keep_freed_memory", lambda: True)  # of a process
        patch.setattr(round_runner, "_MOST_RECOVERIES", most_recoveries)

    def _ring(self, bell: Doorbell) -> str:
        if threading.current_thread() is not self.players.get("parent"):
            return "ring"
        return f"ring {[each is bell for each in self.shared.doorbells.values()].index(True)}"

    def _reports(self, queue: ReadyQueue) -> bool:
        return queue is self.shared.finished

    def _crew_class(self) -> type[ProcessPool]:
        stage = self

        class StagedCrew(ProcessPool):
            """A worker pool of threads."""

            def _start(self, preload) -> None:  # noqa: ARG002
                first = stage._pool is None
                stage._pool = self
                stage._blank(STORAGES if first else [stage.collector.rounds % 2])
                for task in self._tasks:
                    process = StagedProcess(f"{task.role} {task.index}", task, self._lifeline)
                    self._processes.append(process)
                    stage.players[process.player.name] = process.player
                self._poll = StagedPoll(self._shared.finished)

        return StagedCrew

    def _blank(self, storages: Iterable[int]) -> None:
        """A new worker pool must not need what the last one wrote in its round."""
        arrays = self.shared.arrays
        arrays["state/observation"].fill(np.nan)
        arrays["action/state_value"].fill(np.nan)
        for storage in storages:
            arrays["rollout/observation"][storage].fill(np.nan)
            arrays["rollout/state_value"][storage].fill(np.nan)

    def play(self, path: Path) -> None:
        """Take the steps of a path, and compare with the model after each.

        Raises:
            Differs: at the first step that the real classes do not take, or take otherwise.
        """
        for number, (step, after) in enumerate(path):
            try:
                self._take(step)
                self._compare(after)
            except Differs as error:
                raise Differs(f"step {number}, {step}: {error}") from error

    def _take(self, step: Step) -> None:
        player, parent = self.players[step.who], self.players["parent"]
        if _place(player.at) != _place(step.at):
            raise Differs(f"{step.who} is at {player.at!r}")
        player.take(step.what)
        if parent.at == "crashed":
            self._pool._close_lifeline()  # as the kernel does
        if parent.at == "join" and not any(each.is_alive() for each in self._pool._processes):
            parent.take("join")

    def _compare(self, state: State) -> None:
        """Compare where everybody is, and all that they can see."""
        expected, found = {"parent": state.parent.at}, {"parent": self.players["parent"].at}
        if not state.is_final:
            expected, found = _told_by_the_model(state), self._seen()
        wrong = {key: (told, found[key]) for key, told in expected.items() if told != found[key]}
        if wrong:
            raise Differs(f"(model, classes) have {wrong}")

    def _seen(self) -> dict[str, Any]:
        """What :func:`_told_by_the_model` returns, of the real classes."""
        shared, weights = self.shared, self.collector._runner.weights
        arrays = shared.arrays
        bells = shared.doorbells.values()
        return {
            **{name: _place(player.at) for name, player in self.players.items()},
            "ready": _bytes_in(shared.ready.fileno()) // 4,
            "reports": _bytes_in(shared.finished.fileno()) // 4,
            "bells": tuple(_bytes_in(bell._reader.fileno()) for bell in bells),
            "weights": (weights.acting_version, weights._published),
            "observations": tuple(map(_observation, arrays["state/observation"])),
            "answers": tuple(map(_answer, EXECUTORS, arrays["action/state_value"])),
            "cells": tuple(
                tuple(
                    tuple(
                        Cell(_observation(seen), _answer(env, value))
                        for seen, value in zip(*rows, strict=True)
                    )
                    for env, rows in enumerate(zip(*storage, strict=True))
                )
                for storage in zip(
                    arrays["rollout/observation"], arrays["rollout/state_value"], strict=True
                )
            ),
        }

    def close(self) -> None:
        """End whoever still plays."""
        for player in self.players.values():
            if not player.has_ended:
                player.take("crash")
            player.join()
        self.collector.shutdown()
        self.players.clear()
        del self.collector, self._pool


def make_collector(protocol: Protocol, **settings: Any) -> HTSCollector:
    """A collector of the model's size, in whose memory each value names its place."""
    frames = len(EXECUTORS) * protocol.alpha
    return HTSCollector(
        CoordinateEnvs(lengths=(1000,)),
        echo_policy(),
        num_envs=len(EXECUTORS),
        frames_per_batch=frames,
        total_frames=frames * protocol.rounds,
        **settings,
    )


def _place(at: str) -> str:
    """Where the model tells apart what looks alike, or the other way round."""
    alike = {"begin": "wake", "crashed": "ended", "left": "ended", "join": "renew"}
    return alike.get(at, at)


def _told_by_the_model(state: State) -> dict[str, Any]:
    parent = state.parent.at
    places = {"parent": "renew" if parent in ("raised", "done") else _place(parent)}
    for role, workers in (("executor", state.executors), ("actor", state.actors)):
        places |= {f"{role} {index}": _place(worker.at) for index, worker in enumerate(workers)}
    return {
        **places,
        "ready": len(state.ready),
        "reports": len(state.reports),
        "bells": state.bells,
        "weights": (state.acting, state.published),
        "observations": state.observations,
        "answers": state.answers,
        "cells": state.cells,
    }


def _bytes_in(pipe: int) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


def _observation(seen: np.ndarray) -> int | None:
    """Steps that the environment had played, of an observation of ``CoordinateEnv``."""
    return None if np.isnan(seen[2]) else int(seen[2])


def _answer(env: int, value: np.ndarray) -> Answer | None:
    """To which observation, and by which weights, of a value of ``EchoNet``."""
    if np.isnan(value[0]):
        return None
    version, place = divmod(int(value[0]), VERSION_UNIT)
    return Answer(place - 1024 * env, version)
