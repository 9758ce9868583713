"""Two ranks under DistributedDataParallel (gloo, CPU) against one process with all environments."""

import os
import warnings
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn

from hts_torchrl import A2C, ConfigurationError, GymEnvs, make_actor_critic
from hts_torchrl.training.callbacks import LearningCurve, TrainingStatistics
from hts_torchrl.workers.rollout_node import NodeKind
from tests.fits import SGDA2C, SGDPPO, Watch, cartpole, flat, quiet_trainer, watched_fit
from tests.integration.test_own_modules import Plain
from tests.policies import policy_with
from tests.ranks import run_ranks

ROUNDS = 4
ENVS = 8  # of both ranks
STEPS = 8


class PlainSGD(Plain):
    """A module that is no learner; what it calls updates counts nothing."""

    updates = 7

    def __init__(self, policy, learning_rate):
        super().__init__()
        self.policy, self.learning_rate = policy, learning_rate

    def configure_optimizers(self):
        return torch.optim.SGD(self.policy.parameters(), self.learning_rate)


LEARNERS = {
    "plain": (PlainSGD, {}),
    "a2c": (SGDA2C, {"gae_lambda": 0.95}),
    "displacement": (SGDPPO, {"epochs": 2, "minibatches": 1, "delayed_step": "displacement"}),
    "decoupled": (SGDPPO, {"epochs": 2, "minibatches": 1, "delayed_step": "decoupled"}),
    "normalised": (SGDA2C, {"gae_lambda": 0.95, "normalize_value": True}),
    "dropout and statistics": (SGDPPO, {"epochs": 2, "minibatches": 1, "delayed_step": "ratio"}),
}
NORMALISED = {"normalize_observation": True, "normalize_reward": True}


MASKS: list[torch.Tensor] = []
"""What Dropout let through in this process, in each pass that is learned from."""


def keep_mask(layer, inputs, output):
    if layer.training and inputs[0].requires_grad:
        MASKS.append(output != 0)


class Report(Callback):
    """Writes what each rank saw."""

    def __init__(self, watch: Watch, directory) -> None:
        self.watch, self.directory = watch, directory

    def on_train_end(self, trainer, pl_module):
        self.watch.on_fit_end(trainer, pl_module)
        seen = {
            "rounds": [batch["observation"] for batch in self.watch.rounds],
            "gradients": self.watch.gradients,
            "weights": [*self.watch.round_weights, self.watch.final_weights],
            "versions": self.watch.versions,
            "frames": trainer.callbacks[0].frames,
            "games": [*trainer.callbacks[0]._returns],
            "ended": [
                (after["episode_end"], after["episode_reward"])
                for after in (batch["next"] for batch in self.watch.rounds)
            ],
            "masks": MASKS,
            "statistics": {
                name: buffer.clone()
                for name, buffer in pl_module.named_buffers()
                if name.endswith((".mean", ".variance", ".count"))
            },
        }
        torch.save(seen, self.directory / f"rank{trainer.global_rank}.pt")


def make_learner(name):
    torch.manual_seed(0)
    learner_class, settings = LEARNERS[name]
    policy = make_actor_critic("mlp", GymEnvs("CartPole-v1").group([0]).spec)
    if name == "dropout and statistics":
        layers = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(16))
        layers[0].register_forward_hook(keep_mask)
        policy = policy_with(layers, GymEnvs("CartPole-v1"))
    return learner_class(policy, learning_rate=0.1, **settings)


def data_of(name):
    return cartpole(
        ROUNDS,
        num_envs=ENVS,
        frames_per_batch=ENVS * STEPS,
        evaluation_episodes=2,
        **(NORMALISED if name == "normalised" else {}),
    )


def run_rank(directory):
    """One rank of all learners' runs."""
    # Lightning's, where such a figure is logged for one rank alone.
    warnings.filterwarnings("error", r"It is recommended to use .self.log\('eval/(frames|minutes)'")
    for name in LEARNERS:
        fit_rank(name, directory / name, None)
        resumed = directory / name / "resumed"
        resumed.mkdir(exist_ok=True)
        fit_rank(name, resumed, directory / name / "step=2.ckpt")


def fit_rank(name, directory, checkpoint):
    watch = Watch()
    saving = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    quiet_trainer(
        strategy="ddp",
        devices=2,
        callbacks=[
            TrainingStatistics(),
            LearningCurve(),
            watch,
            Report(watch, directory),
            saving,
        ],
        enable_checkpointing=True,
        default_root_dir=directory,
        limit_val_batches=1,
    ).fit(make_learner(name), datamodule=data_of(name), ckpt_path=checkpoint)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Where two ranks have left what they saw."""
    directory = tmp_path_factory.mktemp("ddp")
    for name in LEARNERS:
        (directory / name).mkdir()
    run_ranks(2, run_rank, directory)
    return directory


@pytest.fixture(scope="module", params=sorted(LEARNERS))
def runs(request, directory):
    """What ranks 0 and 1 saw, and the run of one process with the environments of both."""
    ranks = [torch.load(directory / request.param / f"rank{rank}.pt") for rank in range(2)]
    single = watched_fit(make_learner(request.param), data_of(request.param))
    return ranks, single, directory / request.param


@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:the policy learns in train mode and acts in eval mode")
class TestTwoRanks:
    def test_have_environments_of_their_own(self, runs):
        (first, second), single, _ = runs
        both = torch.cat([first["rounds"][0], second["rounds"][0]])
        assert torch.equal(both, single.rounds[0]["observation"])
        assert len(both[:, 0].unique(dim=0)) == ENVS

    def test_have_the_same_weights_after_each_round(self, runs):
        (first, second), _, _ = runs
        assert len(first["weights"]) == ROUNDS + 1
        assert all(map(torch.equal, first["weights"], second["weights"]))
        assert not torch.equal(first["weights"][0], first["weights"][-1])

    def test_average_their_gradients(self, runs):
        (first, second), single, _ = runs
        assert all(map(torch.equal, first["gradients"], second["gradients"]))
        # Advantages of PPO are scaled by each rank alone, so that only A2C equals one process.
        if len(first["gradients"]) == ROUNDS:
            for ranks, one in zip(first["gradients"], single.gradients, strict=True):
                torch.testing.assert_close(ranks, one, rtol=1e-3, atol=1e-5)

    def test_draw_masks_of_their_own(self, runs):
        (first, second), _, _ = runs
        assert len(first["masks"]) in (0, len(first["gradients"]))
        assert not any(map(torch.equal, first["masks"], second["masks"]))

    def test_are_exactly_one_update_behind(self, runs):
        (first, second), _, _ = runs
        assert first["versions"] == second["versions"] == [0, 0, 1, 2]

    def test_count_the_frames_of_both(self, runs):
        (first, second), _, _ = runs
        assert first["frames"] == second["frames"] == ROUNDS * ENVS * STEPS

    def test_tell_the_same_games_those_of_all_environments_in_order(self, runs):
        (first, second), _, _ = runs
        expected = [
            score
            for ranks in zip(first["ended"], second["ended"], strict=True)
            for step in range(STEPS)
            for ended, scores in ranks
            for score in scores[:, step][ended[:, step]].tolist()
        ]
        assert first["games"] == second["games"] == expected != []

    def test_go_on_from_the_checkpoint_of_rank_0_with_the_bits_of_both(self, runs):
        """Each rank has environments of its own, and rank 0 writes the checkpoint."""
        ranks, _, directory = runs
        for rank, whole in enumerate(ranks):
            resumed = torch.load(directory / "resumed" / f"rank{rank}.pt")
            rounds = len(resumed["rounds"])
            assert 0 < rounds < ROUNDS
            for key, skipped in (("rounds", ROUNDS - rounds), ("weights", ROUNDS - rounds)):
                assert all(map(torch.equal, resumed[key], whole[key][skipped:]))

    def test_have_the_statistics_of_all_environments(self, runs):
        (first, second), _, _ = runs
        assert first["statistics"].keys() == second["statistics"].keys()
        for name, tensor in first["statistics"].items():
            assert torch.equal(tensor, second["statistics"][name])
        means = [t for name, t in first["statistics"].items() if name.endswith("statistics.0.mean")]
        if means:  # of observations, where these are normalised
            seen = [rows.flatten(0, 1) for rank in (first, second) for rows in rank["rounds"]]
            torch.testing.assert_close(means[0], torch.cat(seen).double().mean(0))

    def test_draw_one_learning_curve(self, runs):
        assert (runs[2] / "learning_curve.png").is_file()


def fit_with(name, value, folder):
    """Train with one thing given otherwise, by the name that flags have."""
    settings = {"data": {}, "model": {}, "trainer": {}}
    kind, checkpoint = NodeKind.of_this_process(), None
    part, _, setting = name.partition(".")
    if setting:
        settings[part][setting] = value
    elif part == "updates in its checkpoint":
        settings["model"]["gradient_chunks"] = 2
        checkpoint = folder / value if value else None
    else:
        kind = replace(kind, **{part: value})
    trainer = quiet_trainer(strategy="ddp", devices=2, **settings["trainer"])
    with mock.patch.object(NodeKind, "of_this_process", return_value=kind):
        learner, data = A2C(**settings["model"]), cartpole(2, **settings["data"])
        trainer.fit(learner, datamodule=data, ckpt_path=checkpoint)


def run_with_something_else(folder):
    """One of two ranks, the second of which is given another value each time."""
    is_second = os.environ["RANK"] == "1"
    for name, value, other in (
        ("data.seed", 0, 1),
        ("data.evaluation_frames", None, 32),
        ("data.env", GymEnvs("CartPole-v1"), GymEnvs("CartPole-v0")),
        ("model.learning_rate", 0.5, 0.25),
        ("trainer.max_steps", -1, 1),
        ("trainer.gradient_clip_val", None, 0.5),
        ("torch", "2.9.0", "2.8.0"),
        ("updates in its checkpoint", "of one rank.ckpt", None),
    ):
        with pytest.raises(ConfigurationError, match=rf"^rank 1 has {name}(\.id)?='?\w") as refused:
            fit_with(name, other if is_second else value, folder)
        assert str(refused.value).endswith("same files and versions")
    trainer = quiet_trainer(
        strategy="ddp", devices=2, enable_checkpointing=not is_second, default_root_dir=folder
    )
    told = "^rank 1 has trainer.callbacks='none that saves', and rank 0 has 'ModelCheckpoint': "
    with pytest.raises(ConfigurationError, match=told):
        trainer.fit(A2C(), datamodule=cartpole(2))
    for name, value, other in (("data.debug", False, True), ("cpu", "one", "other")):
        fit_with(name, other if is_second else value, folder)


@pytest.mark.processes
def test_a_rank_that_is_given_something_else_is_refused_by_all(tmp_path):
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(A2C(gradient_chunks=2), cartpole(2))
    trainer.save_checkpoint(tmp_path / "of one rank.ckpt")
    run_ranks(2, run_with_something_else, tmp_path)


class AsksAlone(A2C):
    """Asks for a stop after round 1 on rank 1, in a hook that comes after all callbacks."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.trainer.should_stop |= self.global_rank == 1 and batch_idx == 1


class AsksAloneLater(A2C):
    """Asks for a stop after round 2, or later, on rank 1, in further hooks that come last."""

    def on_validation_end(self):
        self.trainer.should_stop |= self.global_rank == 1 and self.updates >= 2

    on_train_epoch_end = on_validation_end


class Asking(Callback):
    """Asks for a stop after the second evaluation on rank 1."""

    def on_validation_end(self, trainer, pl_module):
        trainer.should_stop |= trainer.global_rank == 1 and pl_module.updates == 2


def stop_two_ranks():
    def updates(learner, *, data=None, **settings):
        trainer = quiet_trainer(strategy="ddp", devices=2, **settings)
        trainer.fit(learner, cartpole(6, evaluation_episodes=1, **(data or {})))
        return learner.updates

    evaluated = {"data": {"evaluation_frames": 32}, "limit_val_batches": 1}
    at_once = EarlyStopping("eval/score", mode="max", stopping_threshold=-1)
    in_epochs = {"max_epochs": 3, "limit_train_batches": 2}
    of_epochs = EarlyStopping("loss/value", stopping_threshold=1e9, check_on_train_epoch_end=True)
    assert updates(AsksAlone()) == 3
    assert updates(AsksAlone(), **evaluated) == 2
    assert updates(AsksAlone(), **in_epochs) == 2
    assert updates(AsksAloneLater(), **evaluated) == 3
    assert updates(AsksAloneLater(), **in_epochs) == 3
    assert updates(A2C(), callbacks=[Asking()], **evaluated) == 2
    assert updates(A2C(), callbacks=[at_once], **evaluated) == 1
    assert updates(A2C(), callbacks=[of_epochs], **in_epochs) == 2


@pytest.mark.processes
def test_ranks_stop_together_whichever_asks():
    run_ranks(2, stop_two_ranks, limit_s=100)


class Lowering(A2C):
    """Lowers its learning rate when its loss has not fallen for two steps."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=1)
        schedule = {"scheduler": plateau, "interval": "step", "monitor": "loss/value"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def run_with_a_plateau(folder):
    """One of two ranks, each with losses of its own."""
    torch.manual_seed(0)
    learner = Lowering(learning_rate=0.01)
    data = cartpole(num_envs=ENVS, frames_per_batch=ENVS * STEPS, rounds=40)
    saves = ModelCheckpoint(folder, monitor="loss/value", save_top_k=3, every_n_train_steps=1)
    settings = {"callbacks": [saves], "enable_checkpointing": True}
    watch = watched_fit(learner, data, strategy="ddp", devices=2, **settings)
    assert "_monitor_candidates" not in vars(saves)  # as Lightning has it
    seen = watch.learning_rates, watch.final_weights, saves.best_k_models
    torch.save(seen, folder / os.environ["RANK"])


@pytest.mark.processes
def test_ranks_keep_the_same_weights_and_checkpoints_where_a_loss_is_monitored(tmp_path):
    run_ranks(2, run_with_a_plateau, tmp_path)
    (rates, weights, best), (others, other_weights, other_best) = (
        torch.load(tmp_path / rank) for rank in "01"
    )
    assert rates == others
    assert len(set(rates)) > 1
    assert torch.equal(weights, other_weights)
    assert best == other_best
    assert len(best) == 3


class NoisySGD(torch.optim.SGD):
    """Adds noise to its weights with each step."""

    def step(self, closure=None):
        loss = super().step(closure)
        with torch.no_grad():
            for weights in self.param_groups[0]["params"]:
                weights.add_(torch.randn_like(weights), alpha=0.01)
        return loss


def masked():
    layer = nn.Dropout()
    layer.register_forward_hook(keep_mask)
    return layer


def run_with_noise(folder):
    """One of two ranks of a module that is no learner."""
    torch.manual_seed(0)
    module = Plain(masked, NoisySGD)
    trainer = quiet_trainer(strategy="ddp", devices=2)
    trainer.fit(module, cartpole(ROUNDS, num_envs=ENVS, frames_per_batch=ENVS * STEPS))
    torch.save((flat(module.policy), MASKS), folder / os.environ["RANK"])


@pytest.mark.processes
def test_ranks_keep_the_same_weights_where_an_optimizer_draws(tmp_path):
    run_ranks(2, run_with_noise, tmp_path)
    (weights, masks), (others, other_masks) = (torch.load(tmp_path / rank) for rank in "01")
    assert torch.equal(weights, others)
    assert len(masks) == len(other_masks) == ROUNDS
    assert not any(map(torch.equal, masks, other_masks))  # of samples of their own


class OwnRates(Plain):
    """Each rank has another learning rate."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1 + self.global_rank)


def run_apart(folder):
    """One of two ranks whose weights diverge."""
    torch.manual_seed(0)
    saves = ModelCheckpoint(folder, every_n_train_steps=1)
    trainer = quiet_trainer(strategy="ddp", devices=2, callbacks=[saves], enable_checkpointing=True)
    is_first = os.environ["RANK"] == "0"
    told = "rank 1 no longer has the weights of rank 0"
    with pytest.warns(UserWarning, match=told) if is_first else nullcontext():
        trainer.fit(OwnRates(), cartpole(2))


@pytest.mark.processes
def test_ranks_whose_weights_diverge_are_told(tmp_path):
    run_ranks(2, run_apart, tmp_path)
