"""Users' policies with a CompositeDistribution act, learn, are evaluated, resumed and saved."""

import pytest
import torch
from benchmarks.own_envs import TorqueAndGear
from tensordict.nn import (
    CompositeDistribution,
    TensorDictModule,
    set_composite_lp_aggregate,
)
from torch import distributions as d
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper, RenameTransform, TransformedEnv
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from hts_torchrl import (
    A2C,
    PPO,
    HTSCollector,
    HTSDataModule,
    Impala,
    env_spec_of,
    load_policy,
    make_actor_critic,
    save_policy,
)
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.policy.onnx_file import save_onnx
from tests.fakes import NestedActionEnv
from tests.fits import flat, quiet_trainer, watched_fit
from tests.policies import composite_policy
from tests.runs import digest, play, stopped_after

LEARNERS = {
    "A2C": lambda policy, **settings: A2C(policy, learning_rate=0.01, **settings),
    "PPO": lambda policy, **settings: PPO(policy, epochs=2, minibatches=2, **settings),
    "PPO ratio": lambda policy, **settings: PPO(
        policy, epochs=2, minibatches=2, delayed_step="ratio", **settings
    ),
    "Impala": lambda policy, **settings: Impala(policy, learning_rate=0.01, **settings),
}


@pytest.fixture(params=[False, True], ids=["apart", "aggregated"])
def aggregate(request):
    with set_composite_lp_aggregate(request.param):
        yield request.param


def data(env=NestedActionEnv, rounds=5, **settings):
    defaults = {"num_envs": 4, "num_actors": 0, "frames_per_batch": 32, "evaluation_episodes": 4}
    return HTSDataModule(env, total_frames=32 * rounds, **(defaults | settings))


def built_in(network="mlp"):
    """The built-in network with the weights of ``composite_policy``."""
    torch.manual_seed(1)
    return make_actor_critic(network, env_spec_of(NestedActionEnv))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, observation):
        numbers = self.layer(observation)
        return numbers[..., :3], numbers[..., 3:4], numbers[..., 4:].exp()


def torchrl_actor(gear="gear", torque="torque"):
    """An actor as its user builds it for TorchRL's own collector."""
    torch.manual_seed(0)
    keys = [
        ("params", "gear", "logits"),
        ("params", "torque", "loc"),
        ("params", "torque", "scale"),
    ]
    return ProbabilisticActor(
        TensorDictModule(Net(), ["observation"], keys),
        in_keys=["params"],
        out_keys=[gear, torque],
        distribution_class=CompositeDistribution,
        distribution_kwargs={
            "distribution_map": {"gear": d.Categorical, "torque": d.Normal},
            "name_map": {"gear": gear, "torque": torque},
        },
        return_log_prob=True,
        default_interaction_type="random",
    )


def gym_env(_=0):
    return GymWrapper(TorqueAndGear(), categorical_action_encoding=True)


def two_robots(_=0):
    """The two parts under keys of two agents."""
    names = [("agent_a", "action"), ("agent_b", "action")]
    return TransformedEnv(gym_env(), RenameTransform([], [], ["gear", "torque"], names))


def collect(env, policy, rounds=3, **settings):
    defaults = {"num_envs": 4, "num_actors": 0, "frames_per_batch": 32}
    return HTSCollector(env, policy, total_frames=32 * rounds, **(defaults | settings))


class TestBatches:
    def test_they_have_torchrls_keys_and_shapes(self, aggregate):
        collector = Collector(
            gym_env(), torchrl_actor(), frames_per_batch=8, total_frames=8,
            auto_register_policy_transforms=False,
        )  # fmt: skip
        (theirs,) = collector
        collector.shutdown()
        (ours,) = play(collect(gym_env, torchrl_actor(), rounds=1))
        shapes = [
            {
                key: (value.dtype, value.shape[batch.ndim :])
                for key, value in batch.items(True, True)
            }
            for batch in (theirs, ours)
        ]
        left_out = {"gear_log_prob", "torque_log_prob"} if aggregate else set()
        for key in shapes[0].keys() - left_out:
            assert shapes[1][key] == shapes[0][key], key
        added = {("collector", "action"), ("collector", "policy_version")}
        added |= {("next", name) for name in ("episode_end", "episode_reward", "step_count")}
        assert shapes[1].keys() - shapes[0].keys() == added

    @pytest.mark.parametrize(
        ("same", "env", "gear", "torque"),
        [
            (TorqueAndGear, TorqueAndGear, ("action", "gear"), ("action", "torque")),
            (gym_env, gym_env, ("action", "gear"), ("action", "torque")),
            (gym_env, two_robots, ("agent_a", "action"), ("agent_b", "action")),
        ],
    )
    def test_each_name_of_a_part_has_the_same_actions(self, same, env, gear, torque):
        expected = play(collect(same, torchrl_actor()))
        batches = play(collect(env, torchrl_actor(gear, torque)))
        for batch, other in zip(batches, expected, strict=True):
            assert torch.equal(batch[gear], other["gear"])
            assert torch.equal(batch[torque], other["torque"])
            assert torch.equal(batch["next", "reward"], other["next", "reward"])

    def test_environments_take_what_the_batch_says(self):
        """Pendulum's reward is a function of angle, speed and torque."""
        (batch,) = play(collect(TorqueAndGear, torchrl_actor(), rounds=1))
        cos, sin, speed = batch["observation"].unbind(-1)
        torque = batch["torque"].squeeze(-1).clamp(-2, 2) * (1 + batch["gear"]) / 3
        cost = torch.atan2(sin, cos) ** 2 + 0.1 * speed**2 + 0.001 * torque**2
        torch.testing.assert_close(batch["next", "reward"].squeeze(-1), -cost)

    @pytest.mark.processes
    def test_processes_have_the_bits_of_the_serial_twin(self, aggregate):
        assert aggregate in (False, True)
        serial = play(collect(gym_env, torchrl_actor()))
        parallel = play(collect(gym_env, torchrl_actor(), num_actors=2, envs_per_executor=2))
        assert digest(parallel) == digest(serial)

    def test_a_blank_batch_has_the_keys_of_a_real_one(self):
        collector = collect(TorqueAndGear, torchrl_actor(("action", "gear"), ("action", "torque")))
        blank = collector.fake_tensordict()
        (batch, *_) = play(collector)
        assert set(blank.keys(True, True)) == set(batch.keys(True, True))

    @pytest.mark.parametrize("attr", ["action_spec", "full_action_spec"])
    def test_the_spec_of_actions_is_the_environments(self, attr):
        collector = collect(gym_env, torchrl_actor())
        assert collector.getattr_env(attr) == gym_env().full_action_spec
        collector.shutdown()

    def test_deterministic_actors_take_modes_and_means(self):
        (batch,) = play(collect(gym_env, torchrl_actor(), 1, exploration_type="deterministic"))
        assert torch.equal(batch["gear"], batch["params", "gear", "logits"].argmax(-1))
        assert torch.equal(batch["torque"], batch["params", "torque", "loc"])

    def test_a_state_goes_on_with_the_same_batches(self):
        whole = digest(play(collect(gym_env, torchrl_actor(), 4)))
        assert digest(stopped_after(2, lambda: collect(gym_env, torchrl_actor(), 4))) == whole


def test_torchrls_loss_and_estimator_learn_from_the_batches():
    with set_composite_lp_aggregate(False):
        actor, critic = torchrl_actor(), ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
        loss = ClipPPOLoss(actor, critic)
        loss.set_keys(
            action=["gear", "torque"], sample_log_prob=["gear_log_prob", "torque_log_prob"]
        )
        advantage = GAE(gamma=0.9, lmbda=0.9, value_network=critic)
        optimizer = torch.optim.SGD(loss.parameters(), 1e-3)
        before = flat(actor)
        collector = collect(gym_env, actor, delay=0)
        for batch in collector:
            losses = loss(advantage(batch))
            # The weights that acted are in place: no ratio is clipped.
            assert losses["clip_fraction"] == 0
            assert losses["kl_approx"] == pytest.approx(0, abs=1e-6)
            sum(value for name, value in losses.items() if name.startswith("loss_")).backward()
            optimizer.step()
            optimizer.zero_grad()
            collector.update_policy_weights_()
        collector.shutdown()
        assert not torch.equal(flat(actor), before)


class TestLearners:
    @pytest.mark.parametrize("network", ["mlp", "lstm"])
    @pytest.mark.parametrize("learner", LEARNERS)
    def test_they_learn_what_the_built_in_network_learns(self, learner, network, aggregate):
        """Of the same weights, the same actions and gradients that differ by rounding only."""
        assert aggregate in (False, True)
        make = LEARNERS[learner]
        ours = watched_fit(make(composite_policy(network)), data(rounds=3))
        theirs = watched_fit(make(built_in(network)), data(rounds=3))
        for one, other in zip(ours.rounds, theirs.rounds, strict=True):
            torch.testing.assert_close(one["collector", "action"], other["action"])
        assert torch.equal(ours.rounds[0]["collector", "action"], theirs.rounds[0]["action"])
        assert ours.versions == theirs.versions
        torch.testing.assert_close(ours.gradients[0], theirs.gradients[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.final_weights, theirs.final_weights, rtol=1e-3, atol=1e-3)
        assert not torch.equal(ours.final_weights, ours.round_weights[0])

    @pytest.mark.parametrize("learner", ["A2C", "PPO"])
    def test_a_resumed_run_has_the_bits_of_the_whole_one(self, learner, aggregate, tmp_path):
        assert aggregate in (False, True)

        def fit(ckpt_path=None, **settings):
            own, trainer = LEARNERS[learner](composite_policy()), quiet_trainer(**settings)
            trainer.fit(own, datamodule=data(), ckpt_path=ckpt_path)
            return trainer, flat(own.policy)

        _, whole = fit()
        stopped, before = fit(max_steps=2 if learner == "A2C" else 8, max_epochs=-1)
        stopped.save_checkpoint(tmp_path / "two.ckpt")
        _, resumed = fit(tmp_path / "two.ckpt")
        assert not torch.equal(before, whole)
        assert torch.equal(resumed, whole)

    @pytest.mark.parametrize("greedy", [False, True])
    def test_an_evaluation_has_the_scores_of_the_built_in_network(self, greedy):
        scores = [
            quiet_trainer(limit_val_batches=1).validate(
                A2C(policy), data(evaluation_greedy=greedy), verbose=False
            )
            for policy in (composite_policy(), built_in())
        ]
        assert scores[0] == scores[1]

    def test_greedy_actions_are_a_tensordict_of_the_parts(self):
        observations = torch.randn(3, 6)
        ours, theirs = (A2C(policy)(observations) for policy in (composite_policy(), built_in()))
        assert ours.batch_size == (3,)
        assert torch.equal(ours["arm", "1"].float(), theirs[:, 0])
        assert torch.equal(ours["gear"].float(), theirs[:, 1:3])
        assert torch.equal(ours["arm", "0"].flatten(1), theirs[:, 3:])


def test_a_saved_policy_is_loaded_into_one_of_its_kind(tmp_path):
    policy, other = composite_policy(), composite_policy()
    nn.init.ones_(next(policy.parameters()))
    path = tmp_path / "policy.safetensors"
    save_policy(policy, path, spec=env_spec_of(NestedActionEnv), network=None)
    again = load_policy(path, other)
    assert torch.equal(flat(again), flat(policy))


def test_an_onnx_file_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="parts of an action apart"):
        save_onnx(composite_policy(), tmp_path / "p.onnx", spec=env_spec_of(NestedActionEnv))


@pytest.mark.parametrize("form", ["actors", "server"])
def test_an_asynchronous_collection_is_refused(form):
    with pytest.raises(ConfigurationError, match=f"collection={form}: .* parts of an action"):
        quiet_trainer().fit(Impala(composite_policy()), data(collection=form, num_actors=1))


def test_environments_whose_parts_have_other_names_are_refused():
    class Renamed(TorqueAndGear):
        def __init__(self):
            super().__init__()
            self.action_space = type(self.action_space)(
                {"knob": self.action_space["gear"], "torque": self.action_space["torque"]}
            )

    with pytest.raises(ConfigurationError, match=r"'knob'.*but environment 0 has.*'gear'"):
        play(collect([TorqueAndGear, Renamed] * 2, torchrl_actor(), envs_per_executor=4))
