# SPDX-License-Identifier: Apache-2.0
"""What the tests of the server share: the program, from its start to its end, and how a test file is run.

  tests/serve/test_<what>.py build/release/examples/serve [--openai FOLDER] [unittest's options]

They need nothing but Python. Where the package `openai` is installed, its client is tried too; --openai installs it
into a virtual environment in this folder, if the package index can be reached.
"""
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import unittest

PROGRAM = None
PATIENCE = 400  # seconds: other tests may want the machine meanwhile
QUESTION = "The key of Bamelo is 48213. The sky is blue. What is the key of Bamelo? "


class Server:
    """The program, from its start to its end. What it says on stderr is read as it comes: tests wait for its lines."""

    def __init__(self, *options, command=None, **how):
        begin = command or [PROGRAM, "--port", "0"]
        self.process = subprocess.Popen([*begin, "--log", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)
        self.lines = []
        self.requests = {}  # the state of each: came, begins, is moved out, goes on, ended
        self.is_over = False
        self.news = threading.Condition()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        self.port = int(self.process.stdout.readline() or self.fail())

    def read(self):
        for line in self.process.stderr:
            found = re.match(r"request (\d+) (came|begins|is moved out|goes on|ended)", line)
            with self.news:
                self.lines.append(line)
                if found:
                    self.requests[int(found[1])] = found[2]
                self.news.notify_all()
        with self.news:
            self.is_over = True
            self.news.notify_all()

    def wait_until(self, holds):
        """Until that is so after some line, which says what has happened; `holds` may look at requests and lines."""
        with self.news:
            found = self.news.wait_for(lambda: holds() or self.is_over, timeout=PATIENCE)
            if not holds():
                raise AssertionError(f"{'the server has ended' if found else 'nothing has come'}; it said:\n{''.join(self.lines)}")

    def wait_for(self, text, times=1):
        self.wait_until(lambda: sum(text in line for line in self.lines) >= times)

    def count(self, *states):
        """Requests whose latest line is one of these."""
        return sum(state in states for state in self.requests.values())

    def running(self):
        return self.count("begins", "goes on")

    def wait_until_idle(self):
        self.wait_until(lambda: self.count("ended") == len(self.requests))

    def fail(self):
        self.errors()
        raise AssertionError(f"the server did not start: {''.join(self.lines)}")

    def errors(self):
        """All that it said, once it has ended."""
        self.process.wait(timeout=PATIENCE)
        self.reader.join()
        self.process.stdout.close()
        self.process.stderr.close()
        return "".join(self.lines)

    def end(self):
        """What it says when it ends by itself."""
        errors = self.errors()
        return self.process.returncode, errors

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.end()

    def kill(self):
        """As a crash would."""
        if self.process.poll() is None:
            self.process.kill()
        self.errors()

    def ask(self, method, path, body=None, timeout=PATIENCE):
        """(status, text) of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(connection):
            connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")

    def complete(self, **body):
        status, text = self.ask("POST", "/v1/completions", {"prompt": QUESTION, "temperature": 0, "max_tokens": 6, **body})
        return status, json.loads(text)

    def metric(self, name):
        return float(re.search(rf"^kvpolicy_{re.escape(name)} (\S+)$", self.ask("GET", "/metrics")[1], re.M).group(1))

    def bring_state_up_to_date(self):
        """What has happened so far is then in /state and /metrics: a request is answered before they are written, and
        the next one is read after."""
        for _ in range(2):
            self.complete(prompt="b", max_tokens=1)

    def wait_until_saved(self):
        """Until the folder has all prefixes that are kept by now; one request may be saved in several parts."""
        self.bring_state_up_to_date()
        kept = self.metric("prefixes")
        self.wait_until(lambda: any(int(saved) >= kept for saved in re.findall(r"(\d+) saved to ", "".join(self.lines))))

    def longest_prefix(self):
        """Tokens of the longest prefix that is kept."""
        return max((one["tokens"] for one in json.loads(self.ask("GET", "/state")[1])["prefixes"]), default=0)


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
