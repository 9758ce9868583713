"""The data module under the real Trainer, with processes only where they are the point."""

import contextlib
import copy
import multiprocessing
import os
import pickle
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torchrl.envs import GymEnv
from torchrl.modules import GRUModule, OneHotCategorical, ValueOperator

from hts_torchrl import A2C, PPO, GymEnvs, HTSDataModule, Impala, make_actor_critic
from hts_torchrl.errors import ConfigurationError, WorkerError
from hts_torchrl.tools.short_fit import data_of_short_fit
from hts_torchrl.training.round_slice import RoundSlice
from tests.fakes import FailingEnv
from tests.fits import cartpole, checkpoints, quiet_trainer, saving, watched_fit
from tests.policies import echo_policy


class TestEpochs:
    def test_two_epochs_are_refused_before_training(self):
        data = cartpole(3)
        with pytest.raises(ConfigurationError, match="max_epochs=2: an epoch is the whole run"):
            watched_fit(A2C(), data, max_epochs=2)

    @pytest.mark.parametrize("end", [{}, {"max_time": "00:01:00:00"}, {"max_steps": 4}])
    def test_endless_epochs_are_refused_before_training(self, end):
        data = cartpole(3)
        with pytest.raises(ConfigurationError, match=r"^max_\w+=.*set Trainer\(max_epochs=1\)$"):
            watched_fit(A2C(), data, max_epochs=-1, **end)
        with pytest.raises(ConfigurationError, match="exists during training only"):
            _ = data.collector

    def test_limit_train_batches_leaves_rounds_out(self):
        assert len(watched_fit(A2C(), cartpole(6), limit_train_batches=4).rounds) == 4

    def test_a_share_of_the_batches_leaves_rounds_out(self):
        assert len(watched_fit(A2C(), cartpole(6), limit_train_batches=0.5).rounds) == 3

    def test_limited_epochs_go_on_where_the_last_one_ended(self):
        watch = watched_fit(A2C(), cartpole(6), limit_train_batches=3, max_epochs=2)
        assert watch.versions == [0, 0, 1, 2, 3, 4]
        last, first = (watch.rounds[index]["next", "step_count"] for index in (2, 3))
        ended = watch.rounds[2]["next", "done"][:, -1]
        expected = torch.where(ended, 1, last[:, -1] + 1)
        assert torch.equal(first[:, 0], expected)

    def test_epochs_that_end_within_a_step_are_refused(self):
        told = r"^limit_train_batches=3 with accumulate_grad_batches=2: 3 parts; a multiple of 2 is"
        limits = {"limit_train_batches": 3, "max_epochs": 2}
        with pytest.raises(ConfigurationError, match=told):
            watched_fit(A2C(), cartpole(6), accumulate_grad_batches=2, **limits)

    def test_max_steps_ends_training(self):
        assert len(watched_fit(A2C(), cartpole(6), max_epochs=-1, max_steps=4).rounds) == 4


class Named(HTSDataModule):
    """A data module that Lightning can make again."""

    def __init__(self, game: str, total_frames: int = 64) -> None:
        super().__init__(GymEnvs(game), total_frames=total_frames, num_envs=2, frames_per_batch=16)
        self.save_hyperparameters()


class TestLoadFromCheckpoint:
    def saved(self, data, path):
        trainer = quiet_trainer(limit_train_batches=1)
        trainer.fit(A2C(), data)
        trainer.save_checkpoint(path)
        return path

    def test_without_a_factory_it_is_refused(self, tmp_path):
        path = self.saved(cartpole(3), tmp_path / "one.ckpt")
        with pytest.raises(ConfigurationError, match=r"missing .*'env'.*no environment factory"):
            HTSDataModule.load_from_checkpoint(path)

    def test_with_a_factory_it_is_made(self, tmp_path):
        path = self.saved(Named("CartPole-v1"), tmp_path / "one.ckpt")
        given = GymEnvs("CartPole-v1")
        again = HTSDataModule.load_from_checkpoint(
            path, env=given, total_frames=64, num_envs=2, frames_per_batch=16
        )
        assert again.env is given

    def test_a_subclass_that_saves_its_hyperparameters_is_made_with_them(self, tmp_path):
        path = self.saved(Named("CartPole-v1", 128), tmp_path / "one.ckpt")
        again = Named.load_from_checkpoint(path)
        assert again.env.id == "CartPole-v1"
        assert again.pool.total_frames == 128


def test_loggers_are_told_the_settings_that_stay_when_a_run_goes_on(tmp_path):
    trainer = quiet_trainer(logger=CSVLogger(tmp_path), log_every_n_steps=1)
    trainer.fit(A2C(gamma=0.5), Named("CartPole-v1", 128))
    told = yaml.safe_load(Path(trainer.log_dir, "hparams.yaml").read_text())
    assert (told["gamma"], told["game"]) == (0.5, "CartPole-v1")
    assert told["data"]["env"]["init_args"]["id"] == "CartPole-v1"
    assert told["data"]["num_envs"] == 2
    others = {"total_frames": 640, "envs_per_executor": 2, "evaluation_episodes": 1}
    assert cartpole().hparams_initial == cartpole(**others).hparams_initial


class WithData(A2C):
    """A learner of a user that has a setting of that name itself."""

    def __init__(self, policy=None, *, data="mine", **settings):  # noqa: ARG002
        super().__init__(policy, **settings)


def test_a_setting_of_the_module_stands_where_both_have_one_of_that_name(tmp_path):
    trainer = quiet_trainer(logger=CSVLogger(tmp_path), log_every_n_steps=1)
    trainer.fit(WithData(), cartpole())
    assert yaml.safe_load(Path(trainer.log_dir, "hparams.yaml").read_text())["data"] == "mine"


@pytest.mark.parametrize("hook", ["setup", "teardown", "on_exception", "state_dict"])
def test_a_hook_that_replaces_the_data_modules_is_refused(hook):
    replaced = type("Replaced", (HTSDataModule,), {hook: lambda *_, **__: None})
    data = replaced(GymEnvs("CartPole-v1"), total_frames=64, num_envs=2, frames_per_batch=16)
    message = rf"Replaced\.{hook} replaces what the data module does there; call super\(\)"
    with pytest.raises(ConfigurationError, match=message):
        quiet_trainer().fit(A2C(), data)


class Evaluations(Callback):
    """Keeps after how many updates the policy was evaluated."""

    def __init__(self) -> None:
        self.updates: list[int] = []

    def on_validation_start(self, trainer, pl_module):  # noqa: ARG002
        self.updates.append(pl_module.updates)


def evaluated_after(learner, data, **settings):
    evaluations = Evaluations()
    settings = {"limit_val_batches": 1, "callbacks": [evaluations], **settings}
    watched_fit(learner, data, **settings)
    return evaluations.updates


@pytest.mark.parametrize("chosen", [None, "3"])
def test_threads_that_lightning_sets_for_ranks_are_not_those_of_workers(chosen, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    if chosen is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    data = cartpole(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # as Lightning does where there is none
    data.trainer = quiet_trainer(strategy="ddp")
    data.setup("fit")
    assert os.environ.get("OMP_NUM_THREADS") == chosen


class TestEvaluationInterval:
    def test_none_evaluates_at_the_end_only(self):
        assert evaluated_after(A2C(), cartpole(5, evaluation_episodes=1)) == [5]

    def test_frames_become_rounds(self):
        data = cartpole(5, evaluation_episodes=1, evaluation_frames=64)
        assert evaluated_after(A2C(), data) == [2, 4]

    def test_frames_are_rounded_to_rounds(self):
        data = cartpole(4, evaluation_episodes=1, evaluation_frames=40)
        assert evaluated_after(A2C(), data) == [1, 2, 3, 4]

    def test_a_round_of_ppo_counts_all_its_parts(self):
        data = cartpole(4, evaluation_episodes=1, evaluation_frames=64)
        assert evaluated_after(PPO(epochs=2, minibatches=4), data) == [2, 4]

    def test_a_round_of_a2c_counts_all_its_chunks(self):
        data = cartpole(4, evaluation_episodes=1, evaluation_frames=64)
        assert evaluated_after(A2C(), data, accumulate_grad_batches=2) == [2, 4]

    def test_epochs_that_never_come_are_told(self):
        data = cartpole(3, evaluation_episodes=1, evaluation_frames=32)
        with pytest.warns(
            UserWarning, match=r"n_epoch=2: .* never evaluated \(evaluation_frames=32"
        ):
            assert evaluated_after(A2C(), data, check_val_every_n_epoch=2) == []

    def test_more_frames_than_the_run_has_evaluate_at_the_end(self):
        data = cartpole(3, evaluation_episodes=1, evaluation_frames=10_000)
        assert evaluated_after(A2C(), data) == [3]

    @pytest.mark.parametrize("validates_first", [False, True])
    @pytest.mark.parametrize("frames", [32, 64])
    def test_early_stopping_looks_after_each(self, frames, validates_first):
        """Also where a round is one batch: it takes an interval of 1 batch for 1.0, the epoch."""
        stop = EarlyStopping("eval/score", mode="max", stopping_threshold=0.0)
        trainer = quiet_trainer(callbacks=[stop], limit_val_batches=1)
        learner, data = A2C(), cartpole(4, evaluation_episodes=1, evaluation_frames=frames)
        if validates_first:
            trainer.validate(learner, data, verbose=False)
        trainer.fit(learner, data)
        assert trainer.global_step == frames // 32
        assert trainer.val_check_interval == 1.0

    @pytest.mark.parametrize(
        ("frames", "of_trainer"),
        [
            (None, {"limit_val_batches": 1}),
            (10_000, {"limit_val_batches": 1}),
            (32, {"limit_val_batches": 0}),
        ],
    )
    def test_early_stopping_that_never_looks_before_the_end_is_told(self, frames, of_trainer):
        """As for who takes the run for many epochs, of which each is evaluated."""
        stop = EarlyStopping("loss/value", stopping_threshold=1e9)
        trainer = quiet_trainer(callbacks=[stop], **of_trainer)
        data = cartpole(4, evaluation_episodes=1, evaluation_frames=frames)
        told = r"^EarlyStopping\(monitor='loss/value'\) looks after evaluations, and there is none"
        with pytest.warns(UserWarning, match=told):
            trainer.fit(A2C(), data)
        assert trainer.global_step == 4

    def test_a_checkpoint_of_the_users_is_saved_after_each(self, tmp_path):
        settings = {"enable_checkpointing": True, "callbacks": [saving(tmp_path)]}
        evaluated_after(A2C(), cartpole(3, evaluation_episodes=1, evaluation_frames=32), **settings)
        assert [path.stem for path in checkpoints(tmp_path)] == ["step=1", "step=2", "step=3"]

    def test_fewer_batches_than_an_interval_evaluate_at_the_end(self):
        data = cartpole(6, evaluation_episodes=1, evaluation_frames=160)
        assert evaluated_after(A2C(), data, limit_train_batches=3) == [3]

    @pytest.mark.parametrize(("interval", "parts"), [(5, 5), (2, 2), (0.4, 6)])
    def test_within_a_round_is_refused(self, interval, parts):
        message = (
            rf"val_check_interval={interval}: an evaluation after {parts} parts is within a round; "
            r"a multiple of 4 \(parts of a round\), or data.evaluation_frames, is needed"
        )
        learner = PPO(epochs=2, minibatches=2)
        with pytest.raises(ConfigurationError, match=message):
            evaluated_after(learner, cartpole(4), val_check_interval=interval)

    @pytest.mark.parametrize("frames", [None, 64])
    def test_an_epoch_that_ends_within_a_round_is_refused(self, frames):
        learner, data = PPO(epochs=2, minibatches=2), cartpole(4, evaluation_frames=frames)
        with pytest.raises(
            ConfigurationError,
            match=r"limit_train_batches=6: an evaluation after 6 .* a multiple of 4 .* is needed",
        ):
            evaluated_after(learner, data, limit_train_batches=6)

    def test_a_fast_development_run_may_end_within_a_round(self):
        learner, data = PPO(epochs=2, minibatches=2), cartpole(4, evaluation_episodes=1)
        assert evaluated_after(learner, data, fast_dev_run=2) == [0]

    def test_a_time_is_refused_where_it_may_end_within_a_round(self):
        settings = {"val_check_interval": "00:00:00:01", "limit_val_batches": 1}
        with pytest.raises(ConfigurationError, match=r"is a time, .* of the 4 parts of a round"):
            evaluated_after(PPO(epochs=2, minibatches=2), cartpole(2), **settings)
        data = cartpole(2, evaluation_episodes=1)
        assert evaluated_after(A2C(), data, **settings) in ([], [1], [2], [1, 2])

    def test_a_time_is_refused_on_several_ranks_whose_clocks_differ(self):
        ranks = {"devices": 2, "strategy": "ddp", "val_check_interval": "00:00:00:01"}
        data = cartpole(2)
        for evaluated in (0, 1):
            data.trainer = quiet_trainer(limit_val_batches=evaluated, **ranks)
            refused = pytest.raises(ConfigurationError, match="is a time, which does not pass")
            with refused if evaluated else contextlib.nullcontext():
                data.setup("fit")

    @pytest.mark.parametrize(("interval", "updates"), [(8, [2, 4]), (0.25, [1, 2, 3, 4])])
    def test_the_trainers_own_is_of_whole_rounds(self, interval, updates):
        data = cartpole(4, evaluation_episodes=1)
        learner = PPO(epochs=2, minibatches=2)
        assert evaluated_after(learner, data, val_check_interval=interval) == updates

    def test_without_evaluations_any_interval_will_do(self):
        learner = PPO(epochs=2, minibatches=2)
        settings = {"val_check_interval": 5, "limit_val_batches": 0}
        assert evaluated_after(learner, cartpole(2), **settings) == []

    def test_a_trainer_whose_run_failed_can_run_again(self):
        breaking, evaluations = Breaking(), Evaluations()
        data = cartpole(4, evaluation_episodes=1, evaluation_frames=64)
        trainer = quiet_trainer(limit_val_batches=1, callbacks=[breaking, evaluations])
        with pytest.raises(ArithmeticError):
            trainer.fit(A2C(), data)
        trainer.callbacks.remove(breaking)
        trainer.fit(A2C(), data)
        assert evaluations.updates[-1] == 4

    def test_a_trainers_own_that_was_refused_is_refused_again(self):
        data = cartpole(4, evaluation_frames=64)
        trainer = quiet_trainer(val_check_interval=2)
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="val_check_interval=2 and evaluation_f"):
                trainer.fit(A2C(), data)


class Breaking(Callback):
    """Raises in the second round."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):  # noqa: ARG002
        if batch_idx == 1:
            raise ArithmeticError("as asked")


def worker_names():
    return [p.name for p in multiprocessing.active_children() if p.name.startswith("hts-")]


@pytest.mark.processes
class TestProcesses:
    """Nothing is left of the collector's processes, whatever ends the training."""

    settings = {"num_actors": 1, "num_envs": 2, "envs_per_executor": 2, "frames_per_batch": 8}  # noqa: RUF012

    def test_run_during_training_and_end_with_it(self):
        class Names(Callback):
            seen = None

            def on_train_batch_end(self, *_):
                self.seen = sorted(worker_names())

        names = Names()
        watched_fit(A2C(), cartpole(3, **self.settings), callbacks=[names])
        assert names.seen == ["hts-actor-0", "hts-executor-0"]
        assert worker_names() == []

    def test_end_when_training_raises(self):
        with pytest.raises(ArithmeticError):
            watched_fit(A2C(), cartpole(3, **self.settings), callbacks=[Breaking()])
        assert worker_names() == []

    def test_end_when_an_environment_raises(self):
        data = cartpole(9, env=FailingEnv("step", index=1, at=9), **self.settings)
        with pytest.raises(WorkerError, match=r"executor 0 \(environments \[0, 1\]\), round 2"):
            watched_fit(A2C(echo_policy()), data)
        assert worker_names() == []

    def test_end_when_the_learner_refuses_the_round(self):
        with pytest.raises(ConfigurationError, match="unroll"):
            watched_fit(A2C(unroll=3), cartpole(3, **self.settings))
        assert worker_names() == []


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"total_frames": 0}, "total_frames=0; the Trainer needs an end"),
            ({"total_frames": -1}, "total_frames=-1; the Trainer needs an end"),
            ({"num_actors": -1}, "num_actors=-1; 0 or more"),
            ({"evaluation_episodes": 0}, "evaluation_episodes=0; 1 or more"),
            ({"evaluation_episodes": 10**9}, "evaluation_episodes=1000000000; at most 65536"),
            ({"evaluation_frames": 0}, "evaluation_frames=0; 1 or more"),
        ],
    )
    def test_a_wrong_one_is_refused_when_the_data_module_is_made(self, settings, message):
        with pytest.raises(ConfigurationError) as raised:
            cartpole(**settings)
        assert str(raised.value).startswith(message)

    @pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
    def test_a_precision_that_actors_lack_is_refused(self, precision):
        with pytest.raises(ConfigurationError, match=f"precision={precision}; 32-true or bf16"):
            watched_fit(A2C(), cartpole(), precision=precision)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"log_every_n_steps": -1}, r"log_every_n_steps=-1; 0 \(never\) or more"),
            (
                {"gradient_clip_val": float("nan")},
                "gradient_clip_val=nan; a finite number of 0 or more",
            ),
            ({"gradient_clip_val": -1.0}, "gradient_clip_val=-1.0; a finite number of 0 or more"),
            ({"accumulate_grad_batches": 0}, "accumulate_grad_batches=0; 1 or more"),
            ({"check_val_every_n_epoch": 0}, "check_val_every_n_epoch=0; 1 or more"),
            ({"val_check_interval": 4}, "val_check_interval=4; 1 to 3 "),
            ({"overfit_batches": 1}, "overfit_batches=1: no round comes again; 0 is needed"),
        ],
    )
    def test_a_trainer_that_would_fail_or_spoil_the_weights_is_refused(self, settings, message):
        with pytest.raises(ConfigurationError, match=message):
            watched_fit(A2C(), cartpole(3), **settings)

    def test_environments_are_described_without_training(self):
        spec = cartpole().env_spec
        assert spec.observations["observation"].shape == (4,)
        assert spec.action.sizes == (2,)


@pytest.mark.parametrize("make", [A2C, PPO, Impala])
def test_whether_there_is_one_can_be_asked(make):
    """Lightning asks a learner for each of its attributes, to log its graph."""
    learner, data = make(), cartpole()
    assert not hasattr(data, "collector")
    watched_fit(learner, data)
    assert not hasattr(data, "collector")
    assert all(hasattr(learner, name) for name in dir(make) if not name.startswith("_"))
    assert getattr(learner, "_collector", None) is None


@pytest.mark.parametrize(
    "ask",
    [
        lambda data: data.setup("fit"),
        lambda data: data.train_dataloader(),
        lambda data: data.val_dataloader(),
    ],
)
def test_what_needs_a_trainer_says_so(ask):
    message = r"no Trainer has this HTSDataModule yet: call trainer\.fit\(learner, datamodule\)"
    with pytest.raises(ConfigurationError, match=message):
        ask(cartpole())


def test_it_can_be_printed_after_training():
    data = cartpole()
    watched_fit(A2C(), data)
    assert "HTSDataModule" in str(data)


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_actors_begin_with_the_weights_that_a_callback_has_put_there(hook):
    differences = []

    class Loading(Callback):
        def on_train_batch_start(self, trainer, module, part, index):  # noqa: ARG002
            distribution = module.policy.get_dist(part.round.select("observation"))
            log_prob = distribution.log_prob(part.round["action"]).detach()
            differences.append(float((log_prob - part.round["action_log_prob"]).abs().max()))

    def load(_, trainer, module):  # noqa: ARG001
        with torch.no_grad():
            for parameter in module.policy.parameters():
                parameter.mul_(3)

    setattr(Loading, hook, load)
    quiet_trainer(callbacks=[Loading()]).fit(A2C(learning_rate_decay=True), cartpole(1))
    assert differences == [pytest.approx(0, abs=1e-5)]


@pytest.mark.parametrize("rounds", [2, 4])
def test_an_evaluated_checkpoint_is_not_gone_on_with(tmp_path, rounds):
    trainer = quiet_trainer(max_steps=rounds)
    trainer.fit(A2C(), cartpole(4))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    learner, data = A2C(), cartpole(4, evaluation_episodes=1)
    evaluating = quiet_trainer(limit_val_batches=1)
    evaluating.validate(learner, data, ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert data.state_dict()["round"] == rounds
    trainer = quiet_trainer()
    trainer.fit(learner, data)
    assert (trainer.global_step, learner.updates) == (4, rounds + 4)


def test_threads_are_given_back_after_an_exception():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ArithmeticError):
            quiet_trainer(callbacks=[Breaking()]).fit(A2C(num_threads=1), cartpole(4))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_learner_trains_a_second_time():
    learner = A2C()
    watched_fit(learner, cartpole(3))
    watch = watched_fit(learner, cartpole(3))
    assert watch.updates == [3, 4, 5]
    assert watch.versions == [3, 3, 4]


def test_weights_of_a_run_that_failed_are_not_saved_with_the_games_of_the_run_before():
    data = cartpole(3)
    watched_fit(A2C(), data)
    assert data.state_dict()["round"] == 3
    with pytest.raises(ArithmeticError):
        watched_fit(A2C(), data, callbacks=[Breaking()])
    assert data.state_dict() == {}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))])
def test_a_copy_of_one_that_has_trained_trains_alike(copied):
    data = cartpole(3)
    torch.manual_seed(0)
    first = watched_fit(A2C(), data)
    torch.manual_seed(0)
    second = watched_fit(A2C(), copied(data))
    assert torch.equal(second.final_weights, first.final_weights)


def test_no_workers_start_without_a_fit_that_ends_them():
    data = cartpole(2)
    watched_fit(A2C(), data)
    with pytest.raises(ConfigurationError, match=r"train_dataloader\(\) starts workers for a"):
        quiet_trainer().fit(A2C(), train_dataloaders=data.train_dataloader())


def test_a_data_module_serves_a_second_learner():
    data = cartpole(3)
    first, second = watched_fit(A2C(), data), watched_fit(A2C(), data)
    assert first.versions == second.versions == [0, 0, 1]
    one, other = (watch.rounds[0]["observation"][:, 0] for watch in (first, second))
    assert torch.equal(one, other)


class Plain(LightningModule):
    """A user's own, which notes the shapes of its rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.shapes = make_actor_critic("mlp", cartpole().env_spec), []

    def training_step(self, part, _):
        self.shapes.append(tuple(part.round.shape))
        value = self.policy.get_value_operator()(part.round.select("observation"))
        return value["state_value"].mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")
class TestAModuleOfTheUsersOwn:
    def test_rounds_reach_it(self):
        module = Plain()
        quiet_trainer().fit(module, datamodule=cartpole(2))
        assert module.shapes == [(4, 8), (4, 8)]

    @pytest.mark.parametrize(
        ("setting", "keeper"),
        [("normalize_observation", "RoundModule"), ("normalize_reward", "Learner")],
    )
    def test_statistics_that_it_does_not_keep_are_refused(self, setting, keeper):
        data = cartpole(2, **{setting: True})
        said = f"^{setting}=true: a Plain keeps no statistics; a hts_torchrl.{keeper} does$"
        with pytest.raises(ConfigurationError, match=said):
            quiet_trainer().fit(Plain(), datamodule=data)
        assert multiprocessing.active_children() == []


def test_a_learner_of_this_package_is_handed_what_it_reads_and_any_other_all_outputs():
    class Reading(A2C):
        reads_all_outputs = True

    for learner, others in ((A2C(), set()), (Reading(), {"hidden", "logits"})):
        written = set(watched_fit(learner, cartpole(2)).rounds[0].keys())
        assert written & {"action", "state_value", "hidden", "logits"} == (
            {"action", "state_value"} | others
        )


def test_a_learner_is_handed_views_of_two_storages_in_turn():
    class Places(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):  # noqa: ARG002
            places.append(batch.round["next", "reward"].data_ptr())

    places = []
    watched_fit(A2C(), cartpole(4), callbacks=[Places()])
    assert len(set(places)) == 2
    assert places[:2] == places[2:]


class TestCollection:
    def test_another_name_is_refused(self):
        with pytest.raises(ConfigurationError, match="collection='queue'; one of rounds, actors"):
            cartpole(collection="queue")

    @pytest.mark.parametrize("form", ["actors", "server"])
    def test_normalised_rewards_are_refused_before_anything_starts(self, form):
        data = cartpole(collection=form, normalize_reward=True)
        with pytest.raises(ConfigurationError, match=f"collection={form}: .* collection=rounds"):
            watched_fit(Impala(), data)
        assert multiprocessing.active_children() == []

    @pytest.mark.parametrize("form", ["actors", "server"])
    def test_a_compiled_policy_is_refused_before_anything_starts(self, form):
        data = cartpole(collection=form, compile_policy=True)
        with pytest.raises(ConfigurationError, match=f"collection={form} compiles no policy: "):
            watched_fit(Impala(), data)
        assert multiprocessing.active_children() == []

    @pytest.mark.parametrize("form", ["actors", "server"])
    def test_a_learner_that_corrects_no_lag_is_refused_before_anything_starts(self, form):
        data = cartpole(collection=form)
        with pytest.raises(ConfigurationError, match=f"collection={form} needs .* model=Impala"):
            watched_fit(A2C(), data)
        assert multiprocessing.active_children() == []


def lazy_recurrent() -> ProbabilisticTensorDictSequential:
    """A policy whose layers get their shapes in the first pass, in which it makes a number."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(lambda seen: seen * torch.tensor(2.0), ["observation"], ["doubled"]),
        TensorDictModule(nn.LazyLinear(4), ["doubled"], ["features"]),
        GRUModule(4, 5, in_key="features", out_key="hidden", python_based=True),
        TensorDictModule(nn.LazyLinear(2), ["hidden"], ["logits"]),
        ValueOperator(nn.LazyLinear(1), in_keys=["hidden"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=OneHotCategorical, return_log_prob=True
        ),
    )


class TestActorsOfAnotherDevice:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"cudagraph_policy": True}, "cudagraph_policy=True: actors compute on 'cpu'"),
            ({"policy_device": "xpu:77"}, "policy_device='xpu:77'; a device of this machine"),
        ],
    )
    def test_what_is_not_there_is_refused(self, settings, message):
        with pytest.raises(ConfigurationError, match=message):
            watched_fit(A2C(), cartpole(**settings))

    @pytest.mark.parametrize("settings", [{"cudagraph_policy": True}, {"policy_device": "cpu"}])
    def test_a_baseline_whose_actors_are_others_refuses_them(self, settings):
        data = cartpole(collection="actors", num_actors=1, **settings)
        (name,) = settings
        with pytest.raises(ConfigurationError, match=f"^collection=actors: .* leave {name}="):
            watched_fit(Impala(), data)

    def test_a_short_fit_has_them_too(self):
        data = cartpole(policy_device="cuda:1", cudagraph_policy=True)
        data = data_of_short_fit(data, 1)
        assert (data.policy_device, data.cudagraph_policy) == ("cuda:1", True)

    def test_environment_and_lazy_policy_are_asked_on_the_cpu(self):
        """Not where the Trainer builds policies: tensors of a GPU are no arrays."""
        learner, data = A2C(lazy_recurrent()), cartpole(env=lambda: GymEnv("CartPole-v1"))
        with torch.device("meta"):
            learner.prepare_policy(data)
        assert data.env_spec.action.sizes == (2,)
        assert {each.device.type for each in learner.parameters()} == {"cpu"}

    def test_a_round_is_moved_once_for_all_of_its_parts(self):
        data, device = cartpole(), torch.device("meta")

        def moved(batch, index):
            return data.transfer_batch_to_device(RoundSlice(batch, index, 2), device, 0).round

        rounds = [TensorDict({"reward": torch.ones(2, 3)}, [2, 3]) for _ in range(2)]
        first, second = ([moved(batch, index) for index in (0, 1)] for batch in rounds)
        assert first[0]["reward"].device == device
        assert first[1] is first[0]
        assert second[1] is second[0] is not first[0]

    def test_a_batch_of_the_users_own_is_moved_as_lightning_does(self):
        data, device = cartpole(), torch.device("meta")
        example = {"observation": torch.ones(2, 4)}
        moved = data.transfer_batch_to_device(example, device, 0)
        assert moved["observation"].device == device

    def test_an_evaluation_has_nothing_to_move(self):
        data = cartpole()
        evaluation = data.evaluation(precision="32-true")
        assert data.transfer_batch_to_device(evaluation, torch.device("meta"), 0) is evaluation


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"total_frames": None}, "total_frames=None; a whole number"),
        ({"total_frames": "1e6"}, "total_frames='1e6'; a whole number"),
        ({"evaluation_episodes": None}, "evaluation_episodes=None; a whole number"),
        ({"evaluation_episodes": 2.5}, r"evaluation_episodes=2\.5; a whole number"),
        ({"evaluation_frames": "100"}, "evaluation_frames='100'; a whole number"),
        ({"normalize_reward": "false"}, "normalize_reward='false'; True or False"),
    ],
)
def test_a_setting_of_another_type_is_refused_by_name(settings, told):
    with pytest.raises(ConfigurationError, match=told):
        cartpole(**settings)
