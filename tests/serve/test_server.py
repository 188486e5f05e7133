#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Talks to a server with the shipped model: as OpenAI's clients do, and as nobody should. See served.py."""
import concurrent.futures
import http.client
import json
import socket
import subprocess
import unittest

import served
from served import PATIENCE, QUESTION, Server, events


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
        state = json.loads(self.server.ask("GET", "/state")[1])
        self.assertIn("memory", state)
        self.assertEqual((state["model"], state["chat"]), ("keyfinder", False))
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
        for seed in [-1, 2**62, -2**63, 2**64 - 1]:
            self.assertEqual(self.server.complete(seed=seed, **wild)[1]["choices"], self.server.complete(seed=seed, **wild)[1]["choices"])
        # The likeliest token alone, whatever else is asked for.
        likeliest = self.server.complete(max_tokens=20)[1]["choices"]
        for settings in [{"top_p": 0}, {"top_p": 0, "top_k": 40}, {"top_k": 1}, {"temperature": 0, "top_k": -1}]:
            self.assertEqual(self.server.complete(**{"max_tokens": 20, "temperature": 5, "seed": 3, **settings})[1]["choices"], likeliest)

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
                           ({"prompt": "a", "max_tokens": 0}, "from 1 to"), ({"prompt": "a", "max_tokens": -1}, "from 1 to"),
                           ({"prompt": "a", "max_tokens": "x"}, "max_tokens"), ({"prompt": "a", "temperature": -1}, "temperature"),
                           ({"prompt": "a", "temperature": "hot"}, "temperature"), ({"prompt": "a", "top_p": 2}, "top_p"),
                           ({"prompt": "a", "stop": [""]}, "stop"), ({"prompt": "a", "stop": 3}, "stop"),
                           ({"prompt": "a", "stream": "yes"}, "stream"), ({"prompt": "a", "n": 2}, "n is not supported"),
                           ({"prompt": "a", "logprobs": 3}, "logprobs is not supported"), ({"prompt": "a", "wrong": 3}, "wrong is not known"),
                           ({"prompt": "a", "seed": 2**64}, "seed"), ({"prompt": "a", "seed": 1.5}, "seed"), ({"prompt": "a", "top_k": -2}, "top_k"), ({"prompt": "a" * 50000}, "tokens")]:
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
            body = json.dumps({"prompt": QUESTION, "max_tokens": 1500, "stream": stream, "temperature": 1}).encode()
            came = len(self.server.requests)
            with socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE) as one:
                one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                if stream:
                    one.recv(10)
                else:
                    self.server.wait_until(lambda: len(self.server.requests) > came)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.assertEqual(self.server.complete()[0], 200)
        self.server.wait_until_idle()
        gone = self.server.metric('requests_ended_total{reason="cancelled"}') - before
        self.assertGreaterEqual(gone, 1)

    def test_slow_reader(self):
        came = len(self.server.requests)
        slow = socket.create_connection(("127.0.0.1", self.server.port))
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        body = json.dumps({"prompt": QUESTION, "max_tokens": 1500, "stream": True}).encode()
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        for _ in range(3):
            self.assertEqual(self.server.complete()[0], 200)
        self.server.wait_until(lambda: len(self.server.requests) == came + 4)
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
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
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

    def test_a_port_that_is_taken(self):
        second = subprocess.run([served.PROGRAM, "--port", str(self.server.port)], capture_output=True, text=True, timeout=PATIENCE)
        self.assertEqual(second.returncode, 1)
        self.assertIn("--port", second.stderr)


if __name__ == "__main__":
    served.main()
