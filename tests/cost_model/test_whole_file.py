"""What was there stays until what replaces it is whole."""

import os
import stat
from pathlib import Path

import pytest

from autoshard.cost_model.errors import InputError
from autoshard.cost_model.whole_file import write_whole


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text("before")
    return path


def test_a_file_is_replaced_and_others_may_read_it(path):
    before = os.umask(0o022)
    write_whole(path, "after é", "the file")
    os.umask(before)
    assert path.read_bytes() == "after é".encode()
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(path.parent) == [path.name]


def test_a_move_that_fails_leaves_the_old_file_and_nothing_else(path, monkeypatch):
    def refused(self, target):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "replace", refused)
    with pytest.raises(
        InputError, match=r"the file cannot be written to .*mine\.json: Invalid cross-device link"
    ):
        write_whole(path, "after", "the file")
    assert path.read_text() == "before"
    assert os.listdir(path.parent) == [path.name]


def test_a_file_is_no_folder(path):
    with pytest.raises(InputError, match=r"the file cannot be written to .*mine\.json/in: Not a directory"):
        write_whole(path / "in", "after", "the file")


def test_through_symbolic_links_and_they_stay(path, tmp_path):
    links = tmp_path / "links"
    links.mkdir()
    (links / "near.json").symlink_to("../far.json")
    (links.parent / "far.json").symlink_to(path)
    write_whole(links / "near.json", "after", "the file")
    assert path.read_text() == "after"
    assert (links / "near.json").readlink() == Path("../far.json")
    assert (links.parent / "far.json").is_symlink()
    assert os.listdir(links) == ["near.json"]


def test_a_link_to_a_file_that_is_not_there_yet_makes_it(tmp_path):
    (tmp_path / "link.json").symlink_to("new.json")
    write_whole(tmp_path / "link.json", "after", "the file")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "new.json").read_text() == "after"


def test_links_in_a_circle(tmp_path):
    (tmp_path / "link.json").symlink_to("link.json")
    with pytest.raises(InputError, match=r"link\.json: Too many levels of symbolic links"):
        write_whole(tmp_path / "link.json", "after", "the file")
    assert (tmp_path / "link.json").is_symlink()


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_permissions_of_new_files_and_an_old_one_its_own(path, mask):
    path.chmod(0o640)
    before = os.umask(mask)
    write_whole(path, "after", "the file")
    write_whole(path.with_name("new.json"), "after", "the file")
    os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.with_name("new.json").stat().st_mode & 0o777 == 0o666 & ~mask


def test_what_is_no_regular_file_is_refused_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link.json").symlink_to("pipe")
    for place in (tmp_path / "pipe", tmp_path / "link.json", Path("/dev/null")):
        with pytest.raises(
            InputError, match=rf"the file cannot be written to {place}: it is no regular file"
        ):
            write_whole(place, "after", "the file")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    with pytest.raises(InputError, match="it is a folder; name a file in it"):
        write_whole(tmp_path, "after", "the file")


def test_a_long_name(tmp_path):
    path = tmp_path / ("n" * 255)
    write_whole(path, "after", "the file")
    assert path.read_text() == "after"
