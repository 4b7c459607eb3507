from __future__ import annotations

import json

import pytest

from orbax_ext.plan.forecast import described, notation

pytestmark = pytest.mark.once

MODEL = """
# a model in a few lines
embed           bfloat16  1024x512  P(tp)         128x512
layers.{0..3}.w bfloat16  512x2048  P(None, tp)
layers.{0..3}.b float32   512
step            int32     ()
"""


def test_the_first_rule_that_matches_counts_and_must_fit() -> None:
    rules = [notation.parse_rule("*.w=P(None,tp)"), notation.parse_rule("*=P(tp)")]
    mesh = {"dp": 2, "tp": 4}
    assert described.choose_spec("a.w", (8, 8), (), rules, mesh) == (((), ("tp",)), "")
    assert described.choose_spec("a.b", (8,), (("dp",),), rules, mesh) == ((("tp",),), "")
    with pytest.raises(ValueError, match=r"does not fit a\.b of shape \(6,\).*size 6 into 4"):
        described.choose_spec("a.b", (6,), (), rules, mesh)


@pytest.mark.parametrize(
    ("known", "why"),
    [((("ep",),), "lacks the axis 'ep'"), ((("tp",), ("tp",)), "twice"), (((), (), ("tp",)), "3 entries for 2")],
)
def test_a_saved_spec_that_does_not_fit_becomes_copies(known: notation.Spec, why: str) -> None:
    spec, reason = described.choose_spec("w", (8, 8), known, [], {"dp": 2, "tp": 4})
    assert spec == ()
    assert why in reason


@pytest.mark.parametrize(
    ("known", "spec", "why"),
    [
        ((("pp",), ("tp",)), ((), ("tp",)), "lacks the axis 'pp'"),
        ((("pp", "tp"), ("dp",)), (("tp",), ("dp",)), "lacks the axis 'pp'"),
        ((("tp",), ("dp",)), (("tp",), ()), "dimension 1 can't be cut into 2"),
        ((("pp", "tp"), ("dp",)), (("tp",), ()), "lacks the axis 'pp' and dimension 1 can't be cut into 2"),
    ],
)
def test_a_saved_spec_keeps_what_fits(known: notation.Spec, spec: notation.Spec, why: str) -> None:
    size = 7 if "dimension 1" in why else 8
    found, reason = described.choose_spec("w", (8, size), known, [], {"dp": 2, "tp": 4})
    assert found == spec
    assert why in reason


def test_a_model_is_the_same_in_lines_and_in_json() -> None:
    in_lines = described.parse_shapes(MODEL)
    assert [array.name for array in in_lines[:3]] == ["embed", "layers.0.w", "layers.1.w"]
    assert len(in_lines) == 10
    as_json = [
        {
            "name": array.name,
            "shape": array.shape,
            "dtype": array.dtype,
            **({"spec": notation.spec_text(array.spec)} if array.spec is not None else {}),
            **({"chunk": array.chunk} if array.chunk else {}),
        }
        for array in in_lines
    ]
    assert described.parse_shapes(json.dumps(as_json)) == in_lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w bfloat16", "line 1: expected NAME DTYPE SHAPE"),
        ("a int8 4\nw float17 4", "line 2: 'float17' is not a dtype"),
        ("w int8 4 P(", "line 1: expected"),
        ("w int8 4x4 P() 4", "line 1: the chunk"),
        ("w int8 0", "line 1: sizes must be 1 or more"),
        ("w.{3..1} int8 4", "line 1: {3..1}"),
        ("w int8 4\nw int8 4", "'w' is described twice"),
        ("# nothing", "it describes no arrays"),
        ('[{"name": "w"}]', "entry 1: expected an object with name, shape, dtype"),
        ("[{]", "Expecting"),
    ],
)
def test_a_wrong_model_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        described.parse_shapes(text)
    assert message in str(caught.value)
