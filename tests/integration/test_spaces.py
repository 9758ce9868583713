"""Learners train on environments with several observations, and with forbidden actions."""

import pytest
import torch
from torch.nn.functional import one_hot

from hts_torchrl import A2C, PPO, HTSDataModule, Impala
from tests.fakes import DictEnv, MaskedEnvs
from tests.fits import quiet_trainer, watched_fit

LEARNERS = {
    "A2C": lambda **settings: A2C(learning_rate=0.01, **settings),
    "PPO": lambda **settings: PPO(learning_rate=0.01, epochs=2, minibatches=2, **settings),
    "Impala": lambda **settings: Impala(learning_rate=0.01, **settings),
}


def data(env, rounds=8, **settings):
    defaults = {"num_envs": 3, "num_actors": 0, "frames_per_batch": 24, "evaluation_episodes": 2}
    return HTSDataModule(env, total_frames=24 * rounds, **(defaults | settings))


def probabilities(policy, round_, sizes):
    """Of all choices side by side, ``[N, T, sum(sizes)]``."""
    with torch.no_grad():
        parameters, _ = policy.heads({key: round_[key] for key in policy.in_keys})
    parts = parameters["logits"].split(sizes, -1)
    return torch.cat([part.softmax(-1) for part in parts], -1)


def chosen(round_, sizes):
    """Which choices were made, bool ``[N, T, sum(sizes)]``."""
    actions = round_["action"].reshape(*round_.shape, -1).unbind(-1)
    return torch.cat([one_hot(*pair) for pair in zip(actions, sizes, strict=True)], -1).bool()


@pytest.mark.parametrize("sizes", [(4,), (3, 5)])
@pytest.mark.parametrize("learner", LEARNERS)
def test_what_is_forbidden_is_never_done_while_a_policy_learns(learner, sizes):
    """The environment raises for it."""
    own = LEARNERS[learner]()
    watch = watched_fit(own, data(MaskedEnvs(sizes)))
    assert len(watch.rounds) == 8
    for round_ in watch.rounds:
        allowed = round_["action_mask"].bool()
        assert not (chosen(round_, sizes) & ~allowed).any()
        assert (probabilities(own.policy, round_, sizes)[~allowed] == 0.0).all()
        assert round_["action_log_prob"].isfinite().all()
    assert watch.final_weights.isfinite().all()
    assert not torch.equal(watch.final_weights, watch.round_weights[0])


@pytest.mark.thorough
def test_a_game_with_forbidden_actions_is_learned():
    """The smallest allowed action is rewarded; by chance it is in about 2 of 5 steps."""
    watch = watched_fit(PPO(learning_rate=0.01), data(MaskedEnvs(), rounds=60))
    rewards = [round_["next", "reward"].mean().item() for round_ in watch.rounds]
    assert sum(rewards[:5]) / 5 < 0.7
    assert sum(rewards[-5:]) / 5 > 0.95


@pytest.mark.processes
def test_processes_and_an_evaluation_never_do_what_is_forbidden():
    trainer = quiet_trainer(limit_val_batches=None)
    learner = A2C()
    trainer.fit(learner, datamodule=data(MaskedEnvs(), num_actors=1))
    (scores,) = trainer.validate(learner, datamodule=data(MaskedEnvs()), verbose=False)
    assert scores["eval/episode_length"] == 6.0


@pytest.mark.parametrize("learner", ["A2C", "PPO"])
def test_a_policy_of_several_observations_learns_and_is_restored(learner, tmp_path):
    trainer = quiet_trainer()
    own = LEARNERS[learner](network="impala")
    trainer.fit(own, datamodule=data(DictEnv))
    trainer.save_checkpoint(tmp_path / "policy.ckpt")
    again = type(own).load_from_checkpoint(tmp_path / "policy.ckpt")
    weights, restored = own.policy.state_dict(), again.policy.state_dict()
    assert weights.keys() == restored.keys()
    assert all(torch.equal(weights[name], restored[name]) for name in weights)
    assert set(again.policy.in_keys) == {"picture", "vector"}
