"""TorchRL's collectors, and ours (``loop``), with A2C in one loop, for ``throughput.py``.

TorchRL has the fastest of what was tried:

- one EnvBase around one native vector environment, without transforms. Serial and parallel ones,
  and Gymnasium's Python wrappers, were slower;
- values stored while acting: only the last observations are evaluated again, where GAE with a value
  network evaluates all of them, or twice as many without ``shifted``;
- ``A2CLoss`` on the two heads after one pass of the trunk: on the policy and value operators, as in
  TorchRL's examples, it runs the trunk twice for the same gradient;
- no ``update_policy_weights_``: local workers share the parameters' memory, so it would copy them
  onto themselves and wait for all workers. No trajectory ids; ``compact_obs`` gained nothing.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from functools import partial
from typing import Any

import numpy as np
import torch
from harness import Stopwatch, keep_freed_memory
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import BaseCollector, Collector, MultiCollector
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import GAE
from trainer import environments

from hts_torchrl import ActorCritic, HTSCollector, env_spec_of, make_actor_critic
from hts_torchrl.models import NatureCNN


class NativeEnv(EnvBase):
    """The environments of all rows as one of TorchRL's; seeds are drawn until some are set.

    Leaner than the package's ``GroupEnv``: nothing is copied, and no scores are told.
    """

    def __init__(self, game: str, num_envs: int = 1, num_threads: int = 1) -> None:
        super().__init__(batch_size=[num_envs] if num_envs > 1 else [])
        self._group = environments(game, num_threads).group(range(num_envs))
        # Gymnasium's single environments write each step over the last one.
        self._kept = np.copy if game == "cartpole" else np.asarray
        seeds = np.random.default_rng().integers(2**31, size=num_envs)
        self._following = self._group.reset(seeds)["observation"]
        shape, dtype = self.batch_size, torch.from_numpy(self._following).dtype
        observations = Unbounded((*shape, *self._following.shape[1:]), dtype=dtype)
        self.observation_spec = Composite(observation=observations, shape=shape)
        self.action_spec = Categorical(self._group.spec.action.sizes[0], shape=shape)
        self.reward_spec = Unbounded((*shape, 1))

    def _tensordict(self, **arrays: np.ndarray) -> TensorDict:
        tensors = {key: torch.from_numpy(self._kept(array)) for key, array in arrays.items()}
        views = {k: t.view(*self.batch_size, *(t.shape[1:] or (1,))) for k, t in tensors.items()}
        return TensorDict(views, self.batch_size)

    def _reset(self, _: TensorDictBase | None = None, **__: object) -> TensorDict:
        return self._tensordict(observation=self._following)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        step = self._group.step(tensordict["action"].view(-1).numpy())
        self._following, after = step.next_observation["observation"], step.observation
        ends = {"terminated": step.terminated, "done": step.terminated | step.truncated}
        return self._tensordict(**after, reward=step.reward, **ends)

    def _set_seed(self, seed: int | None) -> None:
        """Begin new games; TorchRL draws seeds of 32 bits, and emulators take 31."""
        if seed is not None:
            seeds = (seed + np.arange(max(1, self.numel()))) % 2**31
            self._following = self._group.reset(seeds)["observation"]


class Trunk(NatureCNN):
    """The Nature trunk for any leading dimensions; ``bf16`` decides its precision."""

    def forward(self, pixels: Tensor) -> Tensor:
        with torch.autocast(pixels.device.type, torch.bfloat16, enabled=self.bf16):
            features = super().forward(pixels.reshape(-1, *pixels.shape[-3:]))
        return features.float().view(*pixels.shape[:-3], -1)


def make_model(run: dict[str, Any]) -> ActorCritic:
    spec = env_spec_of(environments(run["game"]))
    if run["game"] == "cartpole":
        return make_actor_critic("mlp", spec)
    model = ActorCritic(Trunk(spec.observations["observation"].shape), spec)
    model.module[0].module.bf16 = run["bf16"]
    return model


def make_collector(run: dict[str, Any], policy: nn.Module) -> BaseCollector:
    num_envs, workers, system = run["num_envs"], run["workers"], run["system"]
    share = num_envs if system == "async" else num_envs // workers
    device = run["device"]
    frames: dict[str, Any] = {"frames_per_batch": num_envs * run["steps"], "total_frames": -1}
    if device != "cpu":
        acting = run["policy_device"] or device
        frames |= {"policy_device": acting, "storing_device": device, "env_device": "cpu"}
    if run["cudagraph"]:
        frames["cudagraph_policy"] = True
    if system == "loop":
        return HTSCollector(
            environments(run["game"]), policy, num_envs=num_envs, num_actors=run["actors"],
            envs_per_executor=share, inference_batch_size=run["inference_batch"], **frames,
        )  # fmt: skip
    env = partial(NativeEnv, run["game"], share, run["emulator_threads"])
    if system == "collector":
        return Collector(env(), policy, track_traj_ids=False, **frames)
    return MultiCollector(
        [env] * workers, policy, sync=system == "sync", num_threads=run["main_threads"],
        num_sub_threads=run["worker_threads"], **frames,
    )  # fmt: skip


def main(run: dict[str, Any]) -> None:
    torch.set_num_threads(run["main_threads"])
    model = make_model(run).to(run["device"])
    trunk, critic = model.module[0], model.get_value_operator()
    gae = GAE(gamma=0.99, lmbda=1.0, value_network=None, deactivate_vmap=True)
    loss = A2CLoss(
        model.get_policy_head(), model.get_value_head(), loss_critic_type="l2", entropy_coeff=0.01,
        critic_coeff=0.5,
    )  # fmt: skip
    optimizer = torch.optim.RMSprop(model.parameters(), 7e-4, alpha=0.99, eps=1e-5)
    collector = make_collector(run, model)
    watch = Stopwatch(run["num_envs"] * run["steps"], run["seconds"])

    @torch.no_grad()
    def targets(batch: TensorDictBase) -> TensorDictBase:
        next_value = batch["state_value"].roll(-1, -2)
        unseen = (batch["next", "done"] & ~batch["next", "terminated"]).squeeze(-1)
        unseen[..., -1] = True
        next_value[unseen] = critic(batch["next"].select("observation")[unseen])["state_value"]
        batch["next", "state_value"] = next_value
        return gae(batch).select("observation", "action", "advantage", "value_target").reshape(-1)

    def objective(samples: TensorDictBase) -> Tensor:
        losses = loss(trunk(samples))
        return losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]

    objective = torch.compile(objective) if run["compiled"] else objective
    for batch in collector:
        optimizer.zero_grad()
        objective(targets(batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if run["system"] == "loop":
            collector.update_policy_weights_()
        if watch.round_ended():
            break
    print(watch.steps_per_s, flush=True)


if __name__ == "__main__":
    keep_freed_memory()
    try:
        main(json.loads(sys.argv[2]))
    finally:
        for process in multiprocessing.active_children():
            process.kill()
