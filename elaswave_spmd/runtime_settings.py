"""The group `runtime` of the settings: what workers run on, and on which machines."""

from __future__ import annotations

import re
from dataclasses import dataclass

from elaswave_spmd.conf import checks
from elaswave_spmd.errors import ConfigError

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
