"""Grade what a class has handed in.

    mini-dist grade submissions/ --out grades/

submissions/ is a folder, or a zip, with one entry for each learner: a notebook, a folder or a zip,
of any name. Every notebook runs in a sandbox, by papermill, with limits on time, memory, files and
processes; its answers are judged in another one. grades/ gets grades.csv, index.html, and for each
learner a page and the executed notebooks. A grading that was interrupted goes on when it is started
again; what was changed, or fell to a limit that was changed, is graded anew.

Exit status: 0 if all was graded, 2 if it cannot be, 130 if interrupted. For nbgrader instead:

    python -m mini_dist.course.grade.nbgrader --help
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .. import working_copy
from . import sandbox
from .alike import normalised
from .grading import Record, fingerprint, grade
from .printable import printable
from .report import alike, folder_of, overview, page, score, write_csv
from .sandbox import Limits, Slot
from .submissions import Lesson, find, lessons

CORES_A_NOTEBOOK = 2


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="mini-dist grade",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("submissions", type=Path)
    parser.add_argument("--out", type=Path, default=Path("grades"))
    parser.add_argument("--lessons", help="the lessons that count, as 02,03 (those handed in)")
    parser.add_argument("--learner", default="", help="regular expression: who it is, in a path")
    parser.add_argument("--jobs", type=int, help="notebooks at a time (a half of the cores)")
    parser.add_argument("--cell", type=float, default=60, help="seconds a cell may take (60)")
    parser.add_argument("--timeout", type=float, default=600, help="and a notebook (600)")
    parser.add_argument("--memory", type=float, default=6, help="GB a notebook may take (6)")
    parser.add_argument("--disk", type=float, default=0.5, help="GB it may write (0.5)")
    parser.add_argument("--fresh", action="store_true", help="grade also what is graded")
    parser.add_argument(
        "--without-sandbox",
        action="store_true",
        help="run notebooks as yourself where the system gives no sandbox",
    )
    options = parser.parse_args(argv)
    memory, disk = (int(gb * 2**30) for gb in (options.memory, options.disk))
    limits = Limits(options.timeout, options.cell, memory, disk)
    try:
        known = lessons(working_copy.NOTEBOOKS)
        submissions = find(options.submissions, options.learner)
        if not submissions:
            raise ValueError(f"{options.submissions} is empty: give what the learners handed in")
        counted = chosen(known, options.lessons)
        apart = may_run(options.without_sandbox)
    except (ValueError, OSError) as error:
        parser.error(printable(error))  # exit status 2
    folders, taken = {}, {}
    for submission in submissions:
        folders[submission.learner] = folder_of(submission.learner, taken)
    records, todo = {}, []
    for submission in submissions:
        before = Record.read(options.out / folders[submission.learner] / "grade.json")
        now = fingerprint(submission, limits)
        if before and before.fingerprint == now and not options.fresh:
            records[submission.learner] = before
        else:
            todo.append(submission)
    if records:
        print(f"{len(records)} of {len(submissions)} were graded before")
    how = dict(limits=limits, apart=apart)
    finished = grade_all(todo, options, folders, records, known, how)
    found = [records[s.learner] for s in submissions if s.learner in records]
    seen = {notebook.lesson for record in found for notebook in record.notebooks}
    counted = counted or [lesson for lesson in known if lesson.stem in seen]
    write(options.out, found, counted, folders)
    for record in found:
        right, of = score(record, counted)
        print(f"{right:3} of {of}  {printable(record.learner)}")
    print(f"written: {options.out / 'grades.csv'}, {options.out / 'index.html'}")
    if not finished:
        print("interrupted: the same command goes on from here")
    return 0 if finished else 130


def chosen(known: list[Lesson], numbers: str | None) -> list[Lesson]:
    wanted = numbers.split(",") if numbers else []
    for number in wanted:
        if not any(lesson.stem.startswith(number) for lesson in known):
            raise ValueError(f"there is no lesson {number}: give numbers such as 02,03")
    return [lesson for lesson in known if lesson.stem.startswith(tuple(wanted))] if wanted else []


def may_run(without_sandbox: bool) -> bool:
    """Whether there is a sandbox. ValueError if there is none and nobody said that this may be."""
    why = sandbox.why_not_apart()
    if not why:
        return True
    told = (
        f"There is no sandbox here ({why}): a notebook could read, change and delete your files, "
        "use your network, and edit this course while it is judged. "
    )
    if not without_sandbox:
        raise ValueError(
            told + "Grade in a container or virtual machine, or say --without-sandbox."
        )
    print(told + sandbox.limited_without_one())
    return False


def grade_all(
    todo: list, options, folders: dict, records: dict, known: list[Lesson], how: dict
) -> bool:
    """Grade these submissions, some at a time, each on cores of its own; False if interrupted."""
    from tqdm import tqdm

    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    jobs = options.jobs or max(1, (len(cores) or os.cpu_count() or 1) // CORES_A_NOTEBOOK)
    stop = threading.Event()
    shares = [cores[job::jobs] if jobs <= len(cores) else [] for job in range(jobs)]
    slots = [Slot(cores=share, stop=stop, **how) for share in shares]
    free: queue.Queue = queue.Queue()
    for slot in slots:
        free.put(slot)
    total = sum(len(submission.notebooks) for submission in todo)

    def one(submission) -> None:
        if stop.is_set():
            return
        slot = free.get()
        folder = options.out / folders[submission.learner]
        try:
            record = grade(submission, known, folder, slot, done=lambda path: bar.update())
            if not stop.is_set():
                record.write(folder / "grade.json")
                records[submission.learner] = record
        except Exception as error:  # of one learner; the others are graded. (No record is kept.)
            why = f"the grader failed: {type(error).__name__}: {error}"
            records[submission.learner] = Record(submission.learner, "", problems=[why])
        finally:
            free.put(slot)

    def interrupt(number, frame) -> None:
        stop.set()

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, interrupt) if in_main else None
    try:
        with tqdm(total=total, unit="notebook") as bar, ThreadPoolExecutor(jobs) as pool:
            for future in [pool.submit(one, submission) for submission in todo]:
                future.result()
    finally:
        for slot in slots:
            slot.close()
        if in_main:
            signal.signal(signal.SIGINT, before)
    return not stop.is_set()


def write(out: Path, records: list[Record], counted: list[Lesson], folders: dict) -> None:
    from ..check import exercises

    names = [name for lesson in counted for name in lesson.functions]
    printed = {name: normalised(exercises()[name].answer()) for name in names}
    same = alike(records, printed)
    out.mkdir(parents=True, exist_ok=True)
    for record in records:
        path = out / folders[record.learner] / "index.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(record, counted), encoding="utf-8")
    write_csv(out / "grades.csv", records, counted, same)
    told = overview(records, counted, folders, same)
    (out / "index.html").write_text(told, encoding="utf-8")


if __name__ == "__main__":
    os.umask(0o077)  # grades are the teacher's: folders of 0700, files of 0600
    sys.exit(main())
