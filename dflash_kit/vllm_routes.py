"""HTTP routes through which a client of a running vLLM server has its states written (see ``vllm_served``).

Loaded by name: ``vllm serve … --middleware dflash_kit.vllm_routes.ShardRoutes``. The routes lie under ``/v1``, so that
``--api-key`` guards them as it guards completions. They write into the folder that the server's own command names, and
take no path from a client.
"""

import os
from typing import Any

from fastapi import APIRouter, HTTPException, Request

PREFIX = "/v1/shards"
router = APIRouter(prefix=PREFIX)


class ShardRoutes:
    """ASGI middleware that adds the routes to the server's application when that starts, and passes all on.

    Args:
        app: what it passes everything on to.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._has_routes = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass on a request."""
        if not self._has_routes and "app" in scope:
            self._has_routes = True
            scope["app"].include_router(router)
        await self._app(scope, receive, send)


@router.get("")
async def describe(request: Request) -> dict[str, Any]:
    """What the server writes, and where."""
    return await _ask_workers(request, "describe")


@router.post("/open")
async def open_session(request: Request) -> dict[str, Any]:
    """Begin a session."""
    return await _ask_workers(request, "open", os.getpid())


@router.post("/status")
async def status(request: Request) -> dict[str, Any]:
    """Rows accepted since the last call in this session, and errors."""
    body = await request.json()
    return await _ask_workers(request, "status", body["session"])


@router.post("/finish")
async def finish(request: Request) -> dict[str, Any]:
    """Finish the shards and release the folder."""
    body = await request.json()
    return await _ask_workers(request, "finish", body["session"], body["summary"])


async def _ask_workers(request: Request, method: str, *arguments: Any) -> dict[str, Any]:
    """The answer of the worker that writes."""
    engine = request.app.state.engine_client
    answers = await engine.collective_rpc(f"shard_session_{method}", args=arguments)
    answer: dict[str, Any] | None = next((answer for answer in answers if answer is not None), None)
    if answer is None:
        raise HTTPException(500, "no vLLM worker writes shards")
    return answer
