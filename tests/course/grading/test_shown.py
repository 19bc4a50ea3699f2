"""A notebook's output is cut as it arrives, whatever kind of flood it is."""

import nbformat
import pytest

from mini_dist.course.grade import shown


class Manager:
    """A stand-in that has what papermill's client asks of its manager."""

    def __init__(self, nb):
        self.nb = nb

    def autosave_cell(self):
        pass


@pytest.fixture
def client():
    cells = [nbformat.v4.new_code_cell("1") for _ in range(8)]
    made = shown.Client(Manager(nbformat.v4.new_notebook(cells=cells)), kernel_name="python3")
    made.reset_execution_trackers()
    made.clear_before_next_output = False
    return made


def message(kind, content, **more):
    header = {"msg_type": kind, "msg_id": "1"}
    return {**header, "header": header, "content": content, "parent_header": header, **more}


def printed(text):
    return message("stream", {"name": "stdout", "text": text})


def displayed(data):
    return message("display_data", {"data": data, "metadata": {}})


def of_widgets(state, **more):
    about = {"comm_id": "1", "target_name": "jupyter.widget", "data": {"state": state}}
    return message("comm_open", about, **more)


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


FLOODS = {
    "80 MB in prints": [printed("x" * 200_000)] * 400,
    "small outputs": [displayed({"text/plain": ""})] * 200_000,
    "one line of 50 MB": [printed("x" * 50_000_000)],
    "escape sequences": [printed("\x1b[31m\x1b[2J" * 20_000)] * 400,
    "a huge image": [displayed({"image/png": "A" * 40_000_000})] * 3,
    "a deep one": [displayed({"application/json": nested(100_000)})],
    "a widget's state": [of_widgets({"x": "y" * 5_000_000})] * 3,
    "a widget's buffers": [of_widgets({}, buffers=[bytes(5_000_000)])] * 3,
    "an error's text": [
        message("error", {"ename": "E", "evalue": "x" * 9_000_000, "traceback": []})
    ],
}


def show(client, messages, index):
    for each in messages:
        client.process_message(each, client.nb.cells[index], index)
    return nbformat.writes(client.nb)


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_is_cut_and_says_so_once(client, name):
    text = show(client, FLOODS[name], 0)
    assert len(text) < 3 * shown.MOST_OF_A_CELL and text.count("The grader cut the output") == 1
    assert len(str(client.widget_state)) + len(str(client.widget_buffers)) < 1000
    assert "after it" in show(client, [printed("after it")], 1)  # other cells still show output


def test_what_a_line_begins_with_is_kept(client):
    show(client, [printed("0123456789" * 1_000_000)], 0)
    assert client.nb.cells[0].outputs[0].text.startswith("0123456789")


def test_a_notebook_has_a_limit_beside_that_of_each_cell(client):
    for index in range(8):
        text = show(client, [printed("x" * 3_000_000)] * 3, index)
    assert len(text) < 1.1 * shown.MOST_SHOWN


def test_what_the_course_shows_is_kept_whole(client):
    """Its largest notebook has half a million characters, including its code."""
    assert "The grader cut" not in show(client, [printed("x" * 100_000)] * 30, 0)
