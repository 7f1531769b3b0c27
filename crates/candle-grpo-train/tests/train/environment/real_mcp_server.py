"""An MCP server of the package fastmcp: on stdin and stdout, or over HTTP with the argument `http`, when its port is the first line."""

import socket
import sys

import fastmcp

server = fastmcp.FastMCP("calculator")
counts = {}


@server.tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool
async def count(context: fastmcp.Context) -> int:
    """Counts the calls in a session."""
    await context.report_progress(1, 2)
    counts[context.session_id] = counts.get(context.session_id, 0) + 1
    return counts[context.session_id]


@server.tool
def divide(a: int, b: int) -> float:
    """Divides two numbers."""
    if b == 0:
        raise ValueError("b: 0")
    return a / b


if sys.argv[1:] == ["http"]:
    import uvicorn

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(server.http_app(), log_level="error")).run(sockets=[listener])
else:
    server.run(show_banner=False)
