"""TorchRL's trainers of whole algorithms run on the collector, as on TorchRL's own."""

import copy

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import Categorical, LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules import (
    MLP,
    EGreedyModule,
    NormalParamExtractor,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import ClipPPOLoss, DQNLoss, SACLoss, SoftUpdate
from torchrl.trainers.algorithms import DQNTrainer, PPOTrainer, SACTrainer

from hts_torchrl import (
    ConfigurationError,
    GymEnvs,
    HTSCollector,
    env_spec_of,
    make_actor_critic,
)

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:.*Trainer is an experimental/prototype feature:UserWarning"),
    pytest.mark.filterwarnings("ignore:The '.*' hook stage:FutureWarning"),  # TorchRL's own
]
FRAMES, ROUNDS = 64, 6
CARTPOLE = GymEnvs("CartPole-v1")
PENDULUM = GymEnvs("Pendulum-v1")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Watched(HTSCollector):
    """A collector that notes of each batch which weights collected it."""

    def iterator(self):
        self.versions = []
        for batch in super().iterator():
            (version,) = batch["collector", "policy_version"].unique().tolist()
            self.versions.append(version)
            yield batch


def collect(env, policy, **settings) -> Watched:
    return Watched(
        env, policy, num_envs=4, envs_per_executor=4, frames_per_batch=FRAMES,
        total_frames=ROUNDS * FRAMES, **settings,
    )  # fmt: skip


def train(trainer_class, collector, loss, **settings):
    """Return the trainer afterwards; every weight of the loss's first network has changed."""
    before = copy.deepcopy(collector.policy.state_dict())
    trainer = trainer_class(
        collector=collector, total_frames=ROUNDS * FRAMES, frame_skip=1, optim_steps_per_batch=2,
        loss_module=loss, optimizer=torch.optim.Adam(loss.parameters(), lr=1e-2),
        episode_reward_key="episode_reward", progress_bar=False, seed=5, **settings,
    )  # fmt: skip
    trainer.train()
    assert trainer.collected_frames == ROUNDS * FRAMES
    changed = [
        name
        for name, weight in collector.policy.state_dict().items()
        if not torch.equal(weight, before[name])
    ]
    assert {name for name, _ in collector.policy.named_parameters()} <= set(changed)
    return trainer


def replay(**settings) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(ROUNDS * FRAMES), batch_size=32, **settings)


def test_dqn():
    spec = Categorical(2)
    actor = QValueActor(MLP(4, 2, num_cells=[16]), in_keys=["observation"], spec=spec)
    greedy = EGreedyModule(spec, eps_end=0.1, annealing_num_steps=2 * FRAMES)
    policy = TensorDictSequential(actor, greedy)
    loss = DQNLoss(actor, action_space=spec, delay_value=True)
    collector = collect(CARTPOLE, policy, init_random_frames=2 * FRAMES)
    train(
        DQNTrainer, collector, loss, replay_buffer=replay(), greedy_module=greedy,
        target_net_updater=SoftUpdate(loss, tau=0.1),
    )  # fmt: skip
    assert collector.versions == [0, 0, 1, 2, 3, 4]
    assert float(greedy.eps) == pytest.approx(0.1)


def test_sac():
    net = nn.Sequential(MLP(3, 2, num_cells=[16]), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]), ["loc", "scale"],
        distribution_class=TanhNormal, distribution_kwargs={"low": -2.0, "high": 2.0},
    )  # fmt: skip
    critic = ValueOperator(
        MLP(4, 1, num_cells=[16]), ["observation", "action"], ["state_action_value"]
    )
    collector = collect(PENDULUM, actor, init_random_frames=2 * FRAMES)
    loss = SACLoss(actor, critic)
    trainer = train(
        SACTrainer, collector, loss, replay_buffer=replay(),
        target_net_updater=SoftUpdate(loss, tau=0.1),
    )  # fmt: skip
    assert trainer.loss_module.target_entropy == -1
    assert collector.versions == [0, 0, 1, 2, 3, 4]


def test_ppo():
    policy = make_actor_critic("mlp", env_spec_of(CARTPOLE))
    actor, critic = policy.get_policy_operator(), policy.get_value_operator()
    collector = collect(CARTPOLE, actor)
    train(
        PPOTrainer, collector, ClipPPOLoss(actor, critic),
        replay_buffer=replay(sampler=SamplerWithoutReplacement()),
    )  # fmt: skip
    assert collector.versions == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("buffer", [None, "of the trainer", "of both"])
def test_asynchronous_collection_is_refused_in_one_line(buffer):
    policy = make_actor_critic("mlp", env_spec_of(CARTPOLE))
    actor, critic = policy.get_policy_operator(), policy.get_value_operator()
    rows = None if buffer is None else replay(sampler=SamplerWithoutReplacement())
    collector = collect(CARTPOLE, actor, replay_buffer=rows if buffer == "of both" else None)
    with pytest.raises(ConfigurationError, match="replay_buffer"):
        train(
            PPOTrainer, collector, ClipPPOLoss(actor, critic), replay_buffer=rows,
            async_collection=True,
        )  # fmt: skip
    collector.shutdown()
