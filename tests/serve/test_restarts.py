#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Servers that end, or are killed, and start again; and one with little memory. See served.py."""
import concurrent.futures
import glob
import http.client
import itertools
import json
import os
import resource
import signal
import tempfile
import unittest

import chat_model
import served
from served import QUESTION, Server

LONG = "".join(f"Fact {i}: nothing. " for i in range(60)) + QUESTION


def cached(said):
    return said["usage"]["prompt_tokens_details"]["cached_tokens"]


class Restarts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = os.path.join(folder.name, "new")

    def start(self, *options, **how):
        """A server that does not outlive its test."""
        server = Server(*options, **how)
        self.addCleanup(server.kill)
        return server

    def files(self):
        return set(glob.glob(os.path.join(self.folder, "*", "*.prefixes")))

    def test_prefixes_survive(self):
        server = self.start("--prefixes", self.folder)
        first = server.complete(prompt=LONG)[1]
        self.assertEqual(cached(first), 0)
        status, errors = server.stop()
        self.assertEqual(status, 0)
        self.assertRegex(errors, r"prefixes +[1-9]\d* saved")
        server = self.start("--prefixes", self.folder)
        again = server.complete(prompt=LONG)[1]
        self.assertEqual(again["choices"], first["choices"])
        self.assertGreater(cached(again), 500)
        self.assertRegex(server.stop()[1], r"prefixes +[1-9]\d* loaded")
        server = self.start("--prefixes", self.folder, "--weights", "int8")
        self.assertEqual(cached(server.complete(prompt=LONG)[1]), 0)
        self.assertNotIn(" loaded from ", server.stop()[1])

    def test_another_model_of_the_same_name(self):
        """Rows are the weights' and the config's that read them, whatever stands in the folder now."""
        model = os.path.join(os.path.dirname(self.folder), "tiny")
        text = " ".join(f"fact {i}," for i in range(190))

        def ask(what):
            server = self.start("--model", model, "--prefixes", self.folder)
            status, said = server.complete(prompt=text, max_tokens=20)
            self.assertEqual(status, 200, said)
            self.assertEqual(server.stop()[0], 0, what)
            return cached(said), said["choices"][0]["text"]

        chat_model.write(model)
        config, weights = os.path.join(model, "config.json"), os.path.join(model, "model.safetensors")
        with open(config) as file:
            of_first = file.read()
        with open(weights, "rb") as file:
            first_weights = file.read()
        found, first = ask("new")
        self.assertEqual(found, 0)
        self.assertEqual(ask("the same")[1], first)
        # One number of one weight, in the last bytes of the file; the base of its rotation; its eps.
        with open(weights, "r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(b"\x12\x40")
        self.assertEqual(ask("another weight")[0], 0)
        with open(weights, "wb") as file:
            file.write(first_weights)
        for name, value in [("rope_theta", 2e4), ("rms_norm_eps", 1e-2), ("max_position_embeddings", 2000)]:
            with open(config, "w") as file:
                json.dump({**json.loads(of_first), name: value}, file)
            self.assertEqual(ask(name)[0], 0, name)
        with open(config, "w") as file:
            file.write(of_first)
        found, again = ask("the first once more")
        self.assertGreater(found, 500)
        self.assertEqual(again, first)
        self.assertEqual(len(self.files()), 5)

    def test_prefixes_of_every_plan_survive(self):
        plans = ["full", "duo:0.5", "int4"]
        server = self.start("--prefixes", self.folder)
        first = {plan: server.complete(prompt=LONG, kv_plan=plan)[1] for plan in plans}
        self.assertEqual(server.stop()[0], 0)
        self.assertEqual(len(self.files()), len(plans))
        # A server that nobody asks for a plan leaves its file alone.
        server = self.start("--prefixes", self.folder)
        again = server.complete(prompt=LONG, kv_plan="duo:0.5")[1]
        self.assertGreater(cached(again), 500)
        self.assertEqual(again["choices"], first["duo:0.5"]["choices"])
        self.assertEqual(server.stop()[1].count(" loaded from "), 2)  # the default plan's, and the one asked for
        self.assertEqual(len(self.files()), len(plans))
        server = self.start("--prefixes", self.folder)
        for _ in range(2):
            again = server.complete(prompt=LONG, kv_plan="int4")[1]
            self.assertGreater(cached(again), 500)
            self.assertEqual(again["choices"], first["int4"]["choices"])
        self.assertEqual(server.stop()[1].count(" loaded from "), 2)  # and each once

    def test_a_server_that_is_killed_has_saved_before(self):
        server = self.start("--prefixes", self.folder, "--save-every", "1")
        first = server.complete(prompt=LONG, kv_plan="duo:0.5")[1]
        server.wait_until_saved()
        # What comes after is saved as well.
        server.complete(prompt=LONG[::-1], kv_plan="duo:0.5")
        server.wait_until_saved()
        server.kill()
        server = self.start("--prefixes", self.folder, "--save-every", "1")
        for prompt in (LONG, LONG[::-1]):
            again = server.complete(prompt=prompt, kv_plan="duo:0.5")[1]
            self.assertGreater(cached(again), 500)
            if prompt == LONG:
                self.assertEqual(again["choices"], first["choices"])
        self.assertEqual(server.stop()[0], 0)

    def test_cut_off_while_it_writes(self):
        """By the system's limit for a file, which kills a server or lets it say so: the file that is there afterwards is
        the old one, whole."""
        server = self.start("--prefixes", self.folder)
        expected = server.complete(prompt=LONG, kv_plan="duo:0.5")[1]["choices"]
        self.assertEqual(server.stop()[0], 0)
        [file] = self.files()
        with open(file, "rb") as saved:
            before = saved.read()
        # An OpenMP runtime has a file of a kilobyte of its own in shared memory, without which the program does not start.
        for limit in (2048, 4096, len(before) // 2):
            server = self.start("--prefixes", self.folder, "--save-every", "1",
                                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
            try:
                server.complete(prompt=f"Limit {limit}: " + LONG, kv_plan="duo:0.5")
            except (http.client.HTTPException, OSError):
                pass  # it began to write before it had answered
            server.wait_until(lambda: server.is_over or any("not saved: " in line for line in server.lines))
            server.kill()
            self.assertIn(server.process.returncode, [-signal.SIGXFSZ, -signal.SIGKILL])
            with open(file, "rb") as saved:
                self.assertEqual(saved.read(), before)
        server = self.start("--prefixes", self.folder)
        again = server.complete(prompt=LONG, kv_plan="duo:0.5")[1]
        self.assertEqual(again["choices"], expected)
        self.assertGreater(cached(again), 500)
        self.assertNotIn("not loaded", server.stop()[1])

    def test_two_servers_share_a_folder(self):
        """What one has read, the other one continues from; neither loses what the other has saved."""
        servers = [self.start("--prefixes", self.folder, "--save-every", "1") for _ in range(2)]
        # The second is longer than all that either can have kept of the first.
        texts = [f"Server {i}. " + LONG * (i + 1) for i in range(2)]
        for server in servers:
            server.complete(prompt="a", kv_plan="duo:0.5")  # so that it wants to know of the plan
        first = []
        for i, server in enumerate(servers):
            other = servers[1 - i]
            least = 500 + i * len(texts[0])  # tokens are bytes
            first.append(server.complete(prompt=texts[i], kv_plan="duo:0.5")[1])
            self.assertEqual(cached(first[i]), 0)
            for taken in itertools.count(1):  # by itself: nobody has asked it
                other.wait_for(" taken in from ", times=taken)
                other.bring_state_up_to_date()
                if other.longest_prefix() > least:
                    break
            again = other.complete(prompt=texts[i], kv_plan="duo:0.5")[1]
            self.assertGreater(cached(again), least)
            self.assertEqual(again["choices"], first[i]["choices"])
        # They end at one time, and a third has all.
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            ended = list(pool.map(Server.stop, servers))
        for status, errors in ended:
            self.assertEqual(status, 0)
            self.assertIn("taken in", errors)
        server = self.start("--prefixes", self.folder)
        for text, said in zip(texts, first):
            again = server.complete(prompt=text, kv_plan="duo:0.5")[1]
            self.assertGreater(cached(again), 500)
            self.assertEqual(again["choices"], said["choices"])
        self.assertEqual(server.stop()[0], 0)

    def test_a_folder_that_cannot_be_written(self):
        with open(self.folder, "w"):
            pass
        server = self.start("--prefixes", self.folder, "--save-every", "1")
        self.assertEqual(server.complete(prompt=LONG)[0], 200)
        server.wait_for("not saved: ")
        self.assertEqual(server.complete(prompt=LONG)[0], 200)
        status, errors = server.stop()
        self.assertEqual(status, 1)
        self.assertIn("is not a folder", errors)

    def test_more_on_the_disk_than_fits(self):
        """What lies in the folder never takes what running requests were promised."""
        server = self.start("--prefixes", self.folder, "--memory", "64")
        for i in range(3):
            server.complete(prompt=f"{i} " + LONG, kv_plan="int8")
        self.assertEqual(server.stop()[0], 0)
        server = self.start("--prefixes", self.folder, "--memory", "3")
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            said = list(pool.map(lambda i: server.complete(kv_plan=["full", "int8"][i % 2], max_tokens=50), range(8)))
        self.assertEqual({status for status, _ in said}, {200})
        self.assertEqual(server.metric('requests_ended_total{reason="failed"}'), 0)
        self.assertLessEqual(server.metric("memory_live_bytes"), 3 * 2**20)
        self.assertEqual(server.stop()[0], 0)

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


if __name__ == "__main__":
    served.main()
