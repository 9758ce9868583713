"""Ends the process if its working folder was removed; the command line imports it before torch.

Without one, a library of torch ends the process while it is loaded, in words of its own.
"""

import sys
from pathlib import Path

try:
    Path.cwd()
except FileNotFoundError:
    sys.stderr.write("hts-torchrl: error: the working folder was removed: change to another\n")
    raise SystemExit(2) from None
