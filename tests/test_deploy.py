"""The board and the alerts name series that are there."""

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from paged_jax.cli import API_KEY_VARIABLE, build_parser
from paged_jax.flags import chosen
from serve import ServeOptions
from tests.fake_engine import FakeEngine
from tests.live_server import live_server

DEPLOY = Path(__file__).resolve().parent.parent / "scripts" / "deploy"
SERIES = re.compile(r"\b(?:vllm|paged_jax):\w+")
LABELS = re.compile(r"by \(([\w, ]+)\)|[{,](\w+)=")


def scraped() -> dict[str, set[str]]:
    """The labels of every series, after a request of each kind of end that changes something."""
    with live_server(FakeEngine()) as server:
        for body in ({"prompt": "hi", "max_tokens": 4}, {"prompt": "hi", "unheard_of": 1}):
            assert server.request("POST", "/v1/completions", body)[0] == 200
        text = server.request("GET", "/metrics")[2].decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_series_of_the_board_and_the_alerts_exists():
    board = json.loads((DEPLOY / "grafana-board.json").read_text())
    wanted = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    wanted += [variable["query"] for variable in board["templating"]["list"]]
    rules = (DEPLOY / "prometheus-rules.yml").read_text()
    wanted += re.findall(r"expr: (?:>-\n)?((?:.|\n)*?)(?=\n +(?:for|labels|- ))", rules)
    assert len(wanted) > 50
    there = scraped()
    for expression in wanted:
        names = set(SERIES.findall(expression))
        assert names or expression == "prometheus", expression
        assert names <= set(there), (expression, names - set(there))
        known = {"instance"}.union(*(there[name] for name in names))
        for by, selector in LABELS.findall(expression):
            labels = set(re.split(r"[, ]+", by)) if by else {selector}
            assert labels <= known, (expression, labels - known)


def test_the_probes_and_flags_of_the_deployment_are_real():
    text = (DEPLOY / "kubernetes.yml").read_text()
    paths = re.findall(r"httpGet: \{path: (\S+),", text)
    assert paths == ["/health", "/health", "/live"]
    with live_server(FakeEngine()) as server:
        assert all(server.request("GET", path)[0] == 200 for path in paths)
    flags = re.findall(r"- --(\S+)", text)
    parser = build_parser(["serve"])
    given = parser.parse_args(["serve", "m", *(f"--{flag}" for flag in flags)])
    drain_s = chosen(given, ServeOptions)["drain_timeout_s"]
    grace_s = re.search(r"terminationGracePeriodSeconds: (\d+)", text)
    assert grace_s is not None and int(grace_s[1]) > drain_s
    assert API_KEY_VARIABLE in text


def test_every_alert_says_what_is_wrong():
    rules = (DEPLOY / "prometheus-rules.yml").read_text()
    alerts = rules.split("- alert: ")[1:]
    assert len(alerts) == 7
    for alert in alerts:
        assert all(word in alert for word in ("expr: ", "severity: ", "summary: ")), alert
