"""Sphinx configuration."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

_pyproject = Path(__file__).parent.parent / "pyproject.toml"

project = "hts_torchrl"
author = "hts_torchrl contributors"
copyright = "2026, hts_torchrl contributors"
release = tomllib.loads(_pyproject.read_text(encoding="utf-8"))["project"]["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"hts_torchrl {release}"

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
# A method that overrides one of TorchRL or Lightning and has no text of its own stays without one:
# their texts use markup and references that do not resolve here.
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False

# Links into other projects' documents need a network, and a failed fetch is a warning, which ends
# the build: so only on request.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "numpy": ("https://numpy.org/doc/stable", None),
    "torch": ("https://docs.pytorch.org/docs/stable", None),
    "tensordict": ("https://docs.pytorch.org/tensordict/stable", None),
    "torchrl": ("https://docs.pytorch.org/rl/stable", None),
    "lightning": ("https://lightning.ai/docs/pytorch/stable", None),
    "gymnasium": ("https://gymnasium.farama.org", None),
}
if "DOCS_INTERSPHINX" in os.environ:
    extensions.append("sphinx.ext.intersphinx")

# Examples in docstrings know what their own module imports, which Sphinx does not.
doctest_global_setup = """
import torch
from hts_torchrl import load_policy, make_actor_critic, save_policy
"""
doctest_global_cleanup = """
from pathlib import Path
Path("policy.safetensors").unlink(missing_ok=True)
"""
