from __future__ import annotations

import types

from orbax.checkpoint import type_handlers

from orbax_ext.upstream import array_handler


def test_settings_make_a_handler_with_the_same_settings() -> None:
    original = type_handlers.ArrayHandler(metadata_key=".zmeta", primary_host=3, use_replica_parallel=False)
    settings = array_handler.array_handler_settings(original)
    assert set(settings) == set(array_handler.array_handler_parameters())
    assert array_handler.array_handler_settings(type_handlers.ArrayHandler(**settings)) == settings
    assert (settings["metadata_key"], settings["primary_host"], settings["use_replica_parallel"]) == (
        ".zmeta",
        3,
        False,
    )


def test_a_handler_without_array_metadata_leaves_the_original_alone() -> None:
    original = type_handlers.ArrayHandler(array_metadata_store=array_handler.ArrayMetadataStore())
    assert (
        array_handler.array_handler_settings(array_handler.without_array_metadata(original))["array_metadata_store"]
        is None
    )
    assert array_handler.array_handler_settings(original)["array_metadata_store"] is not None


def test_a_handler_with_a_dispatcher_uses_pathways() -> None:
    assert not array_handler.uses_pathways(type_handlers.ArrayHandler())
    assert array_handler.uses_pathways(type_handlers.ArrayHandler(dispatcher=types.SimpleNamespace()))
