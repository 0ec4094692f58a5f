"""Which interface gloo takes when ranks run on several machines, and what is said where it is the wrong one."""

from __future__ import annotations

import socket

import psutil
import pytest

from vpipe.errors import UserError
from vpipe.network import GLOO, NAMES, choose_interface, interface_towards


def test_on_one_machine_nothing_is_chosen() -> None:
    environment: dict[str, str] = {}
    choose_interface(environment, "127.0.0.1")
    assert environment == {}


def addresses() -> list[tuple[str, str]]:
    return [
        (name, each.address)
        for name, found in psutil.net_if_addrs().items()
        for each in found
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    ]


@pytest.mark.skipif(not addresses(), reason="this machine has no network interface but loopback")
def test_towards_an_address_of_our_own_leads_the_interface_that_holds_it() -> None:
    name, address = addresses()[0]
    assert interface_towards(address) == name
    environment: dict[str, str] = {}
    choose_interface(environment, address)
    assert environment == dict.fromkeys(NAMES, name)


def test_what_the_environment_names_is_kept() -> None:
    environment = {GLOO: "lo"}
    choose_interface(environment, "10.1.2.3")
    assert environment == {GLOO: "lo"}


def test_an_interface_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"GLOO_SOCKET_IFNAME .* is 'lo0'.*its interfaces are .*lo"):
        choose_interface({GLOO: "lo0"}, "127.0.0.1")
