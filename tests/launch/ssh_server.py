"""A real sshd with keys, config and ports of its own, answering under several host names; also inside namespaces."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from programs import find, needs

SSHD = """
Port {port}
{addresses}
HostKey {root}/host_key
AuthorizedKeysFile {root}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
SetEnv HOME={root}
"""
"""Without the files that a shell of the user reads first: they may do anything, and say so."""

SSH = """
Host *
  Port {port}
  IdentityFile {root}/user_key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile {root}/known_hosts
  LogLevel ERROR
"""


NEEDS_SSHD = needs("ssh", "sshd", "ssh-keygen", "root")
NEEDS_HOSTS = needs("ip", "namespaces")
"""Hosts of the test's own, in network namespaces."""


def ip(*words: str) -> None:
    """Change the network; what it refuses fails the test."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def behind_a_bridge(server: Server, tag: str, network: str) -> Iterator[None]:
    """The hosts of ``server`` with networks of their own, joined by a bridge at ``network``.1: host i is in the
    namespace ``<tag>n<i>``, its cable is ``<tag>h<i>`` here and ``<tag>f<i>`` there. The server ends with them."""
    bridge, addresses = f"{tag}br", list(server.hosts.values())
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("address", "add", f"{network}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for index, address in enumerate(addresses):
            space, near, far = f"{tag}n{index}", f"{tag}h{index}", f"{tag}f{index}"
            ip("netns", "add", space)
            ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", space)
            ip("link", "set", near, "master", bridge, "up")
            ip("-n", space, "address", "add", f"{address}/24", "dev", far)
            ip("-n", space, "link", "set", far, "up")
            ip("-n", space, "link", "set", "lo", "up")
            server.listen([address], ("ip", "netns", "exec", space))
        yield
    finally:
        server.stop()
        for index in range(len(addresses)):
            subprocess.run(["ip", "netns", "delete", f"{tag}n{index}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", bridge], capture_output=True, check=False)


class Server:
    """sshd processes for hosts that are names of addresses."""

    def __init__(self, root: Path, hosts: dict[str, str]) -> None:
        self.root, self.hosts = root, hosts
        self.config = root / "ssh_config"
        self._processes: list[subprocess.Popen[bytes]] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(root / name)], check=True)
        aliases = "".join(f"Host {name}\n  HostName {address}\n" for name, address in hosts.items())
        self.config.write_text(aliases + SSH.format(port=self._port, root=root))

    def listen(self, addresses: list[str], prefix: tuple[str, ...] = ()) -> None:
        """An sshd on these addresses, perhaps inside a namespace."""
        Path("/run/sshd").mkdir(exist_ok=True)
        file = self.root / f"sshd_config.{len(self._processes)}"
        listed = "\n".join(f"ListenAddress {address}" for address in addresses)
        file.write_text(SSHD.format(port=self._port, addresses=listed, root=self.root))
        sshd = find("sshd")
        assert sshd is not None
        log = (self.root / "sshd.log").open("ab")
        command = [*prefix, sshd, "-D", "-e", "-f", str(file)]
        self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        for address in addresses:
            self._answers(address)

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
            process.wait(200)

    def _answers(self, address: str) -> None:
        deadline = time.monotonic() + 100
        while True:
            try:
                socket.create_connection((address, self._port), timeout=10).close()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise TimeoutError((self.root / "sshd.log").read_text()) from None
                time.sleep(0.05)
