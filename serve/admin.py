"""Endpoints that change the engine: off unless enabled, for they end other people's requests."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serve.fields import Fields, read_fields
from serve.front import Front, json_response
from serve.protocol import EngineTold, PauseRequest, SleepRequest, UpdateWeightsRequest, WeightInfo


async def pause(front: Front, request: Request) -> Response:
    """Take no new requests; answers when those inside are done, or were told to stop."""
    fields = read_fields(await _object(front, request), PauseRequest)
    front.gate.pause("paused")
    if fields.body.mode == "abort":
        front.gate.stop_those_inside()
    await front.gate.until_empty()
    return _told(front, fields)


async def resume(front: Front, request: Request) -> Response:
    """Take requests again after a pause."""
    front.gate.resume("paused")
    return _told(front)


async def reset_prefix_cache(front: Front, request: Request) -> Response:
    """Find no cached prefix again that was computed before now."""
    await front.engine.reset_prefix_cache()
    return _told(front)


async def update_weights(front: Front, request: Request) -> Response:
    """Go on with the weights in a folder on the server, of the same shapes, in place."""
    fields = read_fields(await _object(front, request), UpdateWeightsRequest)
    body = fields.body
    await front.engine.load_weights(body.path, version=body.version, drain=body.drain)
    return _told(front, fields)


async def weight_info(front: Front, request: Request) -> Response:
    """Which weights are served: the label of the latest update, or how many there were."""
    return json_response(WeightInfo(version=front.engine.params_version))


async def sleep(front: Front, request: Request) -> Response:
    """Give the device's memory back, and take no requests until woken."""
    fields = read_fields(await _object(front, request), SleepRequest)
    front.gate.pause("asleep")
    try:
        await front.engine.sleep(weights=fields.body.weights, drain=fields.body.drain)
    except Exception:
        front.gate.resume("asleep")
        raise
    return _told(front, fields)


async def wake_up(front: Front, request: Request) -> Response:
    """Take the device's memory back, and requests again."""
    await front.engine.wake()
    front.gate.resume("asleep")
    return _told(front)


async def _object(front: Front, request: Request) -> dict[str, Any]:
    return await front.read_object(request, may_be_empty=True)


def _told(front: Front, fields: Fields | None = None) -> Response:
    told = EngineTold(state=front.gate.state, version=front.engine.params_version)
    return json_response(told, headers={} if fields is None else fields.headers())
