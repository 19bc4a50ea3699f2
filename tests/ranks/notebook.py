"""A real kernel for tests: run a cell, see what a learner would see."""

import os
import queue
import re
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_client.manager import start_new_kernel

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120  # seconds for a cell on a busy machine; no test waits that long when all is well


@dataclass
class Cell:
    """The output shown under a cell."""

    number: int | None = None
    printed: str = ""
    result: dict = field(default_factory=dict)  # MIME type -> text
    error: str = ""  # the traceback as shown, without colors
    error_type: str = ""


class Notebook:
    """Used as `with Notebook(directory) as notebook`."""

    def __init__(self, directory):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        for name in ("PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"):
            environment.pop(name, None)  # ipykernel behaves differently under tests
        self.manager, self.client = start_new_kernel(
            startup_timeout=PATIENCE, cwd=str(directory), env=environment
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def start(self, source: str) -> str:
        """Start running a cell."""
        return self.client.execute(source)

    def finish(self, message_id: str) -> Cell:
        """Wait until that cell is done; its error is stored in the Cell, not raised."""
        cell = Cell()
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=PATIENCE)
            except queue.Empty:
                raise TimeoutError(f"the cell has not ended; it printed {cell.printed!r}") from None
            if message["parent_header"].get("msg_id") != message_id:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "execute_input":
                cell.number = content["execution_count"]
            elif kind == "stream":
                cell.printed += content["text"]
            elif kind == "execute_result":
                cell.result = content["data"]
            elif kind == "error":
                cell.error_type = content["ename"]
                cell.error = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return cell

    def run(self, source: str) -> Cell:
        """Run a cell that must not fail."""
        cell = self.try_to_run(source)
        assert not cell.error, cell.error
        return cell

    def try_to_run(self, source: str) -> Cell:
        return self.finish(self.start(source))

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    @property
    def process_id(self) -> int:
        return self.manager.provisioner.pid
