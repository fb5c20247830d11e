"""What was there stays until what replaces it is whole."""

import os
from pathlib import Path

import pytest

from cost_model.errors import InputError
from cost_model.whole_file import write_whole


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
