"""What of the pages is not run as printed, each with the reason. A line that no page prints any more fails a test."""

from __future__ import annotations

NOT_HERE = {
    r"scripts/(quickstart|test)( .*)?": "makes an environment and takes minutes: CI itself is scripts/test, the parts of quickstart run here",
    r"TORCH=\S+ scripts/setup": "downloads gigabytes; scripts/versions is run by hand, see CONTRIBUTING.md",
    r"scripts/versions .*": "downloads gigabytes; CI runs it where its environments are there",
    r"pip install -e .*": "tests/cli/test_cli_package.py builds and installs the wheel",
    r".*parallel\.device=cuda.*": "no GPU here",
    r"vpipe doctor --gpu( .*)?": "no GPU here; tests/emulated/test_device_acceptance.py runs it on the emulated one",
    r"vpipe simulate --json": "a form, in a docstring",
    r"sbatch (submit_gpipe_1node|run_vpipe)\.sh": "tests/launch/test_slurm.py hands them to a real SLURM",
    r"srun .*": "tests/launch/test_slurm.py",
    r"vpipe submit .*--follow.*": "tests/launch/test_slurm.py",
    r"vpipe submit CONFIG --nodes 2": "tests/launch/test_slurm.py",
    r"vpipe submit .* --to ray .*": "tests/launch/test_ray.py, without the GPU",
    r"vpipe scale runs/latest 3": "needs a run that is going on; tests/launch/test_elastic.py has one",
    r"vpipe scale \S+ --without \S+": "needs a run on machines; tests/launch/test_slurm_elastic.py has one",
    r"vpipe chaos configs/.*": "minutes; tests/launch/test_elastic.py breaks smaller runs by the same command",
    r"kubectl .*": "no Kubernetes here",
    r"ssh .*": "machines that are not here; tests/launch/test_ssh.py has a real sshd",
    r"(VPIPE_TEST_SEED=all )?(python -m )?pytest .*": "these tests are in this suite",
    r"python tests/.*": "minutes each; the suite runs smaller counts of the same",
    r"python benchmarks/.*": "minutes each; tests of their parts and benchmarks/README.md have their figures",
    r"(?s)vpipe compare configs/default\.yaml .*--repeats 2.*": "minutes; the other comparisons of the pages run here",
    r"wandb sync": "uploads to a service",
    r"tensorboard --logdir=./profiler_async_threaded": "an old command that the page answers with another",
    r"eval \"\$\(_VPIPE_COMPLETE=zsh_source vpipe\)\"": "no zsh here; tests/cli/test_cli_editing.py reads what it prints",
    r"_VPIPE_COMPLETE=fish_source vpipe \| source": "no fish here",
    r"vpipe train job.yaml --set training.epochs=1 --set parallel.partition=\[2,4,4,2\]": "a form: the cut is of a model of 12 layers",
}
"""Pattern of a whole command → why it does not run here."""

PLACEHOLDERS = {
    "CONFIG": "configs/gpt_small_cpu.yaml",
    "COMMAND": "train",
    "RUN": "runs/resumed",
    "NAME": "zb-h1",
    "FILE": "profile.json",
    "runs/2026-11-16T10-00-00": "runs/resumed",
}
"""What a reader puts in the place of a word."""
PROFILED = "configs/default.yaml"
"""The CONFIG of commands that name a profile: it is of this one."""

_BERT = (
    *("model.hidden_size=16", "model.num_heads=2"),
    *("training.num_microbatches=4", "dataset.batch_size=4", "training.max_iterations=1"),
)
_TINY = ("model.hidden_size=32", "model.num_heads=4", "training.max_iterations=2")
SMALL = {
    "default.yaml": (*_TINY, "training.evaluation_batches=1", "checkpoint.interval=2"),
    "gpt_small.yaml": (*_TINY, "model.num_layers=4", "training.profile_iteration=1"),
    "gpt_small_cpu.yaml": _TINY,
    "gpt_1f1b_cpu.yaml": _TINY,
    "bert_4vpipe.yml": _BERT,
    "bert_4gpipe.yml": _BERT,
    "bert_4pipedream.yml": _BERT,
    "bert_4vpipe_cpu.yml": ("training.max_iterations=1",),
    "job.yaml": ("training.max_iterations=2",),
    "llama.yaml": ("training.max_iterations=2",),
    "my_job.yaml": ("training.max_iterations=2",),
    "vit.yaml": ("training.max_iterations=2",),
}
"""Config → what is set beside, so that it takes seconds. Nothing else of a command is changed."""

SHORT = {
    "compare": ("--set", "training.max_iterations=2", "--repeats", "1"),
    "profile": ("--repeat", "1"),
    "build": ("--limit", "600"),
}
"""Command → words at its end, for the same reason."""

SERVERS = ("dashboard", "playground")
"""Commands that show a page until they are interrupted."""

BEFORE = {"vpipe train configs/default.yaml --resume latest": "vpipe train configs/default.yaml"}
"""Command → what its reader did last: the latest run is of this config."""

EXIT_CODES: dict[str, int] = {}
"""Commands that are meant to end with another code than 0."""
