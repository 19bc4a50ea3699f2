"""Test which leftover rank folders are swept away and, above all, what is not."""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mini_dist.ranks import folder, zygote_handle
from mini_dist.ranks.folder import LOG, MARKER, TEXT, base_directory, make_directory, sweep
from tests.ranks import leftovers

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def base(tmp_path, monkeypatch):
    """Put rank folders in tmp_path, as if /dev/shm could not be used."""
    monkeypatch.setattr(folder, "base_directory", lambda: str(tmp_path))
    return tmp_path


def left_by_a_killed_process(base: Path, name: str = "ranks-of-mini_dist-x1y2z3w4") -> Path:
    path = base / name
    path.mkdir(mode=0o700)
    (path / MARKER).write_bytes(TEXT)
    (path / LOG).write_text("")
    (path / "7").mkdir()
    for file in ("store", "flight-0", "stack-0", "flight-11", "stack-11"):
        (path / "7" / file).write_text("x")
    old = time.time() - 10_000
    os.utime(path, (old, old))
    return path


def test_what_a_killed_process_has_left_is_swept_away(base):
    path = left_by_a_killed_process(base)
    sweep()
    assert not path.exists()


def test_a_course_unpacked_beside_it_stays(base):
    """GitHub names the folder in its zip `mini_dist-main`."""
    course = base / "mini_dist-main"
    (course / "notebooks").mkdir(parents=True)
    work = course / "notebooks" / "00_start_here.ipynb"
    work.write_text("hours of work")
    os.utime(course, (0, 0))
    sweep()
    assert work.read_text() == "hours of work"


def another_name(path):
    path.rename(path.with_name("ranks-of-mini_dist-main"))


def a_longer_name(path):
    path.rename(path.with_name(path.name + "-copy"))


def no_marker(path):
    (path / MARKER).unlink()


def a_marker_of_other_words(path):
    (path / MARKER).write_bytes(TEXT + b"and more\n")


def a_marker_that_is_a_link(path):
    (path / MARKER).rename(path.parent / "elsewhere")
    (path / MARKER).symlink_to(path.parent / "elsewhere")


def a_marker_that_is_a_folder(path):
    (path / MARKER).unlink()
    (path / MARKER).mkdir()


def open_to_others(path):
    path.chmod(0o755)


def a_file_of_somebody_in_it(path):
    (path / "notes.txt").write_text("mine")


def a_file_of_somebody_in_a_world(path):
    (path / "7" / "notes.txt").write_text("mine")


def a_folder_of_somebody_in_it(path):
    (path / "thesis").mkdir()


def a_link_to_it(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def a_world_that_is_a_link(path):
    (path / "7").rename(path.parent / "elsewhere")
    (path / "7").symlink_to(path.parent / "elsewhere")


def a_store_that_is_a_folder(path):
    (path / "7" / "store").unlink()
    (path / "7" / "store").mkdir()
    (path / "7" / "store" / "thesis").write_text("mine")


@pytest.mark.parametrize(
    "change",
    [
        *(another_name, a_longer_name, no_marker, a_marker_of_other_words),
        *(a_marker_that_is_a_link, a_marker_that_is_a_folder, open_to_others),
        *(a_file_of_somebody_in_it, a_file_of_somebody_in_a_world, a_folder_of_somebody_in_it),
        *(a_link_to_it, a_world_that_is_a_link, a_store_that_is_a_folder),
    ],
    ids=lambda change: change.__name__,
)
def test_what_differs_in_anything_from_what_we_make_stays(base, change):
    change(left_by_a_killed_process(base))
    foreign = {p: p.read_bytes() for p in base.rglob("*") if p.is_file() and p.name != "stack-0"}
    foreign = {p: text for p, text in foreign.items() if text not in (b"x", b"")}
    links = [p for p in base.rglob("*") if p.is_symlink()]
    sweep()
    assert all(path.read_bytes() == text for path, text in foreign.items())
    assert all(link.is_symlink() and link.exists() for link in links)


def test_a_folder_in_use_stays_and_goes_when_its_last_user_does(base):
    path = left_by_a_killed_process(base)
    with open(path / MARKER) as user:
        fcntl.flock(user, fcntl.LOCK_EX)
        sweep()
        assert path.exists()
    sweep()
    assert not path.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_stays(base):
    path = left_by_a_killed_process(base)
    os.chown(path, 65534, 65534)
    sweep()
    assert (path / "7" / "store").exists()


def test_a_new_folder_is_locked_from_the_moment_it_has_its_marker(base):
    path, lock = make_directory()
    sweep()
    assert os.listdir(path) == [MARKER] and Path(path, MARKER).read_bytes() == TEXT
    os.close(lock)
    sweep()
    assert os.listdir(base) == []


def test_a_start_that_fails_leaves_no_folder_and_no_descriptor(base, monkeypatch):
    def no_process(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(zygote_handle.subprocess, "Popen", no_process)
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            zygote_handle.ZygoteHandle("fork", network=False)
    assert os.listdir(base) == []
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's PDEATHSIG")
def test_a_process_and_its_zygote_killed_together_are_swept_up_after_by_the_next():
    code = """
import os, signal, sys
from mini_dist import launch
from mini_dist.ranks.launch import ZYGOTES
launch(lambda group: None, 2)
keeper = ZYGOTES["fork", False]
print(keeper.process.pid, keeper.directory, flush=True)
os.kill(keeper.process.pid, signal.SIGSTOP)  # so that it cannot clear up
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        session, directory = parent.stdout.readline().decode().split()
        parent.kill()
    os.kill(int(session), 9)
    leftovers.wait_until(
        lambda: not leftovers.processes(int(session)), lambda: "processes are left"
    )
    assert Path(directory).exists() and Path(directory).parent == Path(base_directory())

    def is_swept_up() -> bool:  # (threads of a zombie may hold the lock for a moment)
        sweep()
        return not Path(directory).exists()

    leftovers.wait_until(is_swept_up, lambda: f"{directory} is left")
