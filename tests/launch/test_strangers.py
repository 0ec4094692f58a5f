"""What others on the machine can do to a run: not read its store, not end it, not write on its owner's terminal."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import torch.distributed as dist
from running import Running, vpipe_run
from ssh_server import NEEDS_HOSTS, ip

import forked_python
from programs import another_user
from vpipe.door import MOST_SILENT, Door, Letters, RefusedError, dial, knock, secret_of
from vpipe.errors import UserError, printable
from vpipe.runtime.ranks.failure import Board, Cause
from vpipe.runtime.ranks.store import StoreClient
from vpipe.store import Store

pytestmark = pytest.mark.timeout(200)

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from vpipe.runtime import assembly
from vpipe.runtime.ranks import membership
assembly.join(3.0)
print("joined at", os.environ["MASTER_PORT"], flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.05)
until = time.monotonic() + 8.0  # more than twice the silence that ends a run
while time.monotonic() < until:
    time.sleep(0.1)
membership.current().exchange("tick", {})
dist.all_reduce(torch.ones(1))
print("done", flush=True)
"""

STRANGER = """
import os, socket, struct, sys, time
places, keep = sys.argv[1:], []
for place in places:
    host, _, port = place.rpartition(":")
    words = [b"", b"\\0", os.urandom(4096), b"\\0" + struct.pack("<IBQ", 0x3C85F7CE, 1, 1 << 20)]
    for word in words + [b""] * 300:
        try:
            kind = socket.AF_UNIX if place[0] == "@" else socket.AF_INET
            keep.append(socket.socket(kind))
            keep[-1].settimeout(0.05)  # a port that has gone deaf answers never
            keep[-1].connect("\\0" + place[1:] if place[0] == "@" else (host, int(port)))
            keep[-1].sendall(word)
        except OSError:
            pass
print("uid", os.getuid(), len(keep), flush=True)
sys.stdin.read()
"""
"""A process of another user that says what stalls torch's store, and garbage, and nothing, many times."""


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[tuple[Running, Path]]:
    """Two ranks that have met and wait for a file."""
    script, gate = tmp_path / "script.py", tmp_path / "gate"
    script.write_text(SCRIPT)
    run = vpipe_run(tmp_path, 2, str(script), str(gate), python=sys.executable)
    run.until("joined at")
    yield run, gate
    run.kill_all()


def listening(run: Running) -> list[str]:
    """Wherever a process of the run can be reached."""
    found = set()
    for process in run.processes():
        for kind in ("inet", "unix"):
            for at in process.net_connections(kind):
                if at.status == psutil.CONN_LISTEN:
                    found.add(f"{at.laddr.ip}:{at.laddr.port}")
                elif kind == "unix" and str(at.laddr).startswith("@vpipe"):
                    found.add(str(at.laddr))
    return sorted(found)


@pytest.fixture
def stranger() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process of another user; returns when it has said all it has to say."""
    command, started = another_user(), []

    def start(*words: str) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen([*command, *words], **pipes)  # type: ignore[call-overload]
        started.append(process)
        assert "uid 65534" in process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_stranger_at_any_port_of_a_run_ends_nothing(
    waiting: tuple[Running, Path], stranger: Callable[..., subprocess.Popen[str]]
) -> None:
    run, gate = waiting
    places = listening(run)
    assert len(places) >= 4, f"two stores and two of gloo's: {places}"
    process = stranger(STRANGER, *places)
    gate.touch()
    assert run.wait() == 0, run.out + run.err
    assert process.poll() is None, "it was there to the end"


WATCHER = """
import os, socket, sys, time
seen, keep, num_hits, began = set(), [], 0, False
while True:
    places = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        rows = [line.split() for line in open(table).read().splitlines()[1:]]
        places += [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A"]
    rows = [line.split() for line in open("/proc/net/unix").read().splitlines()[1:]]
    places += ["\\0" + row[7][1:] for row in rows if len(row) > 7 and row[7].startswith("@vpipe")]
    for place in set(places) - seen:
        seen.add(place)
        for word in (b"", b"\\0", os.urandom(4096), bytes(8)) * 5:
            try:
                keep.append(socket.socket(socket.AF_UNIX if isinstance(place, str) else socket.AF_INET))
                keep[-1].settimeout(0.05)
                keep[-1].connect(place if isinstance(place, str) else ("127.0.0.1", place))
                keep[-1].sendall(word)
                num_hits += 1
            except OSError:
                pass
        print("hits", num_hits, flush=True)
    if not began:
        began = True
        print("uid", os.getuid(), flush=True)
    time.sleep(0.002)
"""
"""Another user's process that looks for every port as it is opened, and takes the first places at it."""


@NEEDS_HOSTS
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "distributed"])
def test_a_stranger_that_watches_the_start_changes_nothing(transport: str, tmp_path: Path) -> None:
    """In a network of their own, so that it meets nobody else's ports."""
    space = f"vw{os.getpid() % 100_000}"
    alone = ["ip", "netns", "exec", space]
    as_another = another_user()
    config = Path(__file__).parents[2] / "configs" / "gpt_1f1b_cpu.yaml"
    words = ["--set", f"parallel.transport={transport}", "--set", "parallel.timeout=20", "--output-dir", "run"]
    ip("netns", "add", space)
    try:
        ip("-n", space, "link", "set", "lo", "up")
        watcher = subprocess.Popen([*alone, *as_another, WATCHER], stdout=subprocess.PIPE, text=True)
        assert watcher.stdout is not None
        assert watcher.stdout.readline().startswith("uid 65534")
        train = [*alone, sys.executable, "-m", "vpipe", "train", str(config), "--set", "training.max_iterations=2"]
        done = subprocess.run([*train, *words], cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
        watcher.kill()
        hits = [int(line.split()[1]) for line in watcher.stdout.read().splitlines()]
        watcher.wait()
    finally:
        subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(hits) > 20, "it came to none"


STOLEN = """
import socket, struct
import psutil, torch, torch.distributed as dist
from vpipe.runtime import assembly
from vpipe.runtime.ranks.store import StoreClient

stolen, told, made = [], StoreClient.set, []

def tell_after_a_stranger(self, key, value):
    if "/cpu/" in key:  # where gloo listens: a stranger is there before the others know it
        made.append(key)
        places = [at.laddr for at in psutil.Process().net_connections("inet") if at.status == "LISTEN"]
        for place in places if len(made) == 1 else ():
            for number in range(2):
                stolen.append(socket.create_connection(place))
                stolen[-1].sendall(struct.pack("<q", number) + b"garbage" * SILENT)
    told(self, key, value)

StoreClient.set = tell_after_a_stranger
assembly.join(20.0)
value = torch.ones(1)
dist.all_reduce(value)
deaf = 0
for at in psutil.Process().net_connections("inet"):
    if at.status == "LISTEN":
        try:
            socket.create_connection(at.laddr, 0.5).close()
        except TimeoutError:
            deaf += 1
print("sum", int(value), "made", len(made), "stolen", bool(stolen), "deaf", deaf, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [0, 20])
def test_a_stranger_that_takes_the_place_of_a_rank_is_found_out(words: int, tmp_path: Path) -> None:
    """gloo takes the first that comes and says a small number; the group is made anew, and then lets nobody in."""
    script = tmp_path / "script.py"
    script.write_text(STOLEN.replace("SILENT", str(words)))
    run = vpipe_run(tmp_path, 2, str(script), python=sys.executable)
    assert run.wait() == 0, run.out + run.err
    assert run.out.count("sum 2 made 2 stolen True deaf 1") == 2, run.out


REPLICAS = """
import torch
from vpipe.runtime import assembly
assembly.join(20.0)
end = assembly.between_processes("distributed", blocking=False, timeout=20.0)
end.prepare_groups([(1, 0)])
end.all_reduce(value := torch.ones(1), (1, 0))
print("sum", int(value), flush=True)
"""


def test_a_group_whose_ranks_come_in_another_order_has_no_stranger(tmp_path: Path) -> None:
    """As the replicas of chimera and dualpipe come; torch's groups are in the order of ranks."""
    (tmp_path / "script.py").write_text(REPLICAS)
    run = vpipe_run(tmp_path, 2, str(tmp_path / "script.py"), python=sys.executable)
    assert run.wait() == 0, run.out + run.err
    assert run.out.count("sum 2") == 2, run.out


@pytest.mark.slow
def test_a_stranger_at_the_store_reads_nothing_and_prints_nothing(waiting: tuple[Running, Path]) -> None:
    run, gate = waiting
    port = int(run.out.split("joined at ")[1].split()[0])
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=10), wait_for_workers=False)
    assert store.num_keys() <= 1, "torch's store is for the user's own process groups; ours is elsewhere"
    forged = json.dumps({"rank": 1, "kind": "gone", "sentence": "\x1b[2Jhello", "by": 1})
    for key in (".0/end", "vpipe/.0/end"):
        store.set(key, forged)
    gate.touch()
    assert run.wait() == 0, run.err
    assert "hello" not in run.out + run.err
    assert "\x1b" not in run.out + run.err


ASKED = """
from vpipe.runtime import assembly
from vpipe.runtime.ranks.store import StoreClient

asked, ask = [], StoreClient._ask
StoreClient._ask = lambda self, *words, **more: (asked.append(words), ask(self, *words, **more))[1]
assembly.join(60.0)
print("of gloo", [what for what, key, *_ in asked if "/cpu/" in str(key)], flush=True)
"""


@pytest.mark.slow
def test_gloo_asks_the_store_twice_a_rank_however_many_there_are(tmp_path: Path) -> None:
    """Where each is, and where all others are; it was twice for each of them."""
    (tmp_path / "script.py").write_text(ASKED)
    run = vpipe_run(tmp_path, 6, str(tmp_path / "script.py"), python=sys.executable)
    assert run.wait() == 0, run.err
    assert run.out.count("of gloo ['set', 'wait']") == 6, run.out


SAYS = """
import os
from pathlib import Path
if os.environ.get("RANK") == "0":
    place = Path(__file__).with_name("secret")
    place.touch(0o600)
    place.write_text(os.environ["VPIPE_SECRET"])
"""
READER = """
import os, sys, urllib.error, urllib.request
folder, page, *words = sys.stdin.read().split()
found, num_read = [], 0
files = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]
files += [f"/proc/{pid}/{name}" for pid in os.listdir("/proc") if pid.isdigit() for name in ("cmdline", "environ")]
for file in files:
    try:
        with open(file, "rb") as opened:
            data = opened.read()
        num_read += file.startswith(folder)
        found += [file for word in words if word.encode() in data]
    except OSError:
        pass
try:
    code = urllib.request.urlopen(page).status
except urllib.error.HTTPError as error:
    code = error.code
print(os.getuid(), "found", found, "page", code, "read", num_read)
"""


@pytest.mark.slow
def test_no_file_or_process_of_a_run_tells_another_user_its_secret_or_the_address_of_its_page() -> None:
    """A run that others may read, in a folder that they may enter."""
    pytest.importorskip("uvicorn")
    as_another = another_user()
    config = Path(__file__).parents[2] / "configs" / "gpt_1f1b_cpu.yaml"
    own = ["observe.dashboard=true", "observe.private=false", "training.max_iterations=100000", "training.epochs=1000"]
    with TemporaryDirectory() as place:
        folder = Path(place)
        folder.chmod(0o755)
        (folder / "says.py").write_text(SAYS)
        words = ["--plugin", f"{place}/says.py", *(word for each in own for word in ("--set", each))]
        train = ["-m", "vpipe", "train", str(config), *words, "--output-dir", f"{place}/run"]
        run = Running(folder, forked_python.program(), *train)
        try:
            run.until("iteration 10/")
            page, _, token = (folder / "run" / "page.url").read_text().strip().partition("?token=")
            secret = (folder / "secret").read_text()
            told = f"{place} {page} {token} {secret}"
            done = subprocess.run([*as_another, READER], input=told, capture_output=True, text=True, check=True)
        finally:
            run.process.terminate()
            run.wait()
        uid, found = done.stdout.split(" found ")
        assert (uid, found.split(" read ")[0]) == ("65534", "[] page 403")
        assert int(found.split(" read ")[1]) > 5, "it came into the run's folder"
        for file in folder.rglob("*"):
            if file.is_file() and file.stat().st_mode & 0o077:
                assert not [word for word in (token, secret) if word.encode() in file.read_bytes()], file


@pytest.mark.slow
def test_a_stopped_zygote_is_woken(waiting: tuple[Running, Path]) -> None:
    run, gate = waiting
    zygote = next(
        child for child in psutil.Process(run.process.pid).children() if "zygote" in " ".join(child.cmdline())
    )
    zygote.send_signal(signal.SIGSTOP)
    gate.touch()
    assert run.wait() == 0, run.err
    assert "had been stopped; it goes on" in run.err


@pytest.fixture
def store() -> Iterator[Store]:
    kept = Store(socket.create_server(("127.0.0.1", 0)), "secret")
    serving = threading.Thread(target=kept.serve)
    serving.start()
    yield kept
    kept.stop()
    serving.join()


def test_the_store_answers_as_torchs_does(store: Store) -> None:
    one, other = (StoreClient(("127.0.0.1", store.port), "secret", 5.0, "0/") for _ in range(2))
    torchs = dist.HashStore()
    for each in (one, torchs):
        each.set("a", bytes(range(256)))
        said = [each.get("a"), each.check(["a"]), each.check(["a", "b"]), each.add("n", 2), each.add("n", 3)]
        said += [each.compare_set("c", "", "first"), each.compare_set("c", "", "second")]
        said += [each.compare_set("c", "first", "third"), each.delete_key("c"), each.delete_key("c")]
        assert said == [bytes(range(256)), True, False, 2, 5, b"first", b"first", b"third", True, False]
    threading.Timer(0.1, other.set, ("late", "x")).start()
    assert one.get("late") == b"x"
    with pytest.raises(dist.DistStoreError, match="never did not come within"):
        one.wait(["never"], timedelta(seconds=0.1))
    assert one.multi_get(["a", "late"]) == [bytes(range(256)), b"x"]
    assert not StoreClient(("127.0.0.1", store.port), "secret", 5.0, "1/").check(["a"]), "of another generation"


def test_a_store_that_ends_is_told(store: Store) -> None:
    client = StoreClient(("127.0.0.1", store.port), "secret", 5.0, "")
    board = Board(client, 0)
    cause = Cause(1, "gone", "rank 1 is gone", 0)
    assert board.post(cause) == cause
    assert board.post(Cause(0, "gone", "later", 0)) == cause == board.read()
    store.stop()
    with pytest.raises(RuntimeError):
        board.read()


def test_who_does_not_know_the_secret_is_not_served_and_finds_out(store: Store) -> None:
    address = ("127.0.0.1", store.port)
    with pytest.raises(RefusedError, match="VPIPE_SECRET"):
        dial(address, "another", "store", 2.0)
    with pytest.raises(RefusedError):
        dial(address, "secret", "copies", 2.0)
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        connection, _ = listener.accept()
        connection.sendall(bytes(32))
        connection.recv(4096)
        connection.sendall(bytes(32))

    threading.Thread(target=pretend, daemon=True).start()
    with pytest.raises(RefusedError), socket.create_connection(listener.getsockname()) as connection:
        knock(connection, "secret", "store")


def test_silent_strangers_cost_their_own_connections_only() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=MOST_SILENT + 64)
    door = Door(listener, "secret", "store")
    address = listener.getsockname()
    silent = [socket.create_connection(address) for _ in range(MOST_SILENT + 50)]
    for each in silent[::2]:
        each.sendall(b"\0")
    found = []
    guest = threading.Thread(target=lambda: found.append(dial(address, "secret", "store", 5.0)))
    guest.start()
    come = door.next(time.monotonic() + 5.0)
    guest.join()
    assert come.key == found[0].key
    assert len(door._silent) <= MOST_SILENT
    with pytest.raises(TimeoutError):
        door.next(time.monotonic() + 0.05)
    host, letters = Letters(come, host=True), Letters(found[0], host=False)
    letters.send(["a", 1])
    assert host.receive() == [["a", 1]]
    letters.connection.sendall(b"\2\0\0\0" + bytes(32) + b"[]")
    with pytest.raises(EOFError):
        host.receive()
    listener.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionAbortedError):
        door.next(time.monotonic() + 5.0)
    door.close()


def test_the_secret_of_a_user_is_made_once_and_read_by_that_user_alone(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    secret = secret_of(environment)
    assert len(secret) == 64
    assert secret == secret_of(environment)
    assert secret_of(environment | {"VPIPE_SECRET": "typed"}) == "typed"
    file = tmp_path / "vpipe" / "secret"
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["secret"]
    file.chmod(0o644)
    with pytest.raises(UserError, match="not yours alone"):
        secret_of(environment)


def test_causes_from_the_wire_are_cleaned_and_typed() -> None:
    assert Cause.parse("[]") is None
    assert Cause.parse('{"rank": "x", "kind": "gone", "sentence": "", "by": 0}') is None
    found = Cause.parse(json.dumps({"rank": 1, "kind": "gone", "sentence": "a\x1b]0;title\x07b\nc", "by": 0}))
    assert found is not None
    assert found.sentence.isprintable()


def test_text_for_a_terminal() -> None:
    assert printable("a\tb\n c") == "a b c"
    assert printable("\x1b[2J\x9b\u202e").isprintable()
    assert printable("Grüße 世界") == "Grüße 世界"
