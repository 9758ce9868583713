"""``hts-torchrl report``: several runs and seeds in one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hts_torchrl.cli.argument_parser import HTSArgumentParser
from hts_torchrl.cli.terminal import tell
from hts_torchrl.errors import ConfigurationError


def report(arguments: Sequence[str]) -> None:
    """Write the report of the runs that the arguments name, and tell where it is.

    Args:
        arguments: those behind ``report``.

    Raises:
        ConfigurationError: if the extra ``report`` is missing, or the runs have no report.
    """
    parser = HTSArgumentParser(
        prog="hts-torchrl report", description="Learning curves and statistics of several runs."
    )
    parser.add_argument(
        "runs", nargs="+", help="folders of runs, or folders that have such below them"
    )
    parser.add_argument("--output", default="report", help="folder to write into")
    given = parser.parse_args(list(arguments))
    try:
        import rliable.library  # noqa: F401, PLC0415 - of an extra, and takes seconds
    except (ImportError, TypeError) as error:  # a TypeError with a pandas that arch does not know
        raise ConfigurationError(
            f"a report needs rliable: pip install 'hts-torchrl[report]' ({error})"
        ) from error
    from hts_torchrl.tools.report.page import write_report  # noqa: PLC0415 - of the extra

    for label, text in write_report([Path(run) for run in given.runs], Path(given.output)):
        tell(label, text)
