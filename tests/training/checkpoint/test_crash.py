"""A save cut off anywhere, by a kill or a disk fault, costs that save and nothing else."""

import os
import shutil
import subprocess
import sys
import warnings

import pytest
import torch

from mini_dist import RankError, launch
from mini_dist.collectives import barrier
from mini_dist.training.checkpoint import CheckpointError, Training, find, piece, save
from mini_dist.training.checkpoint.lock import Lock


class Killed(BaseException):
    """From here on, the process does nothing more."""


CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


class Disk:
    """Count the calls that change a directory; fail one of them, or all from that one on."""

    def __init__(self, directory):
        self.directory, self.error, self.at = str(directory), None, None
        sys.addaudithook(self.look)  # runs before each call, on every Python

    def look(self, event, args):
        if self.at is None or event not in CHANGES:
            return
        if str(args[0]).startswith(self.directory) or isinstance(args[0], (bytes, int)):
            self.at -= 1
            if self.at < 0 and (self.error is Killed or self.at == -1):
                self.hit = True
                raise self.error(28, "No space left on device")

    def failing(self, at, error, do):
        """Return whether `do` reached call number `at`, which then failed."""
        self.at, self.error, self.hit = at, error, False
        try:
            do()
        except (Killed, CheckpointError):
            assert self.hit
        finally:
            self.at = None
        return self.hit


def store(directory, step, value, group, keep=None):
    save(directory, step, [piece("w", torch.full((3,), float(value)))], group, keep=keep)


def loaded(directory, group):
    """Return the (step, value) that a training would resume from, or None if it would begin."""
    saved = find(directory, group)
    if saved is None:
        return None
    into = torch.zeros(3)
    saved.load([piece("w", into)], group)
    (value,) = set(into.tolist())
    return saved.step, value


# name: (what is saved before, the save that is killed, how many are kept)
SAVES = {
    "the first": ([], (5, 1), None),
    "the next": ([(5, 1)], (10, 2), None),
    "the next, one kept": ([(5, 1)], (10, 2), 1),
    "the next, two kept": ([(2, 8), (5, 1), (7, 3)], (10, 2), 2),
    "the same step again": ([(5, 1)], (5, 2), None),
    "the same step again, one kept": ([(3, 9), (5, 1)], (5, 2), 1),
    "an earlier step": ([(5, 1), (10, 3)], (7, 2), 2),
}


def crashes(directory, name, error, group):
    """Make the save fail at each call in turn; return what was found after each failure."""
    before, (step, value), keep = SAVES[name]
    disk, found = Disk(directory), []
    if before:
        warnings.simplefilter("error")  # no checkpoint may be skipped
    while True:
        shutil.rmtree(directory, ignore_errors=True)
        for saved in before:
            store(directory, *saved, group)
        if not disk.failing(len(found), error, lambda: store(directory, step, value, group, keep)):
            return found
        found.append(loaded(directory, group))
        if len(found) % 4 == 0:  # another kill, during the cleanup after the first
            disk.failing(len(found) // 4, error, lambda: store(directory, step, 4, group, keep))
            assert loaded(directory, group) in (found[-1], (step, 4.0))
        store(directory, 20, 5, group, keep=1)
        assert loaded(directory, group) == (20, 5.0)
        assert sorted(os.listdir(directory)) == ["latest", "step-00000020"]


@pytest.mark.parametrize("error", [Killed, OSError], ids=["killed", "full"])
@pytest.mark.parametrize("name", SAVES)
def test_killed_or_failed_at_any_call_the_old_or_the_new_state_is_there(name, error, tmp_path):
    found = launch(crashes, 1, (str(tmp_path / "saved"), name, error)).results[0]
    before, new, _ = SAVES[name]
    old = (before[-1][0], float(before[-1][1])) if before else None
    new = (new[0], float(new[1]))
    assert len(found) > 10 and set(found) == {old, new}
    if error is Killed:
        assert found == sorted(found, key=[old, new].index)  # from one call on, it is the new one


def full_disk(directory, ballast, background, group):
    """Save twice, fill the disk, save twice, make room, save twice; return errors and results."""
    weight = torch.nn.Linear(100, 100)
    training = Training(weight, (), group, background=background)
    said = []
    for step in range(1, 7):
        if group.rank() == 0 and step == 3:
            with open(ballast, "wb", buffering=0) as file:
                try:
                    while file.write(b"x" * 4096):
                        pass
                except OSError:
                    pass
        if group.rank() == 0 and step == 5:
            os.unlink(ballast)
        barrier(group)
        with torch.no_grad():
            weight.weight.fill_(step)
        try:
            training.save(directory, step)
            training.wait()
            said.append(None)
        except CheckpointError as error:
            said.append(str(error))
            assert find(directory, group).step == 2
    training.resume(directory)
    return said, weight.weight[0, 0].item(), sorted(os.listdir(directory))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="mounting needs root")
def test_a_disk_that_is_full_and_has_room_again(background, tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this root may not mount")
    try:
        job = (str(tmp_path / "saved"), str(tmp_path / "ballast"), background)
        for said, value, names in launch(full_disk, 2, job).results:
            assert [each is None for each in said] == [True, True, False, False, True, True]
            assert all("No space left on device" in each for each in said if each)
            assert value == 6.0  # nothing is left of the two that failed
            assert names == ["latest", "lock", "step-00000005", "step-00000006"]
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)  # a rank may end later


# --- in the background ---------------------------------------------------------------------------


def saves_and_returns(directory, forget, group):
    training = Training(torch.nn.Linear(2, 2), (), group, background=True)
    training.save(directory, 1)
    if forget:
        del training
    return "done"


@pytest.mark.parametrize("forget", [False, True])
def test_a_save_behind_that_nobody_waits_for_is_finished_before_the_rank_ends(forget, tmp_path):
    assert launch(saves_and_returns, 2, (str(tmp_path), forget)).results == ["done"] * 2
    assert (tmp_path / "latest").read_text().startswith("step-00000001 ")


@pytest.mark.parametrize("forget", [False, True])
def test_a_save_behind_that_fails_and_nobody_waits_for_fails_the_rank(forget, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RankError, match="CheckpointError: rank 0: cannot write: .*Not a directory"):
        launch(saves_and_returns, 2, (str(tmp_path / "file"), forget))


def next_save_tells(directory, group):
    training = Training(torch.nn.Linear(2, 2), (), group, background=True)
    for then in (lambda: training.save(directory, 2), lambda: training.resume(directory)):
        training.save(directory, 1)
        with pytest.raises(CheckpointError, match="rank 0: cannot write"):
            then()


def test_a_save_behind_that_has_failed_is_told_by_the_next_save_and_by_resume(tmp_path):
    (tmp_path / "file").write_text("")
    launch(next_save_tells, 2, (str(tmp_path / "file"),))


SCRIPT = """
import sys, torch, torch.distributed as dist
from mini_dist.training.checkpoint import Training
from mini_dist import launch

def save(group):
    Training(torch.nn.Linear(2, 2), (), group, background=True).save(sys.argv[1], 1)

if sys.argv[2] == "launch":
    launch(save, 1)
else:
    launch(lambda group: None, 1)  # joins the group; what comes then is the script's own
    save(dist.group.WORLD)
print("the end")
"""


@pytest.mark.parametrize("how", ["launch", "plain"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_program_under_torchrun_whose_last_save_fails_does_not_end_as_success(
    how, fails, tmp_path, unused_port
):
    directory = tmp_path / "saved"
    if fails:
        directory.write_text("")
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    alone |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory), how],
        env={**os.environ, **alone, "TORCHELASTIC_RUN_ID": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode != 0) == fails, done.stderr
    assert ("CheckpointError: rank 0: cannot write" in done.stderr) == fails
    assert fails or (directory / "latest").exists()


@pytest.fixture
def unused_port():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# --- two trainings in one directory --------------------------------------------------------------


def two_trainings(directory, group):
    """Each rank is a separate training; rank 1 comes second."""
    import torch.distributed as dist

    from mini_dist.training.checkpoint import lock

    lock.PATIENCE = 0.2
    alone = [dist.new_group([rank]) for rank in range(2)][group.rank()]
    model = torch.nn.Linear(1, 1)
    training = Training(model, (), alone)
    if group.rank() == 0:
        assert training.resume(directory) is None
    barrier(group)
    said = []
    if group.rank() == 1:
        for use in (training.resume, lambda where: training.save(where, 3)):
            with pytest.raises(CheckpointError) as caught:
                use(directory)
            said.append(str(caught.value))
        assert find(directory, alone) is None  # looking needs no lock
    barrier(group)
    if group.rank() == 0:
        training.save(directory, 1)
        del training  # releases the lock
    barrier(group)
    if group.rank() == 1:
        training.resume(directory)
        training.save(directory, 2)
    barrier(group)
    return os.getpid(), said, find(directory, alone).step


def test_of_two_trainings_in_one_directory_the_second_is_told_who_is_there(tmp_path):
    (pid, _, step), (_, said, _) = launch(two_trainings, 2, (str(tmp_path),)).results
    assert len(said) == 2 and step == 2
    for sentence in said:
        assert f"{tmp_path} is in use by another training, process {pid} on " in sentence


def second_on_all_ranks(directory, marker, group):
    """Of two ranks, only the first can see that another process has the directory."""
    from mini_dist.training.checkpoint import lock

    lock.PATIENCE = 0.2
    with pytest.raises(CheckpointError, match="is in use by another training, process"):
        Training(torch.nn.Linear(1, 1), (), group).resume(directory)


HOLDER = """
import sys
from pathlib import Path
from mini_dist.training.checkpoint.lock import Lock
lock = Lock(Path(sys.argv[1])); lock.take(); print("held", flush=True); sys.stdin.read()
"""


def test_all_ranks_are_told_and_a_killed_holder_holds_nothing(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        launch(second_on_all_ranks, 2, (str(tmp_path), None))
        holder.kill()
    launch(saves_and_returns, 2, (str(tmp_path), False))


READER = """
import fcntl, os, sys
handle = os.open(sys.argv[1], os.O_RDONLY)
fcntl.lockf(handle, fcntl.LOCK_SH); print("held", flush=True); sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel says who holds a lock")
def test_who_only_reads_cannot_pass_for_a_training(tmp_path, monkeypatch):
    monkeypatch.setattr("mini_dist.training.checkpoint.lock.PATIENCE", 0.1)
    Lock(tmp_path / "run").take()  # (its file names this process, which releases it at once)
    command = [sys.executable, "-c", READER, str(tmp_path / "run" / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout.readline() == b"held\n"
        with pytest.raises(CheckpointError, match=f"process {reader.pid} only reads there"):
            Lock(tmp_path / "run").take()
        reader.kill()


def test_the_lock_is_its_owners_alone(tmp_path):
    """Anyone who can open a file can lock it, so its mode is 0600, in a new folder of mode 0700."""
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    shared.mkdir(0o755)
    (shared / "lock").touch()
    (shared / "lock").chmod(0o644)  # as earlier versions left it
    for folder in (mine, shared):
        Lock(folder).take()
        assert (folder / "lock").stat().st_mode & 0o777 == 0o600
    assert mine.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.getuid() == 0, reason="root may open any file")
def test_a_lock_of_somebody_else_is_not_taken_for_none(tmp_path):
    (tmp_path / "lock").touch()
    (tmp_path / "lock").chmod(0o000)
    with pytest.raises(CheckpointError, match=f"belongs to user {os.getuid()}"):
        Lock(tmp_path).take()


def one_after_the_other(directory, group):
    """All trainings of one process may save there, even while the others still exist."""
    model = torch.nn.Linear(1, 1)
    trainings = [Training(model, (), group) for _ in range(3)]
    for step, training in enumerate([*trainings, *trainings], 1):
        training.resume(directory)
        training.save(directory, step)
    return find(directory, group).step


def test_a_process_does_not_lock_itself_out(tmp_path):
    assert launch(one_after_the_other, 2, (str(tmp_path),)).results == [6, 6]
    assert launch(one_after_the_other, 1, (str(tmp_path),)).results == [6]


def read_only(directory, group):
    training = Training(torch.nn.Linear(1, 1), (), group)
    return training.resume(directory).step


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_to_can_be_resumed_from(tmp_path):
    launch(saves_and_returns, 1, (str(tmp_path), False))
    (tmp_path / "lock").unlink()
    tmp_path.chmod(0o555)
    assert launch(read_only, 1, (str(tmp_path),)).results == [1]
