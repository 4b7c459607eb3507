"""Rewrites the parts of the documents that are made from data, between `<!-- NAME:begin -->` and `<!-- NAME:end -->`.

python -m tools.docs [--check]
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys

from orbax_ext.upstream import defects
from tools import releases

README = releases.ROOT / "README.md"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the documents are up to date")
    check = parser.parse_args(argv).check
    if not update(README, "defects", defects.markdown_table(), check=check):
        print("README.md: the table of defects is up to date")
        return 0
    print(f"README.md: the table of defects {'is out of date, run: make docs' if check else 'was rewritten'}")
    return 1 if check else 0


def update(document: pathlib.Path, name: str, content: str, *, check: bool = False) -> bool:
    """Puts `content` between the markers `name` of a document; returns whether that changes it."""
    before = document.read_text()
    after = between_markers(before, name, content)
    if after != before and not check:
        document.write_text(after)
    return after != before


def between_markers(text: str, name: str, content: str) -> str:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"Expected {begin!r} and {end!r} once each, on lines of their own.")
    return pattern.sub(lambda match: f"{begin}\n{content}\n{end}", text)


if __name__ == "__main__":
    sys.exit(main())
