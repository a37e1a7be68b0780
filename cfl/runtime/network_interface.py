"""Finds the network interface through which this machine reaches another one."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface."""


def interface_towards(host: str, port: int) -> str | None:
    """The name of the interface by which this machine would send messages to an IPv4 host; nothing is sent.

    Returns:
        The name; None if the host is unknown, cannot be reached, is reached by the loopback interface, or if the system
        does not say which addresses its interfaces have.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
            towards.connect((host, port))
            own = towards.getsockname()[0]
    except OSError:
        return None
    if own.startswith("127."):
        return None
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == own), None)


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:  # the interface has no address, or this is not Linux
            return None
    return socket.inet_ntoa(answer[20:24])
