# SPDX-License-Identifier: MIT
"""The control endpoints of an engine: paths and bodies on one side, `Operations` on the other.

Paths, bodies and answers are those that trainers know. What this release does not have is 501 with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenspeed.config.control_paths import ABSENT_PATHS
from tokenspeed.engine.errors import EngineDeadError, OperationError
from tokenspeed.engine.flattened import is_flattened
from tokenspeed.engine.group_fields import DEFAULT_GROUP, facts_of, group_of
from tokenspeed.engine.named_tensors import named_tensors
from tokenspeed.engine.occupation import TAGS
from tokenspeed.engine.operations import text
from tokenspeed.engine.replica_operations import AnyOperations
from tokenspeed.engine.weight_updates import Asked
from tokenspeed.observability.endpoint import Answer, Handler, json_answer, refusal

Body = Mapping[str, Any]

PAUSE_LIMIT_S = 600.0
_DONE = {"success": True, "message": "done"}
_ASKED = ("weight_version", "flush_cache", "abort_all_requests")


def control_routes(operations: AnyOperations, info: Callable[[], Mapping[str, Any]]) -> dict[tuple[str, str], Handler]:
    """By (method, path). info: what /get_server_info tells."""

    def loads(_: Body) -> Mapping[str, Any]:
        rows = [
            {
                "dp_rank": rank,
                "num_reqs": load.num_running + load.num_waiting,
                "num_waiting_reqs": load.num_waiting,
                "num_pages": load.active_blocks,
            }
            for rank, load in operations.loads().items()
        ]
        return {"loads": rows}

    def model_info(_: Body) -> Mapping[str, Any]:
        return {"model_path": operations.model_path, "weight_version": operations.weight_version}

    profiles: dict[str, Callable[[Body], Mapping[str, Any]]] = {
        "/start_profile": lambda body: {"success": True, "message": operations.start_profile(body)},
        "/stop_profile": lambda _: {"success": True, "message": operations.stop_profile()},
    }
    gets: dict[str, Callable[[Body], Mapping[str, Any]]] = {
        "/health": lambda _: {"status": "ok"},
        "/health_generate": lambda _: {"status": "ok"},
        "/get_server_info": lambda body: {**info(), **model_info(body)},
        "/get_model_info": model_info,
        "/model_info": model_info,
        "/is_sleeping": lambda _: {"is_sleeping": bool(operations.asleep)},
        "/get_weight_version": lambda _: {"weight_version": operations.weight_version},
        "/v1/loads": loads,
        "/flush_cache": lambda body: _flush(operations, body),
        **profiles,
    }
    posts: dict[str, Callable[[Body], Mapping[str, Any]]] = {
        **profiles,
        "/flush_cache": lambda body: _flush(operations, body),
        "/pause_generation": lambda body: _pause(operations, body),
        "/continue_generation": lambda body: _resume(operations, body),
        "/abort_request": lambda body: _abort(operations, body),
        "/abort": lambda body: _aborted(operations.abort(text(body, "request_id", None))),
        "/update_weight_version": lambda body: _name_weights(operations, body),
        "/update_weights_from_disk": lambda body: _from_disk(operations, body),
        "/update_weights_from_tensor": lambda body: _from_tensors(operations, body),
        "/update_weights_from_distributed": lambda body: _from_group(operations, body),
        "/init_weights_update_group": lambda body: _join_group(operations, body),
        "/destroy_weights_update_group": lambda body: _leave_group(operations, body),
        "/start_weight_update": lambda body: _start_update(operations, body),
        "/finish_weight_update": lambda body: _finish_update(operations, body),
        "/release_memory_occupation": lambda body: _release(operations, body),
        "/resume_memory_occupation": lambda body: _wake(operations, body),
        "/sleep": lambda body: _sleep(operations, body),
        "/wake_up": lambda body: _wake(operations, body),
    }
    routes = {("GET", path): _guarded(run) for path, run in gets.items()}
    routes |= {("POST", path): _guarded(run) for path, run in posts.items()}
    return routes | {(method, path): _absent(path) for method in ("GET", "POST") for path in ABSENT_PATHS}


def _flush(operations: AnyOperations, _: Body) -> Mapping[str, Any]:
    operations.flush_cache()
    return {"success": True, "message": "the prefix cache is empty"}


def _pause(operations: AnyOperations, body: Body) -> Mapping[str, Any]:
    operations.pause(text(body, "mode", "wait"), PAUSE_LIMIT_S)
    return _DONE


def _resume(operations: AnyOperations, _: Body) -> Mapping[str, Any]:
    operations.resume()
    return _DONE


def _abort(operations: AnyOperations, body: Body) -> Mapping[str, Any]:
    if body.get("abort_all") is True:
        return _aborted(operations.abort_all())
    return _aborted(operations.abort(text(body, "rid", None)))


def _aborted(count: int) -> Mapping[str, Any]:
    return {"success": True, "message": f"{count} aborted", "num_aborted": count}


def _name_weights(operations: AnyOperations, body: Body) -> Mapping[str, Any]:
    operations.updates.rename(text(body, "new_version", None))
    return {"success": True, "message": "done", "new_version": operations.weight_version}


def _from_disk(operations: AnyOperations, body: Body) -> Mapping[str, Any]:
    _know(body, {"model_path", "load_format", *_ASKED})
    path, load_format = text(body, "model_path", None), text(body, "load_format", "auto")
    operations.updates.from_disk(path, load_format, _asked(body))
    return _updated(operations)


def _from_tensors(operations: AnyOperations, body: Body) -> Mapping[str, Any]:
    _know(body, {"serialized_named_tensors", "load_format", *_ASKED})
    asked, flattened = _asked(body), is_flattened(body.get("load_format"))
    operations.updates.from_tensors(named_tensors(body.get("serialized_named_tensors"), flattened), asked)
    return _updated(operations)


def _from_group(operations: AnyOperations, body: Body) -> Mapping[str, Any]:
    _know(body, {"names", "dtypes", "shapes", "group_name", "load_format", *_ASKED})
    asked, name = _asked(body), text(body, "group_name", DEFAULT_GROUP)
    operations.updates.from_group(name, facts_of(body), asked, is_flattened(body.get("load_format")))
    return _updated(operations)


def _join_group(operations: AnyOperations, body: Body) -> Mapping[str, Any]:
    _know(body, {"master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"})
    operations.updates.join_group(group_of(body, operations.updates.device.type == "cpu"))
    return _DONE


def _leave_group(operations: AnyOperations, body: Body) -> Mapping[str, Any]:
    _know(body, {"group_name"})
    operations.updates.leave_group(text(body, "group_name", DEFAULT_GROUP))
    return _DONE


def _updated(operations: AnyOperations) -> Mapping[str, Any]:
    message = "kept for /finish_weight_update" if operations.updates.collects else "the new weights serve"
    return {"success": True, "message": message, "weight_version": operations.weight_version}


def _asked(body: Body) -> Asked:
    return Asked(_version(body), _switch(body, "flush_cache"), _switch(body, "abort_all_requests"))


def _switch(body: Body, field: str) -> bool:
    value = body.get(field)
    if value is not None and not isinstance(value, bool):
        raise OperationError(400, f"{field} must be true or false")
    return bool(value)


def _start_update(operations: AnyOperations, body: Body) -> Mapping[str, Any]:
    _know(body, {"is_checkpoint_format"})
    if body.get("is_checkpoint_format", True) is not True:
        raise OperationError(400, "is_checkpoint_format: only true; tensors go by the checkpoint's names and shapes")
    operations.updates.start()
    return _DONE


def _finish_update(operations: AnyOperations, body: Body) -> Mapping[str, Any]:
    _know(body, {"weight_version"})
    operations.updates.finish(_version(body))
    return _updated(operations)


def _release(operations: AnyOperations, body: Body) -> Mapping[str, Any]:
    _know(body, {"tags", "mode"})
    operations.release_memory(_tags(body), text(body, "mode", "wait"), False, PAUSE_LIMIT_S)
    return _DONE


def _sleep(operations: AnyOperations, body: Body) -> Mapping[str, Any]:
    """level 1: weights stay in the host's memory, where the device's is another. level 2: they are read again."""
    _know(body, {"level", "mode"})
    level = body.get("level", 1)
    if str(level) not in ("1", "2"):
        raise OperationError(400, f"level must be 1 or 2, not {level!r}")
    operations.release_memory(TAGS, text(body, "mode", "wait"), str(level) == "1", PAUSE_LIMIT_S)
    return _DONE


def _wake(operations: AnyOperations, body: Body) -> Mapping[str, Any]:
    _know(body, {"tags"})
    operations.resume_memory(_tags(body))
    return _DONE


def _tags(body: Body) -> list[str]:
    """All when none are named."""
    tags = body.get("tags")
    if tags is None:
        return list(TAGS)
    listed = [tags] if isinstance(tags, str) else tags
    if not isinstance(listed, list) or not all(isinstance(tag, str) for tag in listed):
        raise OperationError(400, f"tags must be a list of {', '.join(TAGS)}")
    return listed


def _version(body: Body) -> str | None:
    return None if body.get("weight_version") is None else text(body, "weight_version", None)


def _know(body: Body, fields: set[str]) -> None:
    unknown = sorted(body.keys() - fields)
    if unknown:
        raise OperationError(400, f"{unknown[0]}: no such field")


def _guarded(run: Callable[[Body], Mapping[str, Any]]) -> Handler:
    def handler(body: Body) -> Answer:
        try:
            return json_answer(200, run(body))
        except OperationError as error:
            return refusal(error.status, str(error))
        except (EngineDeadError, TimeoutError) as error:
            return refusal(503, str(error) or "the engine's loop does not answer")

    return handler


def _absent(path: str) -> Handler:
    return lambda _: refusal(501, f"{path}: {ABSENT_PATHS[path]}")
