"""Give each test process one thread: two workers and their ranks already share two cores.

A second thread spins while it waits: tests/serving/test_serving.py took 22 s of CPU time with one
thread and more than 137 s with two, on two cores that other processes used as well. (Ranks always
have one thread, and notebooks run as their readers run them.)
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it on import, before the tests
