"""A Kubernetes JobSet as text: one pod a rank, which find each other by name.

A JobSet (jobset.x-k8s.io) restarts all pods together when one fails, which is what ranks that meet need, and gives them
stable host names: rank 0 is ``<name>-ranks-0-0.<name>``. An indexed Job numbers its pods: that number is the rank. The
config travels in a ConfigMap, so that what was checked is what runs.

Nothing here talks to a cluster: ``vpipe submit --to kubernetes --dry-run`` prints what ``kubectl apply -f -`` takes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

import yaml

from vpipe.config import PipelineConfig
from vpipe.door import SECRET
from vpipe.errors import UserError
from vpipe.launch import command_words as valid
from vpipe.process import AS_MODULE
from vpipe.rundir.lineage import new_id

GROUP = "ranks"
FOLDER = "/vpipe"
TOKENS, TOKEN = "vpipe-tokens", "HF_TOKEN"
RESTARTS = 3
PORT = 29500
"""Every pod has an address of its own, so that one port serves all jobs."""


def name_of(text: str) -> str:
    """A config's name as Kubernetes takes it."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-") or "vpipe"


def manifest(config: PipelineConfig, image: str, name: str, asked: Mapping[str, Any]) -> str:
    """The documents: the config, and the set of jobs. ``asked`` may have gpus_per_task, cpus_per_task, memory, and
    volume, a PersistentVolumeClaim for data, runs and checkpoints, mounted as the working directory."""
    valid.image(image)
    volume = asked.get("volume")
    if volume is not None and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", volume):
        raise UserError(
            f"--with volume={valid.shown(volume)} is no name of a PersistentVolumeClaim: small letters, "
            "digits, dashes and dots that begin and end with a letter or digit"
        )
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise UserError(
            f"--with name={valid.shown(name)} is no name for Kubernetes; take up to 40 small letters, digits "
            "and dashes that begin and end with a letter or digit"
        )
    own = {"apiVersion": "v1", "metadata": {"name": name}}
    text = own | {"kind": "ConfigMap", "data": {"config.yaml": config.to_yaml()}}
    # By this the pods know each other. A Secret of the user's, ``vpipe-tokens``, may hold HF_TOKEN.
    secret = own | {"kind": "Secret", "stringData": {SECRET: secrets.token_hex(32)}}
    jobs = _job_set(config.num_ranks, name, _pod(config, image, name, asked))
    return yaml.safe_dump_all([text, secret, jobs], sort_keys=False, width=120)


def _job_set(num_ranks: int, name: str, pod: dict[str, Any]) -> dict[str, Any]:
    job = {
        "parallelism": num_ranks,
        "completions": num_ranks,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": RESTARTS},
            "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pod(config: PipelineConfig, image: str, name: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    volume = asked.get("volume")
    directory = (
        f"{config.observe.directory}/{name}-{new_id()}"  # jobs of one name, one after the other, are not one run
    )
    volumes: list[dict[str, Any]] = [{"name": "config", "configMap": {"name": name}}]
    mounts: list[dict[str, Any]] = [{"name": "config", "mountPath": f"{FOLDER}/config", "readOnly": True}]
    if volume is not None:
        volumes.append({"name": "work", "persistentVolumeClaim": {"claimName": volume}})
        mounts.append({"name": "work", "mountPath": f"{FOLDER}/work"})
    container: dict[str, Any] = {
        "name": "rank",
        "image": image,
        "command": [
            *("python3", AS_MODULE, "vpipe", "train", f"{FOLDER}/config/config.yaml"),
            *("--output-dir", directory, "--resume", "latest"),
        ],
        "env": _variables(config.num_ranks, name),
        "volumeMounts": mounts,
    }
    if volume is not None:
        container["workingDir"] = f"{FOLDER}/work"
    limits = {"nvidia.com/gpu": "gpus_per_task", "cpu": "cpus_per_task", "memory": "memory"}
    kept = {limit: str(asked[key]) for limit, key in limits.items() if asked.get(key)}
    if kept:
        container["resources"] = {"limits": kept}
    return {"restartPolicy": "Never", "containers": [container], "volumes": volumes}


def _variables(num_ranks: int, name: str) -> list[dict[str, Any]]:
    """torch's words: the pod's number in its Job is the rank, and every pod is a machine of its own."""
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    fixed = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": f"{name}-{GROUP}-0-0.{name}",
        "MASTER_PORT": str(PORT),
    }
    return [
        {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        *({"name": name, "value": value} for name, value in fixed.items()),
        {"name": SECRET, "valueFrom": {"secretKeyRef": {"name": name, "key": SECRET}}},
        {"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": TOKENS, "key": TOKEN, "optional": True}}},
    ]
