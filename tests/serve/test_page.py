#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The server's page in a real browser: it asks, shows the answer as it is written, and labels it. Skipped where there is no Chromium. See
served.py."""
import json
import os
import shutil
import subprocess
import tempfile
import unittest

import chat_model
import served
from served import PATIENCE, Server

BROWSER = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome-stable", "google-chrome"])), None)


class Browser:
    """A page in Chromium, by its protocol for debuggers over two pipes."""

    def __init__(self, folder):
        to_it, self.to_it = os.pipe()
        self.from_it, from_it = os.pipe()
        # It reads from descriptor 3 and writes to 4.
        command = ["bash", "-c", f'exec 3<&{to_it} 4>&{from_it}; exec "$@"', "browser", BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu",
                   "--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
        self.process = subprocess.Popen(command, pass_fds=(to_it, from_it), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_it)
        os.close(from_it)
        self.rest, self.count, self.session = b"", 0, None

    def call(self, method, **parameters):
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters} | ({"sessionId": self.session} if self.session else {})
        os.write(self.to_it, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                piece = os.read(self.from_it, 1 << 16)
                if not piece:
                    raise EOFError("the browser has ended")
                self.rest += piece
            one, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(one)
            if answer.get("id") == self.count:
                if "error" in answer:
                    raise AssertionError(answer["error"])
                return answer["result"]

    def open(self, address):
        target = self.call("Target.createTarget", url=address)["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        # A new target has an empty document first, and for a moment none.
        while not self.is_open():
            pass

    def is_open(self):
        try:
            return self.run("location.protocol + document.readyState") == "http:complete"
        except AssertionError:
            return False

    def run(self, script):
        """The value of a script, which may be a promise."""
        said = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, timeout=1000 * PATIENCE)
        if "exceptionDetails" in said:
            raise AssertionError(said["exceptionDetails"])
        return said["result"].get("value")

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.to_it)
        os.close(self.from_it)


# Waits for what the page itself does next: it draws anew at least twice a second.
SCRIPT = """
(async () => {
  const until = async (holds) => { while (!holds()) await new Promise((done) => requestAnimationFrame(done)); };
  const byId = (id) => document.getElementById(id);
  await until(() => byId("prompt").value !== "");
  const offered = byId("prompt").value;
  const form = byId("form").textContent;
  const said = [];
  for (const plan of %s) {
    byId("prompt").value = %s;
    byId("plan").value = plan;
    byId("count").value = "4";
    byId("ask").requestSubmit();
    await until(() => document.querySelectorAll(".answer").length === 4 &&
                      [...document.querySelectorAll(".answer")].every((one) => one.dataset.done));
    said.push([...document.querySelectorAll(".answer")].map((one) => [one.dataset.done, one.children[0].textContent, one.children[1].textContent]));
  }
  await until(() => byId("prefixes").children.length > 0);
  return {offered, form, said, model: byId("model").textContent, lost: byId("lost").hidden, numbers: byId("numbers").textContent};
})()
"""


@unittest.skipIf(BROWSER is None, "there is no Chromium on the PATH")
class Page(unittest.TestCase):
    def page_of(self, server, question, plans):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # to which its other processes may still write
            browser = Browser(folder)
            try:
                browser.open(f"http://127.0.0.1:{server.port}/")
                return browser.run(SCRIPT % (json.dumps(plans), json.dumps(question)))
            finally:
                browser.close()

    def check(self, server, path, question, expected_body, text_of):
        plans = ["", "full", "int8"]
        seen = self.page_of(server, question, plans)
        self.assertTrue(seen["lost"])
        self.assertIn("requests", seen["numbers"])
        for plan, answers in zip(plans, seen["said"]):
            status, text = server.ask("POST", path, {**expected_body, "max_tokens": 200, "temperature": 0, **({"kv_plan": plan} if plan else {})})
            self.assertEqual(status, 200, text)
            whole = json.loads(text)
            for done, label, shown in answers:
                self.assertEqual(done, "yes", label)
                self.assertEqual(shown, text_of(whole["choices"][0]))
                self.assertTrue(label.startswith(f"{whole['kv_plan']}: {whole['usage']['prompt_tokens']} tokens read, of which "), label)
                self.assertIn(f", {whole['usage']['completion_tokens']} written; ", label)
                self.assertRegex(label, r" [\d.]+ MB of KV cache$")
        return seen

    def test_without_a_template(self):
        server = Server("--demo", "--max-running", "8")
        self.addCleanup(server.kill)
        seen = self.check(server, "/v1/completions", served.QUESTION, {"prompt": served.QUESTION}, lambda choice: choice["text"])
        self.assertEqual(seen["model"], "keyfinder")
        self.assertEqual(seen["offered"], "The capital of France is")
        self.assertIn("no chat template", seen["form"])

    def test_with_a_template(self):
        with tempfile.TemporaryDirectory() as folder:
            chat_model.write(os.path.join(folder, "tiny"))
            server = Server("--demo", "--model", os.path.join(folder, "tiny"))
            self.addCleanup(server.kill)
            question = "the key of the wise"
            seen = self.check(server, "/v1/chat/completions", question, {"messages": [{"role": "user", "content": question}]},
                              lambda choice: choice["message"]["content"])
            self.assertEqual(seen["offered"], "What is the capital of France?")
            self.assertIn("a conversation of its own", seen["form"])


if __name__ == "__main__":
    served.main()
