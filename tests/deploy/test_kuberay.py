"""Checks the Kubernetes files: Kubernetes' own kinds and all pods against its schemas, and whether the parts fit
together.

KubeRay's own fields are not checked, because its schemas are not available here. The files were not run on a cluster.
"""

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from asyncrl.cli.main import SUPERVISED, app
from asyncrl.config.load import load_config
from asyncrl.config.rules import check_config, check_metrics_host
from asyncrl.config.schema import Config
from asyncrl.metrics.discovery import RAY
from asyncrl.metrics.server import DISCOVERY_S

KUBERNETES = "1.34"
CORE = ("v1", "networking.k8s.io/v1")
OVERLAYS = ["cpu", "gpu", "own-task"]
VERSION = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["version"]


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


@pytest.fixture
def base(deploy: Path) -> list[dict[str, Any]]:
    folder = deploy / "kuberay" / "base"
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return [each for name in kustomization["resources"] for each in documents((folder / name).read_text())]


def one(kind: str, resources: list[dict[str, Any]]) -> dict[str, Any]:
    [found] = [each for each in resources if each["kind"] == kind]
    return found


def groups(cluster: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the groups of a RayCluster by name, including the head."""
    workers = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    return {"head": cluster["spec"]["headGroupSpec"]} | workers


def pods(resources: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every pod template in Ray's kinds, with its name."""
    for name, group in groups(one("RayCluster", resources)).items():
        yield name, group["template"]
    yield "submitter", one("RayJob", resources)["spec"]["submitterPodTemplate"]


def validate(resources: list[dict[str, Any]]) -> None:
    import kubernetes_validate

    for resource in resources:
        if resource["apiVersion"] in CORE:
            kubernetes_validate.validate(resource, KUBERNETES, strict=True)
    for _, template in pods(resources):
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.slow
def test_core_kinds_and_all_pods_are_what_kubernetes_allows(base: list[dict[str, Any]]) -> None:
    validate(base)


def shared_memory_bytes(pod: dict[str, Any]) -> int:
    [size] = [v["emptyDir"]["sizeLimit"] for v in pod["spec"]["volumes"] if v["name"] == "shm"]
    return gib(size)


def gib(quantity: str) -> int:
    return int(quantity.removesuffix("Gi")) * 2**30


def test_rays_object_store_fits_into_every_pods_shared_memory(base: list[dict[str, Any]]) -> None:
    for name, template in pods(base):
        if name != "submitter":
            [container] = template["spec"]["containers"]
            check_object_store(gib(container["resources"]["limits"]["memory"]), shared_memory_bytes(template))


@pytest.mark.parametrize("group", [1, 2])
def test_rays_object_store_fits_into_the_gpu_overlays_shared_memory(group: int, deploy: Path) -> None:
    patches = yaml.safe_load((deploy / "kuberay" / "overlays" / "gpu" / "gpus.yaml").read_text())
    values = {patch["path"]: patch["value"] for patch in patches if patch["op"] == "replace"}
    pod = f"/spec/workerGroupSpecs/{group}/template/spec"
    memory = values[f"{pod}/containers/0/resources/limits/memory"]
    check_object_store(gib(memory), gib(values[f"{pod}/volumes/3/emptyDir/sizeLimit"]))


def check_object_store(memory_bytes: int, shm_bytes: int) -> None:
    """Checks that Ray's object store fits into /dev/shm: Ray uses the disk if it is larger than 95 % of /dev/shm."""
    from ray._private.ray_constants import DEFAULT_OBJECT_STORE_MEMORY_PROPORTION

    assert DEFAULT_OBJECT_STORE_MEMORY_PROPORTION * memory_bytes < 0.95 * shm_bytes < memory_bytes / 2


def test_a_task_of_ones_own_is_on_the_search_path_of_every_ray_pod(base: list[dict[str, Any]], deploy: Path) -> None:
    for name, template in pods(base):
        if name == "submitter":
            continue
        [volume] = [each for each in template["spec"]["volumes"] if each["name"] == "tasks"]
        # The volume is optional, because the quickstart has no such ConfigMap.
        assert volume["configMap"] == {"name": "asyncrl-tasks", "optional": True}
        [container] = template["spec"]["containers"]
        # The image has /tasks on its search path: PYTHONPATH=/tasks.
        assert {"name": "tasks", "mountPath": "/tasks", "readOnly": True} in container["volumeMounts"], name
    assert "PYTHONPATH=/tasks" in (deploy / "docker" / "Dockerfile").read_text()


def test_every_pod_is_unprivileged_and_reachable_by_its_run_only(base: list[dict[str, Any]]) -> None:
    policy = one("NetworkPolicy", base)["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    for name, template in pods(base):
        assert policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items(), name
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert template["spec"]["automountServiceAccountToken"] is False
        for container in template["spec"]["containers"]:
            assert container["image"] == "asyncrl", "kustomize replaces it by the overlay's image"
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


def test_ray_asks_for_a_token_and_is_the_version_that_the_image_installs(
    base: list[dict[str, Any]], repository: Path
) -> None:
    spec = one("RayCluster", base)["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert f"ray=={spec['rayVersion']}\n" in (repository / "constraints-gpu.txt").read_text()


def test_the_job_runs_where_the_service_for_prometheus_looks(base: list[dict[str, Any]]) -> None:
    job, service = one("RayJob", base)["spec"], one("Service", base)["spec"]
    [place] = [name for name, each in groups(one("RayCluster", base)).items() if "resources" in each["rayStartParams"]]
    # The value is quoted twice: for the shell command that the operator makes of it, and as JSON.
    assert shlex.split(groups(one("RayCluster", base))[place]["rayStartParams"]["resources"]) == [
        job["entrypointResources"]
    ]
    template = groups(one("RayCluster", base))[place]["template"]
    assert service["selector"].items() <= template["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
    assert ports[service["ports"][0]["targetPort"]] == service["ports"][0]["port"]
    assert f":{service['ports'][0]['port']}/sd" in one("ScrapeConfig", base)["spec"]["httpSDConfigs"][0]["url"]
    assert one("PodMonitor", base)["spec"]["podMetricsEndpoints"][0]["port"] in ports


def test_prometheus_asks_for_a_run_again_while_the_learner_of_one_that_ended_waits(base: list[dict[str, Any]]) -> None:
    [discovery] = one("ScrapeConfig", base)["spec"]["httpSDConfigs"]
    assert 2 * float(discovery["refreshInterval"].removesuffix("s")) <= DISCOVERY_S


def test_ray_is_scraped_once_although_its_pods_are_monitored_and_the_learner_lists_its_nodes(
    base: list[dict[str, Any]],
) -> None:
    port = one("PodMonitor", base)["spec"]["podMetricsEndpoints"][0]["port"]
    for name, group in groups(one("RayCluster", base)).items():
        [container] = group["template"]["spec"]["containers"]
        assert port in {each["name"] for each in container["ports"]}, name
    assert one("ScrapeConfig", base)["spec"]["relabelings"] == [
        {"sourceLabels": ["role"], "regex": RAY, "action": "drop"}
    ]


def test_the_job_is_a_command_that_asyncrl_takes(base: list[dict[str, Any]]) -> None:
    words = shlex.split(one("RayJob", base)["spec"]["entrypoint"])
    assert words[0] == "asyncrl"
    result = CliRunner().invoke(app, [*words[1:], "--help"])
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_job_that_is_applied_again_resumes_the_run_on_the_volume(
    overlay: str, base: list[dict[str, Any]], deploy: Path, repository: Path
) -> None:
    command = shlex.split(one("RayJob", base)["spec"]["entrypoint"])
    assert command[1] in SUPERVISED
    assert "--fresh" not in command
    config = run_config(overlay, deploy, repository)
    assert config.run.max_restarts > 0
    for name, group in groups(one("RayCluster", base)).items():
        pod = group["template"]["spec"]
        (volume,) = [v["name"] for v in pod["volumes"] if v.get("persistentVolumeClaim")]
        mounts = {m["mountPath"] for c in pod["containers"] for m in c["volumeMounts"] if m["name"] == volume}
        assert any(config.run.dir.is_relative_to(mount) for mount in mounts), name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlays_files_are_there(overlay: str, deploy: Path) -> None:
    folder = deploy / "kuberay" / "overlays" / overlay
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    named = [*kustomization["resources"], *[patch["path"] for patch in kustomization.get("patches", [])]]
    named += [name for each in kustomization["configMapGenerator"] for name in each["files"]]
    assert [name for name in named if not (folder / name).exists()] == []
    [image] = kustomization["images"]
    assert image["name"] == "asyncrl"
    assert re.fullmatch(r"\d+\.\d+\.\d+-(cpu|gpu)", image["newTag"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlays_patches_point_at_what_is_there(overlay: str, deploy: Path, base: list[dict[str, Any]]) -> None:
    folder = deploy / "kuberay" / "overlays" / overlay
    for patch in yaml.safe_load((folder / "kustomization.yaml").read_text()).get("patches", []):
        target = one(patch["target"]["kind"], base)
        for operation in yaml.safe_load((folder / patch["path"]).read_text()):
            *parents, last = operation["path"].strip("/").split("/")
            found: Any = target
            for key in parents:
                found = found[int(key)] if isinstance(found, list) else found[key]
            if operation["op"] != "add":
                assert last in found, operation
            if operation["op"] == "test":
                assert found[last] == operation["value"]


def run_config(overlay: str, deploy: Path, repository: Path) -> Config:
    """Returns the configuration that the overlay's job runs.

    In a pod, /work/configs is the folder configs/, and /tasks is the folder that the task's ConfigMap was made from.
    """
    folder = deploy / "kuberay" / "overlays" / overlay
    entrypoint = (folder / "task.yaml", folder.parents[1] / "base" / "rayjob.yaml")[overlay != "own-task"].read_text()
    [first] = re.findall(r"-c (?:/work/configs|/tasks)/(\S+)", entrypoint)
    return load_config([repository / "configs" / first, folder / "run.yaml"], ["ray.address=auto"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlays_run_can_run_and_fits_its_cluster(
    overlay: str, deploy: Path, repository: Path, base: list[dict[str, Any]]
) -> None:
    config = run_config(overlay, deploy, repository)
    check_config(config)
    check_metrics_host(config, allow_public=True)
    cluster = groups(one("RayCluster", base))
    for section, pool in ((config.generator, "generator"), (config.learner, "learner")):
        assert section.node_labels == cluster[pool]["labels"]
        mounts = [mount["mountPath"] for mount in cluster[pool]["template"]["spec"]["containers"][0]["volumeMounts"]]
        for path in (config.run.dir, Path(config.model.path)):
            assert any(path.is_relative_to(mount) for mount in mounts), path
    assert config.metrics.learner_port == one("Service", base)["spec"]["ports"][0]["port"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which has kustomize in it, is not installed")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_renders_what_kubernetes_allows(overlay: str, deploy: Path, repository: Path) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(deploy / "kuberay" / "overlays" / overlay)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rendered = documents(done.stdout)
    validate(rendered)
    for _, template in pods(rendered):
        assert {each["image"] for each in template["spec"]["containers"]} == {
            f"registry.example/asyncrl:{VERSION}-{'gpu' if overlay == 'gpu' else 'cpu'}"
        }
    config = run_config(overlay, deploy, repository)
    cluster = groups(one("RayCluster", rendered))
    for section, pool, pods_of_pool in (
        (config.generator, "generator", config.generator.replicas),
        (config.learner, "learner", config.learner.ranks),
    ):
        limits = cluster[pool]["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert float(limits.get("nvidia.com/gpu", "0")) == section.gpus
        assert cluster[pool]["replicas"] == pods_of_pool
