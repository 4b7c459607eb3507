"""What stores do differently: odd names, many objects, large ones, credentials that are wrong."""

from __future__ import annotations

import concurrent.futures

import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from orbax_ext.storage import s3 as s3_lib
from tests.support.s3_checkpoints import check, restore, save
from tests.support.s3_proxy import FaultProxy

pytestmark = pytest.mark.once

ODD_NAMES = [
    "a b",
    "a%20b",
    "a+b",
    "a=b&c",
    "a#b",
    "ü",
    "日本",
    "a'b",
    "(a)",
    "a:b",
    "a@b",
    "a,b;c",
    "~a",
    "a$b",
    "a!b",
]


def test_names_with_odd_characters_are_kept(s3: str) -> None:
    for name in ODD_NAMES:
        (epath.Path(s3) / name / name).write_text(name)
    assert sorted(path.name for path in epath.Path(s3).iterdir()) == sorted(ODD_NAMES)
    for name in ODD_NAMES:
        assert [path.name for path in (epath.Path(s3) / name).iterdir()] == [name]
        assert (epath.Path(s3) / name / name).read_text() == name
    (epath.Path(s3) / "a b").rename(epath.Path(s3) / "b+a")
    assert (epath.Path(s3) / "b+a" / "a b").read_text() == "a b"
    epath.Path(s3).rmtree()
    assert not epath.Path(s3).exists()


def test_a_checkpoint_is_saved_below_an_odd_name(s3: str) -> None:
    save(f"{s3}/über 1+1=2 & more", 0)
    check(restore(f"{s3}/über 1+1=2 & more"))


def test_five_thousand_objects_are_listed_and_deleted(s3: str, s3_port: int) -> None:
    s3_lib.enable_s3(f"http://127.0.0.1:{s3_port}", "us-east-1")  # past the proxy, which is slow
    directory = epath.Path(s3) / "many"
    names = [f"{number:05}" for number in range(5000)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: (directory / name).write_text(name), names))
    before = s3_lib.s3_usage()
    assert sorted(path.name for path in directory.iterdir()) == names
    assert (s3_lib.s3_usage() - before).metadata_requests == 5
    directory.rmtree()
    assert not directory.exists()
    assert (s3_lib.s3_usage() - before).metadata_requests == 5 + 5 + 5 + 2  # list, list, delete, does it exist?


def test_a_checkpoint_larger_than_a_part_of_an_upload_is_restored(s3: str, proxy: FaultProxy) -> None:
    """A large file of metadata is sent in parts; TensorStore sends a file with chunks of arrays in one request."""
    state = {"weights": np.random.default_rng(0).integers(0, 255, 24 << 20, np.uint8)}
    text = {"text": "0123456789abcdef" * (20 << 16)}  # 20 MiB
    with ocp.CheckpointManager(s3) as manager:
        manager.save(0, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state), text=ocp.args.JsonSave(text)))
        manager.wait_until_finished()
        uploads = [request.line for request in proxy.requests if "uploadId" in request.line]
        assert len(uploads) == 4  # three parts, then the completion
        assert all("/0/text/" in line for line in uploads)
        args = ocp.args.Composite(state=ocp.args.PyTreeRestore(), text=ocp.args.JsonRestore())
        restored = manager.restore(0, args=args)
    assert np.asarray(restored["state"]["weights"]).tobytes() == state["weights"].tobytes()
    assert restored["text"] == text


@pytest.mark.parametrize(
    ("variable", "value"),
    [("AWS_SECRET_ACCESS_KEY", "a-wrong-secret-key-of-the-tests"), ("AWS_ACCESS_KEY_ID", "AKIDNOBODYKNOWSIT")],
)
def test_wrong_credentials_are_an_error_that_says_so(
    s3: str, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(PermissionError, match=rf"{s3}.*(credentials|secret key|access key)") as error:
        save(s3, 0)
    assert value not in str(error.value)
    with pytest.raises(PermissionError):
        (epath.Path(s3) / "file").write_text("x")
