"""What a run tells about itself."""

import copy
import csv
import errno
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from matplotlib.figure import Figure
from tensordict import TensorDict

from hts_torchrl import A2C, PPO, AtariEnvs, HTSDataModule, make_actor_critic
from hts_torchrl.errors import ConfigurationError, NotFiniteError, WorkerError
from hts_torchrl.training.callbacks import (
    LearningCurve,
    RoundTrace,
    StopTogether,
    TrainingStatistics,
    statistics,
)
from hts_torchrl.training.callbacks.round_end import StopAfterRound
from hts_torchrl.training.callbacks.stop_together import Stopped
from hts_torchrl.training.round_slice import RoundSlice
from tests.fakes import CoordinateEnvs
from tests.fits import cartpole, flat, quiet_trainer, watched_fit
from tests.policies import echo_policy


def run(directory, data, learner=None, **settings):
    """Train with both callbacks; returns them and the rows of ``metrics.csv``."""
    numbers, curve = TrainingStatistics(), LearningCurve()
    settings = {
        "logger": CSVLogger(directory, name="", version=""),
        "callbacks": [numbers, curve],
        "log_every_n_steps": 1,
        "limit_val_batches": 1,
        **settings,
    }
    quiet_trainer(**settings).fit(learner or A2C(), datamodule=data)
    with (directory / "metrics.csv").open() as file:
        return numbers, curve, list(csv.DictReader(file))


def column(rows, name):
    return [float(row[name]) for row in rows if row.get(name)]


def known_games(rounds=10, **settings):
    """Two environments with games of 3 steps whose scores are known but for the actions' 64ths."""
    return cartpole(
        rounds, env=CoordinateEnvs(lengths=(3,)), num_envs=2, frames_per_batch=6, **settings
    )


class TestTrainingStatistics:
    def test_games_are_counted_when_they_end_and_the_return_is_their_mean(self, tmp_path):
        numbers, _, rows = run(tmp_path, known_games(10, evaluation_episodes=2), A2C(echo_policy()))
        assert numbers.episodes == 20
        assert set(column(rows, "episode/length")) == {3.0}
        # Environment n gives n + step / 8, and action / 64 with actions from 0 to 3.
        lowest = np.mean([6 / 8, 3 + 6 / 8])
        assert lowest <= numbers.mean_return <= lowest + 9 / 64
        assert column(rows, "episode/return")[-1] == pytest.approx(numbers.mean_return, rel=1e-5)

    def test_only_the_last_100_games_count(self):
        numbers = TrainingStatistics()
        numbers._returns.extend(float(score) for score in range(250))
        assert numbers.mean_return == np.mean(range(150, 250))

    def test_the_last_games_of_a_round_are_those_of_all_its_environments(self, monkeypatch):
        monkeypatch.setattr(statistics, "set_callback_metrics", lambda *_: None)
        score_of_env = torch.tensor([0.0, 1.0]).view(2, 1, 1)
        after = {
            "episode_end": torch.ones(2, 100, 1, dtype=torch.bool),
            "episode_reward": score_of_env.expand(2, 100, 1),
            "step_count": torch.ones(2, 100, 1, dtype=torch.int64),
        }
        part = RoundSlice(TensorDict({"next": TensorDict(after, [2, 100])}, [2, 100]), 0, 1)
        numbers = TrainingStatistics()
        trainer = SimpleNamespace(world_size=1, log_every_n_steps=0)
        numbers.on_train_batch_end(trainer, None, None, part)
        assert (numbers.mean_return, numbers.episodes) == (0.5, 200)

    def test_games_of_another_rank_count_too(self, monkeypatch):
        """Or a callback that monitors them would miss them on a rank whose games go on."""
        others = {torch.bool: True, torch.float32: 5.0, torch.int64: 7}
        monkeypatch.setattr(
            statistics,
            "of_all_ranks",
            lambda own: [own, torch.full_like(own, others[own.dtype])],
        )
        after = {
            "episode_end": torch.tensor([[False]]),
            "episode_reward": torch.tensor([[1.0]]),
            "step_count": torch.tensor([[3]]),
        }
        monkeypatch.setattr(statistics, "set_callback_metrics", lambda *_: None)
        numbers = TrainingStatistics()
        trainer = SimpleNamespace(world_size=2, log_every_n_steps=0)
        part = RoundSlice(TensorDict({"next": TensorDict(after, [1, 1])}, [1, 1]), 0, 1)
        numbers.on_train_batch_end(trainer, None, None, part)
        assert (numbers.mean_return, numbers.episodes, numbers._lengths[0]) == (5.0, 1, 7)

    def test_before_the_first_game_ends_there_is_no_return(self):
        assert TrainingStatistics().mean_return is None

    def test_scores_are_the_games_own_where_rewards_are_clipped(self, tmp_path):
        """Each pellet of Ms. Pac-Man brings 10 points, of which the learner sees 1."""
        data = HTSDataModule(
            AtariEnvs("ms_pacman", max_frames=600),
            num_envs=2,
            num_actors=0,
            frames_per_batch=320,
            total_frames=320,
            evaluation_episodes=2,
        )
        watch = watched_fit(A2C(network="nips"), data)
        after = watch.rounds[0]["next"]
        assert after["reward"].max() == 1
        numbers, _, _ = run(tmp_path, data, A2C(network="nips"))
        assert numbers.episodes >= 2
        assert numbers.mean_return >= 10

    @pytest.mark.processes
    def test_the_rendezvous_is_measured_where_there_are_processes(self, tmp_path):
        _, _, rows = run(tmp_path / "two", cartpole(3, num_actors=1, envs_per_executor=2))
        assert len(column(rows, "rendezvous/skew_ms")) == 3
        assert min(column(rows, "rendezvous/skew_ms")) > 0
        assert set(column(rows, "rendezvous/slowest_env")) <= {0.0, 2.0}
        _, _, rows = run(tmp_path / "none", cartpole(3))
        assert column(rows, "rendezvous/skew_ms") == column(rows, "wait/actors") == []
        assert all(0 <= share <= 1 for share in column(rows, "wait/learner"))

    def test_evaluations_say_where_they_stand(self, tmp_path):
        _, _, rows = run(tmp_path, cartpole(4, evaluation_frames=64, evaluation_episodes=1))
        assert column(rows, "eval/frames") == [64, 128]
        assert len(column(rows, "eval/minutes")) == 2

    def test_frames_are_told_exactly_beyond_what_float32_holds(self, tmp_path):
        numbers = TrainingStatistics()
        numbers.frames = 2**24
        data = cartpole(
            2, num_envs=1, frames_per_batch=3, evaluation_frames=3, evaluation_episodes=1
        )
        _, _, rows = run(tmp_path, data, callbacks=[numbers])
        for name in ("train/frames", "eval/frames"):
            assert column(rows, name) == [2**24 + 3, 2**24 + 6]

    def test_minutes_leave_evaluation_out(self, monkeypatch):
        clock = iter([0.0, 60.0, 100.0, 160.0])
        monkeypatch.setattr(statistics.time, "monotonic", lambda: next(clock))
        numbers = TrainingStatistics()
        numbers.on_train_start(None, None)
        numbers.on_validation_start(None, None)
        numbers.on_validation_end(None, None)
        numbers.on_train_end(None, None)
        assert numbers.minutes == 2.0

    def test_minutes_end_with_a_training_that_fails(self, monkeypatch):
        clock = iter([0.0, 60.0, 600.0])
        monkeypatch.setattr(statistics.time, "monotonic", lambda: next(clock))
        numbers = TrainingStatistics()
        numbers.on_train_start(None, None)
        numbers.on_exception(None, None, ArithmeticError())
        assert (numbers.minutes, numbers.minutes) == (1.0, 1.0)

    def test_evaluation_alone_takes_no_minutes(self):
        numbers = TrainingStatistics()
        numbers.on_validation_start(None, None)
        numbers.on_validation_end(None, None)
        assert numbers.minutes == 0.0

    @pytest.mark.processes
    def test_each_role_waits_a_share_of_its_time(self, tmp_path):
        data = cartpole(6, num_actors=1, envs_per_executor=2, evaluation_episodes=1)
        _, _, rows = run(tmp_path, data)
        for role in ("learner", "actors", "executors"):
            shares = column(rows, f"wait/{role}")
            assert len(shares) >= 5
            assert all(0 <= share <= 1 for share in shares)

    def test_neither_waiting_nor_work_is_that_of_an_evaluation(self, monkeypatch):
        monkeypatch.setattr(statistics, "logs_after_batch", lambda _: True)
        pool = {"learner_busy_s": 0.0, "learner_waiting_s": 0.0}
        data = SimpleNamespace(collector=SimpleNamespace(stats=lambda: dict(pool)))
        trainer = SimpleNamespace(world_size=1, datamodule=data)
        logged = {}
        module = SimpleNamespace(log_dict=lambda figures, **_: logged.update(figures))
        entries = {
            "episode_end": torch.tensor([[False]]),
            "episode_reward": torch.tensor([[1.0]]),
            "step_count": torch.tensor([[3]]),
        }
        part = RoundSlice(TensorDict({"next": TensorDict(entries, [1, 1])}, [1, 1]), 0, 1)

        def share_after_round(busy_s, waiting_s):
            pool["learner_busy_s"] += busy_s
            pool["learner_waiting_s"] += waiting_s
            logged.clear()
            numbers.on_train_batch_end(trainer, module, None, part)
            return logged.get("wait/learner")

        numbers = TrainingStatistics()
        numbers.on_train_start(trainer, module)
        assert share_after_round(1.0, 1.0) == 0.5
        numbers.on_validation_start(trainer, module)
        numbers.on_validation_end(trainer, module)
        assert share_after_round(60.0, 0.0) is None  # it was collected during the evaluation
        assert share_after_round(1.0, 3.0) == 0.75

    def test_the_speed_is_that_of_whole_rounds(self, tmp_path):
        learner, data = PPO(epochs=2, minibatches=2), cartpole(6, evaluation_episodes=1)
        _, _, rows = run(tmp_path, data, learner, log_every_n_steps=3)  # also after a whole round
        assert len(column(rows, "train/frames")) == 4 * 6 / 3
        speeds = column(rows, "steps_per_second")  # Lightning repeats them until there are others
        assert len(set(speeds)) == 6
        assert min(speeds) > 0

    def test_the_return_can_be_monitored_from_the_first_evaluation_on(self):
        stop = EarlyStopping("episode/return", mode="max", stopping_threshold=-1e9)
        trainer = quiet_trainer(callbacks=[TrainingStatistics(), stop], limit_val_batches=1)
        games = known_games(10, evaluation_episodes=1, evaluation_frames=12)
        trainer.fit(A2C(echo_policy()), games)
        assert trainer.global_step == 2

    def test_the_return_can_be_monitored_after_each_round_however_rarely_it_is_logged(self):
        class Reads(Callback):
            def __init__(self):
                self.seen = []

            def on_train_batch_end(self, trainer, *_):
                self.seen.append(trainer.callback_metrics["episode/return"].item())

        reads, learner = Reads(), A2C(echo_policy())
        callbacks = [TrainingStatistics(), reads]
        watch = watched_fit(learner, known_games(10), callbacks=callbacks, log_every_n_steps=4)
        after = [batch["next"] for batch in watch.rounds]
        scores = torch.stack([each["episode_reward"][each["episode_end"]] for each in after])
        means = [scores[:rounds].mean().item() for rounds in range(1, 11)]
        assert reads.seen == pytest.approx(means)
        assert len(set(reads.seen)) > 4

    def test_figures_come_every_log_every_n_steps(self, tmp_path):
        learner, data = PPO(epochs=2, minibatches=2), cartpole(6, evaluation_episodes=1)
        _, _, rows = run(tmp_path, data, learner, log_every_n_steps=8)
        assert column(rows, "train/frames") == [64, 128, 192]

    @pytest.mark.parametrize("chunks", [1, 2])
    def test_every_0_steps_is_never_as_lightning_has_it(self, tmp_path, chunks):
        callbacks = [numbers := TrainingStatistics(), LearningCurve()]
        logger = CSVLogger(tmp_path)
        trainer = quiet_trainer(log_every_n_steps=0, logger=logger, callbacks=callbacks)
        trainer.fit(A2C(echo_policy(), gradient_chunks=chunks), datamodule=known_games(10))
        assert (numbers.frames, numbers.episodes) == (60, 20)
        assert {name.partition("/")[0] for name in trainer.callback_metrics} == {"episode", "loss"}
        assert [path.name for path in tmp_path.rglob("*.*")] == ["hparams.yaml"]

    def test_barebones_trains_to_the_same_weights(self):
        left_to_lightning = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        barebones = {**dict.fromkeys([*left_to_lightning, "logger"]), "barebones": True}
        one = A2C(policy := make_actor_critic("mlp", cartpole().env_spec))
        other = A2C(copy.deepcopy(policy))
        watched_fit(one, cartpole(3))
        watched_fit(other, cartpole(3), **barebones)
        torch.testing.assert_close(
            other.policy.state_dict(), one.policy.state_dict(), rtol=0, atol=0
        )

    def test_the_state_goes_on_counting(self):
        numbers, other = TrainingStatistics(), TrainingStatistics()
        numbers.frames, numbers.episodes, numbers._earlier_s = 7, 3, 90.0
        numbers._returns.extend([1.0, 4.0])
        other._returns.extend([100.0])  # of this Trainer's run before
        other.load_state_dict(numbers.state_dict())
        assert (other.frames, other.episodes, other.minutes) == (7, 3, 1.5)
        assert other.mean_return == 2.5


class TestLearningCurve:
    def test_it_holds_scores_of_training_and_evaluation_and_draws_them_where_the_logs_are(
        self, tmp_path
    ):
        data = known_games(10, evaluation_frames=12, evaluation_episodes=2)
        numbers, curve, rows = run(tmp_path, data, A2C(echo_policy()))
        assert curve.path == tmp_path / "learning_curve.png"
        pixels = matplotlib.image.imread(curve.path)
        assert pixels.shape == (480, 1200, 4)
        # White paper, and both curves: blue and orange of matplotlib's default cycle.
        colours = {
            tuple(np.round(colour[:3] * 255).astype(int)) for colour in pixels.reshape(-1, 4)
        }
        assert {(255, 255, 255), (31, 119, 180), (255, 127, 14)} <= colours
        state = curve.state_dict()
        assert state["evaluation"]["frames"] == [12, 24, 36, 48, 60]
        assert state["evaluation"]["scores"] == pytest.approx(column(rows, "eval/score"))
        assert state["training"]["frames"] == list(range(6, 61, 6))
        assert state["training"]["scores"][-1] == numbers.mean_return

    def test_each_round_in_which_something_is_logged_is_a_point(self, tmp_path):
        """Of 4 steps each: the 6th, 12th, 18th and 24th are in the rounds 2, 3, 5 and 6."""
        learner, data = PPO(echo_policy(), epochs=2, minibatches=2), known_games(6)
        _, curve, _ = run(tmp_path, data, learner, log_every_n_steps=6, limit_val_batches=0)
        assert curve.state_dict()["training"]["frames"] == [12, 18, 30, 36]

    def test_it_keeps_at_most_500_points_of_training(self, tmp_path, monkeypatch):
        monkeypatch.setattr("hts_torchrl.training.callbacks.learning_curve._TRAINING_POINTS", 4)
        _, curve, _ = run(tmp_path, known_games(10, evaluation_episodes=2), A2C(echo_policy()))
        training = curve.state_dict()["training"]
        assert len(training["frames"]) == len(training["scores"]) == len(training["minutes"]) <= 4
        assert training["frames"][-1] == 60

    def test_one_that_a_full_disk_refuses_is_not_told(self, tmp_path, monkeypatch):
        def fill(path, *_, **__):
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Figure, "savefig", lambda _, *arguments, **__: fill(*arguments))
        curve = LearningCurve()
        with pytest.raises(OSError, match="No space left"):
            run(
                tmp_path,
                known_games(1),
                A2C(echo_policy()),
                callbacks=[TrainingStatistics(), curve],
            )
        assert curve.path is None
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hparams.yaml", "metrics.csv"]

    def test_it_needs_the_statistics(self, tmp_path):
        with pytest.raises(ConfigurationError, match="TrainingStatistics"):
            run(tmp_path, cartpole(1), callbacks=[LearningCurve()])

    def test_the_state_draws_on(self):
        one, other = LearningCurve(), LearningCurve()
        one._training["scores"].append(3.0)
        one._evaluation["scores"].append(5.0)
        other.load_state_dict(one.state_dict())
        assert other.state_dict() == one.state_dict()
        assert other.state_dict()["evaluation"]["scores"] == [5.0]


class Ranks:
    """Stands for the Trainer of one of several ranks; the others have noted ``others``."""

    def __init__(self, others=0, local_rank=0, world_size=2, auto_requeue=None):
        self.world_size, self.local_rank = world_size, local_rank
        self.checkpoint_callbacks = [ModelCheckpoint(save_on_exception=True)]
        self.root_device, self.others = torch.device("cpu"), others
        self.strategy = self
        slurm = None if auto_requeue is None else SLURMEnvironment(auto_requeue)
        self._accelerator_connector = SimpleNamespace(cluster_environment=slurm)
        self._signal_connector = SimpleNamespace()
        self.requeued = []
        if auto_requeue:
            self._signal_connector._slurm_sigusr_handler_fn = self._requeue

    def _requeue(self, number, frame):  # noqa: ARG002
        self.requeued.append(number)

    def reduce(self, tensor, reduce_op):
        assert reduce_op == "max"
        return torch.maximum(tensor, torch.tensor(self.others))


PARTS = [RoundSlice(None, index, 2) for index in range(2)]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture
def stop(request):
    """The callback, set up for a rank, and its Trainer."""
    callback, trainer = StopTogether(ModelCheckpoint()), Ranks(**getattr(request, "param", {}))
    before = [signal.getsignal(number) for number in SIGNALS]
    callback.setup(trainer, None, "fit")
    yield callback, trainer
    callback.teardown(trainer, None, "fit")
    assert [signal.getsignal(number) for number in SIGNALS] == before


class TestStopTogether:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_is_answered_at_the_start_of_the_next_round(self, stop, number):
        callback, trainer = stop
        callback.on_train_batch_start(trainer, None, PARTS[0], 0)
        signal.raise_signal(number)
        callback.on_train_batch_start(trainer, None, PARTS[1], 1)
        with pytest.raises(SIGTERMException) as stopped:
            callback.on_train_batch_start(trainer, None, PARTS[0], 2)
        assert stopped.value.code == 128 + number

    @pytest.mark.parametrize("stop", [{"others": signal.SIGINT, "local_rank": 1}], indirect=True)
    def test_a_signal_to_another_rank_ends_this_one_too_and_without_an_error(self, stop):
        callback, trainer = stop
        with pytest.raises(SIGTERMException) as stopped:
            callback.on_train_batch_start(trainer, None, PARTS[0], 0)
        assert stopped.value.code == 0

    @pytest.mark.parametrize("stop", [{"others": signal.SIGTERM}], indirect=True)
    def test_a_signal_to_another_host_is_the_status_of_this_ones_command(self, stop):
        callback, trainer = stop
        with pytest.raises(SIGTERMException) as stopped:
            callback.on_train_batch_start(trainer, None, PARTS[0], 0)
        assert stopped.value.code == 128 + signal.SIGTERM

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_that_is_put_off_is_told_once(self, stop, number, caplog):
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert stop[0]._noted == {number}
        [message] = caplog.messages
        assert message.startswith(f"{signal.Signals(number).name}: all ranks end at the start of")

    @pytest.mark.usefixtures("stop")
    def test_a_rank_whose_launcher_has_ended_leaves_wherever_it_is(self, monkeypatch):
        ended = subprocess.Popen(["true"])
        ended.wait()
        monkeypatch.setenv("HTS_TORCHRL_LAUNCHER", str(ended.pid))
        with pytest.raises(SystemExit) as left:
            signal.raise_signal(signal.SIGTERM)
        assert left.value.code == 128 + signal.SIGTERM

    @pytest.mark.parametrize("launcher", [os.getpid, os.getppid])
    def test_one_whose_launcher_runs_does_not(self, stop, launcher, monkeypatch):
        monkeypatch.setenv("HTS_TORCHRL_LAUNCHER", str(launcher()))
        signal.raise_signal(signal.SIGTERM)
        assert stop[0]._noted == {signal.SIGTERM}

    def test_lightning_is_kept_from_broadcasting_within_a_signal(self, stop):
        callback, trainer = stop
        assert trainer._signal_connector._sigterm_notifier_fn == callback._note

    @pytest.mark.parametrize("stop", [{"auto_requeue": True}], indirect=True)
    def test_slurms_signal_to_requeue_is_lightnings_at_the_start_of_a_round(self, stop):
        callback, trainer = stop
        assert signal.getsignal(signal.SIGUSR1) == callback._note  # else it ends this process
        signal.raise_signal(signal.SIGUSR1)
        callback.on_train_batch_start(trainer, None, PARTS[1], 1)
        assert trainer.requeued == []
        callback.on_train_batch_start(trainer, None, PARTS[0], 2)
        assert trainer.requeued == [signal.SIGUSR1]

    @pytest.mark.parametrize(
        "stop", [{"auto_requeue": True, "others": signal.SIGUSR1}], indirect=True
    )
    def test_that_signal_is_answered_once_though_it_comes_later_here(self, stop):
        callback, trainer = stop
        callback.on_train_batch_start(trainer, None, PARTS[0], 0)
        trainer.others = 0
        signal.raise_signal(signal.SIGUSR1)
        callback.on_train_batch_start(trainer, None, PARTS[0], 2)
        assert trainer.requeued == [signal.SIGUSR1]
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SIGTERMException):
            callback.on_train_batch_start(trainer, None, PARTS[0], 4)

    @pytest.mark.parametrize("stop", [{"auto_requeue": True}], indirect=True)
    def test_a_job_that_is_told_to_end_is_not_requeued(self, stop):
        callback, trainer = stop
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(SIGTERMException):
            callback.on_train_batch_start(trainer, None, PARTS[0], 0)
        assert trainer.requeued == []

    @pytest.mark.parametrize("stop", [{}, {"auto_requeue": False}], indirect=True)
    def test_that_signal_is_left_alone_where_nothing_is_requeued(self, stop):
        assert signal.getsignal(signal.SIGUSR1) != stop[0]._note

    @pytest.mark.parametrize(
        ("error", "saves"),
        [(Stopped(143), True), (NotFiniteError(), True), (WorkerError(None, ""), False)],
    )
    def test_ranks_save_only_what_ends_all_of_them(self, stop, error, saves):
        callback, trainer = stop
        trainer._signal_connector._original_handlers = {}
        callback.on_exception(trainer, None, error)
        assert callback._last.save_on_exception == saves
        assert trainer.checkpoint_callbacks[0].save_on_exception == saves  # a user's

    def test_signals_end_the_program_again_after_an_exception(self):
        before = [signal.getsignal(number) for number in SIGNALS]
        callback, trainer = StopTogether(), quiet_trainer(devices=2, strategy="ddp")
        callback.setup(trainer, None, "fit")
        trainer._signal_connector.register_signal_handlers()
        callback.on_exception(trainer, None, ArithmeticError())
        trainer._signal_connector.teardown()  # as Lightning does then
        assert [signal.getsignal(number) for number in SIGNALS] == before

    @pytest.mark.parametrize(("devices", "given", "wanted"), [(2, 0, 1), (2, 1, 1), (1, 0, 0)])
    def test_the_data_module_adds_it_to_several_ranks_that_have_none(self, devices, given, wanted):
        strategy = {"strategy": "ddp"} if devices > 1 else {}
        trainer = quiet_trainer(
            devices=devices, callbacks=[StopTogether() for _ in range(given)], **strategy
        )
        data = cartpole(1)
        data.trainer = trainer
        data.setup("fit")
        assert sum(isinstance(each, StopTogether) for each in trainer.callbacks) == wanted

    def test_a_fit_in_another_thread_has_no_signals_to_note(self):
        before, trainer = signal.getsignal(signal.SIGTERM), Ranks()
        with ThreadPoolExecutor(1) as thread:
            thread.submit(StopTogether().setup, trainer, None, "fit").result()
        assert signal.getsignal(signal.SIGTERM) is before
        assert vars(trainer._signal_connector) == {}

    @pytest.mark.parametrize("stop", [{"world_size": 1}], indirect=True)
    def test_a_single_rank_is_left_to_lightning(self, stop):
        callback, trainer = stop
        assert signal.getsignal(signal.SIGTERM) != callback._note
        assert vars(trainer._signal_connector) == {}


def test_a_checkpoint_holds_the_displaced_weights(tmp_path):
    watch = watched_fit(
        PPO(epochs=2, minibatches=1, learning_rate=0.01, delayed_step="displacement"),
        cartpole(4),
        callbacks=[ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=6)],
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    content = torch.load(tmp_path / "step=6.ckpt", weights_only=True)
    saved = torch.cat([value.flatten() for value in content["state_dict"].values()])
    assert content["updates"] == 3
    assert torch.equal(saved, watch.round_weights[3])


class Stopping(Callback):
    """Asks the Trainer to stop after a part, as Timer and EarlyStopping do."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):  # noqa: ARG002
        trainer.should_stop = batch_idx == 5  # and does not ask again


class StopsItself(PPO):
    """Asks in a hook of its own, which comes after those of all callbacks."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.trainer.should_stop |= batch_idx == 5


class TestStopAfterRound:
    """Parts 4 to 7 are the second round's."""

    def test_a_round_is_learned_to_its_end_and_then_evaluated_and_saved(self, tmp_path):
        learner, saves = PPO(epochs=2, minibatches=2), ModelCheckpoint(tmp_path)
        trainer = quiet_trainer(
            callbacks=[Stopping(), saves], limit_val_batches=1, enable_checkpointing=True
        )
        trainer.fit(learner, cartpole(4, evaluation_episodes=1))
        saved = torch.load(saves.best_model_path, weights_only=True)
        assert trainer.global_step == saved["global_step"] == 8
        assert trainer.callback_metrics["eval/updates"] == saved["updates"] == 2

    def test_so_it_is_where_the_module_itself_asks(self, tmp_path):
        learner, saves = StopsItself(epochs=2, minibatches=2), ModelCheckpoint(tmp_path)
        trainer = quiet_trainer(callbacks=[saves], limit_val_batches=1, enable_checkpointing=True)
        trainer.fit(learner, cartpole(4, evaluation_episodes=1))
        saved = torch.load(saves.best_model_path, weights_only=True)
        assert trainer.global_step == saved["global_step"] == 8
        assert trainer.callback_metrics["eval/updates"] == saved["updates"] == 2
        assert trainer.min_epochs == 0  # as Lightning has it

    @pytest.mark.parametrize("others", [False, True])
    def test_where_one_rank_asks_all_stop(self, others):
        def reduce_boolean_decision(own, all):
            assert not all
            return own or others

        callback = StopAfterRound(0)
        ranks = SimpleNamespace(reduce_boolean_decision=reduce_boolean_decision)
        trainer = SimpleNamespace(
            should_stop=False, fit_loop=SimpleNamespace(), strategy=ranks, world_size=2
        )
        stops = []
        for part in PARTS:
            callback.on_train_batch_end(trainer, None, None, part)
            stops.append(trainer.should_stop)
        assert stops == [False, others]

    def test_a_module_that_is_no_learner_can_be_resumed_from_there(self, tmp_path):
        saves = ModelCheckpoint(tmp_path)
        trainer = quiet_trainer(callbacks=[Stopping(), saves], enable_checkpointing=True)
        trainer.fit(InParts(), cartpole(4))
        saved = torch.load(saves.best_model_path, weights_only=True)
        assert saved["global_step"] == 8
        assert not saved["HTSDataModule"].get("cut_off")

    def test_a_run_after_one_that_failed_is_not_asked_to_stop(self):
        failing = Failing()
        trainer = quiet_trainer(callbacks=[failing])
        with pytest.raises(ArithmeticError):
            trainer.fit(PPO(epochs=2, minibatches=2), cartpole(4))
        assert trainer.min_epochs == 0  # as Lightning has it
        trainer.callbacks.remove(failing)
        learner = PPO(epochs=2, minibatches=2)
        trainer.fit(learner, cartpole(4))
        assert learner.updates == 4
        assert not any(isinstance(each, StopAfterRound) for each in trainer.callbacks)


class CutOff(Callback):
    """Notes the weights, saves a checkpoint while the averages are played, and presses Ctrl-C."""

    def __init__(self, path):
        self.path = path

    def on_validation_start(self, trainer, pl_module):  # noqa: ARG002
        self.weights = flat(pl_module.policy)

    def on_validation_batch_start(self, trainer, pl_module, *_):
        self.averages = flat(pl_module.policy)
        trainer.save_checkpoint(self.path)
        raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model")
def test_an_evaluation_of_averages_that_is_cut_off_leaves_the_weights_in_the_policy(tmp_path):
    cut, averages = CutOff(tmp_path / "within.ckpt"), EMAWeightAveraging(decay=0.5)
    learner = A2C(learning_rate=0.01)
    trainer = quiet_trainer(callbacks=[averages, cut], limit_val_batches=1)
    with pytest.raises(SystemExit):
        trainer.fit(learner, cartpole(3, evaluation_episodes=1))
    assert not torch.equal(cut.averages, cut.weights)
    assert torch.equal(flat(learner.policy), cut.weights)
    saved = torch.load(cut.path, weights_only=True)
    for name, expected in (("current_model_state", cut.weights), ("state_dict", cut.averages)):
        weights = saved[name].items()
        found = [value.flatten() for name, value in weights if name.startswith("policy.")]
        assert torch.equal(torch.cat(found), expected)


class Failing(Stopping):
    """Fails in the next part of the same round."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):  # noqa: ARG002
        if batch_idx == 6:
            raise ArithmeticError


class InParts(LightningModule):
    """A policy gradient of nothing but this package's policy, in four parts a round."""

    parts_per_round = 4

    def __init__(self):
        super().__init__()
        self.policy = make_actor_critic("mlp", cartpole().env_spec)

    def training_step(self, part, _):
        distribution = self.policy.get_dist(part.round.select("observation"))
        return -distribution.log_prob(part.round["action"]).mean()

    def validation_step(self, evaluation, index):
        """Nothing: Lightning warns where there is none."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.policy.parameters(), 0.01)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("10",), "round_index='10'; a whole number"),
        ((2.5,), r"round_index=2\.5; a whole number"),
        ((2, "."), "path=. of a trace is a folder; the name of a file"),
    ],
)
def test_a_trace_of_no_round_or_into_no_file_is_refused(arguments, told):
    with pytest.raises(ConfigurationError, match=told):
        RoundTrace(*arguments)


def test_a_trace_that_a_full_disk_cuts_off_leaves_no_file(tmp_path, monkeypatch):
    def fill(path, text):
        path.write_bytes(text[:9].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fill)
    path = tmp_path / "trace.json"
    with pytest.raises(OSError, match="No space left"):
        RoundTrace(3, path)._write({"executor 0": [(0.0, 1.0)]}, path)
    assert not list(tmp_path.iterdir())


def test_a_trace_without_a_data_module_is_refused():
    trainer = SimpleNamespace(datamodule=None)
    with pytest.raises(ConfigurationError, match="trace=2: a run without HTSDataModule has no"):
        RoundTrace(2).on_train_start(trainer, A2C())
