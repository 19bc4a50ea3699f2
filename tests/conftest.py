"""One thread a test process: two workers and their ranks share two cores already.

A second thread waits for its turn by spinning: tests/serving/test_serving.py took 22 s of CPU time
with one thread and more than 137 s with two, on two cores that others used as well. (Ranks have
one thread in any case, and notebooks run as their readers run them.)
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, so before the tests
