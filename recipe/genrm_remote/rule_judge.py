"""A server that grades by a rule, to try the recipe without a language model.

    python -m recipe.genrm_remote.rule_judge --port 8000

It answers OpenAI's chat requests with the share of lower-case letters in the judged answer, from 0 to 10.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from verl.json_text import read_json

ANSWER = re.compile(r"<answer ([0-9a-f]{16})>\n(.*)\n</answer \1>", re.DOTALL)
"""What `verl.rewards.judges` puts around an answer."""


def reply_to(prompt: str) -> str:
    """The last line that a judge writes under this prompt."""
    match = ANSWER.search(prompt)
    answer = match[2] if match else ""
    return f"VERDICT: {10 * sum(c.islower() for c in answer) / max(len(answer), 1):.3f}"


class RuleJudge(BaseHTTPRequestHandler):
    """``POST /v1/chat/completions``; ``reply_to`` makes a reply of a prompt."""

    reply_to = staticmethod(reply_to)

    def do_POST(self) -> None:
        request = read_json(self.rfile.read(int(self.headers["content-length"])).decode())
        message = {"role": "assistant", "content": self.reply_to(request["messages"][-1]["content"])}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = json.dumps({"choices": [choice], "usage": {"total_tokens": 1}}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


def server(port: int = 0, rule: Callable[[str], str] = reply_to) -> ThreadingHTTPServer:
    """Bound to this machine, and not serving yet; port 0: a free one."""
    handler = type("Judge", (RuleJudge,), {"reply_to": staticmethod(rule)})
    return ThreadingHTTPServer(("127.0.0.1", port), handler)


def main() -> None:
    parser = argparse.ArgumentParser(description="A judge by a rule, on this machine.")
    parser.add_argument("--port", type=int, default=8000)
    server(parser.parse_args().port).serve_forever()


if __name__ == "__main__":
    main()
