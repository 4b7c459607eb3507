"""The documents are true: links lead somewhere, names exist, and the front pages stay short."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import re
from collections.abc import Iterator

import pytest

import orbax_ext
from orbax_ext import options
from orbax_ext.cli import exits, main

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).resolve().parents[1]
README, BUILD = ROOT / "README.md", ROOT / "BUILD.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
FOLDERS = [ROOT / "patches" / "README.md", ROOT / "examples" / "README.md"]
DOCUMENTS = [README, BUILD, ROOT / "CHANGELOG.md", *PAGES, *FOLDERS, *sorted((ROOT / "bench" / "results").glob("*.md"))]

_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
_ATTRIBUTE = re.compile(r"\b(?:src|srcset|href)=\"([^\"\s]+)")
_PYTHON_FILE = re.compile(r"`([\w./-]+\.py)`")
_FOLDER = re.compile(r"`([\w/-]+/)`")  # .venv/ and other hidden folders are not in the repository
_ROOM = re.compile(r"^\| `([\w/]+)/` \|[^|]*\|([^|]*)\|$", re.MULTILINE)
_TARGET = re.compile(r"(?:`|^)make ([a-z][a-z0-9-]*)", re.MULTILINE)


def relative(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=relative)


@functools.cache
def anchors(document: pathlib.Path) -> frozenset[str]:
    """Returns the anchors of a document's headings, as GitHub makes them."""
    seen: dict[str, int] = {}
    found = set()
    for title in re.findall(r"^#{1,6} +(.+?) *#*$", _FENCE.sub("", document.read_text()), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(slug if slug not in seen else f"{slug}-{seen[slug]}")
        seen[slug] = seen.get(slug, 0) + 1
    return frozenset(found)


def links(document: pathlib.Path) -> Iterator[str]:
    """Yields the targets of a document's relative links and pictures."""
    prose = _CODE.sub("code", _FENCE.sub("", document.read_text()))
    for target in _LINK.findall(prose) + _ATTRIBUTE.findall(prose):
        if not re.match(r"[a-z][a-z+.-]*:", target):
            yield target


def dead(document: pathlib.Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (document.parent / path).resolve() if path else document
    if not target.exists() or ROOT not in (target, *target.parents):
        return True
    return bool(anchor) and (target.suffix != ".md" or anchor not in anchors(target))


@every_document
def test_every_link_leads_to_a_file_and_a_heading(document: pathlib.Path) -> None:
    assert [link for link in links(document) if dead(document, link)] == []


@pytest.mark.parametrize(("document", "most"), [(README, 170), (BUILD, 200)], ids=["README", "BUILD"])
def test_front_pages_are_short(document: pathlib.Path, most: int) -> None:
    assert len(document.read_text().splitlines()) <= most


@pytest.mark.parametrize("knob", sorted(set(options.FIELDS) - set(options.DEPRECATED)))
def test_readme_names_every_knob(knob: str) -> None:
    assert f"`{knob}`" in README.read_text()


@pytest.mark.parametrize("command", main.COMMANDS)
def test_readme_names_every_command(command: str) -> None:
    assert re.search(rf"`orbax-ext {command}\b", README.read_text())


@pytest.mark.parametrize("name", orbax_ext.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    text = "".join(document.read_text() for document in (README, *PAGES))
    assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)


@every_document
def test_names_of_the_package_that_a_document_uses_exist(document: pathlib.Path) -> None:
    used = set(re.findall(r"\borbax_ext\.([A-Za-z]\w*)", document.read_text()))
    assert {
        name for name in used - set(orbax_ext.__all__) if not importlib.util.find_spec(f"orbax_ext.{name}")
    } == set()


@every_document
def test_python_examples_compile(document: pathlib.Path) -> None:
    for example in re.findall(r"^```python\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE):
        compile(example, relative(document), "exec")


@every_document
def test_files_and_folders_that_a_document_names_exist(document: pathlib.Path) -> None:
    text = document.read_text()
    names = _PYTHON_FILE.findall(text) + (_FOLDER.findall(text) if document == BUILD else [])
    assert [name for name in names if not any((base / name).exists() for base in (ROOT, ROOT / "orbax_ext"))] == []


def test_the_table_of_rooms_names_modules_that_exist() -> None:
    rooms = _ROOM.findall(BUILD.read_text())
    assert len(rooms) >= 10
    missing = []
    for room, modules in rooms:
        folder = ROOT / room if room == "orbax_ext" else ROOT / "orbax_ext" / room
        for module in re.findall(r"`(\w+)`", modules):
            if not (folder / f"{module}.py").exists() and not (folder / module / "__init__.py").exists():
                missing.append(f"{room}/{module}")
    assert missing == []


def test_every_room_is_in_the_table_of_rooms() -> None:
    folders = {path.parent.name for path in (ROOT / "orbax_ext").glob("*/__init__.py")}
    assert folders <= {room for room, _ in _ROOM.findall(BUILD.read_text())}


@every_document
def test_make_targets_that_a_document_names_exist(document: pathlib.Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {word for line in re.findall(r"^\.PHONY:(.*)$", makefile, re.MULTILINE) for word in line.split()}
    assert set(_TARGET.findall(document.read_text())) <= targets


@pytest.mark.parametrize("page", sorted((ROOT / "bench" / "results").glob("*.md")), ids=relative)
def test_every_measured_page_is_in_the_list_of_documents(page: pathlib.Path) -> None:
    assert f"(../{relative(page)})" in (ROOT / "docs" / "README.md").read_text()


def test_a_dead_link_and_a_dead_anchor_are_found(tmp_path: pathlib.Path) -> None:
    assert dead(README, "docs/no_such_page.md")
    assert dead(README, "docs/restoring.md#no-such-heading")
    assert not dead(README, "docs/restoring.md#orbaxs-v1-api")
    page = tmp_path / "page.md"
    text = "# `One` & two\n```\n# no heading, [no](link.md)\n```\n## Same\n\n## Same\n[one](a.md) `[b](b.md)`\n"
    page.write_text(text + '<img src="c.svg">')
    assert anchors(page) == {"one--two", "same", "same-1"}
    assert list(links(page)) == ["a.md", "c.svg"]


def test_the_page_of_public_names_names_all_of_them_and_no_others() -> None:
    table = (ROOT / "docs" / "public.md").read_text().partition("|---|---|")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(orbax_ext.__all__)


def test_the_page_of_public_names_has_all_exit_codes_of_commands() -> None:
    text = (ROOT / "docs" / "public.md").read_text().partition("their exit codes:")[2].partition(";")[0]
    codes = {code for name, code in vars(exits).items() if name.startswith("EXIT_")}
    assert {int(number) for number in re.findall(r"\d+", text)} == codes
