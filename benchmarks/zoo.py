"""The table of the latest result of each config: docs/zoo.md.

Run: python benchmarks/zoo.py [--check]

A row is a config of ``configs/``, with the figures of ``configs/results.toml``. Configs without
figures are listed below the table, and so are those without a name, which are parts of others. With
``--check`` nothing is written, and the exit status is 1 if the page is not what would be written.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
CONFIGS, PAGE = ROOT / "configs", ROOT / "docs" / "zoo.md"
COLUMNS = ("score", "steps", "minutes", "version", "machine", "remark")
HEAD = """# Zoo

The latest result of each config in `configs/`. `python benchmarks/zoo.py` writes this page from
`configs/results.toml`; [Results](results.md) has the commands and the curves. A score is the mean
of an evaluation's games, and minutes are those of training. Most rows are one run of one seed, so
no row is a comparison.
"""
NOT_RUN = """
Not yet run: {}."""
PARTS = """
Parts of other configs, which are not run on their own: {}.
"""


def page(configs: Path) -> str:
    """Return the text of the page.

    Raises:
        ValueError: if a result is of no config, or has a field that is not known.
    """
    results = tomllib.loads((configs / "results.toml").read_text())
    files = {
        str(path.relative_to(configs).with_suffix("")): yaml.safe_load(path.read_text())
        for path in sorted(configs.rglob("*.yaml"))
    }
    runs = [name for name, content in files.items() if "name" in content]
    if strange := set(results) - set(runs):
        raise ValueError(f"results.toml: no config is named {', '.join(sorted(strange))}")
    lines = [f"| config | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [
        f"| `{name}` | {' | '.join(cells(name, results[name]))} |"
        for name in runs
        if name in results
    ]
    not_run = ", ".join(f"`{name}`" for name in runs if name not in results)
    parts = ", ".join(f"`{name}`" for name in files if name not in runs)
    return "\n".join([HEAD, *lines, NOT_RUN.format(not_run), PARTS.format(parts)])


def cells(name: str, result: dict[str, object]) -> list[str]:
    if strange := set(result) - set(COLUMNS):
        raise ValueError(f"results.toml: {name} has no field {', '.join(sorted(strange))}")
    values = [result.get(column, "not recorded") for column in COLUMNS]
    return [f"{value:,}" if isinstance(value, int) else str(value) for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare the page, and write nothing")
    text = page(CONFIGS)
    if parser.parse_args().check:
        sys.exit(PAGE.read_text() != text)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
