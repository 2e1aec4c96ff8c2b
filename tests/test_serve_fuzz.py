"""Requests made at random from the server's own description: a share of `scripts/fuzz.sh`.

And the requests that another client library sends, as they were recorded.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from serve import ServeOptions
from tests.fake_engine import FakeEngine
from tests.live_server import LiveServer, events, live_server

RECORDED = Path(__file__).resolve().parent / "data" / "langchain_requests.json"
ODD = (None, True, -1, 0, 1, 2**31, 2**63, -1.5, 1e300, "", "x", "\x00é𝄞", [], {}, [None], {"": 1})
NUM_REQUESTS = 60  # of each endpoint


@pytest.fixture(scope="module")
def server():
    with live_server(FakeEngine(max_model_len=60), ServeOptions()) as server:
        yield server


class Maker:
    """Values of schemas, and now and then something else."""

    def __init__(self, description: dict[str, Any], seed: int):
        self._description = description
        self._random = random.Random(seed)

    def value(self, schema: dict[str, Any], depth: int = 0) -> Any:
        if self._random.random() < 0.03:
            return self._random.choice(ODD)
        if "$ref" in schema:
            schema = self._resolved(schema["$ref"])
        for several in ("anyOf", "oneOf"):
            if several in schema:
                return self.value(self._random.choice(schema[several]), depth)
        if "enum" in schema:
            return self._random.choice(schema["enum"] or [None])
        if "const" in schema:
            return schema["const"]
        kind = schema.get("type")
        if kind == "object":
            return self.object(schema, depth)
        if kind == "array":
            count = self._random.randrange(schema.get("minItems", 0), 4)
            return [self.value(schema.get("items", {}), depth + 1) for _ in range(count)]
        low = schema.get("minimum", 0)
        return {
            "string": self._random.choice(["a", "hi", "two words", "é"]),
            "integer": self._random.randrange(low, low + 5),
            "number": self._random.choice([0.0, 0.5, 1.0, 2.0]),
            "boolean": self._random.random() < 0.5,
            "null": None,
        }.get(str(kind), self._random.choice(ODD))

    def object(self, schema: dict[str, Any], depth: int = 0) -> dict[str, Any]:
        required = schema.get("required", ())
        share = 0.03 if len(schema.get("properties", ())) > 10 else 0.4
        return {
            name: self.value(inner, depth + 1)
            for name, inner in schema.get("properties", {}).items()
            if name in required or self._random.random() < share
        }

    def _resolved(self, reference: str) -> dict[str, Any]:
        return self._description["components"]["schemas"][reference.rpartition("/")[2]]


def check(server: LiveServer, path: str, body: Any) -> int:
    status, headers, data = server.request("POST", path, body)
    assert status in (200, 400, 404, 408), (status, path, body, data)
    if headers["content-type"].startswith("text/event-stream"):
        assert events(data)[-1] == "[DONE]" or b"event: response." in data
    elif status == 200:
        json.loads(data)
    else:
        assert set(json.loads(data)["error"]) == {"message", "type", "param", "code"}
    return status


def test_random_requests_are_answered_or_refused_in_order(server):
    description = json.loads(server.request("GET", "/openapi.json")[2])
    statuses: dict[str, list[int]] = {}
    for path, methods in sorted(description["paths"].items()):
        if "requestBody" not in methods.get("post", {}):
            continue
        schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
        maker = Maker(description, seed=len(path))
        statuses[path] = [check(server, path, maker.value(schema)) for _ in range(NUM_REQUESTS)]
    assert len(statuses) >= 7
    for path, seen in statuses.items():
        assert 400 in seen, path
        assert 200 in seen, path
    assert server.request("GET", "/health")[0] == 200
    assert not server.engine.running


def test_what_langchain_sends_is_answered(server):
    recorded = json.loads(RECORDED.read_text())
    assert {request["path"] for request in recorded} == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
    }
    for request in recorded:
        status, headers, data = server.request("POST", request["path"], request["body"])
        assert status == 200, data
        assert "x-paged-jax-ignored-fields" not in headers
