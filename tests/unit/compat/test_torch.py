from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Distribution

from tests.unit.compat.private_names import private_names_of


def test_all_sources_are_copied():
    with private_names_of("torch") as compat:
        targets = [torch.zeros(2), torch.zeros(3)]
        compat.copy_all(targets, [torch.ones(2), torch.full((3,), 2.0)])
        assert [t.tolist() for t in targets] == [[1, 1], [2, 2, 2]]


def test_each_tensor_has_its_norm():
    with private_names_of("torch") as compat:
        assert torch.stack(compat.norms([torch.tensor([3.0, 4.0]), torch.zeros(2)])).tolist() == [
            5.0,
            0.0,
        ]


def test_the_last_rates_are_those_of_schedule_and_optimiser():
    with private_names_of("torch") as compat:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        compat.set_last_rates(scheduler, [0.25])
        assert scheduler.get_last_lr() == [0.25]
        assert optimizer.param_groups[0]["lr"] == 0.25


def test_bfloat16_is_in_hardware_or_not():
    with private_names_of("torch") as compat:
        assert compat.bfloat16_in_hardware() in (True, False)


def test_trees_of_tuples_and_dicts_are_walked():
    with private_names_of("torch") as compat:
        assert compat.tree_leaves((1, {"a": [2]})) == [1, 2]
        assert compat.tree_map(lambda x: -x, (1, {"a": [2]})) == (-1, {"a": [-2]})


def test_distributions_check_no_values_for_a_while(monkeypatch):
    with private_names_of("torch") as compat:
        monkeypatch.setattr(Distribution, "_validate_args", True)
        with compat.unvalidated_distributions():
            Bernoulli(probs=torch.tensor(2.0))
        with pytest.raises(ValueError, match="Expected parameter probs"):
            Bernoulli(probs=torch.tensor(2.0))


def test_slow_guards_of_python_3_13_0_are_no_warning_of_a_compile(monkeypatch):
    with private_names_of("torch") as compat:
        from torch._dynamo import guards  # noqa: PLC0415 - takes a second

        monkeypatch.setattr(guards, "sys", SimpleNamespace(version_info=(3, 13, 0)))
        guard = guards.GuardBuilder._get_generic_dict_manager_example_value
        with pytest.warns(RuntimeWarning, match=r"3\.13\.0"):
            guard({})
        with compat.compile_settings():
            guard({})


def test_copies_from_the_cpu_are_noted_and_numbers_are_not():
    with private_names_of("torch") as compat:
        elsewhere = torch.ones(2, device="meta")
        with compat.CopiesFromCPU(elsewhere.device) as copies:
            elsewhere.mul_(torch.tensor(2.0))
            torch.ones(2).add_(1)
            assert copies.found == []
            torch.ones(2).to("meta")
        assert copies.found == ["aten._to_copy.default"]


def test_hooks_are_found_by_when_they_run():
    with private_names_of("torch") as compat:
        layer = nn.Linear(1, 1)
        hooks = [lambda *_: None for _ in range(4)]
        layer.register_forward_hook(hooks[0])
        layer.register_forward_pre_hook(hooks[1])
        layer.register_full_backward_hook(hooks[2])
        layer.register_full_backward_pre_hook(hooks[3])
        assert set(compat.hooks_of(layer)) == set(hooks)


def test_what_vmap_runs_is_told_from_the_rest():
    with private_names_of("torch") as compat:
        told = []
        torch.func.vmap(lambda row: told.append(compat.is_transforming()) or row)(torch.ones(2))
        assert told == [True]
        assert not compat.is_transforming()
