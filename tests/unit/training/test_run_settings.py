"""What a checkpoint tells of a run's settings, and whether two runs have the same."""

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

import pytest

from hts_torchrl import ConfigurationError, EnvFactory, GymEnvs
from hts_torchrl.training.run_settings import changes, described, known_arguments

if TYPE_CHECKING:
    from decimal import Decimal


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
    assert told["layout"] == [1, {"walls": [2.5, "<object>"]}, f"<{__name__}.Plain>"]


class Terrain(Enum):
    """Of an environment."""

    FLAT = 1
    STEEP = 2


@dataclass(frozen=True)
class Wind:
    """Settings within an argument of a factory."""

    force: float
    terrain: Terrain = Terrain.FLAT


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Wind(1.0), Wind(2.0)),
        (Wind(1.0), Wind(1.0, Terrain.STEEP)),
        (Terrain.FLAT, Terrain.STEEP),
        (described, changes),
        (Wind, Plain),
    ],
)
def test_a_change_within_an_argument_is_a_change(before, after):
    one, same, other = ({"env": described(Plain(3, each))} for each in (before, before, after))
    assert changes(one, same) == {}
    assert list(changes(one, other)) == ["env.layout"]


class Positive(int):
    """As jsonargparse makes types of numbers."""


def settings(sizes: tuple[int, int], steps: Positive, mode: Literal[1, "a"], table: dict) -> None:
    """Have arguments of types that no learner of this package has."""


def test_plain_data_fits_each_type_that_it_can_be():
    given = {"sizes": [1, 2], "steps": 3, "mode": 1, "table": {"a": 0.5}}
    assert known_arguments(settings, given, "model") == given


@pytest.mark.parametrize(
    "given",
    [{"sizes": 1}, {"sizes": ["${a}"]}, {"steps": 0.5}, {"mode": True}, {"mode": 2}, {"table": []}],
)
def test_other_data_is_refused(given):
    with pytest.raises(ConfigurationError, match="a value of another type is needed"):
        known_arguments(settings, given, "model")


def test_a_type_that_is_imported_for_checkers_alone_is_none():
    def priced(price: "Decimal", count: int) -> None:
        """Have an argument whose type no running program has."""

    assert known_arguments(priced, {"price": 2, "count": 1}, "model") == {"price": 2, "count": 1}


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
