"""A proxy that has prompts computed by one vLLM server and answers decoded by another. See docs/vllm.md.

    python examples/prefill_decode_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

It asks the prefill server for one token, which is answered when the prompt's blocks are in the cluster, and hands what
that says of them to the decode server. Where the prefill server does not answer, the decode server computes the prompt.
"""

from __future__ import annotations

import argparse
import uuid
from typing import Any

import aiohttp
from aiohttp import web

_PATHS = ("/v1/completions", "/v1/chat/completions")
_IDLE_S = 2.0
_PREFILL_S = 60.0


class Proxy:
    """Passes requests on."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill = prefill
        self._decode = decode
        self._session: aiohttp.ClientSession | None = None

    async def start(self, app: web.Application) -> None:
        # vLLM closes a connection that was idle for 5 s, perhaps in the moment in which it is used again.
        connector = aiohttp.TCPConnector(keepalive_timeout=_IDLE_S)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector)

    async def stop(self, app: web.Application) -> None:
        if self._session is not None:
            await self._session.close()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """One completion."""
        assert self._session is not None
        asked: dict[str, Any] = await request.json()
        headers = {"X-Request-Id": uuid.uuid4().hex}
        params = await self._computed(request.path, asked, headers)
        body = asked | ({"kv_transfer_params": params} if params else {})
        async with self._session.post(self._decode + request.path, json=body, headers=headers) as decoded:
            out = web.StreamResponse(status=decoded.status)
            out.content_type = decoded.content_type
            await out.prepare(request)
            async for chunk in decoded.content.iter_any():
                await out.write(chunk)
            await out.write_eof()
            return out

    async def _computed(self, path: str, asked: dict[str, Any], headers: dict[str, str]) -> dict[str, Any] | None:
        """Has the prompt computed. Returns what the decode server needs to know; None if no server computed it."""
        assert self._session is not None
        body = asked | {"max_tokens": 1, "stream": False, "n": 1, "kv_transfer_params": {"do_remote_decode": True}}
        for name in ("max_completion_tokens", "stream_options"):
            body.pop(name, None)
        timeout = aiohttp.ClientTimeout(total=_PREFILL_S)
        try:
            async with self._session.post(self._prefill + path, json=body, headers=headers, timeout=timeout) as answer:
                if answer.status != 200:
                    return None
                told = await answer.json()
                params: dict[str, Any] | None = told.get("kv_transfer_params")
                return params
        except (aiohttp.ClientError, TimeoutError):
            return None


def main() -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True, help="URL of the server that computes prompts")
    parser.add_argument("--decode", required=True, help="URL of the server that answers")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    proxy = Proxy(options.prefill, options.decode)
    app = web.Application()
    app.on_startup.append(proxy.start)
    app.on_cleanup.append(proxy.stop)
    for path in _PATHS:
        app.router.add_post(path, proxy.answer)
    web.run_app(app, host=options.host, port=options.port, print=None)


if __name__ == "__main__":
    main()
