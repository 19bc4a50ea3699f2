"""Run a notebook by papermill and keep a bounded part of what it shows.

papermill keeps all that a kernel sends, however much it is. This engine counts it while it comes in
and leaves out what is beyond MOST_OF_A_CELL and MOST_SHOWN.
"""

from __future__ import annotations

import json

import nbformat
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, papermill_engines

# Letters of a cell and of a notebook. The course's own notebooks show half a million at most.
MOST_OF_A_CELL, MOST_SHOWN = 4_000_000, 16_000_000
OF_AN_OUTPUT = 1000  # letters that each output counts besides, so that a million empty ones are cut
CUT = "\n[The grader cut the output here: it is too long.]\n"
SHOWS = ("stream", "display_data", "execute_result", "update_display_data", "error")
SHOWS += ("comm_open", "comm_msg")  # (widgets, whose state is saved with the notebook)


class Client(PapermillNotebookClient):
    """papermill's client of a kernel, with a limit on what is shown."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.left, self.left_of_cell = MOST_SHOWN, {}

    def process_message(self, msg, cell, cell_index):
        if msg["msg_type"] not in SHOWS:
            return super().process_message(msg, cell, cell_index)
        left = min(self.left, self.left_of_cell.get(cell_index, MOST_OF_A_CELL))
        if left < 0:
            return None
        size = OF_AN_OUTPUT + size_of(msg["content"]) + sum(map(len, msg.get("buffers", ())))
        self.left_of_cell[cell_index], self.left = left - size, self.left - min(size, left)
        if size <= left:
            return super().process_message(msg, cell, cell_index)
        begins = msg["content"]["text"][:left] if msg["msg_type"] == "stream" else ""
        cell.outputs.append(nbformat.v4.new_output("stream", text=begins + CUT))
        return None


def size_of(content: dict) -> int:
    """Return how many letters a message has, and more than any limit for one that is too deep."""
    try:
        return len(json.dumps(content, default=str))
    except (RecursionError, ValueError):
        return MOST_SHOWN + 1


class Bounded(Engine):
    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, *, km, execution_timeout, **_):
        """Run all cells with this kernel manager, also after a cell that ended in an error."""
        how = dict(kernel_name=kernel_name, timeout=execution_timeout, startup_timeout=60)
        return Client(nb_man, km=km, allow_errors=True, interrupt_on_timeout=True, **how).execute()


papermill_engines.register("bounded", Bounded)
