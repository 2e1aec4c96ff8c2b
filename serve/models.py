"""Which models are served: the one, and its adapters under their own names."""

from starlette.requests import Request
from starlette.responses import Response

from serve.front import Front, json_response
from serve.protocol import ModelCard, ModelList


async def list_models(front: Front, request: Request) -> Response:
    """The models that are served here."""
    names = (front.engine.model_name, *front.engine.adapter_names)
    return json_response(ModelList(data=[_card(front, name) for name in names]))


async def get_model(front: Front, request: Request) -> Response:
    """One model, if it is served here."""
    name = request.path_params["model"]
    front.check_model(name)
    return json_response(_card(front, name))


def _card(front: Front, name: str) -> ModelCard:
    base = front.engine.model_name
    return ModelCard(
        id=name,
        created=front.created,
        root=name,
        parent=None if name == base else base,
        max_model_len=front.engine.max_model_len,
    )
