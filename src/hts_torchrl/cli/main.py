"""The entry point of ``hts-torchrl``: from arguments to an exit status."""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import resource
import select
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import gymnasium
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.utilities.exceptions import SIGTERMException

from hts_torchrl.cli.argument_parser import HTSArgumentParser
from hts_torchrl.cli.fit_commands import end_with_parent, names_seeds, train_seeds
from hts_torchrl.cli.subcommands import run_subcommand
from hts_torchrl.cli.terminal import RunReport, leave_out_noise, tell
from hts_torchrl.cli.tune import tune
from hts_torchrl.errors import (
    NO_ROOM,
    CheckpointError,
    ConfigurationError,
    DifferenceError,
    NotFiniteError,
    ReplayError,
    WorkerError,
    WorkerKilled,
)
from hts_torchrl.tools.doctor import examine
from hts_torchrl.training.callbacks.stop_together import leave_together

_WORKER_ENDED = re.compile(
    r"At least one process failed: |[Ee]nvironment worker process exited while "
    r"|All collector workers exited while |The inference server died while |ProcessInferenceServer "
)
"""In an error of TorchRL's collectors, whose workers end with a traceback or are killed."""
_RANK_LOST = re.compile(
    r"/gloo/|timeout caused pair closure|clients joined|client socket has timed out"
)
"""In an error of a rank that waits for others, also for those that never come."""
_NO_MODULE = re.compile(r"No module named '(?P<name>\w+)'")
_REFUSED = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""Of an OSError: the path that it names is none that may be used."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; wrong input ends with one line and status 2."""
    leave_out_noise()
    try:
        _run(sys.argv[1:] if arguments is None else arguments)
        leave_together()
    except (
        ConfigurationError,
        MisconfigurationException,
        ModuleNotFoundError,  # of what a callback or a logger needs
        gymnasium.error.Error,
    ) as error:
        _leave(error, status=2)
    except WorkerKilled as error:
        hint = "--data.recover=replay repeats a round up to 3 times, --ckpt_path resumes"
        _leave(WorkerKilled(error.place, f"{error.cause}; {hint}"), status=1)
    except (
        CheckpointError,
        WorkerError,
        NotFiniteError,
        ReplayError,
        DifferenceError,
        TrainingSpikeException,  # for which a user's SpikeDetection looks
    ) as error:
        _leave(error, status=1)
    except (RuntimeError, OSError) as error:
        _leave_if_known(error)
        raise
    except SIGTERMException as stopped:
        leave_together()
        status = 128 + signal.SIGTERM if stopped.code is None else stopped.code
        raise SystemExit(status) from None
    except KeyboardInterrupt:  # before or after Lightning answers it
        raise SystemExit(128 + signal.SIGINT) from None
    except SystemExit as leaving:  # Lightning's answer to Ctrl-C, with status 1
        if isinstance(leaving.__context__, KeyboardInterrupt):
            raise SystemExit(128 + signal.SIGINT) from None
        if (notes := getattr(leaving, "__notes__", ())) and leaving.code != 128 + signal.SIGTERM:
            sys.stderr.write(f"hts-torchrl: error: sys.exit({leaving.code}), {', '.join(notes)}\n")
        raise


def program() -> None:
    """Run the command line as a process of its own, which signals end in good order."""
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it hides with which status others end
    threading.excepthook = _tell_of_thread
    end_with_parent()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller has closed it
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - to the end
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python has stderr
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        _discard_output()
        raise SystemExit(128 + signal.SIGPIPE) from None
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _discard_output()
        what = error.filename or "the output or a log"
        limit = " (ulimit -f)" if error.errno == errno.EFBIG else ""
        _leave(OSError(f"{what} cannot be written: {error.strerror}{limit}"), status=1)
    finally:  # another signal would end the process before it has cleared away its files
        others = _other_threads()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL if others else signal.SIG_IGN)
        if others:
            names = ", ".join(others)
            sys.stderr.write(f"hts-torchrl: waiting for threads that others started: {names}\n")


def _other_threads() -> list[str]:
    """Return the names of threads that Python will wait for before the process ends."""
    others = [each for each in threading.enumerate() if not each.daemon]
    return [each.name for each in others if each is not threading.main_thread()]


def _tell_of_thread(failed: threading.ExceptHookArgs) -> None:
    """Print an exception of a thread; TensorBoard's is raised again where it is written to next."""
    if not type(failed.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(failed)


def _discard_output() -> None:
    """Print into nothing: else the interpreter reports the same error once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reader_has_left() -> bool:
    """Return whether nobody reads any more what is printed, as behind ``| head``."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # it always tells of errors
    return any(events & select.POLLERR for _, events in output.poll(0))


def _terminate(number: int, _: FrameType | None) -> None:
    """End the process in good order, unless Lightning has put a handler before this one."""
    if signal.getsignal(number) is _terminate:
        raise SystemExit(128 + number)


def _run(arguments: Sequence[str]) -> None:
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            why, encoding = "this is no UTF-8", sys.getfilesystemencoding()
            if encoding != "utf-8":
                why = f"this Python takes arguments for {encoding}: set PYTHONUTF8=1"
            raise ConfigurationError(f"{argument!a}: {why}") from error
    command, *others = arguments or [""]
    own = {"doctor": _examine, "report": _report, "tune": tune}
    if command in own:
        own[command](others)
    elif names_seeds(arguments):
        train_seeds(arguments)
    else:
        with RunReport() as run_report:
            run_subcommand(arguments, callbacks=[run_report])


def _examine(arguments: Sequence[str]) -> NoReturn:
    """Print what the doctor finds; the exit status is 1 if something is wrong."""
    parser = argparse.ArgumentParser(
        prog="hts-torchrl doctor",
        description="Look at the machine and say what is missing; exit status 1 if something is.",
        allow_abbrev=False,
    )
    _, given = parser.parse_known_args(arguments)
    if given:
        raise ConfigurationError(f"doctor takes no arguments: {' '.join(given)}")
    status = 0
    for finding in examine():
        print(finding, flush=True)  # noqa: T201
        status |= bool(finding.remedy)
    raise SystemExit(status)


def _report(arguments: Sequence[str]) -> None:
    """Write the report of the runs that the arguments name, and tell where it is."""
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


def _leave_if_known(error: RuntimeError | OSError) -> None:
    """End with one line where the cause is a limit, a path, a metric, or another rank."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        _leave(OSError(f"{error}: the limit is {most}, raise it (ulimit -n)"), status=2)
    if isinstance(error, OSError) and error.errno in _REFUSED and error.filename:
        _leave(error, status=2)
    if str(error).startswith("Early stopping conditioned on metric"):
        _leave(error, status=2)
    if isinstance(error, RuntimeError) and errno.errorcode[errno.EADDRINUSE] in str(error):
        port = f"MASTER_PORT={os.environ.get('MASTER_PORT')}"  # Lightning sets it, too
        _leave(OSError(f"{port}: it is in use on this machine; another one is needed"), status=2)
    if _WORKER_ENDED.search(str(error)):
        told = "a worker was killed, or has ended and says why above (is /dev/shm too small?)"
        _leave(RuntimeError(f"{told}: {error}"), status=1)
    if _RANK_LOST.search(str(error)):
        told = "another rank has ended or cannot be reached, and its own lines say why"
        _leave(RuntimeError(f"{told}: {error}"), status=1)


def _leave(error: Exception, *, status: int) -> NoReturn:
    message = str(error) if isinstance(error, WorkerError) else " ".join(str(error).split())
    missing = _NO_MODULE.search(message)
    if missing and any(Path(missing["name"] + end).exists() for end in (".py", "/__init__.py")):
        message += " (it lies in this folder, and PYTHONPATH=. finds it)"
    sys.stderr.write(f"hts-torchrl: error: {_rank()}{message}\n")
    raise SystemExit(status)


def _rank() -> str:
    """Return which rank this is, if it is connected to others: all print where one does."""
    ranks = torch.distributed
    connected = ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1
    return f"rank {ranks.get_rank()}: " if connected else ""
