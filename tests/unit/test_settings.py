"""Classes that take the settings of a record."""

import inspect
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hts_torchrl import HTSCollector, HTSDataModule
from hts_torchrl.config import CollectorSettings
from hts_torchrl.settings import field_docs, loadable, takes_settings


@dataclass(frozen=True, kw_only=True)
class Base:
    size: int
    """how large."""


@dataclass(frozen=True, kw_only=True)
class Record(Base):
    speed: float = 1.5
    """how fast,
    in m/s."""
    place: int = 0
    """where."""


@takes_settings(Record, besides=["place"])
class Box:
    """A box.

    Args:
        name: what it is called.

    Raises:
        ValueError: never.
    """

    def __init__(self, name: str, *, open: bool = False, **settings) -> None:
        self.name, self.open = name, open
        self.record = Record(place=7, **settings)


def test_the_signature_has_own_arguments_and_those_of_the_record():
    parameters = inspect.signature(Box).parameters
    assert list(parameters) == ["name", "open", "size", "speed"]
    assert parameters["size"].default is inspect.Parameter.empty
    assert (parameters["speed"].default, parameters["speed"].annotation) == (1.5, float)


def test_the_class_is_documented_with_the_docstrings_of_fields():
    assert inspect.getdoc(Box).split("\n\n")[1].splitlines() == [
        "Args:",
        "    name: what it is called.",
        "    size: how large.",
        "    speed: how fast, in m/s.",
    ]
    assert "Raises" in inspect.getdoc(Box)


def test_settings_reach_the_record():
    assert Box("it", size=3).record == Record(size=3, speed=1.5, place=7)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sped": 1.0}, r"Box\(\) has no setting 'sped'; did you mean 'speed'\?"),
        ({"opn": True}, "did you mean 'open'"),
        ({"place": 1}, "Box.. has no setting 'place'"),
        ({"xyzzy": 1}, "'xyzzy'$"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest(given, message):
    with pytest.raises(TypeError, match=message):
        Box("it", size=3, **given)


def test_several_records_are_shown_one_after_another_and_silent_names_not_at_all():
    @dataclass(frozen=True, kw_only=True)
    class Colour:
        hue: int = 3
        """of the rainbow."""

    @takes_settings(Record, Colour, silently=["weight"])
    class Painted:
        """Painted.

        Args:
            name: what it is called.
        """

        def __init__(self, name: str, **settings) -> None:
            self.name, self.settings = name, settings

    assert list(inspect.signature(Painted).parameters) == ["name", "size", "speed", "place", "hue"]
    assert inspect.getdoc(Painted).splitlines()[-1] == "    hue: of the rainbow."
    assert Painted("it", size=3, hue=1, weight=2).settings == {"size": 3, "hue": 1, "weight": 2}
    with pytest.raises(TypeError, match="did you mean 'hue'"):
        Painted("it", hues=1)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        ((np.float64(0.25), "a"), (0.25, "a")),
        ({"several": [np.True_]}, {"several": [True]}),
    ],
)
def test_numbers_of_numpys_are_kept_as_pythons_which_load_without_code(given, kept, tmp_path):
    torch.save(loadable(given), tmp_path / "settings.ckpt")
    found = torch.load(tmp_path / "settings.ckpt", weights_only=True)
    assert (found, type(found)) == (kept, type(kept))


@pytest.mark.parametrize("error", [OSError, TypeError])
def test_a_record_without_its_source_has_no_texts(monkeypatch, error):
    """As in a program that was frozen into one file."""

    def refuse(_):
        raise error

    monkeypatch.setattr(inspect, "getsource", refuse)
    assert field_docs(Record) == {}


@pytest.mark.parametrize(
    ("taking", "hidden"), [(HTSCollector, set()), (HTSDataModule, {"first_env", "reward_discount"})]
)
def test_every_setting_of_a_collector_is_shown_and_explained(taking, hidden):
    docs = field_docs(CollectorSettings)
    shown = inspect.signature(taking).parameters
    assert docs.keys() == set(CollectorSettings.__dataclass_fields__)
    assert docs.keys() - shown.keys() == hidden
    for name in docs.keys() - hidden:
        assert f"\n    {name}: " in inspect.getdoc(taking)


def test_a_deque_is_saved_as_a_list_with_a_warning():
    with pytest.warns(UserWarning, match="a deque, of an optimizer's state or of a setting, is"):
        assert loadable({"history": [deque([np.int64(1)], maxlen=2)]}) == {"history": [[1]]}
