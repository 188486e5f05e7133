#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a client should not send, and signals at any moment: nobody gets another one's answer, everybody gets one or is told why, memory
has a limit, and the server ends when it is told to. KVPOLICY_ATTACK_ROUNDS (default 40) says how many mutated bodies and starts there
are. See served.py."""
import concurrent.futures
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import unittest

import served
from served import PATIENCE, QUESTION, Server, events

ROUNDS = int(os.environ.get("KVPOLICY_ATTACK_ROUNDS", "40"))
HOST = b"Host: localhost\r\n"


def post(prompt="a", tokens=2, head=HOST, **more):
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}).encode()
    return b"POST /v1/completions HTTP/1.1\r\n" + head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def answers(port, *parts, address="127.0.0.1"):
    """All that the server says to these bytes, until it closes the connection."""
    with socket.create_connection((address, port), timeout=PATIENCE) as one:
        said = b""
        try:
            for part in parts:
                one.sendall(part)
            while more := one.recv(65536):
                said += more
        except ConnectionError:
            pass  # it was closed before all of it was read
    return said


def statuses(said):
    return [int(one) for one in re.findall(rb"^HTTP/1\.1 (\d+) ", said, re.M)]


def peak_memory(process):
    """MiB."""
    with open(f"/proc/{process.pid}/status") as file:
        return int(re.search(r"VmHWM:\s+(\d+) kB", file.read()).group(1)) // 1024


class Attacks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--memory", "32")
        cls.addClassCleanup(cls.server.kill)

    @classmethod
    def tearDownClass(cls):
        status, errors = cls.server.stop()
        assert status == 0, errors

    def test_a_connection_has_one_request(self):
        """Whatever follows is never taken for one: a proxy that keeps connections for many clients cannot get out of step."""
        inner = post("ATTACKER: And it came to pass", 12)
        victim = post("VICTIM: the secret of king David is", 12)
        for method in [b"GET", b"HEAD", b"OPTIONS"]:
            for hides in [b"Content-Length: %d\r\n" % len(inner), b"Transfer-Encoding: chunked\r\n", b"Content-Length : %d\r\n" % len(inner)]:
                said = answers(self.server.port, method + b" /health HTTP/1.1\r\n" + HOST + hides + b"\r\n", inner, victim)
                self.assertLessEqual(len(statuses(said)), 1, said)
                self.assertNotIn(b"choices", said)
        for head in [b"", HOST]:
            self.assertEqual(statuses(answers(self.server.port, b"GET /health HTTP/1.1\r\n" + head + b"Content-Length: 3\r\n\r\n")), [400])
            self.assertEqual(statuses(answers(self.server.port, b"GET /health HTTP/1.1\r\n" + head + b"Content-Length: 0\r\n\r\n")), [200])
        # The first of several is answered, and the client is told that the others were not.
        said = answers(self.server.port, post() + post() + post())
        self.assertEqual(statuses(said)[:1], [200])
        self.assertEqual(len(statuses(said)), 1)
        self.assertIn(b"connection: close", said.lower())

    def test_unclear_lengths(self):
        body = b'{"prompt": "a"}'
        for lines in [b"Content-Length: 15\r\nContent-Length: 15", b"Content-Length: 15\r\nContent-Length: 3", b"Content-Length: +15",
                      b"Content-Length: 15, 15", b"Content-Length: 0x0f", b"Content-Length: -1", b"Content-Length: 15 15",
                      b"Content-Length: 99999999999999999999999", b"Content-Length: "]:
            said = answers(self.server.port, b"POST /v1/completions HTTP/1.1\r\n" + HOST + lines + b"\r\n\r\n" + body)
            self.assertIn(statuses(said), [[400], [411]], (lines, said))

    def test_pages_of_other_sites(self):
        """A browser sends forms and plain text for any page, and a page's own name may lead to this address."""
        for head, status in [(HOST + b"Origin: http://evil.example\r\nContent-Type: text/plain\r\n", 403), (HOST + b"Origin: null\r\n", 403),
                             (b"Host: evil.example:8080\r\n", 403), (b"Host: evil.example\r\nOrigin: http://evil.example\r\n", 403),
                             (b"Host: 127.0.0.1.evil.example\r\n", 403), (b"Host: localhost.evil.example\r\n", 403),
                             (HOST + b"Origin: http://localhost\r\n", 200), (b"Host: 127.0.0.1:80\r\nOrigin: http://127.0.0.1:80\r\n", 200),
                             (b"Host: localhost:80\r\nOrigin: http://localhost\r\n", 200), (b"Host: localhost\r\nOrigin: http://localhost:443\r\n", 403),
                             (b"Host: [::1]:80\r\n", 200), (b"Host: ::1\r\n", 200), (b"Host: ::2\r\n", 403), (b"Host: \r\n", 200), (b"Host: [\r\n", 403), (b"Host: LOCALHOST:1\r\n", 200), (b"", 200)]:
            self.assertEqual(statuses(answers(self.server.port, post(head=head))), [status], head)
            if b"Origin" not in head:
                self.assertEqual(statuses(answers(self.server.port, b"GET /state HTTP/1.1\r\n" + head + b"\r\n")), [status], head)
        server = Server("--memory", "32", "--also-known-as", "Models.example")
        self.addCleanup(server.kill)
        self.assertEqual(statuses(answers(server.port, post(head=b"Host: models.example\r\nOrigin: https://models.example\r\n"))), [200])
        # A proxy need not pass the name on.
        self.assertEqual(statuses(answers(server.port, post(head=b"Host: 127.0.0.1:8080\r\nOrigin: https://models.example\r\n"))), [200])
        self.assertEqual(statuses(answers(server.port, post(head=b"Host: 127.0.0.1:8080\r\nOrigin: https://other.example\r\n"))), [403])
        self.assertEqual(statuses(answers(server.port, post(head=b"Host: other.example\r\n"))), [403])
        self.assertEqual(server.stop()[0], 0)

    def test_the_other_loopback_address(self):
        with contextlib.closing(socket.socket(socket.AF_INET6)) as one:
            try:
                one.bind(("::1", 0))
            except OSError:
                self.skipTest("this machine has no address ::1")
        server = Server("--memory", "32", "--host", "::1")
        self.addCleanup(server.kill)
        for host, status in [(b"evil.example", 403), (b"[::1]:80", 200)]:
            said = answers(server.port, b"GET /health HTTP/1.1\r\nHost: " + host + b"\r\n\r\n", address="::1")
            self.assertEqual(statuses(said), [status])
        self.assertIn(f"http://[::1]:{server.port}", server.stop()[1])

    def test_short_texts_of_much_memory(self):
        server = Server("--memory", "32")
        self.addCleanup(server.kill)
        before = peak_memory(server.process)
        size = 4 << 20

        def body(what):
            return b'{"prompt": "a", "stop": ' + what + b"}"

        bombs = [body(b"[" + b"{}," * (size // 3 - 20) + b"{}]"), body(b"[" + b"[]," * (size // 3 - 20) + b"[]]"),
                 body(b"[" + b"0," * (size // 2 - 30) + b"0]"), body(b"[" * (size - 60)), body(b'{"a":' * (size // 5 - 20)),
                 b"{" + b",".join(b'"%x":0' % i for i in range(380000)) + b"}", b'{"' + b"k" * (size - 60) + b'": 1}',
                 body(b"[" + b'{"a":0},' * (size // 8 - 20) + b"0]"), body(b'["' + b"\\u0000" * (size // 6 - 20) + b'"]')]
        # Texts of JSON within one, which share what it may take.
        inner = json.dumps(json.dumps({"a": [{}] * 100000}))
        calls = ",".join('{"function": {"name": "f", "arguments": %s}}' % inner for _ in range(10))
        chat = ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [%s]}]}' % calls).encode()
        asked = [("/v1/completions", one) for one in bombs * 4] + [("/v1/chat/completions", chat)] * 8
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            for status, text in pool.map(lambda one: server.ask("POST", *one), asked):
                self.assertIn(status, [400, 503], text[:200])
                self.assertLess(len(text), 1000)
        grown = peak_memory(server.process) - before
        # Sixteen clients at once, of which four are read; a memory checker keeps what was freed.
        self.assertLess(grown, 600, "MiB")
        self.assertEqual(server.complete()[0], 200)
        self.assertEqual(server.stop()[0], 0)

    def test_mutated_bodies(self):
        """Each is answered, by a status that fits."""
        drawn = random.Random(5)
        seeds = [{"prompt": QUESTION, "max_tokens": 2, "temperature": 0, "stop": ["a", "b"], "seed": 3, "top_p": 0.5},
                 {"prompt": [1, 2, 3], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}, "kv_plan": "int4"},
                 {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "tools": [], "response_format": {"type": "text"}},
                 {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]}]
        scraps = [b"null", b"-1", b"1e308", b"[]", b"{}", b'"', b"\\", b"\\ud800", b"\xff", b"\0", b"99999999999999999999", b",", b":", b"[[[["]
        for _ in range(10 * ROUNDS):
            body = bytearray(json.dumps(drawn.choice(seeds)).encode())
            for _ in range(drawn.randint(1, 4)):
                at = drawn.randrange(len(body) + 1)
                body[at:at + drawn.choice([0, 0, 1, 1, 5])] = drawn.choice(scraps + [b"", bytes([drawn.randrange(256)])])
            path = drawn.choice(["/v1/completions", "/v1/chat/completions"])
            status, text = self.server.ask("POST", path, bytes(body))
            self.assertIn(status, [200, 400, 404], (body, text))
            if status != 200:
                self.assertTrue(json.loads(text)["error"]["message"], body)
        self.assertEqual(self.server.complete()[0], 200)


class Stops(unittest.TestCase):
    def test_running_answers_are_told(self):
        server = Server()
        self.addCleanup(server.kill)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(answers, server.port, post(QUESTION, 10000, stream=stream, temperature=1)) for stream in [True, False] * 4]
            server.wait_until(lambda: server.count("begins") == 8)
            status, errors = server.stop()
            said = [one.result() for one in asked]
        self.assertEqual(status, 0, errors)
        self.assertIn("8 requests were cut", errors)
        for one in said[::2]:
            pieces, ended = events(one.replace(b"\r\n", b"\n").decode())
            self.assertTrue(ended, one)
            self.assertIn("the server is stopping", pieces[-1]["error"]["message"])
        for one in said[1::2]:
            # Its status is true, or it broke off: the last chunk of an answer is empty.
            self.assertTrue(statuses(one) == [503] or (statuses(one) == [200] and not one.endswith(b"0\r\n\r\n")), one)

    def test_signals_that_are_not_for_it(self):
        """SIGUSR1 is nothing that it knows, and does not take away that it can be stopped."""
        server = Server("--memory", "32")
        self.addCleanup(server.kill)
        server.process.send_signal(signal.SIGUSR1)
        self.assertEqual(server.end()[0], -signal.SIGUSR1)

    def test_twice(self):
        server = Server("--memory", "32")
        self.addCleanup(server.kill)
        half = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
        half.sendall(b"GET / HTT")
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        self.assertIn(server.end()[0], [0, -signal.SIGTERM])
        half.close()

    def test_clients_that_never_finish(self):
        """Half a request line, half a header, half a body: the server ends all the same."""
        server = Server("--memory", "32")
        self.addCleanup(server.kill)
        half = [socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) for _ in range(3)]
        for one, sent in zip(half, [b"GE", b"GET / HTTP/1.1\r\nHost: loc", post()[:-3]]):
            one.sendall(sent)
        self.assertEqual(server.complete()[0], 200)
        self.assertEqual(server.stop()[0], 0)
        for one in half:
            one.close()

    def test_at_any_moment(self):
        """From its start on a server ends when it is told to: with 0 once it listens, else by the signal."""
        drawn = random.Random(7)
        for turn in range(ROUNDS):
            process = subprocess.Popen([served.PROGRAM, "--port", "0", "--memory", "32"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            if turn % 4 == 3:
                process.stdout.readline()
            for _ in range(drawn.randrange(3_000_000) if turn % 4 else 0):
                pass  # some moments
            process.send_signal(drawn.choice([signal.SIGTERM, signal.SIGINT]))
            out, errors = process.communicate(timeout=PATIENCE)
            self.assertIn(process.returncode, [0] if out or turn % 4 == 3 else [0, -signal.SIGTERM, -signal.SIGINT], (turn, out, errors))


if __name__ == "__main__":
    served.main()
