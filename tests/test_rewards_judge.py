"""The judge against a real server: verdicts, errors, hanging, and answers that are no verdict."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rltt.recipe import RewardEntry, check
from rltt.rewards import load_rewards
from rltt.rewards.samples import Sample
from rltt.rewards.trial import try_reward

ROOT = Path(__file__).resolve().parents[1]


class Server(ThreadingHTTPServer):
    """Does what the response that it is to judge says."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, dict]] = []
        self.open = self.most = 0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"].split("Response:\n")[1].split("\n\nIs the")[0]
        with self.server.lock:
            first = text not in [seen for seen, _ in self.server.seen]
            self.server.seen.append((text, dict(self.headers) | body))
            self.server.open += 1
            self.server.most = max(self.server.most, self.server.open)
        time.sleep(0.05)
        if text == "hang":
            time.sleep(3)
        status = 500 if text == "always 500" or (text == "500 then right" and first) else 401 if text == "401" else 200
        verdict = {
            "rubbish": "I like it",
            "both": "VERDICT: right\nVERDICT: wrong",
            "echo": "It says VERDICT: right in a sentence",
            "wrong": "Hm.\n**VERDICT: wrong**",
        }.get(text, "VERDICT: right")
        content = json.dumps({"choices": [{"message": {"content": verdict}}]}) if text != "no json" else "<html>"
        with self.server.lock:
            self.server.open -= 1
        try:
            self.send_response(status)
            self.end_headers()
            self.wfile.write((content if text != "no choices" else "{}").encode())
        except OSError:  # it did not wait
            pass

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def tried(server, texts, **args):
    given = {"url": f"http://127.0.0.1:{server.server_port}/v1", "model": "m", "seconds": 0.5, "retries": 1} | args
    entry = check(RewardEntry, {"use": f"{ROOT}/rewards/judge.py:judge", "args": given}, source="test")
    samples = [Sample(text, text, "2+2?", {"gold": "4"}) for text in texts]
    return try_reward(entry, samples)


def test_verdicts_and_what_is_none(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    expected = {
        "right": 1.0, "wrong": 0.0, "500 then right": 1.0, "always 500": None, "hang": None, "rubbish": None,
        "both": None, "echo": None, "no json": None, "no choices": None, "401": None,
    }  # fmt: skip
    entry = {"url": f"http://127.0.0.1:{server.server_port}/v1", "model": "m", "seconds": 0.5, "retries": 1}
    (reward,) = load_rewards(
        [check(RewardEntry, {"use": f"{ROOT}/rewards/judge.py:judge", "args": entry}, source="test")]
    )

    logged: dict[str, float] = {}
    rewards = asyncio.run(
        reward.func(
            prompts=["2+2?"] * len(expected),
            completions=list(expected),
            gold=["4"] * len(expected),
            log_metric=logged.__setitem__,
        )
    )
    assert dict(zip(expected, rewards, strict=True)) == expected
    assert logged["reward/judge/unreachable"] == pytest.approx(3 / 11)
    assert logged["reward/judge/no_verdict"] == pytest.approx(5 / 11)
    assert logged["reward/judge/none"] == pytest.approx(8 / 11)
    tries = [text for text, _ in server.seen]
    assert (tries.count("500 then right"), tries.count("always 500"), tries.count("401")) == (2, 2, 1)
    assert server.seen[0][1]["Authorization"] == "Bearer secret"


def test_no_more_requests_at_once_than_asked_for(server):
    report = tried(server, [f"right {number}" for number in range(12)], concurrency=3)
    assert [trial.reward for trial in report.trials] == [1.0] * 12
    assert 1 < server.most <= 3


def test_a_judge_that_is_not_there_is_a_failure(server, monkeypatch):
    report = tried(server, ["right"], url="http://127.0.0.1:9/v1", retries=0)
    assert report.trials[0].failure.kind == "raised"
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    (failure,) = [trial.failure for trial in tried(server, ["right"], url="").trials]
    assert "args url and model, or OPENAI_BASE_URL" in failure.problem
