"""Which network interface leads where: asked of this machine's own tables, nothing is sent.

gloo takes the interface that the machine's own name resolves to, which is often loopback: ranks on several machines
then give each other addresses on which nobody answers. Launchers and ranks ask here for the interface that leads to the
machine where all ranks meet.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, MutableMapping

import psutil

from vpipe.errors import UserError, nearest

GLOO = "GLOO_SOCKET_IFNAME"
NAMES = (GLOO, "NCCL_SOCKET_IFNAME")
"""The variables by which gloo and NCCL are told an interface."""


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")


def interface_of(address: str) -> str | None:
    """The network interface that holds an address of this machine."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.split("%")[0] == address for each in addresses):
            return name
    return "lo" if is_loopback(address) and "lo" in psutil.net_if_addrs() else None


def interface_towards(host: str) -> str | None:
    """The interface by which this machine reaches another: a datagram socket is connected, which sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return interface_of(str(probe.getsockname()[0]))
    except OSError:
        return None


def address_here(environ: Mapping[str, str]) -> str:
    """The address of this machine that gloo takes: of the interface that the environment names, else of the machine's
    own name."""
    interfaces = psutil.net_if_addrs()
    named = [each for name in environ.get(GLOO, "").split(",") for each in interfaces.get(name, ())]
    for family in (socket.AF_INET, socket.AF_INET6):
        found = [each.address for each in named if each.family == family and not each.address.startswith("fe80")]
        if found:
            return found[0]
    try:
        return str(socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return "127.0.0.1"


def choose_interface(environ: MutableMapping[str, str], host: str) -> None:
    """Let gloo and NCCL take the interface that leads to ``host``, where the environment names none; one that this
    machine does not have is refused in words, because gloo would end in a traceback here and in silence elsewhere."""
    chosen = environ.get(GLOO)
    if chosen:
        known = list(psutil.net_if_addrs())
        for name in chosen.split(","):
            if name not in known:
                raise UserError(
                    f"{GLOO} (launch.interface) is {name!r}, which this machine ({socket.gethostname()}) does not "
                    f"have{nearest(name, known)}; its interfaces are {', '.join(known)}"
                )
        return
    interface = None if is_loopback(host) else interface_towards(host)
    if interface is not None:
        for name in NAMES:
            environ.setdefault(name, interface)
