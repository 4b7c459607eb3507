"""No loop that waits without a limit: each `while` of the package that sleeps or waits, and each pool of threads.

tests/test_waits.py has the single calls that wait. A loop of short sleeps waits as long as one without a limit.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.package_source import WAITING, modules

SLEEPS = {"sleep", "Sleep", "Wait", "poll"}  # the two in capitals are actions of the protocol
POOLS = ("ThreadPoolExecutor", "ProcessPoolExecutor", "Pool")

# The module, the function and the condition of the loop, with its limit or the reason why it needs none.
_PATIENCE = "`Patience`: stall_timeout after the last progress, or timeout in total"
_READS = "ends with what is being read, which `Session.together` or `while_bytes_arrive` cancels"
_DAEMON = "in a daemon thread that nobody waits for without a limit, and that `stop` ends"
_ENDS = "ends by its own limits: of meetings with others, and of silent storage where it meets nobody"
LOOPS: dict[tuple[str, str, str], str] = {
    (
        "emergency",
        "all_leaves",
        "(remaining := [index for index in self.tables if index not in arrays and index not in absent])",
    ): "each turn is a meeting, which has limits, and leaves fewer leaves",
    ("handler", "_single_replica_deserialize_and_broadcast", "not pipeline.done"): "each turn is a meeting with limits",
    ("handler", "one_at_a_time", "not _turn.take(loop)"): "stall_timeout after the last byte that was read",
    ("lab.cluster", "outcomes", "waiting"): "the time limit of the run",
    ("lab.fork_server", "main", "True"): "ends when the parent closes the socket or ends",
    ("lab.forked", "wait", "(code := self.poll()) is None"): "its argument `timeout`",
    ("lab.worker", "main", "(job := channel.recv()) is not None"): "a worker waits for jobs until its channel closes",
    ("lab.worker", "watch", "os.getppid() == parent"): "a daemon thread that ends with its process",
    ("meeting.follower", "_await", "True"): _PATIENCE,
    ("meeting.leader", "_await_arrivals", "True"): _PATIENCE,
    ("meeting.leader", "_error_of", "not patience.expired(GRACE)"): "GRACE",
    ("meeting.leader", "_gather", "True"): _PATIENCE,
    (
        "meeting.leader",
        "hand_in",
        "(yield from self.call(Get(session.handed_in_count))) < self.place.processes and self.now < deadline",
    ): "HAND_IN_LIMIT",
    ("meeting.once", "_result", "True"): "the limit of the `SharedResults`",
    ("meeting.threads", "_tick", "not self._stop.wait(self._every)"): "a daemon thread; ends with its `with` block",
    ("meeting.threads", "watched", "True"): "its argument `deadline`",
    ("storage.checkpoint.arrays", "_ocdbt_entries", "level"): "each request has REQUEST_LIMIT; the levels are finite",
    (
        "storage.stall",
        "_while_counting",
        "not (await asyncio.wait({task}, timeout=min(stall, total, _LOOK_EVERY)))[0]",
    ): "`stall` seconds after the last change of a counter",
    ("transfer.again", "answers", "not (await asyncio.wait({waiting}, timeout=_LOOK_EVERY))[0]"): _READS,
    ("transfer.room", "taken", "count > self._free"): _READS,
    (
        "transfer.compiling",
        "_compile_all",
        "not self._needed.done() and (left := (self._put_off_until - time.monotonic())) > 0",
    ): "a second after the last meeting, or less",
    ("transfer.host_reads", "_compile_all", "(compile_programs := self._to_compile.get()) is not None"): _DAEMON,
    ("transfer.host_reads", "_read_units", "(unit := begin()) is not None"): _DAEMON,
    ("transfer.turns", "comes", "(before := self._before) is not None"): "its argument `limit`",
    ("transfer.local_pipeline", "_finish_exchanges", "len(self._under_way) > left"): "each exchange has a limit",
    (
        "transfer.pending_restore",
        "_wait_for",
        "not stopped() and (not one.wait(timeout=_LOOK_EVERY))",
    ): "`OthersTurn`: stall_timeout after the last byte that was read",
    ("transfer.pending_restore", "finish", "True"): f"its argument `timeout`; without one, a restore {_ENDS}",
    ("transfer.read_ahead", "until_idle", "not self.idle"): _READS,
    ("transfer.reads", "_called", "True"): _READS,
    ("transfer.reads", "everything_read", "not self.idle"): _READS,
    (
        "transfer.verify",
        "verify",
        "wrong is not None and len(level[wrong.leaf_set]) > 1",
    ): "each turn is a meeting, which has limits, and halves a set",
}


def functions(module: str) -> Iterator[tuple[str, ast.AST]]:
    """Yields each function of a module, by name."""
    for node in ast.walk(modules()[module]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes below one, without those of functions that are defined there."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from own_nodes(child)


def pauses(node: ast.AST) -> bool:
    """Returns whether a node gives time to others: a sleep, a call that waits, or an await."""
    if isinstance(node, ast.Await):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in ("get", "join") and (node.args or isinstance(node.func, ast.Name)):  # of mappings and texts
        return False
    return name in SLEEPS | WAITING


def loops() -> set[tuple[str, str, str]]:
    return {
        (module.removeprefix("orbax_ext."), function, ast.unparse(node.test))
        for module in modules()
        for function, body in functions(module)
        for node in own_nodes(body)
        if isinstance(node, ast.While) and any(map(pauses, own_nodes(node)))
    }


def pools() -> set[str]:
    """Returns where a pool of threads is made. Leaving its block waits for all of them, and so does the interpreter."""
    calls = ((module, node) for module, tree in modules().items() for node in ast.walk(tree))
    return {
        f"{module}:{node.lineno}"
        for module, node in calls
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(POOLS)
    }


def test_every_loop_that_waits_has_a_limit_or_a_reason() -> None:
    assert loops() - LOOPS.keys() == set()


def test_every_reason_is_needed() -> None:
    assert LOOPS.keys() - loops() == set()


def test_no_pool_of_threads_is_made() -> None:
    assert pools() == set()


def test_loops_that_poll_are_found() -> None:
    source = "async def wait():\n    while not done():\n        await asyncio.sleep(0.01)"
    (loop,) = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.While)]
    assert any(map(pauses, own_nodes(loop)))
