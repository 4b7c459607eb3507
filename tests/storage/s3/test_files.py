from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import pytest
from etils import epath

from orbax_ext.storage import s3 as s3_lib
from tests.support import s3_server
from tests.support.s3_proxy import Fault, FaultProxy

pytestmark = pytest.mark.once


def test_files_and_directories_behave_as_on_a_disk(s3: str, tmp_path: pathlib.Path) -> None:
    def use(root: epath.Path) -> list[Any]:
        seen: list[Any] = [root.exists()]
        (root / "a" / "b").mkdir(parents=True)
        seen += [(root / "a").is_dir(), (root / "a" / "b").exists(), list((root / "a" / "b").iterdir())]
        (root / "a" / "one.txt").write_text("one")
        (root / "a" / "two.bin").write_bytes(b"\0\1")
        (root / "a" / "empty").write_bytes(b"")
        (root / "a" / "b" / "deep.txt").write_text("deep")
        seen += [(root / "a" / "one.txt").read_text(), (root / "a" / "two.bin").read_bytes()]
        seen += [(root / "a" / "empty").read_bytes(), (root / "a" / "one.txt").stat().length]
        seen += [sorted(path.name for path in (root / "a").iterdir()), (root / "a" / "one.txt").is_dir()]
        seen += [sorted(path.name for path in root.glob("a/*.txt")), sorted(path.name for path in root.glob("*/b"))]
        walked = [(path.relative_to(root), sorted(names), sorted(files)) for path, names, files in root.walk()]
        seen.append([(str(path), names, files) for path, names, files in walked])
        (root / "a" / "b").rename(root / "c")
        seen += [(root / "a" / "b").exists(), (root / "c" / "deep.txt").read_text()]
        (root / "a" / "one.txt").copy(root / "c" / "copy.txt")
        (root / "a" / "one.txt").unlink()
        seen += [(root / "c" / "copy.txt").read_text(), (root / "a" / "one.txt").exists()]
        for action in (
            lambda: (root / "none").read_text(),
            lambda: (root / "none").unlink(),
            lambda: (root / "none").rmtree(),
            lambda: list((root / "none").iterdir()),
            lambda: (root / "none").stat(),
            lambda: (root / "a").mkdir(),
            lambda: (root / "c" / "copy.txt").copy(root / "c" / "deep.txt"),
        ):
            try:
                action()
                seen.append("done")
            except OSError as error:
                seen.append(
                    next(kind.__name__ for kind in (FileNotFoundError, FileExistsError) if isinstance(error, kind))
                )
        (root / "a").mkdir(exist_ok=True)
        root.rmtree()
        seen.append(root.exists())
        return seen

    assert use(epath.Path(s3)) == use(epath.Path(tmp_path / "run"))


def test_a_large_file_is_written_and_read_in_parts(s3: str, proxy: FaultProxy) -> None:
    content = bytes(range(256)) * (80 << 10)  # 20 MiB
    path = epath.Path(s3) / "large"
    path.write_bytes(content)
    uploads = [request.line for request in proxy.requests if "uploadId" in request.line]
    assert len(uploads) == 4  # three parts, then the completion
    assert path.read_bytes() == content
    path.rename(path.parent / "moved")
    assert (path.parent / "moved").stat().length == len(content)


def test_a_large_file_is_read_from_a_store_that_sends_ranges_with_the_wrong_status(s3: str, s3_port: int) -> None:
    """rclone does that; the proxy of the other tests corrects it."""
    s3_lib.enable_s3(f"http://127.0.0.1:{s3_port}", "us-east-1")
    content = bytes(range(256)) * (40 << 10)
    (epath.Path(s3) / "large").write_bytes(content)
    assert (epath.Path(s3) / "large").read_bytes() == content


def test_files_are_copied_between_buckets_through_this_process(s3: str, s3_port: int) -> None:
    s3_server.make_bucket(s3_port, "other-bucket")
    content = bytes(range(256)) * (80 << 10)
    (epath.Path(s3) / "a" / "large").write_bytes(content)
    (epath.Path(s3) / "a" / "empty").write_bytes(b"")
    (epath.Path(s3) / "a").rename("s3://other-bucket/run/b")
    assert epath.Path("s3://other-bucket/run/b/large").read_bytes() == content
    assert epath.Path("s3://other-bucket/run/b/empty").read_bytes() == b""
    assert not epath.Path(s3).exists()


def test_a_path_that_is_moved_to_itself_keeps_its_files(s3: str, proxy: FaultProxy) -> None:
    (epath.Path(s3) / "a" / "file").write_text("one")
    proxy.faults.append(Fault("denied", "^(PUT|POST|DELETE) "))  # nothing is copied or deleted
    for path in (epath.Path(s3) / "a", epath.Path(s3) / "a" / "file"):
        path.replace(f"{path}/" if path.is_dir() else path)
        assert (epath.Path(s3) / "a" / "file").read_text() == "one"
    with pytest.raises(FileNotFoundError):
        (epath.Path(s3) / "none").replace(epath.Path(s3) / "none")


def test_a_directory_is_not_moved_into_itself_nor_onto_one_above_it(s3: str) -> None:
    """Keys that are copied and keys that are deleted could be the same ones."""
    for name in ("a/x", "a/a/x"):
        (epath.Path(s3) / name).write_text(name)
    for source, target in (("a", "a/a"), ("a/a", "a")):
        with pytest.raises(OSError, match="one is inside the other"):
            (epath.Path(s3) / source).replace(epath.Path(s3) / target)
    assert [(epath.Path(s3) / name).read_text() for name in ("a/x", "a/a/x")] == ["a/x", "a/a/x"]
    (epath.Path(s3) / "a").replace(epath.Path(s3) / "ab")  # begins with the same letters, but is beside it
    assert (epath.Path(s3) / "ab" / "a" / "x").read_text() == "a/a/x"


def test_all_of_a_bucket_is_moved(s3: str, s3_port: int) -> None:
    s3_server.make_bucket(s3_port, "target-bucket")
    (epath.Path(s3) / "file").write_text("one")
    epath.Path(s3).parent.replace("s3://target-bucket/moved")
    assert epath.Path("s3://target-bucket/moved/run/file").read_text() == "one"
    assert not epath.Path(s3).exists()


@pytest.mark.parametrize("mode", ["w", "wb", "a"])
def test_a_file_is_written_as_a_whole_or_not_at_all(s3: str, proxy: FaultProxy, mode: str) -> None:
    path = epath.Path(s3) / "file"
    with contextlib.suppress(ZeroDivisionError), path.open(mode) as file:
        file.write("half" if mode != "wb" else b"half")
        raise ZeroDivisionError
    assert not path.exists()
    proxy.faults.append(Fault("denied", "PUT "))
    with pytest.raises(PermissionError, match=f"{path}: AccessDenied"):
        path.write_text("x")
    assert not path.exists()
    proxy.calm()
    path.write_text("one")
    with path.open("a") as file:
        file.write(", two")
    assert path.read_text() == "one, two"
