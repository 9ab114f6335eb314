# SPDX-License-Identifier: MIT
"""`/openapi.json`: the OpenAPI 3.1 document of the paths that this gateway has, made from `operations` once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

from tokenspeed.gateway.chat.format import encode_json
from tokenspeed.gateway.operations import OPERATIONS, SCHEMAS, Operation
from tokenspeed.version import __version__

_REF = "#/components/schemas/{name}"
_PAGE_PARAMETERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
    ("order", {"enum": ["asc", "desc"], "default": "desc"}),
    ("after", {"type": "string"}),
)


def openapi_route() -> web.RouteDef:
    """`GET /openapi.json`: the document of the routes of the application that it is part of."""
    made: list[bytes] = []

    async def show(request: web.Request) -> web.Response:
        if not made:
            routes = request.app.router.routes()
            found = [(route.method, route.resource.canonical) for route in routes if route.resource is not None]
            made.append(encode_json(openapi_document(pair for pair in found if pair[0] not in ("HEAD", "OPTIONS"))))
        return web.Response(body=made[0], content_type="application/json")

    return web.get("/openapi.json", show)


def openapi_document(routes: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The document for `routes`, (method, path) pairs. Raises `KeyError` for one that the table does not have."""
    chosen = {route: OPERATIONS[route] for route in routes}
    bodies = list(dict.fromkeys(operation.body for operation in chosen.values() if operation.body is not None))
    references, components = msgspec.json.schema_components(bodies, ref_template=_REF)
    request = dict(zip(bodies, references))
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in chosen.items():
        body = None if operation.body is None else request[operation.body]
        paths.setdefault(path, {})[method.lower()] = _operation(path, operation, body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "TokenSpeed", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, **SCHEMAS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: str, operation: Operation, body: dict[str, Any] | None) -> dict[str, Any]:
    parameters = [_parameter(name, "path", {"type": "string"}) for name in re.findall(r"{(\w+)}", path)]
    if operation.paged:
        parameters += [_parameter(name, "query", schema) for name, schema in _PAGE_PARAMETERS]
    described: dict[str, Any] = {"summary": operation.summary, "responses": _responses(operation)}
    if parameters:
        described["parameters"] = parameters
    if operation.keyed:
        # Needed only where the server was started with keys.
        described["security"] = [{"key": []}, {}]
    if body is not None:
        content = {"application/json": {"schema": body}}
        described["requestBody"] = {"required": not operation.optional_body, "content": content}
    return described


def _parameter(name: str, place: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _responses(operation: Operation) -> dict[str, Any]:
    answer = operation.answer
    schema = {"$ref": _REF.format(name=answer)} if isinstance(answer, str) else answer
    content: dict[str, Any] = {operation.media: {"schema": schema}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": {"$ref": _REF.format(name=operation.error)}}}
    responses = {
        str(operation.status): {"description": operation.summary, "content": content},
        "4XX": {"description": "The caller's fault; the code says which", "content": error},
        "5XX": {"description": "Not served; worth another try later", "content": error},
    }
    if operation.unready:
        responses["503"] = {"description": "Not now", "content": content}
    return responses
