"""The settings of a run: plain frozen values, checked when they are made; the command line's only product.

`from_config` makes them from what Hydra composed; `Settings.to_dict` and `Settings.from_dict` carry them to workers as
plain JSON. Every error is a ConfigError that names the override. What needs the model, the data or the device is
checked where those are opened.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from elaswave_spmd.conf import checks
from elaswave_spmd.errors import ConfigError, MeshError
from elaswave_spmd.mesh import MeshShape

SHARDINGS = ("model", "zero0", "zero1", "zero2", "zero3")
CORPORA = ("stdlib", "text", "custom")
OPTIMIZERS = ("adamw", "sgd")
SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class ShardingSettings:
    """How state lies on a stage's workers: `model` as its code declares, or a ZeRO level in place of that."""

    name: str = "model"

    def __post_init__(self) -> None:
        checks.choice("sharding.name", self.name, SHARDINGS)

    @property
    def zero_level(self) -> int | None:
        """0 to 3, or None where the model's own declaration counts."""
        return None if self.name == "model" else int(self.name.removeprefix("zero"))


@dataclass(frozen=True)
class ModelSettings:
    """The model. `target` is a short name or my_file.MyModel.

    The constructor gets the sizes that it names, and all of `args`. `layers` counts transformer layers,
    `dropout` is a probability in [0, 1).
    """

    name: str = "gpt_tiny"
    target: str = "gpt"
    layers: int = 4
    d_model: int = 128
    heads: int = 4
    dropout: float = 0.0
    args: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        checks.text("model.name", self.name)
        checks.put(self, target=checks.text("model.target", self.target))
        for name in ("layers", "d_model", "heads"):
            checks.whole(f"model.{name}", getattr(self, name), at_least=1)
        checks.put(self, dropout=checks.number("model.dropout", self.dropout, at_least=0, below=1))
        checks.put(self, args=checks.plain_mapping("model.args", self.args))

    @property
    def label(self) -> str:
        """What to call the model in files and on the screen: a user's class by its name."""
        return self.target.rpartition(".")[2] if "." in self.target else self.name


@dataclass(frozen=True)
class DataSettings:
    """The data: a corpus (stdlib, text files by the glob `path`) or a dataset of the user's own, `target`."""

    name: str = "stdlib"
    path: str | None = None
    tokenizer: str = "bytes"
    target: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict, hash=False)
    cache: str | None = None
    validation_fraction: float = 0.02

    def __post_init__(self) -> None:
        checks.choice("data.name", self.name, CORPORA)
        for name in ("path", "target", "cache"):
            if (value := getattr(self, name)) is not None:
                checks.put(self, **{name: checks.text(f"data.{name}", value)})
        checks.put(self, tokenizer=checks.text("data.tokenizer", self.tokenizer))
        checks.put(self, args=checks.plain_mapping("data.args", self.args))
        fraction = checks.number("data.validation_fraction", self.validation_fraction, at_least=0, below=1)
        checks.put(self, validation_fraction=fraction)


@dataclass(frozen=True)
class OptimSettings:
    """The update. `betas` and `eps` are of adamw, `momentum` of sgd; `lr` is the schedule's peak; `clip=0`: none.

    `max_skipped`: steps in a row without an update, because a gradient was not finite, before the run gives up.
    """

    name: str = "adamw"
    lr: float = 2e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9
    schedule: str = "cosine"
    warmup_steps: int = 20
    final_lr_ratio: float = 0.1
    max_skipped: int = 10

    def __post_init__(self) -> None:
        checks.choice("optim.name", self.name, OPTIMIZERS)
        checks.choice("optim.schedule", self.schedule, SCHEDULES)
        if not isinstance(self.betas, (list, tuple)) or len(self.betas) != 2:
            where = checks.override("optim.betas", self.betas)
            fix = "'optim.betas=[0.9,0.95]'"
            raise ConfigError("optim.betas is a list of two numbers", got=self.betas, where=where, fix=fix)
        betas = tuple(checks.number(f"optim.betas[{i}]", b, at_least=0, below=1) for i, b in enumerate(self.betas))
        checks.put(
            self,
            lr=checks.number("optim.lr", self.lr, above=0),
            weight_decay=checks.number("optim.weight_decay", self.weight_decay, at_least=0),
            clip=checks.number("optim.clip", self.clip, at_least=0),
            betas=betas,
            eps=checks.number("optim.eps", self.eps, above=0),
            momentum=checks.number("optim.momentum", self.momentum, at_least=0, below=1),
            final_lr_ratio=checks.number("optim.final_lr_ratio", self.final_lr_ratio, at_least=0),
        )
        checks.whole("optim.warmup_steps", self.warmup_steps, at_least=0)
        checks.whole("optim.max_skipped", self.max_skipped, at_least=0)


@dataclass(frozen=True)
class TrainSettings:
    """How long and on what: `global_batch` sequences of `seq_len` tokens per step, in micro-batches.

    `microbatch_size` is the number of sequences per micro-batch. It divides `global_batch` and is part of a run's
    identity. A validation has `validate_microbatches` micro-batches; `validate_every` steps between validations, 0 for
    none. `resume` is the directory of a run to go on with, from its newest good checkpoint.
    """

    steps: int = 400
    global_batch: int = 32
    microbatch_size: int = 4
    seq_len: int = 128
    validate_every: int = 100
    validate_microbatches: int = 32
    resume: str | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch", "microbatch_size", "seq_len", "validate_microbatches"):
            checks.whole(f"train.{name}", getattr(self, name), at_least=1)
        checks.whole("train.validate_every", self.validate_every, at_least=0)
        if self.resume is not None:
            checks.put(self, resume=checks.text("train.resume", self.resume))


@dataclass(frozen=True)
class PageSettings:
    """`size`: elements per page of state, a multiple of 64."""

    size: int = 4096

    def __post_init__(self) -> None:
        checks.whole("page.size", self.size, at_least=64)
        if self.size % 64:
            where = checks.override("page.size", self.size)
            fix = f"page.size={self.size // 64 * 64}"
            raise ConfigError("page.size is a multiple of 64", got=self.size, where=where, fix=fix)


@dataclass(frozen=True)
class RunSettings:
    """`dir` of the run's files, None for runs/<model>-<mesh>-<time>; `tensorboard` writes its files there as well.

    `trace` writes what workers do and when into trace.json there, for Perfetto.
    """

    dir: str | None = None
    tensorboard: bool = True
    trace: bool = False

    def __post_init__(self) -> None:
        if self.dir is not None:
            checks.put(self, dir=checks.text("run.dir", self.dir))
        checks.flag("run.tensorboard", self.tensorboard)
        checks.flag("run.trace", self.trace)


# The settings of a run that survives: who may come and go, mirrors, checkpoints, faults on purpose.
ANY = "any"
CHAOS_KINDS = ("kill", "stop", "term", "join", "corrupt", "exit", "raise")
CHAOS_POINTS = ("forward", "backward", "reduce", "norm", "apply", "publish", ANY)
_CHAOS_FIX = "'chaos.events=[{step: 12, kind: kill, rank: 3, point: backward}]'"


@dataclass(frozen=True)
class ElasticSettings:
    """Who may come and go. Below `min_workers` the run writes a checkpoint and stops.

    `enabled=false`: the first loss ends the run. `replace`: a new worker takes the place of a lost one. `spares`:
    workers that wait beside the run, with everything imported, to be that one. `evict_slower_than`: a worker whose
    measured speed, that of the middle one being 1, stays below this is let go; 0: none is.
    """

    enabled: bool = True
    min_workers: int = 1
    replace: bool = False
    spares: int = 0
    evict_slower_than: float = 0.0

    def __post_init__(self) -> None:
        checks.flag("elastic.enabled", self.enabled)
        checks.whole("elastic.min_workers", self.min_workers, at_least=1)
        checks.flag("elastic.replace", self.replace)
        checks.whole("elastic.spares", self.spares, at_least=0)
        slowest = checks.number("elastic.evict_slower_than", self.evict_slower_than, at_least=0, below=1)
        checks.put(self, evict_slower_than=slowest)
        for name in ("replace", "spares", "evict_slower_than"):
            if (value := getattr(self, name)) and not self.enabled:
                raise ConfigError(
                    "a run that is not elastic ends with its first loss, and nobody joins it",
                    got=checks.override(f"elastic.{name}", value),
                    where=f"{checks.override(f'elastic.{name}', value)} elastic.enabled=false",
                    fix=f"leave one of the two out: elastic.enabled or elastic.{name}",
                )


@dataclass(frozen=True)
class MirrorSettings:
    """Mirrors of sharded state: `count` of each page, dealt over `scatter` other workers (0: as many as suit).

    Every `verify_every` steps the copies are compared by their hashes; 0: never.
    """

    count: int = 1
    scatter: int = 0
    verify_every: int = 0

    def __post_init__(self) -> None:
        for name in ("count", "scatter", "verify_every"):
            checks.whole(f"mirror.{name}", getattr(self, name), at_least=0)
        if 0 < self.scatter < self.count:
            raise ConfigError(
                "mirror.scatter is at least mirror.count: the mirrors of a page lie on different workers",
                got=f"{self.count} mirrors of each page over {self.scatter} workers",
                where=f"mirror.scatter={self.scatter} mirror.count={self.count}",
                fix=f"mirror.scatter={self.count}, or 0 to have it chosen",
            )


@dataclass(frozen=True)
class CheckpointSettings:
    """Durable checkpoints: one every `every` steps (0: none), the newest `keep` stay."""

    every: int = 0
    keep: int = 2

    def __post_init__(self) -> None:
        checks.whole("checkpoint.every", self.every, at_least=0)
        checks.whole("checkpoint.keep", self.keep, at_least=1)


@dataclass(frozen=True)
class ChaosEvent:
    """A fault on purpose: once, at the first attempt of `step`, when a worker passes `point` of it.

    Args:
        kind: signals to the worker's process: `kill` (SIGKILL), `stop` (SIGSTOP), `term` (SIGTERM: it leaves). `exit`:
            the process ends; `raise`: an exception; `corrupt`: a bit of its state flips. `join`: a new worker is asked
            for at that moment.
        rank: the worker; a list: each of these; `any`: one of them.
        point: before a micro-batch's `forward` or `backward`, at its `reduce`, at `norm`, `apply`, `publish`; `any` of
        these.
    """

    step: int
    kind: str
    rank: int | tuple[int, ...] | str = ANY
    point: str = ANY

    def __post_init__(self) -> None:
        checks.whole("chaos.events.step", self.step, at_least=1)
        checks.choice("chaos.events.kind", self.kind, CHAOS_KINDS)
        checks.choice("chaos.events.point", self.point, CHAOS_POINTS)
        if isinstance(self.rank, (list, tuple)):
            checks.put(self, rank=tuple(self.rank))
        if self.rank != ANY and not _are_ranks(self.ranks):
            raise ConfigError(
                "the rank of a chaos event is a worker's number, a list of different ones, or any",
                got=self.rank,
                where=checks.override("chaos.events.rank", self.rank),
                fix="rank: 3, rank: [1, 3] or rank: any",
            )

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """The workers that are named; None: any one."""
        if isinstance(self.rank, tuple):
            return self.rank
        return None if isinstance(self.rank, str) else (self.rank,)


@dataclass(frozen=True)
class ChaosSettings:
    """Faults on purpose: those of `events`; if `random`, also what `seed` draws, `rate` expected per committed step."""

    events: tuple[ChaosEvent, ...] = ()
    random: bool = False
    seed: int = 0
    rate: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.events, (list, tuple)):
            where = checks.override("chaos.events", self.events)
            raise ConfigError("chaos.events is a list of events", got=self.events, where=where, fix=_CHAOS_FIX)
        checks.put(self, events=tuple(map(_event, self.events)))
        checks.flag("chaos.random", self.random)
        checks.whole("chaos.seed", self.seed, at_least=0)
        checks.put(self, rate=checks.number("chaos.rate", self.rate, at_least=0))


def check_elastic(elastic: ElasticSettings, chaos: ChaosSettings, num_workers: int, num_steps: int) -> None:
    """What these say together with the rest of a run.

    Raises:
        ConfigError: the run would begin below `elastic.min_workers`, or a chaos event would never happen.
    """
    if elastic.min_workers > num_workers:
        raise ConfigError(
            "elastic.min_workers is no more than the workers that the mesh begins with",
            got=f"{elastic.min_workers}, and the mesh has {num_workers}",
            where=f"elastic.min_workers={elastic.min_workers}",
            fix=f"elastic.min_workers={num_workers}, or a larger mesh",
        )
    if late := [event.step for event in chaos.events if event.step > num_steps]:
        raise ConfigError(
            "a chaos event happens in a step of the run",
            got=f"step {late[0]} of {num_steps}",
            where=f"chaos.events.step={late[0]} train.steps={num_steps}",
            fix=f"a step from 1 to {num_steps}",
        )


def _event(event: object) -> ChaosEvent:
    if isinstance(event, ChaosEvent):
        return event
    fields = {field.name: field for field in dataclasses.fields(ChaosEvent)}
    given = event if isinstance(event, Mapping) else {}
    unknown = [name for name in given if name not in fields]
    if not given or unknown or "step" not in given or "kind" not in given:
        raise ConfigError(
            "a chaos event has a step and a kind, and may have a rank and a point",
            got=str(unknown[0]) if unknown else event,
            where=checks.override("chaos.events", [event]),
            exists=", ".join(fields),
            fix=_CHAOS_FIX,
        )
    return ChaosEvent(**given)


def _are_ranks(ranks: object) -> bool:
    if not isinstance(ranks, tuple) or not ranks or len(set(map(str, ranks))) < len(ranks):
        return False
    return all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in ranks)


# The group `emulated` of the settings: how long the programs of the emulated accelerator take.
_SLOW_FIX = "'emulated.slow=[{rank: 3, speed: 0.5, step: 10}]'"


@dataclass(frozen=True)
class SlowDevice:
    """Worker `rank` runs at `speed` (1: as configured) from step `step` on, before step `until` (None: for good)."""

    rank: int
    speed: float
    step: int = 1
    until: int | None = None

    def __post_init__(self) -> None:
        checks.whole("emulated.slow.rank", self.rank, at_least=0)
        checks.put(self, speed=checks.number("emulated.slow.speed", self.speed, above=0))
        checks.whole("emulated.slow.step", self.step, at_least=1)
        if self.until is not None:
            checks.whole("emulated.slow.until", self.until, at_least=self.step + 1)

    def holds_at(self, rank: int, step: int) -> bool:
        """Whether it speaks of this worker and step."""
        return rank == self.rank and self.step <= step and (self.until is None or step < self.until)


@dataclass(frozen=True)
class EmulatedSettings:
    """For `runtime.device=emulated`: a program of a layer of cost 1 takes `forward_ms` or `backward_ms` for one
    micro-batch.

    `layer_costs`: relative cost of each layer (embedding, transformer layers, head); empty: 1 each. `slow`: workers
    that run at another speed for a while; of two that hold at the same time the later one in the list counts.
    """

    forward_ms: float = 10.0
    backward_ms: float = 20.0
    layer_costs: tuple[float, ...] = ()
    slow: tuple[SlowDevice, ...] = ()

    def __post_init__(self) -> None:
        for name in ("forward_ms", "backward_ms"):
            checks.put(self, **{name: checks.number(f"emulated.{name}", getattr(self, name), at_least=0)})
        for name, fix in (("layer_costs", "emulated.layer_costs=[1,1,2]"), ("slow", _SLOW_FIX)):
            if not isinstance(value := getattr(self, name), (list, tuple)):
                where = checks.override(f"emulated.{name}", value)
                raise ConfigError(f"emulated.{name} is a list", got=value, where=where, fix=fix)
        costs = tuple(checks.number("emulated.layer_costs", cost, at_least=0) for cost in self.layer_costs)
        checks.put(self, layer_costs=costs, slow=tuple(map(_slow, self.slow)))

    def speed(self, rank: int, step: int) -> float:
        """How fast a worker is in a step, but for its frequency."""
        return next((s.speed for s in reversed(self.slow) if s.holds_at(rank, step)), 1.0)

    def check_layers(self, num_layers: int) -> None:
        """Refuses costs that are not one for each layer of the model.

        Raises:
            ConfigError: with how many there are.
        """
        if self.layer_costs and len(self.layer_costs) != num_layers:
            raise ConfigError(
                "emulated.layer_costs has one number for each layer, embedding and head included",
                got=f"{len(self.layer_costs)} numbers, {num_layers} layers",
                where=checks.override("emulated.layer_costs", self.layer_costs),
                fix=f"{num_layers} numbers, or none",
            )


def _slow(value: object) -> SlowDevice:
    if isinstance(value, SlowDevice):
        return value
    fields = {field.name for field in dataclasses.fields(SlowDevice)}
    if not isinstance(value, Mapping) or not {"rank", "speed"} <= value.keys() <= fields:
        raise ConfigError(
            "a slow device has a rank and a speed, and may have a step and an until",
            got=value,
            where=checks.override("emulated.slow", [value]),
            exists=", ".join(sorted(fields)),
            fix=_SLOW_FIX,
        )
    return SlowDevice(**value)


# The group `mesh` of the settings: how many workers there are, on how many stages, and devices inside each of them.
@dataclass(frozen=True)
class MeshSettings:
    """The mesh: `dp` workers per stage and `pp` stages (None: 1), or alone `stages`, the workers of each stage.

    `tp` and `fsdp` (None: 1) lie inside each worker, over its local devices: one XLA program over all of them.
    """

    dp: int | None = None
    pp: int | None = None
    stages: tuple[int, ...] | None = None
    tp: int | None = None
    fsdp: int | None = None

    def __post_init__(self) -> None:
        for name in ("dp", "pp", "tp", "fsdp"):
            if (size := getattr(self, name)) is not None:
                checks.whole(f"mesh.{name}", size, at_least=1)
        if self.stages is None:
            return
        where = checks.override("mesh.stages", self.stages)
        beside = [checks.override(f"mesh.{n}", v) for n in ("dp", "pp") if (v := getattr(self, n)) is not None]
        if beside:
            raise ConfigError(
                "mesh.stages says how many workers each stage has, and so do dp and pp",
                got=f"{where} beside {' and '.join(beside)}",
                where="mesh",
                fix=f"'{where}' alone, or mesh=dpN_ppM",
            )
        if not isinstance(self.stages, (list, tuple)) or not self.stages:
            raise ConfigError(
                "mesh.stages is a list: the workers of each stage",
                got=self.stages,
                where=where,
                fix="'mesh.stages=[3,2]'",
            )
        sizes = tuple(checks.whole(f"mesh.stages[{i}]", n, at_least=1) for i, n in enumerate(self.stages))
        object.__setattr__(self, "stages", sizes)

    @cached_property
    def shape(self) -> MeshShape:
        """The shape of the mesh; `shape.name` is its name in summaries and run directories."""
        tp, fsdp = self.tp or 1, self.fsdp or 1
        if self.stages is not None:
            return MeshShape.of_stages(self.stages, tp=tp, fsdp=fsdp)
        return MeshShape.of(dp=self.dp or 1, pp=self.pp or 1, tp=tp, fsdp=fsdp)


# Every waiting time of a run in one value that checks its own order.
_BEATS = 3
# (lower, times, upper, why): lower * times must be less than upper (or equal to it, where times is not 1).
_LADDER = (
    ("heartbeat", _BEATS, "suspect", f"{_BEATS} late heartbeats in a row are no reason to suspect a worker"),
    ("suspect", 1, "status", "a stopped worker is found by its missing heartbeats before it keeps a PREPARE waiting"),
    ("status", 1, "progress", "what can be asked is asked before a busy worker is taken for one that hangs"),
    ("progress", 1, "start", "a worker's first action may compile; later ones do not"),
    ("status", 1, "join", "a newcomer that still starts outlasts a change of the mesh"),
    ("status", 1, "leave", "a worker that leaves is given the change of the mesh that lets it go"),
    ("controller", 1, "shutdown", "a worker that lost its controller waits, and then has time to write a checkpoint"),
)


@dataclass(frozen=True)
class Timeouts:
    """The ladder of waiting times, in seconds. What is certain (a death, a closed socket) waits for none of them.

    Args:
        heartbeat: period of a worker's heartbeats, and the longest time that one tick of a detector counts.
        suspect: a worker without a heartbeat for so long hangs (SIGSTOP, a machine that is gone).
        status: a worker that has not answered PREPARE for so long hangs, however its heart beats. In the middle of an
            action it has `progress_factor` times the usual time of one, if that is longer.
        progress: a worker that waits for nobody and finishes no action for so long hangs.
        progress_factor: how many times the usual time of an action that is at least: slow actions are no hang.
        start: from a worker's launch, or the last layer that it compiled, until it is ready; also what its first
            action may take instead of `progress`.
        join: the same for a newcomer to a run that is under way: until it is ready, or the run goes on without it.
        leave: from a worker's wish to leave (SIGTERM) until it is let go; then it counts as failed. While it has state
            that nobody else has, it is waited for.
        controller: how long workers wait for a lost controller before they write a checkpoint and end.
        group: of making a stage's process group once all its members are there, and of what goes through it: then links
            take over.
        shutdown: how long workers may take to end, checkpoint included, before they are killed.

    Raises:
        ConfigError: a value that is not above 0, or two in the wrong order: with both and the rule.
    """

    heartbeat: float = 0.1
    suspect: float = 2.0
    status: float = 5.0
    progress: float = 30.0
    progress_factor: float = 20.0
    start: float = 300.0
    join: float = 120.0
    leave: float = 10.0
    controller: float = 5.0
    group: float = 30.0
    shutdown: float = 30.0

    def __post_init__(self) -> None:
        for item in fields(self):
            least = {"at_least": 1.0} if item.name == "progress_factor" else {"above": 0.0}
            value = checks.number(f"timeouts.{item.name}", getattr(self, item.name), **least)
            object.__setattr__(self, item.name, value)
        for lower, times, upper, why in _LADDER:
            _check_rung(lower, getattr(self, lower), times, upper, getattr(self, upper), why)

    @property
    def orphan_grace(self) -> float:
        """How long workers may live after their controller: they wait for it, and then they write a checkpoint."""
        return self.controller + self.shutdown


def _check_rung(lower: str, low: float, times: int, upper: str, high: float, why: str) -> None:
    least = low * times
    if high >= least if times > 1 else high > least:
        return
    relation = f"at least {times} times" if times > 1 else "longer than"
    raise ConfigError(
        f"timeouts.{upper} is {relation} timeouts.{lower}: {why}",
        got=f"{upper} {high:g} s, {lower} {low:g} s",
        where=f"timeouts.{upper}={high:g} timeouts.{lower}={low:g}",
        fix=f"timeouts.{upper} of {least:g} or more" if times > 1 else f"timeouts.{upper} above {least:g}",
    )


# The group `runtime` of the settings: what workers run on, and on which machines.
EMULATED = "emulated"
DEVICES = ("cpu", "cuda", "npu", "xla", EMULATED)
DTYPES = ("fp32", "bf16")
TRANSPORTS = ("ipc", "tcp")
LINKS, GROUP = "links", "group"
COLLECTIVES = (LINKS, GROUP)


@dataclass(frozen=True)
class RuntimeSettings:
    """What workers run on, and where. `dtype` is of parameters and activations in layers; master state is fp32.

    `threads_per_worker`, `dtype` and `compile` (layer programs are made by torch.compile) are part of a run's identity:
    other values, other bits.

    `collectives`: how new parameters get to the other workers of a stage: over links, or through a process group of the
    device's library (NCCL, HCCL; gloo on the CPU) while there is one and links otherwise. The bits are the same.

    Several machines: the controller opens a store at `rendezvous` (HOST:PORT, HOST its own machine as the others know
    it) and waits up to `agents_timeout` seconds for `agents` agents. `local_workers` of the mesh's workers run beside
    the controller (None: those that the agents have no place for), the others are dealt to the agents. `token_file`
    holds the secret that all of them share. `host` is the address on which links listen on this machine; None:
    127.0.0.1, or the address of the rendezvous's HOST.
    """

    device: str = "cpu"
    threads_per_worker: int = 1
    dtype: str = "fp32"
    transport: str = "ipc"
    activation_checkpointing: bool = False
    compile: bool = False
    collectives: str = LINKS
    host: str | None = None
    rendezvous: str | None = None
    agents: int = 0
    agents_timeout: float = 300.0
    local_workers: int | None = None
    token_file: str | None = None

    def __post_init__(self) -> None:
        checks.choice("runtime.device", self.device, DEVICES)
        checks.whole("runtime.threads_per_worker", self.threads_per_worker, at_least=1, below=2**15)
        checks.choice("runtime.dtype", self.dtype, DTYPES)
        checks.choice("runtime.transport", self.transport, TRANSPORTS)
        checks.flag("runtime.activation_checkpointing", self.activation_checkpointing)
        checks.flag("runtime.compile", self.compile)
        checks.choice("runtime.collectives", self.collectives, COLLECTIVES)
        if self.host is not None:
            checks.text("runtime.host", self.host)
        if self.rendezvous is not None:
            endpoint("runtime.rendezvous", self.rendezvous)
        checks.whole("runtime.agents", self.agents, at_least=0)
        checks.put(self, agents_timeout=checks.number("runtime.agents_timeout", self.agents_timeout, above=0))
        if self.local_workers is not None:
            checks.whole("runtime.local_workers", self.local_workers, at_least=0)
        if self.token_file is not None:
            checks.put(self, token_file=checks.text("runtime.token_file", self.token_file))
        if self.rendezvous is None:
            self._check_one_machine()
        else:
            self._check_several_machines(self.rendezvous)

    def _check_one_machine(self) -> None:
        given = {"agents": self.agents or None, "local_workers": self.local_workers, "token_file": self.token_file}
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"runtime.{name} is for runs on several machines, which meet at runtime.rendezvous",
                    got="no runtime.rendezvous",
                    where=checks.override(f"runtime.{name}", value),
                    fix="runtime.rendezvous=HOST:PORT, HOST being this machine as the others know it",
                )
        if self.host is not None and self.transport != "tcp":
            raise _must_be_tcp(checks.override("runtime.host", self.host), self.transport)

    def _check_several_machines(self, rendezvous: str) -> None:
        where = checks.override("runtime.rendezvous", rendezvous)
        if self.transport != "tcp":
            raise _must_be_tcp(where, self.transport)
        if not self.agents:
            rule, got, fix = "a rendezvous is where agents meet the controller", "runtime.agents=0", "runtime.agents=1"
        elif self.token_file is None:
            rule, got = "machines that meet share a secret", "no runtime.token_file"
            fix = "runtime.token_file=FILE; make one by: (umask 077; openssl rand -hex 32 > FILE)"
        else:
            return
        raise ConfigError(rule, got=got, where=where, fix=fix)


def endpoint(name: str, value: object) -> tuple[str, int]:
    """(host, port) of "HOST:PORT".

    Raises:
        ConfigError: it has another form.
    """
    found = re.fullmatch(r"([^\s:/]+):([0-9]{1,5})", value) if isinstance(value, str) else None
    if found is None or not 0 < int(found[2]) < 2**16:
        raise ConfigError(
            f"{name} is HOST:PORT, with a name or an IPv4 address and a port from 1 to 65535",
            got=value or "nothing",
            where=checks.override(name, value),
            fix=f"{name}=node0:29400",
        )
    return found[1], int(found[2])


def _must_be_tcp(where: str, transport: str) -> ConfigError:
    got = checks.override("runtime.transport", transport)
    return ConfigError("links between machines are tcp", got=got, where=where, fix="runtime.transport=tcp")


# The group `schedule` of the settings: how a run follows what its workers measure.
FREQUENCIES = ("none", "simulated", "nvml", "cpufreq", "ascend")
_DEVICE_OF = {"simulated": "emulated", "nvml": "cuda", "cpufreq": "cpu", "ascend": "npu"}


@dataclass(frozen=True)
class ScheduleSettings:
    """Micro-batches follow the measured speeds of workers (`microbatches`), layers the measured costs (`layers`).

    `stages`: there may be more or fewer stages than the mesh was begun with, when that is faster. `memory_limit`: bytes
    of state and activations that a worker has room for; None: layers are moved without a look at it.

    Looked at every `every` steps, on medians over `window` steps. A change is made if a step is expected to gain at
    least the part `min_gain` of its time, in `patience` looks in a row, and if that pays for what it moves; the
    next change takes twice as many looks, until members come or go.

    `profile`: costs.json of an earlier run of this model, to plan the first mesh with. `bandwidth` (bytes/s) and
    `latency` (s) of a link, for what moving costs; None: as measured.

    `frequency`: who sets the frequencies of devices, once nothing else is to be changed: from `f_min` to `f_max` of the
    normal one; what is lowered stays the part `f_margin` above what the schedule would allow, because times vary.
    """

    microbatches: bool = True
    layers: bool = True
    stages: bool = False
    memory_limit: float | None = None
    every: int = 5
    window: int = 5
    min_gain: float = 0.1
    patience: int = 3
    profile: str | None = None
    bandwidth: float | None = None
    latency: float | None = None
    frequency: str = "none"
    f_min: float = 0.5
    f_max: float = 1.0
    f_margin: float = 0.05

    def __post_init__(self) -> None:
        for name in ("microbatches", "layers", "stages"):
            checks.flag(f"schedule.{name}", getattr(self, name))
        if self.memory_limit is not None:
            checks.put(self, memory_limit=checks.number("schedule.memory_limit", self.memory_limit, above=0))
        for name in ("every", "window", "patience"):
            checks.whole(f"schedule.{name}", getattr(self, name), at_least=1)
        checks.put(self, min_gain=checks.number("schedule.min_gain", self.min_gain, at_least=0, below=1))
        if self.profile is not None:
            checks.put(self, profile=checks.text("schedule.profile", self.profile))
        if self.bandwidth is not None:
            checks.put(self, bandwidth=checks.number("schedule.bandwidth", self.bandwidth, above=0))
        if self.latency is not None:
            checks.put(self, latency=checks.number("schedule.latency", self.latency, at_least=0))
        checks.choice("schedule.frequency", self.frequency, FREQUENCIES)
        checks.put(self, f_min=checks.number("schedule.f_min", self.f_min, above=0, at_most=1))
        checks.put(self, f_max=checks.number("schedule.f_max", self.f_max, at_least=1))
        checks.put(self, f_margin=checks.number("schedule.f_margin", self.f_margin, at_least=0, below=1))

    def check_device(self, device: str, agents: int) -> None:
        """Refuses frequencies of devices that workers do not run on, or that are out of reach.

        Raises:
            ConfigError: with the backend that would fit.
        """
        if self.frequency == "none":
            return
        rule, got = "schedule.frequency is of the devices that workers run on", f"runtime.device={device}"
        if _DEVICE_OF[self.frequency] == device:
            if not agents:
                return
            rule, got = "frequencies are set on the controller's machine", f"runtime.agents={agents}"
        fits = [name for name, of in _DEVICE_OF.items() if of == device and not agents]
        raise ConfigError(
            rule,
            got=got,
            where=checks.override("schedule.frequency", self.frequency),
            exists=f"for {device}: {', '.join([*fits, 'none'])}",
            fix=" or ".join(f"schedule.frequency={name}" for name in (*fits, "none")),
        )


@dataclass(frozen=True)
class Settings:
    """All settings of a run.

    Raises:
        ConfigError: a section, or what two sections say together, breaks a rule.
    """

    seed: int = 0
    mesh: MeshSettings = field(default_factory=MeshSettings)
    sharding: ShardingSettings = field(default_factory=ShardingSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    page: PageSettings = field(default_factory=PageSettings)
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)
    run: RunSettings = field(default_factory=RunSettings)
    elastic: ElasticSettings = field(default_factory=ElasticSettings)
    mirror: MirrorSettings = field(default_factory=MirrorSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    timeouts: Timeouts = field(default_factory=Timeouts)
    chaos: ChaosSettings = field(default_factory=ChaosSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    emulated: EmulatedSettings = field(default_factory=EmulatedSettings)

    def __post_init__(self) -> None:
        checks.whole("seed", self.seed, at_least=0)
        check_elastic(self.elastic, self.chaos, self.mesh.shape.num_workers, self.train.steps)
        self.schedule.check_device(self.runtime.device, self.runtime.agents)
        batch, size = self.train.global_batch, self.train.microbatch_size
        if batch % size:
            sizes = [n for n in range(1, min(batch, 64) + 1) if batch % n == 0]
            raise ConfigError(
                "train.microbatch_size divides train.global_batch: a batch is a whole number of micro-batches",
                got=f"{size} sequences per micro-batch, {batch} per batch",
                where=f"{checks.override('train.microbatch_size', size)} train.global_batch={batch}",
                exists=f"train.microbatch_size of {', '.join(map(str, sizes))}",
                fix=f"train.microbatch_size={max(n for n in sizes if n <= size)}, "
                f"or train.global_batch={-(-batch // size) * size}",
            )

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a step."""
        return self.train.global_batch // self.train.microbatch_size

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` inverts it."""
        return checks.plain(dataclasses.asdict(self))

    def to_yaml(self) -> str:
        """The text of config.yaml."""
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Settings:
        """Inverse of `to_dict`; a setting that is left out has its default.

        Raises:
            ConfigError: an unknown setting, or a value that breaks a rule.
        """
        values = dict(_known(cls, fields, ""))
        for section in dataclasses.fields(cls):
            if section.name in values and section.default_factory is not dataclasses.MISSING:
                values[section.name] = _section(section.default_factory, section.name, values[section.name])
        return cls(**values)


_EXAMPLES = {"data.path": "'data.path=\"corpus/*.txt\"'", "data.target": "data.target=my_file.MyDataset"}


def from_config(config: Any) -> Settings:
    """Settings from what Hydra composed, an `omegaconf.DictConfig`.

    Raises:
        ConfigError: a value that Hydra let through and that breaks a rule, or one that was never given (`???`).
        MeshError: `mesh=NAME` with a name that is none.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        missing = sorted(OmegaConf.missing_keys(config))
        fields = {} if missing else OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            "every ${...} in a setting leads to another setting", got=str(error).splitlines()[0]
        ) from None
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} must be given",
            got="nothing",
            where=" ".join(f"{name}=???" for name in missing),
            fix=" ".join(_EXAMPLES.get(name, f"{name}=VALUE") for name in missing),
        )
    assert isinstance(fields, dict)
    return Settings.from_dict({str(name): value for name, value in fields.items()})


def _section(section: Any, name: str, value: object) -> Any:
    if not isinstance(value, Mapping):
        where = checks.override(name, value)
        raise ConfigError(f"{name} is a group of settings", got=value or "nothing", where=where)
    if name == "mesh" and "name" in value:
        raise _no_mesh(value["name"])
    return section(**_known(section, value, f"{name}."))


def _known(section: type, fields: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    names = [f.name for f in dataclasses.fields(section)]
    if unknown := [name for name in fields if name not in names]:
        raise ConfigError(
            "no such setting",
            got=prefix + unknown[0],
            where=checks.override(f"+{prefix}{unknown[0]}", fields[unknown[0]]),
            exists=", ".join(prefix + name for name in names),
            fix="use one of these; arguments of your own model are +model.args.NAME=VALUE",
        )
    return fields


def _no_mesh(name: object) -> ConfigError:
    """The name of a mesh that `conf/mesh_names.py` could not spell out, and why."""
    try:
        MeshShape.parse(str(name))
        why = "it has no such form"
    except MeshError as error:
        why = f"{error.what} ({error.got})"
    return ConfigError(
        "mesh is named by its workers per stage (dp), its stages (pp), and devices inside a worker (tp, fsdp)",
        got=f"{name}: {why}",
        where=f"mesh={name}",
        exists="single, dpN, ppN, dpN_ppM (dp3, pp4, dp3_pp2), stagesN-M; on XLA also dpN_ppM_tpK",
        fix="use one of these forms, or 'mesh.stages=[3,2]' for ragged stages",
    )
