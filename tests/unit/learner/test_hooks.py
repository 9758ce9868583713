import functools

import pytest
import torch
from lightning.pytorch import Callback

from hts_torchrl import A2C, PPO, PQN, Impala, RoundModule, make_actor_critic
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.learner.base import Learner
from hts_torchrl.training.extended_hooks import needed_hooks
from tests.fits import cartpole, quiet_trainer, watched_fit

ALL_LEARNERS_NEED = {
    "configure_model",
    "on_fit_start",
    "on_train_start",
    "backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_train_batch_end",
    "on_fit_end",
    "on_save_checkpoint",
    "on_load_checkpoint",
}


@pytest.mark.parametrize(
    ("learner", "more"),
    [
        (Learner, set()),
        (Impala, set()),
        (A2C, {"on_after_backward"}),
        (PPO, {"on_round_end"}),
        (PQN, {"on_round_end"}),
    ],
)
def test_a_learner_needs_the_hooks_in_which_it_does_something(learner, more):
    assert needed_hooks(learner) == ALL_LEARNERS_NEED | more


def test_a_round_module_computes_its_gradients_as_lightning_does():
    assert needed_hooks(RoundModule) == ALL_LEARNERS_NEED - {"backward"}


@pytest.mark.parametrize(
    ("learner", "hook"),
    [
        (A2C, "on_fit_start"),
        (A2C, "on_train_batch_end"),
        (A2C, "optimizer_step"),
        (A2C, "on_after_backward"),
        (PPO, "on_round_end"),
        (PQN, "on_round_end"),
    ],
)
def test_a_hook_that_replaces_the_learners_is_refused(learner, hook):
    """Also that of a module whose name begins with the package's."""
    own = {hook: lambda *_: None, "__module__": "hts_torchrl_mine"}
    replaced = type("Replaced", (learner,), own)
    below = type("Below", (replaced,), {})
    message = rf"Replaced\.{hook} replaces .* call super\(\)\.{hook}\(\.\.\.\) in it"
    with pytest.raises(ConfigurationError, match=message):
        watched_fit(below(), cartpole())


def test_a_model_that_is_configured_without_the_learners_part_is_refused():
    class Own(A2C):
        def configure_model(self):
            self.policy = make_actor_critic("mlp", self.trainer.datamodule.env_spec)

    with pytest.raises(ConfigurationError, match=r"call super\(\)\.configure_model\(\.\.\.\)"):
        watched_fit(Own(), cartpole(normalize_observation=True))


def test_a_backward_that_is_another_tensors_is_refused():
    class Replaced(PPO):
        def backward(self, loss, *_, **__):
            loss.backward()

    with pytest.raises(ConfigurationError, match=r"call super\(\)\.backward\(\.\.\.\) in it"):
        watched_fit(Replaced(gradient_chunks=2), cartpole())


def test_a_backward_of_the_users_own_is_called_where_there_are_no_chunks():
    class Counted(PPO):
        calls = 0

        def backward(self, loss, *_, **__):
            self.calls += 1
            loss.backward()

    learner = Counted(epochs=1, minibatches=2)
    watched_fit(learner, cartpole())
    assert learner.calls == 2 * learner.updates > 0


def counted(hook):
    @functools.wraps(hook)
    def call(module, *args):
        module.calls += 1
        return hook(module, *args)

    return call


def test_a_hook_that_extends_the_learners_is_called():
    class Extended(PPO):
        calls = 0

        @counted
        @torch.no_grad()
        def on_train_batch_end(self, *args):
            super().on_train_batch_end(*args)

        def on_fit_start(self):
            (lambda: PPO.on_fit_start(self))()

        def on_train_batch_start(self, *_):  # nothing of the learner's
            self.calls += 10

        def on_after_backward(self):  # nothing of PPO's
            self.calls += 100

        def backward(self, loss, *args, **kwargs):
            super().backward(loss, *args, **kwargs)

    learner = Extended(epochs=2, minibatches=2)
    watched_fit(learner, cartpole(2))
    assert learner.calls == 2 * 4 * 111


def test_an_end_of_the_round_of_its_own_needs_no_call_where_there_was_none():
    class Counting(A2C):
        rounds = 0

        def on_round_end(self):
            self.rounds += 1

    learner = Counting()
    watched_fit(learner, cartpole(2))
    assert learner.rounds == 2


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_a_compiled_learner_is_refused():
    with pytest.raises(ConfigurationError, match=r"torch\.compile\(PPO\): .* cannot be compiled"):
        watched_fit(torch.compile(PPO()), cartpole())


def halves(learner):
    parameters = list(learner.policy.parameters())
    return [torch.optim.SGD(parameters[:2], 0.1), torch.optim.SGD(parameters[2:], 0.1)]


FORMS_OF_SEVERAL = {
    "none": lambda _: [],
    "list": halves,
    "two lists": lambda learner: (halves(learner), []),
    "dicts": lambda learner: [{"optimizer": each} for each in halves(learner)],
}


@pytest.mark.parametrize("form", FORMS_OF_SEVERAL)
def test_several_optimizers_are_refused_by_name(form):
    class Several(A2C):
        configure_optimizers = FORMS_OF_SEVERAL[form]

    number = 0 if form == "none" else 2
    message = rf"^Several\.configure_optimizers returns {number} optimizers: .* parameter groups"
    with pytest.raises(ConfigurationError, match=message):
        watched_fit(Several(), cartpole())


def test_a_subclass_may_make_one_optimizer_of_several():
    class Several(A2C):
        configure_optimizers = halves

    class One(Several):
        def configure_optimizers(self):
            groups = [
                group for each in super().configure_optimizers() for group in each.param_groups
            ]
            return torch.optim.SGD(groups, 0.1)

    assert watched_fit(One(), cartpole(2)).updates == [0, 1]


def test_a_round_that_a_subclass_ends_without_a_step_is_refused_by_name():
    class Skips(A2C):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            if batch_idx != 1:
                super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            else:
                optimizer_closure()

    with pytest.raises(ConfigurationError, match=r"^Skips\.optimizer_step: a round ends with a"):
        watched_fit(Skips(), cartpole())


@pytest.mark.parametrize("learner", [A2C, PPO])
def test_a_subclass_that_steps_twice_on_a_part_is_refused(learner):
    class Twice(learner):
        def optimizer_step(self, *args):
            super().optimizer_step(*args)
            super().optimizer_step(*args)

    with pytest.raises(ConfigurationError, match=r"^optimizer \w+: it computes the loss"):
        watched_fit(Twice(), cartpole())


def test_a_subclass_may_step_by_itself_before_the_last_part():
    class Steps(PPO):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            if batch_idx % 2 == 0:
                optimizer.step(optimizer_closure)
            else:
                super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    assert watched_fit(Steps(epochs=1, minibatches=2), cartpole(2)).updates == [0, 1]


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("without", [0, 1, 2])
def test_a_part_that_is_not_learned_from_as_such_is_refused_by_name(without):
    class Forgets(RoundModule):
        parts_per_round = 2

        def training_step(self, part, index):
            if index == without:
                return None
            with self.learning_from(part):
                samples = part.round.reshape(-1).select("observation")
                return self.evaluate(samples)[1].square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.policy.parameters(), 0.1)

    message = r"^Forgets\.training_step: .*self\.learning_from\(part"
    with pytest.raises(ConfigurationError, match=message):
        quiet_trainer().fit(Forgets(), cartpole())


@pytest.mark.parametrize(("learner", "before", "after"), [(A2C, 1, 2), (A2C, 4, 2), (PPO, 1, 3)])
def test_accumulation_that_a_callback_changes_in_the_run_is_refused(learner, before, after):
    class Changes(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):  # noqa: ARG002
            trainer.accumulate_grad_batches = after

    told = f"^accumulate_grad_batches={after}, but the run began with {before}"
    settings = {"callbacks": [Changes()], "accumulate_grad_batches": before}
    with pytest.raises(ConfigurationError, match=told):
        watched_fit(learner(), cartpole(), **settings)


def test_parts_that_a_callback_changes_in_the_run_are_refused():
    class Fewer(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):  # noqa: ARG002
            pl_module.epochs = 1

    told = r"^PPO\.parts_per_round=2 \(.* epochs times minibatches\), but the run began with 4"
    with pytest.raises(ConfigurationError, match=told):
        watched_fit(PPO(epochs=2, minibatches=2), cartpole(), callbacks=[Fewer()])
