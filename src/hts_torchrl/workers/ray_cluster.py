"""The Ray cluster of a run: how it is joined, and how rollout nodes are placed in it."""

from __future__ import annotations

import contextlib
import importlib
import signal
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from hts_torchrl.compat.torchrl import use_ray
from hts_torchrl.errors import ConfigurationError, in_one_line, require, require_type
from hts_torchrl.portable import VARIABLES, is_portable
from hts_torchrl.workers.rollout_node import RolloutNode

_INIT = {
    "configure_logging": False,  # else it formats everybody's log
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": "warning",
}
_REMOTE = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
_OURS = {
    "max_restarts": "recover='replay' replaces a node that has died",
    "max_task_retries": "a round is repeated by recover='replay'",
    "max_concurrency": "a node plays one round at a time",
    "concurrency_groups": "a node plays one round at a time",
    "lifetime": "a node ends with its collector",
    "name": "several nodes cannot have one name",
    "get_if_exists": "each collector has nodes of its own",
}
_WATCH = "watch"
"""Ray's concurrency group whose thread answers while that of the default group plays."""
_STOP_S = 8.0
"""More than a pool takes to end workers that do not answer."""


class RayCluster:
    """Joins a cluster, or starts one on this machine, and leaves it as it was.

    Args:
        options: ``backend_options``: arguments of ``ray.init`` as ``ray_init_config``, and of
            ``ray.remote`` as ``remote_configs``, one dict for all nodes or a list with one each.
        num_nodes: rollout nodes that will be placed.

    Raises:
        ConfigurationError: if Ray is not installed, cannot be joined, or an option is not known.
    """

    def __init__(self, options: Mapping[str, Any], num_nodes: int) -> None:
        self._configs = _remote_configs(options, num_nodes)
        given = options.get("ray_init_config") or {}
        name = "backend_options['ray_init_config']"
        require_type(name, given, dict, "a dict of ray.init's arguments")
        if find_spec("ray") is None:
            raise ConfigurationError(
                "backend='ray' needs Ray, which is not installed: pip install 'hts-torchrl[ray]'"
            )
        self.ray: Any = importlib.import_module("ray")
        self._lease = contextlib.ExitStack()
        before = signal.getsignal(signal.SIGTERM)
        try:
            self._lease.callback(use_ray({**_INIT, **given}))
        except (ConnectionError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"backend_options['ray_init_config']={given}: ray.init refuses ({_line(error)})"
            ) from error
        finally:  # ray.init replaces it, and a run that is stopped so saves a checkpoint
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)

    def place(self, node: int) -> Any:  # noqa: ANN401 - a handle of Ray's
        """Ask for the place of a node, which is found while others go on.

        Raises:
            ConfigurationError: if Ray refuses its options.
        """
        config = {**_REMOTE, **self._configs[node], "max_restarts": 0, "max_task_retries": 0}
        if is_portable():
            config["runtime_env"] = with_variables(config.get("runtime_env") or {})
        try:
            kind = self.ray.remote(concurrency_groups={_WATCH: 1})(RolloutNode)
            return kind.options(**config).remote()
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"backend_options['remote_configs']={self._configs[node]}: Ray refuses "
                f"({_line(error)})"
            ) from error

    def ask(self, handle: Any) -> Any:  # noqa: ANN401
        """Return the reply to what a node computes with, which it gives while it plays, too."""
        return handle.kind.options(concurrency_group=_WATCH).remote()

    def resources(self) -> str:
        """Return what is free, and what there is in all, in one line."""
        free, whole = self.ray.available_resources(), self.ray.cluster_resources()
        shown = sorted(name for name in whole if ":" not in name and "memory" not in name)
        return ", ".join(f"{free.get(name, 0):g} of {whole[name]:g} {name}" for name in shown)

    def stop(self, handles: list[Any]) -> None:
        """Ask nodes to end their workers, and end the nodes."""
        if not self.ray.is_initialized():  # it was shut down, and its nodes with it
            return
        ending = [handle.shutdown.remote() for handle in handles]
        if ending:
            self.ray.wait(ending, num_returns=len(ending), timeout=_STOP_S)
        for handle in handles:
            self.ray.kill(handle)

    def leave(self) -> None:
        """Leave the cluster; one that was started for this process ends. May be called twice."""
        self._lease.close()


def _line(error: Exception) -> str:
    return in_one_line(error) or type(error).__name__


def with_variables(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """Return Ray's settings of a process with those of portable kernels."""
    return {**runtime_env, "env_vars": {**(runtime_env.get("env_vars") or {}), **VARIABLES}}


def _remote_configs(options: Mapping[str, Any], num_nodes: int) -> list[dict[str, Any]]:
    """Return the options of each node."""
    given = options.get("remote_configs") or {}
    configs = list(given) if isinstance(given, list | tuple) else [given] * num_nodes
    setting = "backend_options['remote_configs']"
    many = f"{setting} of {len(configs)} dicts"
    require(len(configs) == num_nodes, many, f"one, or {num_nodes} (num_collectors)")
    for config in configs:
        require_type(setting, config, dict, "a dict of ray.remote's arguments")
        for name in config.keys() & _OURS.keys():
            raise ConfigurationError(f"{setting}[{name!r}] is not supported: {_OURS[name]}")
    return configs
