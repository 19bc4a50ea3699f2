"""What a teacher takes into a workshop: slides of the lessons, and a script with the time.

    python tools/workshop.py half-day                     out/workshop/half-day/index.html
    python tools/workshop.py day --start 9:30
    python tools/workshop.py 12 13 --language zh          any lessons, in Chinese

A lesson's slides are made from its notebook: the first paragraph of each section of the core, its
pictures and formulas, the questions to predict, the cells with their outputs, the exercises, and
what to remember. Everything else of the lesson is in the speaker's notes (key S). The script gives
each section its minutes by tools/minutes.py, exercises theirs, and breaks.

Nothing is executed. The slides run in a browser without a network; `make workshop` gets reveal.js.
"""

import argparse
import html
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from markdown_it import MarkdownIt
from nbconvert import SlidesExporter

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]

from tools import build_notebooks as english  # noqa: E402
from tools import minutes, zh  # noqa: E402

PATHS = {"half-day": ["00", "02", "03"], "day": ["00", "02", "03", "05", "07", "12"]}
WITHOUT_BREAK = 80  # minutes
BREAK, LUNCH = 10, 45
NOON = 12 * 60
CODE_LINES = 16  # more are too small to read on a wall
NODE_MODULES = ROOT / "site/node_modules"
WORDS = {
    "en": dict(predict="Predict", turn="Your turn", remember="What to remember"),
    "zh": dict(predict="先猜一猜", turn="轮到你了", remember="要点"),
}


# ---- a lesson as sections ------------------------------------------------------------------------


@dataclass
class Section:
    """A part of a lesson below one heading: cells, and markdown of this part only."""

    title: str
    level: int
    cells: list = field(default_factory=list)

    def text(self):
        return "\n\n".join(c.source for c in self.cells if c.cell_type == "markdown")

    def source(self):
        """The section as a lesson's Markdown, for tools/minutes.py."""
        fences = {"markdown": "{}", "code": "```python\n{}\n```"}
        return "\n\n".join(fences[cell.cell_type].format(cell.source) for cell in self.cells)

    def exercises(self):
        return minutes.CHECKED.findall(self.source())


def sections_of(notebook):
    """The sections of a notebook's core, in order; the first is what stands below the title."""
    found, optional = [], None
    for cell in notebook.cells:
        parts = [cell.source]
        if cell.cell_type == "markdown":
            parts = re.split(r"(?m)^(?=#{1,6} )", cell.source)
        for part in parts:
            heading = cell.cell_type == "markdown" and re.match(r"(#+) (.+)\n?", part)
            if heading:
                level = len(heading[1])
                if optional is None or level <= optional:
                    optional = level if re.search(r"\(optional\)|（选读）", heading[2]) else None
                if optional is None:
                    found.append(Section(heading[2].strip(), level))
                part = part[heading.end() :]
            if optional is None and part.strip() and found:
                found[-1].cells.append(nbformat.from_dict({**cell, "source": part.strip()}))
    return found


def exercise_minutes(name):
    lines = minutes.solution_lines(name)
    return minutes.MINUTES_PER_EXERCISE + minutes.MINUTES_PER_SOLUTION_LINE * lines


# ---- slides --------------------------------------------------------------------------------------


def markdown(text, kind):
    cell = nbformat.v4.new_markdown_cell(text)
    cell.metadata["slideshow"] = {"slide_type": kind}
    return cell


def paragraphs(text):
    """Blocks of Markdown between blank lines, a display formula in one piece."""
    text = re.sub(r"\$\$.*?\$\$", lambda m: re.sub(r"\n\s*\n", "\n", m[0]), text, flags=re.S)
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


def is_shown(paragraph):
    """A picture, a formula or a table: what a teacher would put on the board."""
    return paragraph.startswith(("![", "$$", "|"))


def slides_of(lesson_sections, words):
    """The cells of a slide show: each section a column, its results below it."""
    for section in lesson_sections:
        kind = "slide" if section.level <= 2 else "subslide"
        blocks = paragraphs(section.text())
        if section.title == words["remember"]:
            body = re.split(r"\n\s*\*\*(?:Quiz|小测)", section.text())[0]
            yield markdown(f"## {section.title}\n\n{body}", kind)
            yield markdown(section.text()[len(body) :], "notes")
            return
        first = [b for b in blocks if not is_shown(b) and not b.startswith("*")][:1]
        first += [block for block in blocks if block.startswith("$$")][:2]
        board = [block for block in blocks if is_shown(block) and block not in first]
        yield markdown(f"{'#' * section.level} {section.title}\n\n" + "\n\n".join(first), kind)
        yield markdown("\n\n".join(b for b in blocks if b not in first + board), "notes")
        for block in board:
            yield markdown(block, "subslide")
        before = ""
        for cell in section.cells:
            if cell.cell_type == "markdown":
                before = paragraphs(cell.source)[-1]
            elif re.match(r"\s*predict\(", cell.source):
                if before not in first:
                    yield markdown(f"### {words['predict']}\n\n{before}", "subslide")
            else:
                yield from code_slide(cell, words)


def code_slide(cell, words):
    """A cell with its output; of an exercise the code to replace, without a verdict."""
    cell = nbformat.from_dict(cell)
    cell.metadata["slideshow"] = {"slide_type": "subslide"}
    if "YOUR TURN" in cell.source:
        cell.outputs = []
        yield markdown(f"### {words['turn']}", "subslide")
        cell.metadata["slideshow"] = {"slide_type": "-"}
        yield cell
    elif cell.outputs and "fold(" not in cell.source:
        lines = cell.source.splitlines()
        if len(lines) > CODE_LINES:
            cell.source = "\n".join(["# ...", *lines[-CODE_LINES + 1 :]])
        yield cell


def show_of(notebook, words):
    """The slide show of a notebook, as HTML that finds reveal.js and figures/ beside it."""
    show = nbformat.v4.new_notebook(metadata=notebook.metadata)
    show.cells = [*slides_of(sections_of(notebook), words)]
    exporter = SlidesExporter(
        template_name="slides",
        extra_template_basedirs=[str(ROOT / "site")],
        reveal_url_prefix="reveal.js",
        reveal_theme="white",
        exclude_input_prompt=True,
        exclude_output_prompt=True,
    )
    title = re.match(r"# (.+)", notebook.cells[0].source)[1]
    body, _ = exporter.from_notebook_node(show, {"metadata": {"name": title, "path": ""}})
    return re.sub(r'src="(\.\./)+lessons/figures/', 'src="figures/', body)


# ---- the script ----------------------------------------------------------------------------------


@dataclass
class Line:
    """A line of the script: what happens, and for how many minutes."""

    what: str
    minutes: float


def script_of(stem, notebook):
    """The lines of a lesson: its question to the class, sections to read and run, exercises."""
    outputs = minutes.shown_outputs(ROOT / "notebooks" / f"{stem}.ipynb")
    sections = sections_of(notebook)
    whole = []
    for section in sections:
        if section.level <= 2 or not whole:
            whole.append([section])
        else:
            whole[-1].append(section)
    for number, together in enumerate(whole):
        said = f"{together[0].title}: read and run"
        if number == 0:
            said = "the question; everybody writes a guess"
        time = sum(minutes.reading(section.source(), outputs) for section in together)
        yield Line(f"{stem[:2]}, {said}", time)
        for section in together:
            for name in section.exercises():
                yield Line(f"{stem[:2]}, exercise `{name}`", exercise_minutes(name))


def with_breaks(lines, start):
    """(minute of the day, line), with a break after at most WITHOUT_BREAK minutes of work, and
    lunch at noon. There is none if half of that is left to do, or less."""
    now, since, left = start, 0.0, sum(line.minutes for line in lines)
    lunch = start < NOON
    for line in lines:
        if since and since + line.minutes > WITHOUT_BREAK and left > WITHOUT_BREAK / 2:
            eats = lunch and now >= NOON - 30 and left > WITHOUT_BREAK
            yield now, Line("**lunch**", LUNCH) if eats else Line("**break**", BREAK)
            now, since, lunch = now + (LUNCH if eats else BREAK), 0.0, lunch and not eats
        yield now, line
        now, since, left = now + line.minutes, since + line.minutes, left - line.minutes
    yield now, Line("**end**", 0)


def clock(minute):
    hours, minutes_ = divmod(round(minute), 60)
    return f"{hours:02}:{minutes_:02}"


def asked(stem):
    """The question for the class and what to listen for, of TEACHING.md."""
    text = (ROOT / "TEACHING.md").read_text(encoding="utf-8")
    part = text.partition(f"\n### {stem[:2]} ")[2].partition("\n### ")[0]
    return "\n\n".join(re.findall(r"^\*\*(?:Ask|Listen for):\*\*.*", part, re.M))


def index_of(name, chosen, notebooks, start):
    """The teacher's page, in Markdown: the slides, the script, questions, what to prepare."""
    lines = [line for stem in chosen for line in script_of(stem, notebooks[stem])]
    rows = [
        f"| {clock(at)} | {line.minutes:.0f} | {line.what} |"
        for at, line in with_breaks(lines, start)
    ]
    total = sum(line.minutes for line in lines)
    labs = sorted(
        path.stem
        for path in (ROOT / "lessons/labs").glob("*.md")
        if (after := re.search(r"after \[lesson (\d\d)\]", path.read_text(encoding="utf-8")))
        and after[1] in {stem[:2] for stem in chosen}
    )
    return "\n\n".join(
        [
            f"# {name}",
            f"{total / 60:.1f} hours of work without breaks. The minutes are those of "
            "`tools/minutes.py`: what a reader needs alone. If a section ends early, discuss the "
            "guesses; if it ends late, leave its last exercise as homework.",
            "## Slides",
            "\n".join(
                f"* [{stem[:2]} {re.match('# [0-9]+ (.+)', notebooks[stem].cells[0].source)[1]}]"
                f"({stem}.html)"
                for stem in chosen
            ),
            "Right goes to the next section, down to what belongs to this one. S opens the notes, "
            "F fills the screen, and `?print-pdf` after the address makes pages to print.",
            "## The day before",
            "* Everybody runs `make lab` once, which downloads the packages, and then the first "
            "cell of lesson 00.\n* `mini-dist doctor` says what a machine lacks.",
            "## Script",
            "| time | minutes | what |\n| --- | --- | --- |\n" + "\n".join(rows),
            "## Questions for the class",
            "\n\n".join(f"### {stem[:2]}\n\n{asked(stem)}" for stem in chosen),
            "## Afterwards",
            "Labs that fit, for homework: " + (", ".join(labs) or "none") + ".",
            "Put what the learners handed in into one folder. These commands grade it and make a "
            "certificate for everyone whose exercises are right:",
            "```console\nmini-dist grade submissions/ --out grades/\n"
            "mini-dist certificate grades/grades.csv --course "
            f'"{name}"\n```',
        ]
    )


PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width"><style>
body {{ font: 17px/1.5 sans-serif; max-width: 46em; margin: 2em auto; padding: 0 1em }}
td, th {{ padding: .2em .8em; text-align: left; border-bottom: 1px solid #8886 }}
:root {{ color-scheme: light dark }} pre {{ overflow: auto; background: #8882; padding: .6em }}
</style>
{body}
"""


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="+", help=f"{' or '.join(PATHS)}, or numbers of lessons")
    parser.add_argument("--start", default="9:00", help="when the class begins (9:00)")
    parser.add_argument("--language", choices=list(WORDS), default="en", help="of the slides")
    parser.add_argument("--out", type=Path, default=ROOT / "out/workshop")
    options = parser.parse_args(argv)
    numbers = [number for each in options.what for number in PATHS.get(each, [each])]
    stems = {lesson.stem[:2]: lesson.stem for lesson in english.lessons(ROOT)}
    if wrong := [number for number in numbers if number not in stems]:
        parser.error(f"no lesson {', '.join(wrong)}; a path is {' or '.join(PATHS)}")
    if not (match := re.fullmatch(r"(\d\d?):(\d\d)", options.start)):
        parser.error(f"--start {options.start}: expected a time of day such as 9:00")
    if not (NODE_MODULES / "reveal.js").is_dir():
        parser.error("reveal.js is not here: make site-tools")
    chosen = [stems[number] for number in numbers]
    notebooks = {stem: zh.notebook_in(ROOT / "notebooks" / f"{stem}.ipynb") for stem in chosen}
    shown = notebooks
    if options.language == "zh":
        of = {stem: ROOT / "lessons" / f"{stem}.md" for stem in chosen}
        shown = {stem: zh.notebook_in(zh.notebook_of(of[stem])) for stem in chosen}
    name = "-".join(options.what)
    folder = options.out / name
    folder.mkdir(parents=True, exist_ok=True)
    for stem, notebook in shown.items():
        page = show_of(notebook, WORDS[options.language])
        (folder / f"{stem}.html").write_text(page, encoding="utf-8")
        for figure in re.findall(r'src="(figures/[^"]+)"', page):
            (folder / figure).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "lessons" / figure, folder / figure)
    shutil.copytree(NODE_MODULES / "reveal.js/dist", folder / "reveal.js/dist", dirs_exist_ok=True)
    (folder / "mathjax").mkdir(exist_ok=True)
    shutil.copy(NODE_MODULES / "mathjax/es5/tex-svg.js", folder / "mathjax")
    start = 60 * int(match[1]) + int(match[2])
    text = index_of(name, chosen, notebooks, start)
    (folder / "script.md").write_text(text + "\n", encoding="utf-8")
    body = MarkdownIt("commonmark").enable("table").render(text)
    (folder / "index.html").write_text(PAGE.format(title=html.escape(name), body=body), "utf-8")
    print(f"written: {folder / 'index.html'}")


if __name__ == "__main__":
    main()
