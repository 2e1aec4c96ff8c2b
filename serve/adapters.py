"""LoRA adapters over HTTP: loaded from the server's own folder, by name."""

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from paged_jax import PagedJaxError, RequestError
from serve.fields import Fields
from serve.front import Front, json_response


class LoadAdapterRequest(Struct, kw_only=True, frozen=True):
    lora_name: str
    lora_path: str | None = None


class UnloadAdapterRequest(Struct, kw_only=True, frozen=True):
    lora_name: str


class AdapterList(Struct, kw_only=True, frozen=True):
    """Every adapter that requests may name as their model."""

    adapters: list[str]


async def load_adapter(front: Front, request: Request) -> Response:
    """Load the adapter of that name from the folder that the server was started with."""
    raw = await front.read_object(request)
    fields: Fields[LoadAdapterRequest] = front.fields(raw, LoadAdapterRequest)
    name, path = fields.body.lora_name, fields.body.lora_path
    if path is not None and path != name:
        raise RequestError(
            "lora_path must be left out, or be the same as lora_name: adapters come from the "
            "server's own folder (--lora-dir) only",
            param="lora_path",
        )
    try:
        await front.engine.load_adapter(name)
    except PagedJaxError as error:
        raise RequestError(str(error), param="lora_name") from None
    return json_response(AdapterList(adapters=list(front.engine.adapter_names)))


async def unload_adapter(front: Front, request: Request) -> Response:
    """Forget an adapter that no request uses."""
    raw = await front.read_object(request)
    fields: Fields[UnloadAdapterRequest] = front.fields(raw, UnloadAdapterRequest)
    try:
        await front.engine.unload_adapter(fields.body.lora_name)
    except PagedJaxError as error:
        raise RequestError(str(error), param="lora_name") from None
    return json_response(AdapterList(adapters=list(front.engine.adapter_names)))
