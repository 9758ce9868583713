"""What a user writes for Lightning: any module learns from rounds, by its own optimiser."""

import csv
import random
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import nn
from torchrl.modules import ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from hts_torchrl import (
    A2C,
    PPO,
    ConfigurationError,
    HTSDataModule,
    Impala,
    Learner,
    RoundModule,
)
from hts_torchrl.training.callbacks import TrainingStatistics
from hts_torchrl.training.callbacks.round_end import WeightPublisher
from tests.determinism.tasks import CARTPOLE
from tests.fits import (
    RESUMES,
    cartpole,
    checkpoints,
    flat,
    quiet_trainer,
    saving,
    watched_fit,
)
from tests.policies import categorical_actor, echo_policy, policy_with
from tests.runs import digest

pytestmark = [
    *RESUMES,
    # Weights after a step are what is wanted here.
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
]

ROUNDS = 6


def loss_of(policy, batch):
    """A policy gradient and a value of the rewards: no algorithm, but a loss of all weights."""
    samples = batch.reshape(-1).select("observation", "action", ("next", "reward"))
    reward = samples["next", "reward"].squeeze(-1)
    parameters, value = policy.heads({"observation": samples["observation"]})
    gain = policy.distribution(parameters).log_prob(samples["action"]) * reward
    return (value.squeeze(-1) - reward).square().mean() - gain.mean()


class Plain(LightningModule):
    """A module of a user who knows of this package no more than that a part has a round."""

    def __init__(self, layer=nn.Identity, optimizer=torch.optim.Adam):
        super().__init__()
        self.policy = policy_with(layer(), CARTPOLE)
        self.optimizer = optimizer

    def training_step(self, part, _):
        return loss_of(self.policy, part.round)

    def validation_step(self, evaluation, _):
        scores = evaluation.run(self.policy).scores
        self.log("eval/score", float(scores.mean()), batch_size=len(scores))

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), 0.01)


class Drawing(Plain):
    """Keeps a number that it draws for each of two parts of a round."""

    parts_per_round = 2

    def __init__(self):
        super().__init__()
        self.drawn = []

    def training_step(self, part, index):
        self.drawn.append(torch.rand(()).item())
        return super().training_step(part, index)


class ByHand(Plain):
    """Steps two optimisers by itself, twice a round."""

    parts_per_round = 2
    automatic_optimization = False

    def training_step(self, part, _):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss_of(self.policy, part.round))
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim == 2]
        rest = [p for p in self.parameters() if p.ndim != 2]
        return [torch.optim.Muon(matrices, 0.01), torch.optim.AdamW(rest, 0.01)]


class Seldom(ByHand):
    """Steps its second optimiser after each third round alone."""

    parts_per_round = 1

    def training_step(self, part, index):
        self.zero_grad()
        self.manual_backward(loss_of(self.policy, part.round))
        first, second = self.optimizers()
        first.step()
        if index % 3 == 2:
            second.step()


class Rounds(RoundModule):
    """The same loss in a module that keeps account of rounds itself."""

    def __init__(self, layer=nn.Identity):
        super().__init__(policy_with(layer(), CARTPOLE))

    def training_step(self, part, _):
        with self.learning_from(part):
            return loss_of(self.policy, part.round)

    def configure_optimizers(self):
        return torch.optim.Adam(self.policy.parameters(), 0.01)


class Seen(Callback):
    """Keeps the rounds, and the weights at the start of each and at the end."""

    def __init__(self):
        self.rounds, self.weights = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):  # noqa: ARG002
        if batch.is_first:
            self.rounds.append(batch.round.clone())
            self.weights.append(flat(pl_module.policy))

    def on_train_end(self, trainer, pl_module):  # noqa: ARG002
        self.weights.append(flat(pl_module.policy))

    @property
    def versions(self):
        return [int(batch["collector", "policy_version"][0, 0]) for batch in self.rounds]


def seen_fit(module, ckpt_path=None, callbacks=(), trainer=None, **data):
    """Train to the end, and tell what happened."""
    torch.manual_seed(0 if ckpt_path is None else 1)
    seen = Seen()
    settings = {"enable_checkpointing": bool(callbacks), **(trainer or {})}
    fitting = quiet_trainer(callbacks=[seen, *callbacks], **settings)
    fitting.fit(module, cartpole(ROUNDS, **{"env": CARTPOLE} | data), ckpt_path=ckpt_path)
    return seen


class TestAPlainModule:
    @pytest.mark.parametrize("make", [Plain, ByHand])
    def test_acts_with_weights_that_are_one_update_old(self, make):
        seen = seen_fit(make())
        assert seen.versions == [0, 0, 1, 2, 3, 4]
        for batch, version in zip(seen.rounds, seen.versions, strict=True):
            policy = Plain().policy
            nn.utils.vector_to_parameters(seen.weights[version], policy.parameters())
            _, value = policy.heads({"observation": batch["observation"].flatten(0, 1)})
            expected = value.detach().reshape(batch["state_value"].shape)
            torch.testing.assert_close(batch["state_value"], expected)

    def test_acts_with_the_newest_weights_without_delay(self):
        assert seen_fit(Plain(), delay=0).versions == [0, 1, 2, 3, 4, 5]

    @pytest.mark.processes
    def test_has_the_same_bits_with_processes(self):
        one = seen_fit(Plain(nn.Dropout))
        other = seen_fit(Plain(nn.Dropout), num_actors=2, envs_per_executor=2)
        assert digest(one.rounds) == digest(other.rounds)
        assert torch.equal(one.weights[-1], other.weights[-1])

    @pytest.mark.filterwarnings("ignore:the policy learns in train mode and acts in eval mode")
    def test_has_the_bits_of_a_module_that_publishes_by_itself(self):
        plain, rounds = seen_fit(Plain(nn.Dropout)), seen_fit(Rounds(nn.Dropout))
        for one, other in zip(plain.rounds, rounds.rounds, strict=True):
            kept = one.select(*other.keys())  # a plain module is given all outputs of its policy
            assert digest([kept]) == digest([other])
        assert torch.equal(plain.weights[-1], rounds.weights[-1])

    def test_draws_other_numbers_for_each_part(self):
        module = Drawing()
        seen_fit(module)
        assert len(set(module.drawn)) == len(module.drawn) == 2 * ROUNDS

    def test_is_evaluated(self):
        trainer = quiet_trainer(limit_val_batches=1)
        trainer.fit(Plain(), cartpole(2, env=CARTPOLE, evaluation_episodes=2))
        assert 1 <= float(trainer.callback_metrics["eval/score"]) <= 20

    def test_learns_again_in_a_second_training(self):
        module, data = Plain(), cartpole(2, env=CARTPOLE)
        trainer = quiet_trainer()
        for _ in range(2):
            seen = Seen()
            trainer.callbacks = [seen]
            trainer.fit_loop.epoch_progress.reset()
            trainer.fit(module, data)
            assert seen.versions == [0, 0]
        assert [type(each) for each in trainer.callbacks] == [Seen]


class Shaken(Plain):
    """Scales its loss by what it draws from generators other than torch's."""

    def training_step(self, part, index):
        drawn = np.random.random() + random.random()  # noqa: NPY002
        return drawn * super().training_step(part, index)


class Ends(Shaken):
    """Ends in the third round."""

    def training_step(self, part, index):
        if index == 2:
            raise ArithmeticError("as asked")
        return super().training_step(part, index)


def states_of_generators():
    numpys = np.random.get_state()[1].tolist()  # noqa: NPY002
    return torch.get_rng_state().tolist(), numpys, random.getstate()


@pytest.mark.parametrize("make", [Shaken, Ends])
def test_a_plain_module_leaves_the_generators_of_the_process_as_they_were(make):
    module = make()
    before = states_of_generators()
    with pytest.raises(ArithmeticError) if make is Ends else nullcontext():
        quiet_trainer().fit(module, cartpole(3, env=CARTPOLE))
    assert states_of_generators() == before


def test_an_optimizer_that_ends_its_step_by_each_ranks_loss_is_refused_on_several():
    module = Plain(optimizer=torch.optim.LBFGS)
    trainer = SimpleNamespace(world_size=2, optimizers=[module.configure_optimizers()])
    with pytest.raises(ConfigurationError, match=r"^optimizer LBFGS on 2 ranks; 1 is needed"):
        WeightPublisher().on_train_start(trainer, module)
    seen_fit(module)


MODULES = {
    "plain": Plain,
    "plain with other generators": Shaken,
    "plain with Dropout": lambda: Plain(nn.Dropout),
    "plain with BatchNorm": lambda: Plain(lambda: nn.BatchNorm1d(16)),
    "by hand": ByHand,
    "RoundModule": Rounds,
}


DRAWING = ("plain with Dropout", "plain with other generators")


class TestResume:
    @pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=() if name in DRAWING else pytest.mark.thorough)
            for name in MODULES
        ],
    )
    @pytest.mark.parametrize("delay", [1, pytest.param(0, marks=pytest.mark.thorough)])
    def test_after_any_round_gives_the_bits_of_the_whole_run(self, name, delay, tmp_path):
        kept = saving(tmp_path, every_n_train_steps=4 if name == "by hand" else 1)
        whole = seen_fit(MODULES[name](), callbacks=[kept], delay=delay)
        paths = checkpoints(tmp_path)[:-1]
        assert len(paths) == ROUNDS - 1
        for path in (paths[0], paths[3]):
            resumed = seen_fit(MODULES[name](), path, delay=delay)
            assert digest(resumed.rounds) == digest(whole.rounds[-len(resumed.rounds) :])
            assert torch.equal(resumed.weights[-1], whole.weights[-1])
            assert resumed.versions[-1] == whole.versions[-1]

    def test_in_a_later_epoch_ends_with_it(self, tmp_path):
        epochs = {"limit_train_batches": 2, "max_epochs": 2}
        kept = saving(tmp_path, every_n_train_steps=1)
        whole = seen_fit(Plain(), callbacks=[kept], trainer=epochs)
        assert len(whole.rounds) == 4
        for done, path in enumerate(checkpoints(tmp_path)[:-1], 1):
            resumed = seen_fit(Plain(), path, trainer=epochs)
            assert digest(resumed.rounds) == digest(whole.rounds[done:])
            assert torch.equal(resumed.weights[-1], whole.weights[-1])

    def test_of_a_finished_run_extends_it(self, tmp_path):
        seen_fit(Plain(), callbacks=[saving(tmp_path, every_n_train_steps=1)], total_frames=64)
        extended = seen_fit(Plain(), checkpoints(tmp_path)[-1])
        assert len(extended.rounds) == ROUNDS - 2
        assert torch.equal(extended.weights[-1], seen_fit(Plain()).weights[-1])

    def test_of_a_run_that_ended_with_an_evaluation_needs_no_other(self, tmp_path):
        kept = saving(tmp_path, save_on_train_epoch_end=False)
        evaluated = {"limit_val_batches": 1}
        seen_fit(Plain(), callbacks=[kept], trainer=evaluated, evaluation_episodes=1)
        assert seen_fit(Plain(), checkpoints(tmp_path)[-1]).rounds == []

    @pytest.mark.parametrize("moment", ["on_before_backward", "on_before_zero_grad"])
    def test_from_the_middle_of_a_round_is_refused(self, moment, tmp_path):
        interrupted(tmp_path, Plain(), moment)
        with pytest.raises(ConfigurationError, match="saved in the middle of a round, whose start"):
            seen_fit(Plain(), tmp_path / "stopped.ckpt")

    def test_from_the_middle_of_a_round_of_a_round_module_gives_the_same_bits(self, tmp_path):
        interrupted(tmp_path, Rounds(), "on_before_backward")
        resumed = seen_fit(Rounds(), tmp_path / "stopped.ckpt")
        assert torch.equal(resumed.weights[-1], seen_fit(Rounds()).weights[-1])

    @pytest.mark.parametrize("make", [Plain, Rounds])
    def test_with_a_data_module_of_another_class_is_refused(self, make, tmp_path):
        seen_fit(make(), callbacks=[saving(tmp_path, every_n_train_steps=2)])
        data = Other(CARTPOLE, num_envs=4, num_actors=0, frames_per_batch=32, total_frames=192)
        with pytest.raises(ConfigurationError, match="has no state of the data module Other"):
            quiet_trainer().fit(make(), data, ckpt_path=checkpoints(tmp_path)[0])

    def test_that_fails_leaves_nothing_for_the_next_training(self, tmp_path):
        seen_fit(Plain(), callbacks=[saving(tmp_path, every_n_train_steps=2)])
        data, module, seen = cartpole(ROUNDS, env=CARTPOLE), Plain(optimizer=grouped), Seen()
        with pytest.raises(ValueError, match="different number of parameter groups"):
            quiet_trainer().fit(module, data, ckpt_path=checkpoints(tmp_path)[0])
        quiet_trainer(callbacks=[seen]).fit(module, data)
        assert seen.versions == [0, 0, 1, 2, 3, 4]

    def test_with_other_settings_of_the_data_is_refused(self, tmp_path):
        seen_fit(Plain(), callbacks=[saving(tmp_path, every_n_train_steps=2)])
        with pytest.raises(ConfigurationError, match=r"data\.delay=0, the checkpoint has 1: bits"):
            seen_fit(Plain(), checkpoints(tmp_path)[0], delay=0)

    @pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model")
    @pytest.mark.parametrize("make", [Plain, Rounds])
    def test_without_the_callback_that_averages_is_refused(self, make, tmp_path):
        """What such a checkpoint has in the place of weights are averages."""
        kept = saving(tmp_path, every_n_train_steps=2)
        seen_fit(make(), callbacks=[EMAWeightAveraging(), kept])
        path = checkpoints(tmp_path)[0]
        with pytest.raises(ConfigurationError, match="checkpoint has 'averages of a WeightAv"):
            seen_fit(make(), path)
        assert len(seen_fit(make(), path, accept_changes=True).rounds) == ROUNDS - 2


def grouped(parameters, rate):
    """Adam with two groups of parameters."""
    first, *others = parameters
    return torch.optim.Adam([{"params": [first]}, {"params": others}], rate)


class Other(HTSDataModule):
    """Not the class that has saved."""


def interrupted(folder, module, moment):
    """Press Ctrl-C in the third round, which leaves ``stopped.ckpt``."""

    class Stop(Callback):
        pass

    def press(self, trainer, *_):  # noqa: ARG001
        if trainer.fit_loop.batch_idx == 2:
            signal.raise_signal(signal.SIGINT)

    setattr(Stop, moment, press)
    last = ModelCheckpoint(folder, filename="stopped", save_on_exception=True, every_n_epochs=99)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit):
            seen_fit(module, callbacks=[Stop(), last])
    finally:
        signal.signal(signal.SIGINT, before)


class Decaying(Plain):
    """By a schedule as a loop of many epochs has it."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class DecayingRounds(Rounds):
    """The same for a module that keeps account of rounds itself."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


@pytest.mark.parametrize("make", [Decaying, DecayingRounds])
def test_a_schedule_that_steps_once_an_epoch_is_told(make):
    with pytest.warns(
        UserWarning, match="the schedule ExponentialLR steps once an epoch, and an epoch"
    ):
        seen_fit(make())
    seen_fit(make(), trainer={"limit_train_batches": 2, "max_epochs": 3})


class NoPolicy(Plain):
    def __init__(self):
        super().__init__()
        self.net, self.policy = self.policy, None


class LearnerByHand(A2C):
    automatic_optimization = False


class InNoParts(Plain):
    parts_per_round = 0


class InHalves(Plain):
    parts_per_round = 0.5


@pytest.mark.parametrize(
    ("make", "trainer", "message"),
    [
        (NoPolicy, {}, "NoPolicy has no policy: make one, an nn.Module such as"),
        (
            Plain,
            {"accumulate_grad_batches": 2},
            "accumulate_grad_batches=2 does not divide the 1 parts of a round",
        ),
        (InNoParts, {}, r"InNoParts\.parts_per_round=0; a whole number of 1 or more is needed"),
        (InHalves, {}, r"InHalves\.parts_per_round=0\.5; a whole number of 1 or more is needed"),
        (LearnerByHand, {}, "LearnerByHand: automatic_optimization=False; a Learner's round"),
    ],
)
def test_what_cannot_work_is_refused_by_name(make, trainer, message):
    module = make()
    with pytest.raises(ConfigurationError, match=message):
        seen_fit(module, trainer=trainer)


class Own(Learner):
    """A learner of a user with an optimiser of their own, in one of Lightning's forms."""

    def __init__(self, form):
        super().__init__(policy_with(nn.Identity(), CARTPOLE), learning_rate=0.4)
        self.form = form

    def training_step(self, part, _):
        with self.learning_from(part):
            return loss_of(self.policy, part.round)

    def configure_optimizers(self):
        return FORMS[self.form](torch.optim.SGD(self.policy.parameters(), self.learning_rate))


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


FORMS = {
    "optimizer": lambda optimizer: optimizer,
    "list": lambda optimizer: [optimizer],
    "two lists": lambda o: ([o], [{"scheduler": halving(o), "interval": "step"}]),
    "dict": lambda o: {
        "optimizer": o,
        "lr_scheduler": {"scheduler": halving(o), "interval": "step"},
    },
    "two schedules": lambda o: (
        [o],
        [{"scheduler": halving(o), "interval": "step"} for _ in range(2)],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_learner_has_an_optimiser_of_its_own_in_any_form_and_resumes_with_it(form, tmp_path):
    callbacks = [saving(tmp_path, every_n_train_steps=1)]
    whole = watched_fit(
        Own(form),
        cartpole(ROUNDS, env=CARTPOLE),
        callbacks=callbacks,
        enable_checkpointing=True,
    )
    factor = {"optimizer": 1.0, "list": 1.0, "two schedules": 0.25}.get(form, 0.5)
    expected = [0.4 * factor ** (step // 2) for step in range(ROUNDS)]
    assert whole.learning_rates == pytest.approx(expected)
    resumed = watched_fit(Own(form), cartpole(ROUNDS, env=CARTPOLE), checkpoints(tmp_path)[2])
    assert resumed.learning_rates == whole.learning_rates[3:]
    assert torch.equal(resumed.final_weights, whole.final_weights)
    assert resumed.versions == whole.versions[3:]


def test_figures_of_several_optimisers_are_those_of_the_step_that_is_logged(tmp_path):
    """After the rounds 4, 8 and 12, of 32 frames each: Lightning counts no optimiser's steps."""
    logger = CSVLogger(tmp_path, name="", version="")
    trainer = quiet_trainer(logger=logger, log_every_n_steps=4, callbacks=[TrainingStatistics()])
    trainer.fit(Seldom(), cartpole(12))
    assert trainer.global_step == 12 + 4
    with (tmp_path / "metrics.csv").open() as file:
        assert [float(row["train/frames"]) for row in csv.DictReader(file)] == [128, 256, 384]


class InPrecision(nn.Module):
    """A layer that computes in a precision of its own, and answers in it."""

    def __init__(self, dtype):
        super().__init__()
        self.linear = nn.Linear(4, 3, dtype=dtype)

    def forward(self, observation):
        logits, value = self.linear(observation.to(self.linear.weight.dtype)).split([2, 1], -1)
        return logits, value


@pytest.mark.parametrize("learner", [A2C, PPO, Impala])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_policy_of_another_precision_learns(learner, dtype):
    torch.manual_seed(1)
    policy = echo_policy(InPrecision(dtype))
    before = flat(policy)
    quiet_trainer().fit(learner(policy, learning_rate=0.1), cartpole())
    assert flat(policy).dtype == dtype
    assert not flat(policy).equal(before)


class Objective(RoundModule):
    """Learns by a loss module of TorchRL, which holds the weights of the policy once more."""

    parts_per_round = 3

    def __init__(self):
        critic = ValueOperator(nn.Linear(4, 1))
        actor = categorical_actor(nn.Linear(4, 2))
        super().__init__(ProbabilisticTensorDictSequential(critic, *actor.module))
        self.objective = ClipPPOLoss(actor, critic)
        self.gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)

    def training_step(self, part, _):
        with self.learning_from(part):
            if part.is_first:
                with torch.no_grad():
                    self.samples = self.gae(part.round.exclude("state_value"))
            losses = self.objective(self.samples)
            return sum(value for name, value in losses.items() if name.startswith("loss_"))

    def configure_optimizers(self):
        return torch.optim.Adam(self.objective.parameters(), 0.01)


class Taught(PPO):
    """Learns from a policy that is an argument of its constructor."""

    def __init__(self, teacher, policy=None, **settings):
        super().__init__(policy, epochs=2, minibatches=2, **settings)
        self.teacher = teacher.requires_grad_(requires_grad=False)

    def loss(self, samples):
        policy, _ = self.evaluate(samples)
        wanted = torch.distributions.Categorical(logits=self.teacher(samples["observation"]))
        return torch.distributions.kl_divergence(wanted, policy).mean()


def teacher():
    layer = nn.Linear(4, 2)
    nn.init.constant_(layer.weight, 0.5)
    nn.init.constant_(layer.bias, 0.1)
    return layer


@pytest.mark.filterwarnings("ignore:Attribute 'teacher' is an instance of `nn.Module`")
@pytest.mark.parametrize("make", [Objective, lambda: Taught(teacher())])
@pytest.mark.parametrize("stop", [6, 8])  # of rounds of 3 and 4 parts
def test_a_module_that_holds_other_modules_resumes_with_the_same_bits(make, stop, tmp_path):
    def fit(ckpt_path=None, **settings):
        torch.manual_seed(0 if ckpt_path is None else 1)
        module = make()
        trainer = quiet_trainer(**settings)
        trainer.fit(module, cartpole(3), ckpt_path=ckpt_path, weights_only=True)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return module.state_dict()

    whole = fit()
    fit(max_steps=stop)
    resumed = fit(tmp_path / "last.ckpt")
    assert resumed.keys() == whole.keys()
    tensors = [name for name, value in whole.items() if isinstance(value, torch.Tensor)]
    assert [name for name in tensors if not torch.equal(resumed[name], whole[name])] == []
