"""Checks the Kubernetes files: Kubernetes' own kinds and all pods against its schemas, and whether the parts fit
together.

The rendered objects need `kubectl`, which has kustomize in it. KubeRay's and the Prometheus operator's own fields are
not checked, because their schemas are not available here. The files were not run on a cluster.
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
from asyncrl.deployment import pod_end
from asyncrl.metrics.discovery import RAY
from asyncrl.metrics.server import DISCOVERY_S

KUBERNETES = "1.34"
CORE = ("v1", "networking.k8s.io/v1", "policy/v1")
RUNS = ["quickstart", "gpu-1", "gpu-8"]
VERSION = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["version"]
TOLERATION = {"key": "team", "operator": "Equal", "value": "rl", "effect": "NoExecute"}
SPREAD = {"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
EGRESS = [
    {"ports": [{"protocol": "TCP", "port": 9000}], "to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]},
    {"ports": [{"protocol": "TCP", "port": 6379}]},
]
LIMITS = {"cpu": "90", "memory": "900Gi", "nvidia.com/gpu": "4", "rdma/hca": "4"}
POOL = {
    "pods": 4, "maxPods": 9, "resources": {"limits": LIMITS, "requests": {"cpu": "80"}}, "sharedMemory": "400Gi",
    "nodeSelector": {"gpu": "h100"}, "tolerations": [TOLERATION], "topologySpread": [SPREAD],
}  # fmt: skip
OTHER = {
    "name": "team-b-7", "namespace": "rl-b", "config": "/tasks/own_task.yaml", "image": "r.example/own:1",
    "imagePullSecrets": [{"name": "pull"}], "secret": "keys", "dataClaim": "fast", "modelsClaim": "cache",
    "graceSeconds": 777, "priorityClass": "high", "labels": {"kueue.x-k8s.io/queue-name": "q"},
    "monitorLabels": {"release": "prom"}, "operatorNamespace": "ops", "prometheusNamespace": "prom",
    "egress": EGRESS,
    "system": {
        "nodeSelector": {"small": "yes"}, "tolerations": [TOLERATION], "sharedMemory": "5Gi",
        "resources": {"limits": {"cpu": "7", "memory": "16Gi"}},
    },
    "generator": {**POOL, "minAvailable": 3}, "learner": {**POOL, "pods": 5, "maxPods": 6},
}  # fmt: skip
"""A second run, in another namespace, in which every value is another one than in the repository."""


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def one(kind: str, resources: list[dict[str, Any]], name: str = "") -> dict[str, Any]:
    [found] = [each for each in resources if each["kind"] == kind and each["metadata"]["name"].endswith(name)]
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


def container(template: dict[str, Any]) -> dict[str, Any]:
    [found] = template["spec"]["containers"]
    return dict(found)


def values(deploy: Path, run: str) -> dict[str, Any]:
    return dict(yaml.safe_load((deploy / "kuberay" / run / "values.yaml").read_text()))


def rendered(folder: Path) -> list[dict[str, Any]]:
    """Returns the objects that `kubectl apply --kustomize` would send. Skips the test where kubectl is absent."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which has kustomize in it, is not installed")
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


@pytest.fixture
def base(deploy: Path) -> list[dict[str, Any]]:
    folder = deploy / "kuberay"
    files = [*(folder / "base").glob("*.yaml"), *(folder / "components").glob("*/*.yaml")]
    return [each for file in files if file.name != "kustomization.yaml" for each in documents(file.read_text())]


@pytest.fixture
def other(deploy: Path, tmp_path: Path) -> list[dict[str, Any]]:
    """The rendered objects of a copy of gpu-8 in which only values.yaml has changed."""
    shutil.copytree(deploy / "kuberay", tmp_path / "kuberay")
    file = tmp_path / "kuberay" / "gpu-8" / "values.yaml"
    now = yaml.safe_load(file.read_text())
    for key, before in now.items():
        assert key in ("apiVersion", "kind", "metadata") or OTHER[key] != before, key
    file.write_text(yaml.safe_dump(now | OTHER))
    return rendered(file.parent)


def run_config(run: str, deploy: Path, repository: Path) -> Config:
    """Returns the configuration of the job. In a pod, /work/configs is the folder configs/."""
    own = values(deploy, run)
    first = repository / Path(own["config"]).relative_to("/work")
    overrides = ["ray.address=auto", "run.lost_weights=new_run", f"run.name={own['name']}"]
    return load_config([first, deploy / "kuberay" / run / "run.yaml"], overrides)


def validate(resources: list[dict[str, Any]]) -> None:
    import kubernetes_validate

    for resource in resources:
        if resource["apiVersion"] in CORE:
            kubernetes_validate.validate(resource, KUBERNETES, strict=True)
    for _, template in pods(resources):
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def gib(quantity: str) -> int:
    return int(quantity.removesuffix("Gi")) * 2**30


def check_fits_together(resources: list[dict[str, Any]], *, name: str, namespace: str) -> None:
    """Checks that all names, selectors, claims and addresses of a run agree."""
    placeholders = re.compile(r"\b(NAME|NAMESPACE|CONFIG|IMAGE|SECRET|DATA|MODELS|OPERATOR|PROMETHEUS|ENDPOINT)\b")
    assert placeholders.findall(yaml.safe_dump(resources)) == []
    for each in resources:
        assert each["kind"] != "Values"
        assert each["metadata"]["namespace"] == namespace
        assert each["metadata"]["labels"]["asyncrl/run"] == name
        assert each["metadata"]["name"] == name or each["metadata"]["name"].startswith(f"{name}-")
    for group, template in pods(resources):
        assert template["metadata"]["labels"]["asyncrl/run"] == name, group
        if group != "submitter":
            [run] = [volume for volume in template["spec"]["volumes"] if volume["name"] == "run"]
            assert run["configMap"]["name"] == one("ConfigMap", resources)["metadata"]["name"]
    job, service = one("RayJob", resources)["spec"], one("Service", resources)
    assert job["clusterSelector"] == {"ray.io/cluster": name}
    assert service["spec"]["selector"] == {"asyncrl/run": name, "asyncrl/group": "cpu"}
    [discovery] = one("ScrapeConfig", resources)["spec"]["httpSDConfigs"]
    assert discovery["url"] == f"http://{service['metadata']['name']}.{namespace}.svc:9400/sd"
    assert one("PodMonitor", resources)["spec"]["selector"]["matchLabels"] == {"asyncrl/run": name}
    policy = one("NetworkPolicy", resources, name)["spec"]
    own = {"matchLabels": {"asyncrl/run": name}}
    assert policy["podSelector"] == one("NetworkPolicy", resources, f"{name}-egress")["spec"]["podSelector"] == own
    assert policy["ingress"][0] == {"from": [{"podSelector": own}]}
    assert policy["egress"][0] == {"to": [{"podSelector": own}]}
    for budget in (each for each in resources if each["kind"] == "PodDisruptionBudget"):
        assert budget["spec"]["selector"]["matchLabels"]["asyncrl/run"] == name


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_a_run_renders_to_objects_that_kubernetes_allows_and_that_fit_together(
    run: str, deploy: Path, repository: Path
) -> None:
    resources, own = rendered(deploy / "kuberay" / run), values(deploy, run)
    validate(resources)
    check_fits_together(resources, name=own["name"], namespace="asyncrl")
    config = run_config(run, deploy, repository)
    words = shlex.split(one("RayJob", resources)["spec"]["entrypoint"])
    assert words[-1] == f"run.name={config.run.name}"
    assert words[words.index("-c") + 1] == own["config"]
    kind = "cpu" if run == "quickstart" else "gpu"
    for _, template in pods(resources):
        assert container(template)["image"] == f"registry.example/asyncrl:{VERSION}-{kind}"
    cluster = groups(one("RayCluster", resources))
    for section, pool, processes in (
        (config.generator, "generator", config.generator.replicas),
        (config.learner, "learner", config.learner.ranks),
    ):
        limits = container(cluster[pool]["template"])["resources"]["limits"]
        gpus = int(limits.get("nvidia.com/gpu", "0"))
        assert gpus == {"quickstart": 0, "gpu-1": 1, "gpu-8": 8}[run]
        assert cluster[pool]["replicas"] * (gpus or 1) == processes * (section.gpus or 1)


@pytest.mark.slow
def test_every_value_reaches_its_fields_in_a_second_run_of_another_namespace(other: list[dict[str, Any]]) -> None:
    validate(other)
    check_fits_together(other, name="team-b-7", namespace="rl-b")
    cluster = groups(one("RayCluster", other))
    words = shlex.split(one("RayJob", other)["spec"]["entrypoint"])
    assert words[words.index("-c") + 1] == "/tasks/own_task.yaml"
    for name, template in pods(other):
        spec, main = template["spec"], container(template)
        assert main["image"] == "r.example/own:1"
        assert spec["imagePullSecrets"] == [{"name": "pull"}]
        assert spec["priorityClassName"] == "high"
        assert spec["tolerations"] == [TOLERATION]
        in_pool = name in ("generator", "learner")
        assert spec["nodeSelector"] == ({"gpu": "h100"} if in_pool else {"small": "yes"}), name
        if name == "submitter":
            continue
        assert spec["terminationGracePeriodSeconds"] == 777
        assert {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "777"} in main["env"]
        assert main["envFrom"] == [{"secretRef": {"name": "keys", "optional": True}}]
        claims = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"][:2]}
        assert claims == {"data": "fast", "models": "cache"}
        [shm] = [v["emptyDir"]["sizeLimit"] for v in spec["volumes"] if v["name"] == "shm"]
        if in_pool:
            assert main["resources"] == {"limits": LIMITS, "requests": {"cpu": "80"}}
            assert spec["topologySpreadConstraints"] == [SPREAD]
            assert shm == "400Gi"
        else:
            assert main["resources"] == {"limits": {"cpu": "7", "memory": "16Gi"}}
            assert shm == "5Gi"
    numbers = [[cluster[pool][f"{kind}eplicas"] for kind in ("r", "minR", "maxR")] for pool in ("generator", "learner")]
    assert numbers == [[4, 4, 9], [5, 5, 6]]
    assert one("NetworkPolicy", other, "team-b-7-egress")["spec"]["egress"] == EGRESS
    budgets = {
        name: one("PodDisruptionBudget", other, name)["spec"]["minAvailable"] for name in ("generator", "learner")
    }
    assert budgets == {"generator": 3, "learner": 5}
    assert one("RayCluster", other)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    for kind in ("PodMonitor", "ScrapeConfig"):
        assert one(kind, other)["metadata"]["labels"]["release"] == "prom"
    rules = one("NetworkPolicy", other, "team-b-7")["spec"]["ingress"]
    sources = [rule["from"][0].get("namespaceSelector") for rule in rules]
    assert sources == [None, *({"matchLabels": {"kubernetes.io/metadata.name": name}} for name in ("ops", "prom"))]


@pytest.mark.slow
def test_only_with_the_autoscaler_the_head_gets_a_token_and_reaches_the_api_server(
    deploy: Path, tmp_path: Path
) -> None:
    shutil.copytree(deploy / "kuberay", tmp_path / "kuberay")
    file = tmp_path / "kuberay" / "gpu-8" / "kustomization.yaml"
    before = rendered(file.parent)
    file.write_text(file.read_text().replace("components:\n", "components:\n  - ../components/autoscaler\n"))
    after = rendered(file.parent)
    validate(after)
    check_fits_together(after, name="gpu-8", namespace="asyncrl")
    found = [one("RayCluster", each)["spec"].get("enableInTreeAutoscaling") for each in (before, after)]
    assert found == [None, True]
    tokens = {name: template["spec"]["automountServiceAccountToken"] for name, template in pods(after)}
    assert tokens == dict.fromkeys(tokens, False) | {"head": True}
    assert not any(template["spec"]["automountServiceAccountToken"] for _, template in pods(before))
    own = one("NetworkPolicy", after, "gpu-8-autoscaler")["spec"]
    assert own["podSelector"]["matchLabels"] == {"asyncrl/run": "gpu-8", "asyncrl/group": "head"}
    for group in groups(one("RayCluster", after)).values():
        assert group.get("replicas", 1) <= group.get("maxReplicas", 1)


@pytest.mark.slow
def test_alert_rules_and_dashboards_render_as_objects_that_a_cluster_needs_once(deploy: Path) -> None:
    resources = rendered(deploy / "kuberay" / "monitoring")
    files = (deploy / "prometheus" / "rules").glob("*.yml")
    wanted = [group["name"] for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    assert sorted(group["name"] for group in one("PrometheusRule", resources)["spec"]["groups"]) == sorted(wanted)
    boards = [each for each in resources if each["kind"] == "ConfigMap"]
    assert [list(each["data"]) for each in boards] == [["flow.json"], ["learning.json"], ["overview.json"]]
    for each in boards:
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        # `kubectl apply` writes the object into an annotation, and Kubernetes allows 256 KiB of annotations.
        assert len(yaml.safe_dump(each).encode()) < 200 * 1024


def test_the_claims_that_the_runs_name_are_those_of_the_storage(deploy: Path) -> None:
    claims = documents((deploy / "kuberay" / "storage" / "storage.yaml").read_text())
    names = {each["metadata"]["name"] for each in claims}
    assert all(each["spec"]["accessModes"] == ["ReadWriteMany"] for each in claims)
    for run in RUNS:
        own = values(deploy, run)
        assert {own["dataClaim"], own["modelsClaim"]} == names


@pytest.mark.parametrize("run", RUNS)
def test_rays_object_store_fits_into_shared_memory(run: str, deploy: Path) -> None:
    """Ray uses the disk if its object store is larger than 95 % of /dev/shm."""
    from ray._private.ray_constants import DEFAULT_OBJECT_STORE_MEMORY_PROPORTION

    own = values(deploy, run)
    for name in ("generator", "learner", "system"):
        memory, shm = own[name]["resources"]["limits"]["memory"], own[name]["sharedMemory"]
        assert DEFAULT_OBJECT_STORE_MEMORY_PROPORTION * gib(memory) < 0.95 * gib(shm) < gib(memory) / 2, name


def test_a_task_of_ones_own_is_on_the_search_path_of_every_ray_pod(base: list[dict[str, Any]], deploy: Path) -> None:
    for name, template in pods(base):
        if name == "submitter":
            continue
        [volume] = [each for each in template["spec"]["volumes"] if each["name"] == "tasks"]
        # The volume is optional, because the quickstart has no such ConfigMap.
        assert volume["configMap"] == {"name": "asyncrl-tasks", "optional": True}
        # The image has /tasks on its search path: PYTHONPATH=/tasks.
        assert {"name": "tasks", "mountPath": "/tasks", "readOnly": True} in container(template)["volumeMounts"], name
    assert "PYTHONPATH=/tasks" in (deploy / "docker" / "Dockerfile").read_text()


def test_every_pod_is_unprivileged_and_reachable_by_its_run_only(base: list[dict[str, Any]]) -> None:
    policy = one("NetworkPolicy", base, "NAME")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    for name, template in pods(base):
        assert policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items(), name
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert template["spec"]["automountServiceAccountToken"] is False
        assert container(template)["securityContext"] == {
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
    ports = {port["name"]: port["containerPort"] for port in container(template)["ports"]}
    assert ports[service["ports"][0]["targetPort"]] == service["ports"][0]["port"]
    assert one("PodMonitor", base)["spec"]["podMetricsEndpoints"][0]["port"] in ports


def test_prometheus_asks_for_a_run_again_while_the_learner_of_one_that_ended_waits(base: list[dict[str, Any]]) -> None:
    [discovery] = one("ScrapeConfig", base)["spec"]["httpSDConfigs"]
    assert 2 * float(discovery["refreshInterval"].removesuffix("s")) <= DISCOVERY_S


def test_ray_is_scraped_once_although_its_pods_are_monitored_and_the_learner_lists_its_nodes(
    base: list[dict[str, Any]],
) -> None:
    [endpoint] = one("PodMonitor", base)["spec"]["podMetricsEndpoints"]
    # the run's list names the pod of each process as its node, and so does the job of Ray's nodes
    assert {"sourceLabels": ["__meta_kubernetes_pod_name"], "targetLabel": "node"} in endpoint["relabelings"]
    port = endpoint["port"]
    for name, group in groups(one("RayCluster", base)).items():
        assert port in {each["name"] for each in container(group["template"])["ports"]}, name
    assert one("ScrapeConfig", base)["spec"]["relabelings"] == [
        {"sourceLabels": ["role"], "regex": RAY, "action": "drop"}
    ]


def test_the_job_is_a_command_that_asyncrl_takes(base: list[dict[str, Any]]) -> None:
    words = shlex.split(one("RayJob", base)["spec"]["entrypoint"])
    assert words[0] == "asyncrl"
    result = CliRunner().invoke(app, [*words[1:], "--help"])
    assert result.exit_code == 0, result.stderr


def test_a_pods_end_first_drains_what_runs_in_it(base: list[dict[str, Any]]) -> None:
    for name, group in groups(one("RayCluster", base)).items():
        command = container(group["template"])["lifecycle"]["preStop"]["exec"]["command"]
        assert command[:3] == ["python", "-m", pod_end.__name__]
        assert command[3:] == [{"generator": "replicas", "learner": "learner"}.get(name, "job")]


@pytest.mark.parametrize("run", RUNS)
def test_a_job_that_is_submitted_again_resumes_the_run_or_begins_a_new_one(
    run: str, base: list[dict[str, Any]], deploy: Path, repository: Path
) -> None:
    command = shlex.split(one("RayJob", base)["spec"]["entrypoint"])
    assert command[1] in SUPERVISED
    assert "--fresh" not in command
    assert "run.lost_weights=new_run" in command
    config = run_config(run, deploy, repository)
    assert config.run.max_restarts > 0
    # The learner's checkpoint must end before Ray or Kubernetes kills the pod.
    assert config.run.shutdown_grace_s + 30 <= values(deploy, run)["graceSeconds"]


@pytest.mark.parametrize("run", RUNS)
def test_a_run_can_run_and_fits_its_cluster(
    run: str, deploy: Path, repository: Path, base: list[dict[str, Any]]
) -> None:
    config = run_config(run, deploy, repository)
    check_config(config)
    check_metrics_host(config, allow_public=True)
    cluster = groups(one("RayCluster", base))
    for section, pool in ((config.generator, "generator"), (config.learner, "learner")):
        assert section.node_labels == cluster[pool]["labels"]
    for name, group in cluster.items():
        volumes = {v["name"] for v in group["template"]["spec"]["volumes"] if "persistentVolumeClaim" in v}
        mounts = [m["mountPath"] for m in container(group["template"])["volumeMounts"] if m["name"] in volumes]
        for path in (config.run.dir, Path(config.model.path)):
            assert any(path.is_relative_to(mount) for mount in mounts), (name, path)
    assert config.metrics.learner_port == one("Service", base)["spec"]["ports"][0]["port"]


@pytest.mark.usefixtures("importable_configs")
def test_a_task_of_ones_own_runs_with_the_files_of_the_quickstart(deploy: Path, repository: Path) -> None:
    own = ["model.path=/models/tiny-larger", "ray.address=auto", "run.name=own-task"]
    config = load_config(
        [repository / "configs" / "own_task.yaml", deploy / "kuberay" / "quickstart" / "run.yaml"], own
    )
    check_config(config)
    assert config.model.tiny is not None
    assert "`config: /tasks/own_task.yaml`" in (deploy / "README.md").read_text()
