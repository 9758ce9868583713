"""A learner from a checkpoint alone: from its plain settings, and nothing that it could name."""

from __future__ import annotations

import errno
import inspect
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from hts_torchrl.errors import ConfigurationError, reason_of, require
from hts_torchrl.models.trunks import is_built_in
from hts_torchrl.policy.normalization import RunningStatistics
from hts_torchrl.policy.spec_json import spec_from_json
from hts_torchrl.training.run_settings import class_name, is_type_name, known_arguments

_GIVE_IT = ": give load_from_checkpoint(path, {}=...)"
_HAS_OBJECTS = (
    "this has objects beside tensors and plain values, and none is loaded; perhaps in the "
    "state_dict() of a callback, or as an argument that save_hyperparameters() kept: give its name "
    "in ignore=[...]"
)


def load_from_checkpoint(
    cls: type[Any],
    /,
    checkpoint_path: str | Path,
    map_location: Any = "cpu",  # noqa: ANN401 - as in torch.load
    hparams_file: None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **settings: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401 - one of the class
    """Return a learner with the settings and weights of a checkpoint; nothing in it is run.

    Args:
        cls: of the learner.
        checkpoint_path: of the file.
        map_location: where its tensors go, and the learner with them.
        hparams_file: Lightning's; the checkpoint has its settings itself.
        strict: whether the weights must be those of the learner, all and no others; None for
            what ``strict_loading`` says. With False a warning names those that differ.
        weights_only: Lightning's; only tensors and plain values are read.
        settings: arguments of the class that count more than the checkpoint's; ``policy``, the
            module to load into, is needed for one that is none of this package.

    Raises:
        ConfigurationError: if that is no checkpoint of such a learner, its policy is not given,
            or one of Lightning's arguments asks for something else.
        TypeError: if an instance is called, as in Lightning.

    For example, to evaluate the best policy of a run again::

        learner = PPO.load_from_checkpoint("best.ckpt")
        trainer.validate(learner, datamodule)
    """
    call, path = f"{cls.__name__}.load_from_checkpoint", Path(checkpoint_path)
    require(hparams_file is None, f"{call}(hparams_file={hparams_file!r})", "None")
    require(weights_only in (None, True), f"{call}(weights_only={weights_only!r})", "True")
    content, saved = _content(path, map_location)
    if saved.get("class_path") not in [class_name(each) for each in cls.__mro__]:
        raise ConfigurationError(
            f"{path} is of the learner {saved.get('class_path')!r}, not {cls.__name__}"
        )
    learner = _made(cls, path, _settings(cls, saved, settings, path))
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        if learner.policy is None:
            learner.build_policy(_spec(path, saved))
        if saved.get("normalize_observation") is True:
            learner.normalize_observations(_spec(path, saved))
        learner.configure_model()  # what a subclass builds beside the policy
    if "reward_scale.mean" in content["state_dict"]:
        learner.reward_scale = RunningStatistics()
    usual = learner.strict_loading
    learner.strict_loading = usual if strict is None else strict
    learner.on_load_checkpoint(content)
    found = learner.load_state_dict(content["state_dict"], strict=learner.strict_loading)
    learner.strict_loading = usual
    if strict is False and any(found):
        warnings.warn(
            f"{path} lacks {found.missing_keys}, and has {found.unexpected_keys} that "
            f"{cls.__name__} has not",
            stacklevel=3,
        )
    tensors = (each for each in content["state_dict"].values() if isinstance(each, torch.Tensor))
    return learner.to(next(tensors).device)


def _made(cls: type[Any], path: Path, arguments: dict[str, Any]) -> Any:  # noqa: ANN401
    try:
        return cls(**arguments)
    except TypeError as error:
        if "multiple values" not in str(error):
            raise
        raise ConfigurationError(
            f"{path}: {error}: a setting of its base class that {cls.__name__} fixes is none of "
            "its own; name it in the class's lacks, and leave it out of what it saves"
        ) from error


def _content(path: Path, map_location: Any) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ANN401
    """Return what a file holds, and what that says of its learner."""
    try:
        content = torch.load(path, map_location=map_location, weights_only=True)
        saved = dict(content["learner"])
        content["updates"], content["state_dict"]
    except Exception as error:  # whatever a file that is something else may lead to
        raise ConfigurationError(f"{path}: {why_not_read(path, error)}") from error
    return content, saved


def why_not_read(path: Path, error: Exception) -> str:
    """Return in words why tensors and plain values were not to be had from a file."""
    # Half of a file ends torch's reading of another format with EINVAL.
    if isinstance(error, OSError) and error.errno != errno.EINVAL:
        return reason_of(error, path)
    has_objects = isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path)
    return _HAS_OBJECTS if has_objects else "this is no checkpoint, or half of one"


def _settings(
    make: type[Any], saved: dict[str, Any], given: dict[str, Any], path: Path
) -> dict[str, Any]:
    """Return the arguments of a learner, after refusing what no file may name."""
    arguments = saved.get("init_args", {})
    if isinstance(arguments, dict):
        arguments = {name: value for name, value in arguments.items() if name not in given}
        for name, value in arguments.items():
            described = isinstance(value, dict) and value.keys() == {"class_path", "init_args"}
            kind = f"<{value['class_path']}>" if described else value
            if is_type_name(kind):
                raise ConfigurationError(
                    f"{path}: its {name} was an object, {kind[:80]}, which a checkpoint only "
                    f"describes{_GIVE_IT.format(name)}"
                )
    known = known_arguments(make, arguments, f"{path}: model", besides=("policy",), remedy=_GIVE_IT)
    settings: dict[str, Any] = {**known, **given}
    named = saved.get("policy") or settings.get("network", "mlp")
    own = saved.get("policy") is None and (is_built_in(named) or "network" in given)
    takes_policy = "policy" in inspect.signature(make).parameters
    if takes_policy and not own and settings.get("policy") is None:
        raise ConfigurationError(
            f"{path}: its policy ({named}) is none of this package: give the module to load into, "
            f"{make.__name__}.load_from_checkpoint(path, policy=...)"
        )
    if "optimizer" not in given and "." in (own_class := known.get("optimizer", "")):
        raise ConfigurationError(
            f"{path}: its optimizer ({own_class}) is imported only if you name it: give "
            "load_from_checkpoint(path, optimizer=...)"
        )
    return settings


def _spec(path: Path, saved: dict[str, Any]) -> Any:  # noqa: ANN401 - an EnvSpec
    try:
        return spec_from_json(saved["spec"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"{path} does not tell what its policy observes: give the policy to load into, "
            "load_from_checkpoint(path, policy=...)"
        ) from error
