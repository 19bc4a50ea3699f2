"""The parent's side of one rank: its socket, its output, its report, its end."""

from __future__ import annotations

import os
import pickle
import socket

from .rank import Report
from .transport import Frames, Inbox

KEEP_OUTPUT = 1 << 20  # bytes of a rank's prints


class Rank:
    """What the parent knows of one rank of a world."""

    def __init__(self, number: int):
        self.number = number
        self.socket, self.far_socket = socket.socketpair()
        try:
            self.output_fd, self.far_output_fd = os.pipe()
        except OSError:
            self.socket.close(), self.far_socket.close()
            raise
        os.set_blocking(self.output_fd, False)
        self.inbox = Inbox()
        self.output = bytearray()
        self.dropped = 0  # bytes of output beyond KEEP_OUTPUT
        self.pid: int | None = None
        self.refused: int | None = None  # the errno if the system did not start it
        self.report: Report | None = None
        self.asked: list = []  # what it has asked for since somebody looked (membership.Ask)
        self.result: Frames = []
        self.status: int | None = None  # set when the process has ended

    @property
    def returned(self) -> bool:
        return self.report is not None and self.report.outcome == "returned"

    @property
    def failed(self) -> bool:
        return not self.returned and (self.report is not None or self.gone)

    @property
    def gone(self) -> bool:
        return self.status is not None or self.refused is not None

    def read_report(self) -> bool:
        """Take in what has arrived; False when nothing more can come."""
        try:
            more = self.inbox.read(self.socket)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        if self.inbox.message is not None:
            about, *result = self.inbox.message
            said, self.inbox = pickle.loads(about), Inbox()
            if isinstance(said, Report):
                self.report, self.result = said, result
            else:
                self.asked.append(said)
        return more

    def read_output(self) -> bool:
        while True:
            try:
                data = os.read(self.output_fd, 1 << 16)
            except BlockingIOError:
                return True
            room = max(0, KEEP_OUTPUT - len(self.output))
            self.output += data[:room]
            self.dropped += len(data) - len(data[:room])
            if not data:
                return False

    def hand_over(self) -> None:
        """Let go of the rank's own ends, which it has now."""
        self.far_socket.close()
        os.close(self.far_output_fd)
        self.far_output_fd = None

    def close(self) -> None:
        self.socket.close()
        os.close(self.output_fd)
        if self.far_output_fd is not None:
            self.hand_over()

    def text(self) -> str:
        text = self.output.decode(errors="replace")
        return text + f"\n[... {self.dropped} more bytes]" if self.dropped else text
