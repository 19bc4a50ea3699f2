"""Hosts, cables and a switch, made by asking the kernel over netlink (rtnetlink(7)).

    host 0 [eth0]====[w7h0]\\
                            bridge w7       a bridge is the switch, a veth pair a cable
    host 1 [eth0]====[w7h1]/

Both ends of a cable have a token bucket (tc-tbf(8)): the host's end limits outgoing traffic to the
uplink's speed, the switch's end incoming traffic. This module does it without the programs `ip` and
`tc`, because they may not be installed, and would lose the rights that this process has in its own
user namespace. When the last process leaves a namespace and the last file that names it is closed,
the kernel removes it with its cable: nothing needs to be cleaned up.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

from .hosts import FRAME, UPLINK
from .network import CLONE_NEWNET, bring_loopback_up, check

RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK = 16, 17, 18  # of linux/rtnetlink.h
RTM_NEWADDR, RTM_NEWQDISC = 20, 36
REQUEST, ACK, REPLACE, EXCL, CREATE = 1, 4, 0x100, 0x200, 0x400  # of linux/netlink.h
NLMSG_ERROR, NESTED = 2, 0x8000
IFLA_IFNAME, IFLA_MASTER, IFLA_LINKINFO = 3, 10, 18  # of linux/if_link.h
IFLA_IFALIAS, IFLA_NET_NS_FD = 20, 28
IFLA_INFO_KIND, IFLA_INFO_DATA, VETH_INFO_PEER = 1, 2, 1
IFA_ADDRESS, IFA_LOCAL = 1, 2  # of linux/if_addr.h
TCA_KIND, TCA_OPTIONS, TCA_TBF_PARMS, TCA_TBF_RATE64, TCA_TBF_BURST = 1, 2, 1, 4, 6
TC_ROOT, TBF_HANDLE, NETEM_HANDLE = 0xFFFFFFFF, 0x10000, 0x20000  # of linux/pkt_sched.h
ETHERNET = 1  # TC_LINKLAYER_ETHERNET
IFF_UP = 1
MARK = "a host of mini_dist"  # the alias of the uplinks made here: an eth0 without it is not ours


class Switch:
    """The hosts of one world: created together, removed when closed and the last rank has ended.

    `homes`: a file for each host's network, for `move_to`. Raises OSError if the kernel refuses.
    """

    def __init__(self, name: str, number: int, rate: float, latency: float):
        self.homes: list[int] = []
        self.name = name
        here = os.open("/proc/self/ns/net", os.O_RDONLY)
        try:
            with Netlink() as switch:
                switch.add_link(name, "bridge")
                for host in range(number):
                    try:
                        home, inside = make_host()
                    finally:
                        move_to(here)
                    self.homes.append(home)
                    with inside:
                        cable = f"{name}h{host}"
                        switch.add_cable(cable, UPLINK, home)
                        switch.join(cable, name)
                        switch.shape(cable, rate, latency)
                        inside.set_alias(UPLINK, MARK)
                        inside.add_address(UPLINK, f"10.77.0.{host + 1}", 24)
                        inside.shape(UPLINK, rate, 0.0)
                        inside.set_up(UPLINK)
                        switch.set_up(cable)
                switch.set_up(name)
        except OSError:
            self.close()
            raise
        finally:
            os.close(here)

    def close(self) -> None:
        with suppress(OSError), Netlink() as switch:  # (cables go with their hosts)
            switch.remove_link(self.name)
        for home in self.homes:
            os.close(home)
        self.homes = []


def make_host() -> tuple[int, Netlink]:
    """Enter a new network; return the file that names it, and a way to change it later."""
    check(ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET))
    with suppress(OSError):  # if this cannot be turned off, every new cable gets extra packets
        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    # The oldest way to share a link, which every kernel has and allows: cables are the same on all
    # machines. (Some start with bbr: its guess of the speed is low while both directions are full,
    # because acknowledgements queue up behind data; 4 MB each way took up to 1.25 of its time.)
    with suppress(OSError):
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
    bring_loopback_up()
    return os.open("/proc/self/ns/net", os.O_RDONLY), Netlink()


def move_to(home: int) -> None:
    """Move this process, which has one thread, into that network."""
    check(ctypes.CDLL(None, use_errno=True).setns(home, CLONE_NEWNET))


def pull_cable() -> None:
    """Take down the uplink of this rank's host, like someone who trips over the cable.

    Raises OSError except on a host that was made here, whatever interfaces exist.
    """
    if not is_on_a_host():
        raise OSError("no cable to pull: this process is on no host that launch(hosts=...) made")
    with Netlink() as here:
        here.set_up(UPLINK, up=False)


def is_on_a_host() -> bool:
    """Return whether this process is in a network that `make_host` made and a `Switch` joined."""
    if not hasattr(socket, "AF_NETLINK"):
        return False
    try:
        with Netlink() as here:
            return here.alias_of(UPLINK) == MARK
    except OSError:  # no such interface, or no netlink
        return False


class Netlink:
    """Send requests to the kernel about the network in which this object was made."""

    def __init__(self):
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)

    def __enter__(self) -> Netlink:
        return self

    def __exit__(self, *_) -> None:
        self.socket.close()

    def ask(self, kind: int, flags: int, body: bytes) -> None:
        """Send a request. Raises OSError with the kernel's error."""
        length = 16 + len(body)
        self.socket.send(struct.pack("=IHHII", length, kind, REQUEST | ACK | flags, 1, 0) + body)
        answer = self.socket.recv(1 << 16)
        (number,) = struct.unpack_from("=i", answer, 16)
        if struct.unpack_from("=H", answer, 4)[0] == NLMSG_ERROR and number:
            raise OSError(-number, os.strerror(-number))

    def link(self, kind: int, flags: int, name: str, *attributes: bytes, up=None) -> None:
        """Send one request about the link with this name."""
        change = 0 if up is None else IFF_UP
        head = struct.pack("=BxHiII", 0, 0, 0, IFF_UP if up else 0, change)
        self.ask(kind, flags, head + attribute(IFLA_IFNAME, name) + b"".join(attributes))

    def add_link(self, name: str, kind: str, data: bytes = b"") -> None:
        info = attribute(IFLA_INFO_KIND, kind)
        info += attribute(IFLA_INFO_DATA | NESTED, data) if data else b""
        self.link(RTM_NEWLINK, CREATE | EXCL, name, attribute(IFLA_LINKINFO | NESTED, info))

    def add_cable(self, name: str, far_name: str, far_home: int) -> None:
        """Add a veth pair: one end here, the other in the network that the file names."""
        peer = struct.pack("=BxHiII", 0, 0, 0, 0, 0) + attribute(IFLA_IFNAME, far_name)
        peer += attribute(IFLA_NET_NS_FD, far_home)
        self.add_link(name, "veth", attribute(VETH_INFO_PEER | NESTED, peer))

    def remove_link(self, name: str) -> None:
        self.link(RTM_DELLINK, 0, name)

    def set_up(self, name: str, up: bool = True) -> None:
        self.link(RTM_NEWLINK, 0, name, up=up)

    def join(self, name: str, bridge: str) -> None:
        self.link(RTM_NEWLINK, 0, name, attribute(IFLA_MASTER, self.number_of(bridge)))

    def add_address(self, name: str, address: str, bits: int) -> None:
        packed = socket.inet_aton(address)
        body = struct.pack("=BBBBi", socket.AF_INET, bits, 0, 0, self.number_of(name))
        body += attribute(IFA_LOCAL, packed) + attribute(IFA_ADDRESS, packed)
        self.ask(RTM_NEWADDR, CREATE | EXCL, body)

    def shape(self, name: str, rate: float, latency: float) -> None:
        """Limit outgoing traffic here to `rate` bytes/s, and delay it by `latency` seconds."""
        number, kind = self.number_of(name), CREATE | REPLACE
        # A bucket of 2 ms, of at least one packet, and room for everything that TCP may send at
        # once: a switch that drops packets would measure something else. (A smaller bucket
        # overflows, and speed is lost, when the kernel serves it late: with 0.5 ms at 1 Gbit/s
        # gloo's all-reduce of 4 MB took 64 ms instead of 57; the formula says 50.)
        burst, room = int(max(FRAME, rate / 500)), int(max(4 << 20, rate))
        speed = struct.pack("=BBHhHI", 0, ETHERNET, 0, 0, 0, min(int(rate), 2**32 - 1))
        parms = speed + struct.pack("=BBHhHI", 0, 0, 0, 0, 0, 0) + struct.pack("=III", room, 0, 0)
        options = attribute(TCA_TBF_PARMS, parms) + attribute(TCA_TBF_BURST, burst)
        if rate >= 2**32:
            options += attribute(TCA_TBF_RATE64, struct.pack("=Q", int(rate)))
        body = struct.pack("=BxHiIII", 0, 0, number, TBF_HANDLE, TC_ROOT, 0)
        body += attribute(TCA_KIND, "tbf") + attribute(TCA_OPTIONS | NESTED, options)
        self.ask(RTM_NEWQDISC, kind, body)
        if latency:
            self.delay(number, latency, room)

    def delay(self, number: int, latency: float, room: int) -> None:
        """Put netem below the bucket; OSError (ENOENT) if the kernel has none."""
        ticks = int(latency * 1e9) >> 6  # of 64 ns, as psched has them (/proc/net/psched)
        parms = struct.pack("=IIIIII", ticks, room // FRAME, 0, 0, 0, 0)
        body = struct.pack("=BxHiIII", 0, 0, number, NETEM_HANDLE, TBF_HANDLE + 1, 0)
        body += attribute(TCA_KIND, "netem") + attribute(TCA_OPTIONS, parms)
        try:
            self.ask(RTM_NEWQDISC, CREATE | EXCL, body)
        except OSError as error:
            why = "this kernel has no netem, which would delay messages: latency=0 has real hosts"
            raise OSError(error.errno, why) from error

    def set_alias(self, name: str, alias: str) -> None:
        self.link(RTM_NEWLINK, 0, name, attribute(IFLA_IFALIAS, alias))

    def number_of(self, name: str) -> int:
        """Return its index in this object's network, which the process may not be in now."""
        return struct.unpack_from("=i", self.about(name), 20)[0]

    def alias_of(self, name: str) -> str | None:
        answer, place = self.about(name), 32  # after the headers of the message and of the link
        while place < len(answer):
            length, kind = struct.unpack_from("=HH", answer, place)
            if kind == IFLA_IFALIAS:
                return answer[place + 4 : place + length].rstrip(b"\0").decode()
            place += -(-length // 4) * 4
        return None

    def about(self, name: str) -> bytes:
        """Return the kernel's answer about a link; OSError if no link has this name."""
        head = struct.pack("=BxHiII", 0, 0, 0, 0, 0) + attribute(IFLA_IFNAME, name)
        self.socket.send(struct.pack("=IHHII", 16 + len(head), RTM_GETLINK, REQUEST, 1, 0) + head)
        answer = self.socket.recv(1 << 16)
        if struct.unpack_from("=H", answer, 4)[0] == NLMSG_ERROR:
            (number,) = struct.unpack_from("=i", answer, 16)
            raise OSError(-number, f"{os.strerror(-number)}: {name}")
        return answer


def attribute(kind: int, value: bytes | str | int) -> bytes:
    """Encode length, kind and value, padded to a multiple of 4 bytes."""
    if isinstance(value, str):
        value = value.encode() + b"\0"
    elif isinstance(value, int):
        value = struct.pack("=I", value)
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)
