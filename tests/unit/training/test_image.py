"""Pictures for videos, and environments that draw none."""

import gymnasium
import numpy as np
import pytest

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.training.evaluation import image_of


class Drawing:
    """A group that draws what it is given, or raises it."""

    def __init__(self, drawn):
        self.drawn = drawn

    def render(self):
        if isinstance(self.drawn, Exception):
            raise self.drawn
        return self.drawn


def test_a_picture_of_bytes_is_left_as_it_is():
    drawn = np.random.default_rng(0).integers(0, 256, (210, 160, 3), np.uint8)
    assert np.array_equal(image_of(Drawing(drawn)), drawn)


@pytest.mark.parametrize(
    ("drawn", "bright"),
    [(1.0, 255), (0.5, 127), (np.float32(100), 100), (300.0, 255), (np.int64(7), 7), (True, 1)],
)
def test_other_numbers_become_bytes(drawn, bright):
    picture = image_of(Drawing(np.full((200, 200, 3), drawn)))
    assert picture.dtype == np.uint8
    assert (picture == bright).all()


def test_a_small_picture_is_enlarged():
    drawn = np.random.default_rng(0).random((10, 12, 3))  # as MinAtar's, numbers from 0 to 1
    picture = image_of(Drawing(drawn))
    assert picture.shape == (160, 192, 3)
    assert (picture.reshape(10, 16, 12, 16, 3) == picture[::16, None, ::16, None]).all()
    assert np.abs(picture[::16, ::16] / 255 - drawn).max() < 1 / 255


@pytest.mark.parametrize(
    ("drawn", "told"),
    [
        (None, "renders None, and no image"),
        ("three | four", r"renders 'three \| four'"),
        (np.zeros((2, 40, 60, 3), np.uint8), r"renders uint8 \[2, 40, 60, 3\]"),
        (NotImplementedError(), "renders no image: NotImplementedError$"),
        (gymnasium.error.DependencyNotInstalled("pygame\nis missing"), "pygame is missing$"),
        (RuntimeError("an OpenGL library is missing"), "MUJOCO_GL=egl or osmesa"),
        (ConfigurationError("no render()"), r"^no render\(\)$"),
    ],
)
def test_an_environment_that_draws_no_picture_is_refused(drawn, told):
    with pytest.raises(ConfigurationError, match=told):
        image_of(Drawing(drawn))
