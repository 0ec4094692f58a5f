"""A thousand mutated configs: each is valid or one UserError. Nothing else comes out, and nothing takes long.

``python tests/config/test_config_fuzz.py --configs 10000 [--seed 4]`` tries as many as one likes.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from pathlib import Path
from time import perf_counter

import pytest

from vpipe.config import PipelineConfig, load
from vpipe.config.document import parse
from vpipe.errors import UserError

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs").glob("*.y*ml"))
NUM_MUTANTS = 1000
WORDS = [
    *("null", "true", "no", "010", "1e-4", "-1", "0", "1e999", ".nan", "''", "'\\0'", '"\\0"', "[]", "{}", "[[[]]]"),
    *(
        "*a",
        "&a x",
        "!!python/name:os.system",
        "!x",
        "<<",
        "? x",
        "---",
        "...",
        "|",
        ">",
        "%",
        "@",
        "`",
        "#",
        "\t",
        ":",
    ),
    *("../../../../etc/passwd", "$(id)", "; rm -rf ~", "-oProxyCommand=id", "--help", "a b", "\N{SNOWMAN}", "\ud7ff"),
    *("99999999999999999999999", "9" * 400, "0x1f", "{a: 1}", "[1, 2", "]", "}", "'", '"', "\x85", "\ufeff", "=", "~x"),
]


def mutate(text: str, rng: random.Random) -> str:
    """One to four small accidents: a value replaced, a line lost, doubled, moved or indented, a character changed."""
    lines = text.splitlines()
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(lines))
        match rng.randrange(8):
            case 0 | 1 | 2:
                key, colon, _ = lines[at].partition(":")
                lines[at] = f"{key}{colon} {rng.choice(WORDS)}"
            case 3:
                lines.insert(at, lines[rng.randrange(len(lines))])
            case 4 if len(lines) > 1:
                del lines[at]
            case 5:
                lines[at] = rng.choice(["  ", "\t", "- "]) + lines[at]
            case 6:
                lines[at] = lines[at].replace(*rng.choice([("_", ""), (":", ""), ("e", "3"), (" ", ""), ("'", "")]))
            case _:
                spot = rng.randrange(len(lines[at]) + 1)
                lines[at] = lines[at][:spot] + rng.choice(WORDS) + lines[at][spot:]
    return "\n".join(lines) + "\n"


def mutants(tmp_path: Path, count: int, seed: int) -> Counter[str]:
    """Load that many mutants; what came of them."""
    rng = random.Random(seed)
    texts = [file.read_text(encoding="utf-8") for file in FILES]
    (tmp_path / "bert").symlink_to(ROOT / "configs" / "bert")
    file = tmp_path / "job.yaml"
    seen: Counter[str] = Counter()
    for _ in range(count):
        text = mutate(rng.choice(texts), rng)
        file.write_text(text, encoding="utf-8", newline="")
        overrides = [f"training.{rng.choice(['epochs', 'warmup', 'x', 'epochs.y'])}={rng.choice(WORDS)}"]
        try:
            config = load(file, overrides if rng.random() < 0.2 else (), environment={}).config
        except UserError as error:
            seen["refused" if str(error).strip() else "refused without a word"] += 1
        else:
            assert PipelineConfig.from_dict(parse(config.to_yaml()).value) == config, text
            seen["valid"] += 1
    return seen


@pytest.mark.rotates(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [4, 5])
def test_mutated_configs_are_valid_or_one_user_error(tmp_path: Path, seed: int) -> None:
    seen = mutants(tmp_path, NUM_MUTANTS, seed)
    assert set(seen) == {"valid", "refused"}
    assert seen.total() == NUM_MUTANTS
    assert min(seen.values()) > NUM_MUTANTS // 25, f"the mutants must try both answers: {seen}"


INJECTIONS = [
    *("-oProxyCommand=touch /tmp/x", "--wrap=id", "; id", "$(id)", "`id`", "a b", "a\nb", "a\tb", "|id", "&& id", "\0"),
    *("'", '"', "a;b", "a&b", "a>b", "a<b", "a*b", "a?b", "~root", "a\\b", "a!b", "a#b", "(a)", "{a}", "\x1b[31m", ""),
    *("-", "--", "-e", " a", "a\r", "${IFS}", "a'b", 'a"b', "a`b", "a$b", "a|b", "\u202e"),
]


@pytest.mark.parametrize("payload", INJECTIONS)
def test_words_of_a_command_line_hold_no_tricks(payload: str) -> None:
    base = {"model": {"name": "gpt"}, "dataset": {"name": "text"}, "parallel": {"model_parallel_size": 1}}
    launches = [
        {"slurm": {"options": {"gres": payload}}},
        {"slurm": {"options": {payload: "gpu"}}},
        {"machines": [payload]},
        {"machines": [f"{payload}:0"]},
        {"machines": [f"host:{payload}"]},
        {"interface": payload},
    ]
    for launch in launches:
        with pytest.raises(UserError):
            PipelineConfig.from_dict({**base, "launch": launch})
    for section in ("model", "dataset"):
        with pytest.raises(UserError):
            PipelineConfig.from_dict({**base, section: {"name": payload}})
    with pytest.raises(UserError):
        PipelineConfig.from_dict({**base, "parallel": {"scheduler": payload}})


@pytest.mark.parametrize("payload", ["-v/:/x", "--privileged", "a\nb", "", "\0", " a", "a\tb", "$(id)"])
def test_container_images_and_binds_hold_no_options(payload: str) -> None:
    base = {"model": {"name": "gpt"}, "dataset": {"name": "text"}}
    for container in ({"kind": "docker", "image": payload}, {"kind": "docker", "image": "x", "binds": [payload]}):
        with pytest.raises(UserError):
            PipelineConfig.from_dict({**base, "launch": {"container": container}})


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_shipped_config_loads(file: Path) -> None:
    loaded = load(file, environment={})
    for warning in loaded.warnings:
        assert "directory has no meaning" in warning or "module has no meaning" in warning
    assert PipelineConfig.from_dict(loaded.config.to_dict()) == loaded.config


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--configs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=4)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        begin = perf_counter()
        found = mutants(Path(scratch), chosen.configs, chosen.seed)
        rate = chosen.configs / (perf_counter() - begin)
    print(f"{found['valid']} valid, {found['refused']} refused in words, nothing else; {rate:.0f} a second")
    assert set(found) <= {"valid", "refused"}, found
