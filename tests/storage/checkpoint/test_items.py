from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from etils import epath

from orbax_ext.storage.checkpoint import folders
from orbax_ext.storage.checkpoint.items import NotACheckpointError, describe_item
from orbax_ext.storage.checkpoint.records import CheckpointItem, CommitState

COMMITTED = CommitState(True, "it has its final name")
TREE = {"tree_metadata": {"a": {"key_metadata": [{"key": "a"}], "value_metadata": {"value_type": "jax.Array"}}}}
HEADER = {"shape": [4], "chunks": [2], "dtype": "<f4"}


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    """An item with one array in plain files, of which one chunk is stored."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".zarray").write_text(json.dumps(HEADER))
    (tmp_path / "a" / "0").write_bytes(bytes(5))
    (tmp_path / "_METADATA").write_text(json.dumps(TREE))
    return tmp_path


def describe(path: pathlib.Path) -> CheckpointItem:
    return describe_item(folders.list_folder(epath.Path(path)), COMMITTED, "")


def test_an_item_is_described_by_its_files(path: pathlib.Path) -> None:
    (path / "process_0").mkdir()
    (path / "process_0" / "x").write_text("")
    item = describe(path)
    assert (item.format, item.ocdbt, item.writers, item.has_arrays) == ("zarr2", False, 1, True)
    assert (item.logical_bytes, item.stored_bytes, [leaf.name for leaf in item.leaves]) == (16, 5, ["a"])


def test_sizes_are_not_looked_at_unless_they_are_wanted(path: pathlib.Path) -> None:
    folder = folders.list_folder(epath.Path(path))
    item = describe_item(folder, COMMITTED, "", sizes_wanted=False)
    assert (item.bytes_on_disk, item.stored_bytes, item.logical_bytes, item.files) == (0, 0, 16, 3)


def test_one_readable_list_of_key_types_is_enough(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"array_metadata": {"param_name": "a", "ext_metadata": {"random_key_impl": "threefry2x32"}}}
    lists = path / "array_metadatas"
    lists.mkdir()
    for number in range(12):
        (lists / f"process_{number}").write_text(json.dumps({"array_metadatas": [entry]}))
    (lists / "process_0").write_text("{")
    (lists / "process_1").unlink()
    (lists / "process_1").symlink_to("nowhere")
    read: list[str] = []
    kind = type(epath.Path(path))
    read_text = kind.read_text

    def noted(self: epath.Path, *given: Any) -> str:
        read.append(self.name)
        return str(read_text(self, *given))

    monkeypatch.setattr(kind, "read_text", noted)
    (leaf,) = describe(path).leaves
    assert leaf.key_type == "threefry2x32"
    assert [name for name in read if name.startswith("process_")] == ["process_0", "process_1", "process_2"]


def test_lists_of_key_types_that_are_all_damaged_are_named(path: pathlib.Path) -> None:
    (path / "array_metadatas").mkdir()
    (path / "array_metadatas" / "process_0").write_text("{")
    with pytest.raises(NotACheckpointError, match=f"the metadata in {path} can't be understood"):
        describe(path)


def test_arrays_are_listed_without_a_tree(path: pathlib.Path) -> None:
    (path / "_METADATA").write_text('{"tree_metadata": {}}')
    assert [(leaf.name, leaf.kind) for leaf in describe(path).leaves] == [("a", "array")]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"tree_metadata": []}'])
def test_a_damaged_tree_is_named(path: pathlib.Path, content: str) -> None:
    (path / "_METADATA").write_text(content)
    with pytest.raises(NotACheckpointError, match=f"the metadata in {path} can't be understood"):
        describe(path)


@pytest.mark.parametrize("content", ["{", "[]", '{"YQ==": 7}'])
def test_damaged_shardings_are_named(path: pathlib.Path, content: str) -> None:
    (path / "_sharding").write_text(content)
    with pytest.raises(NotACheckpointError, match=f"the metadata in {path} can't be understood"):
        describe(path)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"shape": 4, "chunks": 2, "dtype": "<f4"}'])
def test_a_damaged_header_is_named(path: pathlib.Path, content: str) -> None:
    (path / "a" / ".zarray").write_text(content)
    with pytest.raises(NotACheckpointError, match=f"the arrays of {path} can't be listed"):
        describe(path)
