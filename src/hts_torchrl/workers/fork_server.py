"""Imported by the fork server before anything else, so that its children can be terminated.

The pool starts the server with these signals held back: a SIGTERM that a service manager, a cluster
scheduler or ``timeout`` sends to all processes of a run must not end it, or workers would look dead
to the parent. Nor must the SIGUSR1 with which SLURM lets Lightning requeue a job. Children inherit
what is held back, and others start children from it, too.
"""

import os
import signal
import sys
from functools import partial

from hts_torchrl.workers.process import HELD_BACK

os.register_at_fork(after_in_child=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, HELD_BACK))
# Modules to be imported here may lie in the working folder, as the parent's script does.
sys.path.append("")
