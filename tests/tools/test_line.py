"""The line between workers and a store does to a request exactly what it is told."""

import random
import socket
import threading
import time
from contextlib import ExitStack, suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer

from lab.proof.soak import Line
from lab.proxy import HOST, Proxy

CLAIM = f"swap soak.charge {'1' * 32}".encode()
OTHER = CLAIM.replace(b"1", b"2")


def ask(line: Line, *requests: bytes) -> list[bytes]:
    """What one connection is answered; empty where it was cut."""
    answers = []
    with socket.create_connection((line.host, line.port), timeout=10) as connection:
        for request in requests:
            try:
                connection.sendall(request)
                answers.append(connection.recv(1 << 16))
            except (BrokenPipeError, ConnectionResetError):
                answers.append(b"")
    return answers


def test_line_loses_the_next_write_of_a_task() -> None:
    """Before or after the server had it; a request that names no task is not what the campaign is about."""
    requests: list[bytes] = []

    class Answering(BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                while request := self.request.recv(1 << 16):
                    requests.append(request)
                    self.request.sendall(b"OK")

    with ThreadingTCPServer((HOST, 0), Answering) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        with Line(HOST, server.server_address[1]) as line:
            line.lose("request lost")
            assert ask(line, b"hello", CLAIM) == [b"OK", b""]
            line.lose("reply lost")
            assert [*ask(line, OTHER), *ask(line, CLAIM)] == [b"", b"OK"]
            assert requests == [b"hello", OTHER, CLAIM]
        server.shutdown()


def test_delay_is_that_of_a_wire() -> None:
    """Nothing overtakes, what follows at once is not late twice, and what was said before the end still arrives."""
    delay, sent = 0.2, random.Random(1).randbytes(1 << 19)  # no fewer than eight reads
    with ExitStack() as sockets:
        server = sockets.enter_context(socket.create_server((HOST, 0)))
        line = sockets.enter_context(Proxy(server.getsockname()[1], delay=delay))
        client = sockets.enter_context(socket.create_connection((HOST, line.port), timeout=10))
        begin = time.perf_counter()
        client.sendall(sent)
        with server.accept()[0] as answering:
            assert answering.recv(len(sent), socket.MSG_WAITALL) == sent
            answering.sendall(b"OK")
        assert client.recv(3, socket.MSG_WAITALL) == b"OK"
        assert 2 * delay <= time.perf_counter() - begin < 5 * delay
