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
LOOPBACK = "lo"
NAMES = (GLOO, "NCCL_SOCKET_IFNAME")
"""The variables by which gloo and NCCL are told an interface."""
_ANYWHERE = "203.0.113.1"
"""An address that is reserved for documentation: the way to it is the way to all that is not near."""


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")


def family_of(address: str) -> socket.AddressFamily:
    """Of an address, or of a host name, which is left to IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


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


def _interface_to_others() -> str | None:
    """Where a machine's own name leads to itself (Debian's 127.0.1.1) and ranks of other machines know it by that name:
    the interface that leads anywhere, else the only one there is."""
    states = psutil.net_if_stats()
    others = [name for name in psutil.net_if_addrs() if name != LOOPBACK and states[name].isup]
    return interface_towards(_ANYWHERE) or (others[0] if len(others) == 1 else LOOPBACK)


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
    if interface == LOOPBACK and environ.get("LOCAL_WORLD_SIZE", "1") != environ.get("WORLD_SIZE"):
        interface = _interface_to_others()
    if interface is not None:
        for name in NAMES:
            environ.setdefault(name, interface)
