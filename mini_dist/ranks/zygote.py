"""The zygote: a small process that has torch loaded and forks ranks from itself on request.

Of mini_dist it loads only what every rank runs before its job (the parent starts a new zygote when
these files change); the rest is imported by the ranks, so that they see the newest edits. It never
runs a tensor operation and never touches CUDA: forking a process that has done either breaks the
child (OpenMP hangs, CUDA refuses). It lives in a session of its own, so the interrupt of a terminal
or a notebook reaches neither it nor its ranks. When the parent goes away, however violently, the
socket to it closes; then the zygote kills every rank, removes the directory of the worlds and
leaves.

A request is one JSON object padded to REQUEST_BYTES: {"start": rank, "size": n, "device": "cpu" or
"cuda", "world": w, "directory": d, "patient": start it when all is loaded} with two file
descriptors (the rank's socket to the parent, its output), or {"kill": w, "directory": d}, or
{"ping": true}. An answer is a line of JSON: {"started": pid, "world": w, "rank": r}, or {"ended":
pid, "world": w, "rank": r, "status": s} where s is an exit code, or minus the signal that killed
it, or {"pong": true}.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys

REQUEST_BYTES = 1024
# First what every rank needs: a first launch waits only for that. Then what the first optimizer
# would import, a second in each rank.
PRELOAD = (
    ("torch", "torch.distributed", "numpy", "cloudpickle")
    + ("mini_dist.ranks.rank", "mini_dist.ledger.recording"),
    ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")
    + ("torch.distributed.pipelining", "torch.distributed.checkpoint", "torch.testing"),
)
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


class Zygote:
    def __init__(self, control: socket.socket, mode: str, directory: str):
        self.control = control
        self.start = self.fork if mode == "fork" else self.spawn
        self.preload = list(PRELOAD) if mode == "fork" else []
        self.backlog: list[tuple[dict, list[int]]] = []  # ranks to start once all is loaded
        self.directory = directory
        self.ranks: dict[int, tuple[int, int]] = {}  # pid -> (world, rank)
        self.doomed: dict[int, str] = {}  # world -> its directory, to go with its last rank
        self.spawned: dict[int, subprocess.Popen] = {}  # held, or subprocess would reap them itself
        self.woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        while True:
            must_load = len(self.preload) == len(PRELOAD)
            may_load = self.preload and not self.ranks
            if must_load or (may_load and not self.readable(timeout=0)):
                self.load_next()
            for file in self.readable(timeout=None if not self.preload or self.ranks else 0):
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
        for name in self.preload.pop(0):
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # what is loaded stays shared with the ranks, untouched by their collectors
        if not self.preload:
            backlog, self.backlog = self.backlog, []
            for request, fds in backlog:
                self.handle(request, fds)

    def handle(self, request: dict, fds: list[int]) -> None:
        if "ping" in request:
            self.reap()
            self.answer(pong=True)
            return
        if "kill" in request:
            self.kill_world(request["kill"], request["directory"])
            return
        if request["patient"] and self.preload:
            self.backlog.append((request, fds))
            return
        world, rank = request["world"], request["start"]
        pid = self.start(rank, request["size"], request["device"], request["directory"], *fds)
        for fd in fds:
            os.close(fd)
        self.ranks[pid] = (world, rank)
        self.answer(started=pid, world=world, rank=rank)

    def kill_world(self, doomed: int, directory: str) -> None:
        for pid, (world, _) in self.ranks.items():
            if world == doomed:
                kill(pid)
        for request, fds in self.backlog:
            if request["world"] == doomed:
                for fd in fds:
                    os.close(fd)
                self.answer(ended=0, world=doomed, rank=request["start"], status=0)
        self.backlog = [entry for entry in self.backlog if entry[0]["world"] != doomed]
        self.doomed[doomed] = directory
        self.bury(doomed)

    def bury(self, world: int) -> None:
        """Remove what a killed world left; not before its last rank can write no more."""
        if world in self.doomed and all(of != world for of, _ in self.ranks.values()):
            shutil.rmtree(self.doomed.pop(world), ignore_errors=True)

    def fork(self, *arguments) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(self.woken)
                self.control.close()
                become_rank(*arguments)
            finally:
                os._exit(70)
        return pid

    def spawn(self, *arguments) -> int:
        command = [sys.executable, __file__, "rank", *map(str, arguments), *sys.path[:1]]
        process = subprocess.Popen(command, pass_fds=arguments[-2:])
        self.spawned[process.pid] = process
        return process.pid

    def reap(self) -> None:
        while self.ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            world, rank = self.ranks.pop(pid)
            self.spawned.pop(pid, None)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what it started, should that outlive it
            self.bury(world)
            status = os.waitstatus_to_exitcode(status)
            self.answer(ended=pid, world=world, rank=rank, status=status)

    def answer(self, **answer) -> None:
        self.control.sendall(json.dumps(answer).encode() + b"\n")

    def close(self) -> None:
        for pid in self.ranks:
            kill(pid)
        for pid in self.ranks:
            os.waitpid(pid, 0)
        shutil.rmtree(self.directory, ignore_errors=True)


def become_rank(
    rank: int, size: int, device: str, directory: str, control: int, output: int
) -> None:
    os.setpgid(0, 0)  # so that what a rank starts can be ended with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":  # should the zygote itself be killed
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    from mini_dist.ranks.rank import main

    main(rank, size, device, directory, control, output)


def kill(pid: int) -> None:
    """End a rank, which the zygote has not reaped yet, and whatever it started."""
    for end in (os.killpg, os.kill):  # it may not have made its process group yet
        try:
            end(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    sys.argv[1:] = []
    sys.path[0] = arguments.pop()  # where mini_dist is; script directories do not belong there
    if role == "rank":
        rank, size, device, directory, control, output = arguments
        become_rank(int(rank), int(size), device, directory, int(control), int(output))
    zygote = Zygote(socket.socket(fileno=int(arguments[0])), role, arguments[1])
    try:
        zygote.serve()
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:  # (a forked rank never gets here: it leaves by os._exit)
        zygote.close()
