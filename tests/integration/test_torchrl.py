"""TorchRL's own parts take the collector and its batches as they take TorchRL's collectors."""

import copy
import pickle
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, set_composite_lp_aggregate
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from torchrl.envs import EnvCreator, GymEnv, NoopResetEnv, RenameTransform, TransformedEnv
from torchrl.modules import MLP, ActorValueOperator, ValueOperator
from torchrl.objectives import A2CLoss, ClipPPOLoss, KLPENPPOLoss
from torchrl.objectives.value import GAE
from torchrl.trainers import (
    DefaultOptimizationStepper,
    ReplayBufferTrainer,
    Trainer,
    UpdateWeights,
)

from hts_torchrl import GymEnvs, HTSCollector, make_actor_critic
from hts_torchrl.envs.make_group import make_group
from tests.policies import categorical_actor, nested_cartpole
from tests.runs import digest, perturbed, play

ENVS, STEPS = 4, 16
CARTPOLE = GymEnvs("CartPole-v1")
PENDULUM = GymEnvs("Pendulum-v1", {"max_episode_steps": 20})


def policy_for(create_env_fn, **settings):
    group = make_group(create_env_fn, [0])
    group.close()
    torch.manual_seed(0)
    return make_actor_critic("mlp", group.spec, **settings)


def collect(create_env_fn, policy, rounds=2, **settings) -> HTSCollector:
    frames = ENVS * STEPS
    defaults = {"num_envs": ENVS, "frames_per_batch": frames, "total_frames": rounds * frames}
    return HTSCollector(create_env_fn, policy, **(defaults | {"num_actors": 0} | settings))


def operators(policy):
    return policy.get_policy_operator(), policy.get_value_operator()


class TestBatches:
    @pytest.fixture(scope="class", params=[CARTPOLE, PENDULUM], ids=["discrete", "continuous"])
    @classmethod
    def played(cls, request):
        """The actor alone collects, as TorchRL's examples do: GAE computes the values itself."""
        policy = policy_for(request.param)
        return policy, play(collect(request.param, policy.get_policy_operator(), rounds=3))[-1]

    def test_gae_finds_the_dimension_of_time_by_itself(self, played):
        policy, batch = played
        _, critic = operators(policy)
        named = GAE(gamma=0.9, lmbda=0.8, value_network=critic)(batch.clone())
        told = GAE(gamma=0.9, lmbda=0.8, value_network=critic, time_dim=1)(batch.clone())
        assert torch.equal(named["advantage"], told["advantage"])

    def test_gae_uses_the_values_of_true_last_observations(self, played):
        """Worked by hand for one step: advantage = reward + gamma * V(next) - V, with lambda 0."""
        policy, batch = played
        _, critic = operators(policy)
        result = GAE(gamma=0.9, lmbda=0.0, value_network=critic)(batch.clone())
        value, following = (
            critic(TensorDict(observation=observation))["state_value"]
            for observation in (batch["observation"], batch["next", "observation"])
        )
        target = batch["next", "reward"] + 0.9 * following * ~batch["next", "terminated"]
        assert torch.allclose(result["advantage"], target - value, atol=1e-4)

    @pytest.mark.parametrize("loss_class", [A2CLoss, ClipPPOLoss])
    def test_losses_train_every_weight(self, played, loss_class):
        policy, batch = copy.deepcopy(played[0]), played[1].clone()
        actor, critic = operators(policy)
        GAE(gamma=0.9, lmbda=0.8, value_network=critic)(batch)
        losses = loss_class(actor, critic)(batch)
        sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
        assert all(weight.grad is not None for weight in policy.parameters())

    def test_the_ratio_of_ppo_starts_at_one(self, played):
        policy, batch = played[0], played[1].clone()
        actor, critic = operators(policy)
        GAE(gamma=0.9, lmbda=0.8, value_network=critic)(batch)
        losses = ClipPPOLoss(actor, critic)(batch)
        assert losses["kl_approx"].item() == pytest.approx(0.0, abs=1e-5)
        assert losses["clip_fraction"].item() == 0.0

    def test_a_replay_buffer_keeps_what_it_was_given(self, played):
        batch = played[1]
        buffer = ReplayBuffer(storage=LazyTensorStorage(ENVS * STEPS), batch_size=ENVS * STEPS)
        buffer.extend(batch.reshape(-1))
        assert digest([buffer[:]]) == digest([batch.reshape(-1)])


@pytest.mark.parametrize("storage", [ListStorage, LazyTensorStorage, LazyMemmapStorage])
def test_a_replay_buffer_takes_batches_as_they_come(storage):
    policy, rounds = policy_for(CARTPOLE), 4
    expected = torch.cat(play(collect(CARTPOLE, policy, rounds=rounds))).reshape(-1)
    buffer = ReplayBuffer(storage=storage(rounds * ENVS * STEPS))
    for batch in collect(CARTPOLE, policy, rounds=rounds):
        buffer.extend(batch.reshape(-1))
    kept = buffer[:]
    assert digest([torch.stack(kept) if isinstance(kept, list) else kept]) == digest([expected])


@pytest.mark.parametrize("keep", [copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))])
def test_a_batch_can_be_copied_and_pickled(keep):
    batches = list(collect(CARTPOLE, policy_for(CARTPOLE)))
    assert digest(list(map(keep, batches))) == digest(batches)
    assert keep(batches[0]).names == [None, "time"]


def test_a_batch_can_be_kept_in_files(tmp_path):
    (batch,) = collect(CARTPOLE, policy_for(CARTPOLE), rounds=1)
    batch.memmap(tmp_path)
    assert digest([TensorDict.load_memmap(tmp_path)]) == digest([batch])


def test_a_batch_has_the_entries_of_torchrls_own_collector():
    policy = policy_for(lambda _: GymEnv("CartPole-v1"))
    theirs = Collector(
        GymEnv("CartPole-v1"), policy.get_policy_operator(), frames_per_batch=8, total_frames=8,
        auto_register_policy_transforms=False,
    )  # fmt: skip
    (batch,) = play(collect(lambda _: GymEnv("CartPole-v1"), policy, rounds=1))
    for other in theirs:
        expected = {key: (value.dtype, value.shape[1:]) for key, value in other.items(True, True)}
    theirs.shutdown()
    found = {key: (value.dtype, value.shape[2:]) for key, value in batch.items(True, True)}
    assert found.items() >= expected.items()


def test_torchrls_own_actor_and_critic_may_act():
    """Of plain layers, whose last bits may depend on the row's place: so one row a pass."""
    trunk = MLP(in_features=4, out_features=32, num_cells=[32])
    policy = ActorValueOperator(
        TensorDictModule(trunk, ["observation"], ["hidden"]),
        categorical_actor(nn.Linear(32, 2), "hidden"),
        ValueOperator(nn.Linear(32, 1), in_keys=["hidden"]),
    )  # fmt: skip
    (batch, _) = play(collect(CARTPOLE, policy, inference_batch_size=1))
    actor = policy.get_policy_operator()
    expected = actor.get_dist(batch.clone()).log_prob(batch["action"])
    assert torch.allclose(batch["action_log_prob"], expected, atol=1e-5)


@pytest.mark.parametrize("whole", [True, False], ids=["actor-critic", "operator"])
@pytest.mark.parametrize("create", [CARTPOLE, PENDULUM, nested_cartpole])
@pytest.mark.parametrize("loss_class", [ClipPPOLoss, KLPENPPOLoss])
def test_a_batch_has_what_losses_read_of_the_behaviour_policy(create, loss_class, whole):
    """The newest policy is the one that acted, so that nothing has diverged."""
    policy = policy_for(create)
    actor, critic = operators(policy)
    (batch,) = play(collect(create, policy if whole else actor, rounds=1))
    batch = batch.exclude("state_value")  # of which TorchRL's GAE wants the next ones, too
    GAE(gamma=0.9, lmbda=0.8, value_network=critic)(batch)
    losses = loss_class(actor, critic)(batch)
    divergence = losses["kl_approx" if loss_class is ClipPPOLoss else "kl"]
    assert divergence.abs().max().item() == pytest.approx(0.0, abs=1e-5)
    losses["loss_objective"].backward()
    assert all(weight.grad is not None for weight in actor.parameters())


def test_an_action_under_a_path_plays_the_same_games():
    def create(_):
        return GymEnv("CartPole-v1")

    plain = play(collect(create, policy_for(create)))
    nested = play(collect(nested_cartpole, policy_for(nested_cartpole)))
    renamed = [
        batch.rename_key_(("agent", "action"), "action")
        .rename_key_(("agent", "action_log_prob"), "action_log_prob")
        .exclude("agent")
        for batch in nested
    ]
    assert digest(renamed) == digest(plain)


@pytest.mark.processes
def test_log_probabilities_have_the_key_of_the_aggregate_in_workers_too():
    with set_composite_lp_aggregate(True):
        policy = policy_for(CARTPOLE)
        serial = play(collect(CARTPOLE, policy))
        parallel = play(collect(CARTPOLE, policy, num_actors=1, envs_per_executor=4))
    assert "sample_log_prob" in serial[0]
    assert digest(parallel) == digest(serial)


@pytest.mark.parametrize(
    "weights_of", [lambda loss: loss.actor_network_params, lambda loss: loss.actor_network]
)
def test_weights_may_come_from_a_loss(weights_of):
    policy = policy_for(CARTPOLE)
    actor, critic = operators(policy)
    collector = collect(CARTPOLE, copy.deepcopy(actor), delay=0)
    batches = iter(collector)
    next(batches)
    with torch.no_grad():
        policy.module[1][0].module.bias += torch.tensor([200.0, 0.0])
    collector.update_policy_weights_(weights_of(ClipPPOLoss(actor, critic)))
    assert next(batches)["action"].sum() == 0  # the bias leaves no other choice
    collector.shutdown()


@pytest.mark.processes
def test_torchrls_gym_environments_are_collected_alike_in_processes():
    def create(_):
        return GymEnv("CartPole-v1")

    policy = policy_for(create)
    serial = play(collect(create, policy), perturbed(policy))
    parallel = play(collect(create, policy, num_actors=1, envs_per_executor=4), perturbed(policy))
    assert serial[0]["action"].shape == (ENVS, STEPS, 2)
    assert digest(parallel) == digest(serial)


def test_a_reward_of_another_name_is_found_by_the_default_key_of_losses():
    def create() -> TransformedEnv:
        return TransformedEnv(GymEnv("CartPole-v1"), RenameTransform(["reward"], ["points"]))

    policy = policy_for(create)
    (batch,) = play(collect(create, policy, rounds=1))
    assert ("next", "points") not in batch.keys(include_nested=True)
    actor, critic = operators(policy)
    batch = batch.exclude("state_value")  # of which TorchRL's GAE wants the next ones, too
    GAE(gamma=0.9, lmbda=0.9, value_network=critic)(batch)
    loss = A2CLoss(actor, critic)
    loss.set_keys(reward="reward")
    assert loss(batch)["loss_objective"].isfinite()


def noop_cartpole() -> TransformedEnv:
    """Begins by up to five steps at random, drawn from torch's global generator."""
    return TransformedEnv(GymEnv("CartPole-v1"), NoopResetEnv(5))


@pytest.mark.processes
def test_what_environments_draw_from_the_global_generator_is_theirs():
    policy = policy_for(noop_cartpole)
    before = torch.get_rng_state()
    serial = play(collect(noop_cartpole, policy), perturbed(policy))
    assert torch.equal(torch.get_rng_state(), before)
    crew = {"num_actors": 1, "envs_per_executor": 4}
    parallel = play(collect(noop_cartpole, policy, **crew), perturbed(policy))
    assert digest(parallel) == digest(serial)


@pytest.mark.processes
def test_environments_are_made_in_processes_however_torchrl_lets_users_write_them():
    """A function without an argument, a partial one, an ``EnvCreator`` and an ``EnvBase``."""
    create = [
        lambda: GymEnv("CartPole-v1"),
        partial(GymEnv, "CartPole-v1"),
        EnvCreator(lambda: GymEnv("CartPole-v1")),
        TransformedEnv(GymEnv("CartPole-v1")),
    ]
    create[-1].reset()
    policy = policy_for(create).get_policy_operator()
    settings = {"rounds": 1, "num_envs": None}
    serial = play(collect(create, policy, **settings))
    parallel = play(collect(create, policy, num_actors=1, envs_per_executor=4, **settings))
    assert serial[0]["observation"][:, 0].unique(dim=0).shape == (4, 4)
    assert digest(parallel) == digest(serial)
    assert not create[-1].is_closed


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:The 'post_loss' hook stage:FutureWarning")  # TorchRL's own
def test_torchrls_trainer_trains_ppo_on_it():
    policy = policy_for(CARTPOLE)
    before = copy.deepcopy(policy.state_dict())
    actor, critic = operators(policy)
    rounds = 6
    collector = collect(CARTPOLE, actor, rounds=rounds, num_actors=1)
    trainer = Trainer(
        collector=collector,
        total_frames=rounds * ENVS * STEPS,
        frame_skip=1,
        optim_steps_per_batch=4,
        loss_module=ClipPPOLoss(actor, critic),
        optimizer=torch.optim.Adam(policy.parameters(), lr=1e-3),
        optimization_stepper=DefaultOptimizationStepper(),
        progress_bar=False,
        seed=5,
    )
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    versions = []
    trainer.register_op("batch_process", advantage)
    trainer.register_op(
        "batch_process", lambda batch: versions.append(_version(batch)) or batch.clone()
    )
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(ENVS * STEPS), sampler=SamplerWithoutReplacement(), batch_size=32
    )
    ReplayBufferTrainer(buffer, flatten_tensordicts=True).register(trainer)
    UpdateWeights(collector, 1).register(trainer)
    trainer.train()
    assert trainer.collected_frames == rounds * ENVS * STEPS
    assert versions == [0, 0, 1, 2, 3, 4]
    assert not any(torch.equal(before[name], new) for name, new in policy.state_dict().items())


def _version(batch) -> int:
    (version,) = batch["collector", "policy_version"].unique().tolist()
    return version
