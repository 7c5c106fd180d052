"""Small runs of the whole product in one process, and the results of the one-process reference for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

from elaswave_spmd.conf.schema import OptimGroup
from elaswave_spmd.determinism import Keys
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.mesh.topology import Topology
from elaswave_spmd.models import GPT, MLP, Batch, LayeredModel, Llama, call_layer
from elaswave_spmd.recovery.controller_protocol import Policy
from elaswave_spmd.scheduling.placement import Placement, place
from elaswave_spmd.sharding.replica_placement import place_replicas
from elaswave_spmd.worker.learning_rate import LearningRate
from elaswave_spmd.worker.model_layout import ModelDescription, describe, has_constants
from elaswave_spmd.worker.optimizers import SGD, AdamW, Averaged
from elaswave_spmd.worker.programs.eager import Batches
from elaswave_spmd.worker.spec import DTYPES, Job
from tests import reference
from tests.cluster import SimulatedCluster
from tests.cluster.faults import AnyFault
from tests.cluster.processes import Trained
from tests.cluster.wires import Lateness

VOCAB, TOKENS = 29, 6
VALIDATION_MICROBATCHES = 3
MESHES = ("single", "dp2", "dp3", "dp4", "pp2", "pp3", "dp2_pp2", "dp3_pp2", "stages3-2", "stages1-3")


@dataclass(frozen=True)
class Text:
    """`count` samples of TOKENS + 1 tokens below VOCAB; every sample is another one."""

    count: int
    shift: int = 0

    def __len__(self) -> int:
        return self.count

    def batch(self, ids: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids = np.asarray(ids, np.int64)[:, None] + self.shift
        rows = (np.arange(TOKENS + 1) * (ids % 5 + 1) + ids * ids) % VOCAB
        return rows[:, :-1], rows[:, 1:]


TRAIN, VALIDATION = Text(60), Text(VALIDATION_MICROBATCHES * 2, shift=1000)


class Inf(GPT):
    """A GPT whose loss is infinite for a micro-batch that begins with token 13: now and then a step has no finite
    gradient.
    """

    def loss(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        bad = (batch.tokens[0, 0] == 13).float()
        return super().loss(output, batch) / (1.0 - bad)


MODELS: dict[str, Callable[[], LayeredModel]] = {
    "gpt": lambda: GPT(vocab_size=VOCAB, seq_len=TOKENS, layers=2, d_model=16, heads=2, dropout=0.1),
    "gpt_tied": lambda: GPT(vocab_size=VOCAB, seq_len=TOKENS, layers=2, d_model=8, heads=2, dropout=0.1, tied=True),
    "llama_tied": lambda: Llama(vocab_size=VOCAB, layers=1, d_model=16, heads=2, kv_heads=1, hidden=32, tied=True),
    "llama": lambda: Llama(vocab_size=VOCAB, layers=1, d_model=8, heads=2, kv_heads=2, dropout=0.1, tied=False),
    "mlp": lambda: MLP(vocab_size=VOCAB, layers=1, d_model=8, dropout=0.2),
    "inf": lambda: Inf(vocab_size=VOCAB, seq_len=TOKENS, layers=1, d_model=8, heads=2),
}


@dataclass(frozen=True)
class Run:
    """A run's arithmetic: everything that the bits may depend on."""

    model: str = "gpt"
    dtype: str = "fp32"
    microbatches: int = 6
    microbatch_size: int = 1
    steps: int = 20
    optimizer: str = "adamw"
    clip: float = 1.0
    checkpointing: bool = False
    page_size: int = 256
    seed: int = 3
    groups: tuple[OptimGroup, ...] = ()
    ema: float | None = None

    @property
    def learning_rate(self) -> LearningRate:
        return LearningRate(2e-2, "cosine", warmup_steps=3, num_steps=20)

    @property
    def validate_every(self) -> int:
        return max(1, self.steps // 2)

    def job(self) -> Job:
        optimizer = SGD(weight_decay=0.1) if self.optimizer == "sgd" else AdamW()
        return Job(
            seed=self.seed,
            steps=self.steps,
            global_batch=self.microbatches * self.microbatch_size,
            microbatch_size=self.microbatch_size,
            seq_len=TOKENS,
            dtype=self.dtype,
            optimizer=optimizer if self.ema is None else Averaged(optimizer, self.ema),
            learning_rate=self.learning_rate,
            clip=self.clip,
            activation_checkpointing=self.checkpointing,
            validate_every=self.validate_every,
            num_validation_microbatches=VALIDATION_MICROBATCHES,
        )


@dataclass(frozen=True)
class Outcome:
    """The results that must be equal, bit for bit."""

    losses: tuple[str, ...]
    norms: tuple[str, ...]
    validation: tuple[tuple[int, str], ...]
    weights: tuple[tuple[str, tuple[int, ...], bytes], ...]
    averages: tuple[tuple[str, bytes], ...] = ()


@contextmanager
def one_thread() -> Iterator[None]:
    """Computes with one thread, as workers do: two change the bits of a LayerNorm's gradient."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def meta_model(name: str) -> LayeredModel:
    with torch.device("meta"):
        return MODELS[name]()


def maker_of(run: Run) -> Callable[[], LayeredModel]:
    """Makes the model without memory, unless it has constants, whose values constructors make."""
    return MODELS[run.model] if has_constants(meta_model(run.model)) else lambda: meta_model(run.model)


@cache
def description_of(run: Run) -> ModelDescription:
    return describe(meta_model(run.model), page_size=run.page_size, groups=run.groups)


def placement_of(run: Run, mesh: str, zero: int) -> Placement:
    layout, shardings = description_of(run).layout, meta_model(run.model).shardings.with_zero(zero)
    return place(Mesh.initial(MeshShape.parse(mesh)), layout, shardings, run.microbatches)


@cache
def mirrored_placement(run: Run, mesh: str, zero: int, mirror_count: int = 1, hosts: int = 1) -> Placement:
    """The placement of `placement_of`, with so many mirrors of each page. Neighbours share a host."""
    placement = placement_of(run, mesh, zero)
    if hosts > 1:
        members = placement.mesh.members
        domains = {rank: (f"host{rank * hosts // len(members)}",) for rank in members}
        spread = replace(placement.mesh, topology=Topology.of(domains))
        placement = replace(placement, mesh=spread, by_groups=True)
    replicas = place_replicas(description_of(run).layout, placement.state_sharding(mirror_count))
    return replace(placement, replicas=replicas)


class MirroredCluster(SimulatedCluster):
    """The workers of a run on a mesh. Arguments that are not given are those of `SimulatedCluster`.

    Args:
        policy: with the number of mirrors of each page.
        verify_every, verify_rate: as in `Job`.
        hosts: of the workers; neighbours share one.
        checkpoint_every, action, late: as for `SimulatedCluster`.
    """

    def __init__(
        self,
        run: Run,
        mesh: str,
        zero: int,
        *,
        seed: int = 0,
        faults: Sequence[AnyFault] = (),
        policy: Policy | None = None,
        uneven: bool = False,
        verify_every: int = 0,
        verify_rate: float = 0.0,
        checkpoint_every: int = 0,
        action: str = "evict",
        late: Lateness | None = None,
        hosts: int = 1,
    ) -> None:
        policy = policy or Policy()
        super().__init__(
            replace(run.job(), verify_every=verify_every, verify_rate=verify_rate),
            mirrored_placement(run, mesh, zero, policy.mirror_count, hosts),
            description_of(run),
            maker_of(run),
            TRAIN,
            VALIDATION,
            seed=seed,
            faults=faults,
            policy=policy,
            uneven=uneven,
            checkpoint_every=checkpoint_every,
            action=action,
            late=late,
        )


@one_thread()
def simulate(run: Run, placement: Placement, *, order: int = 0) -> Trained:
    """The product on a mesh; `order` draws the order of workers and messages."""
    given = description_of(run), maker_of(run), TRAIN, VALIDATION
    return SimulatedCluster(run.job(), placement, *given, seed=order).run()


def outcome(trained: Trained) -> Outcome:
    weights = tuple((name, w.shape, w.tobytes()) for name, w in sorted(trained.weights.items()))
    validation = tuple((step, loss.hex()) for step, loss in sorted(trained.validation.items()))
    averages = tuple((name, w.tobytes()) for name, w in sorted(trained.averages.items()))
    return Outcome(tuple(trained.losses), tuple(trained.norms), validation, weights, averages)


@cache
@one_thread()
def expected(run: Run) -> Outcome:
    """The results of the reference. It knows no activation checkpointing and no messages: neither may change a bit."""
    run = replace(run, checkpointing=False)
    assert run.steps % 2 == 0, "the reference looks at the weights in the middle and at the end"
    middle, end = (_reference(run, steps) for steps in (run.validate_every, run.steps))
    losses = tuple(
        (steps, _validation(run, result.weights).hex())
        for steps, result in ((run.validate_every, middle), (run.steps, end))
    )
    weights = tuple((name, tuple(w.shape), w.numpy().tobytes()) for name, w in sorted(end.weights.items()))
    averages = tuple((name, w.numpy().tobytes()) for name, w in sorted(end.averages.items()))
    return Outcome(tuple(end.loss_hex), tuple(end.grad_norm_hex), losses, weights, averages)


def _reference(run: Run, steps: int) -> reference.Result:
    sgd = run.optimizer == "sgd"
    settings = reference.Settings(
        lr_at=run.learning_rate.at,
        seed=run.seed,
        steps=steps,
        global_batch=run.microbatches * run.microbatch_size,
        microbatch_size=run.microbatch_size,
        optimizer=run.optimizer,
        weight_decay=0.1,
        momentum=0.9 if sgd else 0.0,
        clip=run.clip,
        dtype=DTYPES[run.dtype],
        page_size=run.page_size,
        ema=run.ema,
        groups=tuple((group.patterns, group.lr_scale, group.weight_decay) for group in run.groups),
    )
    return reference.train(MODELS[run.model](), TRAIN, settings)


def _validation(run: Run, weights: dict[str, torch.Tensor]) -> float:
    sizes = {"microbatches": VALIDATION_MICROBATCHES, "microbatch_size": run.microbatch_size}
    return validation_loss(MODELS[run.model](), weights, VALIDATION, dtype=run.dtype, **sizes)


def validation_loss(
    model: LayeredModel,
    weights: dict[str, torch.Tensor],
    data: Batches,
    *,
    dtype: str,
    microbatches: int,
    microbatch_size: int,
) -> float:
    """Exactly rounded sum over the micro-batches of token-sum losses, in the compute dtype, without dropout."""
    owner, losses = {tie.reader: tie.owner for tie in model.ties}, []
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.data = weights[owner.get(name, name)].to(DTYPES[dtype], copy=True)
        for microbatch in range(microbatches):
            ids = np.arange(microbatch * microbatch_size, (microbatch + 1) * microbatch_size)
            tokens, targets = (torch.from_numpy(np.ascontiguousarray(z)) for z in data.batch(ids))
            x = tokens
            for number, layer in enumerate(model.layers):
                given = reference.begin(x, DTYPES[dtype], graded=False)
                x = call_layer(layer, given, Keys.make(0, 0, ids, number))
            losses.append(float(model.loss(x, Batch(tokens, targets))))
    return math.fsum(losses)


def assert_as_reference(run: Run, placement: Placement, *, order: int = 0) -> None:
    """Runs the product and compares everything with the reference, most telling first."""
    found, wanted = outcome(simulate(run, placement, order=order)), expected(run)
    assert found.losses == wanted.losses
    assert found.norms == wanted.norms
    assert found.validation == wanted.validation
    assert [w[:2] for w in found.weights] == [w[:2] for w in wanted.weights]
    assert found.weights == wanted.weights
    assert found.averages == wanted.averages
