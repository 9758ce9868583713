"""Layers that do one thing where a policy learns and another where it acts."""

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from hts_torchrl import A2C, PPO, ConfigurationError, Impala
from hts_torchrl.policy.forward import evaluate
from tests.determinism.tasks import CARTPOLE
from tests.fits import A2CWithTargets, cartpole, watched_fit
from tests.policies import LateNoise, Noise, policy_with

TWO_MODES = "the policy learns in train mode and acts in eval mode, and these do different things"


def fit(learner, rounds=3, callbacks=(), trainer=None, **settings):
    data = cartpole(rounds, env=CARTPOLE, **settings)
    return watched_fit(learner, data, callbacks=list(callbacks), **(trainer or {}))


@pytest.mark.parametrize("learner", [A2C, PPO, Impala])
@pytest.mark.parametrize("make_layer", [nn.Dropout, partial(nn.BatchNorm1d, 16)])
def test_a_layer_of_two_modes_is_named_once(learner, make_layer):
    layer = make_layer()
    with pytest.warns(UserWarning, match=TWO_MODES) as warned:
        fit(learner(policy_with(layer, CARTPOLE)))
    messages = [str(warning.message) for warning in warned]
    (message,) = (each for each in messages if each.startswith(TWO_MODES))
    assert f"there: module.0.module.2 ({type(layer).__name__}). So" in message


class Halved(nn.Module):
    def forward(self, observation):
        observation /= 2
        return observation


@pytest.mark.parametrize("learner", [A2C, PPO, Impala])
def test_a_policy_that_changes_what_it_reads_is_refused(learner):
    """Each further pass over a round would read it changed once more."""
    policy = policy_with(nn.Identity(), CARTPOLE)
    policy.module[0].module.insert(0, Halved())
    with pytest.raises(ConfigurationError, match="changes 'observation' in place"):
        fit(learner(policy))


class Modes(Callback):
    """Keeps the mode of a layer in each part of the run."""

    def __init__(self, layer):
        self.layer, self.training = layer, []

    def on_after_backward(self, *_):
        self.training.append(self.layer.training)


def evaluated(layer) -> list[bool]:
    """The modes of a layer in a run that is evaluated between its rounds."""
    modes = Modes(layer)
    settings = {"evaluation_frames": 32, "evaluation_episodes": 1}
    trainer = {"limit_val_batches": 1}
    fit(A2C(policy_with(layer, CARTPOLE)), callbacks=[modes], trainer=trainer, **settings)
    return modes.training


@pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode at the start of training")
@pytest.mark.parametrize("layer", [nn.Dropout().eval(), nn.BatchNorm1d(16).eval()])
def test_a_layer_that_the_user_put_into_eval_mode_stays_there_without_a_warning(layer):
    assert evaluated(layer) == [False] * 3


@pytest.mark.filterwarnings(f"ignore:{TWO_MODES}")
def test_a_layer_is_in_train_mode_again_after_an_evaluation():
    assert evaluated(nn.Dropout()) == [True] * 3


class Returns(Callback):
    """Keeps each round, its returns, and the weights that collected it."""

    def __init__(self, delay):
        self.delay, self.policies, self.rounds, self.returns = delay, [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):  # noqa: ARG002
        self.policies.append(copy.deepcopy(pl_module.policy))
        self.rounds.append(batch.round.clone())

    def on_after_backward(self, _, pl_module):
        self.returns.append(pl_module.targets.returns.clone())


@pytest.mark.filterwarnings(f"ignore:{TWO_MODES}")
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("make_layer", [nn.Dropout, partial(nn.BatchNorm1d, 16)])
def test_final_observations_are_valued_as_the_actors_would_have(make_layer, delay):
    """By the weights and the statistics that acted, in eval mode."""
    seen = Returns(delay)
    policy = policy_with(make_layer(), CARTPOLE)
    settings = {"gamma": 0.5, "gae_lambda": 0.0, "learning_rate": 0.1}
    learner = A2CWithTargets(policy, delayed_step="gradient", **settings)
    fit(learner, 4, [seen], delay=delay)
    for index, (batch, returns) in enumerate(zip(seen.rounds, seen.returns, strict=True)):
        acted = seen.policies[max(0, index - delay)].eval()
        last = batch["next"][:, -1]
        with torch.no_grad():
            value = evaluate(acted, {"observation": last["observation"]}, len(last)).value
        expected = last["reward"] + 0.5 * value * ~last["terminated"]
        torch.testing.assert_close(returns[:, -1], expected.squeeze(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings(f"ignore:{TWO_MODES}")
@pytest.mark.parametrize("learner", [A2C, Impala])
def test_statistics_are_taken_of_what_is_learned_and_of_nothing_else(learner):
    layer = nn.BatchNorm1d(16)
    fit(learner(policy_with(layer, CARTPOLE)), 3)
    assert layer.num_batches_tracked == 3


@pytest.mark.filterwarnings(f"ignore:{TWO_MODES}")
@pytest.mark.parametrize("delayed_step", ["ratio", "gradient"])
def test_statistics_of_all_parts_of_a_round_are_kept(delayed_step):
    layer = nn.BatchNorm1d(16)
    learner = A2C(policy_with(layer, CARTPOLE), delayed_step=delayed_step)
    fit(learner, 3, trainer={"accumulate_grad_batches": 2})
    assert layer.num_batches_tracked == 3 * 2


class Masks(Callback):
    """Keeps what a Dropout let through in each part of the run."""

    def __init__(self, layer):
        self.masks = []
        layer.register_forward_hook(self.keep)

    def keep(self, layer, inputs, output):
        if layer.training and inputs[0].requires_grad:
            self.masks.append((output != 0).clone())


def masks(state, seed=0, **settings):
    layer = nn.Dropout()
    kept = Masks(layer)
    torch.manual_seed(state)
    fit(PPO(policy_with(layer, CARTPOLE), epochs=1, minibatches=2), 2, seed=seed, **settings)
    return kept.masks


@pytest.mark.filterwarnings(f"ignore:{TWO_MODES}")
class TestDropout:
    def test_draws_what_the_seed_the_update_and_the_part_decide(self):
        first = masks(state=1)
        assert len(first) == 4
        assert all(map(torch.equal, first, masks(state=2)))
        assert not any(map(torch.equal, first, masks(state=1, seed=1)))
        assert not any(torch.equal(first[0], other) for other in first[1:])

    def test_moves_no_generator_of_the_process(self):
        class State(Callback):
            def on_train_start(self, *_):
                torch.manual_seed(3)

            def on_train_end(self, *_):
                self.drawn = torch.rand(1)

        state = State()
        fit(A2C(policy_with(nn.Dropout(), CARTPOLE)), callbacks=[state])
        torch.manual_seed(3)
        assert state.drawn == torch.rand(1)


class Draws(Callback):
    """Keeps what a hook draws in each round, and what the process draws after the training."""

    def __init__(self, state):
        self.state, self.drawn = state, []

    def on_train_start(self, *_):
        torch.manual_seed(self.state)
        np.random.seed(self.state)  # noqa: NPY002
        random.seed(self.state)

    def draw(self, *_):
        numbers = float(torch.rand(())), np.random.random(), random.random()  # noqa: NPY002
        self.drawn.append(numbers)

    on_after_backward = on_train_end = draw


def drawn(state, **settings):
    draws = Draws(state)
    fit(A2C(), callbacks=[draws], **settings)
    return draws.drawn


class TestAHook:
    def test_draws_what_the_seed_and_the_update_decide(self):
        *first, _ = drawn(state=1)
        *again, _ = drawn(state=2)
        *other, _ = drawn(state=1, seed=1)
        assert first == again
        assert len({*first, *other}) == 2 * 3

    def test_moves_no_generator_of_the_process(self):
        *_, after = drawn(state=3)
        torch.manual_seed(3)
        assert after == (
            float(torch.rand(())),
            np.random.RandomState(3).random_sample(),
            random.Random(3).random(),
        )

    def test_leaves_a_copy_of_the_learner_nothing_to_put_back(self):
        class Copies(Callback):
            def on_after_backward(self, _, module):
                copied = copy.deepcopy(module.seeded_draws)
                expected = random.getstate()
                copied.end_round()
                assert random.getstate() == expected
                self.copied = True

        fit(A2C(), callbacks=[copies := Copies()])
        assert copies.copied


NAMES = {"numpy": r"numpy's global generator \(np.random\)", "python": r"Python's .* \(random\)"}


@pytest.mark.filterwarnings(f"ignore:{TWO_MODES}")
class TestOtherGenerators:
    @pytest.mark.parametrize("generator", NAMES)
    def test_are_refused_in_the_first_part_of_any_run(self, generator):
        policy = policy_with(Noise(generator, learning=True), CARTPOLE)
        wanted = rf"draws from {NAMES[generator]} in train mode, in module.0.module.2 \(Noise\)"
        with pytest.raises(ConfigurationError, match=wanted):
            fit(A2C(policy), 1)

    def test_are_refused_in_any_part_of_a_run_that_is_debugged(self):
        with pytest.raises(ConfigurationError, match=r"in module.0.module.2 \(LateNoise\)"):
            fit(A2C(policy_with(LateNoise(), CARTPOLE)), 8, debug=True)
        fit(A2C(policy_with(LateNoise(), CARTPOLE)), 8)

    def test_may_be_drawn_from_by_others_meanwhile(self, monkeypatch):
        """By a thread of a logger, say: no module does so when asked again."""
        policy = policy_with(nn.Tanh(), CARTPOLE)
        done = []

        def other_thread(*_):
            if not done:
                Noise("numpy", learning=True)(torch.zeros(1, 1))
            done.append(True)

        fused = policy.fused
        monkeypatch.setattr(policy, "fused", lambda rows: (other_thread(), fused(rows))[1])
        fit(A2C(policy), 1, debug=True)
        assert done
