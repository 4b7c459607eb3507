from __future__ import annotations

import pytest

from orbax_ext.plan.forecast import notation

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("P()", ()),
        ("P(None,tp)", ((), ("tp",))),
        ("P('dp', None, (\"pp\", tp))", (("dp",), (), ("pp", "tp"))),
        ("PartitionSpec((dp,tp),)", (("dp", "tp"),)),
    ],
)
def test_specs_are_parsed_and_written(text: str, spec: notation.Spec) -> None:
    assert notation.parse_spec(text) == spec
    assert notation.parse_spec(notation.spec_text(spec)) == spec


@pytest.mark.parametrize(
    "text", ["tp", "P(tp", "P(tp dp)", "P(1)", "P(f(x))", "P(__import__('os').system('x'))", "P((tp))x"]
)
def test_a_text_that_is_not_a_spec_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"spec|axis"):
        notation.parse_spec(text)


@pytest.mark.parametrize("text", ["", "dp", "dp=0", "dp=4,dp=2", "dp=4,,tp=2", "4=dp", "dp=-1"])
def test_a_text_that_is_not_a_mesh_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"pp=1,dp=4,tp=8|named twice"):
        notation.parse_mesh(text)
