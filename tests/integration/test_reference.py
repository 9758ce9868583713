"""The reference has every public name."""

import re
from pathlib import Path

import hts_torchrl

REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"


def test_every_public_name_is_in_the_reference_once():
    listed = re.findall(r"\.\. auto\w+:: hts_torchrl\.(\w+)$", REFERENCE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(hts_torchrl.__all__)


def test_what_a_learner_of_ones_own_calls_and_overrides_is_in_the_reference():
    tutorial = (REFERENCE.parent / "tutorials" / "learner.md").read_text()
    called = re.findall(r"^\| `(\w+)\(", tutorial, re.MULTILINE)
    assert {"learning_from", "rewards"} <= {*called}
    others = ("loss", "samples_to_learn", "on_samples_ready", "configure_optimizers")
    used = [*called, *others, "values_of", "updates"]
    assert [name for name in used if name not in tutorial] == []
    listed = re.findall(r"(?:members|auto(?:method|attribute):): (.+)", REFERENCE.read_text())
    assert {*used} - {*re.findall(r"\w+", " ".join(listed))} == set()
