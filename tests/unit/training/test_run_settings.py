"""What a checkpoint tells of a run's settings, and whether two runs have the same."""

import pytest

from hts_torchrl import EnvFactory, GymEnvs
from hts_torchrl.training.run_settings import changes, described


class Plain(EnvFactory):
    """A factory that is no dataclass; what it computes is none of its arguments."""

    def __init__(self, size: int, layout: object = None) -> None:
        self.size = size
        self.layout = layout
        self.area = size**2

    def group(self, indices, *, render=False):
        raise NotImplementedError


def test_arguments_are_told_of_a_class_that_is_no_dataclass():
    assert described(Plain(3, "wide")) == {
        "class_path": f"{__name__}.Plain",
        "init_args": {"size": 3, "layout": "wide"},
    }


def test_what_is_no_plain_data_is_told_by_its_type():
    told = described(Plain(3, [1, {"walls": (2.5, object())}, Plain]))["init_args"]
    assert told["layout"] == [1, {"walls": [2.5, "<object>"]}, "<ABCMeta>"]


def test_a_class_without_a_signature_has_no_arguments():
    assert described(range(3)) == {"class_path": "builtins.range", "init_args": {}}


@pytest.mark.parametrize("layout", [[[0, 1], [9, 0]], [{"a": 2}], [[0, 1]], [[0, 1], [1, 0.5]]])
def test_a_change_in_a_list_of_lists_is_a_change(layout):
    one, other = (
        {"env": described(GymEnvs("Any-v0", {"layout": each}))}
        for each in ([[0, 1], [1, 0]], layout)
    )
    differing = {"env.kwargs": ({"layout": [[0, 1], [1, 0]]}, {"layout": layout})}
    assert changes(one, other) == differing
    assert changes(one, one) == {}
