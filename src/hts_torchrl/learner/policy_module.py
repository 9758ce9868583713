"""A policy under Lightning: built, evaluated, and asked for actions.

Shapes: B observations; an observation or action has a shape of its own.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch import distributions as d
from torchrl.modules import Delta, TanhDelta

from hts_torchrl.compat.lightning import must_leave
from hts_torchrl.compat.torch import compiles_calls, uncompiled
from hts_torchrl.errors import ConfigurationError, ProtocolError
from hts_torchrl.models import make_actor_critic
from hts_torchrl.policy.as_policy import initialise
from hts_torchrl.policy.forward import evaluate, evaluating, inputs_of, probabilistic_module
from hts_torchrl.policy.inference import one_thread
from hts_torchrl.policy.limits import require_called
from hts_torchrl.policy.memory import memory_keys
from hts_torchrl.policy.normalization import NormalizedPolicy
from hts_torchrl.policy.projection import Projection
from hts_torchrl.policy.sampling import mode
from hts_torchrl.policy.sequence import evaluate_sequences
from hts_torchrl.policy.spec_json import spec_as_json
from hts_torchrl.specs import IS_INIT, EnvSpec, Key
from hts_torchrl.training.evaluation import EpisodeScores, Evaluation
from hts_torchrl.training.run_settings import class_name


class PolicyModule(LightningModule):
    """What a learner can do with its policy before it learns anything.

    The Trainer calls it for ``validate``, ``test`` and ``predict``, and you for actions::

        module.configure_model()              # builds the policy, unless it was given
        module.validation_step(evaluation, 0) # plays episodes, logs eval/score
        module(observation)                   # greedy actions

    Args:
        policy: an actor-critic; None builds ``network`` for the data module's environment.
        network: ``nature``, ``nips``, ``impala``, ``seed``, ``mlp`` or ``module.Class`` of a trunk;
            ``+lstm`` or ``+gru`` after it adds a memory, as ``lstm`` and ``gru`` alone do.
        squash: pass continuous actions through tanh into their bounds.

    Raises:
        ConfigurationError: for a policy under ``torch.compile``, or with code that only a call of
            it would run: its modules are called one by one.
    """

    def __init__(self, policy: nn.Module | None, *, network: str, squash: bool) -> None:
        super().__init__()
        if policy is not None and (uncompiled(policy) is not policy or compiles_calls(policy)):
            raise ConfigurationError(
                "a learner calls the modules of its policy one by one, so torch.compile(policy) "
                "would do nothing, nor would policy.compile(); compile modules within it, or set "
                "compile_policy for its actors"
            )
        if policy is not None:
            require_called(policy, learns=True)
        self.policy = policy
        self.policy_name = None if policy is None else class_name(policy)
        """Class of a policy of the user's own."""
        self.network, self.squash = network, squash
        self.updates = 0
        """Updates that the policy has had."""
        self.spec_json: dict[str, Any] | None = None
        """The spec that the policy was built for, as a checkpoint holds it."""

    def configure_model(self) -> None:
        """Build the policy for the data module's environment, unless it was given.

        What a subclass builds behind ``super()`` is there too where a checkpoint is loaded without
        a Trainer.

        Raises:
            ConfigurationError: if there is neither a policy nor a data module.
        """
        datamodule = getattr(self._trainer, "datamodule", None)
        if self.policy is None and datamodule is None:
            raise ConfigurationError("give fit a datamodule=HTSDataModule(...), or a policy")
        if datamodule is not None:
            self.prepare_policy(datamodule)

    def prepare_policy(self, datamodule: Any) -> None:  # noqa: ANN401 - may be of another class
        """Build the policy for a data module, unless it was given, and normalise if that asks to.

        Raises:
            ConfigurationError: if there is nothing to normalise, or no network for the environment.
        """
        if self.policy is None:
            self.build_policy(datamodule.env_spec)
        elif isinstance(self.policy, TensorDictModuleBase):
            initialise(self.policy, datamodule.env_spec)  # its weights are copied early
        if getattr(datamodule, "normalize_observation", False):
            self.normalize_observations(datamodule.env_spec)

    def build_policy(self, spec: EnvSpec) -> None:
        """Build ``network`` for an environment."""
        self.spec_json = spec_as_json(spec)
        with one_thread():  # the bits of an orthogonal initialisation depend on their number
            self.policy = self.make_policy(spec)

    def make_policy(self, spec: EnvSpec) -> nn.Module:
        """Return a new policy of ``network``; its weights are drawn from torch's generator."""
        return make_actor_critic(self.network, spec, squash=self.squash)

    def normalize_observations(self, spec: EnvSpec) -> None:
        """Put normalised observations before the policy, if they are not yet there."""
        if not isinstance(self.policy, NormalizedPolicy):
            self.policy = NormalizedPolicy(self.actor_critic, spec)

    @property
    def normalizes(self) -> bool:
        """Whether observations are normalised before the policy reads them."""
        return isinstance(self.policy, NormalizedPolicy)

    @property
    def actor_critic(self) -> nn.Module:
        """The policy, which exists from ``configure_model`` on."""
        if self.policy is None:
            raise ProtocolError("the policy is built when training or evaluation begins")
        return self.policy

    @property
    def observation_keys(self) -> list[Key]:
        """What the policy reads: observations, and what it remembers."""
        return inputs_of(self.actor_critic)

    @functools.cached_property
    def remembers(self) -> bool:
        """Whether the policy has a memory, and so learns from sequences."""
        return bool(memory_keys(self.actor_critic))

    def observations(self, source: TensorDictBase) -> dict[Key, Tensor]:
        """Return of a TensorDict what the policy reads, by key."""
        return {key: source[key] for key in self.observation_keys}

    def evaluate(self, samples: TensorDictBase) -> tuple[d.Distribution, Tensor]:
        """Run actor and critic once, with gradient; nothing is sampled.

        Args:
            samples: TensorDict ``[B]`` with all keys that the policy reads; sequences ``[N, T]`` of
                a policy with a memory, with ``is_init`` ``[N, T, 1]``.

        Returns:
            Distributions of actions, and the values of the observations, float32: ``[B]``, or
            ``[N, T]``. An action has one log-probability, also where its numbers have one each.

        Raises:
            ConfigurationError: if the policy has no critic, or values of another shape; or if its
                distributions leave nothing to chance.
        """
        inputs = self.observations(samples)
        if samples.ndim == 2:
            result = evaluate_sequences(self.actor_critic, inputs, samples[IS_INIT])
        else:
            result = evaluate(self.actor_critic, inputs, samples.shape[0])
        if result.value is None:
            raise ConfigurationError(NO_VALUE)
        found, wanted = tuple(result.value.shape), (*samples.shape, 1)
        if found != wanted:
            raise ConfigurationError(
                f"the policy's 'state_value' has shape {found}, but {wanted} is needed: one number "
                "for each observation, in a last dimension, as torchrl's ValueOperator gives it"
            )
        dist = result.distribution
        if isinstance(dist, Delta | TanhDelta):
            raise ConfigurationError(
                f"the policy draws from a {type(dist).__name__}, which has one action alone: its "
                "log-probability is infinite, and no gradient comes of it; a distribution with "
                "chance, such as torchrl's TanhNormal, is needed"
            )
        # torch's Normal by itself counts the numbers of an action apart.
        apart = len(dist.batch_shape) - samples.ndim
        if apart > 0:
            dist = d.Independent(dist, apart)
        return dist, result.value.float().squeeze(-1)

    def forward(self, observation: Tensor | TensorDictBase) -> Tensor | TensorDictBase:
        """Return the greedy actions for B observations: the likeliest category, or the mean.

        Args:
            observation: ``[B, *shape]`` of the policy's one observation, or a TensorDict ``[B]``
                with all keys that the policy reads.

        Returns:
            Actions ``[B, *shape]`` in the form that the environment takes; of a policy that writes
            their parts a TensorDict ``[B]`` of these.

        Raises:
            ConfigurationError: for a tensor, if the policy reads several observations.
        """
        keys = self.observation_keys
        if isinstance(observation, TensorDictBase):
            given = self.observations(observation)
        elif len(keys) == 1:
            given = {keys[0]: observation}
        else:
            raise ConfigurationError(f"the policy reads {keys}: give a TensorDict with these")
        rows = next(iter(given.values())).shape[0]
        with torch.no_grad(), evaluating(self.actor_critic):
            action = mode(evaluate(self.actor_critic, given, rows).distribution)
        head = probabilistic_module(self.actor_critic)
        project = Projection(head, self.device)
        if isinstance(action, TensorDictBase):
            return action.update(project(dict(action.items(True, True))))
        (key,) = head.dist_sample_keys
        return project({key: action})[key]

    def validation_step(self, evaluation: Evaluation, _: int) -> None:
        """Play the evaluation's episodes and log the raw scores, ``eval/score`` and more."""
        self._log_scores(evaluation, "eval")

    def test_step(self, evaluation: Evaluation, _: int) -> None:  # noqa: PT019 - no test of ours
        """Play the evaluation's episodes and log the raw scores, ``test/score`` and more."""
        self._log_scores(evaluation, "test")

    def predict_step(self, evaluation: Evaluation, _: int) -> dict[str, Tensor]:
        """Play the evaluation's episodes; return each one's raw score and its length in steps.

        Returns:
            ``score``, float64 ``[episodes]``, and ``length``, int64 ``[episodes]``.
        """
        result = self._play(evaluation)
        return {
            "score": torch.from_numpy(result.scores),
            "length": torch.from_numpy(result.lengths),
        }

    def _play(self, evaluation: Evaluation) -> EpisodeScores:
        on_device = replace(evaluation, device=str(self.device))
        return on_device.run(self.actor_critic, after_step=self._obey_sigterm)

    def _obey_sigterm(self) -> None:
        if must_leave(self):
            raise SIGTERMException

    def _log_scores(self, evaluation: Evaluation, group: str) -> None:
        result = self._play(evaluation)
        self.log_dict(
            {
                f"{group}/score": float(result.scores.mean()),
                f"{group}/score_std": float(result.scores.std()),
                f"{group}/episode_length": float(result.lengths.mean()),
                f"{group}/updates": float(self.updates),
            },
            batch_size=len(result.scores),
            sync_dist=True,
        )


NO_VALUE = (
    "the policy has no value ('state_value'): an actor-critic is needed, such as network='mlp', "
    "hts_torchrl.ActorCritic or torchrl's ActorValueOperator"
)
