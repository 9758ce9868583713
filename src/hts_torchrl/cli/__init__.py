"""The command line, ``hts-torchrl``.

It ends here if its working folder was removed, before torch is loaded: without a working folder, a
library of torch ends the process with a message of its own.
"""

import signal
import sys
from pathlib import Path

try:
    Path.cwd()
except FileNotFoundError:
    sys.stderr.write("hts-torchrl: error: the working folder was removed: change to another\n")
    raise SystemExit(2) from None


def program() -> None:
    """Run the command line as a process of its own; Ctrl-C while torch is loaded ends it, too."""
    try:
        from hts_torchrl.cli.main import program  # noqa: PLC0415 - takes seconds
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    program()
