"""Staged and captured passes: with recorded operations on the CPU, and on a GPU if there is one."""

import copy
import gc

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictSequential
from torch import nn
from torch.distributions import Categorical, Distribution, Laplace
from torchrl.modules import EGreedyModule, QValueActor, TruncatedNormal

from hts_torchrl.envs.torchrl_specs import tensor_spec_of
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.layers import NarrowLinear
from hts_torchrl.policy import cuda_graph
from hts_torchrl.policy.cuda_graph import Block, StagedPass, captured
from hts_torchrl.policy.examination import examine, fill_at_random, require_capturable
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.policy.shared_weights import PolicyWeights
from hts_torchrl.shared.arrays import SharedArrays
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec
from tests.determinism.tasks import TASKS
from tests.graphs import needs_gpu, record_captures, recorded, replaying
from tests.policies import Folding, drawing_policy

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
ASKED = {"setting": "cudagraph_policy", "what": "the policy's pass"}
CAPTURABLE = [
    "cartpole", "pendulum", "lstm", "choices", "masked", "mixed", "parts", "parts remembered",
    "combined", "breakout",
]  # fmt: skip


@pytest.fixture
def recorded_graphs(monkeypatch):
    """Let recorded operations stand for captured ones; counts the captures."""
    return record_captures(monkeypatch)


def examined(name: str, make=PolicyInference, **settings) -> PolicyInference:
    """Inference of a task's policy, which answers all that the policy writes."""
    collector = TASKS[name].collector()
    collector.shutdown()
    found = examine(PolicyInference(TASKS[name].policy(), collector.env_spec, batch_size=4),
                    all_outputs=True)  # fmt: skip
    return make(
        TASKS[name].policy(), collector.env_spec, batch_size=4, extras=found.extras, **settings
    )


def observed(inference: PolicyInference, seed: int) -> tuple[dict, np.ndarray]:
    """Other inputs for every seed, and draws."""
    fill_at_random(inference, np.random.default_rng(seed))
    inputs = {key: value.numpy().copy() for key, value in inference.inputs.items()}
    return inputs, inference.draws.numpy().copy()


def same_bits(ours: dict, theirs: dict) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[key].dtype == theirs[key].dtype and ours[key].tobytes() == theirs[key].tobytes()
        for key in ours
    )


class TestBlock:
    TENSORS = {  # noqa: RUF012
        "pixels": torch.arange(24, dtype=torch.uint8).view(2, 3, 4),
        ("next", "h"): torch.tensor([[1.5], [-2.5]]),
        "first": torch.tensor([True, False]),
        "nothing": torch.zeros(2, 0),
        "draws": torch.tensor([[0.25], [0.75]], dtype=torch.float64),
        "step": torch.tensor([7, -1]),
    }

    def test_one_copy_moves_all_tensors(self):
        one, other = Block(self.TENSORS, "cpu"), Block(self.TENSORS, "cpu")
        for key, tensor in self.TENSORS.items():
            one.tensors[key].copy_(tensor)
        other.copy_from(one)
        for key, tensor in self.TENSORS.items():
            assert other.tensors[key].dtype == tensor.dtype
            assert other.tensors[key].tolist() == tensor.tolist()

    def test_each_tensor_begins_where_torchs_own_would(self):
        block = Block(self.TENSORS, "cpu")
        begins = [tensor.data_ptr() - block.memory.data_ptr() for tensor in block.tensors.values()
                  if tensor.numel()]  # fmt: skip
        assert [begin % 512 for begin in begins] == [0] * 5


def no_pass(*_):
    raise AssertionError("not to be run")


class TestStaging:
    def staged(self, inference: PolicyInference) -> StagedPass:
        return StagedPass(inference._run, inference.inputs, inference.draws, device=CPU)

    def answers(self, staged, inputs, draws, **kind) -> dict:
        for key, tensor in staged.inputs.items():
            tensor.numpy()[:] = inputs[key]
        staged.draws.numpy()[:] = draws
        answers = staged.run(**kind)
        return {key: array.copy() for key, array in answers.items()}

    @pytest.mark.parametrize("name", ["cartpole", "lstm", "mixed"])
    def test_answers_are_those_of_a_plain_pass(self, name):
        inference = examined(name)
        staged = self.staged(inference)
        for seed in range(3):
            inputs, draws = observed(inference, seed)
            expected = inference.answer(inputs, draws)
            assert same_bits(self.answers(staged, inputs, draws), expected)

    def test_kinds_of_passes_do_not_mix(self):
        inference = examined("cartpole")
        staged = self.staged(inference)
        inputs, draws = observed(inference, 0)
        kinds = [{}, {"random": True}] * 2
        expected = [inference.answer(inputs, draws, **kind) for kind in kinds]
        assert not same_bits(expected[0], expected[1])
        for kind, wanted in zip(kinds, expected, strict=True):
            assert same_bits(self.answers(staged, inputs, draws, **kind), wanted)

    def test_inputs_keep_the_values_that_they_were_given(self):
        """A pass reads them in the rows that nobody fills: a mask that forbids all gives NaN."""
        given = {"action_mask": torch.ones(2, 3, dtype=torch.bool), "place": torch.tensor([3, 3])}
        staged = StagedPass(no_pass, given, torch.zeros(2, 1, dtype=torch.float64), device=CPU)
        assert staged.inputs["action_mask"].all()
        assert staged.inputs["place"].tolist() == [3, 3]

    def test_draws_keep_the_values_that_they_were_given(self):
        draws = torch.tensor([[0.25], [0.75]], dtype=torch.float64)
        assert StagedPass(no_pass, {}, draws, device=CPU).draws.tolist() == [[0.25], [0.75]]


class TestReplays:
    @pytest.mark.parametrize("name", CAPTURABLE)
    def test_a_replay_has_the_bits_of_a_plain_pass(self, name, recorded_graphs):
        plain, replay = examined(name), examined(name, replaying)
        for seed in range(3):
            inputs, draws = observed(plain, seed)
            assert same_bits(replay.answer(inputs, draws), plain.answer(inputs, draws))
        assert recorded_graphs == [CPU]

    def test_a_greedy_pass_is_replayed_too(self, recorded_graphs):
        plain, replay = (examined("cartpole", make, greedy=True)
                         for make in (PolicyInference, replaying))  # fmt: skip
        for seed in range(3):
            inputs, draws = observed(plain, seed)
            assert same_bits(replay.answer(inputs, draws), plain.answer(inputs, draws))
        assert recorded_graphs == [CPU]

    def test_bfloat16_is_replayed_too(self, recorded_graphs):  # noqa: ARG002
        settings = {"precision": "bf16-mixed"}
        plain, replay = (
            examined("breakout", **settings),
            examined("breakout", replaying, **settings),
        )
        for seed in range(2):
            inputs, draws = observed(plain, seed)
            assert same_bits(replay.answer(inputs, draws), plain.answer(inputs, draws))

    @pytest.mark.parametrize("name", ["cartpole", "breakout", "lstm"])
    def test_weights_that_are_loaded_act_in_the_next_replay(self, name, recorded_graphs):
        plain, replay = examined(name), examined(name, replaying)
        pad(replay.policy)
        inputs, draws = observed(plain, 0)
        before = replay.answer(inputs, draws)
        exchange(plain.policy, replay.policy)
        after = replay.answer(inputs, draws)
        assert same_bits(after, plain.answer(inputs, draws))
        assert not same_bits(after, before)
        assert len(recorded_graphs) == 1

    def test_a_distribution_that_checks_its_values_is_captured(self, recorded_graphs, monkeypatch):
        monkeypatch.setattr(Distribution, "_validate_args", True)  # as torch has it
        spec = discrete(3)
        replay = replaying(probabilistic(Categorical, {"validate_args": None}), spec)
        require_capturable(replay)
        assert len(recorded_graphs) == 1
        assert Categorical(logits=torch.zeros(2))._validate_args  # as before


def pad(policy: nn.Module) -> None:
    """As an actor does, before its first answer."""
    for layer in policy.modules():
        if isinstance(layer, NarrowLinear):
            layer.pad_once()


def exchange(policy: nn.Module, replica: nn.Module) -> None:
    """Change a policy's weights, and let a replica load them from shared memory."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5).add_(0.01)
    weights = PolicyWeights(SharedArrays(PolicyWeights.layout(policy)), policy)
    weights.publish(policy.state_dict(), 1)
    weights.exchange()
    weights.load(replica)
    assert weights.acting_version == 1


def test_weights_that_are_loaded_stay_where_they_are():
    policy, replica = TASKS["cartpole"].policy(), TASKS["cartpole"].policy()
    pad(replica)
    before = [parameter.data_ptr() for parameter in replica.parameters()]
    exchange(policy, replica)
    assert [parameter.data_ptr() for parameter in replica.parameters()] == before


def discrete(actions: int) -> EnvSpec:
    action = ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (actions,))
    return EnvSpec({"observation": ArraySpec((4,), np.dtype(np.float32))}, action)


def three_numbers() -> EnvSpec:
    bounds = np.ones(3, np.float32)
    numbers = ArraySpec((3,), np.dtype(np.float32))
    action = ActionSpec("continuous", numbers, low=-bounds, high=bounds)
    return EnvSpec({"observation": ArraySpec((4,), np.dtype(np.float32))}, action)


def probabilistic(distribution, kwargs=None, keys=("logits",)) -> nn.Module:
    net = nn.Linear(4, 3)
    split = net if len(keys) == 1 else nn.Sequential(net, Apart())
    settings = {"distribution_kwargs": kwargs or {}, "return_log_prob": True}
    return drawing_policy(split, *keys, draws=distribution, **settings)


class Apart(nn.Module):
    def forward(self, features):
        return features, features.exp()


class TestRefusals:
    def refusal(self, inference: PolicyInference) -> str:
        with pytest.raises(ConfigurationError, match=r"^cudagraph_policy=True: ") as raised:
            require_capturable(inference)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    def test_a_module_that_explores(self, recorded_graphs):
        spec = discrete(3)
        policy = TensorDictSequential(
            QValueActor(nn.Linear(4, 3), spec=tensor_spec_of(spec.action)),
            EGreedyModule(spec=tensor_spec_of(spec.action)),
        )
        assert "EGreedyModule draws row by row" in self.refusal(replaying(policy, spec))
        assert recorded_graphs == []

    def test_a_policy_that_writes_the_action_itself_is_not_refused(self, recorded_graphs):
        spec = discrete(3)
        policy = QValueActor(nn.Linear(4, 3), spec=tensor_spec_of(spec.action))
        require_capturable(replaying(policy, spec))
        assert len(recorded_graphs) == 1

    @pytest.mark.parametrize("dist", [TruncatedNormal, Laplace])
    def test_a_distribution_that_samples_row_by_row(self, dist, recorded_graphs):
        policy = probabilistic(dist, keys=("loc", "scale"))
        said = self.refusal(replaying(policy, three_numbers()))
        assert f"{dist.__name__} draws row by row" in said
        assert recorded_graphs == []

    def test_greedy_actions_of_such_a_distribution_are_not_refused(self, recorded_graphs):
        policy = probabilistic(Laplace, keys=("loc", "scale"))
        require_capturable(replaying(policy, three_numbers(), greedy=True))
        assert recorded_graphs == [CPU]

    @pytest.mark.parametrize("name", ["gru", "squashed"])
    def test_a_pass_that_asks_for_a_value(self, name, recorded_graphs):  # noqa: ARG002
        said = self.refusal(examined(name, replaying))
        assert "cannot be captured (operation not permitted when stream is capturing" in said

    def test_a_pass_with_other_bits_in_a_graph(self, monkeypatch):
        replay = examined("cartpole", replaying)
        right = PolicyInference.answer

        def inexact(self, *args):
            answers = right(self, *args)
            answers["state_value"][0] += 1e-6
            return answers

        monkeypatch.setattr(cuda_graph, "_capture", recorded)
        require_capturable(replay)
        monkeypatch.setattr(PolicyInference, "answer", inexact)
        assert "'state_value' has other bits in a CUDA graph" in self.refusal(replay)

    def test_a_weight_that_eval_mode_computes_is_not_where_the_graph_reads_it(self, monkeypatch):
        monkeypatch.setattr(cuda_graph, "_capture", recorded)
        policy = drawing_policy(Folding(4, 3), return_log_prob=True)
        assert "has other bits in a CUDA graph" in self.refusal(replaying(policy, discrete(3)))

    def test_a_pass_that_moves_a_tensor_from_the_cpu(self):
        numbers, elsewhere = torch.ones(2), torch.ones(2, device="meta")

        def moves():
            elsewhere.add_(numbers.to("meta"))

        with pytest.raises(ConfigurationError, match="moves a tensor of the CPU to the GPU"):
            captured(moves, elsewhere.device, **ASKED)

    @pytest.mark.parametrize("copied", [lambda x: x.to("meta", non_blocking=True),
                                        lambda x: torch.ones(2, device="meta").copy_(x)],
                             ids=["to", "copy_"])  # fmt: skip
    def test_a_number_that_is_copied_from_the_cpu_is_read_there_again(self, copied):
        with pytest.raises(ConfigurationError, match="moves a tensor of the CPU to the GPU"):
            captured(lambda: copied(torch.tensor(2.0)), torch.device("meta"), **ASKED)

    def test_a_number_of_the_cpu_is_no_such_tensor(self, monkeypatch):
        monkeypatch.setattr(cuda_graph, "_capture", lambda run, _: run)
        number, elsewhere = torch.tensor(2.0), torch.ones(2, device="meta")

        def scales():
            elsewhere.mul_(number)

        assert captured(scales, elsewhere.device, **ASKED) is scales

    def test_the_first_error_of_a_failed_capture_is_told(self, monkeypatch):
        def fail(_run, _device):
            try:
                raise RuntimeError("operation not permitted\nand a page of advice")
            finally:
                raise RuntimeError("the capture was invalidated")

        monkeypatch.setattr(cuda_graph, "_capture", fail)
        with pytest.raises(ConfigurationError, match=r"captured \(operation not permitted\); "):
            captured(lambda: None, CPU, **ASKED)
        assert gc.isenabled()


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_in_a_capture(monkeypatch, collects):
    """Another graph in it would be freed, which ends a capture (pytorch/pytorch#195397)."""
    collecting = []
    monkeypatch.setattr(cuda_graph, "_capture", lambda *_: collecting.append(gc.isenabled()))
    try:
        if not collects:
            gc.disable()
        captured(lambda: None, CPU, **ASKED)
        collecting.append(gc.isenabled())
    finally:
        gc.enable()
    assert collecting == [False, collects]


def on_gpu(name: str, *, cudagraph: bool, **settings) -> PolicyInference:
    return examined(name, device="cuda:0", cudagraph=cudagraph, **settings)


class TestOnAGPU:
    pytestmark = needs_gpu

    @pytest.fixture(autouse=True)
    def _freed(self):
        yield
        gc.collect()

    @pytest.mark.parametrize("name", CAPTURABLE)
    def test_a_staged_pass_has_the_bits_of_a_plain_one(self, name):
        staged = on_gpu(name, cudagraph=False)
        for seed in range(3):
            inputs, draws = observed(staged, seed)
            plain, _ = staged.run_batch()
            expected = {key: value.cpu().numpy() for key, value in plain.items()}
            assert same_bits(staged.answer(inputs, draws), expected)

    @pytest.mark.parametrize("greedy", [False, True])
    @pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
    @pytest.mark.parametrize("name", CAPTURABLE)
    def test_a_graph_has_the_bits_of_a_pass_without(self, name, precision, greedy):
        plain, graph = (
            on_gpu(name, cudagraph=cudagraph, precision=precision, greedy=greedy)
            for cudagraph in (False, True)
        )
        for seed in range(5):
            inputs, draws = observed(plain, seed)
            assert same_bits(graph.answer(inputs, draws), plain.answer(inputs, draws))

    @pytest.mark.parametrize("name", ["cartpole", "breakout", "lstm"])
    def test_weights_that_are_loaded_act_in_the_next_replay(self, name):
        plain, graph = (on_gpu(name, cudagraph=cudagraph) for cudagraph in (False, True))
        pad(graph.policy)
        inputs, draws = observed(plain, 0)
        before = graph.answer(inputs, draws)
        policy = copy.deepcopy(plain.policy).cpu()
        exchange(policy, graph.policy)
        plain.policy.load_state_dict(policy.state_dict())
        after = graph.answer(inputs, draws)
        assert same_bits(after, plain.answer(inputs, draws))
        assert not same_bits(after, before)

    @pytest.mark.parametrize("name", CAPTURABLE)
    def test_answers_are_near_those_of_the_cpu(self, name):
        plain, graph = examined(name), on_gpu(name, cudagraph=True)
        inputs, draws = observed(plain, 0)
        ours, theirs = graph.answer(inputs, draws), plain.answer(inputs, draws)
        for key, value in theirs.items():
            if np.issubdtype(value.dtype, np.floating):
                assert ours[key] == pytest.approx(value, rel=0.02, abs=0.02), key

    @pytest.mark.parametrize("name", ["gru", "squashed"])
    def test_a_pass_that_no_graph_can_hold_is_refused(self, name):
        with pytest.raises(ConfigurationError, match=r"^cudagraph_policy=True: the policy's pass"):
            require_capturable(on_gpu(name, cudagraph=True))
        inference = on_gpu(name, cudagraph=False)  # the GPU works on
        inference.answer(*observed(inference, 0))

    def test_draws_are_decided_where_deterministic_algorithms_are_asked_for(self, monkeypatch):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        try:
            inference = on_gpu("breakout", cudagraph=False)
            inference.answer(*observed(inference, 0))
        finally:
            torch.use_deterministic_algorithms(False)
