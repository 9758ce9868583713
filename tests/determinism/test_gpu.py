"""On a GPU: actors, graphs and training give the same bits for any workers, and when resumed.

Bits of a GPU are compared with bits of the same GPU. ``python benchmarks/gpu.py`` does the same at
more length, and writes a report.
"""

import functools
from dataclasses import replace

import pytest
import torch
from benchmarks import determinism
from benchmarks.determinism import Task, WorkerPool
from torch import nn
from torchrl.envs import GymEnv

from hts_torchrl import A2C, AtariEnvs, GymEnvs, HTSCollector
from tests.determinism.tasks import TASKS
from tests.fits import cartpole, watched_fit
from tests.graphs import needs_gpu
from tests.runs import digest, perturbed, play

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600), *needs_gpu]

ON_GPU = {"accelerator": "gpu", "devices": 1, "deterministic": True}
GRAPHS = {"cudagraph_policy": True}
LEARNINGS = {
    "CartPole": Task(GymEnvs("CartPole-v1", {"max_episode_steps": 40}), "mlp", trainer=ON_GPU),
    "Breakout": Task(AtariEnvs("breakout", max_frames=48), "nature", trainer=ON_GPU),
}
LEARNINGS |= {f"{name}, graphs": replace(task, data=GRAPHS) for name, task in LEARNINGS.items()}
REPLAYED = {
    f"replayed {name}": replace(LEARNINGS[f"{name}, graphs"], model={"cudagraph_loss": True})
    for name in ("CartPole", "Breakout")
}
REPLAYED["replayed bfloat16"] = replace(REPLAYED["replayed CartPole"], precision="bf16-mixed")
REPLAYED["replayed Dropout"] = replace(REPLAYED["replayed CartPole"], dropout=True)
CPU_ACTORS = replace(LEARNINGS["Breakout"], data={"policy_device": "cpu"})
LEARNINGS["Breakout, CPU actors"] = CPU_ACTORS


@functools.cache
def run(name: str, *, cudagraph: bool, **settings) -> str:
    """Digest of a whole run with actors on the GPU, with other weights in every round."""
    task = TASKS[name]
    on_gpu = {"policy_device": "cuda:0", "cudagraph_policy": cudagraph}
    return digest(play(task.collector(**on_gpu, **settings), perturbed(task.policy())))


@pytest.mark.parametrize("cudagraph", [False, True])
@pytest.mark.parametrize("name", ["cartpole", "breakout", "lstm"])
class TestActors:
    @pytest.mark.parametrize("num_actors", [1, 2, 4])
    def test_any_number_gives_the_bits_of_the_serial_twin(self, name, cudagraph, num_actors):
        num_actors = min(num_actors, TASKS[name].num_envs)
        assert run(name, cudagraph=cudagraph, num_actors=num_actors) == run(
            name, cudagraph=cudagraph
        )

    @pytest.mark.parametrize(("num_actors", "envs_per_executor"), [(1, 2), (2, 2), (0, 2)])
    def test_any_grouping_gives_the_same_bits(self, name, cudagraph, num_actors, envs_per_executor):
        grouped = {"num_actors": num_actors, "envs_per_executor": envs_per_executor}
        assert run(name, cudagraph=cudagraph, **grouped) == run(name, cudagraph=cudagraph)


@pytest.mark.parametrize("name", ["cartpole", "breakout", "lstm"])
def test_graphs_give_the_bits_of_passes_without(name):
    assert run(name, cudagraph=True) == run(name, cudagraph=False)


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_actors_start_by_either_method(start_method):
    started = run("cartpole", cudagraph=True, num_actors=2, start_method=start_method)
    assert started == run("cartpole", cudagraph=True)


def test_a_policy_is_built_there_for_an_environment_of_torchrl():
    learner, data = A2C(network="mlp"), cartpole(env=lambda: GymEnv("Pendulum-v1"))
    with torch.device("cuda:0"):  # as the Trainer has it
        learner.prepare_policy(data)
    assert data.env_spec.action.low.tolist() == [-2.0]
    assert next(learner.parameters()).device == torch.device("cuda:0")


@pytest.mark.parametrize("policy_device", ["cpu", "cuda:0"])
def test_a_network_by_name_learns(policy_device):
    settings = {"env": GymEnvs("Pendulum-v1"), "num_actors": 1, "policy_device": policy_device}
    learner = A2C(network="mlp", squash=True)
    watch = watched_fit(learner, cartpole(2, **settings), accelerator="gpu")
    assert len(watch.rounds) == 2


def test_a_plain_policy_may_lie_on_the_gpu():
    policy = nn.Sequential(nn.Linear(3, 1), nn.Tanh()).to("cuda:0")
    frames = {"frames_per_batch": 8, "total_frames": 8, "num_envs": 2, "num_actors": 0}
    collector = HTSCollector(GymEnvs("Pendulum-v1"), policy, device="cuda:0", **frames)
    (batch,) = play(collector)
    assert batch["action"].device == torch.device("cuda:0")


class TestTraining:
    @pytest.fixture(autouse=True)
    def _as_before(self, monkeypatch):
        monkeypatch.setattr(determinism, "TASKS", LEARNINGS | REPLAYED)
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        yield
        torch.use_deterministic_algorithms(False)

    def digest(self, name, algorithm, pool, seed=1):
        return determinism.train(name, algorithm, pool, updates=6, seed=seed)

    @pytest.mark.parametrize("algorithm", ["A2C", "PPO ratio"])
    @pytest.mark.parametrize("name", LEARNINGS)
    def test_two_trainings_with_other_workers_have_the_same_bits(self, name, algorithm):
        serial = self.digest(name, algorithm, WorkerPool(0))
        assert self.digest(name, algorithm, WorkerPool(2, 2, jitter=True)) == serial
        assert self.digest(name, algorithm, WorkerPool(0), seed=2) != serial

    @pytest.mark.parametrize("name", REPLAYED)
    def test_a_replayed_loss_has_the_same_bits_with_other_workers(self, name):
        serial = self.digest(name, "A2C", WorkerPool(0))
        assert self.digest(name, "A2C", WorkerPool(2, 2, jitter=True)) == serial
        assert self.digest(name, "A2C", WorkerPool(0), seed=2) != serial

    @pytest.mark.parametrize("name", ["CartPole", "CartPole, graphs", *REPLAYED])
    def test_a_resumed_training_has_the_bits_of_one_that_was_never_stopped(self, name):
        resumed = determinism.train_and_resume(name, "A2C", updates=6)
        assert resumed == self.digest(name, "A2C", WorkerPool(0))
