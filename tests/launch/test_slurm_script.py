"""The job script as text: what it asks, what it refuses, and that the ready ones are what the command writes."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from vpipe.compat.priorities.orion import preload
from vpipe.errors import UserError
from vpipe.launch.container import Container
from vpipe.launch.environment import adopt, carried, from_slurm, tasks_per_node
from vpipe.launch.job import plan_job
from vpipe.launch.queue import Follower, QueuedJob, tasks
from vpipe.launch.slurm import SlurmJob, script, sweep
from vpipe.process import rank

ROOT = Path(__file__).parents[2]


def options(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_every_option_is_asked_for() -> None:
    job = SlurmJob(
        "c.yaml", 2, 4, "n", "py", options={"partition": "p", "constraint": "v100", "cpus-per-task": "3", "mem": "8G"}
    )
    asked = options(script(job))
    expected = {"job-name": "n", "nodes": "2", "ntasks-per-node": "4", "partition": "p", "mem": "8G"}
    assert (expected | {"constraint": "v100", "cpus-per-task": "3"}).items() <= asked.items()
    assert asked["signal"] == "B:USR1@60"
    assert {"requeue", "open-mode"} <= asked.keys()
    assert "--ntasks=8 --ntasks-per-node=4 --cpus-per-task=3 --distribution=block" in script(job)


def test_without_requeue_nothing_is_trapped() -> None:
    text = script(SlurmJob("c.yaml", 1, 1, requeue=False))
    assert "no-requeue" in options(text)
    assert "USR1" not in text
    assert "scontrol requeue" not in text


@pytest.mark.parametrize("requeue", [True, False])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("kind", ["none", "docker", "apptainer", "charliecloud", "bubblewrap"])
@pytest.mark.parametrize("points", [(), (("a.b=1",), ("a.b='2'",))])
def test_bash_can_read_every_script(requeue: bool, nodes: int, kind: str, points: tuple[tuple[str, ...], ...]) -> None:
    container = Container(kind, "image", ("/data",)) if kind != "none" else Container()
    text = script(SlurmJob("my config.yaml", nodes, 2, container=container, points=points, requeue=requeue))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=200)


def test_a_script_without_an_address_ends_at_once() -> None:
    """Never a silent localhost: a wrong address is a hang of half an hour."""
    text = script(SlurmJob("c.yaml", 2, 1)).replace("scontrol", "true")
    environment = {"PATH": "/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-2]"}
    done = subprocess.run(
        ["bash"], input=text, text=True, env=environment, capture_output=True, timeout=200, check=False
    )
    assert done.returncode == 2
    assert "SLURM does not tell the address" in done.stderr


def test_sweeps_are_products() -> None:
    assert sweep(["a.x=1,2", "a.y=u,v"]) == (
        ("a.x=1", "a.y=u"),
        ("a.x=1", "a.y=v"),
        ("a.x=2", "a.y=u"),
        ("a.x=2", "a.y=v"),
    )
    assert options(script(SlurmJob("c", 1, 1, points=sweep(["a.x=1,2,3"]))))["array"] == "0-2"
    assert options(script(SlurmJob("c", 1, 1, points=sweep(["a.x=1,2,3"]), array="0-2%1")))["array"] == "0-2%1"
    assert 'training.seed="$SLURM_ARRAY_TASK_ID"' in script(SlurmJob("c", 1, 1, array="1-5"))


@pytest.mark.parametrize(
    ("axes", "overrides", "given", "sentence"),
    [
        ([], [], {"nodes": 3}, "4 ranks cannot be spread evenly over 3 nodes"),
        ([], [], {"nodes": 2, "ntasks_per_node": 4}, "are 8 ranks, but the config has 4"),
        (["training.epochs=1,zero"], [], {}, "training.epochs"),
        (["parallel.model_parallel_size=4,2"], [], {}, "has 2 ranks, the config 4"),
        ([], [], {"options": {"time": "soon"}}, "launch.slurm.options.time is 'soon' but must be a time"),
        ([], [], {"options": {"requeue": "1"}}, "has requeue, which the job's script says itself"),
        ([], [], {"options": {"-x": "1"}}, "an option of SLURM is '-x' but must be a word"),
        ([], [], {"array": "all"}, "--with array is 'all' but must be indices"),
        ([], ["training.epochs"], {}, "section.key=value"),
    ],
)
def test_mistakes_are_found_before_the_queue(
    axes: list[str], overrides: list[str], given: dict[str, object], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        plan_job(str(ROOT / "configs" / "gpt_small_cpu.yaml"), axes, overrides, None, given)


def test_options_override_the_config(tmp_path: Path) -> None:
    path = tmp_path / "job one.yaml"
    launch = "launch: {slurm: {nodes: 2, options: {partition: slow, time: '01:00:00'}}, interface: eth0, master_port: 4321}\n"
    path.write_text((ROOT / "configs" / "gpt_small_cpu.yaml").read_text() + launch)
    job, _ = plan_job(str(path), [], ["training.epochs=1"], "1f1b", {"options": {"partition": "fast"}})
    assert (job.num_nodes, job.tasks_per_node) == (2, 2)
    assert job.options == {"partition": "fast", "time": "01:00:00"}
    assert job.arguments == ("--set", "training.epochs=1", "--scheduler", "1f1b")
    assert job.name == "vpipe-jobone"
    text = script(job)
    assert "export GLOO_SOCKET_IFNAME=eth0" in text
    assert "export MASTER_PORT=4321" in text


READY = {1: "gpt_small", 2: "gpt_8stage", 4: "gpt_16stage"}


@pytest.mark.parametrize("nodes", READY)
def test_the_ready_scripts_are_what_the_command_writes(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    given = {"nodes": nodes, "options": {"gres": "gpu:4", "time": "02:00:00"}, "python": "python"}
    job, _ = plan_job(f"configs/{READY[nodes]}.yaml", [], [], None, given)
    assert job.tasks_per_node == 4
    path = ROOT / f"submit_gpipe_{nodes}node{'s' if nodes > 1 else ''}.sh"
    assert path.read_text() == script(job)
    assert str(ROOT) not in path.read_text()


STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "n[1-4]",
}


def scontrol(words: object) -> str:
    return "n1\nn2\n" if "hostnames" in words else "NodeName=n1 NodeAddr=10.1.2.3 Port=1"  # type: ignore[operator]


def test_slurms_words_become_torchs() -> None:
    assert from_slurm(STEP, scontrol) == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "MASTER_ADDR": "10.1.2.3",
        "MASTER_PORT": "14936",
    }


@pytest.mark.parametrize("shown", [{"SLURM_GPUS_PER_TASK": "1"}, {"SLURM_GPU_BIND": "per_task:1"}])
def test_a_task_that_is_shown_its_own_devices_takes_the_first(shown: dict[str, str]) -> None:
    found = from_slurm(STEP | shown, scontrol)
    local = int(found["LOCAL_RANK"])
    assert [int(index) for index in found["VPIPE_DEVICES"].split(",")][local] == 0
    assert "VPIPE_DEVICES" not in from_slurm(STEP, scontrol)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "2", **STEP},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"},
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
    ],
    ids=["no launcher", "torchrun has spoken", "the batch script itself", "a step of one task"],
)
def test_adopt_leaves_alone_what_is_not_a_rank(environment: dict[str, str]) -> None:
    before = dict(environment)
    adopt(environment, scontrol)
    assert environment == before


def test_adopt_makes_a_rank() -> None:
    environment = dict(STEP)
    adopt(environment, scontrol)
    assert rank(environment) == 5


@pytest.mark.parametrize("answer", ["", "n1\n"])
def test_an_address_is_never_guessed(answer: str) -> None:
    with pytest.raises(UserError, match="does not tell the address"):
        from_slurm(STEP, lambda words: answer)


def test_task_counts() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(UserError, match="not of the form"):
        tasks_per_node("two")


def test_orion_is_preloaded_into_ranks_only(tmp_path: Path) -> None:
    library = tmp_path / "liborion.so"
    assert preload({}) == {}
    with pytest.raises(UserError, match="there is no file"):
        preload({"ORION_LIBRARY": str(library)})
    library.write_text("")
    assert preload({"ORION_LIBRARY": str(library), "LD_PRELOAD": "x.so"}) == {"LD_PRELOAD": f"{library}:x.so"}


def test_what_is_carried_to_other_machines() -> None:
    devices = {"PYTORCH_ALLOC_CONF": "a", "CUDA_MODULE_LOADING": "EAGER", "UCX_TLS": "rc", "HIP_LAUNCH_BLOCKING": "1"}
    assert carried(devices | {"CUDA_VISIBLE_DEVICES": "3", "CUDA_HOME": "/opt"}) == devices, (
        "not what is of one machine"
    )
    found = carried({"HF_TOKEN": "t", "PATH": "/bin", "VPIPE_REPORT_FD": "7", "USE_ORION_SCHEDULER": "1", "HOME": "/"})
    assert found == {"HF_TOKEN": "t", "USE_ORION_SCHEDULER": "1"}


RECORD = "JobId={id} {array}JobName=my job JobState={state} Reason={reason} ExitCode={code} StdOut={out} Power="


def answers(*rounds: list[str]) -> object:
    left = list(rounds)
    return lambda words: "\n".join(left.pop(0) if len(left) > 1 else left[0])


def test_a_followed_job_shows_states_and_lines(tmp_path: Path) -> None:
    out = tmp_path / "my out.txt"
    out.write_text("one\ntw")

    def record(state: str, code: str = "0:0") -> list[str]:
        return [RECORD.format(id=7, array="", state=state, reason="None", code=code, out=out)]

    away = "scontrol show job 7 failed: slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    rounds: list[list[str] | str] = [record("PENDING"), record("RUNNING"), away, away, record("FAILED", "3:0")]

    def ask(words: object) -> str:
        said = rounds.pop(0)
        if isinstance(said, str):
            raise UserError(said)
        return said[0]

    follower = Follower(7, ask, sleep=lambda _: None)
    seen = []
    for line in follower.lines():
        seen.append(line)
        if line.endswith("RUNNING"):
            out.write_text("one\ntwo\nthree")
    assert seen == [
        "vpipe: job 7 is PENDING",
        "one",
        "vpipe: job 7 is RUNNING",
        "two",
        "vpipe: SLURM does not answer; job 7 is followed again when it does",
        "three",
        "vpipe: job 7 is FAILED",
    ]
    assert follower.exit_code == 3


def test_a_job_that_slurm_has_forgotten_has_ended(tmp_path: Path) -> None:
    rounds = [RECORD.format(id=7, array="", state="RUNNING", reason="None", code="0:0", out=tmp_path / "none")]

    def ask(words: object) -> str:
        if rounds:
            return rounds.pop()
        raise UserError("scontrol show job 7 failed: slurm_load_jobs error: Invalid job id specified")

    follower = Follower(7, ask, sleep=lambda _: None)
    assert list(follower.lines()) == ["vpipe: job 7 is RUNNING", "vpipe: job 7 is FORGOTTEN"]
    assert follower.exit_code == 1


def test_an_arrays_waiting_record_is_not_a_failure(tmp_path: Path) -> None:
    def record(index: str, state: str) -> str:
        array = f"ArrayJobId=9 ArrayTaskId={index} "
        return RECORD.format(id=9, array=array, state=state, reason="None", code="0:0", out=tmp_path / "none")

    rounds = ([record("0-1", "PENDING")], [record("1", "COMPLETED"), record("0", "COMPLETED")])
    follower = Follower(9, answers(*rounds), sleep=lambda _: None)  # type: ignore[arg-type]
    lines = list(follower.lines())
    assert lines == ["vpipe: job 9_0-1 is PENDING", "vpipe: job 9_1 is COMPLETED", "vpipe: job 9_0 is COMPLETED"]
    assert follower.exit_code == 0


def test_a_signal_is_an_exit_code() -> None:
    line = RECORD.format(id=3, array="", state="CANCELLED", reason="None", code="0:15", out="/x")
    assert tasks(3, lambda words: line) == [QueuedJob("3", "CANCELLED", "None", "/x", 143)]


@pytest.mark.parametrize(
    ("announced", "exit_code", "again"),
    [
        (True, 75, True),  # saved its checkpoint and left
        (True, 0, False),  # was done in the same moment
        (True, 138, True),  # the signal came before anybody listened
        (True, 1, False),  # an error of its own
        (False, 0, False),
        (False, 75, False),
        (False, 143, False),
    ],
)
def test_only_an_interrupted_run_is_queued_again(announced: bool, exit_code: int, again: bool, tmp_path: Path) -> None:
    """The script is really run, with a srun that waits for the signal and ends as told."""
    programs = tmp_path / "bin"
    programs.mkdir()
    wait = "trap 'exit $CODE' USR1; touch up; for i in $(seq 100); do sleep 0.1; done" if announced else "exit $CODE"
    for name, text in {"srun": wait, "scontrol": "echo again $*", "sleep": "exec /bin/sleep 0.1"}.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(script(SlurmJob("c.yaml", 1, 1)))
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "CODE": str(exit_code)}
    job = subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    if announced:
        deadline = time.monotonic() + 200
        while not (tmp_path / "up").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=200)
    assert ("again requeue 7" in output) == again
    assert job.returncode == exit_code
