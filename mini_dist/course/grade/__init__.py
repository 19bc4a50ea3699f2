"""Grade a class: `python -m mini_dist.course.grade submissions/ --out grades/` (see __main__.py).

A submission is a program that somebody else wrote. Three processes share the work, and only the
first of them is believed:

* the grader (`__main__.py`) reads files and writes the reports. It runs nothing of a submission
  and unpickles nothing that comes from one.
* a notebook's run (`worker.py`, `collect.py`), in a sandbox: papermill runs all cells, and of each
  exercise the function that was given to `check` is kept, as a pickle. Whatever the notebook
  prints, redefines or writes says nothing about its grade.
* the judge (`judge.py`), in a second, fresh sandbox: it hands the pickle on to the ranks without
  opening it, and reads from them nothing but plain data.

What remains: a rank holds the function and the record of its messages in one process, so a
function written to falsify that record can. To paste `.solution()` is easier, and allowed.
"""
