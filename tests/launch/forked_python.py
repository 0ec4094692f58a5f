"""A ``python`` that has imported torch already: ranks under SLURM are forks of one process, and sixteen imports are one.

``serve`` is that process; the program that ``write`` leaves is called ``python`` by a job's script and hands its words,
variables, folder and streams over a socket, so that everything that vpipe does is done for real, in as many processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

CLIENT = """#!{python} -SE
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
told = json.dumps({{"words": sys.argv[1:], "folder": os.getcwd(), "variables": dict(os.environ)}}).encode()
socket.send_fds(server, [len(told).to_bytes(8, "big")], [0, 1, 2])
server.sendall(told)
sys.exit(int(server.makefile().readline() or 1))
"""


def write(program: Path, address: Path) -> None:
    program.write_text(CLIENT.format(python=sys.executable, address=str(address)))
    program.chmod(0o755)


def start(address: Path) -> subprocess.Popen[str]:
    """The process that forks, when it listens."""
    variables = os.environ | {"OMP_NUM_THREADS": "1"}  # read when torch is imported
    words = [sys.executable, __file__, str(address)]
    server = subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    return server


def serve(address: str) -> None:
    import vpipe.cli.main
    import vpipe.train.trainer  # noqa: F401

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork ended
    print("listening", flush=True)
    while True:
        client, _ = listener.accept()
        if os.fork():
            client.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        size, streams, _, _ = socket.recv_fds(client, 8, 3)
        told = json.loads(client.makefile("rb").read(int.from_bytes(size, "big")))
        rank = os.fork()
        if not rank:
            _become(told, streams)
        code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
        client.sendall(f"{code if code >= 0 else 128 - code}\n".encode())
        os._exit(0)


def _become(told: dict[str, object], streams: list[int]) -> None:
    import vpipe.cli.main

    code = 1
    try:
        for stream, given in enumerate(streams):
            os.dup2(given, stream)
        os.chdir(str(told["folder"]))
        variables = told["variables"]
        assert isinstance(variables, dict)
        os.environ.clear()
        os.environ.update(variables)
        words = told["words"]
        assert isinstance(words, list)
        assert words[:2] == ["-m", "vpipe"], words
        sys.argv = ["vpipe", *words[2:]]
        vpipe.cli.main.main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
