"""The manifest for Kubernetes, laid beside the published types of its parts. It was not run: there is no cluster here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from vpipe.config import PipelineConfig
from vpipe.errors import UserError
from vpipe.launch.engines import submit

CONFIG = str(Path(__file__).parents[2] / "configs" / "gpt_small_cpu.yaml")


def made(**options: Any) -> list[dict[str, Any]]:
    said: list[str] = []
    code = submit(
        "kubernetes", CONFIG, ("training.epochs=1",), "1f1b", True, {"image": "vpipe:1"} | options, said.append
    )
    assert code == 0
    return list(yaml.safe_load_all("\n".join(said)))


def test_every_rank_is_a_pod_that_knows_its_place() -> None:
    config, jobs = made(gpus_per_task=1, volume="my-data", cpus_per_task=2, memory="8Gi")
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


def test_the_manifest_is_what_the_published_types_know() -> None:
    """Each part is read by the generated classes of its API, and written back: an unknown or misspelt key is lost."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    config, jobs = made(gpus_per_task=1, volume="my-data")
    read = models.JobsetV1alpha2JobSetSpec.from_dict(jobs["spec"]).to_dict()
    assert read == jobs["spec"]
    assert (jobs["apiVersion"], jobs["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec = jobs["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert models.IoK8sApiBatchV1JobSpec.from_dict(spec).to_dict() == spec
    broken = {**spec, "completionsMode": "Indexed"}
    assert models.IoK8sApiBatchV1JobSpec.from_dict(broken).to_dict() != broken, "the check cannot fail"
    assert config["kind"] == "ConfigMap"


@pytest.mark.parametrize(
    ("options", "dry_run", "sentence"),
    [
        ({"image": None}, True, "give --image"),
        ({"image": "-x"}, True, "does not begin with a dash"),
        ({"name": "My_Job"}, True, "no name for Kubernetes"),
        ({}, False, r"\| kubectl apply -f -"),
        ({"qos": "high"}, True, "--qos says nothing to Kubernetes"),
    ],
)
def test_refusals(options: dict[str, Any], dry_run: bool, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        submit("kubernetes", CONFIG, (), None, dry_run, {"image": "vpipe:1"} | options, print)
