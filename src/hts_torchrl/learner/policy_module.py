"""A policy under Lightning: built for an environment, called on samples, and evaluated.

Shapes: N environments, T steps of a round; B samples of it, or observations.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch import distributions as d
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import set_recurrent_mode

from hts_torchrl.errors import ConfigurationError, ProtocolError, require_type
from hts_torchrl.learner.seeded_draws import SeededDraws
from hts_torchrl.models import make_actor_critic
from hts_torchrl.models.layers import evaluating
from hts_torchrl.policy.as_policy import initialise
from hts_torchrl.policy.forward import (
    evaluate,
    inputs_of,
    is_composite,
    memory_keys,
    probabilistic_module,
)
from hts_torchrl.policy.greedy import mode
from hts_torchrl.policy.inference import one_thread
from hts_torchrl.policy.limits import require_called
from hts_torchrl.policy.memory import evaluate_sequences
from hts_torchrl.policy.normalization import NormalizedPolicy
from hts_torchrl.policy.sampling import Projection
from hts_torchrl.policy.spec_json import spec_as_json
from hts_torchrl.specs import IS_INIT, EnvSpec, path_of
from hts_torchrl.training.evaluation import Evaluation, log_scores, play
from hts_torchrl.training.extended_hooks import refuse_replaced_hooks
from hts_torchrl.training.run_settings import class_name

Steps: TypeAlias = tuple[slice, int]
"""An index of one step of all environments."""
NO_VALUE = (
    "the policy has no value ('state_value'): an actor-critic is needed, such as network='mlp', "
    "hts_torchrl.ActorCritic or torchrl's ActorValueOperator"
)


class PolicyModule(LightningModule):
    """A LightningModule with a policy; :class:`~hts_torchrl.RoundModule` trains it by rounds.

    The Trainer calls it around a run, and a training step on samples::

        configure_model()                         # builds the policy, unless it was given
        samples = module.samples_of(round)
        distribution, value = module.evaluate(samples)
        validation_step(evaluation, 0)            # plays episodes
    """

    parts_per_pass = 1
    """Parts in which a pass over all samples of a round is made."""
    copies_samples = False
    """Whether :meth:`samples_of` gives samples in memory of their own."""

    def __init__(self, policy: nn.Module | None, *, network: str, squash: bool) -> None:
        super().__init__()
        if policy is not None:
            require_called(policy, learns=True)
        named = "a name, such as mlp or module.Class, (a module is given as policy)"
        require_type("network", network, str, named)
        self.policy = policy
        self.policy_name = None if policy is None else class_name(policy)
        """Class of a policy of the user's own."""
        self.policy_arguments: dict[str, Any] = {}
        """What the command line made it from, as a checkpoint holds it."""
        self.network, self.squash = network, squash
        self.updates = 0
        """Updates that the policy has had."""
        self.spec_json: dict[str, Any] | None = None
        """The spec that the policy was built or is normalised for, as a checkpoint holds it."""
        self.seeded_draws = SeededDraws()
        """What the policy samples while it learns, and which of its layers act otherwise then."""

    def configure_model(self) -> None:
        """Build the policy for the data module's environment, unless it was given.

        What a subclass builds behind ``super()`` is there too where a checkpoint is loaded without
        a Trainer.

        Raises:
            ConfigurationError: if there is neither a policy nor a data module, or a subclass has
                replaced a hook that is needed.
        """
        refuse_replaced_hooks(self)
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
        """Return a new policy of ``network``, with weights by torch's generator."""
        return make_actor_critic(self.network, spec, squash=self.squash)

    def normalize_observations(self, spec: EnvSpec) -> None:
        """Put normalised observations before the policy, if they are not yet there."""
        if not self.normalizes:
            self.spec_json = spec_as_json(spec)  # by which a checkpoint is loaded again
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
    def remembers(self) -> bool:
        """Whether the policy has a memory, and so learns from sequences."""
        return bool(memory_keys(self.actor_critic))

    # On samples, with gradient

    def samples_of(self, batch: TensorDictBase, **more: Tensor) -> TensorDictBase:
        """Return the steps of a round side by side, environment after environment.

        Those of a policy with a memory stay sequences, with ``is_init`` beside them: the memory is
        computed again from that of each environment's first step.

        Args:
            batch: the round ``[N, T]``.
            more: entries of your own, ``[N, T, ...]`` each.

        Returns:
            TensorDict ``[N * T]``, or ``[N, T]`` of sequences: the observations by their keys,
            ``action`` (of a policy that writes its parts, a TensorDict of these),
            ``behaviour_log_prob`` and your entries.

        Raises:
            ConfigurationError: if an observation has the name of another entry.
        """
        head = probabilistic_module(self.actor_critic)
        keys = head.dist_sample_keys
        log_probs = (batch[key].reshape(*batch.shape, -1).sum(-1) for key in head.log_prob_keys)
        entries: dict[Any, Tensor | TensorDictBase] = {
            "action": batch.select(*keys) if is_composite(head) else batch[keys[0]],
            "behaviour_log_prob": torch.stack([*log_probs]).sum(0),  # of all parts of an action
            **more,
        }
        self._refuse_observed(entries)
        entries |= {key: batch[key] for key in inputs_of(self.actor_critic)}
        if self.remembers:
            begins = batch["next", "done"].roll(1, 1)
            begins[:, 0] = False  # the memory of the first step is stored, whether it begins or not
            samples = TensorDict({IS_INIT: begins, **entries}, batch.shape)
        else:
            samples = TensorDict(entries, batch.shape).reshape(-1)
        return samples.clone() if self.copies_samples else samples

    def _refuse_observed(self, entries: Collection[Any]) -> None:
        """Refuse to add entries to samples where an observation has the name of one.

        Raises:
            ConfigurationError: with that name.
        """
        read = inputs_of(self.actor_critic)
        if taken := [key for key in read if path_of(key)[0] in entries]:
            raise ConfigurationError(
                f"the samples of {type(self).__name__} have {taken[0]!r}, which is an observation "
                "of the environment too: give the observation another name, with "
                "gymnasium.wrappers.TransformObservation or torchrl's RenameTransform"
            )

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
        inputs = {key: samples[key] for key in inputs_of(self.actor_critic)}
        with set_exploration_type(ExplorationType.RANDOM):  # as it acted: a layer may be noisy
            if samples.ndim == 2:
                result = evaluate_sequences(self.actor_critic, inputs, samples[IS_INIT])
            else:
                with set_recurrent_mode(False):  # a module's default, or the caller's, may differ
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
        # torch's Normal by itself counts the numbers of an action apart.
        apart = len(dist.batch_shape) - samples.ndim
        if apart > 0:
            dist = d.Independent(dist, apart)
        return dist, result.value.float().squeeze(-1)

    def values_where(self, after: TensorDictBase, chosen: Tensor | Steps) -> Tensor:
        """Return values of observations that no actor saw, as an actor would have found them.

        Args:
            after: the round's ``next``, ``[N, T]``.
            chosen: which of its observations, bool ``[N, T]``, or an index.

        Returns:
            Values of the B chosen ones, float32 ``[B, 1]``, without gradient.
        """
        final = after.select(*inputs_of(self.actor_critic))[chosen]
        with torch.no_grad(), evaluating(*self.seeded_draws.layers_of_two_modes):
            return self.evaluate(final)[1].unsqueeze(-1)

    def values_of(self, batch: TensorDictBase) -> Tensor:
        """Return values of the observations of a round ``[N, T]``, by the weights in place.

        Returns:
            Values, float32 ``[N, T, 1]``, without gradient.
        """
        parts = self.samples_of(batch).chunk(self.parts_per_pass)
        with torch.no_grad(), evaluating(*self.seeded_draws.layers_of_two_modes):
            return torch.cat([self.evaluate(part)[1] for part in parts]).reshape(*batch.shape, 1)

    # Evaluation

    def forward(self, observation: Tensor | TensorDictBase) -> Tensor | TensorDictBase:
        """Return the greedy actions for B observations: the most probable category, or the mean.

        Args:
            observation: ``[B, *shape]`` of the policy's one observation, or a TensorDict ``[B]``
                with all keys that the policy reads.

        Returns:
            Actions ``[B, *shape]`` as a batch has them: choices count from 0, and numbers are not
            clipped to their bounds. Of a policy that writes their parts a TensorDict ``[B]`` of
            these.

        Raises:
            ConfigurationError: for a tensor, if the policy reads several observations.
        """
        policy = self.actor_critic
        keys = inputs_of(policy)
        if isinstance(observation, TensorDictBase):
            given = {key: observation[key] for key in keys}
        elif len(keys) == 1:
            given = {keys[0]: observation}
        else:
            raise ConfigurationError(f"the policy reads {keys}: give a TensorDict with these")
        first = next(iter(given.values()))
        greedy = set_exploration_type(ExplorationType.DETERMINISTIC)
        with torch.no_grad(), evaluating(policy), set_recurrent_mode(False), greedy:
            action = mode(evaluate(policy, given, first.shape[0]).distribution)
        head = probabilistic_module(policy)
        project = Projection(head, first.device)
        if isinstance(action, TensorDictBase):
            return action.update(project(dict(action.items(True, True))))
        (key,) = head.dist_sample_keys
        return project({key: action})[key]

    def validation_step(self, evaluation: Evaluation, _: int) -> None:
        """Play the evaluation's episodes and log the raw scores, ``eval/score`` and more."""
        log_scores(self, play(self, evaluation), "eval")

    def test_step(self, evaluation: Evaluation, _: int) -> None:  # noqa: PT019 - no test of ours
        """Play the evaluation's episodes and log the raw scores, ``test/score`` and more."""
        log_scores(self, play(self, evaluation), "test")

    def predict_step(self, evaluation: Evaluation, _: int) -> dict[str, Tensor]:
        """Play the evaluation's episodes; return each one's raw score and its length in steps.

        Returns:
            ``score``, float64 ``[episodes]``, and ``length``, int64 ``[episodes]``.
        """
        result = play(self, evaluation)
        return {
            "score": torch.from_numpy(result.scores),
            "length": torch.from_numpy(result.lengths),
        }
