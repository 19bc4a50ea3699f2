"""docs/cluster: one training as a plain script and under torchrun with restarts; files parse."""

import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "docs/cluster"
LESSON = ROOT / "lessons/16_keep_it_running.md"
pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(sys.platform != "linux", reason="gloo runs over Linux's lo"),
]

SAID = re.compile(r"^(?:\d+ ranks, from step \d+|step \d+: loss [\d.]+|rank \d+ kills .*)$", re.M)


def run(command, timeout=120, **environment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


def alike(ours, theirs):
    """Check that the lines are the same, with losses equal up to differences between CPUs."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        words, loss = one.partition(": loss ")[::2]
        their_words, their_loss = other.partition(": loss ")[::2]
        assert words == their_words
        if loss:
            assert float(loss) == pytest.approx(float(their_loss), abs=2e-3)


def on_two_hosts(*arguments, nodes="2", conf=""):
    """Return the README's command: torchrun on each of two hosts, with one rank per host."""
    return [
        *(sys.executable, "docs/cluster/on_hosts.py", "--", sys.executable, "-m"),
        *("torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29500", "--rdzv-id", "test"),
        *("--rdzv-conf", "is_host={is_first}" + conf, "--local-addr", "{address}"),
        *arguments,
    ]


def skip_without_hosts(said):
    if "no hosts on this machine" in said:
        pytest.skip(said.strip())


def shown_in_the_lesson():
    (block,) = re.findall(r"```console\n(\$ TORCH_.*?)```", LESSON.read_text(), re.DOTALL)
    return SAID.findall(block)


def test_torchrun_restarts_a_killed_rank_and_the_losses_are_those_of_the_lesson(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    done = run(
        [
            *(*torchrun, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"),
            *("docs/cluster/train.py", "--ranks", "2", "--directory", str(tmp_path)),
            *("--kill", "7"),
        ],
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        GLOO_SOCKET_IFNAME="lo",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = SAID.findall(done.stdout)
    assert sum("kills itself" in line for line in said) == 1
    twice = [line for line in said if line.startswith("step 6:")]
    assert len(twice) == 2 and len(set(twice)) == 1  # Every printed digit is the same.
    alike(said, shown_in_the_lesson())


def test_between_two_hosts_torchrun_restarts_both_and_the_losses_are_the_same(tmp_path):
    """Run the README's command on real hosts (lesson 26). The rank that dies is on host 1."""
    script = "docs/cluster/train.py", "--ranks", "2", "--directory", str(tmp_path), "--kill", "7"
    command = on_two_hosts("--max-restarts", "1", *script)
    done = run(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    skip_without_hosts(done.stderr)
    assert done.returncode == 0, done.stderr[-2000:]
    alike(sorted(SAID.findall(done.stdout)), sorted(shown_in_the_lesson()))


@pytest.mark.skipif(not (ROOT / "ladder").exists(), reason="this checkout has no ladder")
def test_a_rung_of_the_ladder_trains_between_two_hosts():
    done = run(on_two_hosts("ladder/06_zero3.py"))
    skip_without_hosts(done.stderr)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = re.findall(r"^step \d+  loss ([\d.]+)  one process ([\d.]+)$", done.stdout, re.M)
    assert len(losses) == 10
    for ours, theirs in losses:
        assert float(ours) == pytest.approx(float(theirs), abs=1e-5)


def test_a_host_that_fails_ends_the_others_and_is_named():
    command = "test {host} = 0 && exec sleep 600; exit 3"
    done = run(
        [sys.executable, "docs/cluster/on_hosts.py", "--hosts", "3", "--", "sh", "-c", command]
    )
    skip_without_hosts(done.stderr)
    assert done.returncode == 3
    assert re.search(r"host [12]: the command ended with status 3", done.stderr)


def test_nothing_is_left_on_a_host_whose_command_fails(tmp_path):
    """An orphaned process in a session of its own, like a rank of torchrun, is killed too."""
    pids = tmp_path / "{host}"
    command = f"setsid sleep 600 & echo $! > {pids}; test {{host}} = 1 || wait; sleep 1; exit 3"
    done = run([sys.executable, "docs/cluster/on_hosts.py", "--", "sh", "-c", command])
    skip_without_hosts(done.stderr)
    assert done.returncode == 3
    for host in "01":
        pid = int((tmp_path / host).read_text())
        psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=60)
        assert not psutil.pid_exists(pid)


SILENT = r"host 1 \(rank 1, 10\.77\.0\.2\) has not answered for (\d+) s\. Its cable is pulled"


def test_torchrun_goes_on_without_the_host_whose_cable_is_pulled(tmp_path, request):
    if not request.config.getoption("--long"):
        pytest.skip("with --long")
    script = "docs/cluster/train.py", "--steps", "200", "--every", "10"
    script = *script, "--directory", str(tmp_path / "run")
    conf = ",last_call_timeout=2"  # seconds before it continues with one node
    command = on_two_hosts("--max-restarts", "3", *script, nodes="1:2", conf=conf)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    log = tmp_path / "log"
    with open(log, "w") as out:
        hosts = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
    deadline = time.monotonic() + 180
    try:
        while "step 30:" not in log.read_text():
            if hosts.poll():
                skip_without_hosts(log.read_text())
            assert hosts.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.1)
        hosts.send_signal(signal.SIGUSR1)
        assert hosts.wait(timeout=240) == 0, log.read_text()[-3000:]
    finally:
        hosts.terminate()
        hosts.wait()
    said = log.read_text()
    assert "2 ranks, from step 0" in said
    assert re.search(rf"^RankError: rank 0 of 2 \(host 0\): {SILENT}", said, re.M)
    (first,) = re.findall(r"^1 ranks, from step (\d+)$", said, re.M)
    assert int(first) >= 20 and int(first) % 10 == 0 and "step 199: loss" in said


GOES_ON = """
import time
from mini_dist import launch

def goes_on(group):
    if group.rank() == 1:
        time.sleep(600)
    group.barrier().wait()

launch(goes_on, 2, timeout=20)
"""


def test_the_deadline_of_a_launch_ends_a_job_of_torchrun(tmp_path):
    """tests/ranks/test_torchrun.py has other faults and runs without torchrun."""
    (tmp_path / "goes_on.py").write_text(GOES_ON)
    done = run(on_two_hosts(str(tmp_path / "goes_on.py")), timeout=300)
    skip_without_hosts(done.stderr)
    assert done.returncode == 1
    for rank, waits in enumerate((r"barrier .* with rank 1 began [\d.]+ s ago", "It waits for no")):
        late = rf"rank {rank} of 2 \(host {rank}\): not done after 20 s, the timeout of this launch"
        assert re.search(rf"^RankTimeout: {late}\. {waits}", done.stderr, re.M), done.stderr


def test_a_port_in_use_is_said_by_torchrun(request):
    """The error comes from the host that runs the rendezvous."""
    if not request.config.getoption("--long"):
        pytest.skip("with --long")
    taken = "import socket; s = socket.create_server(('', 29500))"
    torchrun = (
        "import runpy, sys; sys.argv[1:] = ['--nnodes', '2', '--nproc-per-node', '1', "
        "'--rdzv-backend', 'c10d', '--rdzv-endpoint', '10.77.0.1:29500', '--rdzv-conf', "
        "'is_host=1', 'docs/cluster/train.py']; "
        "runpy.run_module('torch.distributed.run', run_name='__main__')"
    )
    code = f"{taken}; {torchrun}"
    on_hosts = [sys.executable, "docs/cluster/on_hosts.py", "--hosts", "1", "--"]
    done = run([*on_hosts, sys.executable, "-c", code])
    skip_without_hosts(done.stderr)
    assert done.returncode != 0
    assert re.search(r"29500.*EADDRINUSE", done.stderr)
    assert "host 0: the command ended" in done.stderr


def run_with_ray(*arguments):
    """Run with a Python that has Ray, this one or $MINI_DIST_RAY; skip if there is none."""
    if not (find_spec("ray") or "MINI_DIST_RAY" in os.environ):
        pytest.skip("Ray is not installed: pip install ray, or name a Python in MINI_DIST_RAY")
    python = os.environ.get("MINI_DIST_RAY", sys.executable)
    for _ in range(3):  # On a busy machine, Ray's own processes may miss their 30 s limit.
        done = run([python, *arguments], timeout=400)
        if "node timed out during startup" not in done.stderr:
            return done
    pytest.fail(done.stderr[-2000:])


def test_ranks_as_ray_actors_and_one_of_them_dies():
    done = run_with_ray("docs/cluster/on_ray.py")
    # Ray's raylet also reports the death here, sometimes in the last line.
    said = [line for line in done.stdout.splitlines() if "(raylet)" not in line]
    assert said[0] == "ring 10.0 24,000 bytes sent", done.stderr[-2000:]
    assert re.fullmatch(r"zero_3 \[5\.55.*\] 4,430,592 bytes sent", said[1])
    # Ray reports what it hears of first: the death, or a neighbor's lost connection.
    assert re.fullmatch(r"a rank was killed: (ActorDiedError|RayTaskError.*)", said[-1])


A_NODE_OF_TWO = """
import os, sys, threading, time
import ray, torch
from ray.cluster_utils import Cluster
sys.path.insert(0, "docs/cluster")

def goes_on(folder, group):
    from mini_dist.collectives import ring_all_reduce
    for step in range(100_000):
        ring_all_reduce(torch.ones(1000), group)
        if step == 3:
            open(f"{folder}/{group.rank()}", "w").close()

def sleeps(group):
    from mini_dist.collectives import ring_all_reduce
    if group.rank() == 1:
        time.sleep(600)
    ring_all_reduce(torch.ones(1000), group)

def lose(node, folder):
    while len(os.listdir(folder)) < 2:
        time.sleep(0.1)
    cluster.remove_node(node, allow_graceful=False)

from on_ray import launch_on_ray
cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=1, include_dashboard=False))
second = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
try:
    launch_on_ray(sleeps, 2, strategy="STRICT_SPREAD", timeout=5)
except TimeoutError as error:
    print("late:", error, flush=True)
threading.Thread(target=lose, args=(second, sys.argv[1]), daemon=True).start()
try:
    launch_on_ray(goes_on, 2, (sys.argv[1],), strategy="STRICT_SPREAD", timeout=300)
except ray.exceptions.RayError as error:
    print("a node was lost:", type(error).__name__, flush=True)
ray.shutdown()
cluster.shutdown()
"""


def test_ranks_as_ray_actors_on_two_nodes_of_which_one_is_late_and_then_lost(tmp_path):
    done = run_with_ray("-c", A_NODE_OF_TWO, str(tmp_path))
    late = r"^late: not done after 5 s: rank 0 on [\d.]+, rank 1 on [\d.]+$"
    assert re.search(late, done.stdout, re.M), done.stderr[-2000:]
    # Ray itself also reports the loss of the node, before and after this line.
    lost = r"^a node was lost: (ActorDiedError|ActorUnavailableError|RayTaskError.*)$"
    assert re.search(lost, done.stdout, re.M), done.stderr[-2000:]
    assert len(os.listdir(tmp_path)) == 2  # Both ranks were working.


def test_the_same_script_without_torchrun_says_the_same(tmp_path):
    script = [sys.executable, "docs/cluster/train.py", "--ranks", "2", "--directory", str(tmp_path)]
    killed = run([*script, "--kill", "7"])
    assert "rank 1 of 2 was killed by SIGKILL" in killed.stderr
    resumed = run(script)
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    *said, title = [line.removeprefix("[rank 0] ") for line in resumed.stdout.splitlines()]
    alike(said, shown_in_the_lesson()[-7:])
    assert "2 ranks on cpu, gloo" in title  # The title names the device and the backend.


PLAIN = re.compile(r"^epoch (\d+) step (\d+): loss ([\d.]+), samples ([\d ]+)$", re.M)


def plain_ddp(*options):
    """Run docs/cluster/plain_ddp.py on two ranks: {(epoch, step): (loss, rank 0's samples)}."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = ["--nproc-per-node", "2", "docs/cluster/plain_ddp.py"]
    done = run([*torchrun, *script, *options], GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stderr[-2000:]
    found = PLAIN.findall(done.stdout)
    return {(int(e), int(s)): (float(loss), order) for e, s, loss, order in found}


def by_the_library(epochs, group):
    """Train as plain_ddp.py does, but with Overlapped and samples dealt out by hand."""
    import torch

    from mini_dist import GPT, token_loss
    from mini_dist.collectives import all_reduce
    from mini_dist.strategies.data_parallel import Overlapped

    sys.path.insert(0, str(CLUSTER))
    from plain_ddp import CONFIG, numbered_samples

    rank, size = group.rank(), group.size()
    rows = numbered_samples(48).tensors[1]
    model = Overlapped(GPT(CONFIG, seed=0), group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for epoch in range(epochs):
        order = torch.randperm(48, generator=torch.Generator().manual_seed(epoch))
        for mine in order[rank::size].split(6):
            batch = rows[mine]
            loss = token_loss(model(batch[:, :-1]), batch[:, 1:]).mean()
            loss.backward()
            model.finish()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(all_reduce(loss.detach() / size, group)))
    return losses


def test_a_plain_ddp_script_has_the_losses_of_the_library_s_data_parallelism():
    from mini_dist import launch

    plain = plain_ddp()
    assert list(plain) == [(epoch, step) for epoch in range(2) for step in range(4)]
    ours = launch(by_the_library, 2, (2,)).results[0]
    for (theirs, _), mine in zip(plain.values(), ours):
        assert theirs == pytest.approx(mine, abs=6e-5)  # The script prints four digits.
    assert plain[0, 0][1] != plain[1, 0][1]  # Each epoch has its own sample order.


def test_without_set_epoch_every_epoch_has_the_same_order():
    forgot = plain_ddp("--forget-set-epoch")
    for step in range(4):
        assert forgot[0, step][1] == forgot[1, step][1]


SBATCH = {  # long options of sbatch(1) that our jobs may use
    *("account", "array", "constraint", "cpus-per-task", "error", "exclude", "exclusive", "gpus"),
    *("gpus-per-node", "gres", "job-name", "mem", "nodelist", "nodes", "ntasks", "output"),
    *("ntasks-per-node", "open-mode", "partition", "qos", "requeue", "signal", "switches", "time"),
}


def test_the_slurm_script_has_known_options_and_a_line_that_torchrun_takes(tmp_path):
    """Run the script in bash, with stubs for what only a cluster has."""
    script = CLUSTER / "train.slurm"
    options = re.findall(r"^#SBATCH --([\w-]+)", script.read_text(), re.M)
    assert options and set(options) <= SBATCH
    for name, does in {
        ".venv/bin/activate": "",
        "bin/scontrol": 'test "$*" = "show hostnames node[7-8]" && printf "node7\\nnode8\\n"',
        "bin/srun": 'shift; exec "$@"',
        "bin/torchrun": 'printf "%s\\n" "$@"',
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/bash\n{does}\n")
        file.chmod(0o755)
    done = run(
        ["bash", str(script)],
        PATH=f"{tmp_path}/bin:{os.environ['PATH']}",
        SLURM_SUBMIT_DIR=str(tmp_path),
        SLURM_JOB_NODELIST="node[7-8]",
        SLURM_NNODES="2",
        SLURM_JOB_ID="123",
    )
    assert done.returncode == 0, done.stderr
    from torch.distributed.run import parse_args

    taken = parse_args(done.stdout.splitlines())
    assert (taken.nnodes, taken.nproc_per_node, taken.rdzv_id) == ("2", "4", "123")
    assert taken.rdzv_endpoint == "node7:29500"
    assert taken.training_script == "docs/cluster/train.py"
    assert taken.training_script_args[:2] == ["--ranks", "8"]


def test_the_files_that_could_not_be_run_here_say_so_and_parse():
    script = CLUSTER / "train.slurm"
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    assert "Never run by a real Slurm, nor on GPUs" in script.read_text()
    readme = (CLUSTER / "README.md").read_text()
    assert readme.count("never run under a real Slurm") == 1
    for text in (readme, script.read_text()):
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text
        options = set(re.findall(r"(?<=docs/cluster/train\.py )[^\n]*", text))
        known = re.findall(r'add_argument\("(--\w+)"', (CLUSTER / "train.py").read_text())
        for option in re.findall(r"--\w+", " ".join(options)):
            assert option in known


def test_torchrun_goes_on_with_one_node_of_two_from_the_last_checkpoint(tmp_path, request):
    if not request.config.getoption("long"):
        pytest.skip("two agents that wait for each other: pytest --long runs it")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
        *("--nproc-per-node", "2", "--max-restarts", "3", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"localhost:{29400 + os.getpid() % 500}", "--rdzv-id", "two"),
        *("--rdzv-conf", "last_call_timeout=2", "docs/cluster/train.py"),
        *("--directory", str(tmp_path / "run"), "--steps", "200", "--every", "10"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    nodes, logs = [], [tmp_path / "first", tmp_path / "second"]
    for log in logs:  # The first node hosts the rendezvous and survives.
        with open(log, "w") as out:
            options = dict(cwd=ROOT, env=environment, stdout=out, stderr=out)
            nodes.append(subprocess.Popen(command, **options))
        time.sleep(1)
    deadline = time.monotonic() + 120
    while "step 30:" not in logs[0].read_text() + logs[1].read_text():
        assert time.monotonic() < deadline, [log.read_text()[-2000:] for log in logs]
        time.sleep(0.1)
    second = psutil.Process(nodes[1].pid)
    for process in [second, *second.children(recursive=True)]:  # its ranks would outlive it
        process.kill()
    assert nodes[0].wait(timeout=180) == 0
    nodes[1].wait()
    said = logs[0].read_text()
    (first,) = re.findall(r"^2 ranks, from step (\d+)$", said, re.M)
    assert int(first) >= 30 and int(first) % 10 == 0 and "step 199: loss" in said
