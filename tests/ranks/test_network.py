"""Nobody else on the host can reach the ranks, and the ranks cannot reach the host."""

import ctypes
import encodings.idna  # noqa: F401  (a fork that becomes another user may be unable to read it)
import errno
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from mini_dist import RankError, launch
from mini_dist.ranks import network

ROOT = Path(__file__).resolve().parents[2]
NOBODY, PR_SET_DUMPABLE = 65534, 4
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has network namespaces")
as_root = pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can become another user"
)


def where(group):
    interfaces = [name for _, name in socket.if_nameindex()]
    capabilities = re.search("CapEff.*", Path("/proc/self/status").read_text())[0]
    return os.readlink("/proc/self/ns/net"), interfaces, os.getuid(), capabilities


def test_ranks_share_a_network_that_is_not_the_hosts_and_keep_user_and_rights():
    results = launch(where, 3).results
    (theirs, interfaces, user, capabilities), *others = results
    assert others == [results[0]] * 2
    # (A world on hosts that wasn't needed takes a while to end, with its switch, e.g. w7 and w7h0.)
    of_switches = {name for name in interfaces if re.fullmatch(r"w\d+(h\d+)?", name)}
    assert theirs != os.readlink("/proc/self/ns/net") and {*interfaces} - of_switches == {"lo"}
    assert user == os.getuid()
    assert capabilities == re.search("CapEff.*", Path("/proc/self/status").read_text())[0]


def test_on_request_ranks_stay_in_the_hosts_network():
    theirs, *_ = launch(where, 1, network=True).results[0]
    assert theirs == os.readlink("/proc/self/ns/net")


def in_a_fork_of_another_user(act):
    """Run `act()` in a process of the user nobody and return its result as text."""

    def as_nobody():
        os.setgroups([]), os.setgid(NOBODY), os.setuid(NOBODY)
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)  # as after an exec, so /proc/self is its own
        return act()

    return in_a_fork(as_nobody)


def in_a_fork(act):
    """Run `act()` in its own process, which may leave this network; return its result as text."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, str(act()).encode())
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    with os.fdopen(read) as file:
        return file.read()


@as_root
def test_a_user_without_privileges_gets_a_network_of_its_own_and_no_capability():
    def enter():
        assert network.leave_the_hosts_network() is None
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname()).close()
        network.give_rights_back()  # as every rank does
        status = Path("/proc/self/status").read_text()
        rights = re.search(r"CapEff:\s*(\w+)", status)[1]
        return int(rights, 16), os.getuid(), [name for _, name in socket.if_nameindex()]

    assert in_a_fork_of_another_user(enter) == f"(0, {NOBODY}, ['lo'])"


WORK_THERE = """
import os
from mini_dist import launch
def write(group):
    open(f"{os.getcwd()}/{group.rank()}", "w").write("x")
launch(write, 2)
"""


@as_root
def test_root_of_a_container_may_write_in_anothers_folder_from_ranks_too(tmp_path):
    """In its own user namespace, root could not write there."""
    tmp_path.chmod(0o700)
    os.chown(tmp_path, 1000, 1000)
    with_rights("-sys_admin", WORK_THERE, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


@as_root
def test_ranks_start_in_a_directory_that_could_not_be_entered(tmp_path):
    tmp_path.chmod(0o700)
    os.chown(tmp_path, 1000, 1000)
    code = "from mini_dist import launch; assert launch(lambda g: g.rank(), 2).results == [0, 1]"
    with_rights("-dac_override,-dac_read_search", code, tmp_path)


def with_rights(capabilities: str, code: str, directory: Path) -> None:
    command = ["setpriv", "--bounding-set", capabilities, sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def waits(folder, group):
    """Keep the ranks connected and busy with each other until the file `enough` exists."""
    import torch.distributed as dist

    Path(f"{folder}/pid-{group.rank()}").write_text(str(os.getpid()))
    rounds = 0
    total = torch.zeros(1)
    while not total.item():
        time.sleep(0.01)
        total = torch.tensor([float(Path(f"{folder}/enough").exists())])
        dist.all_reduce(total, group=group)
        objects = [None] * group.size()
        dist.all_gather_object(objects, f"from {group.rank()}", group=group)
        assert objects == [f"from {rank}" for rank in range(group.size())]
        rounds += 1
    return rounds > 0


def attack(pids: list[int], ports: list[int]):
    """Connect to the ranks' ports and send bytes; enter the ranks' network."""
    reached = []
    for port in ports:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
                connection.sendall(bytes(64))
                reached.append(port)
        except OSError:
            pass
    for pid in pids:
        try:
            os.close(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY))
            reached.append(f"the network of {pid}")
        except OSError:
            pass
    return reached


def attacked(folder: Path, **options) -> tuple[list[int], str, bool]:
    """Return the ranks' listening ports, what another user reached, and how the run ended."""
    ended = []

    def run():
        try:
            ended.append(launch(waits, 2, (folder,), **options).results == [True, True])
        except RankError:
            ended.append(False)

    thread = threading.Thread(target=run)
    thread.start()
    while not all((folder / f"pid-{rank}").exists() for rank in range(2)):
        time.sleep(0.01)
    time.sleep(0.2)
    pids = [int((folder / f"pid-{rank}").read_text()) for rank in range(2)]
    folders = [f"/proc/{pid}/fd" for pid in pids]
    ours = {os.readlink(f"{folder}/{fd}") for folder in folders for fd in os.listdir(folder)}
    lines = [line.split() for line in Path(f"/proc/{pids[0]}/net/tcp").read_text().splitlines()[1:]]
    listening = [fields for fields in lines if fields[3] == "0A"]
    ports = [int(f[1].split(":")[1], 16) for f in listening if f"socket:[{f[9]}]" in ours]
    reached = in_a_fork_of_another_user(lambda: attack(pids, ports))
    (folder / "enough").touch()
    thread.join()
    return ports, reached, ended[0]


@as_root
def test_another_user_of_the_host_reaches_nothing_of_a_run(tmp_path):
    ports, reached, right = attacked(tmp_path)
    assert ports, "gloo listens on no port: this test looks for the wrong thing"
    assert reached == "[]" and right


@as_root
def test_in_the_hosts_network_the_same_attack_connects(tmp_path):
    """Otherwise the test above would prove nothing."""
    ports, reached, _ = attacked(tmp_path, network=True)
    assert ports and all(str(port) in reached for port in ports)


def let_others_in(folder):
    """Let all users read `folder`, whose parents (one more under xdist) pytest closes to others."""
    folder.chmod(0o755)
    for parent in folder.parents:
        if parent == Path(tempfile.gettempdir()):
            return
        parent.chmod(0o755)


def makes_groups(folder, group):
    """Make groups whose ranks join at different times, so that a stranger can get there first.

    The ranks take turns being late, because their ports decide which one connects to the other.
    """
    Path(folder, "go").touch()
    for i in range(20):
        time.sleep(0.4 * (group.rank() == i % 2))
        pair = torch.distributed.new_group([0, 1])
        torch.distributed.all_reduce(torch.ones(1), group=pair)


def take_the_place_of_ranks(folder):
    """Connect to every port where root listens and pose as ranks, with gloo's 8-byte number.

    Return the number of connections made and the number of bytes received.
    """
    begin = time.monotonic()
    while not Path(folder, "go").exists() and time.monotonic() < begin + 60:
        time.sleep(0.005)
    until, made, seen = time.monotonic() + 60, [], set()
    while time.monotonic() < until and not Path(folder, "enough").exists():
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            doors = {row[1] for row in rows if row[3] == "0A" and row[7] == "0"} - seen
            seen |= doors
            for port in {int(door.partition(":")[2], 16) for door in doors}:
                for number in range(16):
                    try:
                        made.append(socket.create_connection(("127.0.0.1", port), timeout=0.2))
                        made[-1].sendall(number.to_bytes(8, "little"))
                    except OSError:
                        break
        time.sleep(0.002)
    came = 0
    for each in made:
        each.setblocking(False)
        try:
            came += len(each.recv(100))
        except OSError:
            pass
    return len(made), came


@pytest.mark.solitary  # It attacks every port that root opens, even in other tests.
@as_root
def test_in_the_hosts_network_a_rank_refuses_whoever_is_not_its_user(tmp_path):
    """Without the refusal, the same attacker gets tensors and the ranks don't notice."""
    let_others_in(tmp_path)
    ended = []
    attack = threading.Thread(
        target=lambda: ended.append(
            in_a_fork_of_another_user(lambda: take_the_place_of_ranks(tmp_path))
        )
    )
    launch(lambda group: None, 2, network=True)  # (loads torch)
    attack.start()
    refused = f"another user of this machine, {NOBODY}, has connected"
    try:
        with pytest.raises(RankError, match=refused):
            launch(makes_groups, 2, (str(tmp_path),), network=True)
    finally:
        (tmp_path / "enough").touch()
    attack.join()
    made, came = re.findall(r"\d+", ended[0])
    assert int(made) > 0 and int(came) == 0


@as_root
def test_every_other_user_with_a_process_counts_a_service_included():
    service = 33  # a system user's id, below 1000
    sleeper = subprocess.Popen(["sleep", "60"], user=service, group=service)
    try:
        assert network.name_of(service) in network.other_people()
        assert not {"root"} & network.other_people()
    finally:
        sleeper.kill()
        sleeper.wait()


NO_NAMESPACE = """
import sys, warnings
import mini_dist
from mini_dist import launch
from mini_dist.ranks import launch as launcher
launcher.other_people = lambda: {people}
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    def work(group):
        return group.rank()
    for _ in range(2):
        assert launch(work, 2).results == [0, 1]
print(len(heard), *(str(each.message) for each in heard))
"""


@pytest.mark.parametrize("people", [set(), {"eve"}])
def test_where_the_system_refuses_a_namespace_it_is_said_once_if_others_are_there(people):
    """A user namespace may forbid network namespaces below it, as a hardened host does."""
    forbid = "echo 0 > /proc/sys/user/max_net_namespaces"
    code = NO_NAMESPACE.replace("{people}", repr(people))
    command = ["unshare", "-Ur", "sh", "-c", f'{forbid} && exec "$0" -c "$1"', sys.executable, code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if "unshare" in done.stderr or "max_net_namespaces" in done.stderr:
        pytest.skip(f"no user namespace to try it in: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    count, _, said = done.stdout.strip().partition(" ")
    assert int(count) == len(people)
    if people:
        assert "other users of this machine (eve) can connect to your ranks" in said
        assert "this system refuses a network namespace: No space left" in said


@pytest.mark.parametrize("number", [errno.ENETUNREACH, socket.EAI_AGAIN])
def test_a_rank_that_looks_for_the_internet_is_told_where_it_is(number):
    def asks_through_a_library(number, group):
        try:
            raise OSError(number, "as the system says without a way out")
        except OSError as error:
            raise RuntimeError("download failed") from error

    hint = r"Ranks have a network of their own.*network=True"
    with pytest.raises(RankError, match=rf"download failed[\s\S]*{hint}"):
        launch(asks_through_a_library, 1, (number,))
    with pytest.raises(RankError) as caught:  # (no hint if it would not help)
        launch(asks_through_a_library, 1, (number,), network=True)
    assert "network=True" not in str(caught.value)
