# SPDX-License-Identifier: Apache-2.0
"""What the tests of the server share: the program, from its start to its end, and how a test file is run.

  tests/serve/test_<what>.py build/release/examples/serve [--openai FOLDER] [unittest's options]

They need nothing but Python. Where the package `openai` is installed, its client is tried too; --openai installs it
into a virtual environment in this folder, if the package index can be reached.
"""
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import unittest

PROGRAM = None
PATIENCE = 400  # seconds: other tests may want the machine meanwhile
QUESTION = "The key of Bamelo is 48213. The sky is blue. What is the key of Bamelo? "


class Server:
    """The program, from its start to its end."""

    def __init__(self, *options, command=None):
        self.process = subprocess.Popen([*(command or [PROGRAM, "--port", "0"]), *options], stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)
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

    def kill_at_once(self):
        """As a crash would."""
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

    def longest_prefix(self):
        """Tokens of the longest prefix that is kept."""
        return max((one["tokens"] for one in json.loads(self.ask("GET", "/state")[1])["prefixes"]), default=0)

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


def main():
    global PROGRAM
    PROGRAM = os.path.abspath(sys.argv.pop(1))
    if "--openai" in sys.argv:
        at = sys.argv.index("--openai")
        folder = sys.argv[at + 1]
        del sys.argv[at:at + 2]
        sys.argv.insert(1, PROGRAM)
        run_with_openai(folder)
        del sys.argv[1]
    unittest.main(module="__main__", verbosity=2)
