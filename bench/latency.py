"""A server that answers every HTTP request with 204 after some time: python bench/latency.py SOCKET SECONDS.

It makes storage far away: nginx asks it before each answer. Linux has `netem` for that, but many kernels come without.
"""

from __future__ import annotations

import asyncio
import sys

_ANSWER = b"HTTP/1.0 204 No Content\r\n\r\n"


async def serve(socket: str, seconds: float) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(seconds)
        writer.write(_ANSWER)
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, socket, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], float(sys.argv[2])))
