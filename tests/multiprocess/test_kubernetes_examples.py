"""The manifests of examples/kubernetes: their schemas, what in them has to agree, and their shell snippets.

The snippets are run as they stand, without Kubernetes: real controllers, agents and workers on this machine.
"""

from __future__ import annotations

import os
import secrets
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from elaswave_spmd.conf.compose import settings_from
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.run_dir import read_metrics
from elaswave_spmd.runtime.processes.rendezvous import read_secret
from tests.multiprocess.engine_stand_ins import (
    DRAIN,
    ROOT,
    Engine,
    alone,
    assert_same_bits,
    holds,
    patient,
    steps,
)
from tests.multiprocess.real_runs import write_text
from tests.ports import free_port
from tests.waiting import eventually

FOLDER = ROOT / "examples" / "kubernetes"
MANIFESTS: list[dict[str, Any]] = [
    manifest for file in sorted(FOLDER.glob("*.yaml")) for manifest in yaml.safe_load_all(file.read_text())
]


SERVICE_OF = {"controller": "elaswave-controller", "agent": "elaswave-agents"}


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [manifest for manifest in MANIFESTS if manifest["kind"] == kind]
    return found


POD = {name: of_kind(kind)["spec"]["template"] for name, kind in (("controller", "Job"), ("agent", "StatefulSet"))}


def container(name: str) -> dict[str, Any]:
    (found,) = POD[name]["spec"]["containers"]
    assert found["name"] == name
    return found


def variables(name: str) -> dict[str, str]:
    """The variables of a container, as far as their values are in the manifest."""
    return {variable["name"]: variable["value"] for variable in container(name)["env"] if "value" in variable}


@pytest.mark.parametrize("version", ["1.31", "1.37"])
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda m: f"{m['kind']} {m['metadata']['name']}")
def test_manifests_are_what_kubernetes_takes(manifest: dict[str, Any], version: str) -> None:
    """By the schemas that Kubernetes publishes, in which an unknown field is an error."""
    schemas = pytest.importorskip("kubernetes_validate", reason="the schemas are in the package kubernetes-validate")
    assert schemas.validate(manifest, version, strict=True) == version
    with pytest.raises(schemas.ValidationError):
        schemas.validate(manifest | {"spce": {}}, version, strict=True)


def test_what_is_said_twice_agrees() -> None:
    services = {
        manifest["metadata"]["name"]: manifest["spec"] for manifest in MANIFESTS if manifest["kind"] == "Service"
    }
    controller, agent = variables("controller"), variables("agent")
    for name in ("SERVICE", "PORT", "RUN"):
        assert controller[name] == agent[name]
    (port,) = services[controller["SERVICE"]]["ports"]
    (own_port,) = container("controller")["ports"]
    assert str(port["port"]) == str(own_port["containerPort"]) == controller["PORT"]
    agents = of_kind("StatefulSet")["spec"]
    assert agents["serviceName"] in services and int(controller["AGENTS"]) == agents["replicas"]
    selectors = [*((role, services[name]["selector"]) for role, name in SERVICE_OF.items())]
    selectors += [("agent", agents["selector"]["matchLabels"])]
    selectors += [("agent", of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"])]
    selectors += [(role, of_kind("NetworkPolicy")["spec"]["podSelector"]["matchLabels"]) for role in POD]
    for role, labels in selectors:
        assert labels.items() <= POD[role]["metadata"]["labels"].items()
    for pod in POD.values():
        assert {mount["name"] for it in pod["spec"]["containers"] for mount in it["volumeMounts"]} == {
            volume["name"] for volume in pod["spec"]["volumes"]
        }
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert volumes["token"]["secret"]["secretName"] == of_kind("Secret")["metadata"]["name"]
        assert (
            volumes["runs"]["persistentVolumeClaim"]["claimName"]
            == of_kind("PersistentVolumeClaim")["metadata"]["name"]
        )


def test_the_settings_are_good_and_pods_have_time_to_end() -> None:
    several = ["runtime.rendezvous=a:1", "runtime.agents=1", "runtime.transport=tcp", "runtime.token_file=a"]
    settings = settings_from([*container("controller")["args"], *several])
    agents, controller = of_kind("StatefulSet")["spec"], POD["controller"]["spec"]
    places = agents["replicas"] * int(variables("agent")["WORKERS"])
    assert settings.runtime.local_workers == 0 and settings.mesh.shape.num_workers == places
    assert POD["agent"]["spec"]["terminationGracePeriodSeconds"] >= int(variables("agent")["DRAIN"]) + 15
    timeouts = settings.timeouts
    assert controller["terminationGracePeriodSeconds"] >= timeouts.shutdown + timeouts.callbacks + 15


def test_a_mounted_secret_is_no_token_file_and_its_copy_is_one(tmp_path: Path) -> None:
    """The kubelet gives the files of a secret to root, and with fsGroup its group may read them: 0400 becomes 0440."""
    secret = of_kind("Secret")["stringData"]["token"]
    mounted, copy = tmp_path / "mounted", tmp_path / "token"
    mounted.write_text(secrets.token_hex(32))
    for pod in POD.values():
        (mode,) = [it["secret"]["defaultMode"] for it in pod["spec"]["volumes"] if "secret" in it]
        assert mode == 0o440 and pod["spec"]["securityContext"]["fsGroup"] == 1000
        mounted.chmod(mode)
        with pytest.raises(ConfigError, match="has mode 0440"):
            read_secret(str(mounted), where="")
    mounted.chmod(0o400)
    assert read_secret(str(mounted), where=""), "a file of the same user passes"
    if os.geteuid() == 0:
        os.chown(mounted, 1000, -1)
        with pytest.raises(ConfigError, match="owner 1000"):
            read_secret(str(mounted), where="")
    copy.write_text(secret)
    copy.chmod(0o600)
    with pytest.raises(ConfigError, match=r"the secret in .* has 9 bytes"):
        read_secret(str(copy), where="")


class Cluster:
    """The folders that the volumes would be, and the commands of the containers."""

    def __init__(self, folder: Path) -> None:
        write_text(folder)
        self.engine = Engine(folder)
        self.run_dir = folder / "runs" / "first"
        self._folder = folder
        self._port = str(free_port())
        self.run_dir.parent.mkdir()
        (folder / "mounted").write_text(secrets.token_hex(32))
        (folder / "mounted").chmod(0o440)

    def variables(self, name: str, pod: str) -> dict[str, str]:
        """A container's variables, with folders of this machine in place of the volumes."""
        own = self._folder / pod
        own.mkdir(exist_ok=True)
        here = {"SERVICE": "127.0.0.1", "PORT": self._port, "RUN": str(self.run_dir), "OWN": str(own)}
        here |= {"SECRET": str(self._folder / "mounted"), "POD_IP": "127.0.0.1"}
        here |= {"AGENTS": "1"} if name == "controller" else {"WORKERS": "1", "DRAIN": DRAIN, "NODE": pod}
        wanted = {variable["name"] for variable in container(name)["env"]}
        assert here.keys() == wanted - {"HOME"}
        return here

    def command(self, name: str, *words: str) -> list[str]:
        return [*container(name)["command"], *words]


def test_the_snippets_start_a_run_that_goes_on_without_an_agent_and_resumes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wanted = alone(tmp_path_factory.mktemp("single"))
    cluster = Cluster(tmp_path)
    engine, run_dir = cluster.engine, cluster.run_dir
    words = ["mesh=dp2", "runtime.local_workers=1", *patient(engine)]
    controller = (cluster.command("controller", *words), cluster.variables("controller", "pod-c"))
    agent = (cluster.command("agent"), cluster.variables("agent", "pod-a"))
    before_stop = container("agent")["lifecycle"]["preStop"]["exec"]["command"]
    with engine.start(*controller) as first:
        with engine.start(*agent) as pod:
            holds(first, lambda: steps(run_dir) >= 2)
            with engine.start(before_stop, agent[1]) as hook:
                eventually(lambda: pod.process.poll() is not None)  # a child that nobody waits for is there still
                assert hook.end().code == 0, hook.log.read_text()
            end = pod.end()
            assert end.code == 0, end.out
            assert "on pod-a: places for 1 worker" in end.out
        holds(first, lambda: read_metrics(run_dir)[-1].workers == 1)
        first.signal_shell(signal.SIGTERM)  # the controller itself: the snippet has become it
        end = first.end()
        engine.nothing_is_left()
    assert end.code == 143, end.out
    done = steps(run_dir)
    (engine.folder / "go").touch()
    with engine.start(*controller) as second, engine.start(*agent) as pod:
        end = second.end()
        assert pod.end().code == 0, pod.log.read_text()
        engine.nothing_is_left()
    assert end.code == 0 and f"resume: step {done}, from " in end.out, end.out
    assert_same_bits(run_dir, wanted)
    with engine.start(*agent) as pod:  # a StatefulSet starts it again
        holds(pod, lambda: "the run has ended" in pod.log.read_text())
        with engine.start(before_stop, agent[1]) as hook:
            assert hook.end().code == 0, hook.log.read_text()
        pod.signal_all(signal.SIGTERM)
        assert pod.end().code == 0
        engine.nothing_is_left()
