"""Compares the client for metadata files on S3 with that of an earlier commit.

    python -m bench.s3_client [--before COMMIT] [--runs 5] [--write]

Each commit is installed with its own pinned versions in a temporary environment. The server is moto, because s3fs wrote
directory markers, which rclone's server refuses.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from tests.support import s3_server, s3_stores
from tests.support.s3_proxy import FaultProxy
from tools import markdown, releases

PAGE = markdown.Page(
    "bench/results/s3_client.md",
    "The client for metadata files on S3, before and after, measured",
    """s3fs (before) and obstore (after). Packages and megabytes are what the extra `s3` adds to an installation.
    Seconds are those from the first use of an s3:// path to the content of a small file, in a new process that has
    imported Orbax, the quickest and the slowest of all runs, from a server on the same machine. Requests are those of
    one process that saves a step, restores it and deletes it, counted at a proxy; those of TensorStore are
    included.""",
    "python -m bench.s3_client --write",
)
BEFORE = "727da7b"  # the last commit with s3fs
_FIRST_BYTE = """if True:
    import sys, time
    import orbax.checkpoint
    import orbax_ext
    from etils import epath
    from orbax_ext.storage import s3
    start = time.perf_counter()
    s3.enable_s3(sys.argv[1], "us-east-1")
    assert epath.Path(sys.argv[2]).read_bytes() == b"content"
    print(time.perf_counter() - start)
"""
_WRITE = """if True:
    import sys
    from etils import epath
    from orbax_ext.storage import s3
    s3.enable_s3(sys.argv[1], "us-east-1")
    epath.Path(sys.argv[2]).write_bytes(b"content")
"""
_CHECKPOINT = """if True:
    import sys
    import numpy as np
    import orbax.checkpoint as ocp
    from orbax_ext.storage import s3
    s3.enable_s3(sys.argv[1], "us-east-1")
    with ocp.CheckpointManager(sys.argv[2]) as manager:
        manager.save(0, args=ocp.args.PyTreeSave({"weights": np.arange(4096.0)}))
        manager.wait_until_finished()
        manager.restore(0, args=ocp.args.PyTreeRestore())
        manager.delete(0)
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.s3_client", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", default=BEFORE, help="a commit (%(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="of the read of one file (%(default)s)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.path}")
    args = parser.parse_args(argv)
    moto = s3_stores.Moto()
    rows = []
    with moto.running(bucket_in_host_name=False) as port, FaultProxy(port) as proxy:
        for name, commit in {"before (s3fs)": args.before, "after (obstore)": "HEAD"}.items():
            bucket = f"bucket-{name.split()[0]}"
            s3_server.make_bucket(port, bucket)
            with tempfile.TemporaryDirectory() as folder:
                rows.append((name, *_measure(pathlib.Path(folder), commit, f"s3://{bucket}", proxy, args.runs)))
            print(markdown.row(rows[-1]), flush=True)
    if args.write:
        PAGE.write(markdown.table(("", "packages", "MB installed", "seconds to the first byte", "requests"), rows))
    return 0


def _measure(folder: pathlib.Path, commit: str, url: str, proxy: FaultProxy, runs: int) -> tuple[object, ...]:
    packages, size = _install(folder, commit)
    python = folder / "env" / "bin" / "python"

    def run(program: str, path: str) -> str:
        command = [str(python), "-c", program, proxy.url, path]
        environ = {**s3_server.ENVIRONMENT, "PATH": "/usr/bin:/bin", "HOME": str(folder), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, env=environ, cwd=folder / "tree", capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return done.stdout

    run(_WRITE, f"{url}/file")
    seconds = [float(run(_FIRST_BYTE, f"{url}/file")) for _ in range(runs)]
    proxy.calm()
    run(_CHECKPOINT, f"{url}/run")
    return packages, round(size), f"{min(seconds):.2f} to {max(seconds):.2f}", len(proxy.requests)


def _install(folder: pathlib.Path, commit: str) -> tuple[int, float]:
    """Installs a commit; returns the packages and the megabytes that its extra `s3` adds."""
    (folder / "tree").mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=releases.ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder / "tree")], input=archive, check=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
    sizes = []
    for extra in ("", "[s3]"):
        pip = [str(folder / "env" / "bin" / "python"), "-m", "pip", "install", "-q"]
        pins = ["-c", "constraints/newest.txt", "-e", f".{extra}"]
        subprocess.run([*pip, *pins], cwd=folder / "tree", check=True, capture_output=True)
        sizes.append(_installed(folder / "env"))
    return sizes[1][0] - sizes[0][0], sizes[1][1] - sizes[0][1]


def _installed(environment: pathlib.Path) -> tuple[int, float]:
    packages = next(environment.glob("lib/python*/site-packages"))
    size = sum(file.stat().st_size for file in packages.rglob("*") if file.is_file()) / 1e6
    return len(list(packages.glob("*.dist-info"))), size


if __name__ == "__main__":
    sys.exit(main())
