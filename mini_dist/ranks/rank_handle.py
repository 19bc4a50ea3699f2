"""The parent's side of one rank: its socket, its output, its report, its end."""

from __future__ import annotations

import os
import pickle
import socket

from .membership import Ask
from .rank import Failure, Report
from .transport import Frames, Inbox

KEEP_OUTPUT = 1 << 20  # bytes of a rank's prints


class RankHandle:
    """What the parent knows about one rank of a world."""

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
        self.asked: list = []  # requests that nobody has looked at yet (membership.Ask)
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
        """Read what has arrived; return False when nothing more can come."""
        try:
            more = self.inbox.read(self.socket)
            if self.inbox.message is not None:
                about, *result = self.inbox.message
                said, self.inbox = pickle.loads(about), Inbox()
                if isinstance(said, Report):
                    self.report, self.result = said, result
                elif isinstance(said, Ask):
                    self.asked.append(said)
                else:
                    raise TypeError(f"{type(said).__name__} is no report")
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        except Exception as error:  # a rank may have written anything there
            self.report = Report("raised", error=self.wrote_junk(error))
            return False
        return more

    def wrote_junk(self, error: Exception) -> Failure:
        message = (
            "something in this rank has written to its socket to launch, which nobody else may use "
            f"({type(error).__name__} where its report was expected): close no file descriptors "
            "and write to none that you have not opened"
        )
        return Failure("ConnectionError", message, [], False, None, [], [])

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
        """Close the rank's own ends of the connections, which it has now."""
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
