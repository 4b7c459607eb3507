from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from orbax_ext.storage.checkpoint import metadata
from orbax_ext.storage.checkpoint.metadata import ArrayHeader, SavedSharding, TreeLeaf


def leaf(*keys: object, **value: Any) -> dict[str, Any]:
    return {"key_metadata": [{"key": key, "key_type": 2} for key in keys], "value_metadata": value}


def test_a_tree_is_its_leaves_by_path() -> None:
    entries = {
        "a": leaf("params", 0, value_type="jax.Array"),
        "b": leaf("nothing", value_type="None", skip_deserialize=True),
    }
    tree = metadata.parse_tree(json.dumps({"tree_metadata": entries, "use_ocdbt": True, "of_a_later_release": 1}))
    assert tree.leaves == (TreeLeaf(("params", "0"), "jax.Array", True), TreeLeaf(("nothing",), "None", False))
    assert [saved.name for saved in tree.leaves] == ["params.0", "nothing"]
    assert (tree.ocdbt, tree.zarr3, tree.every_chunk) == (True, None, False)
    text = json.dumps({"tree_metadata": entries, "use_zarr3": True, "store_array_data_equal_to_fill_value": True})
    assert (metadata.parse_tree(text).zarr3, metadata.parse_tree(text).every_chunk) == (True, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"tree_metadata": []}',
        '{"tree_metadata": {"a": {}}}',
        '{"tree_metadata": {"a": 1}}',
    ],
)
def test_a_damaged_tree_is_refused(text: str) -> None:
    with pytest.raises(metadata.DAMAGED):
        metadata.parse_tree(text)


def shardings(**by_name: dict[str, Any]) -> str:
    return json.dumps({base64.b64encode(name.encode()).decode(): json.dumps(given) for name, given in by_name.items()})


def test_shardings_are_parsed_by_array_name() -> None:
    named = {
        "sharding_type": "NamedSharding",
        "shape": [4, 2],
        "axis_names": ["dp", "tp"],
        "partition_spec": [None, "tp", ["dp", "tp"]],
    }
    parsed = metadata.parse_shardings(shardings(a=named, b={"sharding_type": "SingleDeviceSharding"}, c={}))
    assert parsed["a"] == SavedSharding("NamedSharding", (("dp", 4), ("tp", 2)), ((), ("tp",), ("dp", "tp")))
    assert [str(sharding) for sharding in parsed.values()] == [
        "P(None, tp, (dp, tp))",
        "SingleDeviceSharding",
        "unknown",
    ]


@pytest.mark.parametrize("text", ["", "[]", '{"no padding": "{}"}', '{"YQ==": "not JSON"}', '{"YQ==": null}'])
def test_damaged_shardings_are_refused(text: str) -> None:
    with pytest.raises(metadata.DAMAGED):
        metadata.parse_shardings(text)


def test_the_most_common_mesh_is_that_of_most_arrays() -> None:
    small, large = (("dp", 2),), (("dp", 4),)
    saved = {"a": SavedSharding("", small), "b": SavedSharding("", large), "c": SavedSharding("", large)}
    assert metadata.most_common_mesh({**saved, "d": SavedSharding("SingleDeviceSharding")}) == large
    assert metadata.most_common_mesh({"d": SavedSharding("SingleDeviceSharding")}) == ()
    assert metadata.most_common_mesh({}) == ()


def test_key_types_are_those_of_typed_keys() -> None:
    entries = [
        {"param_name": "key", "ext_metadata": {"random_key_impl": "rbg"}},
        {"param_name": "weights", "ext_metadata": None},
        {"param_name": "bias"},
    ]
    text = json.dumps({"array_metadatas": [{"array_metadata": entry} for entry in entries]})
    assert metadata.parse_key_types(text) == {"key": "rbg"}


def test_headers_of_both_formats_are_parsed() -> None:
    assert metadata.parse_zarr2('{"shape": [9, 4], "chunks": [3, 4], "dtype": "<f4"}') == ArrayHeader(
        (9, 4), "float32", 4, (3, 4), (3, 4)
    )
    zarr3 = {
        "shape": [9, 4],
        "data_type": "bfloat16",
        "chunk_grid": {"configuration": {"chunk_shape": [9, 4]}},
        "codecs": [{"name": "sharding_indexed", "configuration": {"chunk_shape": [3, 4]}}],
    }
    header = metadata.parse_zarr3(json.dumps(zarr3))
    assert header == ArrayHeader((9, 4), "bfloat16", 2, (3, 4), (9, 4))
    assert header.logical_bytes == 72


def test_an_unknown_dtype_keeps_its_name() -> None:
    header = metadata.parse_zarr2('{"shape": [9], "chunks": [3], "dtype": "no such type"}')
    assert (header.dtype, header.itemsize) == ("no such type", 1)


@pytest.mark.parametrize("text", ["", "{}", '{"shape": [1], "dtype": "<f4"}', '{"shape": 1, "chunks": 1}'])
def test_damaged_headers_are_refused(text: str) -> None:
    for parse in (metadata.parse_zarr2, metadata.parse_zarr3):
        with pytest.raises(metadata.DAMAGED):
            parse(text)
