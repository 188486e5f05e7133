#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""More clients than the server takes, and clients that neither read nor write: others are served all the same, and
everything is given back. See served.py."""
import json
import socket
import subprocess
import threading
import unittest

import served
from served import PATIENCE, QUESTION, Server


def post(port, body, length=None, stalls=False):
    """A connection that has sent a request, or the beginning of one that says it has `length` bytes. One that stalls has
    small buffers at both ends, so that the server notices soon: its own follow from the segments' size."""
    one = socket.socket()
    if stalls:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    one.settimeout(PATIENCE)
    one.connect(("127.0.0.1", port))
    one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (length or len(body)) + body)
    return one


def stream_body(tokens, seed=1):
    return json.dumps({"prompt": QUESTION, "max_tokens": tokens, "stream": True, "seed": seed}).encode()


def status_of(connection):
    """The status of the answer, which need not have come as a whole."""
    line = b""
    while not line.endswith(b"\r\n"):
        one = connection.recv(1)
        if not one:
            return None
        line += one
    return int(line.split()[1])


class Limits(unittest.TestCase):
    def start(self, *options):
        """A server that does not outlive its test."""
        server = Server(*options)
        self.addCleanup(server.kill)
        return server

    def all_given_back(self, server):
        server.wait_until_idle()
        # Prefixes may stay.
        self.assertEqual(server.metric("memory_live_bytes"), server.metric("memory_prefix_bytes"))
        self.assertEqual(server.metric("memory_promised_bytes"), 0)
        self.assertEqual(server.metric("memory_moved_out_bytes"), 0)

    def test_four_hundred_streams(self):
        """At the options that a server has by itself: 64 run, 256 wait, all others are told so."""
        server = self.start()
        crowd, statuses, answered = [], [], threading.Condition()

        def ask(seed):
            one = post(server.port, stream_body(1500, seed))
            status = status_of(one)
            with answered:
                crowd.append(one)
                statuses.append(status)
                answered.notify()
            while one.recv(65536):  # as fast as it is written
                pass

        def ask_and_ignore_the_end(seed):
            try:
                ask(seed)
            except OSError:
                pass  # closed below

        def ask_many(count):
            wanted = len(statuses) + count
            for i in range(count):
                threading.Thread(target=ask_and_ignore_the_end, args=(i,), daemon=True).start()
            with answered:
                self.assertTrue(answered.wait_for(lambda: len(statuses) == wanted, timeout=PATIENCE))

        ask_many(400)
        self.assertEqual(set(statuses), {200, 429})
        # Who comes in makes room for others who wait, until all places are taken.
        server.wait_until(lambda: server.running() == 64)
        ask_many(100)
        taken = statuses.count(200)
        self.assertEqual(taken, 64 + 256)
        for path in ["/health", "/metrics", "/v1/models"]:
            self.assertEqual(server.ask("GET", path)[0], 200)
        status, text = server.ask("POST", "/v1/completions", {"prompt": QUESTION, "max_tokens": 4})
        self.assertEqual(status, 429)
        self.assertIn("try again later", json.loads(text)["error"]["message"])
        server.wait_until(lambda: len(server.requests) == taken)
        self.assertEqual(server.metric("requests_refused_total"), 500 - taken + 1)
        for one in crowd:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # refused, and closed by the server
            one.close()
        self.all_given_back(server)
        self.assertEqual(server.complete()[0], 200)
        self.assertEqual(server.stop()[0], 0)

    def test_readers_that_stall(self):
        """Whoever takes nothing is dropped long before its answer is complete."""
        server = self.start("--seconds-to-write", "1", "--max-running", "16", "--max-waiting", "16")
        # So many and so long that the fastest machine takes much longer for their answers than the second after which they
        # are dropped: as long as the model's context lets them be.
        tokens = 10000
        crowd = [post(server.port, stream_body(tokens, i), stalls=True) for i in range(16)]
        server.wait_until(lambda: server.count("ended") == 16)
        self.assertEqual(server.metric('requests_ended_total{reason="cancelled"}'), 16, "".join(server.lines))
        self.assertLess(server.metric("new_tokens_total"), 16 * tokens / 2)
        self.assertEqual(server.metric('requests_ended_total{reason="failed"}'), 0)
        self.all_given_back(server)
        for one in crowd:
            one.close()
        self.assertEqual(server.stop()[0], 0)

    def test_places_come_back(self):
        """They keep their places until they are dropped; then all places come back."""
        server = self.start("--seconds-to-write", "3", "--max-running", "2", "--max-waiting", "2")
        crowd = [post(server.port, stream_body(1900, i), stalls=True) for i in range(4)]
        # Those that came before any ran were too many to wait.
        statuses = [status_of(one) for one in crowd]
        self.assertEqual(server.ask("GET", "/health")[0], 200)
        server.wait_until(lambda: server.count("ended") == statuses.count(200))
        # Their threads come back too. Who asks before is told to try again: a client that does not take its answer has its
        # thread for some seconds more.
        for status in iter(lambda: server.complete()[0], 200):
            self.assertEqual(status, 429)
        for one in crowd:
            one.close()
        self.all_given_back(server)

    def test_bodies_that_trickle(self):
        """More of them than there are threads: all are told that they are late, and nobody waits for ever."""
        server = self.start("--seconds-to-read", "2", "--max-running", "2", "--max-waiting", "2")
        crowd = [post(server.port, b"{", length=1000000) for _ in range(80)]
        done = threading.Event()

        def trickle():
            while not done.wait(0.2):
                for one in crowd:
                    try:
                        one.sendall(b" ")
                    except OSError:
                        pass  # the server has had enough of it

        feeder = threading.Thread(target=trickle, daemon=True)
        feeder.start()
        self.assertEqual(server.complete()[0], 200)
        self.assertEqual([status_of(one) for one in crowd], [408] * len(crowd))
        done.set()
        feeder.join()
        for one in crowd:
            one.close()
        self.all_given_back(server)
        self.assertEqual(server.stop()[0], 0)

    def test_bodies_without_a_length(self):
        server = self.start()
        for header, status in [(b"Transfer-Encoding: chunked\r\n", 411), (b"", 411),
                               (b"Content-Length: 5\r\nContent-Encoding: gzip\r\n", 415),
                               (b"Content-Length: 5\r\nContent-Type: multipart/form-data; boundary=x\r\n", 415)]:
            with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as one:
                one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + header + b"\r\n")
                self.assertEqual(status_of(one), status, header)
                # The connection ends, so that no rest of a body is taken for a request.
                while one.recv(4096):
                    pass
        # What curl says of a body by default, and a long one.
        body = json.dumps({"prompt": "a" * 900, "max_tokens": 2, "stop": ["x" * 1000] * 8}).encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as one:
            one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\n"
                        b"Content-Length: %d\r\n\r\n" % len(body) + body)
            self.assertEqual(status_of(one), 200)
        self.assertEqual(server.stop()[0], 0)

    def test_bodies_that_nobody_takes(self):
        """Not a byte of them is waited for."""
        server = self.start("--seconds-to-read", "86400")
        for method, path in [("POST", "/nothing"), ("PUT", "/v1/completions"), ("DELETE", "/health"), ("PATCH", "/")]:
            for length in ["Content-Length: 1000000000\r\n", ""]:
                with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as one:
                    one.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{length}\r\n".encode())
                    self.assertEqual(status_of(one), 404)
                    while one.recv(4096):
                        pass
        self.assertEqual(server.stop()[0], 0)

    def test_options_that_contradict(self):
        for options, parts in [(["--connections", "300"], ["connections is 300", "at least 384", "64", "256"]),
                               (["--max-waiting", "20000"], ["at most 10000", "max_waiting"])]:
            ended = subprocess.run([served.PROGRAM, "--port", "0", *options], capture_output=True, text=True, timeout=PATIENCE)
            self.assertEqual(ended.returncode, 1)
            for part in parts:
                self.assertIn(part, ended.stderr)


if __name__ == "__main__":
    served.main()
