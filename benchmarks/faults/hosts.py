"""Hosts with a network each, joined by a switch: network namespaces of this machine.

They take root, and the program ``ip`` of iproute2.
"""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from contextlib import suppress
from pathlib import Path

from processes import soon

_GONE_S = 120.0


class Hosts:
    """Hosts whose network can be cut; processes and files are those of this machine.

    Args:
        number: of hosts.
        name: of those that another process has made; None makes them.
    """

    def __init__(self, number: int, name: str | None = None) -> None:
        self.name = name or f"hts-{uuid.uuid4().hex[:6]}"
        self.all = range(number)
        self._switch = f"{self.name}-switch"
        if name is None:
            try:
                self._make()
            except BaseException:
                self.delete()
                raise

    def _make(self) -> None:
        for name in (self._switch, *map(self._namespace, self.all)):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for host in self.all:
            name, port = self._namespace(host), f"port{host}"
            peer = ("type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self._switch, "link", "add", port, *peer)
            _ip("-n", self._switch, "link", "set", port, "master", "bridge")
            _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            self.join(host)

    def _namespace(self, host: int) -> str:
        return f"{self.name}-{host}"

    def address(self, host: int) -> str:
        """Return the address of a host in their network."""
        return f"10.77.0.{host + 1}"

    def cut(self, host: int) -> None:
        """Let nothing to or from a host pass."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "down")

    def join(self, host: int) -> None:
        """Let everything pass again."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "up")

    def on(self, host: int, command: list[str]) -> list[str]:
        """Return the command that runs a command on a host."""
        return ["ip", "netns", "exec", self._namespace(host), *command]

    def processes(self, host: int, word: str = "") -> dict[int, str]:
        """Return the processes of a host whose command has a word, with their commands."""
        found = {pid: _command(pid) for pid in self._pids(host)}
        return {pid: command for pid, command in found.items() if command and word in command}

    def _pids(self, host: int) -> list[int]:
        if not Path("/run/netns", self._namespace(host)).exists():
            return []
        return list(map(int, _ip("netns", "pids", self._namespace(host)).split()))

    def end(self, word: str) -> bool:
        """Return whether all such processes of all hosts end by themselves."""
        return soon(lambda: not any(self.processes(host, word) for host in self.all), _GONE_S)

    def delete(self) -> bool:
        """Kill what runs on the hosts, delete them, and return whether nothing is left."""
        for pid in [pid for host in self.all for pid in self._pids(host)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended = soon(lambda: not any(map(self._pids, self.all)), _GONE_S)
        for name in (*map(self._namespace, self.all), self._switch):
            if Path("/run/netns", name).exists():
                _ip("netns", "delete", name)
        return ended and self.name not in _ip("netns", "list")


def _ip(*words: str) -> str:
    return subprocess.run(("ip", *words), text=True, check=True, stdout=subprocess.PIPE).stdout


def _command(pid: int) -> str:
    """Return the command of a process; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""
