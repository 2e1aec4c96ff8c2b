"""LoRA adapters over HTTP: named as a model, loaded and forgotten."""

import json

import pytest

from serve import ServeOptions
from tests.fake_engine import FakeEngine
from tests.live_server import live_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAY_HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server():
    with live_server(FakeEngine(adapters=["poet"]), ServeOptions(enable_admin=True)) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        (COMPLETIONS, {"prompt": "hi"}),
        (COMPLETIONS, {"prompt": "hi", "use_beam_search": True}),
        (CHAT, {"messages": SAY_HI}),
    ],
)
def test_an_adapter_is_named_as_the_model(server, path, prompt):
    for model, adapter in (("poet", "poet"), ("fake/model", None), (None, None)):
        named = {} if model is None else {"model": model}
        status, answer = server.post(path, {"max_tokens": 1} | prompt | named)
        assert status == 200, answer
        assert server.engine.callers[-1].get("adapter") == adapter
        assert answer["model"] == (adapter or "fake/model")
    status, answer = server.post(path, {"max_tokens": 1, "model": "painter"} | prompt)
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "'fake/model' and 'poet'" in answer["error"]["message"]


def test_adapters_are_listed_loaded_and_forgotten(server):
    def cards() -> dict[str, str | None]:
        _, _, body = server.request("GET", "/v1/models")
        return {card["id"]: card["parent"] for card in json.loads(body)["data"]}

    assert cards() == {"fake/model": None, "poet": "fake/model"}
    status, answer = server.post("/v1/load_lora_adapter", {"lora_name": "painter"})
    assert (status, answer) == (200, {"adapters": ["poet", "painter"]})
    assert cards()["painter"] == "fake/model"
    assert server.request("GET", "/v1/models/painter")[0] == 200
    status, answer = server.post("/v1/unload_lora_adapter", {"lora_name": "painter"})
    assert (status, answer) == (200, {"adapters": ["poet"]})
    status, answer = server.post("/v1/unload_lora_adapter", {"lora_name": "painter"})
    assert (status, answer["error"]["param"]) == (400, "lora_name")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "../poet"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "/etc"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "../x"}, "lora_path"),
        ({}, "lora_name"),
        ({"lora_name": 3}, "lora_name"),
    ],
)
def test_a76_no_path_reaches_the_engine(server, body, param):
    status, answer = server.post("/v1/load_lora_adapter", body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert server.engine.adapter_names == ["poet"]
