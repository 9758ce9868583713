import functools

import pytest
import torch
from lightning.pytorch import LightningModule

from hts_torchrl import A2C, PPO
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.learner.base import Learner
from hts_torchrl.learner.hooks import HOOKS
from tests.fits import cartpole, watched_fit


def test_all_hooks_of_lightning_that_a_learner_has_are_needed():
    own = {
        name
        for cls in Learner.__mro__
        if cls.__module__.startswith("hts_torchrl.")
        for name in vars(cls)
        if name.startswith("on_") or name == "optimizer_step"
    }
    assert {name for name in own if hasattr(LightningModule, name)} == HOOKS


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_batch_end", "optimizer_step"])
def test_a_hook_that_replaces_the_learners_is_refused(hook):
    replaced = type("Replaced", (A2C,), {hook: lambda *_: None})
    below = type("Below", (replaced,), {})
    message = rf"Replaced\.{hook} replaces .* call super\(\)\.{hook}\(\.\.\.\) in it"
    with pytest.raises(ConfigurationError, match=message):
        watched_fit(below(), cartpole())


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

    learner = Extended(epochs=2, minibatches=2)
    watched_fit(learner, cartpole(2))
    assert learner.calls == 2 * 4 * 11


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_a_compiled_learner_is_refused():
    with pytest.raises(ConfigurationError, match=r"torch\.compile\(PPO\): .* cannot be compiled"):
        watched_fit(torch.compile(PPO()), cartpole())
