"""The reference has every public name."""

import re
from pathlib import Path

import hts_torchrl

REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"


def test_every_public_name_is_in_the_reference_once():
    listed = re.findall(r"\.\. auto\w+:: hts_torchrl\.(\w+)$", REFERENCE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(hts_torchrl.__all__)
