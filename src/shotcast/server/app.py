"""The routes of the HTTP API."""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from shotcast import __version__
from shotcast.engine.outputs import RequestOutput
from shotcast.server.api_error import ApiError
from shotcast.server.metrics import CountResponses
from shotcast.server.request_body import AnyBody, Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, shown
from shotcast.server.responses import ApiResponse, ChatCompletionResponse, CompletionResponse
from shotcast.server.service import Service
from shotcast.server.streaming import DONE, EventStream, event, unless_disconnected

logger = logging.getLogger(__name__)

CLIENT_DISCONNECTED = 499
"""The status of a request whose client has disconnected, for the counters."""

SMALL_RESPONSE_TOKENS = 256
"""Responses of at most this many tokens are encoded in the event loop."""


def create_app(service: Service) -> ASGIApp:
    config = service.config

    async def check_key(http: Request) -> None:  # FastAPI calls functions that are not async on a pool of threads
        if config.api_key is None:
            return
        scheme, _, key = http.headers.get("authorization", "").partition(" ")
        matches = hmac.compare_digest(key.encode("latin-1"), config.api_key.encode())
        if scheme.lower() != "bearer" or not matches:
            raise ApiError(
                401,
                "the API key is missing or wrong; send Authorization: Bearer <key>",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def read(http: Request, kind: type[AnyBody]) -> AnyBody:
        media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        # Browsers let any web page send other media types to a server on its reader's machine without permission.
        if media_type != "application/json":
            raise ApiError(415, f"Content-Type must be application/json, not {media_type or 'empty'}")
        body = await service.parse(kind, await _read_body(http, config.max_body_bytes))
        if body.model is not None and body.model != service.model:
            raise _model_not_found(body.model, service.model)
        return body

    async def respond(http: Request, body: Body, response: ApiResponse[Any]) -> Response:
        if body.stream:
            return EventStream(_events(service, body, response), _error_event, config.ping_s)
        content = await unless_disconnected(http.receive, _content(service, body, response))
        if content is None:
            return Response(status_code=CLIENT_DISCONNECTED)
        return Response(content, media_type="application/json")

    public = APIRouter()
    keyed = APIRouter(dependencies=[Depends(check_key)])

    @public.get("/health")
    async def health() -> Response:
        service.check(dead_status=503)
        return JSONResponse({"status": "ok"})

    @(public if config.public_metrics else keyed).get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @keyed.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @keyed.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != service.model:
            raise _model_not_found(name, service.model)
        return JSONResponse(_model(service))

    @keyed.post("/v1/completions")
    async def completions(http: Request) -> Response:
        body = await read(http, CompletionBody)
        return await respond(http, body, CompletionResponse(body, service.model, service.engine.tokenizer))

    @keyed.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        body = await read(http, ChatBody)
        return await respond(http, body, ChatCompletionResponse(body, service.model, service.engine.tokenizer))

    @keyed.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        return Response(await service.tokenize(await read(http, TokenizeBody)), media_type="application/json")

    @keyed.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        return Response(await service.detokenize(await read(http, DetokenizeBody)), media_type="application/json")

    @keyed.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    app = FastAPI(title="shotcast", version=__version__, redoc_url=None)
    app.include_router(public)
    app.include_router(keyed)
    app.openapi = partial(_openapi, app)  # type: ignore[method-assign]
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    if config.allowed_origins:
        options: dict[str, Any] = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        app.add_middleware(CORSMiddleware, allow_origins=config.allowed_origins, **options)
    return CountResponses(app, service.metrics)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the API description with request bodies, which FastAPI does not know because routes read them directly."""
    if app.openapi_schema is None:
        kinds = {
            "/v1/completions": CompletionBody,
            "/v1/chat/completions": ChatBody,
            "/tokenize": TokenizeBody,
            "/detokenize": DetokenizeBody,
        }
        models: Any = [(kind, "validation") for kind in kinds.values()]
        described: Any = models_json_schema(models, ref_template="#/components/schemas/{model}")
        references, defined = described
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schema["components"] = {"schemas": defined["$defs"]}
        for path, kind in kinds.items():
            content = {"application/json": {"schema": references[kind, "validation"]}}
            schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        app.openapi_schema = schema
    return app.openapi_schema


async def _read_body(http: Request, limit: int) -> bytes:
    """Read a request body. Rejects it as soon as it is known to be too large."""
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    if int(http.headers.get("content-length", 0)) > limit:
        raise too_large
    read = bytearray()
    try:
        async for piece in http.stream():
            read += piece
            if len(read) > limit:
                raise too_large
    except ClientDisconnect as error:
        raise ApiError(CLIENT_DISCONNECTED, "the client disconnected") from error
    return bytes(read)


async def _content(service: Service, body: Body, response: ApiResponse[Any]) -> bytes:
    async with aclosing(service.generate(body, response.id, response.prepare)) as updates:
        outputs = {number: output async for number, output in updates}
    tokens = sum(len(output.tokens) + len(output.prompt_logprobs or ()) for output in outputs.values())
    if tokens <= SMALL_RESPONSE_TOKENS:
        return response.render(outputs)
    return await service.with_tokenizer(partial(response.render, outputs))


async def _events(service: Service, body: Body, response: ApiResponse[Any]) -> AsyncGenerator[bytes, None]:
    outputs: dict[int, RequestOutput] = {}
    async with aclosing(service.generate(body, response.id, response.prepare)) as updates:
        async for number, output in updates:
            outputs[number] = output
            for chunk in response.chunks(number, output):
                yield event(chunk)
    if body.include_usage:
        yield event(response.usage_chunk(outputs))
    yield DONE


def _error_event(error: Exception) -> bytes:
    if not isinstance(error, ApiError):
        logger.error("a stream failed", exc_info=error)
        error = _INTERNAL
    return event(error.body)


_INTERNAL = ApiError(500, "internal error; the server's log has more")


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "shotcast",
        "max_model_len": service.engine.max_model_len,
    }


def _model_not_found(name: str, served: str) -> ApiError:
    return ApiError(
        404, f"there is no model {shown(name)}; this server has {served!r}", param="model", code="model_not_found"
    )


async def _api_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, error.headers)


async def _http_error(http: Request, error: Exception) -> Response:
    """Respond to an unknown path, or to a method that the path does not support."""
    assert isinstance(error, HTTPException)
    api_error = ApiError(error.status_code, f"{http.method} {http.url.path}: {error.detail}", headers=error.headers)
    return await _api_error(http, api_error)


async def _unexpected(http: Request, error: Exception) -> Response:
    return await _api_error(http, _INTERNAL)
