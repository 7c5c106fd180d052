"""Every setting of a run, declared once: name, type, default, range and meaning (`section.py` says how).

The values are plain and frozen, and are checked when they are made. `compose.py` makes them from a command line.
`Settings.to_dict` and `Settings.from_dict` carry them to workers and into config.yaml as plain JSON. Every error is a
ConfigError that names the override. Rules that need the model, the data or the device are checked where these are
opened.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from elaswave_spmd.conf import checks
from elaswave_spmd.conf.section import REQUIRED, Section, declarations, setting, unknown_setting
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.mesh import MeshShape

SHARDINGS = ("model", "zero0", "zero1", "zero2", "zero3")
CORPORA = ("stdlib", "text", "bin", "arrow", "parquet", "custom")
OPTIMIZERS = ("adamw", "sgd")
WSD = "wsd"
SCHEDULES = ("constant", "linear", "cosine", WSD, "inverse_sqrt")
_WITH_AN_END = ("linear", "cosine", WSD)

TRACKERS = ("wandb", "mlflow")

XLA, EMULATED = "xla", "emulated"
DEVICES = ("cpu", "cuda", "npu", XLA, EMULATED)
DTYPES = ("fp32", "bf16")
TRANSPORTS = ("shm", "ipc", "tcp")
TORCHRUN, RAY, NONE = "torchrun", "ray", "none"
LINKS, GROUP = "links", "group"
COLLECTIVES = (LINKS, GROUP)

ANY = "any"
MISCOMPUTE = "miscompute"
CHAOS_KINDS = ("kill", "stop", "term", "join", "corrupt", "exit", "raise", MISCOMPUTE)
SPLIT_POINTS = ("input", "weights")
"""The points of backwards in two parts, which a run with one stage never reaches."""
CHAOS_POINTS = ("forward", "backward", "reduce", "sum", "norm", "apply", "publish", *SPLIT_POINTS, ANY)
_COMPUTED_AT = CHAOS_POINTS[:6]

AUTO = "auto"
LIVE, PLAIN = "live", "plain"
DISPLAYS = (AUTO, LIVE, PLAIN)
LAUNCHERS = (AUTO, TORCHRUN, RAY, NONE)

VERIFY_ACTIONS = ("evict", "rollback", "report", "stop")

ALWAYS, NEVER = "always", "never"
SPLIT_BACKWARD = (AUTO, ALWAYS, NEVER)
FREQUENCIES = ("none", "simulated", "nvml", "cpufreq")
_DEVICE_OF_FREQUENCY = {"simulated": "emulated", "nvml": "cuda", "cpufreq": "cpu"}

_DATA_NEEDS = {
    "text": ("path", "'data.path=\"corpus/*.txt\"'"),
    "bin": ("path", "data.path=FOLDER with train.bin and val.bin"),
    "arrow": ("path", "data.path=FOLDER of Dataset.save_to_disk"),
    "parquet": ("path", "data.path=FOLDER of parquet files"),
    "custom": ("target", "data.target=my_file.MyDataset"),
}
_OF_PROMPT = ("generate.tokens", "generate.temperature", "generate.seed")
_OF_FREQUENCIES = tuple(f"schedule.f_{name}" for name in ("min", "max", "margin", "changes", "change_ms"))
_TRACKERS_EXAMPLE = "run.trackers=[wandb]"
_CHAOS_EXAMPLE = "chaos.events=[{step: 12, kind: kill, rank: 3, point: backward}]"
_GROUPS_EXAMPLE = 'optim.groups=[{match: "embed.* head.*", lr_scale: 0.1, weight_decay: 0.0}]'
_SLOW_EXAMPLE = "emulated.slow=[{rank: 3, speed: 0.5, step: 10}]"


@dataclass(frozen=True)
class MeshSettings(Section, group="mesh"):
    """The numbers of workers, of stages, and of devices inside each worker.

    Workers and stages are given by `dp` and `pp`, or by `stages` alone. `tp` and `fsdp` are axes inside each worker,
    over its local devices; one XLA program spans all of them.
    """

    dp: int | None = setting(None, "workers per stage", at_least=1)
    pp: int | None = setting(None, "stages", at_least=1)
    stages: tuple[int, ...] | None = setting(
        None, "workers of each stage, [3,2], in place of dp and pp", at_least=1, example="mesh.stages=[3,2]"
    )
    tp: int | None = setting(None, "devices inside each worker (XLA): tensor parallel", at_least=1)
    fsdp: int | None = setting(None, "devices inside each worker (XLA): parameters split over them", at_least=1)

    def check_rules(self) -> None:
        if self.stages is None:
            return
        given = checks.override("mesh.stages", self.stages)
        if not self.stages:
            raise ConfigError("mesh.stages=[] has no stage", where=given, fix="'mesh.stages=[3,2]'")
        beside = [checks.override(f"mesh.{n}", v) for n in ("dp", "pp") if (v := getattr(self, n)) is not None]
        if beside:
            raise ConfigError(
                f"{given} contradicts {' and '.join(beside)}",
                rule="mesh.stages says how many workers each stage has, and so do dp and pp",
                where=given,
                fix=f"'{given}' alone, or mesh=dpN_ppM",
            )

    @cached_property
    def shape(self) -> MeshShape:
        """The shape of the mesh; `shape.name` is its name in summaries and run directories."""
        tp, fsdp = self.tp or 1, self.fsdp or 1
        if self.stages is not None:
            return MeshShape.of_stages(self.stages, tp=tp, fsdp=fsdp)
        return MeshShape.of(dp=self.dp or 1, pp=self.pp or 1, tp=tp, fsdp=fsdp)


@dataclass(frozen=True)
class ShardingSettings(Section, group="sharding"):
    """The layout of state over the workers of a stage."""

    name: str = setting("model", "as the model's own code declares it, or a ZeRO level instead", choices=SHARDINGS)

    @property
    def zero_level(self) -> int | None:
        """0 to 3, or None where the model's own declaration applies."""
        return None if self.name == "model" else int(self.name.removeprefix("zero"))


_MOST_LAYERS, _LARGEST_WIDTH = 10_000, 1_000_000
"""Limits far above the sizes of any model. Without them a model with a mistyped size would be built for hours."""
SIZES = frozenset(("layers", "d_model", "heads", "dropout"))
"""The settings of a model that its constructor gets if it has a parameter of that name."""


@dataclass(frozen=True)
class ModelSettings(Section, group="model"):
    """The model that is trained. Its constructor gets the sizes that it has parameters for, and all of `args`."""

    name: str = setting("gpt_tiny", "name of the choice, in files and on the screen")
    target: str = setting("gpt", "gpt, llama, mlp or my_file.MyModel")
    layers: int = setting(4, "transformer layers; embedding and head come on top", at_least=1, at_most=_MOST_LAYERS)
    d_model: int = setting(128, "width", at_least=1, at_most=_LARGEST_WIDTH)
    heads: int = setting(4, "attention heads", at_least=1, at_most=_LARGEST_WIDTH)
    dropout: float = setting(0.0, "probability of dropout", at_least=0, below=1)
    args: Mapping[str, Any] = setting({}, "further arguments of the constructor, +model.args.NAME=VALUE")
    init_from: str | None = setting(
        None, "weights to begin with: a safetensors file, a run or checkpoint, or a directory of Hugging Face"
    )
    named: frozenset[str] = dataclasses.field(default=frozenset(), compare=False, repr=False)
    """The sizes that the command line or the call itself names. The constructor must have parameters for them.

    This is not a setting: it says where settings came from, and the sizes that the file of a choice sets are not in it.
    """

    @property
    def label(self) -> str:
        """The model's name in files and on the screen: a user's class goes by its own name."""
        return self.target.rpartition(".")[2] if "." in self.target else self.name

    def sizes(self, seq_len: int, vocab_size: int) -> dict[str, Any]:
        """The sizes by the names of a constructor's parameters.

        Args:
            vocab_size: the vocabulary of the data; 0 if samples are not tokens, and then it is left out.
        """
        return {
            **({"vocab_size": vocab_size} if vocab_size else {}),
            "seq_len": seq_len,
            "layers": self.layers,
            "d_model": self.d_model,
            "heads": self.heads,
            "dropout": self.dropout,
        }


@dataclass(frozen=True)
class DataSettings(Section, group="data"):
    """The data that the model is trained on: a corpus, or a dataset of your own."""

    name: str = setting(
        "stdlib", "Python's library, text files, token files, tables, or your own dataset", choices=CORPORA
    )
    path: str | None = setting(
        None, "text files, a glob, quoted: 'data.path=\"corpus/**/*.txt\"'; of other choices a file or folder"
    )
    column: str | None = setting(None, "column of data=arrow and data=parquet: text, or lists of token ids")
    tokenizer: str = setting("bytes", "bytes, or the path of a tokenizers JSON file")
    target: str | None = setting(None, "your dataset, for data=custom: my_file.MyDataset")
    args: Mapping[str, Any] = setting({}, "further arguments of your own dataset, +data.args.NAME=VALUE")
    cache: str | None = setting(None, "folder of token files; null: in the user's cache folder")
    ahead: int = setting(
        4, "micro-batches of your own dataset that are read ahead, on a thread beside the training; 0: none", at_least=0
    )
    validation_fraction: float = setting(0.02, "share of samples held out, at the end", at_least=0, below=1)

    def check_rules(self) -> None:
        needed, example = _DATA_NEEDS.get(self.name, ("", ""))
        if needed and getattr(self, needed) is None:
            what = f"data={self.name} is given without data.{needed}"
            raise ConfigError(what, where=f"data={self.name}", fix=example)


@dataclass(frozen=True)
class OptimGroup(Section, group="optim.groups"):
    """Settings of the parameters whose names match a pattern, in place of the optimizer's own.

    If two groups match a parameter, the settings of both apply to it. Groups that contradict each other are refused, so
    their order does not matter. `weight_decay` applies to all parameters that match, also to those with one dim.
    """

    match: str = setting(REQUIRED, 'patterns of names, as in optim.freeze: "embed.* *.bias"')
    lr_scale: float | None = setting(None, "factor of the learning rate", above=0)
    weight_decay: float | None = setting(None, "weight decay in place of optim.weight_decay", at_least=0)

    def check_rules(self) -> None:
        if self.lr_scale is None and self.weight_decay is None:
            given = checks.override("optim.groups", [{"match": self.match}])
            raise ConfigError(
                f"{given} has neither lr_scale nor weight_decay",
                rule="a group of parameters has settings of its own",
                where=given,
                fix=f"'{_GROUPS_EXAMPLE}'",
            )

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of `match`."""
        return _patterns(self.match)


def _patterns(text: str) -> tuple[str, ...]:
    """Patterns of names, which are separated by spaces or commas."""
    return tuple(text.replace(",", " ").split())


READ_BY: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "betas": ("name", ("adamw",)),
    "eps": ("name", ("adamw",)),
    "momentum": ("name", ("sgd",)),
    "final_lr_ratio": ("schedule", _WITH_AN_END),
    "schedule_steps": ("schedule", _WITH_AN_END),
    "decay_steps": ("schedule", (WSD,)),
}
"""Settings that only some choices read: name -> (the setting that makes the choice, the choices that read it)."""


@dataclass(frozen=True)
class OptimSettings(Section, group="optim"):
    """The update of the weights: the optimizer, the schedule of the learning rate, and what is trained."""

    name: str = setting("adamw", "the optimizer", choices=OPTIMIZERS)
    lr: float = setting(2e-3, "peak of the learning rate", above=0)
    weight_decay: float = setting(0.1, "weight decay of parameters with two dims or more", at_least=0)
    clip: float = setting(1.0, "largest norm of the gradient; 0: no clipping", at_least=0)
    betas: tuple[float, float] = setting((0.9, 0.95), "betas of adamw", at_least=0, below=1)
    eps: float = setting(1e-8, "eps of adamw", above=0)
    momentum: float = setting(0.9, "momentum of sgd", at_least=0, below=1)
    schedule: str = setting("cosine", "the learning rate after the warmup; wsd: stays, then decays", choices=SCHEDULES)
    warmup_steps: int = setting(20, "steps until the peak of the learning rate", at_least=0)
    decay_steps: int | None = setting(
        None, "steps in which schedule=wsd decays, at its end; null: a fifth of all", at_least=1
    )
    schedule_steps: int | None = setting(
        None, "steps until linear, cosine and wsd are at their end, where they stay; null: train.steps", at_least=1
    )
    final_lr_ratio: float = setting(
        0.1, "learning rate at the end of linear, cosine and wsd, as a share of the peak", at_least=0
    )
    max_skipped: int = setting(
        10,
        "steps in a row without an update that end the run (gradient not finite, loss without weight); 0: none do",
        at_least=0,
    )
    ema: float | None = setting(
        None, "decay of an average of the weights over the steps, such as 0.999; null: none", above=0, below=1
    )
    freeze: str | None = setting(None, 'parameters that are not trained, by patterns of their names: "embed.* *.bias"')
    groups: tuple[OptimGroup, ...] = setting(
        (), f"parameters with settings of their own, quoted: '{_GROUPS_EXAMPLE}'", example=_GROUPS_EXAMPLE
    )

    @property
    def freeze_patterns(self) -> tuple[str, ...]:
        """The patterns of `freeze`."""
        return _patterns(self.freeze or "")

    def check_rules(self) -> None:
        self.check_read(("decay_steps", "schedule_steps"))  # None unless given, so these two need no list of names
        if self.schedule_steps is not None and self.schedule_steps <= self.warmup_steps:
            given = checks.override("optim.schedule_steps", self.schedule_steps)
            raise ConfigError(
                f"{given} is no more than optim.warmup_steps={self.warmup_steps}",
                rule="a schedule ends after its warm-up: the learning rate rises to its peak first",
                where=given,
                fix=f"optim.schedule_steps={self.warmup_steps + 1} or more, or a shorter optim.warmup_steps",
            )

    def check_read(self, given: Collection[str]) -> None:
        """Check that the chosen optimizer and schedule read the settings that somebody has given.

        The values alone do not tell which ones were given: the config.yaml of a run has all settings, including those
        of the other optimizer.

        Args:
            given: names of the settings that were given, without the group. Those that are None are passed over.

        Raises:
            ConfigError: a setting is read by another optimizer or schedule only.
        """
        for name, (by, readers) in READ_BY.items():
            if name not in given or (value := getattr(self, name)) is None:
                continue
            if (chosen := getattr(self, by)) not in readers:
                where = checks.override(f"optim.{name}", value)
                raise ConfigError(
                    f"{where} is given with optim.{by}={chosen}, which does not read it",
                    rule=f"it is read by optim.{by}={' or '.join(readers)}",
                    where=where,
                    fix=f"leave optim.{name} out, or optim.{by}={readers[-1]}",
                )

    def check_decay(self, steps: int) -> None:
        """Check that the warm-up and the decay fit into a run of `steps` steps.

        Raises:
            ConfigError: they are longer than the schedule.
        """
        all_steps = steps if self.schedule_steps is None else self.schedule_steps
        if self.decay_steps is not None and self.warmup_steps + self.decay_steps > all_steps:
            given = checks.override("optim.decay_steps", self.decay_steps)
            both = self.warmup_steps + self.decay_steps
            ways = [
                f"optim.{name} of at most {most}"
                for name, most, least in (
                    ("decay_steps", all_steps - self.warmup_steps, 1),
                    ("warmup_steps", all_steps - self.decay_steps, 0),
                )
                if most >= least
            ]
            raise ConfigError(
                f"{given} and optim.warmup_steps={self.warmup_steps} are more than the schedule's {all_steps} steps",
                rule="wsd warms up, stays and decays within its steps",
                where=given,
                fix=", or ".join([*ways, f"a schedule of {both} steps"]),
            )


@dataclass(frozen=True)
class TrainSettings(Section, group="train"):
    """The length of a run, and the data of each step.

    `microbatch_size` is part of a run's identity: with another size the run has other bits.
    """

    steps: int = setting(400, "steps of the run", at_least=1)
    global_batch: int = setting(32, "sequences per step, on any mesh", at_least=1)
    microbatch_size: int = setting(
        4, "sequences that one worker computes at once; divides train.global_batch", at_least=1
    )
    seq_len: int = setting(128, "tokens per sequence", at_least=1)
    validate_every: int = setting(100, "validate every so many steps, and after the last one; 0: never", at_least=0)
    validate_microbatches: int = setting(32, "micro-batches of a validation, if it has so many", at_least=1)
    stop_patience: int = setting(0, "validations without an improvement that end the run; 0: it does not", at_least=0)
    stop_min_delta: float = setting(0.0, "an improvement lowers the best validation loss by more", at_least=0)
    resume: str | None = setting(None, "directory of a run to go on with, from its newest good checkpoint")
    resume_at: int | None = setting(
        None, "resume from the newest checkpoint of this step or an older one, in another run.dir", at_least=1
    )
    reschedule: bool = setting(
        False, "a resumed run may go on with another learning rate than its schedule so far leads to"
    )

    def check_rules(self) -> None:
        self._check_resume()
        self._check_stop()
        batch, size = self.global_batch, self.microbatch_size
        if batch % size == 0:
            return
        sizes = [n for n in range(1, min(batch, 64) + 1) if batch % n == 0]
        given = f"{checks.override('train.microbatch_size', size)} train.global_batch={batch}"
        raise ConfigError(
            f"train.microbatch_size={size} does not divide train.global_batch={batch}",
            rule="a batch is a whole number of micro-batches",
            where=given,
            exists=f"train.microbatch_size of {', '.join(map(str, sizes))}",
            fix=f"train.microbatch_size={max(n for n in sizes if n <= size)}, "
            f"or train.global_batch={-(-batch // size) * size}",
        )

    def _check_resume(self) -> None:
        for name in ("resume_at", "reschedule"):
            if (value := getattr(self, name)) and self.resume is None:
                given = checks.override(f"train.{name}", value)
                raise ConfigError(
                    f"{given} is given without train.resume",
                    rule="it is about the run that is resumed",
                    where=given,
                    fix=f"train.resume=RUN, or leave train.{name} out",
                )

    def _check_stop(self) -> None:
        if self.stop_patience and not self.validate_every:
            given = checks.override("train.stop_patience", self.stop_patience)
            raise ConfigError(
                f"{given} is given with train.validate_every=0",
                rule="a run ends early by its validation losses",
                where=given,
                fix="train.validate_every=N",
            )
        if self.stop_min_delta and not self.stop_patience:
            given = checks.override("train.stop_min_delta", self.stop_min_delta)
            raise ConfigError(
                f"{given} is given without train.stop_patience",
                rule="it says what an improvement is, for runs that end without one",
                where=given,
                fix="train.stop_patience=N",
            )


@dataclass(frozen=True)
class PageSettings(Section, group="page"):
    """The pages in which state is stored, replicated and moved."""

    size: int = setting(4096, "elements per page of state", at_least=64, multiple_of=64)


@dataclass(frozen=True)
class RuntimeSettings(Section, group="runtime"):
    """The devices and machines that workers run on.

    `threads_per_worker`, `dtype` and `compile` are part of a run's identity: with other values the run has other bits.

    `check_model`: before the first step every worker computes one micro-batch twice with each kind of layer. A model
    whose bits depend on more than the micro-batch is refused.

    `collectives`: with `group`, partial sums, reduced gradients and new parameters go through the process group of the
    stage (NCCL, HCCL; gloo on the CPU). While a stage has no group, they go over links. If a stage spans several
    machines, the sums of a machine's workers are added up on that machine first. The bits are the same in all cases.

    `pairs`: with `collectives=group`, boundary tensors, and state that is moved or copied to new replicas, go from
    device to device through process groups of two workers, or over links where there is no such group. The bits are the
    same.

    Several machines: agents find the controller at `rendezvous`, where it listens. It waits for `agents` of them before
    the run begins (0: it begins alone); others may come at any time later. `local_workers` run on the controller's
    machine, all others are assigned to the agents. Workers that are started later run on agents, or on the controller's
    machine where no agent has a place for them; with `local_workers=0` they wait for a place. `token_file` holds the
    secret that controller and agents share.

    `launcher`: docs/engines.md says which variables of torchrun are followed, and when, and how a run uses a Ray
    cluster. It belongs to one command: a run that is resumed does not inherit it.

    `encryption` is for `transport=tcp`. docs/security.md says what it protects and what it costs.
    """

    device: str = setting("cpu", "what workers compute on; emulated: programs that only take time", choices=DEVICES)
    threads_per_worker: int = setting(1, "threads of each worker's computation", at_least=1, below=2**15)
    dtype: str = setting("fp32", "type of parameters and activations in layers; master state is fp32", choices=DTYPES)
    transport: str = setting(
        "shm", "links between workers: shm (shared memory) or ipc on one machine, tcp on several", choices=TRANSPORTS
    )
    encryption: bool = setting(True, "encrypt links over tcp; false: authenticate only, on networks that are trusted")
    activation_checkpointing: bool = setting(False, "keep only the inputs of layers, compute the rest again")
    compile: bool = setting(False, "make layer programs by torch.compile, all before the first step")
    check_model: bool = setting(True, "compute a micro-batch twice before the first step, refuse layers that differ")
    collectives: str = setting(LINKS, "the way of gradients and new parameters inside a stage", choices=COLLECTIVES)
    pairs: bool = setting(False, "boundary tensors and state go through groups of two; with collectives=group only")
    host: str | None = setting(None, "address on which links listen; null: 127.0.0.1, or that of the rendezvous")
    rendezvous: str | None = setting(None, "HOST:PORT of the controller for agents; null: one machine")
    agents: int | None = setting(
        None, "agents to wait for before the start; more may join later. To be given with rendezvous", at_least=0
    )
    agents_timeout: float = setting(300.0, "seconds to wait for them", above=0)
    local_workers: int | None = setting(
        None,
        "first workers on the controller's machine; null: those that agents have no place for; 0: none, also later",
        at_least=0,
    )
    token_file: str | None = setting(None, "file with the secret that controller and agents share, mode 0600")
    launcher: str = setting(
        AUTO,
        "auto: torchrun's variables are followed where it has started several processes; ray: Ray starts agents",
        choices=LAUNCHERS,
    )
    agent_workers: int | None = setting(
        None, "places of each agent that torchrun or Ray starts; null: an equal share of the workers", at_least=1
    )

    def check_rules(self) -> None:
        if self.pairs and self.collectives != GROUP:
            raise ConfigError(
                f"runtime.pairs=true is given with runtime.collectives={self.collectives}",
                rule="pairs are groups of the same library, and meet in the same store as the groups of stages",
                where="runtime.pairs=true",
                fix="runtime.collectives=group, or runtime.pairs=false",
            )
        if self.rendezvous is None:
            self._check_one_machine()
        else:
            self._check_several_machines(self.rendezvous)

    @property
    def has_agents(self) -> bool:
        """True if workers may run on other machines, now or later."""
        return self.rendezvous is not None

    def _check_one_machine(self) -> None:
        given = {
            "agents": self.agents or None,
            "local_workers": self.local_workers,
            "token_file": self.token_file,
            "agent_workers": self.agent_workers,
        }
        if self.launcher == RAY:
            raise ConfigError(
                "runtime.launcher=ray is given to a run that no command hands to Ray",
                rule="the command `train` hands a run to a Ray cluster; a call from Python is a run in its own process",
                where="runtime.launcher=ray",
                fix="elaswave-spmd train runtime.launcher=ray ..., or leave runtime.launcher out",
            )
        for name, value in given.items():
            if value is not None:
                override = checks.override(f"runtime.{name}", value)
                raise ConfigError(
                    f"{override} is given without runtime.rendezvous",
                    rule="it is for runs on several machines, which meet at runtime.rendezvous",
                    where=override,
                    fix="runtime.rendezvous=HOST:PORT, HOST being this machine as the others know it",
                )
        if self.host is not None and self.transport != "tcp":
            raise _must_be_tcp(checks.override("runtime.host", self.host), self.transport)

    def _check_several_machines(self, rendezvous: str) -> None:
        endpoint("runtime.rendezvous", rendezvous)
        where = checks.override("runtime.rendezvous", rendezvous)
        if self.transport != "tcp":
            raise _must_be_tcp(where, self.transport)
        if self.agents is None:
            rule = "agents meet the controller at the rendezvous, so many before the run begins"
            fix = "runtime.agents=1; or 0, if the run is to begin on this machine alone"
            raise ConfigError(f"{where} is given without runtime.agents", rule=rule, where=where, fix=fix)
        if self.token_file is None:
            fix = "runtime.token_file=FILE; make one by: (umask 077; openssl rand -hex 32 > FILE)"
            rule = "machines that meet share a secret"
            raise ConfigError(f"{where} is given without runtime.token_file", rule=rule, where=where, fix=fix)
        if self.encryption and self.collectives == GROUP:
            raise ConfigError(
                "runtime.collectives=group and runtime.rendezvous are given with runtime.encryption=true",
                rule="what leaves a machine is encrypted, and process groups of c10d neither encrypt nor authenticate",
                where="runtime.collectives=group",
                fix="runtime.collectives=links, or runtime.encryption=false if the network is trusted",
            )


def endpoint(name: str | None, value: object) -> tuple[str, int]:
    """Host and port of a text "HOST:PORT". The form of the host is checked, so its look-up raises nothing but OSError.

    Args:
        name: the setting that has this value; None if it is a word by itself, as on the command line of an agent.

    Raises:
        ConfigError: the text has another form.
    """
    given = str(value) if name is None else checks.override(name, value)
    fix = "the controller's runtime.rendezvous, such as node0:29400" if name is None else f"{name}=node0:29400"
    found = re.fullmatch(r"([^\s:/]+):([0-9]{1,5})", value) if isinstance(value, str) else None
    if found is None or not 0 < int(found[2]) < 2**16:
        what, rule = "is not HOST:PORT", "HOST is a name or an IPv4 address, PORT a number from 1 to 65535"
        raise ConfigError(f"{given} {what}", rule=rule, where=given, fix=fix)
    try:
        found[1].encode("idna")  # as the look-up of a name does
    except UnicodeError as error:
        what = "names a host that cannot be looked up"
        rule = "each part of a host's name between two dots has 1 to 63 characters"
        raise ConfigError(f"{given} {what}", rule=rule, where=given, fix=fix) from error
    return found[1], int(found[2])


def _must_be_tcp(where: str, transport: str) -> ConfigError:
    return ConfigError(
        f"{where} is given with runtime.transport={transport}",
        rule="links between machines are tcp",
        where=where,
        fix="runtime.transport=tcp",
    )


@dataclass(frozen=True)
class GenerateSettings(Section, group="generate"):
    """Text that the model generates after a prompt, from each checkpoint and from the weights at the end.

    A process beside the controller generates it, at the lowest priority until training has ended, so no step waits for
    it. There is one text for each checkpoint (`checkpoint.every`, `checkpoint.keep_best`) and one at the end.
    """

    prompt: str | None = setting(None, "the begin of the text; null: no text is generated")
    tokens: int = setting(60, "new tokens of a text", at_least=1)
    temperature: float = setting(0.8, "0: the most likely token; 1: as the model has it", at_least=0)
    seed: int = setting(0, "of the draws; the same for each text", at_least=0)


@dataclass(frozen=True)
class RunSettings(Section, group="run"):
    """The files of a run, its display, and the code and services that hear of its progress."""

    dir: str | None = setting(None, "directory of the run's files; null: runs/<model>-<mesh>-<time>")
    tensorboard: bool = setting(True, "write TensorBoard files")
    display: str = setting(AUTO, "live: a view at the bottom of the terminal; auto: that or lines", choices=DISPLAYS)
    trace: bool = setting(False, "write trace.json: what each worker does and when, for https://ui.perfetto.dev")
    callbacks: tuple[str, ...] = setting(
        (),
        "your code that hears of steps, events, validations, checkpoints and the end: [my_file.MyCallback]",
        example="run.callbacks=[my_file.MyCallback]",
    )
    trackers: tuple[str, ...] = setting(
        (),
        "services that get metrics, events and the summary: [wandb,mlflow]",
        choices=TRACKERS,
        example=_TRACKERS_EXAMPLE,
    )

    def check_rules(self) -> None:
        if len({*self.trackers}) < len(self.trackers):
            given = checks.override("run.trackers", self.trackers)
            fix = checks.override("run.trackers", tuple(dict.fromkeys(self.trackers)))
            raise ConfigError(f"{given} names one of them twice", where=given, fix=f"'{fix}'")


@dataclass(frozen=True)
class ElasticSettings(Section, group="elastic"):
    """The membership of a run: workers that may come and go.

    The number of `spares` is kept: a new one is started for each spare that has joined the mesh or has died. So with
    spares every lost worker is replaced, whether or not `replace` is given.

    `replacements_per_minute`: the default of 20 allows a whole machine of workers to start at once. In the long run it
    is one worker every 3 seconds, which is the processor time that a start takes.

    `min_workers` counts members of the mesh. A worker that is still being started in place of a lost one is not a
    member yet. So with `min_workers` equal to the size of the mesh, the first loss for which no spare is ready stops
    the run, with its state saved.

    `max_workers`: when a machine joins the run, or returns, workers are started on it until the run has this many
    again, or the machine has no more places. Spares are not counted.
    """

    enabled: bool = setting(True, "false: the first loss of a worker ends the run")
    min_workers: int = setting(1, "with fewer workers the run writes a checkpoint and stops", at_least=1)
    max_workers: int | None = setting(
        None, "workers up to which the run grows; null: the mesh's, and `ctl add` as many as it says", at_least=1
    )
    replace: bool = setting(False, "start a new worker for each one that was lost")
    spares: int = setting(0, "workers beside the mesh, ready to take the place of a lost one at once", at_least=0)
    replacements_per_minute: int = setting(
        20, "new workers in place of lost ones and on machines that come, in a minute", at_least=1
    )
    evict_slower_than: float = setting(
        0.0,
        "remove a worker that stays slower than this share of the median speed, in steps of 50 ms or more; 0: none",
        at_least=0,
        below=1,
    )

    def check_rules(self) -> None:
        for name in ("max_workers", "replace", "spares", "evict_slower_than"):
            if (value := getattr(self, name)) and not self.enabled:
                given = checks.override(f"elastic.{name}", value)
                raise ConfigError(
                    f"{given} contradicts elastic.enabled=false",
                    rule="a run that is not elastic ends with its first loss, and no worker joins it",
                    where=f"{given} elastic.enabled=false",
                    fix=f"leave one of the two out: elastic.enabled or elastic.{name}",
                )

    @property
    def replaces(self) -> bool:
        """True if lost workers are replaced, by `replace` or by spares."""
        return self.replace or self.spares > 0


@dataclass(frozen=True)
class MirrorSettings(Section, group="mirror"):
    """The mirrors of sharded state: replicas on other workers of the stage, which take over when a worker is lost."""

    count: int = setting(1, "mirrors of each page of sharded state", at_least=0)
    scatter: int = setting(0, "workers that share the mirrors of one worker's pages; 0: chosen", at_least=0)
    verify_every: int = setting(
        0, "versions from one comparison of replicas, by hashes, to the next; 0: none", at_least=0
    )

    def check_rules(self) -> None:
        if 0 < self.scatter < self.count:
            raise ConfigError(
                f"mirror.scatter={self.scatter} is less than mirror.count={self.count}",
                rule="the mirrors of a page lie on different workers",
                where=f"mirror.scatter={self.scatter} mirror.count={self.count}",
                fix=f"mirror.scatter={self.count}, or 0 to have it chosen",
            )


@dataclass(frozen=True)
class VerifySettings(Section, group="verify"):
    """Checks of devices: a second worker computes some micro-batches, and some sums, as well, before a step commits.

    A worker may be lost in the middle of a step. At rate 1 the step then begins again, because nothing unchecked may be
    committed. At lower rates it is recovered in part as usual, and its remaining checks are left out (docs/protocol.md,
    V1 to V9).
    """

    rate: float = setting(
        0.01,
        "share of (micro-batch, stage) pairs, and of layers' sums, that are checked; 0: none",
        at_least=0,
        at_most=1,
    )
    action: str = setting(
        "evict",
        "a wrong worker is evicted, also with a return to before it may have been wrong, reported, or ends the run",
        choices=VERIFY_ACTIONS,
    )


@dataclass(frozen=True)
class CheckpointSettings(Section, group="checkpoint"):
    """Durable checkpoints."""

    every: int = setting(0, "steps between checkpoints; 0: none", at_least=0)
    keep: int = setting(2, "the newest checkpoints that stay", at_least=1)
    keep_best: int = setting(
        0, "those with the lowest validation loss that stay as well; made at validations", at_least=0
    )


_SHORTEST_HEARTBEAT = 1e-3
"""In seconds. With a shorter period a processor has time for nothing but to send and receive heartbeats."""
_LATE_HEARTBEATS = 3
_MOST_HEARTBEATS = 5_000
"""The most heartbeats of all workers per second, as far as `suspect` allows: the controller has other work to do."""
_HEARTBEATS_OF_SUSPECT = 4  # that a worker sends within `suspect` at least, however many workers there are

# (lower, times, upper, why): upper must exceed lower, or be at least `times` lower where `times` is not 1.
_TIMEOUT_ORDER = (
    ("heartbeat", _LATE_HEARTBEATS, "suspect", f"{_LATE_HEARTBEATS} late heartbeats are no reason to suspect a worker"),
    ("suspect", 1, "status", "a stopped worker is found by its missing heartbeats before it delays a Prepare"),
    ("status", 1, "progress", "a busy worker is asked for its status before it counts as hanging"),
    ("progress", 1, "start", "a worker's first action may compile; later ones do not"),
    ("status", 1, "join", "a worker that is still starting outlasts a reconfiguration"),
    ("status", 1, "leave", "a worker that leaves is given the reconfiguration that releases it"),
    ("controller", 1, "shutdown", "a worker that lost its controller waits, and then has time to write a checkpoint"),
)


@dataclass(frozen=True)
class Timeouts(Section, group="timeouts"):
    """The waiting times of a run, in seconds, in an order that is checked.

    None of them delays the handling of a loss that is certain, such as a process that died or a socket that closed.

    `heartbeat` is also the longest time that one tick of the failure detector counts, however late the tick comes.

    `suspect`: a TCP link between two workers is given up after twice this time without an acknowledgement.

    `status`: a worker in the middle of an action has `progress_factor` times the usual duration of the action, if that
    is longer.

    `start` counts from a worker's launch, or from the last layer that it has compiled. A worker's first action may also
    take this time, instead of `progress`.

    `leave`: a worker whose leave takes longer counts as failed, unless it holds state that no other worker has.
    """

    heartbeat: float = setting(
        0.1, "from one heartbeat of a worker to the next; longer on many workers", at_least=_SHORTEST_HEARTBEAT
    )
    suspect: float = setting(2.0, "from the last heartbeat until a worker counts as hanging", above=0)
    status: float = setting(5.0, "from an unanswered Prepare until a worker counts as hanging", above=0)
    progress: float = setting(
        30.0, "longest time of one action; a worker that exceeds it and waits for no other counts as hanging", above=0
    )
    progress_factor: float = setting(20.0, "times the usual duration of an action, if longer than progress", at_least=1)
    start: float = setting(300.0, "from the start of a worker until it is ready, and for its first action", above=0)
    join: float = setting(120.0, "from the start of a worker that joins a running run until it is ready", above=0)
    leave: float = setting(10.0, "from a worker's request to leave until it may go", above=0)
    controller: float = setting(5.0, "of waiting for a lost controller before workers write a checkpoint", above=0)
    group: float = setting(
        30.0, "for making a stage's group, and until all members take part in what it copies", above=0
    )
    shutdown: float = setting(30.0, "for workers to end, checkpoint included, before they are killed", above=0)
    callbacks: float = setting(30.0, "for callbacks to end, once all workers have", above=0)
    adopt: float | None = setting(
        None,
        "how long workers of a lost controller wait to be adopted by a new one; null: they do not wait",
        above=0,
    )

    def check_rules(self) -> None:
        for lower, times, upper, why in _TIMEOUT_ORDER:
            self._check_order(lower, times, upper, why)

    def _check_order(self, lower: str, times: int, upper: str, why: str) -> None:
        low, high = getattr(self, lower), getattr(self, upper)
        least = low * times
        if high >= least if times > 1 else high > least:
            return
        relation = f"less than {times} times" if times > 1 else "not longer than"
        raise ConfigError(
            f"timeouts.{upper}={high:g} is {relation} timeouts.{lower}={low:g}",
            rule=why,
            where=f"timeouts.{upper}={high:g} timeouts.{lower}={low:g}",
            fix=f"timeouts.{upper} of {least:g} or more" if times > 1 else f"timeouts.{upper} above {least:g}",
        )

    def heartbeat_of(self, num_workers: int) -> float:
        """Seconds from one heartbeat of a worker to the next: `heartbeat`, or more if there are many workers.

        All workers together send at most 5,000 heartbeats per second, unless a worker would then send fewer than four
        within `suspect`. With the default of `heartbeat` the period grows from 500 workers on.
        """
        return max(self.heartbeat, min(num_workers / _MOST_HEARTBEATS, self.suspect / _HEARTBEATS_OF_SUSPECT))

    @property
    def silent_link(self) -> float:
        """Seconds without an acknowledgement after which a link between workers on two machines counts as lost.

        It is longer than `suspect`, so that an unreachable machine is first given up by its missing heartbeats.
        """
        return 2 * self.suspect

    @property
    def orphan_grace(self) -> float:
        """Seconds that workers may live without their controller: they wait for one, then they write a checkpoint."""
        return self.without_controller + self.shutdown

    @property
    def agent_grace(self) -> float:
        """Seconds that workers may live without their agent. No other agent takes its place, so none adopts them."""
        return self.controller + self.shutdown

    @property
    def without_controller(self) -> float:
        """Seconds that workers wait for a controller when theirs is lost, before they write a checkpoint."""
        return self.controller if self.adopt is None else self.adopt

    def orphans_step(self, *, is_abandoned: bool) -> float:
        """Seconds for which a worker may go on to compute its step when its controller is lost.

        Then half of `shutdown` is left for it to write its state before it is killed.

        Args:
            is_abandoned: the worker's agent is lost as well, so it does not wait for another controller.
        """
        return (self.controller if is_abandoned else self.without_controller) + self.shutdown / 2


@dataclass(frozen=True)
class ChaosEvent(Section, group="chaos.events"):
    """An injected fault, which happens once: when a worker reaches `point` in the first attempt of `step`.

    `rank` counts from 0, and workers that come later have the ranks after those of the mesh. A rank that is not in the
    mesh is refused unless some setting brings workers, such as `elastic.replace`, `elastic.spares`,
    `elastic.max_workers` or a `join`.

    `kind`: `kill`, `stop` and `term` send SIGKILL, SIGSTOP or SIGTERM (a graceful leave) to the worker's process. With
    `exit` the process ends, and with `raise` an exception is raised in it. `corrupt` flips a bit of the worker's state,
    in the parameters or the optimizer's state, as drawn by `chaos.seed`. `join` asks for a new worker at that moment.

    `miscompute` makes one bit of one element wrong in what the worker's device computes at `point`: a layer's output
    (forward), the gradient of a layer's input (backward), a micro-batch's weight gradient (reduce), the sum over a
    worker's micro-batches (sum), a reduced gradient (norm) or an update (apply).

    The points `input` and `weights` are in the two parts of a split backward, which stages after the first have:
    `input` when the gradient of a layer's input is made, `weights` before the weight gradients of a micro-batch that
    were put off.
    """

    step: int = setting(REQUIRED, "step of the run", at_least=1)
    kind: str = setting(REQUIRED, "the fault", choices=CHAOS_KINDS)
    rank: int | tuple[int, ...] | str = setting(ANY, "the worker, a list of workers, or any")
    point: str = setting(ANY, "before a micro-batch's forward or backward, or at a later point", choices=CHAOS_POINTS)
    rate: float = setting(
        0.0, "of miscompute: its probability in `step` and each step after it; 0: once", at_least=0, at_most=1
    )

    def check_rules(self) -> None:
        if isinstance(self.rank, list):
            object.__setattr__(self, "rank", tuple(self.rank))
        if self.rank != ANY and not _are_ranks(self.ranks):
            given = checks.override("chaos.events.rank", self.rank)
            raise ConfigError(
                f"{given} names no workers",
                rule="rank is a worker's number, a list of different ones, or any",
                where=given,
                fix="rank: 3, rank: [1, 3] or rank: any",
            )
        self._check_miscompute()

    def _check_miscompute(self) -> None:
        if self.rate and self.kind != MISCOMPUTE:
            given = checks.override("chaos.events.rate", self.rate)
            raise ConfigError(
                f"{given} for kind: {self.kind}",
                rule="rate is the probability of a miscompute in a step; other events happen once",
                where=given,
                fix=f"leave it out, or kind: {MISCOMPUTE}",
            )
        if self.kind == MISCOMPUTE and self.point not in _COMPUTED_AT:
            given = checks.override("chaos.events.point", self.point)
            raise ConfigError(
                f"{given} computes nothing that a miscompute could change",
                rule="a miscompute names what is computed wrongly by its point",
                where=given,
                exists=", ".join(_COMPUTED_AT),
                fix="point: forward",
            )

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """The workers that are named; None for any worker."""
        if isinstance(self.rank, tuple):
            return self.rank
        return None if isinstance(self.rank, str) else (self.rank,)


def _are_ranks(ranks: object) -> bool:
    if not isinstance(ranks, tuple) or not ranks or len(set(map(str, ranks))) < len(ranks):
        return False
    return all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in ranks)


@dataclass(frozen=True)
class ChaosSettings(Section, group="chaos"):
    """Injected faults: those that are listed, and drawn ones."""

    events: tuple[ChaosEvent, ...] = setting((), f"faults, quoted: '{_CHAOS_EXAMPLE}'", example=_CHAOS_EXAMPLE)
    random: bool = setting(False, "draw further faults")
    seed: int = setting(0, "seed of drawn faults", at_least=0)
    rate: float = setting(0.1, "drawn faults that are expected per committed step", at_least=0)


@dataclass(frozen=True)
class ScheduleSettings(Section, group="schedule"):
    """The changes of a running plan that follow from what its workers measure.

    A decision is made every `every` steps, on medians over `window` steps. The plan is changed if `patience` decisions
    in a row expect a step to take at least the share `min_gain` less time, and if that pays for the state that has to
    move. The next change takes twice as many decisions, until workers come or go.

    On a busy machine a worker may for a moment take fifty times as long as usual. So a measured difference counts, and
    is shown, only as far as it has lasted for `lasting` seconds.

    While a step is expected to take less than 50 ms, by the measured times of its layers, differences are noise: no
    worker is told of as slow or evicted, and nothing is moved but what does not fit in memory where it is.

    Without a `memory_limit` no change gives a worker more state than twice the even share on the mesh that the run was
    started with, or than the fullest worker has at present if that is more. The limit also bounds the weight gradients
    that a worker puts off.
    """

    microbatches: bool = setting(
        True, "assign micro-batches by the measured speed of workers, in steps of 50 ms or more"
    )
    layers: bool = setting(True, "move layers to other stages when that pays, in steps of 50 ms or more")
    stages: bool = setting(False, "the number of stages may change, too")
    align: float = setting(
        0.0,
        "share by which a worker may have more work than needed, if it then sends fewer sums and steps are no longer",
        at_least=0,
        at_most=1,
    )
    memory_limit: float | None = setting(
        None, "bytes of state and activations that a worker has room for; null: twice the even share of state", above=0
    )
    split_backward: str = setting(
        AUTO,
        "weight gradients are put off where another stage waits; auto: unless a trial in the run finds no gain",
        choices=SPLIT_BACKWARD,
    )
    every: int = setting(5, "steps between two decisions", at_least=1)
    window: int = setting(5, "steps that the medians are over", at_least=1)
    min_gain: float = setting(0.1, "share of a step that a change has to gain", at_least=0, below=1)
    patience: int = setting(3, "decisions in a row that have to ask for a change", at_least=1)
    lasting: float = setting(10.0, "seconds that a difference in speed has to last before it counts", at_least=0)
    profile: str | None = setting(None, "costs.json of an earlier run of this model, to plan the first mesh with")
    bandwidth: float | None = setting(
        None, "bandwidth of a link in bytes/s, for the cost of moves; null: measured", above=0
    )
    latency: float | None = setting(None, "latency of a link in seconds; null: measured", at_least=0)
    frequency: str = setting("none", "backend that sets the frequencies of devices", choices=FREQUENCIES)
    f_min: float = setting(0.5, "lowest frequency, relative to the normal one", above=0, at_most=1)
    f_max: float = setting(1.0, "highest frequency, relative to the normal one", at_least=1)
    f_margin: float = setting(
        0.05, "a lowered frequency stays this share above what the schedule allows", at_least=0, below=1
    )
    f_changes: int = setting(8, "most changes of a device's frequency in a step; below 2: none", at_least=0)
    f_change_ms: float = setting(5.0, "milliseconds that a change takes; an emulated device takes them", at_least=0)

    def check_device(self, device: str, *, has_agents: bool) -> None:
        """Check that this backend can set the frequencies of the devices, from the controller's machine.

        Args:
            device: the kind of device that workers run on (`runtime.device`).
            has_agents: workers may run on other machines, where no backend can set frequencies.

        Raises:
            ConfigError: it cannot. The error names the backends that could.
        """
        if self.frequency == "none":
            return
        given = checks.override("schedule.frequency", self.frequency)
        what = f"{given} cannot set the frequencies of runtime.device={device}"
        rule = f"it sets those of runtime.device={_DEVICE_OF_FREQUENCY[self.frequency]}"
        if _DEVICE_OF_FREQUENCY[self.frequency] == device:
            if not has_agents:
                return
            what = f"{given} is given with runtime.rendezvous"
            rule = "frequencies are set on the controller's machine only"
        fits = [name for name, its_device in _DEVICE_OF_FREQUENCY.items() if its_device == device and not has_agents]
        raise ConfigError(
            what,
            rule=rule,
            where=given,
            exists=f"for {device}: {', '.join([*fits, 'none'])}",
            fix=" or ".join(f"schedule.frequency={name}" for name in (*fits, "none")),
        )


@dataclass(frozen=True)
class SlowDevice(Section, group="emulated.slow"):
    """A worker that runs at another speed for some steps."""

    rank: int = setting(REQUIRED, "the worker; newcomers have the ranks after those of the mesh", at_least=0)
    speed: float = setting(REQUIRED, "relative to the configured speed", above=0)
    step: int = setting(1, "first step at this speed", at_least=1)
    until: int | None = setting(None, "first step at the normal speed again; null: none")

    def check_rules(self) -> None:
        if self.until is not None:
            checks.whole("emulated.slow.until", self.until, at_least=self.step + 1)

    def holds_at(self, rank: int, step: int) -> bool:
        """True if this entry applies to the given worker and step."""
        return rank == self.rank and self.step <= step and (self.until is None or step < self.until)


@dataclass(frozen=True)
class EmulatedSettings(Section, group="emulated"):
    """The durations of the programs of runtime.device=emulated, which compute nothing and return keyed numbers.

    If two entries of `slow` apply to a worker at the same time, the later one counts.
    """

    forward_ms: float = setting(10.0, "milliseconds of one micro-batch's forward through a layer of cost 1", at_least=0)
    backward_ms: float = setting(20.0, "milliseconds of its backward", at_least=0)
    layer_costs: tuple[float, ...] = setting(
        (),
        "relative cost of each layer, embedding and head included; []: 1 each",
        at_least=0,
        example="emulated.layer_costs=[1,1,2]",
    )
    weight_share: float = setting(
        0.5,
        "part of a backward that makes weight gradients, put off where another stage waits; 0: backwards are whole",
        at_least=0,
        at_most=1,
    )
    slow: tuple[SlowDevice, ...] = setting((), f"slow workers, quoted: '{_SLOW_EXAMPLE}'", example=_SLOW_EXAMPLE)

    def speed(self, rank: int, step: int) -> float:
        """Relative speed of a worker in a step, at the normal frequency of its device."""
        return next((s.speed for s in reversed(self.slow) if s.holds_at(rank, step)), 1.0)

    def check_layers(self, num_layers: int) -> None:
        """Check that there is one cost for each layer of the model, or none at all.

        Raises:
            ConfigError: there is another number of costs.
        """
        if self.layer_costs and len(self.layer_costs) != num_layers:
            given = checks.override("emulated.layer_costs", self.layer_costs)
            raise ConfigError(
                f"{given} has {len(self.layer_costs)} numbers, and the model has {num_layers} layers",
                rule="there is one number for each layer, embedding and head included",
                where=given,
                fix=f"{num_layers} numbers, or none",
            )


@dataclass(frozen=True)
class Settings(Section):
    """All settings of a run.

    Raises:
        ConfigError: a group breaks a rule, or two groups contradict each other.
    """

    seed: int = setting(0, "seed of every random number: sample order, initial weights, dropout", at_least=0)
    mesh: MeshSettings = field(default_factory=MeshSettings)
    sharding: ShardingSettings = field(default_factory=ShardingSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    page: PageSettings = field(default_factory=PageSettings)
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)
    generate: GenerateSettings = field(default_factory=GenerateSettings)
    run: RunSettings = field(default_factory=RunSettings)
    elastic: ElasticSettings = field(default_factory=ElasticSettings)
    mirror: MirrorSettings = field(default_factory=MirrorSettings)
    verify: VerifySettings = field(default_factory=VerifySettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    timeouts: Timeouts = field(default_factory=Timeouts)
    chaos: ChaosSettings = field(default_factory=ChaosSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    emulated: EmulatedSettings = field(default_factory=EmulatedSettings)

    def check_rules(self) -> None:
        self.schedule.check_device(self.runtime.device, has_agents=self.runtime.has_agents)
        self.optim.check_decay(self.train.steps)
        least, workers = self.elastic.min_workers, self.mesh.shape.num_workers
        if least > workers:
            raise ConfigError(
                f"elastic.min_workers={least} is more than the {workers} workers of the mesh",
                rule="a run begins with at least elastic.min_workers",
                where=f"elastic.min_workers={least}",
                fix=f"elastic.min_workers={workers}, or a larger mesh",
            )
        most = self.elastic.max_workers
        if most is not None and most < workers:
            raise ConfigError(
                f"elastic.max_workers={most} is less than the {workers} workers of the mesh",
                rule="a run begins with at most elastic.max_workers",
                where=f"elastic.max_workers={most}",
                fix=f"elastic.max_workers={workers}, or a smaller mesh",
            )
        if self.verify.action == "rollback":
            self._check_rollback()
        if self.timeouts.adopt is not None:
            self._check_adopted()
        if self.checkpoint.keep_best and not self.train.validate_every:
            given = checks.override("checkpoint.keep_best", self.checkpoint.keep_best)
            raise ConfigError(
                f"{given} is given with train.validate_every=0",
                rule="the best checkpoints are those with the lowest validation loss",
                where=given,
                fix="train.validate_every=N",
            )
        self._check_chaos()
        steps = self.train.steps
        if late := [event.step for event in self.chaos.events if event.step > steps]:
            raise ConfigError(
                f"chaos.events.step={late[0]} is after the last step, train.steps={steps}",
                where=f"chaos.events.step={late[0]} train.steps={steps}",
                fix=f"a step from 1 to {steps}",
            )

    def _check_chaos(self) -> None:
        """Refuse events at the points of split backwards in a run that has no such backwards: they would not happen."""
        points = [event.point for event in self.chaos.events if event.point in SPLIT_POINTS]
        if not points:
            return
        runtime, is_emulated = self.runtime, self.runtime.device == EMULATED
        is_one_stage = len(self.mesh.shape.stage_sizes) == 1 and not self.schedule.stages
        whole = {
            checks.override("mesh", str(self.mesh.shape)): (is_one_stage, "mesh=pp2"),
            "runtime.check_model=false": (not runtime.check_model and not is_emulated, "runtime.check_model=true"),
            "schedule.split_backward=never": (
                self.schedule.split_backward == NEVER,
                f"schedule.split_backward={AUTO}",
            ),
            "emulated.weight_share=0": (is_emulated and not self.emulated.weight_share, "emulated.weight_share=0.5"),
        }
        for where, (is_so, fix) in whole.items():
            if is_so:
                given = checks.override("chaos.events.point", points[0])
                raise ConfigError(
                    f"{given} is never reached with {where}",
                    rule="it is a point of backwards in two parts: in layers that were checked, behind a stage",
                    where=f"{given} {where}",
                    fix=f"point: backward, or {fix}",
                )

    def check_named(self, names: Collection[str]) -> None:
        """Check that the settings that somebody has named are read. Some are read only if another setting has a value.

        As for `OptimSettings.check_read`, the values alone do not tell: a config.yaml has all settings.

        Args:
            names: whole names of settings; names of groups are passed over.

        Raises:
            ConfigError: nothing reads one of these settings.
        """
        for name in names:
            for belonging, is_read, chosen, instead in self._choices():
                if name not in belonging or is_read:
                    continue
                group, _, field = name.partition(".")
                if (value := self.to_dict()[group][field]) is None:  # it has no value that could be read
                    continue
                where = checks.override(name, value)
                raise ConfigError(
                    f"{where} is given with {chosen}, which does not read it",
                    rule=f"it is read with {instead}" if instead else f"nothing reads it with {chosen}",
                    where=where,
                    fix=f"leave {name} out" + (f", or {instead}" if instead else ""),
                )
        if not {"chaos", "chaos.events"}.isdisjoint(names):
            self._check_ranks("chaos.events.rank", [rank for e in self.chaos.events for rank in e.ranks or ()])
        if not {"emulated", "emulated.slow"}.isdisjoint(names):
            self._check_ranks("emulated.slow.rank", [slow.rank for slow in self.emulated.slow])

    def _check_ranks(self, name: str, ranks: Iterable[int]) -> None:
        """Refuse ranks that no worker can have: what a run does to them would never happen, and nobody would notice."""
        workers = self.mesh.shape.num_workers
        unknown = [rank for rank in ranks if rank >= workers]
        if not unknown or self._may_have_newcomers:
            return
        given = checks.override(name, unknown[0])
        mesh = checks.override("mesh", self.mesh.shape.name)
        more = f"elastic.replace=true, elastic.spares=1 or elastic.max_workers={unknown[0] + 1}"
        raise ConfigError(
            f"{given} is no worker of {mesh}, and no setting brings other workers",
            rule="ranks count from 0, and workers that come later get the next ones",
            where=f"{given} {mesh}",
            exists="rank 0" if workers == 1 else f"ranks 0 to {workers - 1}",
            fix="one of these, or a larger mesh"
            + (f"; or {more}, if a newcomer is meant" if self.elastic.enabled else ""),
        )

    @property
    def _may_have_newcomers(self) -> bool:
        """True if workers may have other ranks than those of the mesh, by what the settings say.

        `ctl add` alone does not count, since it is possible in every elastic run: `elastic.max_workers` tells of it.
        """
        elastic, most = self.elastic, self.elastic.max_workers
        joins = self.chaos.random or any(event.kind == "join" for event in self.chaos.events)
        grows = self.runtime.has_agents or (most is not None and most > self.mesh.shape.num_workers)
        adopts = self.train.resume is not None and self.timeouts.adopt is not None
        return adopts or (elastic.enabled and (elastic.replaces or joins or grows))

    def _choices(self) -> Iterator[tuple[Collection[str], bool, str, str]]:
        """The settings that are read only with some choice.

        Yields:
            The names of settings; whether they are read; the override that decides it, with its present value; and the
            override with which they would be read, or "" if there is none.
        """
        yield _OF_PROMPT, self.generate.prompt is not None, "generate.prompt=null", "generate.prompt=TEXT"
        yield ("chaos.rate",), self.chaos.random, "chaos.random=false", "chaos=random"
        device = self.runtime.device
        emulated = {declared.name for declared in declarations(EmulatedSettings)}
        yield emulated, device == EMULATED, f"runtime.device={device}", f"runtime.device={EMULATED}"
        backend = next((name for name, of in _DEVICE_OF_FREQUENCY.items() if of == device), "")
        instead = f"schedule.frequency={backend}" if backend else ""
        yield _OF_FREQUENCIES, self.schedule.frequency != "none", "schedule.frequency=none", instead
        moves = {"elastic.enabled": self.elastic.enabled, "schedule.layers": self.schedule.layers}
        for name, is_on in moves.items():  # false is the default of schedule.stages, and says what is so anyway
            yield ("schedule.stages",), is_on or not self.schedule.stages, f"{name}=false", f"{name}=true"
        data, runtime = self.data, self.runtime
        chosen = f"data={data.name}" if data.target is None else f"data.target={data.target}"
        yield ("data.cache",), data.target is None and data.name != "bin", chosen, "data=text"
        yield ("data.ahead",), data.target is not None, chosen, "data.target=my_file.MyDataset"
        for name in ("count", "scatter"):  # mirrors are there for losses, and a loss ends a run that is not elastic
            is_read = self.elastic.enabled or not getattr(self.mirror, name)
            yield (f"mirror.{name}",), is_read, "elastic.enabled=false", "elastic.enabled=true"
        yield ("mirror.scatter",), self.mirror.count > 0, "mirror.count=0", "mirror.count=1"
        checks_devices = self.verify.rate > 0 or self.mirror.verify_every > 0
        yield ("verify.action",), checks_devices, "verify.rate=0", "verify.rate=0.01"
        yield ("runtime.agents_timeout",), runtime.has_agents, "runtime.rendezvous=null", "runtime.rendezvous=HOST:PORT"
        is_read = runtime.encryption or runtime.transport == "tcp"  # true is the default, and changes nothing elsewhere
        chosen = f"runtime.transport={runtime.transport}"
        yield ("runtime.encryption",), is_read, chosen, "runtime.transport=tcp"

    @property
    def held_by_controller(self) -> tuple[str, str] | None:
        """A setting that keeps another controller from adopting the workers, as it needs what only this one has.

        Returns:
            The setting as it is given, and the reason; None if there is no such setting.
        """
        runtime, verify = self.runtime, self.verify
        is_launched = runtime.launcher == TORCHRUN and runtime.rendezvous is not None
        held = {
            "runtime.launcher": (is_launched, f"{runtime.launcher} starts agents again with their controller"),
            "runtime.collectives": (runtime.collectives == GROUP, "groups meet in a store of the controller"),
            "schedule.frequency": (self.schedule.frequency != "none", "devices are set back with the controller"),
            "verify.action": (verify.action == "rollback", "it knows since when a worker may have computed wrongly"),
            "mirror.verify_every": (self.mirror.verify_every > 0, "the controller has the hashes of replicas"),
        }
        for name, (is_so, why) in held.items():
            if is_so:
                group, _, field = name.partition(".")
                return checks.override(name, getattr(getattr(self, group), field)), why
        return None

    def _check_adopted(self) -> None:
        """Refuse `timeouts.adopt` together with a setting that keeps another controller from adopting the workers."""
        if (held := self.held_by_controller) is None:
            return
        given, why = held
        raise ConfigError(
            f"timeouts.adopt is given with {given}",
            rule=f"a controller that comes back adopts what workers have; {why}",
            where=f"timeouts.adopt={self.timeouts.adopt:g} {given}",
            fix="leave one of the two out; without timeouts.adopt a run goes on from its newest checkpoint",
        )

    def _check_rollback(self) -> None:
        """Check that a run with `verify.action=rollback` has checkpoints to go back to, and can restart by itself."""
        if not self.checkpoint.every:
            raise ConfigError(
                "verify.action=rollback is given without checkpoints",
                rule="it goes back to a checkpoint from before the steps that may be wrong",
                where="verify.action=rollback checkpoint.every=0",
                fix="checkpoint.every=N, or verify.action=evict",
            )
        if self.runtime.rendezvous is not None:
            raise ConfigError(
                "verify.action=rollback is given with runtime.rendezvous",
                rule="a run with agents cannot begin again by itself, as they end with it",
                where=checks.override("runtime.rendezvous", self.runtime.rendezvous),
                fix="verify.action=stop, and resume the run when it has ended: it then goes back to a checkpoint",
            )

    @property
    def checks_model(self) -> bool:
        """True if workers check the model before they are ready. On an emulated device there is nothing to check."""
        return self.runtime.check_model and self.runtime.device != EMULATED

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a step."""
        return self.train.global_batch // self.train.microbatch_size

    def to_dict(self) -> dict[str, Any]:
        """All settings by group, in plain JSON types; `from_dict` inverts it."""
        fields = dataclasses.asdict(self)
        del fields["model"]["named"]  # it belongs to one command, not to the run
        return checks.plain(fields)

    def to_yaml(self) -> str:
        """The text of config.yaml."""
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Settings:
        """The settings from plain data; the inverse of `to_dict`. A setting that is left out has its default.

        Raises:
            ConfigError: a setting is unknown, or a value breaks a rule.
        """
        values: dict[str, Any] = {}
        for name, value in fields.items():
            if name == "seed":
                values[name] = value
            elif name in GROUPS:
                values[name] = GROUPS[name].from_fields(value)
            else:
                raise unknown_setting(name, [*GROUPS, "seed"], checks.override(f"+{name}", value))
        return cls(**values)


GROUPS: Mapping[str, type[Section]] = {
    f.name: f.default_factory
    for f in dataclasses.fields(Settings)
    if isinstance(f.default_factory, type) and issubclass(f.default_factory, Section)
}
"""The groups of settings, by name."""

NAMES: tuple[str, ...] = tuple(d.name for section in (Settings, *GROUPS.values()) for d in declarations(section))
"""Whole names of all settings: "seed", "mesh.dp", ..."""
