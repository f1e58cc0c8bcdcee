"""A payment provider that hangs: it takes charges, and then it answers nobody until it is told to.

`python -m lab.incident.provider PORT`. A charge is booked under its idempotency key, once, before anything hangs. What
comes by bank transfer while it hangs is lost and never booked. Whoever waits for an answer cannot tell the two apart.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["TRANSFER"]

TRANSFER = "sepa/"
"""How the orders begin that are paid by bank transfer."""


class _Books:
    def __init__(self) -> None:
        self.charges: dict[str, str] = {}
        self.lock = threading.Lock()
        self.answers = threading.Event()
        self.answers.set()


_BOOKS = _Books()


class _Provider(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """`/charges/KEY`: the charge of that key, if there is one; `/charges`: all of them."""
        key = self.path.removeprefix("/charges").strip("/")
        found = _BOOKS.charges.get(key)
        if key and found is None:
            self._answer(404, {"error": "no charge with this key"})
        else:
            self._answer(200, {"order": found} if key else {"charges": list(_BOOKS.charges.values())})

    def do_POST(self) -> None:
        """`/charges` books one; `/hang` and `/answer` say what becomes of the next ones."""
        if self.path in {"/hang", "/answer"}:
            (_BOOKS.answers.clear if self.path == "/hang" else _BOOKS.answers.set)()
            self._answer(200, {})
            return
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["order"]
        if _BOOKS.answers.is_set() or not order.startswith(TRANSFER):
            self._book(order)
        _BOOKS.answers.wait()
        if self.headers["Idempotency-Key"] in _BOOKS.charges:
            self._answer(200, {"charge": f"ch_{self.headers['Idempotency-Key'][:8]}"})

    def _book(self, order: str) -> None:
        with _BOOKS.lock:
            _BOOKS.charges.setdefault(self.headers["Idempotency-Key"], order)

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer.request_queue_size = 512
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), _Provider).serve_forever()
