"""The manifest for Kubernetes, laid beside the published types of its parts. It was not run: there is no cluster here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from vpipe.config import PipelineConfig
from vpipe.errors import UserError
from vpipe.launch.engines import submit

CONFIG = str(Path(__file__).parents[2] / "configs" / "gpt_small_cpu.yaml")


def made(overrides: tuple[str, ...] = ("training.epochs=1",), **options: Any) -> list[dict[str, Any]]:
    said: list[str] = []
    code = submit("kubernetes", CONFIG, overrides, "1f1b", True, {"image": "vpipe:1"} | options, said.append)
    assert code == 0
    return list(yaml.safe_load_all("\n".join(said)))


def test_every_rank_is_a_pod_that_knows_its_place() -> None:
    config, secret, jobs = made(gpus_per_task=1, volume="my-data", cpus_per_task=2, memory="8Gi")
    assert PipelineConfig.from_dict(yaml.safe_load(config["data"]["config.yaml"])).training.epochs == 1
    (group,) = jobs["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    assert job["completions"] == job["parallelism"] == 4
    (container,) = job["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}
    assert "job-completion-index" in variables["RANK"]["fieldRef"]["fieldPath"]
    name = jobs["metadata"]["name"]
    assert variables["MASTER_ADDR"] == f"{name}-ranks-0-0.{name}"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1", "cpu": "2", "memory": "8Gi"}
    assert container["workingDir"] == "/vpipe/work"
    word = variables["VPIPE_SECRET"]["secretKeyRef"]
    assert word["name"] == secret["metadata"]["name"]
    assert len(secret["stringData"][word["key"]]) == 64
    assert made()[1]["stringData"] != secret["stringData"]
    assert variables["HF_TOKEN"]["secretKeyRef"]["optional"] is True


def test_what_a_pod_does_not_have_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    submit("kubernetes", CONFIG, (), None, True, {"image": "vpipe:1"}, said.append)
    assert said[0].startswith("# vpipe: warning: every restart begins anew")
    submit("kubernetes", CONFIG, (), None, True, {"image": "vpipe:1", "volume": "work"}, (kept := list[str]()).append)
    assert not any("begins anew" in line for line in kept)
    plugin = tmp_path / "mine.py"
    plugin.write_text("")
    with pytest.raises(UserError, match=r"mine\.py is a file of this machine, which no pod has"):
        submit("kubernetes", CONFIG, (f'plugins=["{plugin}"]',), None, True, {"image": "vpipe:1"}, print)


@pytest.mark.slow
def test_the_command_of_the_pods_trains_with_their_variables(tmp_path: Path) -> None:
    """Run by hand for two pods, whose folder is one here, beside another run's checkpoints on their volume."""
    words = ("model.num_layers=4", "parallel.model_parallel_size=2", "training.max_iterations=2")
    config, secret, jobs = made(volume="work", overrides=words)
    (container,) = jobs["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    folder = tmp_path / "vpipe"
    (folder / "config").mkdir(parents=True)
    (folder / "work").mkdir()
    (folder / "config" / "config.yaml").write_text(config["data"]["config.yaml"])
    command = [
        sys.executable,
        *(word.replace("/vpipe/config", f"{folder}/config") for word in container["command"][1:]),
    ]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    fixed = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    pods = [
        subprocess.Popen(
            command,
            env=os.environ | fixed | secret["stringData"] | here | {"RANK": str(rank)},
            cwd=folder / "work",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [pod.communicate(timeout=200)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert "done: 2 iterations" in said[0]
    assert "starting anew" in said[0]


def test_the_manifest_is_what_the_published_types_know() -> None:
    """Each part is read by the generated classes of its API, and written back: an unknown or misspelt key is lost."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    config, _, jobs = made(gpus_per_task=1, volume="my-data")
    read = models.JobsetV1alpha2JobSetSpec.from_dict(jobs["spec"]).to_dict()
    assert read == jobs["spec"]
    assert (jobs["apiVersion"], jobs["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec = jobs["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert models.IoK8sApiBatchV1JobSpec.from_dict(spec).to_dict() == spec
    broken = {**spec, "completionsMode": "Indexed"}
    assert models.IoK8sApiBatchV1JobSpec.from_dict(broken).to_dict() != broken, "the check cannot fail"
    assert config["kind"] == "ConfigMap"


@pytest.mark.parametrize(
    "options", [{}, {"gpus_per_task": 1, "volume": "my-data", "cpus_per_task": 2, "memory": "8Gi"}]
)
def test_each_part_is_valid_by_the_strict_schemas_of_kubernetes(options: dict[str, Any]) -> None:
    """The set itself is a custom resource, whose types are those of the test above; the job within is Kubernetes' own."""
    kubernetes = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    config, secret, jobs = made(**options)
    inner = jobs["spec"]["replicatedJobs"][0]["template"]["spec"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": jobs["metadata"], "spec": inner}
    for version in ("1.30", kubernetes.latest_version()):
        for part in (config, secret, job):
            kubernetes.validate(part, version, strict=True)
        (container,) = inner["template"]["spec"]["containers"]
        for broken in (
            {**job, "spec": {**inner, "completionsMode": "Indexed"}},
            {**config, "data": {"config.yaml": 3}},
            {**job, "spec": {**inner, "template": {"spec": {"containers": [container | {"envs": []}]}}}},
        ):
            with pytest.raises(kubernetes.ValidationError):
                kubernetes.validate(broken, version, strict=True)


@pytest.mark.parametrize(
    ("options", "dry_run", "sentence"),
    [
        ({"image": None}, True, "give --with image=NAME"),
        ({"image": "-x"}, True, "does not begin with a dash"),
        ({"name": "My_Job"}, True, "no name for Kubernetes"),
        ({}, False, r"\| kubectl apply -f -"),
        ({"volume": "My_Claim"}, True, "--with volume='?My_Claim'? is no name of a PersistentVolumeClaim"),
        ({"qos": "high"}, True, "--qos says nothing to Kubernetes"),
    ],
)
def test_refusals(options: dict[str, Any], dry_run: bool, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        submit("kubernetes", CONFIG, (), None, dry_run, {"image": "vpipe:1"} | options, print)
