"""show, predict and reveal: the helpers that a lesson's cells call."""

import functools
import os

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import mini_dist.plan.config
from mini_dist.course import learner, lesson
from mini_dist.course.lesson import bar, calm, predict, raises, reveal, show, show_diff


@pytest.fixture(autouse=True)
def fresh_guesses(monkeypatch):
    monkeypatch.setattr(lesson, "_guesses", {})


def run_in_a_notebook(*cells):
    """Run the cells in a real kernel; return the outputs of the last one."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    NotebookClient(notebook, timeout=60, store_widget_state=False).execute()
    return notebook.cells[-1].outputs


# ---- show ----------------------------------------------------------------------------------------


def test_show_prints_the_whole_source_of_what_it_is_given(capsys):
    show(reveal)
    printed = capsys.readouterr().out
    assert printed.startswith("# mini_dist/course/lesson.py\ndef reveal(name")
    assert printed.rstrip().endswith("print(said(line))")


def test_show_takes_classes_methods_modules_and_several_at_once(capsys):
    show(mini_dist.plan.config.ModelConfig, torch.nn.Linear.forward, mini_dist.plan.config)
    printed = capsys.readouterr().out
    assert "class ModelConfig" in printed
    assert "# torch/nn/modules/linear.py\ndef forward(self" in printed  # a method, dedented
    assert printed.count("class ModelConfig") == 2  # alone, and in its module


def test_show_looks_under_decorators_partials_properties_and_instances(capsys):
    @functools.wraps(predict)
    def wrapper(*args):
        return predict(*args)

    class Named:
        @property
        def name(self):
            return "the property's body"

    for thing in (wrapper, functools.partial(predict, "n")):
        show(thing)
        assert "def predict(name" in capsys.readouterr().out
    show(Named.name)
    assert "the property's body" in capsys.readouterr().out
    show(torch.nn.Linear(2, 2))
    assert "class Linear(Module)" in capsys.readouterr().out


def test_show_never_prints_a_path_of_this_machine(capsys):
    show(reveal, torch.nn.Linear, functools.wraps, pytest.fixture)
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("# ") and line.endswith(".py"):
            assert not line.startswith("# /")


def test_show_says_so_when_there_is_no_python_source():
    with pytest.raises(TypeError, match=r"written in Python.*no source"):
        show(len)


def test_show_in_a_notebook_is_highlighted_and_knows_functions_and_classes_of_cells():
    outputs = run_in_a_notebook(
        "from mini_dist.course.lesson import show, predict",
        "class Point:\n    x = 'old'",
        "%cd -q .\nimport dataclasses\n@dataclasses.dataclass\nclass Point:\n    x: int",
        "def mine(rank):\n    return '```'\nshow(predict, mine, Point)",
    )
    shown = [output.data["text/markdown"] for output in outputs]
    # nbconvert's output takes its code font from this div.
    before, after = '<div style="font-family: monospace">\n\n', "\n\n</div>"
    assert all(text.startswith(before) and text.endswith(after) for text in shown)
    library, function, cls = (text[len(before) : -len(after)] for text in shown)
    assert library.startswith("`mini_dist/course/lesson.py`\n```python\ndef predict(")
    assert function == "`this notebook`\n``````python\ndef mine(rank):\n    return '```'\n``````"
    assert (
        cls == "`this notebook`\n```python\n@dataclasses.dataclass\nclass Point:\n    x: int\n```"
    )


# ---- predict, reveal -----------------------------------------------------------------------------


def test_without_a_guess_only_the_measurement_is_printed(capsys):
    predict("bytes sent")
    reveal("bytes sent", 1536, "bytes")
    assert capsys.readouterr().out == "bytes sent: measured 1,536 bytes\n"


@pytest.mark.parametrize(
    "guess, measured, verdict",
    [
        (1536, 1536, "exactly right"),
        (1540, 1536, "right within 1 %"),
        (1200, 1600, "25 % too low"),
        (2000, 1600, "25 % too high"),
        (400, 1600, "4 times too low"),
        (6400, 1600.0, "4 times too high"),
        (3, 0, "off by 3"),
        (0, 3, "off by -3"),
        (-2, 2, "off by -4"),
        ("a lot", 3, "expected a number, not 'a lot'"),
        ("Yes ", "yes", "right"),
        (True, False, "not this time"),
        (True, True, "right"),
        (0.5, torch.tensor(0.25), "2 times too high"),
        ("3/4", 0.75, "exactly right"),
        (" 3 / 19", 0.1579, "right within 1 %"),
        ("15.8 %", 0.1579, "right within 1 %"),
        ("0.3", 0.6, "2 times too low"),
        ("3/0", 3, "expected a number, not '3/0'"),
        ("%", 3, "expected a number, not '%'"),
        ("3/4", "0.75", "not this time"),  # If the answer is text, only text counts.
    ],
)
def test_a_guess_is_printed_beside_the_measurement_with_how_far_off(
    guess, measured, verdict, capsys
):
    predict("it", guess)
    reveal("it", measured)
    assert capsys.readouterr().out.rstrip().endswith(f": {verdict}")


def test_a_guess_in_percent_is_a_share_unless_percent_was_asked_for(capsys):
    for name, measured, unit in [
        ("idle share", 0.25, ""),
        ("idle", 25, "%"),
        ("idle share, %", 25, ""),
    ]:
        predict(name, "25 %")
        reveal(name, measured, unit)
        assert capsys.readouterr().out.endswith(": exactly right\n")


def test_a_number_that_was_not_measured_is_not_called_so(capsys):
    predict("years", 10)
    reveal("years", 32, "years", how="computed")
    assert capsys.readouterr().out.endswith(
        "years: computed 32 years, your guess 10 years: 3.2 times too low\n"
    )


def test_the_last_guess_counts(capsys):
    predict("it", 1)
    predict("it", 2)
    reveal("it", 2)
    assert "your guess 2: exactly right" in capsys.readouterr().out


def test_reveal_names_the_nearest_prediction():
    predict("bytes sent", 1)
    with pytest.raises(ValueError, match="did you mean 'bytes sent'"):
        reveal("byte sent", 1)
    with pytest.raises(ValueError, match="run its predict"):
        reveal("rounds", 1)


# ---- fold ----------------------------------------------------------------------------------------


def test_a_folded_answer_opens_on_the_page_and_is_plain_text_elsewhere(capsys):
    (output,) = run_in_a_notebook(
        "from mini_dist.course.lesson import fold",
        "n = 16\nfold('Answer', f'{n} bytes < 1 kB', 'and more')",
    )
    assert output.data["text/html"] == (
        "<details><summary>Answer</summary><p>16 bytes &lt; 1 kB</p><p>and more</p></details>"
    )
    assert output.data["text/plain"] == "Answer\n16 bytes < 1 kB\nand more"
    lesson.fold("Answer", "16 bytes")
    assert capsys.readouterr().out == "Answer\n16 bytes\n"


class Old:
    def kept(self):
        return 1

    def replaced(self):
        first = 1
        return first


class New(Old):
    def kept(self):
        return super().kept() + 1

    def replaced(self):
        first = 2
        return first


def test_show_diff_shows_what_a_class_replaces_and_what_it_adds(capsys):
    show_diff(Old, New)
    assert capsys.readouterr().out.splitlines() == [
        "# Old -> New",
        "+ def kept(self):",
        "+     return super().kept() + 1",
        "",
        "  def replaced(self):",
        "-     first = 1",
        "+     first = 2",
        "      return first",
        "",
    ]


# ---- raises --------------------------------------------------------------------------------------


def test_raises_shows_the_error_and_goes_on(capsys):
    with raises(ValueError):
        print("before it")
        raise ValueError("bad data\nin this shard")
    shown = capsys.readouterr()
    assert shown.out == "before it\n"
    assert shown.err == "ValueError: bad data\nin this shard\n"


def test_raises_shows_an_error_as_the_cell_would_and_is_no_failure_of_the_notebook():
    run = "from mini_dist import RankError, launch\nfrom mini_dist.course.lesson import raises\n"
    run += "def crash(group):\n    raise ValueError('bad data')\n"
    [shown] = run_in_a_notebook(run, "with raises(RankError):\n    launch(crash, 2)")
    assert (shown.output_type, shown.name) == ("stream", "stderr")
    with pytest.raises(CellExecutionError) as ended:
        run_in_a_notebook(run, "with raises(OSError):\n    launch(crash, 2)")
    assert shown.text.strip() in str(ended.value)  # word for word


def test_raises_lets_another_error_pass_and_takes_an_interrupt_only_when_it_is_the_one():
    with pytest.raises(ZeroDivisionError), raises(ValueError):
        raise ZeroDivisionError
    with pytest.raises(KeyboardInterrupt), raises(RuntimeError):
        raise KeyboardInterrupt
    with raises(KeyboardInterrupt):
        raise KeyboardInterrupt


def test_raises_says_that_nothing_was_raised_and_spares_a_learner_who_has_mended_it(capsys):
    with raises(ValueError):
        pass
    assert capsys.readouterr().out == "ValueError was expected here, but nothing was raised.\n"


# ---- calm ----------------------------------------------------------------------------------------


def test_calm_speaks_only_where_the_rule_is_broken(capsys):
    calm(True, "the longest is below 3 medians")
    assert capsys.readouterr().out == ""
    calm(False, "the longest is below 3 medians")
    assert "the longest is below 3 medians does not hold" in capsys.readouterr().out


# ---- long cells ----------------------------------------------------------------------------------

LONG = """
import time
from mini_dist.course import lesson
from mini_dist.course.lesson import bar
lesson.Clock.PATIENCE = 0.2
lines, write = [], lesson.LineBelow.write

def noting(line, text):
    lines.append(text)
    write(line, text)

lesson.LineBelow.write = noting
"""
SLEEPS = "lines.clear()\ntime.sleep(1.5)\nprint('done')"
GOES_ON = "lines.clear()\nfor n in bar(range(3)):\n    time.sleep(0.4)\nprint('done')"
QUICK = "print('done')"
LINES = "print(lines)"


def outputs_of(environment, *cells):
    """Run the cells in a new kernel; return the texts of each cell's outputs."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    client = NotebookClient(notebook, timeout=60, store_widget_state=False)
    kept = {k: v for k, v in os.environ.items() if k not in learner.AUTOMATIC}
    client.execute(env=kept | environment, cleanup_kc=True)
    return [
        [o.text if o.output_type == "stream" else o.data["text/plain"] for o in cell.outputs]
        for cell in notebook.cells
    ]


def test_a_long_cell_shows_its_time_and_a_long_loop_a_bar_to_a_person():
    """Each in an output of its own, which is empty when the cell is done."""
    _, slept, clock, went_on, bars, quick = outputs_of(
        {"JPY_SESSION_NAME": "/course/work/07_zero.ipynb"},
        *(LONG, SLEEPS, LINES, GOES_ON, LINES, QUICK),
    )
    assert slept == ["", "done\n"] and sorted(went_on) == ["", "done\n"] and quick == ["done\n"]
    assert "This cell has been running for 1 s." in clock[0]
    assert "| 2/3 [" in bars[0] and "been running" not in bars[0]


@pytest.mark.parametrize("more", [{}, {"CI": "1", "JPY_SESSION_NAME": "/course/07_zero.ipynb"}])
def test_a_machine_sees_no_bar(more):
    _, *shown = outputs_of(more, LONG, SLEEPS, GOES_ON)
    assert shown == [["done\n"]] * 2


def test_outside_a_notebook_there_is_none_either(capsys):
    assert [*bar(range(3))] == [0, 1, 2]
    assert capsys.readouterr() == ("", "")
