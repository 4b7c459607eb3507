"""What `make dist` checks before it calls a wheel ready."""

from __future__ import annotations

import email.message
import re

import pytest

from orbax_ext import version
from tools import dist

pytestmark = pytest.mark.once

REPOSITORY = ["orbax_ext/__init__.py", "orbax_ext/patches", "patches/README.md", "patches/0.11.33/series", "bench/a.py"]
PACKAGE = ["orbax_ext/__init__.py", "orbax_ext/patches/0.11.33/series"]
STEM = f"orbax_ext-{version.__version__}"
WHEEL = [*PACKAGE, *(f"{STEM}.dist-info/{name}" for name in dist._INFO)]
SDIST = [f"{STEM}/{name}" for name in (*PACKAGE, *dist._SDIST_FILES, "orbax_ext.egg-info/SOURCES.txt")]


def test_complete_files_have_no_problems() -> None:
    assert dist.wheel_problems(WHEEL, REPOSITORY) == []
    assert dist.sdist_problems(SDIST, REPOSITORY) == []


@pytest.mark.parametrize("name", ["orbax_ext/__init__.py", "orbax_ext/patches/0.11.33/series"])
def test_a_missing_file_of_the_package_is_a_problem(name: str) -> None:
    assert dist.wheel_problems([file for file in WHEEL if file != name], REPOSITORY) == [f"wheel: {name} is missing"]
    without = [file for file in SDIST if file != f"{STEM}/{name}"]
    assert dist.sdist_problems(without, REPOSITORY) == [f"sdist: {name} is missing"]


def test_a_missing_licence_is_a_problem() -> None:
    licence = f"{STEM}.dist-info/licenses/LICENSE"
    assert dist.wheel_problems([file for file in WHEEL if file != licence], REPOSITORY) == [
        f"wheel: {licence} is missing"
    ]


@pytest.mark.parametrize("name", ["bench/a.py", "tests/test_init.py"])
def test_benchmarks_and_tests_do_not_belong_into_a_release(name: str) -> None:
    assert dist.wheel_problems([*WHEEL, name], REPOSITORY) == [f"wheel: {name} does not belong there"]
    assert dist.sdist_problems([*SDIST, f"{STEM}/{name}"], REPOSITORY) == [f"sdist: {name} does not belong there"]


def test_wrong_metadata_is_a_problem() -> None:
    metadata = email.message.Message()
    assert len(dist.metadata_problems(metadata)) == 7
    metadata["Requires-Dist"] = f"orbax-checkpoint>={version.OLDEST_ORBAX}"
    metadata["Version"] = "0.0.1"
    assert f"metadata: Version is '0.0.1', not '{version.__version__}'" in dist.metadata_problems(metadata)


def test_a_readme_that_lost_a_table_is_a_problem() -> None:
    text = "| a |\n|---|\n\n```\ncode\n```\n![picture](a.svg)\n"
    assert dist.readme_problems(text, "<table></table><pre></pre><img>") == []
    assert dist.readme_problems(text, "<pre></pre><img>") == ["readme: 0 of 1 tables rendered"]


def test_a_relative_link_or_picture_is_a_problem() -> None:
    text = "![picture](a.svg) <img src='b.svg'>"
    html = """<a href="https://example.org">a</a> <img src="a.svg"> <img src='b.svg'> <a href="docs/s3.md">S3</a>
    <a href="#knobs">knobs</a> <a href="mailto:a@example.org">b</a> <source srcset="c.svg">
    <h2 id="commands"><a href="#commands"></a></h2>"""
    relative = ["a.svg", "b.svg", "docs/s3.md", "#knobs", "c.svg"]
    assert dist.readme_problems(text, html) == [f"readme: {target} is relative" for target in relative]


def test_the_long_description_has_the_words_of_relative_links_and_no_relative_pictures() -> None:
    text = """See [Orbax](https://example.org/orbax) and [Defects](docs/defects.md#all).

<picture><source srcset="a-dark.svg">
<img src="a.svg"></picture>

![A plot](a.svg)

| [S3](docs/s3.md) | ![badge](https://example.org/badge.svg) |
"""
    assert (
        dist.standalone(text)
        == """See [Orbax](https://example.org/orbax) and Defects.

| S3 | ![badge](https://example.org/badge.svg) |
"""
    )


def test_the_readme_leads_nowhere_without_the_repository() -> None:
    text = dist.standalone((dist.ROOT / "README.md").read_text())
    assert re.findall(r"\]\((?!https:)|(?:src|srcset|href)=", text) == []
    assert "Defects." in text
    assert "https://github.com/google/orbax" in text


def test_the_changelog_begins_with_this_version() -> None:
    assert dist.changelog_problems((dist.ROOT / "CHANGELOG.md").read_text()) == []
    assert dist.changelog_problems("# Changes\n\n## 0.0.1\n") != []
