"""The network interface towards another machine, found by the system's routing tables."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from cfl.runtime.network_interface import interface_towards


def test_an_address_of_this_machine_is_on_its_own_interface() -> None:
    if shutil.which("ip") is None:
        pytest.skip("needs the program ip, which lists interfaces and their addresses")
    listed = json.loads(subprocess.run(["ip", "-j", "-4", "address"], capture_output=True, check=True).stdout)
    found = {address["local"]: one["ifname"] for one in listed for address in one.get("addr_info", [])}
    if all(address.startswith("127.") for address in found):
        pytest.skip("needs an interface beside the loopback one")
    for address, name in found.items():
        assert interface_towards(address, 29500) == (None if address.startswith("127.") else name)


def test_a_host_that_is_unknown_or_this_one_by_name_has_none() -> None:
    assert interface_towards("localhost", 29500) is None
    assert interface_towards("nowhere.invalid", 29500) is None
