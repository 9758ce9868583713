"""TorchRL's collectors with its PPO, for ``reproducibility.py``: the loop of its PPO tutorial.

Workers: processes of a ``ParallelEnv`` under ``Collector`` (1: a ``SerialEnv``), collector
processes under ``MultiCollector``. CartPole is TorchRL's ``GymEnv``; Atari is the environment of
``peer_torchrl.py``, as TorchRL's own transforms of pictures need torchvision.

Seeds: ``torch.manual_seed``; of environments ``set_seed`` of environment and collector, which also
seeds torch and numpy in the workers. The checkpoint has weights, optimiser, the collector's
``state_dict`` and torch's generator.
"""

from __future__ import annotations

import multiprocessing
import warnings
from functools import partial

import torch
from peer_torchrl import NativeEnv
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.collectors import BaseCollector, Collector, MultiCollector
from torchrl.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from training import EPOCHS, FRAMES, MINIBATCHES, NUM_ENVS, Training, tell


class Nature(nn.Module):
    """The Nature network with a head, for any leading dimensions."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
            nn.Linear(512, outputs),
        )  # fmt: skip

    def forward(self, pixels: Tensor) -> Tensor:
        result: Tensor = self.layers(pixels.reshape(-1, *pixels.shape[-3:]) / 255.0)
        return result.view(*pixels.shape[:-3], -1)


def one_env(task: str) -> EnvBase:
    if task == "cartpole":
        return GymEnv("CartPole-v1", categorical_action_encoding=True)
    env = NativeEnv(task)
    env.set_seed(0)
    return env


def network(task: str, outputs: int) -> nn.Module:
    if task == "cartpole":
        return MLP(in_features=4, out_features=outputs, num_cells=[64, 64])
    return Nature(outputs)


def make_collector(training: Training, actor: nn.Module) -> BaseCollector:
    make = partial(one_env, training.task)
    frames = {"frames_per_batch": FRAMES, "total_frames": -1}
    if training.system == "torchrl_collector":
        batched = SerialEnv if training.workers == 1 else ParallelEnv
        env = batched(NUM_ENVS, make)
        env.set_seed(training.seed)
        return Collector(env, actor, **frames)
    envs = partial(SerialEnv, training.envs_per_worker, make)
    collector = MultiCollector(
        [envs] * training.workers, actor, sync=training.system == "torchrl_sync", num_threads=1,
        num_sub_threads=1, **frames,
    )  # fmt: skip
    collector.set_seed(training.seed)
    return collector


def main(training: Training) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(training.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(training.seed)
    training.seed_python_and_numpy()
    spec = one_env(training.task).action_spec
    head = TensorDictModule(network(training.task, spec.n), ["observation"], ["logits"])
    actor = ProbabilisticActor(
        head, in_keys=["logits"], spec=spec, distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )  # fmt: skip
    critic = ValueOperator(network(training.task, 1), in_keys=["observation"])
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.01)
    optimizer = torch.optim.Adam(loss.parameters(), 3e-4)
    collector = make_collector(training, actor)
    if training.resumed:
        saved = torch.load(training.checkpoint, weights_only=False)
        loss.load_state_dict(saved["loss"])
        optimizer.load_state_dict(saved["optimizer"])
        collector.load_state_dict(saved["collector"])
        collector.update_policy_weights_()
        torch.set_rng_state(saved["generator"])
    update = training.begins
    for batch in collector:
        for _ in range(EPOCHS):
            with torch.no_grad():
                gae(batch)
            samples = batch.reshape(-1)
            for rows in torch.randperm(len(samples)).chunk(MINIBATCHES):
                losses = loss(samples[rows])
                optimizer.zero_grad()
                sum(
                    losses[f"loss_{part}"] for part in ("objective", "critic", "entropy")
                ).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
                optimizer.step()
        collector.update_policy_weights_()
        update += 1
        tell(update, loss.named_parameters())
        if update == training.ends:
            break
    if training.is_stopped:
        torch.save(
            {
                "loss": loss.state_dict(),
                "optimizer": optimizer.state_dict(),
                "collector": collector.state_dict(),
                "generator": torch.get_rng_state(),
            },
            training.checkpoint,
        )
    collector.shutdown()


if __name__ == "__main__":
    try:
        main(Training.asked_for())
    finally:
        for process in multiprocessing.active_children():
            process.kill()
