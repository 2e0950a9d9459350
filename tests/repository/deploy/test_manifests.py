"""The manifests in k8s/ fit the code, the images and each other."""

import re
from pathlib import Path
from typing import Any

import pytest

from dtruntime.run.preemption import PREEMPTED
from tests.repository.deploy.configurations import (
    GRACE_SECONDS,
    K8S,
    ROOT,
    base,
    dockerfile_ports,
    documents,
    known_variables,
    mappings_in,
)

FOLDERS = sorted(path.parent for path in K8S.rglob("kustomization.yaml"))
RENDERED = K8S / "strata.yaml"
MANIFESTS = sorted(set(K8S.rglob("*.yaml")) - {RENDERED})
JOBSET = K8S / "jobset" / "worker-jobset.yaml"


def kustomization(folder: Path) -> dict[str, Any]:
    (document,) = documents(folder / "kustomization.yaml")
    return dict(document)


def worker_pods() -> list[dict[str, Any]]:
    """The pods of the indexed Job and of the JobSet."""
    both = [base("Job"), *documents(JOBSET)]
    return [m for m in mappings_in(both) if "containers" in m and "restartPolicy" in m]


def environment_of(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry for entry in container["env"]}


def coordinator_pod() -> dict[str, Any]:
    return dict(base("StatefulSet")["spec"]["template"]["spec"])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_everything_that_a_kustomization_names_exists_and_every_file_is_named(
    folder: Path,
) -> None:
    document = kustomization(folder)
    named = set(document["resources"])
    named |= {patch["path"] for patch in document.get("patches", []) if "path" in patch}
    for name in named:
        assert (folder / name).exists(), name
    files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == {name for name in named if name.endswith(".yaml")}


def test_folder_itself_can_be_applied_both_ways() -> None:
    # `kubectl apply -k` takes a Kustomization without ending, which `apply -f` passes over.
    (root,) = documents(K8S / "Kustomization")
    assert root["resources"] == ["overlays/dev"]
    assert [path.name for path in K8S.iterdir() if path.is_file() and path.suffix] == [
        RENDERED.name
    ]


def test_rendered_file_has_the_resources_of_the_overlay_its_namespace_first() -> None:
    rendered = documents(RENDERED)
    base_kinds = {d["kind"] for p in (K8S / "base").glob("*.yaml") for d in documents(p)}
    deleted = {"ServiceMonitor", "PodDisruptionBudget", "Kustomization"}
    kinds = [document["kind"] for document in rendered]
    assert kinds[0] == "Namespace"
    assert set(kinds) == (base_kinds - deleted) | {"Namespace", "PersistentVolumeClaim"}
    by_kind = {document["kind"]: document for document in rendered}
    assert all(d["metadata"]["namespace"] == "strata-dev" for d in rendered[1:])
    job = by_kind["Job"]["spec"]
    (worker,) = job["template"]["spec"]["containers"]
    assert worker["image"] == "strata-worker:dev"
    assert environment_of(worker)["STRATA_WORLD_SIZE"]["value"] == str(job["completions"]) == "2"
    claims = {
        v["persistentVolumeClaim"]["claimName"]
        for v in mappings_in(job)
        if "persistentVolumeClaim" in v
    }
    assert claims == {by_kind["PersistentVolumeClaim"]["metadata"]["name"]}


def test_coordinator_is_probed_and_reached_at_the_ports_of_its_image() -> None:
    (container,) = coordinator_pod()["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert set(ports.values()) == dockerfile_ports()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == ports["grpc"]
    service = base("Service")
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
    (endpoint,) = base("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["port"] in ports
    allowed = {
        port["port"] for rule in base("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]
    }
    assert allowed == set(ports)


def test_everything_that_selects_the_coordinator_selects_its_pod_and_its_service() -> None:
    labels = base("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert base("StatefulSet")["spec"]["selector"]["matchLabels"] == labels
    assert base("Service")["spec"]["selector"] == labels
    assert base("Service")["metadata"]["labels"] == labels
    assert base("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert base("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    assert base("ServiceMonitor")["spec"]["selector"]["matchLabels"] == labels


def test_workers_are_those_whom_the_network_policy_lets_in() -> None:
    rules = base("NetworkPolicy")["spec"]["ingress"]
    (allowed,) = (
        peer["podSelector"]["matchLabels"]
        for rule in rules
        for peer in rule["from"]
        if "podSelector" in peer
    )
    (replicated,) = documents(JOBSET)[0]["spec"]["replicatedJobs"]
    for job in (base("Job"), replicated["template"]):
        assert job["spec"]["template"]["metadata"]["labels"] == allowed


def test_coordinator_keeps_its_state_on_its_volume() -> None:
    (container,) = coordinator_pod()["containers"]
    (claim,) = base("StatefulSet")["spec"]["volumeClaimTemplates"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    data_dir = environment_of(container)["STRATA_DATA_DIR"]["value"]
    assert mounts[claim["metadata"]["name"]] == data_dir
    assert f"STRATA_DATA_DIR={data_dir}" in (ROOT / "Dockerfile").read_text()
    assert base("StatefulSet")["spec"]["replicas"] == 1


@pytest.mark.parametrize("number", [0, 1], ids=["job", "jobset"])
def test_workers_have_time_to_save_a_coordinator_and_a_program_that_exists(number: int) -> None:
    pod = worker_pods()[number]
    assert pod["terminationGracePeriodSeconds"] >= 2 * GRACE_SECONDS
    assert pod["restartPolicy"] == "Never"
    (worker,) = pod["containers"]
    (program,) = (word for word in worker["command"] if word.endswith(".py"))
    source = (ROOT / "examples" / Path(program).name).read_text()
    for option in worker.get("args", worker["command"]):
        if option.startswith(("--checkpoints", "--folder")):
            assert f'"{option.partition("=")[0]}"' in source
    mounted = {mount["name"] for mount in worker["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    service = base("Service")
    url = f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert environment_of(worker)["COORDINATOR_URL"]["value"] == url


def test_pods_are_confined_and_run_as_the_user_of_the_image() -> None:
    (user,) = re.findall(r"^USER (\d+):", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    for pod in [coordinator_pod(), *worker_pods()]:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == int(user)
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@pytest.mark.parametrize(
    "path",
    [path for path in MANIFESTS if "completions:" in path.read_text() and path != JOBSET],
    ids=lambda path: path.parent.name,
)
def test_indexed_jobs_tell_their_workers_how_many_they_are(path: Path) -> None:
    (job,) = documents(path)
    (worker,) = job["spec"]["template"]["spec"]["containers"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    told = environment_of(worker)["STRATA_WORLD_SIZE"]["value"]
    assert told == str(job["spec"]["completions"])


def test_indexed_job_does_not_count_preemption_as_failure() -> None:
    rules = base("Job")["spec"]["podFailurePolicy"]["rules"]
    ignored = [rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule]
    assert ignored == [[PREEMPTED]]


def test_jobset_restarts_all_pods_together_and_says_which_attempt_it_is() -> None:
    (jobset,) = documents(JOBSET)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    assert spec["backoffLimit"] == 0
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    (worker,) = spec["template"]["spec"]["containers"]
    assert f"--nnodes={spec['completions']}" in worker["command"]
    first = f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{jobset['metadata']['name']}"
    assert f"--master-addr={first}" in worker["command"]
    attempt = environment_of(worker)["STRATA_ATTEMPT"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert attempt == "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_manifests_set_only_variables_that_strata_reads(path: Path) -> None:
    for mapping in mappings_in(documents(path)):
        for entry in mapping.get("env", []):
            assert entry["name"] in known_variables()
        for literal in mapping.get("literals", []):
            assert literal.partition("=")[0] in known_variables()
