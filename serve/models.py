"""Which models are served: the one."""

from starlette.requests import Request
from starlette.responses import Response

from serve.front import Front, json_response
from serve.protocol import ModelCard, ModelList


async def list_models(front: Front, request: Request) -> Response:
    """The models that are served here."""
    return json_response(ModelList(data=[_card(front)]))


async def get_model(front: Front, request: Request) -> Response:
    """One model, if it is served here."""
    front.check_model(request.path_params["model"])
    return json_response(_card(front))


def _card(front: Front) -> ModelCard:
    name = front.engine.model_name
    return ModelCard(
        id=name, created=front.created, root=name, max_model_len=front.engine.max_model_len
    )
