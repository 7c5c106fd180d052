"""The values that a worker is given when it starts: the arithmetic of the run, and the specification of its process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.data import PreparedData
from elaswave_spmd.recovery.admission import MessageBounds
from elaswave_spmd.recovery.early_stop import EarlyStop
from elaswave_spmd.runtime.transport.credentials import Credentials, credentials_from_dict
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.worker.checkpoint_orders import CheckpointOrders
from elaswave_spmd.worker.learning_rate import LearningRate
from elaswave_spmd.worker.optimizers import PageOptimizer, averages

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Job:
    """A run's model, data, optimizer and number of steps, and the steps after which it validates and compares replicas.

    Workers and controller read it.

    A resumed run must have the same values again (`controller/run_fingerprint.py:identity_of`), with these exceptions:

    - activation_checkpointing, verify_every, verify_rate, checkpoint_every and saves_validated change no bits and may
      differ. So may validate_every and num_validation_microbatches, unless the run has early_stop: then the last step
      depends on the validations, and their settings must be equal too.
    - steps and learning_rate may differ where all steps that are done keep their learning rates, or with
      train.reschedule (controller/changed_schedule.py).
    - The optimizer may do without the average of parameters that it had (optim.ema), but cannot begin one.

    Args:
        seed: of every random number.
        steps: steps to train.
        global_batch: sequences per step; a multiple of `microbatch_size`.
        microbatch_size: sequences per micro-batch.
        seq_len: tokens per sequence; 1 where samples are no tokens, and each counts once.
        dtype: "fp32" or "bf16": of parameters and activations in layer programs; master state is fp32.
        optimizer, learning_rate: the update.
        clip: largest gradient norm; 0 for none.
        activation_checkpointing: keep only the inputs of layers, and run each layer forward again in its backward.
        validate_every: steps between validations; 0 for none. The last step validates too.
        num_validation_microbatches: micro-batches of a validation: train.validate_microbatches, or as many as the
            held-out split has. 0: the run does not validate.
        verify_every: steps between two comparisons of the copies of state by their hashes; 0 for none.
        checkpoint_every: steps between checkpoints, 0 for none: state that is saved is compared too.
        verify_rate: the share of (micro-batch, stage) pairs, and of layers' sums, that a second worker computes as
            well; 0 for none.
        early_stop: the rule by which the run ends before its last step; None: it does not.
        saves_validated: state that is validated is saved as well.
        is_tokens: samples are tokens; else batches are those of a user's dataset, and their shapes may vary.
    """

    seed: int
    steps: int
    global_batch: int
    microbatch_size: int
    seq_len: int
    dtype: str
    optimizer: PageOptimizer
    learning_rate: LearningRate
    clip: float = 0.0
    activation_checkpointing: bool = False
    validate_every: int = 0
    num_validation_microbatches: int = 0
    verify_every: int = 0
    verify_rate: float = 0.0
    checkpoint_every: int = 0
    early_stop: EarlyStop | None = None
    saves_validated: bool = False
    is_tokens: bool = True

    def __post_init__(self) -> None:
        assert self.global_batch % self.microbatch_size == 0 and self.dtype in DTYPES, self

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per step, over the whole mesh."""
        return self.global_batch // self.microbatch_size

    @property
    def tokens_per_step(self) -> int:
        """The divisor of the loss of a step without weights: its tokens, or samples if these are no tokens."""
        return self.global_batch * self.seq_len

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def reads_masters(self) -> bool:
        """True if workers compute with the masters where they lie, or send parameters from there: both are fp32."""
        return self.torch_dtype == torch.float32

    @property
    def validates(self) -> bool:
        """True if the run validates at all."""
        return self.validate_every > 0 and self.num_validation_microbatches > 0

    def validates_at(self, step: int) -> bool:
        """True if the state after this step is validated.

        Workers ask it at the end of each step (`worker/loop.py:Executor._train_step`), and the controller waits for the
        losses of just these steps (ControllerProtocol). They must agree without a message, also after a recovery or a
        restart, so it is a function of the step alone.
        """
        return self.validates and (step % self.validate_every == 0 or step == self.steps)

    def compares_at(self, version: int) -> bool:
        """True if all replicas of the state at this version are compared, before a step is computed from it for good.

        These are every `verify_every`-th version, the first one and the last one, and those that checkpoints are made
        of; validated ones if the run may end there. Like `validates_at` a function of the version alone.
        """
        if not self.verify_every:
            return False
        saved = self.checkpoint_every > 0 and version % self.checkpoint_every == 0
        saved |= (self.early_stop is not None or self.saves_validated) and self.validates_at(version)
        return saved or (version + 1) % self.verify_every == 0 or version in (0, self.steps)


def message_bounds(job: Job, layout: ModelLayout, *, spawns: bool = False, pairs: bool = False) -> MessageBounds:
    """The ids and sizes that messages of a run can have; the same for the controller and all workers."""
    return MessageBounds(
        layout,
        job.steps,
        job.num_microbatches,
        job.num_validation_microbatches,
        1 + len(job.optimizer.state_names),
        spawns,
        checks=job.verify_rate > 0,
        averages=averages(job.optimizer),
        pairs=pairs,
    )


@dataclass(frozen=True)
class LinkSpec:
    """The addresses and the secrets with which a worker reaches the others.

    Args:
        controller: address of the controller.
        directory: of the sockets on the worker's machine.
        credentials: of the run, over TCP; connections without them are refused. None over the sockets of one host.
        host: address of the worker's machine, for links between machines.
        payloads: kind of message -> the most bytes of its payload (message_limits.py).
    """

    controller: str
    directory: str
    credentials: Credentials | None
    host: str
    payloads: Mapping[str, int]


@dataclass(frozen=True)
class OptionSpec:
    """The options of a run; None where an option is off, and then no key of it is sent to a worker.

    Args:
        profile: JSON of a CostModel, by which layers are balanced (`schedule.profile`).
        trace: the run's directory, for workers to write their part of a trace into (`run.trace`).
        frequency_guard: socket of the process that sets the devices' frequencies (`schedule.frequency`).
        groups: address of the TCPStore where process groups of stages meet (`runtime.collectives=group`).
        generation: of the controller that starts the worker, if it is not the first one (`timeouts.adopt`).
        has_agent: an agent starts the worker, and holds its life pipe: the end of that is the agent's, not the
            controller's. The agent says so, with `timeouts.adopt`.
        beats: socket of the relay of the worker's agent, for heartbeats (runtime/processes/beat_relay.py). The agent
            says so.
    """

    profile: str | None = None
    trace: str | None = None
    frequency_guard: str | None = None
    groups: str | None = None
    generation: int | None = None
    has_agent: bool | None = None
    beats: str | None = None


@dataclass(frozen=True)
class RunSpec:
    """The part of a specification that all workers of a run have alike.

    Args:
        settings: of the run.
        data: the prepared data.
        links: how to reach the others.
        checkpoints: what is to be written, and what the run begins with.
        layout: the summary of the layout that the controller has planned with (`manifest.layout_summary`). A worker
            that has imported another model refuses it.
        options: what is optional.
    """

    settings: Settings
    data: PreparedData
    links: LinkSpec
    checkpoints: CheckpointOrders
    layout: str
    options: OptionSpec = OptionSpec()


@dataclass(frozen=True)
class WorkerSpec:
    """The specification of one worker process. The controller sends it as `to_dict`, and a fork server passes it on.

    Args:
        rank: of the worker.
        run: the part that all workers have alike.
        death_watch: (path, slot) of the robust mutex that the worker holds, by whose release its death is noticed; None
            where there is none.
        life_fd: read end of a pipe whose write end the controller alone holds; the fork server adds it.
    """

    rank: int
    run: RunSpec
    death_watch: tuple[str, int] | None = None
    life_fd: int | None = None

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"a worker of rank {self.rank}: ranks are 0 or more")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types. An agent replaces `data`, `directory` and `host` by its machine's,
        and `death_watch` by None: a robust mutex is shared memory of one machine."""
        run = self.run
        # Only options that are on: with an option off, nothing of it is in what a worker is sent.
        options = {name: value for name, value in vars(run.options).items() if value is not None}
        return {
            "rank": self.rank,
            "settings": run.settings.to_dict(),
            "data": run.data.to_dict(),
            "controller": run.links.controller,
            "directory": run.links.directory,
            "credentials": None if run.links.credentials is None else run.links.credentials.to_dict(),
            "host": run.links.host,
            "payloads": dict(run.links.payloads),
            "checkpoints": run.checkpoints.to_dict(),
            "layout": run.layout,
            "options": options,
            "death_watch": None if self.death_watch is None else list(self.death_watch),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> WorkerSpec:
        """The inverse of `to_dict`.

        Raises:
            ValueError: keys that are missing or unknown, or a value that no worker can have.
        """
        # Exactly these keys: one that is ignored here might have changed what this worker computes.
        if (keys := set(fields) - {"life_fd"}) != _KEYS:
            raise ValueError(f"the specification of a worker lacks {sorted(_KEYS - keys)}, has {sorted(keys - _KEYS)}")
        shown = fields["credentials"]
        links = LinkSpec(
            fields["controller"],
            fields["directory"],
            None if shown is None else credentials_from_dict(shown),
            fields["host"],
            fields["payloads"],
        )
        run = RunSpec(
            Settings.from_dict(fields["settings"]),
            PreparedData.from_dict(fields["data"]),
            links,
            CheckpointOrders(**fields["checkpoints"]),
            str(fields["layout"]),
            OptionSpec(**fields["options"]),
        )
        death_watch = fields["death_watch"]
        watch = None if death_watch is None else (str(death_watch[0]), int(death_watch[1]))
        return cls(int(fields["rank"]), run, watch, fields.get("life_fd"))


_KEYS = {
    "rank",
    "settings",
    "data",
    "controller",
    "directory",
    "credentials",
    "host",
    "payloads",
    "checkpoints",
    "layout",
    "options",
    "death_watch",
}
