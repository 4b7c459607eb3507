from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from orbax_ext.storage.checkpoint import digest_files, digests

LEAVES = {"a": {"shape": [3], "dtype": "float32", "digest": "00000000000000ff"}}


@pytest.fixture
def item(tmp_path: pathlib.Path) -> pathlib.Path:
    """The item of a step, as far as digest files look at it."""
    folder = tmp_path / "run" / "12" / "default"
    folder.mkdir(parents=True)
    (folder.parent / "_CHECKPOINT_METADATA").write_text("{}")
    (folder / "manifest.ocdbt").write_bytes(b"one save")
    return folder


def test_the_digests_of_a_steps_item_are_beside_the_step(item: pathlib.Path) -> None:
    expected = item.parents[1] / ".12.default.orbax_ext_digests_2.json"
    assert pathlib.Path(digest_files.path_for(item)) == expected


def test_the_digests_of_an_item_without_a_step_are_beside_it(tmp_path: pathlib.Path) -> None:
    (tmp_path / "one").mkdir()
    expected = tmp_path / ".one.orbax_ext_digests_2.json"
    assert pathlib.Path(digest_files.path_for(tmp_path / "one")) == expected
    (tmp_path / "one" / "_CHECKPOINT_METADATA").write_text("{}")
    assert pathlib.Path(digest_files.path_for(tmp_path / "one")) == expected


def test_digests_are_loaded_as_they_were_written(item: pathlib.Path) -> None:
    assert digest_files.load(item) is None
    assert digest_files.write(item, LEAVES) == digest_files.path_for(item)
    assert digest_files.load(item) == digest_files.StoredDigests(2, LEAVES)


def test_digests_of_the_first_version_are_loaded_unless_there_are_newer_ones(item: pathlib.Path) -> None:
    content = {"checkpoint": digest_files.identity(item), "leaves": LEAVES}
    (item.parents[1] / ".12.default.orbax_ext_digests.json").write_text(json.dumps(content))
    assert digest_files.load(item) == digest_files.StoredDigests(1, LEAVES)
    newer = digest_files.write(item, {"b": LEAVES["a"]})
    assert digest_files.load(item) == digest_files.StoredDigests(2, {"b": LEAVES["a"]})
    newer.write_text(json.dumps({**content, "checkpoint": "another"}))
    assert digest_files.load(item) == digest_files.StoredDigests(1, LEAVES)


def test_digests_of_another_save_under_the_same_name_are_not_loaded(item: pathlib.Path) -> None:
    digest_files.write(item, LEAVES)
    (item / "manifest.ocdbt").write_bytes(b"another save")
    assert digest_files.load(item) is None


def test_the_identity_without_ocdbt_is_that_of_the_tree_and_of_the_save(item: pathlib.Path) -> None:
    (item / "manifest.ocdbt").rename(item / "_METADATA")
    identities = [digest_files.identity(item)]
    for file in (item / "_METADATA", item.parent / "_CHECKPOINT_METADATA", item / "_CHECKPOINT_METADATA"):
        file.write_text(f'{{"commit_timestamp_nsecs": {len(identities)}}}')
        identities.append(digest_files.identity(item))
    assert len(set(identities)) == 4


def test_a_file_too_large_to_be_a_digest_file_is_ignored(item: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest_files.write(item, LEAVES)
    monkeypatch.setattr(digest_files, "_MAX_FILE", 10)
    assert digest_files.load(item) is None


@pytest.mark.parametrize("content", ["", "{", "{}", '{"checkpoint": "cut off'])
def test_a_damaged_digest_file_is_an_error(item: pathlib.Path, content: str) -> None:
    digest_files.path_for(item).write_text(content)
    with pytest.raises((ValueError, KeyError)):
        digest_files.load(item)


@pytest.mark.parametrize(("ocdbt", "version"), [(False, 2), (True, 1), (True, 2)])
def test_digests_of_stored_arrays_are_those_of_the_saved_ones(
    tmp_path: pathlib.Path, ocdbt: bool, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_files, "_SLAB", 100)  # several slabs for each array
    state: dict[str, Any] = {"weights": np.arange(120.0).reshape(20, 6), "scalar": np.float32(3), "table": np.arange(7)}
    chunked = {name: ocp.SaveArgs(chunk_byte_size=96) for name in state}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)) as checkpointer:
        checkpointer.save(tmp_path / "one", args=ocp.args.PyTreeSave(state, save_args=chunked))
    computed = dict(digest_files.compute(tmp_path / "one", version))
    assert computed.keys() == state.keys()
    for name, array in state.items():
        digest = digests.of_block(np.asarray(array), [0] * array.ndim, array.shape, version)
        assert computed[name] == {
            "shape": list(array.shape),
            "dtype": array.dtype.name,
            "digest": digests.to_text(digest),
        }
