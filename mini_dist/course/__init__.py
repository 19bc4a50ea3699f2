"""Room 8, course: what a learner, a teacher and a lab use; it may import every room below.

Begin with `lesson.py` (show, predict, reveal) and `check/` (the judge of the exercises). `draw/`
and `widgets/` make figures, `lab.py` and `sweep.py` run labs, `grade/` grades a class, `replay/`
plays a recorded run on another machine, and `elsewhere/` runs the other frameworks.
"""
