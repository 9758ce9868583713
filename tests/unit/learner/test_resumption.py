"""What a run that goes on from a checkpoint may change, and what it then does."""

import logging
import shutil

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from torch import nn

from hts_torchrl import (
    A2C,
    PPO,
    PQN,
    ConfigurationError,
    GymEnvs,
    RoundModule,
    make_actor_critic,
)
from hts_torchrl.training.callbacks import LastCheckpoint
from hts_torchrl.training.data_state import DataState
from tests.fits import RESUMES, cartpole, flat, quiet_trainer, saving, watched_fit

ROUNDS = 4
DONE = 2

pytestmark = RESUMES


def stopped(folder, learner, rounds=ROUNDS, **trainer):
    """Train, and return the checkpoint after ``DONE`` of the rounds."""
    torch.manual_seed(0)
    settings = {
        "callbacks": [saving(folder, every_n_train_steps=1)],
        "enable_checkpointing": True,
        **trainer,
    }
    watched_fit(learner, cartpole(rounds), **settings)
    return folder / f"step={DONE * (learner.parts_per_round if rounds == ROUNDS else 1)}.ckpt"


def test_weights_alone_are_refused(tmp_path):
    saving = ModelCheckpoint(tmp_path, filename="weights", save_weights_only=True)
    watched_fit(A2C(), cartpole(DONE), callbacks=[saving], enable_checkpointing=True)
    with pytest.raises(ConfigurationError, match=r"weights alone, as .*save_weights_only=True"):
        watched_fit(A2C(), cartpole(ROUNDS), tmp_path / "weights.ckpt")
    learner = A2C.load_from_checkpoint(tmp_path / "weights.ckpt")
    assert watched_fit(learner, cartpole(DONE)).updates == [DONE, DONE + 1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Of A2C with a delay of 1, on 4 environments."""
    return stopped(tmp_path_factory.mktemp("a2c"), A2C())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return stopped(tmp_path_factory.mktemp("finished"), A2C(), rounds=DONE)


def go_on(path, learner=None, trainer=None, **data):
    return watched_fit(learner or A2C(), cartpole(ROUNDS, **data), path, **(trainer or {}))


DIFFERENT = {
    "model='PPO', the checkpoint has 'A2C'": {"learner": PPO},
    "model.learning_rate=0.5, the checkpoint has 0.0007": {
        "learner": lambda: A2C(learning_rate=0.5)
    },
    "model.gamma=0.5, the checkpoint has 0.99": {"learner": lambda: A2C(gamma=0.5)},
    "model.unroll=4, the checkpoint has None": {"learner": lambda: A2C(unroll=4)},
    "model.num_threads=2, the checkpoint has 1": {"learner": lambda: A2C(num_threads=2)},
    "data.delay=0, the checkpoint has 1": {"delay": 0},
    "data.frames_per_batch=64, the checkpoint has 32": {"frames_per_batch": 64},
    "data.num_envs=2, the checkpoint has 4": {"num_envs": 2, "inference_batch_size": 4},
    "data.num_envs=8, the checkpoint has 4": {"num_envs": 8, "inference_batch_size": 4},
    "data.inference_batch_size=2, the checkpoint has 4": {"inference_batch_size": 2},
    "data.seed=5, the checkpoint has 0": {"seed": 5},
    "data.compile_policy=True, the checkpoint has False": {"compile_policy": True},
    "data.compile_policy={'mode': 'default'}, the checkpoint has False": {
        "compile_policy": {"mode": "default"}
    },
    "data.env.id='MountainCar-v0', the checkpoint has 'CartPole-v1'": {
        "env": GymEnvs("MountainCar-v0")
    },
    "data.env.kwargs={'max_episode_steps': 9}, the checkpoint has {}": {
        "env": GymEnvs("CartPole-v1", {"max_episode_steps": 9})
    },
    "trainer.precision='bf16-mixed', the checkpoint has '32-true'": {
        "trainer": {"precision": "bf16-mixed"}
    },
    "trainer.accumulate_grad_batches=2, the checkpoint has 1": {
        "trainer": {"accumulate_grad_batches": 2}
    },
    "trainer.gradient_clip_val=0.5, the checkpoint has None": {
        "trainer": {"gradient_clip_val": 0.5}
    },
}


@pytest.mark.parametrize("message", DIFFERENT)
def test_a_setting_that_decides_bits_is_refused_with_both_values(message, checkpoint):
    settings = dict(DIFFERENT[message])
    learner = settings.pop("learner", A2C)()
    with pytest.raises(ConfigurationError) as refusal:
        go_on(checkpoint, learner, **settings)
    assert str(refusal.value).startswith(message)
    assert ": bits depend on this; " in str(refusal.value)
    assert "data.accept_changes=true" in str(refusal.value)


def test_the_device_is_the_checkpoints(checkpoint, tmp_path):
    saved = torch.load(checkpoint)
    settings = saved["HTSDataModule"]["settings"]
    assert settings["device"] == "cpu"
    settings["device"] = "cuda"
    torch.save(saved, tmp_path / "gpu.ckpt")
    with pytest.raises(ConfigurationError) as refusal:
        go_on(tmp_path / "gpu.ckpt")
    assert str(refusal.value).startswith("trainer.accelerator='cpu', the checkpoint has 'cuda': ")
    go_on(tmp_path / "gpu.ckpt", accept_changes=True)
    del settings["device"]  # as in checkpoints of before
    torch.save(saved, tmp_path / "older.ckpt")
    go_on(tmp_path / "older.ckpt")


def test_an_older_checkpoint_was_not_compiled(checkpoint, tmp_path):
    saved = torch.load(checkpoint)
    (data,) = (each for name, each in saved.items() if name == "HTSDataModule")
    del data["settings"]["data"]["compile_policy"]
    torch.save(saved, tmp_path / "older.ckpt")
    with pytest.raises(
        ConfigurationError, match=r"^data\.compile_policy=True, the checkpoint has F"
    ):
        go_on(tmp_path / "older.ckpt", compile_policy=True)


def test_all_settings_that_differ_are_told_at_once(checkpoint):
    both = "model.gamma=0.5, .*; data.delay=0, "
    with pytest.raises(ConfigurationError, match=both):
        go_on(checkpoint, A2C(gamma=0.5), delay=0)


def test_the_pool_the_end_and_evaluations_are_changed_without_a_word(checkpoint, caplog):
    pool = {"envs_per_executor": 2, "timeout_s": 9.0, "debug": True, "recover": "replay"}
    rest = {"inference_batch_size": 4, "evaluation_episodes": 1, "total_frames": 6 * 32}
    with caplog.at_level(logging.WARNING, "hts_torchrl"):
        watch = go_on(checkpoint, **pool, **rest)
    assert watch.updates == [2, 3, 4, 5]
    assert [each for each in caplog.records if each.name.startswith("hts_torchrl")] == []


class FailsLate(A2C):
    """Whose optimiser has made its step on the last round when that fails."""

    def on_round_end(self):
        super().on_round_end()
        if self.updates == ROUNDS - 1:
            raise ArithmeticError


def test_a_round_that_failed_after_its_only_step_is_not_resumed(tmp_path):
    last = LastCheckpoint(str(tmp_path))
    last.save_on_exception = True
    with pytest.raises(ArithmeticError):
        watched_fit(FailsLate(), cartpole(ROUNDS), callbacks=[last], enable_checkpointing=True)
    with pytest.raises(ConfigurationError, match="in the middle of a round, whose start it does"):
        go_on(tmp_path / "last.ckpt", FailsLate())


@pytest.mark.parametrize("kind", [PPO, PQN])
def test_threads_that_compute_whole_chunks_may_be_others(kind, tmp_path):
    settings = {"gradient_chunks": 2, "epochs": 2, "minibatches": 2}
    saved = stopped(tmp_path, kind(**settings))
    whole = go_on(saved, kind(**settings)).final_weights
    assert torch.equal(go_on(saved, kind(**settings, num_threads=2)).final_weights, whole)


def test_a_change_that_is_meant_is_told_with_the_update_from_which_on_it_holds(checkpoint, caplog):
    go_on(checkpoint, A2C(learning_rate=0.5), accept_changes=True, delay=0)
    assert "from update 2 on: model.learning_rate=0.5, the checkpoint has 0.0007" in caplog.text
    assert "from update 2 on: data.delay=0, the checkpoint has 1" in caplog.text


class WarmedUp(A2C):
    """A2C whose learning rate rises from a quarter of its peak, by a quarter each round."""

    def __init__(self, policy=None, *, peak=0.1, **settings):
        super().__init__(policy, **settings)
        self.peak = peak

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.policy.parameters(), self.peak)
        rising = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3)
        return [optimizer], [{"scheduler": rising, "interval": "step"}]


class Halving(WarmedUp):
    """A2C whose learning rate is halved after every second round."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.policy.parameters(), self.peak)
        halving = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.5**number)
        return [optimizer], [{"scheduler": halving, "interval": "step", "frequency": 2}]


class RisesAndFalls(WarmedUp):
    """A2C whose learning rate rises for three rounds, and falls after that."""

    def configure_optimizers(self):
        (optimizer,), (rising,) = super().configure_optimizers()
        falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        schedules = [rising["scheduler"], falling]
        both = torch.optim.lr_scheduler.SequentialLR(optimizer, schedules, milestones=[3])
        return [optimizer], [{"scheduler": both, "interval": "step"}]


class Plain(RoundModule):
    """A loss and an optimiser of the user's own."""

    def __init__(self, rate=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.rate = rate

    def training_step(self, part, _):
        with self.learning_from(part):
            samples = part.round.reshape(-1).select("observation")
            policy, value = self.evaluate(samples)
            return value.square().mean() - policy.entropy().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.policy.parameters(), self.rate)


class TestAcceptedChanges:
    def test_a_learning_rate_reaches_the_optimiser(self, checkpoint):
        watch = go_on(checkpoint, A2C(learning_rate=0.5), accept_changes=True)
        assert watch.learning_rates == [0.5, 0.5]

    def test_a_learning_rate_reaches_the_schedule(self, tmp_path):
        path = stopped(tmp_path, A2C(learning_rate_decay=True))
        learner = A2C(learning_rate=0.5, learning_rate_decay=True)
        watch = go_on(path, learner, accept_changes=True)
        assert watch.learning_rates == pytest.approx([0.5 * 2 / 4, 0.5 * 1 / 4])

    def test_a_setting_of_the_users_reaches_the_schedule_that_is_made_of_it(self, tmp_path):
        path = stopped(tmp_path, WarmedUp())
        watch = go_on(path, WarmedUp(peak=0.4), accept_changes=True)
        assert watch.learning_rates == pytest.approx([0.4 * 3 / 4, 0.4])

    def test_a_schedule_of_the_users_stays_where_it_is(self, tmp_path):
        path = stopped(tmp_path, Halving())
        watch = go_on(path, Halving(peak=0.4), accept_changes=True)
        assert watch.learning_rates == pytest.approx([0.4 / 2, 0.4 / 2])

    def test_a_setting_of_the_users_reaches_a_schedule_whose_turn_is_yet_to_come(self, tmp_path):
        path = stopped(tmp_path, RisesAndFalls())
        watch = go_on(path, RisesAndFalls(peak=0.4), accept_changes=True)
        assert watch.learning_rates == pytest.approx([0.4 * 3 / 4, 0.4])

    def test_a_setting_of_a_round_module_reaches_its_optimiser(self, tmp_path):
        path = stopped(tmp_path, Plain(rate=0.5))
        watch = go_on(path, Plain(rate=0.25), accept_changes=True)
        assert watch.learning_rates == [0.25, 0.25]

    def test_a_decay_that_is_new_begins_where_the_run_is(self, checkpoint):
        learner = A2C(learning_rate=0.4, learning_rate_decay=True)
        watch = go_on(checkpoint, learner, accept_changes=True)
        assert watch.learning_rates == pytest.approx([0.4 * 2 / 4, 0.4 * 1 / 4])

    def test_a_decay_that_is_gone_leaves_the_whole_rate(self, tmp_path):
        path = stopped(tmp_path, A2C(learning_rate_decay=True, learning_rate=0.4))
        watch = go_on(path, A2C(learning_rate=0.4), accept_changes=True)
        assert watch.learning_rates == [0.4, 0.4]

    @pytest.mark.parametrize(
        ("before", "now", "expected"),
        [
            (
                {"optimizer": "sgd", "optimizer_kwargs": {"momentum": 0.5}},
                {"optimizer_kwargs": {"momentum": 0.25}},
                {"momentum": 0.25},
            ),
            ({"optimizer": "adam"}, {"epsilon": 0.125}, {"eps": 0.125}),
            ({"optimizer": "sgd"}, {"epsilon": 0.125}, {"eps": None}),
        ],
        ids=["argument", "epsilon", "no epsilon"],
    )
    def test_a_setting_of_the_optimiser_reaches_it_if_it_has_one(
        self, before, now, expected, tmp_path
    ):
        path, groups = stopped(tmp_path, A2C(**before)), []
        keep = LambdaCallback(
            on_before_optimizer_step=lambda *args: groups.append(dict(args[-1].param_groups[0]))
        )
        go_on(path, A2C(**before | now), {"callbacks": [keep]}, accept_changes=True)
        found = [{name: group.get(name) for name in expected} for group in groups]
        assert found == [expected] * 2

    def test_a_learning_rate_reaches_both_of_muon(self, tmp_path):
        path = stopped(tmp_path, A2C(optimizer="muon", learning_rate_decay=True))
        learner = A2C(optimizer="muon", learning_rate=0.4, learning_rate_decay=True)
        rates = []
        keep = LambdaCallback(
            on_before_optimizer_step=lambda *args: rates.append(
                [group["lr"] for group in args[-1].param_groups]
            )
        )
        go_on(path, learner, {"callbacks": [keep]}, accept_changes=True)
        assert rates == [pytest.approx([0.4 * 2 / 4] * 2), pytest.approx([0.4 * 1 / 4] * 2)]

    def test_without_delay_the_next_round_has_the_newest_weights(self, checkpoint):
        assert go_on(checkpoint).versions == [1, 2]
        assert go_on(checkpoint, delay=0, accept_changes=True).versions == [2, 3]

    def test_longer_rounds_go_on_at_the_same_frames(self, checkpoint):
        watch = go_on(checkpoint, frames_per_batch=64, total_frames=256, accept_changes=True)
        assert [tuple(batch.shape) for batch in watch.rounds] == [(4, 16)] * 3
        assert watch.updates == [2, 3, 4]

    def test_fewer_environments_go_on_with_their_games(self, checkpoint):
        watch = go_on(checkpoint, num_envs=2, accept_changes=True)
        assert [tuple(batch.shape) for batch in watch.rounds] == [(2, 16)] * 2
        assert watch.rounds[0]["next", "step_count"][:, 0].min() > 1

    def test_another_seed_begins_new_games(self, checkpoint, caplog):
        watch = go_on(checkpoint, seed=5, accept_changes=True)
        assert (watch.rounds[0]["next", "step_count"][:, 0] == 1).all()
        assert "data.seed=5, the checkpoint has 0 (data.accept_changes); new games" in caplog.text

    def test_a_round_of_other_parts_is_learned_as_often(self, tmp_path):
        path = stopped(tmp_path, PPO(epochs=2, minibatches=2))
        watch = go_on(path, PPO(epochs=3, minibatches=2), accept_changes=True)
        assert watch.updates == [2, 3]
        assert len(watch.learning_rates) == 2 * 6

    def test_another_optimiser_is_refused(self, checkpoint):
        with pytest.raises(
            ConfigurationError, match=r"model.optimizer='adam', .* has 'rmsprop': no"
        ):
            go_on(checkpoint, A2C(optimizer="adam"), accept_changes=True)

    @pytest.mark.parametrize("name", ["normalize_observation", "normalize_reward"])
    def test_another_scale_is_refused_with_the_cause(self, checkpoint, name):
        cause = rf"^data\.{name}=True, the checkpoint has False: .*; keep it, or begin a new run"
        for accepts in (True, False):
            with pytest.raises(ConfigurationError, match=cause):
                go_on(checkpoint, accept_changes=accepts, **{name: True})


class TestMoreEnvironments:
    def test_than_there_are_games_are_refused_with_the_cause(self, checkpoint):
        cause = r"the games of 4 environments, but data\.num_envs=8 are wanted"
        with pytest.raises(ConfigurationError, match=cause):
            go_on(checkpoint, num_envs=8, inference_batch_size=4, accept_changes=True)

    def test_are_refused_with_the_cause_by_a_state_without_settings(self, checkpoint, tmp_path):
        content = torch.load(checkpoint, weights_only=True)
        del content["HTSDataModule"]["settings"]
        torch.save(content, tmp_path / "without.ckpt")
        with pytest.raises(ConfigurationError, match="the games of 4 environments, but"):
            go_on(tmp_path / "without.ckpt", num_envs=8)

    def test_begin_new_games_if_that_is_wanted(self, checkpoint):
        watch = go_on(checkpoint, num_envs=8, accept_changes=True, resume_envs=False)
        assert [tuple(batch.shape) for batch in watch.rounds] == [(8, 4)] * 2


class TestTheEnd:
    def test_of_a_finished_run_is_told_and_nothing_is_trained(self, finished, caplog):
        watch = go_on(finished, total_frames=DONE * 32)
        assert watch.rounds == []
        assert "run is finished (64 of 64 frames): nothing is trained" in caplog.text

    def test_after_its_last_evaluation_needs_no_other(self, tmp_path):
        saving = ModelCheckpoint(tmp_path, filename="last", save_on_train_epoch_end=False)
        settings = {"callbacks": [saving], "enable_checkpointing": True, "limit_val_batches": 1}
        watched_fit(A2C(), cartpole(DONE, evaluation_episodes=1), **settings)
        learner = A2C()
        watch = watched_fit(learner, cartpole(DONE), ckpt_path=tmp_path / "last.ckpt")
        assert (watch.rounds, learner.updates) == ([], DONE)

    def test_before_what_has_been_done_is_refused(self, finished):
        message = "data.total_frames=32, but the checkpoint's run has done 64"
        with pytest.raises(ConfigurationError, match=message):
            go_on(finished, total_frames=32)

    def test_that_has_moved_extends_a_run_whose_state_has_no_settings(self, tmp_path):
        path = stopped(tmp_path, PPO(epochs=2, minibatches=2), rounds=DONE)
        content = torch.load(tmp_path / f"step={DONE * 4}.ckpt", weights_only=True)
        del content["HTSDataModule"]["settings"]
        torch.save(content, path)
        learner = PPO(epochs=2, minibatches=2)
        assert len(go_on(path, learner).rounds) == ROUNDS - DONE
        assert learner.updates == ROUNDS

    def test_that_has_moved_moves_the_end_of_the_decay(self, tmp_path, caplog):
        path = stopped(tmp_path, A2C(learning_rate=0.4, learning_rate_decay=True), rounds=DONE)
        watch = go_on(path, A2C(learning_rate=0.4, learning_rate_decay=True))
        assert watch.learning_rates == pytest.approx([0.4 * 2 / 4, 0.4 * 1 / 4])
        assert "the rate falls to 0 at step 4, not 2: from update 2 on" in caplog.text


def test_a_run_that_cannot_go_on_still_names_the_cause_where_exceptions_are_saved(
    checkpoint, tmp_path
):
    """The checkpoint that Lightning writes on the way out must not fail by itself."""
    shutil.copy(checkpoint, tmp_path / "copy.ckpt")
    saving = ModelCheckpoint(tmp_path / "new", save_on_exception=True)
    trainer = {"callbacks": [saving], "enable_checkpointing": True}
    with pytest.raises(ConfigurationError, match=r"data\.delay=0, the checkpoint has 1"):
        go_on(tmp_path / "copy.ckpt", trainer=trainer, delay=0)


class Unfreezes(Callback):
    """Trains the trunk from the sixth step on, which is within the second round."""

    def on_fit_start(self, trainer, pl_module):  # noqa: ARG002
        pl_module.policy.module[0].requires_grad_(False)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):  # noqa: ARG002
        if trainer.global_step >= 6:
            pl_module.policy.module[0].requires_grad_(True)


def test_what_is_unfrozen_within_a_round_that_is_cut_off_is_resumed_as_at_its_start(tmp_path):
    torch.manual_seed(0)
    few = {"epochs": 2, "minibatches": 2}
    whole = PPO(**few)
    kept = saving(tmp_path, every_n_train_steps=7)
    trainer = quiet_trainer(callbacks=[Unfreezes(), kept], enable_checkpointing=True)
    trainer.fit(whole, cartpole(3))
    resumed = PPO(**few)
    trainer = quiet_trainer(callbacks=[Unfreezes()])
    trainer.fit(resumed, cartpole(3), ckpt_path=tmp_path / "step=7.ckpt")
    assert torch.equal(flat(resumed.policy), flat(whole.policy))


def test_what_was_unfrozen_before_a_resumed_run_has_the_weights_that_act(tmp_path):
    """The callback unfreezes it when the run has begun, and it moved in the round before."""

    def fit(ckpt_path=None, **trainer):
        torch.manual_seed(0)
        learner = PPO(epochs=2, minibatches=2, learning_rate=0.1, delayed_step="displacement")
        callbacks = [Unfreezes(), *trainer.pop("callbacks", [])]
        quiet_trainer(callbacks=callbacks, **trainer).fit(learner, cartpole(4), ckpt_path=ckpt_path)
        return flat(learner.policy)

    kept = saving(tmp_path, every_n_train_steps=12)
    whole = fit(callbacks=[kept], enable_checkpointing=True)
    assert torch.equal(fit(tmp_path / "step=12.ckpt"), whole)


class FrozenTooEarly(A2C):
    """Freezes the trunk before its optimiser is made of what is trained."""

    def configure_model(self):
        super().configure_model()
        self.policy.module[0].requires_grad_(False)


def test_what_is_unfrozen_and_in_no_optimizer_is_refused():
    told = r"the policy's module\.0\S*weight is trained from now on, but no optimizer has it"
    with pytest.raises(ConfigurationError, match=told):
        quiet_trainer(callbacks=[Unfreezes()]).fit(FrozenTooEarly(), cartpole(8))


class Foreign(LightningModule):
    """Has the weights of a learner, and is none."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy


@pytest.mark.parametrize("call", ["fit", "validate"])
def test_a_checkpoint_of_another_module_is_refused(tmp_path, call):
    policy = make_actor_critic("mlp", GymEnvs("CartPole-v1").group([0]).spec)
    trainer = quiet_trainer(limit_val_batches=1)
    trainer.strategy.connect(Foreign(policy))
    trainer.save_checkpoint(tmp_path / "foreign.ckpt")
    with pytest.raises(ConfigurationError, match="the checkpoint is of no learner of hts_torchrl"):
        getattr(quiet_trainer(limit_val_batches=1), call)(
            A2C(policy), datamodule=cartpole(), ckpt_path=tmp_path / "foreign.ckpt"
        )


def test_a_data_module_is_asked_once_what_has_changed(checkpoint, monkeypatch):
    asked, changes = [], DataState.changes_from
    monkeypatch.setattr(
        DataState, "changes_from", lambda *given: asked.append(1) or changes(*given)
    )
    go_on(checkpoint, accept_changes=True, delay=0)
    assert asked == [1]


def test_a_run_that_could_not_go_on_leaves_nothing_for_the_next(checkpoint):
    learner, data = A2C(), cartpole(ROUNDS, total_frames=32)
    with pytest.raises(ConfigurationError, match="total_frames=32, but the checkpoint's run has"):
        watched_fit(learner, data, checkpoint)
    assert learner.resumption is None


class Counter(nn.Module):
    """Has a state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


class Counts(A2C):
    """Counts its rounds in a module beside the policy."""

    def __init__(self, policy=None, **settings):
        super().__init__(policy, **settings)
        self.counter = Counter()

    def on_round_end(self):
        self.counter.count += 1


def test_a_state_that_is_no_tensor_goes_on_too(tmp_path):
    path = stopped(tmp_path, Counts())
    resumed = Counts()
    go_on(path, resumed)
    assert resumed.counter.count == ROUNDS
    assert Counts.load_from_checkpoint(path).counter.count == DONE
