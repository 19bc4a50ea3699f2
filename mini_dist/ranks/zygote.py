"""The zygote: a small process that has torch loaded and forks ranks from itself on request.

Of mini_dist it loads what every rank runs before its job and, on request, what earlier ranks have
imported. The parent starts a new zygote when one of these files changes, so ranks always see the
newest edits. It never runs a tensor operation on more than one thread and never touches CUDA:
forking a process that has done either breaks the child (OpenMP hangs, CUDA refuses). It lives in a
session of its own, so the interrupt of a terminal or a notebook reaches neither it nor its ranks,
and in a network of its own, where nobody else on the host can reach their connections (network.py).
When the parent goes away, however violently, the socket to it closes; then the zygote kills every
rank and what they have started, removes the directory of the worlds and leaves.

A request is one JSON object padded to REQUEST_BYTES: {"start": rank, "size": n, "device": as in
devices.py, "world": w} with two file descriptors (the rank's socket to the parent, its output), or
{"kill": w}, or {"ping": true}, or {"load": module}, or {"switch": n, "rate": bytes/s, "latency": s,
"world": w}, which makes n hosts for the ranks of w (cables.py); their requests then have a "host".
Ranks start when all is loaded. The files of world w are in the folder w of the zygote's directory.
An answer is a line of JSON: first {"open": null or why it is in the host's network}, then
{"started": pid, "world": w, "rank": r}, or {"refused": errno, "world": w, "rank": r} if the system
starts no more processes, or {"switched": null or why there are no hosts, "world": w}, or {"ended":
pid, "world": w, "rank": r, "status": s} where s is an exit code, or minus the signal that killed
it, or {"pong": true}: what had happened before the ping has been told before.
"""

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback

REQUEST_BYTES = 256
PRELOAD = (
    *("torch", "torch.distributed", "numpy", "cloudpickle"),  # what every rank needs
    *("mini_dist.ranks.rank", "mini_dist.ranks.ledger.group"),
    # What a first optimizer or wrapper imports: a second once here, or in each of the ranks.
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
    *("torch.distributed.pipelining", "torch.distributed.checkpoint", "torch.testing"),
)
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h


class Zygote:
    def __init__(self, control: socket.socket, mode: str, directory: str):
        self.control = control
        self.start = self.fork if mode == "fork" else self.spawn
        self.preload = list(PRELOAD) if mode == "fork" else []
        self.backlog: list[tuple[dict, list[int]]] = []  # ranks to start once all is loaded
        self.directory = directory
        self.ranks: dict[int, tuple[int, int]] = {}  # pid -> (world, rank)
        self.switches: dict[int, Switch] = {}  # of worlds that have hosts
        self.open: str | None = None  # why it is in the host's network, where nothing is changed
        self.doomed: set[int] = set()  # worlds whose folder is to go with their last rank
        self.spawned: dict[int, subprocess.Popen] = {}  # held, or subprocess would reap them itself
        self.woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        while True:
            if self.preload and not self.readable(timeout=0):
                self.load_next()
            for file in self.readable(timeout=0 if self.preload else None):
                if file is self.control:
                    data, fds, _, _ = socket.recv_fds(self.control, REQUEST_BYTES, 2)
                    if not data:
                        return
                    self.handle(json.loads(data), fds)
                else:
                    os.read(self.woken, 4096)
                    self.reap()

    def readable(self, timeout: float | None) -> list:
        return select.select([self.control, self.woken], [], [], timeout)[0]

    def load_next(self) -> None:
        gc.disable()  # What is loaded stays: to look for garbage in it takes a quarter of the time.
        name = self.preload.pop(0)
        try:
            importlib.import_module(name)
        except Exception:
            if name in PRELOAD:
                raise  # nothing works without it; a module of a job fails in the rank that wants it
        if self.preload:
            return
        if rules := sys.modules.get("torch._dynamo.trace_rules"):
            rules.clear_lru_cache()  # Or each rank does it, in pages that it must copy first.
        gc.freeze()  # what is loaded stays shared with the ranks, untouched by their collectors
        gc.enable()
        backlog, self.backlog = self.backlog, []
        for request, fds in backlog:
            self.handle(request, fds)

    def handle(self, request: dict, fds: list[int]) -> None:
        if "ping" in request:
            self.reap()
            self.answer(pong=True)
            return
        if "kill" in request:
            self.kill_world(request["kill"])
            return
        if "load" in request:
            self.preload.append(request["load"])
            return
        if "switch" in request:
            self.make_switch(request["world"], request)
            return
        if self.preload:
            self.backlog.append((request, fds))
            return
        world, rank = request["world"], request["start"]
        try:
            if hung_up(fds[0]):  # (the parent could not wait until all was loaded)
                self.answer(ended=0, world=world, rank=rank, status=0)
                return
            folder = f"{self.directory}/{world}"
            home = self.switches[world].homes[request["host"]] if "host" in request else None
            pid = self.start(rank, request["size"], request["device"], folder, *fds, home=home)
            self.ranks[pid] = (world, rank)
            self.answer(started=pid, world=world, rank=rank)
        except OSError as error:
            self.answer(refused=error.errno, world=world, rank=rank)
        finally:
            for fd in fds:
                os.close(fd)

    def make_switch(self, world: int, about: dict) -> None:
        if self.open:
            self.answer(switched=self.open, world=world)
            return
        try:
            name = f"w{world % 1_000_000}"  # (an interface's name has 15 characters)
            made = Switch(name, about["switch"], about["rate"], about["latency"])
            self.switches[world] = made
            self.answer(switched=None, world=world)
        except OSError as error:
            self.answer(switched=error.strerror or str(error), world=world)

    def kill_world(self, doomed: int) -> None:
        for pid, (world, _) in self.ranks.items():
            if world == doomed:
                kill(pid)
        for request, fds in self.backlog:
            if request["world"] == doomed:
                for fd in fds:
                    os.close(fd)
                self.answer(ended=0, world=doomed, rank=request["start"], status=0)
        self.backlog = [entry for entry in self.backlog if entry[0]["world"] != doomed]
        self.doomed.add(doomed)
        self.bury(doomed)

    def bury(self, world: int) -> None:
        """Remove what a killed world left; not before its last rank can write no more."""
        if world in self.doomed and all(of != world for of, _ in self.ranks.values()):
            self.doomed.discard(world)
            if world in self.switches:
                self.switches.pop(world).close()
            remove_world(f"{self.directory}/{world}")

    def fork(self, *arguments, home: int | None) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(self.woken)
                self.control.close()
                if home is not None:
                    move_to(home)
                    os.environ["GLOO_SOCKET_IFNAME"] = UPLINK
                else:
                    give_rights_back()
                become_rank(*arguments)
            except BaseException:
                traceback.print_exc()  # into the zygote's log
            finally:
                os._exit(70)
        return pid

    def spawn(self, *arguments, home: None) -> int:
        command = [sys.executable, __file__, "rank", *map(str, arguments)]
        process = subprocess.Popen(command, pass_fds=arguments[-2:])
        self.spawned[process.pid] = process
        return process.pid

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.kill_orphans()
            if pid not in self.ranks:
                continue
            world, rank = self.ranks.pop(pid)
            self.spawned.pop(pid, None)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what it started, should that outlive it
            self.bury(world)
            status = os.waitstatus_to_exitcode(status)
            self.answer(ended=pid, world=world, rank=rank, status=status)

    def kill_orphans(self) -> None:
        """What a rank has left in a session of its own. A rank that lives keeps its orphans, and so
        does the zygote: a child that is no rank was a dead rank's."""
        for pid in children() - set(self.ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def answer(self, **answer) -> None:
        self.control.sendall(json.dumps(answer).encode() + b"\n")

    def close(self) -> None:
        for pid in self.ranks:
            kill(pid)
        for pid in self.ranks:
            os.waitpid(pid, 0)
        self.ranks.clear()
        while orphans := children():
            self.kill_orphans()
            for pid in orphans:
                os.waitpid(pid, 0)
        remove_directory(self.directory)


def hung_up(fd: int) -> bool:
    """Whether the other end of a socket has been closed."""
    poll = select.poll()
    poll.register(fd, 0)
    return bool(poll.poll(0))


def children() -> set[int]:
    """Of this process, which has one thread; nothing where the system does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return set(map(int, file.read().split()))
    except OSError:
        return set()


def become_rank(
    rank: int, size: int, device: str, directory: str, control: int, output: int
) -> None:
    os.setpgid(0, 0)  # so that what a rank starts can be ended with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should the zygote itself be killed
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    from mini_dist.ranks.rank import main

    main(rank, size, device, directory, control, output)


def kill(pid: int) -> None:
    """End a rank, which the zygote has not reaped yet, and whatever it started."""
    for end in (os.killpg, os.kill):  # it may not have made its process group yet
        try:
            end(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def load_mini_dist() -> None:
    """The package that this script is in: by its place, so that nothing else that lies beside it
    is found before what is installed (a learner's random.py in a clone of the course)."""
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the directory of this script
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location(
        "mini_dist", f"{package}/__init__.py", submodule_search_locations=[package]
    )
    sys.modules["mini_dist"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["mini_dist"])


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    sys.argv[1:] = []
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the parent's thread may have blocked some
    load_mini_dist()
    from mini_dist.ranks.cables import Switch, move_to
    from mini_dist.ranks.folder import remove_directory, remove_world
    from mini_dist.ranks.hosts import UPLINK
    from mini_dist.ranks.network import give_rights_back, leave_the_hosts_network
    from mini_dist.ranks.sources import trust_no_older_bytecode

    trust_no_older_bytecode()
    if role == "rank":
        rank, size, device, directory, control, output = arguments
        become_rank(int(rank), int(size), device, directory, int(control), int(output))
    control, directory, network = arguments
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    zygote = Zygote(socket.socket(fileno=int(control)), role, directory)
    zygote.open = leave_the_hosts_network() if network == "own" else None
    zygote.answer(open=zygote.open)
    try:
        zygote.serve()
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:  # (a forked rank never gets here: it leaves by os._exit)
        zygote.close()
