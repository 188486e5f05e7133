#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Talks to a server of several processes under mpirun, each with some heads of every text. See served.py; the variable
KVPOLICY_MPIRUN names mpirun."""
import concurrent.futures
import glob
import json
import os
import signal
import subprocess
import tempfile
import time
import unittest

import served
from served import PATIENCE, QUESTION, Server, events

MPIRUN = os.environ.get("KVPOLICY_MPIRUN", "mpirun")
PLANS = ["full", "duo:0.5", "int8", "duo+int4:0.5", "headkv:128", "quest"]
LONG = "".join(f"Fact {i}: nothing. " for i in range(40)) + QUESTION


class RankServer(Server):
    """Several processes; `ranks` are their numbers."""

    def __init__(self, ranks, *options):
        each = [served.PROGRAM, "--port", "0", "--threads", "1"]
        super().__init__(*options, command=[MPIRUN, "-n", str(ranks), *each])

    def rank(self, number):
        """The process number of a rank."""
        for folder in glob.glob("/proc/[0-9]*"):
            try:
                with open(f"{folder}/environ", "rb") as file:
                    environ = file.read().split(b"\0")
                with open(f"{folder}/stat") as file:
                    parent = int(file.read().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            names = {b"OMPI_COMM_WORLD_RANK", b"PMI_RANK"}
            if parent == self.process.pid and any(one in [name + b"=%d" % number for name in names] for one in environ):
                return int(folder.rsplit("/", 1)[1])
        raise AssertionError(f"there is no rank {number}")

    def stop(self):
        """As an operator would: rank 0 says it to the others."""
        os.kill(self.rank(0), signal.SIGTERM)
        return self.end()


def text_of(answer):
    status, body = answer
    assert status == 200, body
    return body["choices"][0]["text"]


class Ranks(unittest.TestCase):
    def start(self, ranks, *options):
        server = RankServer(ranks, *options)
        self.addCleanup(server.kill)
        return server

    def test_the_answers_of_one_process(self):
        one = Server("--threads", "1")
        self.addCleanup(one.kill)
        for ranks in [2, 3]:
            several = self.start(ranks)
            same = []
            for i, plan in enumerate(PLANS * 2):
                prompt = f"The key of Bamelo is {10000 + 777 * i}. The sky is blue. What is the key of Bamelo? "
                asked = dict(prompt=prompt, max_tokens=16, kv_plan=plan)
                expected = one.complete(**asked)
                found = several.complete(**asked)
                same.append(text_of(found) == text_of(expected))
                self.assertEqual(found[1]["kv_bytes"], expected[1]["kv_bytes"])  # of all ranks together
            # Sums over ranks are rounded in another order, which may decide between two letters now and then.
            self.assertGreaterEqual(sum(same), len(same) - 1)
            with concurrent.futures.ThreadPoolExecutor(12) as pool:
                said = list(pool.map(lambda i: several.complete(kv_plan=PLANS[i % 6]), range(24)))
            self.assertEqual({status for status, _ in said}, {200})
            status, text = several.ask("POST", "/v1/completions", {"prompt": QUESTION, "temperature": 0, "max_tokens": 6, "stream": True})
            pieces, ended = events(text)
            self.assertTrue(ended)
            self.assertEqual("".join(part["choices"][0]["text"] for part in pieces if part["choices"]), text_of(one.complete()))
            time.sleep(1.5)  # nothing to do for a while
            self.assertEqual(text_of(several.complete()), text_of(one.complete()))
            status, errors = several.stop()
            self.assertEqual(status, 0, errors)
        self.assertEqual(one.stop()[0], 0)

    def test_prefixes_and_what_is_saved(self):
        with tempfile.TemporaryDirectory() as folder:
            first = {}
            server = self.start(2, "--prefixes", folder)
            for plan in ["full", "duo:0.5"]:
                first[plan] = text_of(server.complete(prompt=LONG, kv_plan=plan))
                again = server.complete(prompt=LONG, kv_plan=plan)
                self.assertEqual(text_of(again), first[plan])
                self.assertGreater(again[1]["usage"]["prompt_tokens_details"]["cached_tokens"], 500)
            self.assertEqual(server.stop()[0], 0)
            for rank in range(2):
                self.assertEqual(len(glob.glob(f"{folder}/*/2-ranks/rank-{rank}/*.prefixes")), 2)
            server = self.start(2, "--prefixes", folder)
            for plan in ["full", "duo:0.5"]:
                again = server.complete(prompt=LONG, kv_plan=plan)
                self.assertEqual(text_of(again), first[plan])
                self.assertGreater(again[1]["usage"]["prompt_tokens_details"]["cached_tokens"], 500)
            status, errors = server.stop()
            self.assertEqual(status, 0)
            self.assertIn("rank 1: ", errors)
            # One rank's file is gone, as after a crash: no rank uses the others.
            for file in glob.glob(f"{folder}/*/2-ranks/rank-1/*.prefixes"):
                os.remove(file)
            server = self.start(2, "--prefixes", folder)
            again = server.complete(prompt=LONG)
            self.assertEqual(text_of(again), first["full"])
            self.assertEqual(again[1]["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
            status, errors = server.stop()
            self.assertEqual(status, 0)
            self.assertIn("not loaded: the ranks' files have different prefixes", errors)

    def test_a_rank_that_dies(self):
        server = self.start(3, "--rank-timeout", "20")
        self.assertEqual(server.complete()[0], 200)
        os.kill(server.rank(1), signal.SIGKILL)
        status, errors = server.end()
        self.assertNotEqual(status, 0)
        self.assertRegex(errors, r"rank 1\b")

    def test_a_rank_that_stops(self):
        """While requests are served, and while there is nothing to do."""
        for busy in [False, True]:
            server = self.start(3, "--rank-timeout", "6")
            self.assertEqual(server.complete()[0], 200)
            stopped = server.rank(2)
            os.kill(stopped, signal.SIGSTOP)
            try:
                with concurrent.futures.ThreadPoolExecutor(1) as pool:
                    if busy:
                        pool.submit(lambda: server.ask("POST", "/v1/completions", {"prompt": QUESTION}))
                    status, errors = server.end()
            finally:
                try:
                    os.kill(stopped, signal.SIGKILL)
                except OSError:
                    pass
            self.assertNotEqual(status, 0)
            self.assertIn("rank 2 does not answer", errors)

    def test_ranks_that_are_not_the_same(self):
        for other, said in [(["--memory", "32"], "options of the server"), (["--plan", "duo:0.5"], "shards"),
                            (["--model", "reference_model/weights/keyfinder-draft"], "")]:
            begin = ["-n", "1", served.PROGRAM, "--port", "0", "--rank-timeout", "20"]
            done = subprocess.run([MPIRUN, *begin, "--memory", "64", ":", *begin, *other], capture_output=True, text=True,
                                  timeout=PATIENCE)
            self.assertNotEqual(done.returncode, 0)
            self.assertEqual(done.stdout, "")
            if said:
                self.assertIn(f"ranks do not have the same {said}: rank 0 has another than rank 1", done.stderr)

    def test_what_is_refused(self):
        server = self.start(2, "--memory", "2")
        status, text = server.ask("POST", "/v1/completions", {"prompt": "a" * 3500, "max_tokens": 500})
        self.assertEqual(status, 400)
        self.assertIn("the server has", json.loads(text)["error"]["message"])
        status, text = server.ask("POST", "/v1/completions", {"prompt": "a", "kv_plan": "adakv:128"})
        self.assertEqual(status, 400)
        self.assertIn("shares its budget", json.loads(text)["error"]["message"])
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            said = list(pool.map(lambda i: server.complete(max_tokens=100, kv_plan=["full", "duo:0.5"][i % 2]), range(12)))
        self.assertEqual({status for status, _ in said}, {200})
        self.assertEqual(server.metric('requests_ended_total{reason="failed"}'), 0)
        self.assertEqual(server.stop()[0], 0)


if __name__ == "__main__":
    served.main()
