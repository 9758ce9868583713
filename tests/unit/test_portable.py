"""Portable bits: when they are asked for, what they refuse, and how other processes get them."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.portable import VARIABLES, is_portable
from hts_torchrl.training.trainer_limits import _require_portable
from hts_torchrl.workers.ray_cluster import with_variables
from hts_torchrl.workers.rollout_node import NodeKind
from tests.fits import quiet_trainer


@pytest.fixture
def portable(monkeypatch):
    """A process whose variables ask for portable kernels, though its libraries have begun."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def avx2(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)


def trainer(**settings) -> Trainer:
    return quiet_trainer(accelerator="cpu", **settings)


def require_portable(trainer, policy_device, *, compiles):
    pool = SimpleNamespace(compile_arguments={} if compiles else None)
    _require_portable(SimpleNamespace(policy_device=policy_device, pool=pool), trainer)


@pytest.mark.usefixtures("portable")
class TestVariables:
    def test_of_all_three_libraries_make_a_process_portable(self):
        assert is_portable()

    @pytest.mark.parametrize("name", ["ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR"])
    def test_do_not_where_one_is_missing_or_says_something_else(self, monkeypatch, name):
        monkeypatch.setenv(name, "other")
        assert not is_portable()
        monkeypatch.delenv(name)
        assert not is_portable()

    def test_are_given_to_rollout_nodes_beside_the_users_own(self):
        mine = {"env_vars": {"A": "1", "MKL_CBWR": "AVX2"}, "working_dir": "."}
        given = with_variables(mine)
        assert given == {"env_vars": {"A": "1", **VARIABLES}, "working_dir": "."}
        assert with_variables({}) == {"env_vars": VARIABLES}


@pytest.mark.usefixtures("portable", "avx2")
class TestRefuses:
    def test_nothing_of_a_plain_run(self):
        require_portable(trainer(), None, compiles=False)
        require_portable(trainer(), "cpu", compiles=False)

    @pytest.mark.parametrize(
        ("settings", "device", "compiles", "message"),
        [
            ({"precision": "bf16-mixed"}, None, False, "precision=bf16-mixed; 32-true is needed"),
            ({}, "cuda:0", False, "policy_device=cuda:0; cpu is needed"),
            ({}, None, True, "compile_policy; a policy that is not compiled is needed"),
        ],
    )
    def test_what_has_no_portable_kernels(self, settings, device, compiles, message):
        with pytest.raises(ConfigurationError, match=f"^portable bits with {message}$"):
            require_portable(trainer(**settings), device, compiles=compiles)

    def test_a_processor_whose_kernels_are_others(self, monkeypatch):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        with pytest.raises(ConfigurationError, match="AVX2 is needed, and torch computes by DEFA"):
            require_portable(trainer(), None, compiles=False)


def test_two_processors_are_one_kind_of_node_where_kernels_are_portable(monkeypatch):
    def kind_of(model: str) -> NodeKind:
        monkeypatch.setattr("hts_torchrl.workers.rollout_node.cpu_model", lambda: model)
        return NodeKind.of_this_process()

    assert kind_of("EPYC") != kind_of("Xeon")
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert kind_of("EPYC") == kind_of("Xeon")
