"""A run that is stopped and resumed has the bits of one that was never stopped."""

from __future__ import annotations

import copy
import math
import random
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import nn
from torchrl.envs import GymEnv, NoopResetEnv, TransformedEnv
from torchrl.modules import ValueOperator

from hts_torchrl import (
    A2C,
    PPO,
    AtariEnvs,
    ConfigurationError,
    EnvPoolEnvs,
    FootballEnvs,
    GymEnvs,
    HTSCollector,
    PettingZooEnvs,
    make_actor_critic,
)
from hts_torchrl.envs import envpool
from hts_torchrl.envs.atari import AtariGroup
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.errors import ReplayError
from hts_torchrl.learner.optimizers import OnePassRMSprop
from hts_torchrl.training.callbacks import LastCheckpoint, LearningCurve, TrainingStatistics
from tests.determinism.tasks import (
    CARTPOLE,
    DECAYING_A2C,
    LEARNINGS,
    SHORT_PPO,
    SPECIAL_LEARNINGS,
    Learning,
)
from tests.fakes import CoordinateEnvs
from tests.fits import (
    RESUMES,
    Watch,
    cartpole,
    checkpoints,
    quiet_trainer,
    saving,
    watched_fit,
)
from tests.policies import categorical_actor
from tests.runs import digest, perturbed
from tests.unit.collectors.test_hts import collect
from tests.unit.envs.test_own_generators import LotteryEnv

pytestmark = RESUMES

ROUNDS = 6
PONG = AtariEnvs("pong", sticky_actions=0.25, max_frames=200)
# Of ours, and known: what is tested is that the bits do not suffer.
TWO_MODES = "ignore:the policy learns in train mode and acts in eval mode"

QUICK_SPECIAL_LEARNINGS = (
    "A2C gradient",
    "A2C dropout",
    "PPO normalised",
    "PPO gru",
    "PPO statistics",
)
STEADY = {
    "steady A2C": Learning(partial(A2C, learning_rate=0.01)),
    "steady PPO": Learning(partial(PPO, epochs=2, minibatches=2)),
    "PPO displacement": LEARNINGS["PPO displacement"],
}


OPTIMIZERS = {
    "A2C AdamW": Learning(partial(DECAYING_A2C, optimizer="AdamW")),
    "PPO Muon": Learning(partial(SHORT_PPO, optimizer="muon")),
    "PPO SGD": Learning(partial(SHORT_PPO, optimizer="sgd", optimizer_kwargs={"momentum": 0.5})),
}


@dataclass
class Run:
    """What can be seen of a training run."""

    watch: Watch
    optimizer: dict[str, Any]
    statistics: TrainingStatistics
    curve: LearningCurve
    updates: list[int]
    buffers: dict[str, torch.Tensor]

    def ends_like(self, whole: Run) -> bool:
        """Whether this run, resumed, has the bits of the end of another."""
        rounds = len(self.watch.rounds)
        assert 0 < rounds <= ROUNDS
        assert digest(self.watch.rounds) == digest(whole.watch.rounds[-rounds:])
        assert torch.equal(self.watch.final_weights, whole.watch.final_weights)
        assert self.buffers.keys() == whole.buffers.keys()
        assert all(torch.equal(mine, whole.buffers[name]) for name, mine in self.buffers.items())
        assert self.optimizer["param_groups"] == whole.optimizer["param_groups"]
        for number, values in whole.optimizer["state"].items():
            mine = self.optimizer["state"][number]
            assert all(torch.equal(mine[name], value) for name, value in values.items())
        steps = len(self.watch.learning_rates)
        assert self.watch.learning_rates == whole.watch.learning_rates[-steps:]
        for mine, other in ((self.statistics, whole.statistics), (self.curve, whole.curve)):
            assert without_time(mine.state_dict()) == without_time(other.state_dict())
        return True


def without_time(state: dict[str, Any]) -> dict[str, Any]:
    state = copy.deepcopy(state)
    state.pop("seconds", None)
    for curve in state.values():
        if isinstance(curve, dict):
            curve.pop("minutes")
    return state


class Final(Callback):
    """Keeps the optimiser's state and the policy's buffers when training ends."""

    def on_train_end(self, trainer, pl_module):
        self.buffers = {name: b.clone() for name, b in pl_module.policy.named_buffers()}
        self.optimizer = copy.deepcopy(trainer.optimizers[0].state_dict())
        self.updates = pl_module.updates


def train(learner: str, folder: Path, ckpt_path=None, callbacks=(), **settings) -> Run:
    """Train to the end, in a process whose generator has another state when a run is resumed."""
    torch.manual_seed(0 if ckpt_path is None else 1)
    task = (LEARNINGS | SPECIAL_LEARNINGS | STEADY | OPTIMIZERS)[learner]
    trainer_settings = task.trainer | settings.pop("trainer", {})
    final, statistics, curve = Final(), TrainingStatistics(), LearningCurve()
    settings = {"env": task.env, "evaluation_episodes": 2} | task.data | settings
    watch = watched_fit(
        task.learner(**settings.pop("learner", {})),
        cartpole(ROUNDS, **settings),
        ckpt_path,
        callbacks=[statistics, curve, final, *callbacks],
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        log_every_n_steps=1,
        default_root_dir=folder,
        **trainer_settings,
    )
    return Run(watch, final.optimizer, statistics, curve, [final.updates], final.buffers)


THOROUGH = pytest.mark.thorough
DISPLACEMENT = pytest.param("PPO displacement", marks=THOROUGH)


@pytest.fixture(scope="module", params=["A2C", "PPO", DISPLACEMENT])
def saved(request, tmp_path_factory):
    """A whole run of each algorithm, with a checkpoint after each step of its optimiser."""
    folder = tmp_path_factory.mktemp("saved")
    whole = train(request.param, folder, callbacks=[saving(folder, every_n_train_steps=1)])
    return request.param, folder, whole


@pytest.mark.timeout(300)  # on an overloaded machine; seconds elsewhere
def test_resuming_after_any_step_of_the_optimiser_gives_the_bits_of_the_whole_run(saved, tmp_path):
    """Most steps of PPO are in the middle of a round, which is then learned again."""
    learner, folder, whole = saved
    for path in checkpoints(folder)[:-1]:
        assert train(learner, tmp_path, path).ends_like(whole), path


ENDINGS: dict[str, dict[str, Any]] = {
    "its last step": {"every_n_train_steps": 1},
    "its last evaluation": {"save_on_train_epoch_end": False},
    "the end of its epoch": {"save_on_train_epoch_end": True},
}


@pytest.mark.parametrize(
    "learner", ["steady PPO", pytest.param("steady A2C", marks=THOROUGH), DISPLACEMENT]
)
@pytest.mark.parametrize(
    "ending",
    [pytest.param(name, marks=() if name == "its last step" else THOROUGH) for name in ENDINGS],
)
def test_a_finished_run_is_extended_to_the_bits_of_a_longer_one(learner, ending, tmp_path):
    evaluated = {"trainer": {"limit_val_batches": 1}} if "evaluation" in ending else {}
    half = saving(tmp_path, **ENDINGS[ending])
    train(learner, tmp_path, callbacks=[half], total_frames=ROUNDS // 2 * 32, **evaluated)
    extended = train(learner, tmp_path, checkpoints(tmp_path)[-1])
    whole = train(learner, tmp_path)
    assert len(extended.watch.rounds) == ROUNDS // 2
    if "evaluation" in ending:  # which the longer run has not played
        extended.curve, whole.curve = extended.statistics, whole.statistics
    assert extended.ends_like(whole)


def test_a_checkpoint_holds_tensors_and_plain_values_only(saved):
    _, folder, _ = saved
    content = torch.load(checkpoints(folder)[0], weights_only=True)
    assert content["HTSDataModule"]["games"]["actions"].dtype == torch.uint8


@pytest.mark.processes
def test_another_pool_resumes_with_the_same_bits(saved, tmp_path):
    learner, folder, whole = saved
    path = checkpoints(folder)[len(checkpoints(folder)) // 2]
    pool = {"num_actors": 2, "envs_per_executor": 2}
    assert train(learner, tmp_path, path, **pool).ends_like(whole)


def test_without_its_environments_a_resumed_run_begins_new_games(saved, tmp_path):
    learner, folder, whole = saved
    path = checkpoints(folder)[0]
    run = train(learner, tmp_path, path, resume_envs=False)
    first = run.watch.rounds[0]
    assert (first["next", "step_count"][:, 0] == 1).all()
    old = torch.cat([batch["collector", "traj_ids"].flatten() for batch in whole.watch.rounds])
    assert first["collector", "traj_ids"].min() >= 8 * 4 * (ROUNDS - len(run.watch.rounds))
    assert old.min() == 0


def test_a_run_that_shall_not_resume_them_leaves_environments_out_of_its_checkpoints(tmp_path):
    callbacks = [saving(tmp_path, every_n_train_steps=2)]
    train("A2C", tmp_path, callbacks=callbacks, resume_envs=False)
    content = torch.load(checkpoints(tmp_path)[0], weights_only=True)
    assert "games" not in content["HTSDataModule"]


@pytest.mark.parametrize("learner", ["A2C", pytest.param("PPO", marks=THOROUGH), "PQN"])
def test_resuming_without_delay_gives_the_same_bits(learner, tmp_path):
    callbacks = [saving(tmp_path, every_n_train_steps=3)]
    whole = train(learner, tmp_path, callbacks=callbacks, delay=0)
    for path in checkpoints(tmp_path)[:-1]:
        assert train(learner, tmp_path, path, delay=0).ends_like(whole), path


@pytest.mark.parametrize("learner", [pytest.param("A2C", marks=THOROUGH), "PPO"])
def test_resuming_after_an_evaluation_gives_the_same_bits_and_scores(learner, tmp_path):
    settings = {"evaluation_frames": 64, "trainer": {"limit_val_batches": 1}}
    callbacks = [saving(tmp_path, save_on_train_epoch_end=False)]
    whole = train(learner, tmp_path, callbacks=callbacks, **copy.deepcopy(settings))
    assert len(whole.curve.state_dict()["evaluation"]["scores"]) == 3
    for path in checkpoints(tmp_path)[:-1]:
        resumed = train(learner, tmp_path, path, **copy.deepcopy(settings))
        assert resumed.ends_like(whole), path


@pytest.mark.parametrize(
    ("learner", "limit"), [("steady A2C", 2), ("steady PPO", 8), ("steady PPO", 6)]
)
def test_a_run_of_several_epochs_resumes_in_the_epoch_that_it_was_in(learner, limit, tmp_path):
    """Also where an epoch ends within a round."""
    epochs = {"trainer": {"limit_train_batches": limit, "max_epochs": 2}}
    callbacks = [saving(tmp_path, every_n_train_steps=1)]
    whole = train(learner, tmp_path, callbacks=callbacks, **copy.deepcopy(epochs))
    assert len(checkpoints(tmp_path)) == 2 * limit
    for path in checkpoints(tmp_path)[:-1]:
        assert train(learner, tmp_path, path, **copy.deepcopy(epochs)).ends_like(whole), path


def test_accumulated_gradients_of_a_round_that_was_cut_off_are_computed_again(tmp_path):
    settings = {"trainer": {"accumulate_grad_batches": 2}}
    whole = train("A2C", tmp_path, **copy.deepcopy(settings))
    interrupted(tmp_path, "A2C", part=7, **copy.deepcopy(settings))
    run = train("A2C", tmp_path, tmp_path / "stopped.ckpt", **settings)
    assert run.updates[0] == ROUNDS
    assert run.ends_like(whole)


class PredictingPPO(PPO):
    """PPO with a part of its own, whose error the policy learns to make small, too."""

    def __init__(self, policy=None, **settings):
        super().__init__(policy, **settings)
        self.predictor = nn.Linear(4, 2)
        self.scale = self.same_scale = nn.Parameter(torch.ones(()))
        self.register_buffer("parts", torch.zeros((), dtype=torch.int64))

    def training_step(self, part, index):
        loss = super().training_step(part, index)
        self.parts = self.parts + 1  # another tensor than before
        logits = self.policy.get_dist(part.round.select("observation")).logits
        error = self.scale * self.predictor(part.round["observation"]) - logits
        return loss + error.square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.learning_rate)


def whole_and_resumed(make, stop, folder):
    """Return the weights of a run of three rounds, and of one that was stopped and resumed."""

    def fit(ckpt_path=None, **settings):
        torch.manual_seed(0 if ckpt_path is None else 1)
        learner = make(epochs=2, minibatches=2, learning_rate=0.01)
        trainer = quiet_trainer(**settings)
        trainer.fit(learner, cartpole(3), ckpt_path=ckpt_path)
        trainer.save_checkpoint(folder / "last.ckpt")
        return learner.state_dict()

    whole = fit()
    fit(max_steps=stop)
    return whole, fit(folder / "last.ckpt")


@pytest.mark.parametrize("stop", [4, 5, pytest.param(7, marks=THOROUGH)])
def test_what_a_learner_has_beside_its_policy_goes_on_from_the_rounds_start_too(stop, tmp_path):
    whole, resumed = whole_and_resumed(PredictingPPO, stop, tmp_path)
    assert resumed.keys() == whole.keys()
    assert resumed["parts"] == 3 * 4
    assert [name for name in whole if not torch.equal(resumed[name], whole[name])] == []


class CountingPPO(PPO):
    """Explores less in each part, by a count that it raises before it learns from one."""

    def __init__(self, policy=None, **settings):
        super().__init__(policy, **settings)
        self.register_buffer("parts", torch.zeros(()))

    def training_step(self, part, index):
        self.parts += 1
        self.entropy_coef = 1 / float(self.parts)
        return super().training_step(part, index)


@pytest.mark.parametrize("stop", [5, pytest.param(7, marks=THOROUGH)])
def test_what_a_learner_counts_before_it_learns_goes_on_from_the_rounds_start_too(stop, tmp_path):
    whole, resumed = whole_and_resumed(CountingPPO, stop, tmp_path)
    assert resumed["parts"] == 3 * 4
    assert [name for name in whole if not torch.equal(resumed[name], whole[name])] == []


class WithAverage(nn.Linear):
    """Adds to its output that of an average of its weights, which is frozen."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.average = nn.Linear(*sizes).requires_grad_(False)

    def forward(self, observation):
        return super().forward(observation) + self.average(observation)


class AveragingPPO(PPO):
    """PPO whose policy has an average of its weights, moved after each minibatch."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for layer in self.policy.modules():
            if isinstance(layer, WithAverage):
                layer.average.weight.lerp_(layer.weight.detach(), 0.1)
        super().on_train_batch_end(outputs, batch, batch_idx)


def averaging(**settings):
    actor = categorical_actor(WithAverage(4, 2))
    critic = ValueOperator(nn.Linear(4, 1))
    return AveragingPPO(ProbabilisticTensorDictSequential(critic, *actor.module), **settings)


@pytest.mark.parametrize("stop", [6, pytest.param(7, marks=THOROUGH)])
def test_what_a_user_moves_of_a_policy_goes_on_from_the_rounds_start_too(stop, tmp_path):
    whole, resumed = whole_and_resumed(averaging, stop, tmp_path)
    assert [name for name in whole if not torch.equal(resumed[name], whole[name])] == []


DRAWS = {
    "torch": lambda: float(torch.randn(())),
    "numpy": lambda: float(np.random.standard_normal()),  # noqa: NPY002
    "python": random.random,
}


def noisy(draw):
    """PPO that adds numbers drawn outside of its training step to all gradients."""

    class Noisy(PPO):
        def on_before_optimizer_step(self, optimizer):
            super().on_before_optimizer_step(optimizer)
            for parameter in self.parameters():
                parameter.grad += draw()

    return Noisy


@pytest.mark.parametrize("stop", [pytest.param(4, marks=THOROUGH), 6])
@pytest.mark.parametrize("generator", DRAWS)
def test_what_a_hook_draws_goes_on_too(generator, stop, tmp_path):
    whole, resumed = whole_and_resumed(noisy(DRAWS[generator]), stop, tmp_path)
    assert [name for name in whole if not torch.equal(resumed[name], whole[name])] == []


class SharedTrunk(nn.Module):
    """Reads its observations by their mean so far, a new tensor after each pass of the learner."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 8)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, observation):
        if self.training and torch.is_grad_enabled():
            self.mean = 0.9 * self.mean + 0.1 * observation.detach().mean(0)
        return self.layer(observation - self.mean).tanh()


def sharing_policy() -> nn.Module:
    """Actor and critic of one trunk, which the policy's weights have twice, and tied layers."""
    trunk, tied = SharedTrunk(), nn.Linear(8, 8)
    again = nn.Linear(8, 8)
    again.weight = tied.weight
    actor = categorical_actor(nn.Sequential(trunk, tied, nn.Tanh(), again, nn.Linear(8, 2)))
    critic = ValueOperator(nn.Sequential(trunk, nn.Linear(8, 1)))
    return ProbabilisticTensorDictSequential(critic, *actor.module)


@pytest.mark.filterwarnings(TWO_MODES)
@pytest.mark.parametrize("stop", [4, 5, pytest.param(7, marks=THOROUGH)])
def test_layers_that_modules_share_go_on_from_the_rounds_start(stop, tmp_path):
    whole, resumed = whole_and_resumed(lambda **own: PPO(sharing_policy(), **own), stop, tmp_path)
    assert [name for name in whole if not torch.equal(resumed[name], whole[name])] == []


class Stop(Callback):
    """Presses Ctrl-C at a moment of a part of a round."""

    def __init__(self, moment: str, part: int) -> None:
        self.moment, self.part = moment, part
        self.evaluations = 0

    def press(self, moment: str, batch_idx: int) -> None:
        if (moment, batch_idx) == (self.moment, self.part):
            signal.raise_signal(signal.SIGINT)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):  # noqa: ARG002
        self.press("start", batch_idx)

    def on_before_backward(self, trainer, pl_module, loss):  # noqa: ARG002
        self.press("backward", trainer.fit_loop.batch_idx)

    def on_before_zero_grad(self, trainer, pl_module, optimizer):  # noqa: ARG002
        self.press("zero_grad", trainer.fit_loop.batch_idx)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):  # noqa: ARG002
        self.press("end", batch_idx)

    def on_validation_batch_start(self, trainer, *_):
        self.press("validation", trainer.fit_loop.batch_idx)

    def on_validation_end(self, trainer, pl_module):  # noqa: ARG002
        self.evaluations += 1


def interrupted(
    folder: Path, learner: str, *, moment: str = "backward", part: int, callbacks=(), **settings
) -> int:
    """Train until Ctrl-C, which leaves ``stopped.ckpt``; returns the evaluations until then."""
    stop = Stop(moment, part)
    last = ModelCheckpoint(folder, filename="stopped", save_on_exception=True, every_n_epochs=99)
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit):
            train(learner, folder, callbacks=[*callbacks, stop, last], **settings)
    finally:
        signal.signal(signal.SIGINT, before)
    return stop.evaluations


@pytest.fixture(scope="module", params=sorted(LEARNINGS))
def whole_run(request, tmp_path_factory):
    """A learner and its undisturbed run."""
    return request.param, train(request.param, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("moment", ["start", "backward", "step", "end"])
@pytest.mark.parametrize(
    "part", [pytest.param(2, marks=THOROUGH), 3, pytest.param(4, marks=THOROUGH)]
)
def test_ctrl_c_at_any_moment_leaves_what_resumes_to_the_same_bits(
    whole_run, moment, part, tmp_path, monkeypatch
):
    learner, whole = whole_run
    if moment == "step":
        interrupt_steps(monkeypatch, number=part)
    interrupted(tmp_path, learner, moment=moment, part=part)
    monkeypatch.undo()
    assert train(learner, tmp_path, tmp_path / "stopped.ckpt").ends_like(whole)


def interrupt_steps(monkeypatch, number: int) -> None:
    """Press Ctrl-C when the optimiser has moved, and nothing else has yet."""
    calls = iter(range(1000))
    for optimizer in (torch.optim.Adam, torch.optim.RAdam, OnePassRMSprop):

        def step(self, closure, _original=optimizer.step):
            loss = _original(self, closure)
            if next(calls) == number:
                signal.raise_signal(signal.SIGINT)
            return loss

        monkeypatch.setattr(optimizer, "step", step)


def require_the_same_bits_from_any_checkpoint(learner, tmp_path):
    """From a checkpoint in the middle of a round or after it, and from one that Ctrl-C left."""
    whole = train(learner, tmp_path, callbacks=[saving(tmp_path, every_n_train_steps=1)])
    paths = checkpoints(tmp_path)
    for path in (paths[1], paths[len(paths) // 2]):
        assert train(learner, tmp_path, path).ends_like(whole), path
    interrupted(tmp_path, learner, part=3)
    assert train(learner, tmp_path, tmp_path / "stopped.ckpt").ends_like(whole)


@pytest.mark.timeout(300)  # on an overloaded machine; seconds elsewhere
@pytest.mark.filterwarnings(TWO_MODES)
@pytest.mark.parametrize(
    "learner",
    [
        pytest.param(name, marks=() if name in QUICK_SPECIAL_LEARNINGS else THOROUGH)
        for name in SPECIAL_LEARNINGS
    ],
)
def test_what_draws_or_normalises_or_rounds_resumes_to_the_same_bits(learner, tmp_path):
    require_the_same_bits_from_any_checkpoint(learner, tmp_path)


@pytest.mark.parametrize(
    "learner", ["A2C AdamW", "PPO Muon", pytest.param("PPO SGD", marks=THOROUGH)]
)
def test_any_optimiser_resumes_to_the_same_bits(learner, tmp_path):
    require_the_same_bits_from_any_checkpoint(learner, tmp_path)


class Terminated(CartPoleEnv):
    """Is sent SIGTERM in a step that would go on for ever."""

    steps_left = math.inf

    def step(self, action):
        Terminated.steps_left -= 1
        if Terminated.steps_left == 0:
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError("the step goes on")
        return super().step(action)


def test_sigterm_where_an_environment_hangs_leaves_what_resumes_to_the_same_bits(
    tmp_path, monkeypatch
):
    whole = train("A2C", tmp_path, env=Terminated)
    last = ModelCheckpoint(tmp_path, filename="stopped", save_on_exception=True, every_n_epochs=99)
    monkeypatch.setattr(Terminated, "steps_left", 2 * 4 * 8 + 5)  # in the third round
    with pytest.raises(SIGTERMException):
        train("A2C", tmp_path, callbacks=[last], env=Terminated)
    monkeypatch.undo()
    assert torch.load(tmp_path / "stopped.ckpt", weights_only=True)["updates"] == 1
    assert train("A2C", tmp_path, tmp_path / "stopped.ckpt", env=Terminated).ends_like(whole)


def test_an_evaluation_that_was_cut_off_is_played_again(tmp_path):
    settings = {"evaluation_frames": 64, "trainer": {"limit_val_batches": 1}}
    whole = train("A2C", tmp_path, **copy.deepcopy(settings))
    stopped = copy.deepcopy(settings)
    assert interrupted(tmp_path, "A2C", moment="validation", part=3, **stopped) == 1
    run = train("A2C", tmp_path, tmp_path / "stopped.ckpt", **settings)
    assert run.ends_like(whole)


AVERAGES = "ignore:You're using the WeightAveraging callback with a model"


@pytest.mark.filterwarnings(AVERAGES)
def test_an_evaluation_of_averages_that_was_cut_off_leaves_weights_and_averages_apart(tmp_path):
    settings = {"evaluation_frames": 64, "trainer": {"limit_val_batches": 1}}
    averages = [EMAWeightAveraging(decay=0.5) for _ in range(3)]
    whole = train("A2C", tmp_path, callbacks=[averages[0]], **copy.deepcopy(settings))
    stopped = {"callbacks": [averages[1]], **copy.deepcopy(settings)}
    assert interrupted(tmp_path, "A2C", moment="validation", part=3, **stopped) == 1
    run = train("A2C", tmp_path, tmp_path / "stopped.ckpt", [averages[2]], **settings)
    assert run.ends_like(whole)


class StopAfter(Callback):
    """Asks the Trainer to stop, as EarlyStopping and Timer do."""

    def __init__(self, part: int) -> None:
        self.part = part

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):  # noqa: ARG002
        trainer.should_stop |= batch_idx == self.part


ENDED = {
    "A2C by max_steps": ("A2C", {"max_steps": 3}),
    "PPO by max_steps": ("PPO", {"max_steps": 12}),
    "PPO by max_steps within a round": ("PPO", {"max_steps": 10}),
    "A2C by max_steps with an evaluation": ("A2C", {"max_steps": 4, "limit_val_batches": 1}),
    "A2C by a callback": ("A2C", {"stop_after": 2}),
    "PPO by a callback, which evaluates": ("PPO", {"stop_after": 10, "limit_val_batches": 1}),
}


def fit(learner: str, folder: Path, ckpt_path=None, callbacks=(), **settings):
    """Train without a schedule, which is another in a run of another length."""
    torch.manual_seed(0)
    module = {"A2C": A2C(learning_rate=0.01), "PPO": PPO(epochs=2, minibatches=2)}[learner]
    data = cartpole(ROUNDS, env=CARTPOLE, evaluation_frames=64, evaluation_episodes=2)
    statistics = TrainingStatistics()
    saves = {"enable_checkpointing": bool(callbacks), "default_root_dir": folder}
    watch = watched_fit(
        module, data, ckpt_path, callbacks=[statistics, *callbacks], **saves, **settings
    )
    return watch, without_time(statistics.state_dict())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return {learner: fit(learner, folder) for learner in ("A2C", "PPO")}


@pytest.mark.parametrize("how", ENDED)
def test_training_that_was_ended_early_goes_on_from_last_ckpt_with_the_same_bits(
    how, undisturbed, tmp_path
):
    learner, settings = ENDED[how][0], dict(ENDED[how][1])
    stop = StopAfter(settings.pop("stop_after", -1))
    fit(learner, tmp_path, None, [LastCheckpoint(str(tmp_path)), stop], **settings)
    whole, counted = undisturbed[learner]
    resumed, counted_again = fit(learner, tmp_path, tmp_path / "last.ckpt")
    rounds = len(resumed.rounds)
    assert 0 < rounds < ROUNDS
    assert digest(resumed.rounds) == digest(whole.rounds[-rounds:])
    assert torch.equal(resumed.final_weights, whole.final_weights)
    assert counted == counted_again


@pytest.mark.filterwarnings(AVERAGES)
@pytest.mark.thorough
def test_averaged_weights_are_those_of_all_steps_and_resume_within_a_round(tmp_path):
    averages = [EMAWeightAveraging(decay=0.5) for _ in range(3)]
    whole = train("PPO", tmp_path, callbacks=[averages[0]])
    interrupted(tmp_path, "PPO", part=10, callbacks=[averages[1]])
    resumed = train("PPO", tmp_path, tmp_path / "stopped.ckpt", callbacks=[averages[2]])
    after_steps = [*whole.watch.step_weights[1:], train("PPO", tmp_path).watch.final_weights]
    expected = after_steps[0]
    for weights in after_steps[1:]:
        expected = 0.5 * expected + 0.5 * weights
    torch.testing.assert_close(whole.watch.final_weights, expected)
    assert torch.equal(resumed.watch.final_weights, whole.watch.final_weights)
    assert digest(resumed.watch.rounds) == digest(whole.watch.rounds[-len(resumed.watch.rounds) :])


# The collector alone.


def stopped_and_resumed(make, weights_of, stop: int) -> tuple[str, str]:
    """Digests of the batches after ``stop``: of a run that went through, and of a resumed one."""
    collector, batches, state = make(), [], None
    for batch in collector:
        batches.append(batch.clone())
        if len(batches) == stop:
            state = collector.state_dict()
        collector.update_policy_weights_(weights_of(len(batches)))
    resumed = make()
    newest = weights_of(stop)
    resumed.policy.load_state_dict(newest)
    resumed.load_state_dict(state | {"policy_version": stop})
    rest = []
    for batch in resumed:
        rest.append(batch.clone())
        resumed.update_policy_weights_(weights_of(stop + len(rest)))
    return digest(batches[stop:]), digest(rest)


@dataclass(frozen=True)
class Vectors:
    """A vector environment of CartPoles, which cannot begin a single game with a seed."""

    size: int
    mode: AutoresetMode = AutoresetMode.SAME_STEP

    def __call__(self, _: int) -> SyncVectorEnv:
        make = partial(gymnasium.make, "CartPole-v1", max_episode_steps=20)
        return SyncVectorEnv([make] * self.size, autoreset_mode=self.mode)


def torchrl_env(_: int) -> GymEnv:
    return GymEnv("CartPole-v1")


def noop_cartpole() -> TransformedEnv:
    return TransformedEnv(GymEnv("CartPole-v1"), NoopResetEnv(5))


MAKERS = {
    "TorchRL": (torchrl_env, "mlp", {"num_envs": 4, "envs_per_executor": 2}),
    "TorchRL's global generator": (
        noop_cartpole,
        "mlp",
        {"num_envs": 4, "envs_per_executor": 2},
    ),
    "the global generators": (
        LotteryEnv,
        "mlp",
        {"num_envs": 4, "envs_per_executor": 2},
    ),
    "CartPole": (CARTPOLE, "mlp", {"num_envs": 4, "envs_per_executor": 4}),
    "Pong": (PONG, "nature", {"num_envs": 2, "envs_per_executor": 2}),
    "Pong, seeded often": (PONG, "nature", {"num_envs": 2, "envs_per_executor": 2}),
    "a vector environment": (Vectors(4), "mlp", {"num_envs": 4, "envs_per_executor": 4}),
    "a vector environment that resets later": (
        Vectors(4, AutoresetMode.NEXT_STEP),
        "mlp",
        {"num_envs": 4, "envs_per_executor": 4},
    ),
    "EnvPool, seeded often": (
        EnvPoolEnvs("CartPole-v1", {"max_episode_steps": 15}),
        "mlp",
        {"num_envs": 4, "envs_per_executor": 2},
    ),
    "several agents": (
        PettingZooEnvs("tests.fakes:Duel", {"lengths": (3, 7)}),
        "mlp",
        {"num_envs": 4, "envs_per_executor": 2},
    ),
    "MinAtar": (
        GymEnvs("MinAtar/Breakout-v1"),
        "mlp",
        {"num_envs": 4, "envs_per_executor": 2},
    ),
    "Pendulum": (GymEnvs("Pendulum-v1", {"max_episode_steps": 15}), "mlp", {"num_envs": 3}),
    "football": (
        FootballEnvs("3_vs_1_with_keeper"),
        "nips",
        {"num_envs": 2, "envs_per_executor": 2},
    ),
    "gfootball": (
        FootballEnvs("3_vs_1_with_keeper", engine="gfootball", num_players=3),
        "nips",
        {"num_envs": 2, "envs_per_executor": 2},
    ),
}


def cartpole_policy() -> nn.Module:
    torch.manual_seed(1)
    return make_actor_critic("mlp", CARTPOLE.group([0]).spec)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=THOROUGH if name == "Pong" or "football" in name else ())
        for name in MAKERS
    ],
)
@pytest.mark.parametrize("delay", [pytest.param(0, marks=THOROUGH), 1])
@pytest.mark.parametrize("stop", [pytest.param(1, marks=THOROUGH), 6])
def test_a_collector_goes_on_with_the_same_batches(name, delay, stop, monkeypatch):
    if name == "gfootball":
        pytest.importorskip("gfootball_engine", reason="scripts/install_gfootball.sh")
    if name == "MinAtar":
        pytest.importorskip("minatar", reason="hts-torchrl[minatar]")
    create, network, settings = MAKERS[name]
    if name == "Pong, seeded often":
        monkeypatch.setattr(AtariGroup, "steps_per_seed", 20)
    if name == "EnvPool, seeded often":
        monkeypatch.setattr(envpool, "_STEPS_PER_SEED", 20)
    torch.manual_seed(1)
    indices = range(settings.get("envs_per_executor", 1))
    policy = make_actor_critic(network, make_group(create, indices).spec)
    frames = settings["num_envs"] * 10

    def make() -> HTSCollector:
        return HTSCollector(
            create, copy.deepcopy(policy), frames_per_batch=frames, total_frames=8 * frames,
            num_actors=0, delay=delay, **settings,
        )  # fmt: skip

    whole, resumed = stopped_and_resumed(make, perturbed(policy, 0.01), stop)
    assert resumed == whole


@pytest.mark.parametrize("delay", [0, 1])
def test_what_the_caller_writes_into_a_batch_does_not_reach_the_action_log(delay):
    def games(write: bool) -> dict[str, Any]:
        collector = collect(cartpole_policy(), CARTPOLE, delay=delay, total_frames=-1)
        iterator = iter(collector)
        for _ in range(5):
            batch = next(iterator)
            if write:
                batch["action"].zero_()
                batch["next", "reward"].mul_(0.5)
                batch["next", "observation"].zero_()
        state = collector.state_dict()
        collector.shutdown()
        return {name: tensor.tolist() for name, tensor in state["games"].items()}

    assert games(write=True) == games(write=False)


def test_an_environment_that_does_not_replay_is_refused():
    """The length of a CoordinateEnv's game depends on the games before it."""
    collector = collect(create=CoordinateEnvs(), total_frames=120)
    iterator = iter(collector)
    for _ in range(4):
        next(iterator)
    resumed = collect(create=CoordinateEnvs(), total_frames=120)
    resumed.load_state_dict(collector.state_dict())
    with pytest.raises(ReplayError, match=r"environment \d does not replay: "):
        next(iter(resumed))
    collector.shutdown()


def test_more_environments_than_a_state_has_are_refused():
    state = collect(create=CARTPOLE, policy=nn.Linear(4, 2)).state_dict()
    more = collect(create=CARTPOLE, policy=nn.Linear(4, 2), num_envs=6)
    with pytest.raises(ConfigurationError, match="the state is of 4 environments, but 6 are"):
        more.load_state_dict(state)
