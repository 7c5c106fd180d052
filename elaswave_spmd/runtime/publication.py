"""PUBLISH: after a step is applied, its new parameters go to whoever computes with them and does not hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from elaswave_spmd.recovery.messages import Publish
from elaswave_spmd.runtime.buffers import ValueBuffer
from elaswave_spmd.runtime.state import HeldRun, HeldState
from elaswave_spmd.scheduling.placement import HolderRun, Placement
from elaswave_spmd.sharding.pages import ModelLayout

Send = Callable[[int, Publish, Tensor], None]


class Publisher:
    """Sends a worker's primary pages and installs those of others.

    A page goes to the workers of its stage and, if its parameter is tied, of the stages that read it. Holders have
    applied the step themselves and receive nothing.
    """

    def __init__(
        self,
        rank: int,
        placement: Placement,
        layout: ModelLayout,
        values: Mapping[int, ValueBuffer],
        state: HeldState,
        send: Send,
    ) -> None:
        self._rank, self._placement, self._layout = rank, placement, layout
        self._values, self._state, self._send = values, state, send
        self._drops_params = bool(placement.shardings.params.axes)
        self._readers = {
            part.run.key: self._readers_of(part.run)
            for held in state.layers.values()
            for part in held
            if part.run.primary == rank
        }

    def _readers_of(self, run: HolderRun) -> tuple[int, ...]:
        block = self._layout.layers[run.layer].block_of(run.first)
        layers = [run.layer, *(layer for layer, _ in self._layout.readers.get((run.layer, block.first_page), ()))]
        stages = sorted({self._placement.stage_of_layer(layer) for layer in layers})
        workers = [worker for stage in stages for worker in self._placement.mesh.stages[stage]]
        return tuple(worker for worker in workers if worker not in run.holders)

    def publish(self, layer: int, version: int) -> None:
        """Sends the layer's new values, in the compute dtype; copies them to this worker's own readers of a tie."""
        for part in self._state.layers.get(layer, ()):
            message = Publish(version, *part.run.key)
            self._install_readers(message, self._state.compute_values(part))
            if peers := self._readers.get(part.run.key):
                payload = self._payload(part)
                for peer in peers:
                    self._send(peer, message, payload)

    def _payload(self, part: HeldRun) -> Tensor:
        """The run's values in memory that stays as it is until everybody has received them.

        That holds for memory that only an update overwrites, but not for a compute buffer that is dropped in between.
        """
        values = self._state.compute_values(part)
        if not self._drops_params:
            return values
        return part.master if part.master.dtype == values.dtype else values.clone()

    def install(self, publish: Publish, payload: Tensor) -> None:
        """Copies published values, flat in the compute dtype, to every buffer of this worker that has those pages."""
        if publish.layer in self._values:
            self._values[publish.layer].install(publish.first, publish.stop, payload, publish.step)
        self._install_readers(publish, payload)

    def _install_readers(self, publish: Publish, values: Tensor) -> None:
        block = self._layout.layers[publish.layer].block_of(publish.first)
        for layer, reader in self._layout.readers.get((publish.layer, block.first_page), ()):
            if layer in self._values:
                shift = reader.first_page - block.first_page
                self._values[layer].install(publish.first + shift, publish.stop + shift, values, publish.step)
