import torch
from tensordict.nn import ProbabilisticTensorDictModule
from torch.distributions import Categorical

from tests.unit.compat.private_names import private_names_of


def head(**options):
    return ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=Categorical, **options
    )


def test_a_probabilistic_module_keeps_its_generator():
    with private_names_of("tensordict") as compat:
        generator = torch.Generator()
        assert compat.drawing_options(head(generator=generator))["generator"] is generator
        assert compat.drawing_options(head(generator="seed"))["generator"] == "seed"


def test_one_that_is_given_nothing_has_no_options():
    with private_names_of("tensordict") as compat:
        assert set(compat.drawing_options(head()).values()) == {None}
