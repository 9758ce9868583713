"""Rollout nodes on a Ray cluster give the bits of the local pool, also when they are lost."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal

import gymnasium
import pytest
import torch

from hts_torchrl import A2C, ConfigurationError, HTSCollector, WorkerError
from hts_torchrl.errors import WorkerKilled
from tests.command_line import A2C as MODEL
from tests.command_line import CARTPOLE, run
from tests.determinism.tasks import TASKS
from tests.determinism.test_recovery import ENVS, ROUNDS, STEPS, collect, policy
from tests.fakes import CoordinateEnv, DeadlyEnvs, FailingEnv
from tests.fits import cartpole, flat, quiet_trainer
from tests.policies import echo_policy
from tests.ray_machines import Machines, machines
from tests.runs import digest, perturbed, play

pytest.importorskip("ray")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster():
    """Two machines with places for two rollout nodes each, and a third one to lose."""
    with machines() as made:
        made.add(num_cpus=2)
        made.add(num_cpus=2)
        yield made


@pytest.fixture
def on_nodes(cluster: Machines):
    """Settings for rollout nodes, of which none may be left after a test."""
    yield lambda nodes: {
        "backend": "ray",
        "num_collectors": nodes,
        "backend_options": {"ray_init_config": {"address": cluster.address}},
    }
    assert cluster.nothing_left(), cluster.rollout_processes()


@pytest.mark.parametrize(
    ("name", "nodes", "settings"),
    [
        pytest.param(
            "cartpole", 1, {"num_actors": 1, "envs_per_executor": 4}, marks=pytest.mark.thorough
        ),
        ("lstm", 2, {"debug": True, "init_random_frames": 128, "first_env": 8}),
        pytest.param("cartpole", 4, {"envs_per_executor": 2}, marks=pytest.mark.thorough),
        pytest.param("pendulum", 2, {"num_actors": 2}, marks=pytest.mark.thorough),
    ],
)
def test_the_bits_are_those_of_the_serial_twin_for_any_number_of_nodes(
    name, nodes, settings, on_nodes
):
    task = TASKS[name]
    alone = {key: settings[key] for key in settings.keys() - {"num_actors"}}
    want = digest(play(task.collector(**alone), perturbed(task.policy())))
    collector = task.collector(**settings, **on_nodes(nodes))
    assert digest(play(collector, perturbed(task.policy()))) == want


@pytest.mark.parametrize("num_actors", [0, 1])
def test_nodes_and_their_workers_know_what_the_program_registers(num_actors, on_nodes):
    gymnasium.register("Mine-v0", lambda: CoordinateEnv(0, lengths=(3,)))
    try:
        collector = HTSCollector(
            lambda: gymnasium.make("Mine-v0"), echo_policy(), num_envs=2, frames_per_batch=8,
            total_frames=16, num_actors=num_actors, **on_nodes(2),
        )  # fmt: skip
        batches = play(collector)
    finally:
        gymnasium.registry.pop("Mine-v0")
    assert batches[0]["observation"][:, :, 2].tolist() == [[0, 1, 2, 0], [0, 1, 2, 0]]


def undisturbed() -> str:
    return digest(play(collect(DeadlyEnvs(""), num_actors=0), perturbed(policy())))


@pytest.mark.parametrize(
    "num_actors", [0, pytest.param(1, marks=pytest.mark.thorough)], ids=["node", "its executor"]
)
def test_a_node_that_is_killed_in_the_middle_of_a_round_changes_no_bit(
    num_actors, on_nodes, tmp_path, caplog
):
    """Without actors the environment, which kills its process, lives in that of the node."""
    envs = DeadlyEnvs(str(tmp_path), (("step", 2 * STEPS + 3),))
    with caplog.at_level(logging.WARNING, "hts_torchrl"):
        batches = play(collect(envs, num_actors=num_actors, **on_nodes(2)), perturbed(policy()))
    assert len(list(tmp_path.iterdir())) == 1
    assert digest(batches) == undisturbed()
    (record,) = caplog.records
    assert record.message.startswith("node 0 (environments [0, 1]), round 2: ")
    assert record.message.endswith("round 2 is repeated by a new node (recovery 1 of at most 3)")


def test_without_recovery_the_lost_node_is_named_with_its_environments(on_nodes, tmp_path):
    envs = DeadlyEnvs(str(tmp_path), (("step", STEPS + 2),))
    collector = collect(envs, num_actors=0, recover="fail", **on_nodes(2))
    with pytest.raises(WorkerKilled, match=r"^node 0 \(environments \[0, 1\]\), round 1: was lost"):
        play(collector)


def test_a_node_whose_process_is_stopped_is_replaced(on_nodes, tmp_path, caplog):
    envs = DeadlyEnvs(str(tmp_path), (("step", 2 * STEPS + 3),), signal.SIGSTOP)
    collector = collect(envs, num_actors=0, timeout_s=20.0, **on_nodes(2))
    with caplog.at_level(logging.WARNING, "hts_torchrl"):
        assert digest(play(collector, perturbed(policy()))) == undisturbed()
    (record,) = caplog.records
    assert record.message.startswith(
        "node 0 (environments [0, 1]), round 2: shows no sign of life for 20 s"
    )


@pytest.mark.thorough
def test_a_machine_that_is_cut_off_changes_no_bit(cluster, on_nodes):
    """Its processes stand still, as those of a machine without network seem to."""
    weights_of, batches = perturbed(policy()), []
    third = cluster.add(num_cpus=2)
    collector = collect(DeadlyEnvs(""), num_actors=0, **on_nodes(4))
    with contextlib.ExitStack() as cut:
        for batch in collector:
            batches.append(batch.clone())
            if len(batches) == 2:
                cut.enter_context(cluster.cut_off(third))
            collector.update_policy_weights_(weights_of(len(batches)))
    cluster.lose(third)
    assert len(batches) == ROUNDS
    assert digest(batches) == undisturbed()


class OnFirstWarning(logging.Handler):
    def __init__(self, act) -> None:
        super().__init__(logging.WARNING)
        self.act = act

    def emit(self, record) -> None:  # noqa: ARG002 - whatever it says
        act, self.act = self.act, lambda: None
        act()


@pytest.mark.thorough
def test_a_new_node_waits_until_ray_has_given_up_the_machine_that_is_cut_off(cluster, on_nodes):
    """Ray places it there first, for lack of other room, and then on a machine that was added."""
    weights_of, batches = perturbed(policy()), []
    lost = [cluster.add(num_cpus=2, room=2)]
    settings = on_nodes(1)
    settings["backend_options"]["remote_configs"] = {"resources": {"room": 1}}
    collector = collect(DeadlyEnvs(""), num_actors=0, **settings)
    log = logging.getLogger("hts_torchrl")
    adding = OnFirstWarning(lambda: lost.append(cluster.add(num_cpus=1, room=1)))
    with contextlib.ExitStack() as cut:
        log.addHandler(adding)
        cut.callback(log.removeHandler, adding)
        for batch in collector:
            batches.append(batch.clone())
            if len(batches) == 2:
                cut.enter_context(cluster.cut_off(lost[0]))
                shared = collector._runner.shared  # the first node may take longer to start
                shared.config = dataclasses.replace(shared.config, timeout_s=8.0)
            collector.update_policy_weights_(weights_of(len(batches)))
    for machine in lost:
        cluster.lose(machine)
    assert digest(batches) == undisturbed()


@pytest.mark.thorough
def test_a_machine_that_is_lost_with_two_nodes_changes_no_bit(cluster, on_nodes):
    weights_of, batches = perturbed(policy()), []
    third = cluster.add(num_cpus=2)
    collector = collect(DeadlyEnvs(""), num_actors=0, **on_nodes(4))
    for batch in collector:
        batches.append(batch.clone())
        if len(batches) == 2:
            cluster.lose(third)
        collector.update_policy_weights_(weights_of(len(batches)))
    assert len(batches) == ROUNDS
    assert digest(batches) == undisturbed()


@pytest.mark.thorough
def test_an_exception_in_an_environment_names_the_node_and_brings_its_traceback(on_nodes):
    collector = HTSCollector(
        FailingEnv("step", at=STEPS + 2), echo_policy(), num_envs=ENVS, num_actors=0,
        frames_per_batch=ENVS * STEPS, total_frames=4 * ENVS * STEPS, **on_nodes(2),
    )  # fmt: skip
    with pytest.raises(WorkerError) as raised:
        play(collector)
    assert raised.value.place.role == "node"
    assert raised.value.place.envs == (0, 1)
    assert "tests.fakes.Broken: as asked" in raised.value.cause


def fit(folder, name: str, *, ckpt_path=None, max_steps: int = -1, **settings):
    """Train from the same first weights, save a checkpoint, and return the last weights."""
    torch.manual_seed(3)
    data = cartpole(rounds=6, **settings)
    learner = A2C(learning_rate=0.01)
    trainer = quiet_trainer(max_steps=max_steps)
    trainer.fit(learner, datamodule=data, ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / name)
    return flat(learner.policy)


@pytest.mark.parametrize(
    ("before", "after"), [(2, 0), pytest.param(0, 2, marks=pytest.mark.thorough)]
)
def test_a_checkpoint_goes_on_with_other_nodes_or_none(before, after, on_nodes, tmp_path):
    places = {0: {}, 2: on_nodes(2)}
    whole = fit(tmp_path, "whole.ckpt")
    half = fit(tmp_path, "half.ckpt", max_steps=3, **places[before])
    assert not torch.equal(half, whole)
    ckpt = tmp_path / "half.ckpt"
    assert torch.equal(fit(tmp_path, "end.ckpt", ckpt_path=ckpt, **places[after]), whole)


@pytest.mark.thorough
def test_a_checkpoint_names_no_cluster(on_nodes, tmp_path):
    fit(tmp_path, "one.ckpt", max_steps=1, **on_nodes(1))
    text = str(torch.load(tmp_path / "one.ckpt", weights_only=True)["HTSDataModule"]["settings"])
    assert "ray" not in text
    assert "num_envs" in text


@pytest.mark.thorough
def test_the_command_line_trains_and_evaluates_with_rollout_nodes(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    run("fit", *MODEL, *CARTPOLE)
    run("fit", *MODEL, *CARTPOLE, "--data.backend=ray", "--data.num_collectors=2")
    folder = tmp_path / "runs" / "run"
    here, nodes = (
        torch.load(folder / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for name in ("version_0", "version_1")
    )
    assert all(torch.equal(here[name], nodes[name]) for name in here.keys() | nodes.keys())
    assert cluster.nothing_left()


def test_a_node_without_a_place_is_an_error_that_tells_what_is_free(on_nodes):
    settings = on_nodes(1)
    settings["backend_options"]["remote_configs"] = {"num_cpus": 64}
    collector = collect(DeadlyEnvs(""), num_actors=0, timeout_s=1.0, **settings)
    with pytest.raises(WorkerError, match=r"did not start within 1 s; free in the .* CPU"):
        play(collector)


@pytest.mark.thorough
def test_a_node_with_another_processor_is_named_in_a_warning(on_nodes, caplog):
    """Told apart by the instructions that torch may use."""
    settings = on_nodes(1)
    settings["backend_options"]["remote_configs"] = {
        "runtime_env": {"env_vars": {"ATEN_CPU_CAPABILITY": "default"}}
    }
    with caplog.at_level(logging.WARNING, "hts_torchrl"):
        play(collect(DeadlyEnvs(""), num_actors=0, **settings))
    (record,) = caplog.records
    assert record.message.startswith("node 0 computes on ")
    assert "(DEFAULT)" in record.message


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"ray_init_config": {"url": "auto"}}, "ray_init_config.*ray.init refuses.*url"),
        ({"remote_configs": {"num_cpu": 1}}, "remote_configs.*Ray refuses.*num_cpu"),
    ],
)
def test_an_argument_that_ray_does_not_know_is_refused_by_name(options, refusal, cluster):
    import ray  # noqa: PLC0415

    address = {"address": cluster.address}
    options = {"ray_init_config": address, **options}
    collector = collect(DeadlyEnvs(""), backend="ray", backend_options=options)
    answer = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ConfigurationError, match=refusal):
        collector.start()
    assert signal.getsignal(signal.SIGTERM) is answer
    assert not ray.is_initialized()
