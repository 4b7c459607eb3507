"""No wait without a limit: everything in the package that waits has a limit, or a reason in the list below.

An `await` of a coroutine function of the package is not listed: what that function waits for is. Work of a restore
between two meetings needs no limit of its own: `Session.together` cancels it when no process advances any more. A
restore that meets nobody is cancelled by `while_bytes_arrive` when it reads nothing any more.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

import pytest

from tests.support.package_source import WAITING, locks, locks_in, modules, name_of

BY_CALL = {"in_thread", "deserialize", "read"}  # of Orbax too, or limited only if asked: each call is looked at
LIMITS = {"timeout", "limit", "timeout_in_ms", "initialization_timeout", "processes"}
MEETINGS = (".arrive", ".meet", ".hand_in")  # which have limits of their own

# The module and the expression that waits, with the reason why it has no limit.
_WORK = "`Session.together` cancels it when no process advances, and `while_bytes_arrive` where there is no session"
_DESCRIBE = "`while_storage_answers` around it, or `wait_for` where it is advice about an error"
_AHEAD = "in a thread that nobody waits for: a restore that needs the read has limits, and stopping cancels it"
_ENDED = "the task has ended"
_OWN = "a coroutine function of the package: what it waits for is listed"
_LOCK = "held for a few lines that wait for nothing else"
_PLAIN = "a restore by Orbax itself, as if orbax_ext were not there"
REASONS: dict[tuple[str, str], str] = {
    ("cli.check.command", "jax.distributed.shutdown()"): "in a thread that is joined with a limit",
    (
        "cli.check.rehearsal",
        "jax.block_until_ready([leaf for leaf in jax.tree.leaves(restored) if isinstance(leaf, jax.Array)])",
    ): "the restore before it has ended on all processes",
    ("cli.demo.storage", "await original(*args, **kwargs)"): "Orbax's own read; the lab ends a process after its limit",
    ("cli.demo.storage", "self._lock"): "held for an addition",
    (
        "cli.demo.work",
        "jax.block_until_ready(manager.restore(step, args=_args(abstract)))",
    ): "the lab ends a process after its time limit",
    ("cli.demo.work", "manager.wait_until_finished()"): "the lab ends a process after its time limit",
    (
        "cli.doctor.installation",
        "multihost_utils.process_allgather(np.array([jax.process_index()]))",
    ): "the lab ends a process after its time limit",
    ("handler", "await super().deserialize(infos, args)"): _PLAIN,
    ("lab.cluster", "self.channel.recv()"): "the channel was polled with a limit",
    (
        "lab.fork_server",
        "socket.recv_fds(requests, LONGEST_MESSAGE, 2)",
    ): "the server waits for requests; the socket closes when the parent ends",
    ("lab.forked", "self._asking"): "held for one answer, for which the socket has a limit",
    ("lab.forked", "self._starting"): "held while a process is started, which is not waited for",
    ("lab.forked", "self._socket.recv(LONGEST_MESSAGE)"): "the socket has a limit",
    ("lab.worker", "channel.recv()"): "a worker waits for jobs; the channel closes when the cluster ends",
    ("lab.worker", "jax.distributed.shutdown()"): "the cluster ends a worker that does not end by itself",
    ("meeting.board", "self._writing"): "only the thread that makes the call holds it; `close` waits with a limit",
    ("meeting.session", "await work"): _WORK,
    ("meeting.threads", "self._lock"): _LOCK,
    (
        "placement.stacked_restore",
        "await restore_leaves(infos, _stored_args_of(args, conversions))",
    ): "the restore itself, step by step",
    ("placement.stacked_restore", "await array_metadata.read(handler, infos, shardings=False)"): _OWN,
    ("registration", "_lock"): _LOCK,
    ("report.recorder", "await work"): _WORK,
    (
        "request",
        "await array_metadata.read(handler, [infos[index] for index in indices], shardings=shardings)",
    ): _OWN,
    ("storage.array_metadata", "await handler.metadata(infos)"): _DESCRIBE,
    ("storage.array_metadata", "await in_thread(snapshot.ask, name, str(infos[0].parent_dir), read_all)"): _DESCRIBE,
    ("storage.s3", "_lock"): _LOCK,
    ("storage.s3.directories", "self._lock"): _LOCK,
    ("storage.s3.objects", "self._lock"): _LOCK,
    ("storage.s3.sharing", "answer.result()"): "the thread that asks sets it, also if it fails; requests have limits",
    ("storage.s3.sharing", "self._lock"): _LOCK,
    ("storage.s3.usage", "self._lock"): _LOCK,
    ("storage.stall", "task.exception()"): _ENDED,
    ("storage.stall", "task.result()"): _ENDED,
    ("transfer.boxes", "self._lock"): _LOCK,
    ("transfer.requests", "self._lock"): _LOCK,
    ("transfer.executor", "await self.direct.read(leaves, held, turn)"): _OWN,
    ("transfer.local_blocks", "await reading.read(self._reader, [load.item])"): _OWN,
    ("transfer.reading", "await read(handler, others)"): _OWN,
    ("transfer.reads", "await self._executor.read(group, held)"): _OWN,
    ("transfer.again", "await asyncio.gather(*map(first, late))"): _WORK,
    ("transfer.at_exit", "running.join()"): "it has a limit of its own",
    ("transfer.again", "await asyncio.wait(both)"): _WORK,
    ("transfer.again", "await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)"): _WORK,
    ("transfer.again", "await waiting"): _ENDED,
    ("transfer.again", "future.exception()"): _ENDED,
    ("transfer.compiling", "self._one_at_a_time"): _WORK,
    ("transfer.held_blocks", "await work"): _WORK,
    ("transfer.own_reads", "done.exception()"): _ENDED,
    ("transfer.pipeline", "reads.share.exception()"): _ENDED,
    ("transfer.read_ahead", "task.exception()"): _ENDED,
    ("transfer.boxes", "await ended"): _WORK,
    (
        "upstream.array_index",
        "await asyncio.gather(*(source.experimental_copy_range_to(target, some) for some in keys))",
    ): _WORK,
    ("upstream.array_index", "await tensorstore.KvStore.open(copied, context=context)"): _WORK,
    ("upstream.array_index", "await tensorstore.KvStore.open(whole, context=context)"): _WORK,
    ("transfer.boxes", "future.exception()"): _ENDED,
    ("transfer.boxes", "future.result()"): _ENDED,
    ("transfer.collectives", "self._lock"): "in a thread that has a limit, while another one compiles the program",
    ("transfer.collectives", "jax.block_until_ready(list(answer.values()))"): "in a thread that has a limit",
    (
        "transfer.collectives",
        "jax.block_until_ready(self._start(ops, [self._zeros(op.operand) for op in ops]))",
    ): "in a thread that has a limit",
    ("transfer.compiling", "await asyncio.wait([self._all])"): _WORK,
    ("transfer.exchanges", "await asyncio.wait([before])"): "the exchange before has a limit",
    ("transfer.exchanges", "await moving"): "an exchange, which has a limit",
    ("transfer.exchanges", "before.exception()"): _ENDED,
    ("transfer.exchanges", "done.exception()"): _ENDED,
    ("transfer.exchanges", "task.exception()"): _ENDED,
    ("transfer.tiers", "await in_thread(self._read_metadata, directory)"): _WORK,
    ("transfer.turns", "_lock"): _LOCK,
    (
        "transfer.direct_reads",
        "await asyncio.gather(self._read_arrays(self._reader, whole), reading.read(self._reader, slices))",
    ): _WORK,
    (
        "transfer.direct_reads",
        "await asyncio.gather(hand_over_held(), read_special(special), *map(read_batch, batches))",
    ): _WORK,
    (
        "transfer.executor",
        "jax.block_until_ready([list(blocks.values()) for blocks in received])",
    ): "in a thread that has a limit",
    ("transfer.direct_reads", "jax.block_until_ready(arrays_here)"): "in a thread that has a limit",
    ("transfer.direct_reads", "await deserialize(handler, infos, args)"): _WORK,
    ("transfer.assembly", "self._lock"): "in a thread that has a limit",
    ("transfer.room", "await self._freed.wait()"): _WORK,
    ("transfer.room", "self._turn"): _WORK,
    ("transfer.host_reads", "self._to_compile.get()"): "the thread that reads puts an end into it, also if it fails",
    ("transfer.host_reads", "loop.run_until_complete(task)"): _AHEAD,
    ("transfer.verify", "self._free"): _WORK,
    ("transfer.held_blocks", "_taking.get()"): "a context variable, not a queue",
    ("transfer.held_blocks", "await asyncio.wrap_future(unit.blocks)"): _WORK,
    ("transfer.held_blocks", "self._lock"): _LOCK,
    ("transfer.host_reads", "await asyncio.gather(*under_way, return_exceptions=True)"): _AHEAD,
    ("transfer.host_reads", "await asyncio.wait(under_way)"): _AHEAD,
    ("transfer.host_reads", "await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)"): _AHEAD,
    ("transfer.host_reads", "self._lock"): _LOCK,
    ("transfer.local_blocks", "await in_thread(_check_digest, load.item.request.info, self._digests)"): _WORK,
    ("transfer.local_blocks", "await in_thread(_stored_digests, directory)"): _WORK,
    ("transfer.local_blocks", "self._digesting"): _WORK,
    ("transfer.local_blocks", "task.result()"): _ENDED,
    ("transfer.local_blocks", "await in_thread(self._offers, directory)"): _WORK,
    ("transfer.local_pipeline", "await self._under_way[0]"): _WORK,
    ("transfer.pending_restore", "_under_way_lock"): _LOCK,
    ("transfer.pending_restore", "self._lock"): _LOCK,
    ("transfer.pending_restore", "self._reads.join()"): "it has a limit of its own",
    ("transfer.pending_restore", "self._work.join()"): "it has a limit of its own",
    ("transfer.own_reads", "await read"): "nobody waits for it",
    ("transfer.pipeline", "await asyncio.wait(tasks)"): _WORK,
    ("transfer.pipeline", "self._reads.direct.result()"): _ENDED,
    ("transfer.pipeline", "task.result()"): _ENDED,
    ("transfer.read_ahead", "await asyncio.gather(first, second, return_exceptions=True)"): _WORK,
    ("transfer.read_ahead", "done.exception()"): _ENDED,
    ("transfer.read_ahead", "self._tasks.pop(number).result()"): _ENDED,
    ("transfer.read_ahead", "await self._became_idle.wait()"): _WORK,
    ("transfer.read_ahead", "await self._until_idle()"): _WORK,
    ("transfer.read_ahead", "self._two_at_a_time"): _WORK,
    ("transfer.read_ahead", "task.result()"): _ENDED,
    (
        "transfer.reading",
        "await asyncio.gather(_read_whole(handler, whole), *(_read_slice(handler, item) for item in sliced))",
    ): _WORK,
    (
        "transfer.reading",
        "await deserialize(handler, [item.request.info for item in items], args)",
    ): _WORK,
    ("transfer.reads", "await asyncio.Event().wait()"): "ends with what it stands beside",
    ("transfer.reads", "await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)"): _WORK,
    ("transfer.reads", "await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)"): _WORK,
    ("transfer.reads", "await self._asked.wait()"): "ends with what it stands beside",
    ("transfer.reads", "task.result()"): _ENDED,
    ("transfer.reads", "self.direct.result()"): _ENDED,
    (
        "transfer.relays",
        "jax.block_until_ready([list(output.values()) for output in received])",
    ): "in a thread that has a limit",
    ("transfer.verify", "await asyncio.gather(*self._tasks)"): _WORK,
    ("transfer.verify", "await in_thread(compute)"): _WORK,
    (
        "upstream.stored_arrays",
        "await asyncio.gather(*(serialization.async_deserialize(arg.sharding, _read_spec(handler, info), arg.",
    ): _WORK,
    ("upstream.stored_arrays", "await type_handlers.ArrayHandler.deserialize(handler, infos, args)"): _WORK,
    (
        "upstream.stored_arrays",
        "await asyncio.gather(*(tensorstore.open(tensorstore.Spec(_read_spec(handler, info)), open=True, cont",
    ): _DESCRIBE,
    (
        "upstream.stored_arrays",
        "await asyncio.gather(*(tensorstore_utils.assert_parameter_files_exist(info.parent_dir / info.name, h",
    ): _DESCRIBE,
    (
        "upstream.stored_arrays",
        "await serialization.async_deserialize(sharding, {**spec, 'transform': transform}, global_shape=tuple",
    ): _WORK,
    ("upstream.array_handler", "await store.read(checkpoint_dir=checkpoint_dir)"): _DESCRIBE,
    ("upstream.array_handler", "await resolver.get_read_file_paths(checkpoint_dir)"): _DESCRIBE,
    (
        "upstream.array_handler",
        "await asyncio.gather(*map(store._get_array_metadatas, dict.fromkeys([paths[0], *paths[also_read]])))",
    ): _DESCRIBE,
    ("upstream.emergency", "_listing_steps.get()"): "a context variable, not a queue",
    ("upstream.hooks", "_lock"): _LOCK,
    ("upstream.hooks", "_served_by.get()"): "a context variable, not a queue",
    ("upstream.object_stores", "await original(*args, **kwargs)"): _PLAIN,
    (
        "upstream.probes",
        "asyncio.run(handler.deserialize([info], [type_handlers.ArrayRestoreArgs(sharding=_sharding())]))",
    ): "the process that probes has a limit",
    ("upstream.stock_handlers", "await original(*given)"): _PLAIN,
    ("upstream.stock_handlers", "await original(self, infos, args)"): _PLAIN,
    ("upstream.stock_handlers", "await ours.deserialize(infos, args)"): "our own handler",
    ("upstream.stock_handlers", "await ours.deserialize(infos, asked)"): "our own handler",
}


@functools.cache
def own_coroutines() -> set[str]:
    """Returns the names of the coroutine functions of the package."""
    nodes = [node for tree in modules().values() for node in ast.walk(tree)]
    return {node.name for node in nodes if isinstance(node, ast.AsyncFunctionDef)} - BY_CALL


def waits(module: str) -> Iterator[ast.expr]:
    """Yields every expression of a module that waits."""
    nodes = list(ast.walk(modules()[module]))
    awaited = {id(node.value) for node in nodes if isinstance(node, ast.Await)}
    for node in nodes:
        if isinstance(node, ast.Await):
            called = _name(node.value) if isinstance(node.value, ast.Call) else ""
            if called not in own_coroutines():
                yield node
        elif isinstance(node, ast.Call) and id(node) not in awaited and _waits(node):
            yield node
        elif isinstance(node, ast.With):
            yield from (item.context_expr for item in node.items if name_of(item.context_expr) in locks())
        elif isinstance(node, ast.AsyncWith):  # of the package's own, what they wait for is listed
            yield from (item.context_expr for item in node.items if not isinstance(item.context_expr, ast.Call))


def _name(call: ast.Call) -> str:
    return name_of(call.func)


def _waits(call: ast.Call) -> bool:
    if ast.unparse(call.func) == "subprocess.run":
        return True
    if ast.unparse(call.func) == "asyncio.run":
        return not isinstance(call.args[0], ast.Call) or _name(call.args[0]) not in own_coroutines()
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in WAITING:
        return False
    owner = ast.unparse(call.func.value)
    if call.func.attr == "join":  # of threads, not of texts and paths
        return not isinstance(call.func.value, (ast.Constant, ast.JoinedStr)) and owner not in ("os.path", "posixpath")
    if call.func.attr == "waitpid":
        return "os.WNOHANG" not in map(ast.unparse, call.args)
    if call.func.attr == "get":  # of queues and context variables, not of mappings
        return not call.args
    return True


def has_limit(node: ast.expr) -> bool:
    call = node.value if isinstance(node, ast.Await) else node
    if not isinstance(call, ast.Call):
        return False
    if any(keyword.arg in LIMITS and not _is_none(keyword.value) for keyword in call.keywords):
        return True
    if _name(call) == "in_thread" and ast.unparse(call.args[0]).endswith(MEETINGS):
        return True
    positional = {"join": 1, "wait": 1, "sleep": 1, "acquire": 1, "wait_for": 2, "blocking_key_value_get": 2}
    if ast.unparse(call.func) == "asyncio.wait":  # its first argument is not the limit
        return False
    place = 2 if ast.unparse(call.func) == "connection.wait" else positional.get(_name(call), 9)
    return isinstance(call.func, ast.Attribute) and len(call.args) >= place and not _is_none(call.args[place - 1])


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def unlimited() -> set[tuple[str, str]]:
    return {
        (module.removeprefix("orbax_ext."), " ".join(ast.unparse(node).split())[:100])
        for module in modules()
        for node in waits(module)
        if not has_limit(node)
    }


def test_everything_that_waits_has_a_limit_or_a_reason() -> None:
    assert unlimited() - REASONS.keys() == set()


def test_every_reason_is_needed() -> None:
    assert REASONS.keys() - unlimited() == set()


@pytest.mark.parametrize("call", ["done.wait()", "done.wait(None)", "done.wait(timeout=None)", "connection.wait(all)"])
def test_no_limit_is_no_limit(call: str) -> None:
    assert not has_limit(ast.parse(call, mode="eval").body)


@pytest.mark.parametrize("call", ["done.wait(5)", "done.wait(timeout=limit)", "asyncio.wait_for(work, 5)"])
def test_a_limit_is_found(call: str) -> None:
    assert has_limit(ast.parse(call, mode="eval").body)


def test_locks_are_found_by_what_they_are() -> None:
    source = "a = threading.Lock()\nself.b: asyncio.Lock = asyncio.Lock()\nc = open(path)\nd = [asyncio.Semaphore(2)]"
    assert locks_in(ast.parse(source)) == {"a", "b", "d"}
