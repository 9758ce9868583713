"""The part of TorchRL's collector interface that is about weights, for collectors of one policy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.collectors import BaseCollector

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.policy.as_policy import Policy

_PUBLISH = "publish weights with update_policy_weights_()"


class OnePolicyCollector(BaseCollector):
    """Takes weights in every form in which TorchRL hands them over, and refuses other schemes."""

    policy: TensorDictModuleBase
    _source: Policy
    """What the policy was made from, by which callers may know it."""

    @abstractmethod
    def _publish(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Publish weights by ``state_dict`` name."""

    def update_policy_weights_(
        self,
        policy_or_weights: TensorDictBase | nn.Module | dict[str, Any] | None = None,
        *,
        weights: TensorDictBase | dict[str, Any] | None = None,
        policy: nn.Module | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Publish weights; the round that starts at the next rendezvous acts with them.

        Args:
            policy_or_weights: a module, its ``state_dict``, or its weights as a TensorDict; None
                takes the policy that the collector was given.
            weights: the same by keyword.
            policy: the same by keyword.
            kwargs: TorchRL's ``model_id`` and ``weights_dict``, which can name ``policy`` only.

        Raises:
            ConfigurationError: if the weights are not those of a policy like the collector's, by
                name, shape and type, or not finite; or an argument for many policies is given. What
                was published before is kept then.
        """
        if kwargs.pop("model_id", None) not in (None, "policy"):
            raise ConfigurationError("model_id: one policy acts, whose name is 'policy'")
        named = kwargs.pop("weights_dict", None) or {}
        if unknown := [name for name in named if name != "policy"]:
            raise ConfigurationError(f"weights_dict: no {unknown[0]!r} acts, only 'policy' does")
        if any(value is not None for value in kwargs.values()):
            raise ConfigurationError(
                f"arguments {sorted(kwargs)} are not supported: one policy acts"
            )
        sources = (policy_or_weights, weights, policy, named.get("policy"))
        given = [source for source in sources if source is not None] or [self.policy]
        if len(given) > 1:
            raise ConfigurationError("give the weights once")
        self._publish(_by_name(self.policy if given[0] is self._source else given[0]))

    def receive_weights(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Publish weights as :meth:`update_policy_weights_` does: what acts are copies."""
        self.update_policy_weights_(*args, **kwargs)

    def register_scheme_receiver(self, *_: object, **__: object) -> None:
        """Refuse: no parent collector sends weights.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(f"weight sync schemes are not supported: {_PUBLISH}")

    @property
    def weight_updater(self) -> None:
        """None: :meth:`update_policy_weights_` alone publishes weights.

        Raises:
            ConfigurationError: when another is set.
        """

    @weight_updater.setter
    def weight_updater(self, value: object) -> None:
        if value is not None:
            raise ConfigurationError(f"a weight_updater is not supported: {_PUBLISH}")


def _by_name(source: object) -> Mapping[str, torch.Tensor]:
    """Return weights by ``state_dict`` name, in whatever form they are handed over."""
    if isinstance(source, nn.Module):
        return source.state_dict()
    if _is_nested(source):
        if workers := [name for name in source if not isinstance(name, str)]:
            raise ConfigurationError(f"weights for worker {workers[0]!r}: one policy acts")
        source = TensorDict(source)
    if isinstance(source, TensorDictBase):
        source = source.flatten_keys(".").to_dict()
    if not isinstance(source, Mapping):
        raise ConfigurationError(
            f"weights of type {type(source).__name__}; a module, its state_dict or a TensorDict of "
            "its weights is needed"
        )
    return source


def _is_nested(weights: object) -> TypeGuard[dict[Any, Any]]:
    nested = Mapping, TensorDictBase
    return type(weights) is dict and any(isinstance(w, nested) for w in weights.values())
