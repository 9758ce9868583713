"""One, two and four ranks (gloo, CPU) with gradient chunks: the same bits, also when resumed."""

import hashlib

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from hts_torchrl import A2C, PPO, PQN, GymEnvs, Impala, make_actor_critic, make_q_policy
from hts_torchrl.policy.inference import one_thread
from tests.fits import cartpole, quiet_trainer
from tests.policies import policy_with
from tests.ranks import run_ranks

ROUNDS, ENVS, STEPS, CHUNKS = 4, 8, 8, 4
HALF = ROUNDS // 2
ENV = GymEnvs("CartPole-v1")
EPOCHS = {"epochs": 2, "minibatches": 2, "learning_rate": 0.01}
STATISTICS = {"normalize_observation": True, "normalize_reward": True}
RUNS = {
    "A2C": (A2C, {"gae_lambda": 0.95}, {}),
    "A2C gradient": (A2C, {"delayed_step": "gradient"}, {}),
    "PPO displacement": (PPO, {**EPOCHS, "delayed_step": "displacement"}, {}),
    "PPO ratio": (PPO, {**EPOCHS, "delayed_step": "ratio"}, {}),
    "PPO decoupled": (PPO, EPOCHS, {}),
    "PQN": (PQN, {**EPOCHS, "exploration_fraction": 1.0}, {}),
    "Impala": (Impala, {}, {}),
    "statistics": (PPO, {**EPOCHS, "normalize_value": True}, STATISTICS),
    "memory": (PPO, {**EPOCHS, "minibatches": 1}, {}),
    "Dropout": (A2C, {}, {}),
    "bfloat16": (A2C, {}, {}),
}
RESUMED = ((1, 2), (2, 1), (2, 4), (4, 1))
"""Ranks of the run that saved, and of the one that goes on."""


class Seen(Callback):
    """Keeps digests of gradients, weights and logged losses; saves in the middle."""

    def __init__(self, path):
        self.path, self.gradients, self.losses = path, [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):  # noqa: ARG002
        self.gradients.append(digest(p.grad for p in pl_module.parameters()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):  # noqa: ARG002
        logged = {k: v for k, v in trainer.callback_metrics.items() if k.startswith("loss/")}
        self.losses.append({name: float(value) for name, value in sorted(logged.items())})
        if batch.is_last and pl_module.updates == HALF and self.path is not None:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer, pl_module):
        self.weights = digest(pl_module.state_dict().values())
        states = trainer.optimizers[0].state_dict()["state"].values()
        self.optimizer = digest(torch.as_tensor(t) for each in states for t in each.values())


def digest(tensors):
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def make_policy(name):
    torch.manual_seed(0)
    spec = ENV.group([0]).spec
    with one_thread():
        if name == "PQN":
            return make_q_policy("mlp", spec)
        if name == "Dropout":
            return policy_with(nn.Dropout(), ENV)
        return make_actor_critic("lstm" if name == "memory" else "mlp", spec)


def fit(name, ranks, *, save=None, ckpt_path=None, **settings):
    learner_class, model, data = RUNS[name]
    seen = Seen(save)
    learner = learner_class(make_policy(name), **{"gradient_chunks": CHUNKS, **model, **settings})
    precision = "bf16-mixed" if name == "bfloat16" else "32-true"
    trainer = quiet_trainer(
        devices=ranks, callbacks=[seen], gradient_clip_val=0.5, log_every_n_steps=1,
        precision=precision, **({"strategy": "ddp"} if ranks > 1 else {}),
    )  # fmt: skip
    data = cartpole(ROUNDS, num_envs=ENVS, frames_per_batch=ENVS * STEPS, **data)
    trainer.fit(learner, datamodule=data, ckpt_path=ckpt_path)
    return {each: getattr(seen, each) for each in ("gradients", "losses", "weights", "optimizer")}


def whole(names, ranks, folder):
    """Runs from their beginning, each with a checkpoint in its middle."""
    for name in names:
        save = folder / f"{name} {ranks}.ckpt"
        keep(fit(name, ranks, save=save), folder / f"{name} {ranks}")


def resumed(names, ranks, folder):
    """Runs from checkpoints of other numbers of ranks, if they are there."""
    for name in names:
        for saved in (before for before, after in RESUMED if after == ranks):
            path = folder / f"{name} {saved}.ckpt"
            keep(fit(name, ranks, ckpt_path=path), folder / f"{name} {saved} {ranks}")


def keep(seen, folder):
    distributed = torch.distributed.is_initialized()
    folder.mkdir(exist_ok=True)
    torch.save(seen, folder / f"{torch.distributed.get_rank() if distributed else 0}.pt")


def whole_and_resumed(names, ranks, folder):
    whole(names, ranks, folder)
    resumed(names, ranks, folder)


FEW = ("A2C", "Dropout", "PPO displacement")
REST = tuple(name for name in RUNS if name not in FEW)


@pytest.fixture(
    scope="module",
    params=[pytest.param(FEW, id="few"), pytest.param(REST, id="rest", marks=pytest.mark.slow)],
)
def runs(request, tmp_path_factory):
    """What each rank of each run saw, by the run's name."""
    names, folder = request.param, tmp_path_factory.mktemp("ranks")
    whole(names, 1, folder)
    for ranks in (2, 4):
        run_ranks(ranks, whole_and_resumed, names, ranks, folder)
    resumed(names, 1, folder)

    def seen(*words):
        return [torch.load(path) for path in sorted((folder / " ".join(map(str, words))).iterdir())]

    return {
        name: {each: seen(name, *each) for each in ((1,), (2,), (4,), *RESUMED)} for name in names
    }


@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:the policy learns in train mode and acts in eval mode")
class TestNumbersOfRanks:
    def test_change_no_bit(self, runs):
        for name, seen in runs.items():
            (one,) = seen[1,]
            assert len(set(one["gradients"])) == len(one["gradients"]) >= ROUNDS
            assert all(one["losses"])
            assert seen[2,] == [one] * 2, name
            assert seen[4,] == [one] * 4, name

    @pytest.mark.parametrize(("saved", "resuming"), RESUMED)
    def test_may_be_others_after_a_checkpoint(self, runs, saved, resuming):
        for name, seen in runs.items():
            (whole,) = seen[1,]
            steps = len(whole["gradients"]) // 2
            assert len(seen[saved, resuming]) == resuming
            for rank in seen[saved, resuming]:
                assert rank["gradients"] == whole["gradients"][steps:], name
                assert rank["weights"] == whole["weights"], name
                assert rank["optimizer"] == whole["optimizer"], name
