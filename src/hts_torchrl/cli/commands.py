"""What the command line does beside training: play, export, advise and verify."""

from __future__ import annotations

import math
from dataclasses import asdict, is_dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import imageio
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger

from hts_torchrl.errors import ConfigurationError, DifferenceError, naming, reason_of, require
from hts_torchrl.learner import Learner
from hts_torchrl.policy.export import save_policy
from hts_torchrl.policy.onnx_file import save_onnx
from hts_torchrl.tools.advise import Advisor
from hts_torchrl.tools.short_fit import IN_THIS_PROCESS, data_of_short_fit
from hts_torchrl.tools.verify import Manifest, first_difference, record
from hts_torchrl.training.datamodule import HTSDataModule


class HTSTrainer(Trainer):
    """Lightning's Trainer, which also plays, exports, advises and verifies."""

    @property
    def log_dir(self) -> str | None:
        """The run's folder; where a logger has none of its own, the one above its checkpoints."""
        logger = self.logger
        if logger is None or isinstance(logger, TensorBoardLogger | CSVLogger | DummyLogger):
            return super().log_dir
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        folder = Path(logger.save_dir or self.default_root_dir, str(logger.name), version)
        return str(self.strategy.broadcast(str(folder)))

    def play(
        self,
        model: Learner,
        datamodule: HTSDataModule,
        ckpt_path: str | None = None,
        weights_only: bool | None = True,
        video: str = "play.mp4",
        frames_per_second: int = 15,
        greedy: bool = False,
    ) -> None:
        """Play one game with the weights of a checkpoint and write a video of it.

        Args:
            model: the learner whose policy plays.
            datamodule: knows the environment.
            ckpt_path: the checkpoint.
            weights_only: load tensors and plain values only, never code.
            video: file to write, ``.mp4`` or ``.gif``; memory holds all images until the game ends.
            frames_per_second: of the video; one step of the environment is one frame.
            greedy: play greedy actions instead of sampled ones.
        """
        if Path(video).suffix not in (".mp4", ".gif"):
            raise ConfigurationError(f"--video={video}: a name that ends in .mp4 or .gif is needed")
        if Path(video).is_dir():
            raise ConfigurationError(f"--video={video}: this is a folder")
        require(frames_per_second >= 1, f"--frames_per_second={frames_per_second}", "1 or more")
        _load_weights("play", model, datamodule, ckpt_path, weights_only=weights_only)
        evaluation = replace(datamodule.evaluation(precision="32-true"), greedy=greedy)
        frames: list[Any] = list(evaluation.frames(model.actor_critic))
        gif = {"duration": 1000 / frames_per_second, "loop": 0}
        mp4: dict[str, Any] = {"fps": frames_per_second, "macro_block_size": 2}
        try:
            Path(video).absolute().parent.mkdir(parents=True, exist_ok=True)
            if video.endswith(".gif"):
                # Not into the file: imageio would try again, and tell of it, when it is collected.
                content = BytesIO()
                imageio.mimsave(content, frames, format="gif", **gif)
                Path(video).write_bytes(content.getvalue())
            else:
                imageio.mimsave(video, frames, **mp4)
        except OSError as error:
            reason = reason_of(error, video)
            if "FFMPEG COMMAND" in reason:  # imageio's, of a whole screen
                reason = "ffmpeg could not write it, and tells above why"
            raise ConfigurationError(f"--video={video}: {reason}") from error
        print(f"video of {len(frames)} steps: {video}")  # noqa: T201

    def export(
        self,
        model: Learner,
        datamodule: HTSDataModule,
        ckpt_path: str | None = None,
        weights_only: bool | None = True,
        output: str = "policy.safetensors",
    ) -> None:
        """Write the policy of a checkpoint into a safetensors file, or into an ONNX file.

        Args:
            model: the learner whose policy it is.
            datamodule: knows the environment.
            ckpt_path: the checkpoint.
            weights_only: load tensors and plain values only, never code.
            output: file to write: ``.safetensors``, which load_policy reads, or ``.onnx``.
        """
        kind = Path(output).suffix
        if kind not in (".safetensors", ".onnx"):
            raise ConfigurationError(
                f"--output={output}: a name that ends in .safetensors or .onnx is needed"
            )
        built_in = model.policy is None
        _load_weights("export", model, datamodule, ckpt_path, weights_only=weights_only)
        env = datamodule.env
        settings: dict[str, Any] = asdict(env) if is_dataclass(env) else {}
        environment = {"factory": type(env).__name__, **settings}
        about = {"environment": environment, "updates": model.updates}
        policy, spec, told = model.actor_critic, datamodule.env_spec, ""
        network = model.network if built_in else None
        try:
            if kind == ".onnx":
                difference = save_onnx(policy, output, spec=spec, about=about)
                told = f" (its answers differ from the policy's by {difference:.3g} at most)"
            else:
                save_policy(
                    policy,
                    output,
                    spec=spec,
                    network=network,
                    squash=model.squash,
                    normalized=model.normalizes,
                    about=about,
                )
        except OSError as error:
            raise ConfigurationError(f"--output={output}: {error}") from error
        print(f"policy after {model.updates} updates: {output}{told}")  # noqa: T201

    def advise(self, model: Learner, datamodule: HTSDataModule, seconds: float = 60.0) -> None:
        """Measure the task, say what speed to expect and which settings suit it, and check that.

        Args:
            model: the learner; it is not trained.
            datamodule: environments and worker pool.
            seconds: half of them for steps of the environment, and half for each training that
                checks a prediction; all takes at least twice as long.
        """
        require(0 < seconds < math.inf, f"--seconds={seconds:g}", "more than 0")
        _require_rounds(datamodule)
        if datamodule.pool.step_barrier:
            raise ConfigurationError(
                "--data.step_barrier=true: advise suits rounds without a barrier; leave it out"
            )
        if datamodule.pool.num_nodes:
            raise ConfigurationError(
                "--data.backend=ray: advise measures and suits this machine; leave it out"
            )
        for line in Advisor(model, datamodule, self).report(seconds):
            print(line, flush=True)  # noqa: T201

    def verify(
        self,
        model: Learner,
        datamodule: HTSDataModule,
        updates: int = 20,
        manifest: str | None = None,
    ) -> None:
        """Train twice from the start and compare every bit; exit status 1 if one differs.

        A module that draws from numpy's or Python's global generator is refused by its name.

        The first training has the pool that is configured, the second is the serial twin in this
        process (or, where that is configured, the first has one actor).

        Args:
            model: the learner; it is not trained.
            datamodule: environments and worker pool.
            updates: length of each training.
            manifest: a file to compare the first training with instead, written if it is not there.
        """
        require(updates >= 1, f"--updates={updates}", "1 or more")
        _require_rounds(datamodule)
        other = None if manifest is None else _manifest(Path(manifest))
        if model.policy is None:
            model.build_policy(datamodule.env_spec)

        def trained(**pool: Any) -> Manifest:  # noqa: ANN401
            return record(model, data_of_short_fit(datamodule, updates, **pool, debug=True), self)

        mine = trained(num_actors=max(1, datamodule.pool.num_actors))
        if manifest is None:
            name, other = "the serial twin", trained(**IN_THIS_PROCESS)
        elif other is not None:
            name = manifest
        else:
            with naming("--manifest", manifest):
                mine.write(Path(manifest))
            print(f"{updates} updates, weights {mine.weights[:16]}: written to {manifest}")  # noqa: T201
            return
        if (difference := first_difference(mine, other)) is not None:
            raise DifferenceError(f"this pool and {name} differ: {difference}")
        print(f"{updates} updates, weights {mine.weights[:16]}: the same bits as {name}")  # noqa: T201


def _manifest(path: Path) -> Manifest | None:
    """Return what is at a path; if nothing is, make its folder, before anything is trained."""
    if path.exists():
        return Manifest.read(path)
    with naming("--manifest", path):
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
    return None


def _require_rounds(data: HTSDataModule) -> None:
    if data.collection != "rounds":
        raise ConfigurationError(
            f"--data.collection={data.collection}: advise and verify need rounds; data of any age "
            "has no bits to compare and no rendezvous to wait for"
        )


def _load_weights(
    command: str,
    model: Learner,
    datamodule: HTSDataModule,
    ckpt_path: str | None,
    *,
    weights_only: bool | None,
) -> None:
    if ckpt_path is None:
        raise ConfigurationError(f"{command} needs --ckpt_path")
    model.prepare_policy(datamodule)
    model.configure_model()  # what a subclass builds beside the policy
    checkpoint = torch.load(ckpt_path, map_location="cpu", weights_only=weights_only)
    model.on_load_checkpoint(checkpoint)
    model.load_state_dict(checkpoint["state_dict"], strict=model.strict_loading)
