from __future__ import annotations

import pathlib

import pytest
from etils import epath

from orbax_ext.storage.checkpoint import folders


@pytest.fixture
def root(tmp_path: pathlib.Path) -> epath.Path:
    (tmp_path / "inner" / "deep").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a").write_text("four")
    (tmp_path / "inner" / "deep" / "b").write_bytes(bytes(10))
    (tmp_path / "nowhere").symlink_to("gone")
    return epath.Path(tmp_path)


def test_a_folder_has_files_with_sizes_and_folders_in_order(root: epath.Path) -> None:
    folder = folders.list_folder(root)
    assert (folder.path, folder.folders) == (root, ("empty", "inner"))
    assert dict(folder.files) == {"a": 4, "nowhere": len("gone")}
    assert (folder.text("a"), folder.text("b")) == ("four", None)


def test_sizes_are_those_of_all_files_below(root: epath.Path) -> None:
    assert folders.sizes_below(root) == {"a": 4, "inner/deep/b": 10, "nowhere": len("gone")}


def test_what_is_no_directory_is_an_error(root: epath.Path) -> None:
    with pytest.raises(FileNotFoundError):
        folders.list_folder(root / "none")
    with pytest.raises(NotADirectoryError):
        folders.list_folder(root / "a")


def test_folders_on_s3_are_listed_as_on_a_disk(s3: str) -> None:
    there = epath.Path(s3)
    (there / "inner" / "deep").mkdir(parents=True)
    (there / "a").write_text("four")
    (there / "inner" / "deep" / "b").write_bytes(bytes(10))
    folder = folders.list_folder(there)
    assert (dict(folder.files), folder.folders, folder.text("a")) == ({"a": 4}, ("inner",), "four")
    assert folders.sizes_below(there) == {"a": 4, "inner/deep/b": 10}
    with pytest.raises(FileNotFoundError):
        folders.list_folder(there / "none")
