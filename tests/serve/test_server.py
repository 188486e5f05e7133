#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Starts the server with the shipped model and talks to it: as OpenAI's clients do, and as nobody should.

  tests/serve/test_server.py build/release/examples/serve [--openai FOLDER] [unittest's options]

It needs nothing but Python. Where the package `openai` is installed, its client is tried too; --openai installs it
into a virtual environment in this folder, if the package index can be reached.
"""
import concurrent.futures
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

PROGRAM = None
PATIENCE = 400  # seconds: other tests may want the machine meanwhile
QUESTION = "The key of Bamelo is 48213. The sky is blue. What is the key of Bamelo? "


class Server:
    """The program, from its start to its end."""

    def __init__(self, *options):
        self.process = subprocess.Popen([PROGRAM, "--port", "0", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True)
        self.port = int(self.process.stdout.readline() or self.fail())

    def fail(self):
        raise AssertionError(f"the server did not start: {self.process.stderr.read()}")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, errors

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def ask(self, method, path, body=None, timeout=PATIENCE):
        """(status, text) of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
        connection.close()
        return response.status, text

    def complete(self, **body):
        status, text = self.ask("POST", "/v1/completions", {"prompt": QUESTION, "temperature": 0, "max_tokens": 6, **body})
        return status, json.loads(text)

    def metric(self, name):
        return float(re.search(rf"^kvpolicy_{re.escape(name)} (\S+)$", self.ask("GET", "/metrics")[1], re.M).group(1))

    def wait_until_idle(self):
        for _ in range(10 * PATIENCE):
            if self.metric("running") + self.metric("waiting") == 0:
                return
            time.sleep(0.1)
        raise AssertionError(f"requests still run after {PATIENCE} seconds")


def events(text):
    """The JSON of a stream's events, and whether it was ended as it should."""
    data = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"], data[-1:] == ["[DONE]"]


class Answers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--memory", "64", "--max-waiting", "40", "--max-body", "100000", "--demo")

    @classmethod
    def tearDownClass(cls):
        status, errors = cls.server.stop()
        assert status == 0, errors

    def refused(self, path, body, status, *parts):
        found, text = self.server.ask("POST", path, body)
        self.assertEqual(found, status, text)
        error = json.loads(text)["error"]
        self.assertTrue(error["message"] and error["type"])
        for part in parts:
            self.assertIn(part, error["message"])

    def test_paths(self):
        self.assertEqual(self.server.ask("GET", "/health"), (200, '{"status":"ok"}'))
        models = json.loads(self.server.ask("GET", "/v1/models")[1])
        self.assertEqual([one["id"] for one in models["data"]], ["keyfinder"])
        status, page = self.server.ask("GET", "/")
        self.assertEqual(status, 200)
        self.assertIn("<title>kvpolicy serve</title>", page)
        self.assertIn("memory", json.loads(self.server.ask("GET", "/state")[1]))
        for line in self.server.ask("GET", "/metrics")[1].strip().split("\n"):
            self.assertRegex(line, r"^(# (HELP|TYPE) kvpolicy_\w+ .+|kvpolicy_\w+(\{reason=\"\w+\"\})? [0-9.e+-]+)$")
        status, text = self.server.ask("GET", "/nothing")
        self.assertEqual(status, 404)
        self.assertIn("/nothing", json.loads(text)["error"]["message"])

    def test_completion(self):
        status, said = self.server.complete()
        self.assertEqual(status, 200)
        self.assertEqual(len(said["choices"][0]["text"]), 6)
        self.assertEqual(said["choices"][0]["finish_reason"], "length")
        self.assertEqual(said["usage"]["completion_tokens"], 6)
        self.assertEqual(said["usage"]["prompt_tokens"], len(QUESTION))
        self.assertGreater(said["kv_bytes"], 0)
        tokens = list(QUESTION.encode())
        self.assertEqual(self.server.complete(prompt=tokens)[1]["choices"], said["choices"])
        self.assertEqual(self.server.complete(prompt=[QUESTION])[1]["choices"], said["choices"])
        self.assertEqual(self.server.complete(prompt=[tokens])[1]["choices"], said["choices"])

    def test_stops(self):
        text = self.server.complete(max_tokens=24)[1]["choices"][0]["text"]
        for first, last in [(0, 1), (3, 9), (10, 12), (20, 24)]:
            stop = text[first:last]
            said = self.server.complete(max_tokens=24, stop=["\0\1", stop])[1]["choices"][0]
            self.assertEqual(said["finish_reason"], "stop")
            self.assertEqual(said["text"], text.split(stop)[0])
        # The end of the text could be the beginning of a stop text, and is said after all.
        self.assertEqual(self.server.complete(max_tokens=24, stop=text[20:] + "#")[1]["choices"][0]["text"], text)

    def test_streams(self):
        whole = self.server.complete(max_tokens=20)[1]
        body = {"prompt": QUESTION, "temperature": 0, "max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}}
        status, text = self.server.ask("POST", "/v1/completions", body)
        self.assertEqual(status, 200)
        pieces, ended = events(text)
        self.assertTrue(ended)
        self.assertEqual("".join(one["choices"][0]["text"] for one in pieces if one["choices"]), whole["choices"][0]["text"])
        self.assertEqual(pieces[-2]["choices"][0]["finish_reason"], "length")
        self.assertEqual(pieces[-1]["usage"]["completion_tokens"], 20)
        self.assertEqual(len({one["id"] for one in pieces}), 1)

    def test_same_seed_same_text(self):
        wild = dict(temperature=1.5, top_p=0.9, max_tokens=30)
        one = self.server.complete(seed=5, **wild)[1]["choices"]
        self.assertEqual(self.server.complete(seed=5, **wild)[1]["choices"], one)
        self.assertNotEqual(self.server.complete(seed=6, **wild)[1]["choices"], one)

    def test_plans(self):
        for plan in ["full", "int8", "duo:0.5", "duo+int4:0.5", "headkv:128", "kivi2"]:
            status, said = self.server.complete(kv_plan=plan)
            self.assertEqual(status, 200, said)
            self.assertEqual(said["kv_plan"], plan)
            self.assertEqual(said["usage"]["completion_tokens"], 6)
        for plan in ["", "nonsense", "duo@/etc/passwd:0.5", "/etc/passwd", "duo:7", "../plan", "x" * 1000, "full\n"]:
            self.refused("/v1/completions", {"prompt": "a", "kv_plan": plan}, 400, "kv_plan")
        self.refused("/v1/completions", {"prompt": "a", "kv_plan": 3}, 400, "kv_plan must be a text")

    def test_prefixes(self):
        system = "".join(f"Fact {i}: nothing. " for i in range(60))
        first = self.server.complete(prompt=system + QUESTION)[1]
        again = self.server.complete(prompt=system + QUESTION)[1]
        other = self.server.complete(prompt=system + "What is this? ")[1]
        self.assertEqual(again["choices"], first["choices"])
        self.assertGreaterEqual(again["usage"]["prompt_tokens_details"]["cached_tokens"], len(system) // 2)
        self.assertGreaterEqual(other["usage"]["prompt_tokens_details"]["cached_tokens"], len(system) // 2)

    def test_bad_requests(self):
        for body in [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 90000, b'{"prompt": "a"', b"null", b'{"prompt": "\xc3"}']:
            self.refused("/v1/completions", body, 400)
        for body, part in [({}, "prompt"), ({"prompt": ""}, "empty"), ({"prompt": 3}, "prompt"), ({"prompt": ["a", "b"]}, "prompt"),
                           ({"prompt": [1, 256]}, "below 256"), ({"prompt": [-1]}, "below 256"), ({"prompt": [1.5]}, "below 256"),
                           ({"prompt": [[1], "a"]}, "prompt"), ({"prompt": []}, "prompt"),
                           ({"prompt": "a", "max_tokens": 10**9}, "max_tokens"), ({"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
                           ({"prompt": "a", "max_tokens": 0}, "at least 1"), ({"prompt": "a", "max_tokens": -1}, "at least 1"),
                           ({"prompt": "a", "max_tokens": "x"}, "max_tokens"), ({"prompt": "a", "temperature": -1}, "temperature"),
                           ({"prompt": "a", "temperature": "hot"}, "temperature"), ({"prompt": "a", "top_p": 2}, "top_p"),
                           ({"prompt": "a", "stop": [""]}, "stop"), ({"prompt": "a", "stop": 3}, "stop"),
                           ({"prompt": "a", "stream": "yes"}, "stream"), ({"prompt": "a", "n": 2}, "n is not supported"),
                           ({"prompt": "a", "logprobs": 3}, "logprobs is not supported"), ({"prompt": "a", "wrong": 3}, "wrong is not known"),
                           ({"prompt": "a", "seed": -3}, "seed"), ({"prompt": "a" * 50000}, "tokens")]:
            if "max_tokens" in body and isinstance(body["max_tokens"], int) and 0 < body["max_tokens"] <= 10**9:
                part = "tokens"
            self.refused("/v1/completions", body, 400, part)
        self.refused("/v1/completions", {"prompt": "a", "model": "gpt-9"}, 404, "keyfinder")
        self.refused("/v1/chat/completions", {"messages": []}, 400, "messages")
        self.refused("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400)
        self.refused("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}, 400, "template")
        status, text = self.server.ask("POST", "/v1/completions", b'{"prompt": "' + b"a" * 200000 + b'"}')
        self.assertEqual(status, 413)
        self.assertIn("--max-body", json.loads(text)["error"]["message"])
        self.assertEqual(self.server.complete()[0], 200)

    def test_together_as_alone(self):
        def ask(i):
            prompt = f"The key of Bamelo is {10000 + 777 * i}. What is the key of Bamelo? "
            status, said = self.server.complete(prompt=prompt, max_tokens=12, kv_plan=["full", "duo:0.5", "int8"][i % 3])
            self.assertEqual(status, 200, said)
            return said["choices"][0]["text"]
        alone = [ask(i) for i in range(16)]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            together = list(pool.map(ask, range(16)))
        # Products of more rows are rounded in another order, which may decide between two letters now and then.
        self.assertGreaterEqual(sum(a == b for a, b in zip(alone, together)), 14)

    def test_client_that_goes(self):
        before = self.server.metric('requests_ended_total{reason="cancelled"}')
        for stream in [True, False]:
            connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE)
            body = {"prompt": QUESTION, "max_tokens": 1500, "stream": stream, "temperature": 1}
            connection.request("POST", "/v1/completions", json.dumps(body))
            if stream:
                connection.getresponse().read(10)
            else:
                time.sleep(0.3)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.sock.close()
            connection.close()
            self.assertEqual(self.server.complete()[0], 200)
        self.server.wait_until_idle()
        gone = self.server.metric('requests_ended_total{reason="cancelled"}') - before
        self.assertGreaterEqual(gone, 1)

    def test_slow_reader(self):
        slow = socket.create_connection(("127.0.0.1", self.server.port))
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        body = json.dumps({"prompt": QUESTION, "max_tokens": 1500, "stream": True}).encode()
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        for _ in range(3):
            self.assertEqual(self.server.complete()[0], 200)
        slow.close()
        self.server.wait_until_idle()

    def test_many_connections(self):
        crowd = []
        try:
            for _ in range(1000):
                crowd.append(socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE))
            self.assertEqual(self.server.complete()[0], 200)
        finally:
            for one in crowd:
                one.close()
        self.assertEqual(self.server.complete()[0], 200)

    def test_half_a_request(self):
        half = socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE)
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        self.assertEqual(self.server.complete()[0], 200)
        half.close()

    def test_full_queue(self):
        def one(i):
            return self.server.ask("POST", "/v1/completions", {"prompt": QUESTION, "max_tokens": 60, "temperature": 1, "seed": i})[0]
        with concurrent.futures.ThreadPoolExecutor(160) as pool:
            statuses = list(pool.map(one, range(160)))
        self.assertEqual(set(statuses) - {200, 429}, set())
        self.assertIn(200, statuses)
        self.server.wait_until_idle()

    def test_openai_client(self):
        try:
            import openai
        except ImportError:
            self.skipTest("the package openai is not installed (pip install openai)")
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.server.port}/v1", api_key="none")
        self.assertEqual([one.id for one in client.models.list().data], ["keyfinder"])
        said = client.completions.create(model="keyfinder", prompt=QUESTION, max_tokens=5, temperature=0,
                                         extra_body={"kv_plan": "duo:0.5"})
        self.assertEqual(said.usage.completion_tokens, 5)
        pieces = client.completions.create(model="keyfinder", prompt=QUESTION, max_tokens=5, temperature=0, stream=True,
                                           extra_body={"kv_plan": "duo:0.5"})
        self.assertEqual("".join(piece.choices[0].text for piece in pieces), said.choices[0].text)
        with self.assertRaises(openai.BadRequestError) as raised:
            client.completions.create(model="keyfinder", prompt=QUESTION, extra_body={"kv_plan": "nonsense"})
        self.assertIn("kv_plan", str(raised.exception))
        with self.assertRaises(openai.NotFoundError):
            client.completions.create(model="other", prompt=QUESTION)


class Restarts(unittest.TestCase):
    def start(self, *options):
        """A server that does not outlive its test."""
        server = Server(*options)
        self.addCleanup(server.kill)
        return server

    def test_prefixes_survive(self):
        prompt = "".join(f"Fact {i}: nothing. " for i in range(60)) + QUESTION
        with tempfile.TemporaryDirectory() as folder:
            server = self.start("--prefixes", os.path.join(folder, "new"))
            first = server.complete(prompt=prompt)[1]
            self.assertEqual(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
            status, errors = server.stop()
            self.assertEqual(status, 0)
            self.assertRegex(errors, r"prefixes +[1-9]\d* saved")
            server = self.start("--prefixes", os.path.join(folder, "new"))
            again = server.complete(prompt=prompt)[1]
            self.assertEqual(again["choices"], first["choices"])
            self.assertGreater(again["usage"]["prompt_tokens_details"]["cached_tokens"], 500)
            self.assertRegex(server.stop()[1], r"prefixes +[1-9]\d* loaded")
            server = self.start("--prefixes", os.path.join(folder, "new"), "--weights", "int8")
            self.assertEqual(server.complete(prompt=prompt)[1]["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
            self.assertIn("not loaded", server.stop()[1])

    def test_little_memory(self):
        """Many requests under a budget for a few, some of which wait in a file."""
        with tempfile.TemporaryDirectory() as folder:
            server = self.start("--memory", "6", "--swap-folder", folder, "--max-waiting", "100")
            with concurrent.futures.ThreadPoolExecutor(24) as pool:
                said = list(pool.map(lambda i: server.complete(max_tokens=150, kv_plan=["full", "duo:0.5"][i % 2]), range(24)))
            self.assertEqual({status for status, _ in said}, {200})
            for kind in range(2):
                self.assertEqual(len({body["choices"][0]["text"] for _, body in said[kind::2]}), 1)
            status, text = server.ask("POST", "/v1/completions", {"prompt": "a" * 900, "max_tokens": 1000})
            self.assertEqual(status, 400)
            self.assertIn("the server has", json.loads(text)["error"]["message"])
            self.assertEqual(server.metric('requests_ended_total{reason="failed"}'), 0)
            self.assertLessEqual(server.metric("memory_live_bytes"), 6 * 2**20)
            self.assertEqual(server.stop()[0], 0)

    def test_a_port_that_is_taken(self):
        server = self.start()
        second = subprocess.run([PROGRAM, "--port", str(server.port)], capture_output=True, text=True, timeout=PATIENCE)
        self.assertEqual(second.returncode, 1)
        self.assertIn("--port", second.stderr)
        self.assertEqual(server.stop()[0], 0)


def run_with_openai(folder):
    """Starts this script again in an environment that has the package; returns if there is none."""
    python = os.path.join(folder, "bin", "python")
    installed = [python, "-c", "import openai"]
    if not os.path.exists(python) or subprocess.run(installed, capture_output=True).returncode != 0:
        print(f"installing openai into {folder}", flush=True)
        made = subprocess.run([sys.executable, "-m", "venv", folder], capture_output=True, text=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1", "openai"]
        if made.returncode == 0:
            try:
                made = subprocess.run(pip, capture_output=True, text=True, timeout=300)
            except subprocess.TimeoutExpired:
                print("openai cannot be installed, its test is skipped: the package index does not answer")
                return
        if made.returncode != 0:
            print("openai cannot be installed, its test is skipped:", (made.stderr or made.stdout).strip().split("\n")[-1])
            return
    os.execv(python, [python, *sys.argv])


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    if "--openai" in sys.argv:
        at = sys.argv.index("--openai")
        folder = sys.argv[at + 1]
        del sys.argv[at:at + 2]
        sys.argv.insert(1, PROGRAM)
        run_with_openai(folder)
        del sys.argv[1]
    unittest.main(verbosity=2)
