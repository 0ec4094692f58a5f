"""A Kubernetes JobSet as text: one pod a rank, which find each other by name.

A JobSet (jobset.x-k8s.io) restarts all pods together when one fails, which is what ranks that meet need, and gives them
stable host names: rank 0 is ``<name>-ranks-0-0.<name>``. An indexed Job numbers its pods: that number is the rank. The
config travels in a ConfigMap, so that what was checked is what runs.

Nothing here talks to a cluster: ``vpipe submit --to kubernetes --dry-run`` prints what ``kubectl apply -f -`` takes.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import Any

import yaml

from vpipe.door import SECRET
from vpipe.errors import UserError
from vpipe.launch import command_words as valid
from vpipe.process import AS_MODULE
from vpipe.rundir.lineage import new_id

GROUP = "ranks"
FOLDER = "/vpipe"
TOKENS, TOKEN = "vpipe-tokens", "HF_TOKEN"
PORT = 29500
"""Every pod has an address of its own, so that one port serves all jobs."""


@dataclass(frozen=True)
class KubernetesJob:
    """What is asked of Kubernetes."""

    name: str
    image: str
    config: str
    """The resolved config, as YAML."""
    num_ranks: int
    arguments: tuple[str, ...] = ()
    """More words for ``vpipe train``."""
    run_directory: str = "runs"
    gpus: int = 0
    cpus: int | None = None
    memory: str | None = None
    restarts: int = 3
    volume: str | None = None
    """A PersistentVolumeClaim for data, runs and checkpoints, mounted as the working directory."""
    run: str = field(default_factory=new_id)
    """Names the run directory: jobs of one name, one after the other, are not one run."""

    def __post_init__(self) -> None:
        valid.image(self.image)
        if self.volume is not None and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", self.volume):
            raise UserError(
                f"--with volume={valid.shown(self.volume)} is no name of a PersistentVolumeClaim: small letters, "
                "digits, dashes and dots that begin and end with a letter or digit"
            )
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?", self.name):
            raise UserError(
                f"--with name={valid.shown(self.name)} is no name for Kubernetes; take up to 40 small letters, digits "
                "and dashes that begin and end with a letter or digit"
            )


def name_of(text: str) -> str:
    """A config's name as Kubernetes takes it."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-") or "vpipe"


def manifest(asked: KubernetesJob) -> str:
    """The documents: the config, and the set of jobs."""
    own = {"apiVersion": "v1", "metadata": {"name": asked.name}}
    config = own | {"kind": "ConfigMap", "data": {"config.yaml": asked.config}}
    # By this the pods know each other. A Secret of the user's, ``vpipe-tokens``, may hold HF_TOKEN.
    secret = own | {"kind": "Secret", "stringData": {SECRET: secrets.token_hex(32)}}
    return yaml.safe_dump_all([config, secret, _job_set(asked)], sort_keys=False, width=120)


def _job_set(asked: KubernetesJob) -> dict[str, Any]:
    job = {
        "parallelism": asked.num_ranks,
        "completions": asked.num_ranks,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": _pod(asked)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": asked.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": asked.name},
            "failurePolicy": {"maxRestarts": asked.restarts},
            "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pod(asked: KubernetesJob) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [{"name": "config", "configMap": {"name": asked.name}}]
    mounts: list[dict[str, Any]] = [{"name": "config", "mountPath": f"{FOLDER}/config", "readOnly": True}]
    if asked.volume is not None:
        volumes.append({"name": "work", "persistentVolumeClaim": {"claimName": asked.volume}})
        mounts.append({"name": "work", "mountPath": f"{FOLDER}/work"})
    container: dict[str, Any] = {
        "name": "rank",
        "image": asked.image,
        "command": [
            *("python3", AS_MODULE, "vpipe", "train", f"{FOLDER}/config/config.yaml", *asked.arguments),
            *("--output-dir", f"{asked.run_directory}/{asked.name}-{asked.run}", "--resume", "latest"),
        ],
        "env": _variables(asked),
        "volumeMounts": mounts,
    }
    if asked.volume is not None:
        container["workingDir"] = f"{FOLDER}/work"
    limits = {"nvidia.com/gpu": asked.gpus or None, "cpu": asked.cpus, "memory": asked.memory}
    kept = {name: str(value) for name, value in limits.items() if value is not None}
    if kept:
        container["resources"] = {"limits": kept}
    return {"restartPolicy": "Never", "containers": [container], "volumes": volumes}


def _variables(asked: KubernetesJob) -> list[dict[str, Any]]:
    """torch's words: the pod's number in its Job is the rank, and every pod is a machine of its own."""
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    fixed = {
        "WORLD_SIZE": str(asked.num_ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": f"{asked.name}-{GROUP}-0-0.{asked.name}",
        "MASTER_PORT": str(PORT),
    }
    return [
        {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        *({"name": name, "value": value} for name, value in fixed.items()),
        {"name": SECRET, "valueFrom": {"secretKeyRef": {"name": asked.name, "key": SECRET}}},
        {"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": TOKENS, "key": TOKEN, "optional": True}}},
    ]
