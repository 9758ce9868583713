"""No order of events changes a bit; and the check would tell if one did."""

import numpy as np
import pytest
import torch

from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.policy.shared_weights import PolicyWeights
from tests.determinism.scrambled import ScrambledCollector
from tests.determinism.tasks import TASKS
from tests.runs import digest, perturbed, play

ORDERS = range(6)


def serial(task, **settings) -> str:
    return digest(play(task.collector(**settings), perturbed(task.policy())))


def scrambled(task, order: int, **settings) -> str:
    kind = type("Ordered", (ScrambledCollector,), {"order": order})
    return digest(play(task.collector(kind, **settings), perturbed(task.policy())))


@pytest.mark.parametrize(
    "name", ["coordinates", "cartpole", "pendulum", "squashed", "choices", "parts"]
)
def test_the_bits_do_not_depend_on_who_answers_whom_and_when(name):
    task = TASKS[name]
    assert {scrambled(task, order) for order in ORDERS} == {serial(task)}


@pytest.mark.parametrize("delay", [0, 1])
def test_groups_and_the_order_in_them_do_not_change_the_bits(delay):
    task = TASKS["cartpole"]
    digests = {
        scrambled(task, group, envs_per_executor=group, delay=delay) for group in (1, 2, 4, 8)
    }
    assert digests == {serial(task, delay=delay)}


@pytest.mark.thorough
def test_atari_frames_are_the_same_in_any_order():
    task = TASKS["breakout"]
    digests = {scrambled(task, group, envs_per_executor=group) for group in (1, 2)}
    assert digests == {serial(task)}


class TestOnPurpose:
    """Each promise is broken on purpose: the comparison above must then fail."""

    task = TASKS["cartpole"]

    def test_draws_that_belong_to_the_actor_are_found(self, monkeypatch):
        answer = PolicyInference.answer

        def own_draws(self, observations, draws, **kwargs):
            drawn = np.random.random_sample(draws.shape)  # noqa: NPY002
            return answer(self, observations, drawn, **kwargs)

        monkeypatch.setattr(PolicyInference, "answer", own_draws)
        digests = []
        for run in (serial, serial, lambda task: scrambled(task, 0)):
            np.random.seed(5)  # noqa: NPY002
            digests.append(run(self.task))
        assert digests[0] == digests[1]
        assert digests[0] != digests[2]

    def test_passes_of_varying_size_are_found(self, monkeypatch):
        if not bits_depend_on_batch_size(self.task.policy()):
            pytest.skip("this processor gives the same bits at every batch size")
        answer, init = PolicyInference.answer, PolicyInference.__init__

        def remember_spec(self, policy, spec, **kwargs):
            self.spec = spec
            init(self, policy, spec, **kwargs)

        def as_many_as_there_are(self, observations, draws, **kwargs):
            sized = PolicyInference(self.policy, self.spec, batch_size=len(draws))
            return answer(sized, observations, draws, **kwargs)

        monkeypatch.setattr(PolicyInference, "__init__", remember_spec)
        monkeypatch.setattr(PolicyInference, "answer", as_many_as_there_are)
        assert serial(self.task) == serial(self.task)
        assert serial(self.task) not in {scrambled(self.task, order) for order in ORDERS}

    def test_weights_that_act_as_soon_as_they_are_published_are_found(self, monkeypatch):
        publish = PolicyWeights.publish

        def publish_and_exchange(self, state, version=None):
            publish(self, state, version)
            self.exchange()

        monkeypatch.setattr(PolicyWeights, "publish", publish_and_exchange)
        assert serial(self.task) not in {scrambled(self.task, order) for order in ORDERS}

    def test_an_answer_for_the_neighbour_is_found(self, monkeypatch):
        answer = PolicyInference.answer

        def shifted(self, observations, draws, **kwargs):
            answers = answer(self, observations, draws, **kwargs)
            return {key: np.roll(value, 1, 0) for key, value in answers.items()}

        monkeypatch.setattr(PolicyInference, "answer", shifted)
        assert serial(self.task) not in {scrambled(self.task, order) for order in ORDERS}


def bits_depend_on_batch_size(policy) -> bool:
    rows = {"observation": torch.randn(8, 4)}
    with torch.no_grad():
        whole = policy.heads(rows)[1]
        parts = [
            policy.heads({"observation": rows["observation"][:size]})[1] for size in range(1, 8)
        ]
    return not all(torch.equal(part, whole[: len(part)]) for part in parts)
