"""The settings of a run: plain frozen values, checked when they are made; the command line's only product.

`from_config` makes them from what Hydra composed; `Settings.to_dict` and `Settings.from_dict` carry them to workers as
plain JSON. Every error is a ConfigError that names the override. What needs the model, the data or the device is
checked where those are opened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elaswave_spmd import elastic_settings as el
from elaswave_spmd.conf import checks
from elaswave_spmd.emulated_settings import EmulatedSettings
from elaswave_spmd.errors import ConfigError, MeshError
from elaswave_spmd.mesh import MeshShape
from elaswave_spmd.mesh_settings import MeshSettings
from elaswave_spmd.recovery.timeouts import Timeouts
from elaswave_spmd.runtime_settings import RuntimeSettings
from elaswave_spmd.schedule_settings import ScheduleSettings

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
    """How long and on what: `global_batch` sequences of `seq_len` tokens per step.

    A validation has `validate_units` units; `validate_every` steps between validations, 0 for none.
    `resume` is the directory of a run to go on with, from its newest good checkpoint.
    """

    steps: int = 400
    global_batch: int = 32
    seq_len: int = 128
    validate_every: int = 100
    validate_units: int = 32
    resume: str | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch", "seq_len", "validate_units"):
            checks.whole(f"train.{name}", getattr(self, name), at_least=1)
        checks.whole("train.validate_every", self.validate_every, at_least=0)
        if self.resume is not None:
            checks.put(self, resume=checks.text("train.resume", self.resume))


@dataclass(frozen=True)
class UnitSettings:
    """`size`: sequences per unit; divides `train.global_batch`. Part of a run's identity."""

    size: int = 4

    def __post_init__(self) -> None:
        checks.whole("unit.size", self.size, at_least=1)


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
    unit: UnitSettings = field(default_factory=UnitSettings)
    page: PageSettings = field(default_factory=PageSettings)
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)
    run: RunSettings = field(default_factory=RunSettings)
    elastic: el.ElasticSettings = field(default_factory=el.ElasticSettings)
    mirror: el.MirrorSettings = field(default_factory=el.MirrorSettings)
    checkpoint: el.CheckpointSettings = field(default_factory=el.CheckpointSettings)
    timeouts: Timeouts = field(default_factory=Timeouts)
    chaos: el.ChaosSettings = field(default_factory=el.ChaosSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    emulated: EmulatedSettings = field(default_factory=EmulatedSettings)

    def __post_init__(self) -> None:
        checks.whole("seed", self.seed, at_least=0)
        el.check_elastic(self.elastic, self.chaos, self.mesh.shape.num_workers, self.train.steps)
        self.schedule.check_device(self.runtime.device, self.runtime.agents)
        batch, size = self.train.global_batch, self.unit.size
        if batch % size:
            sizes = [n for n in range(1, min(batch, 64) + 1) if batch % n == 0]
            raise ConfigError(
                "unit.size divides train.global_batch: a batch is a whole number of units",
                got=f"{size} sequences per unit, {batch} per batch",
                where=f"{checks.override('unit.size', size)} train.global_batch={batch}",
                exists=f"unit.size of {', '.join(map(str, sizes))}",
                fix=f"unit.size={max(n for n in sizes if n <= size)}, or train.global_batch={-(-batch // size) * size}",
            )

    @property
    def num_units(self) -> int:
        """Units of a step."""
        return self.train.global_batch // self.unit.size

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
        why = f"{error.rule} ({error.got})"
    return ConfigError(
        "mesh is named by its workers per stage (dp), its stages (pp), and devices inside a worker (tp, fsdp)",
        got=f"{name}: {why}",
        where=f"mesh={name}",
        exists="single, dpN, ppN, dpN_ppM (dp3, pp4, dp3_pp2), stagesN-M; on XLA also dpN_ppM_tpK",
        fix="use one of these forms, or 'mesh.stages=[3,2]' for ragged stages",
    )
