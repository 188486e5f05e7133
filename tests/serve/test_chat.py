#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Chats with a tiny model that has a chat template, over plain HTTP and with OpenAI's client. See served.py."""
import json
import os
import tempfile
import unittest

import chat_model
import served
from served import Server, events

TALK = [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "Which way is up?"}]


def as_chatml(messages):
    """What the model reads: written here by hand, in chat_model.py for the server's own reader of templates."""
    return "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages) + "<|im_start|>assistant\n"


class Chats(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        chat_model.write(os.path.join(cls.folder.name, "tiny"))
        cls.server = Server("--model", os.path.join(cls.folder.name, "tiny"), "--memory", "64")
        cls.addClassCleanup(cls.server.kill)

    @classmethod
    def tearDownClass(cls):
        status, errors = cls.server.stop()
        assert status == 0, errors

    def chat(self, messages=None, **body):
        status, text = self.server.ask("POST", "/v1/chat/completions",
                                       {"messages": messages or TALK, "temperature": 0, "max_tokens": 12, **body})
        self.assertEqual(status, 200, text)
        return text

    def test_whole(self):
        said = json.loads(self.chat())
        self.assertEqual(said["object"], "chat.completion")
        self.assertRegex(said["id"], r"^chatcmpl-\d+$")
        self.assertEqual(said["model"], "tiny")
        self.assertEqual(len(said["choices"]), 1)
        choice = said["choices"][0]
        self.assertEqual(choice["message"]["role"], "assistant")
        self.assertTrue(choice["message"]["content"])
        self.assertIn(choice["finish_reason"], ["length", "stop"])
        self.assertEqual(said["usage"]["total_tokens"], said["usage"]["prompt_tokens"] + said["usage"]["completion_tokens"])
        # The template is what the model reads: the same text as a plain prompt gives the same answer.
        status, plain = self.server.complete(prompt=as_chatml(TALK), max_tokens=12)
        self.assertEqual(status, 200, plain)
        self.assertEqual(plain["usage"]["prompt_tokens"], said["usage"]["prompt_tokens"])
        self.assertEqual(plain["choices"][0]["text"], choice["message"]["content"])
        parts = [{"role": one["role"], "content": [{"type": "text", "text": one["content"]}]} for one in TALK]
        self.assertEqual(json.loads(self.chat(parts))["choices"], said["choices"])
        self.assertEqual(json.loads(self.chat(max_tokens=None, max_completion_tokens=12))["choices"], said["choices"])

    def test_stream(self):
        whole = json.loads(self.chat())
        pieces, ended = events(self.chat(stream=True, stream_options={"include_usage": True}))
        self.assertTrue(ended)
        self.assertEqual({one["object"] for one in pieces}, {"chat.completion.chunk"})
        self.assertEqual(len({one["id"] for one in pieces}), 1)
        deltas = [one["choices"][0]["delta"] for one in pieces if one["choices"]]
        self.assertEqual(deltas[0]["role"], "assistant")
        self.assertFalse(any("role" in one for one in deltas[1:]))
        self.assertEqual("".join(one.get("content", "") for one in deltas), whole["choices"][0]["message"]["content"])
        reasons = [one["choices"][0]["finish_reason"] for one in pieces if one["choices"]]
        self.assertEqual(reasons[-1], whole["choices"][0]["finish_reason"])
        self.assertEqual(set(reasons[:-1]), {None})
        self.assertEqual(pieces[-1]["choices"], [])
        self.assertEqual(pieces[-1]["usage"]["completion_tokens"], whole["usage"]["completion_tokens"])

    def test_turns_share_what_came_before(self):
        talk = [{"role": "system", "content": "You are told " + "one thing and another, " * 12 + "and say little."},
                {"role": "user", "content": "Begin."}]
        first = json.loads(self.chat(talk))
        self.assertEqual(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
        other = json.loads(self.chat([talk[0], {"role": "user", "content": "Do not."}]))
        # All of the system prompt but the place where the messages part.
        least = len(talk[0]["content"]) // 4
        self.assertGreater(other["usage"]["prompt_tokens_details"]["cached_tokens"], least)
        talk += [{"role": "assistant", "content": first["choices"][0]["message"]["content"]}, {"role": "user", "content": "Go on."}]
        second = json.loads(self.chat(talk))
        self.assertGreater(second["usage"]["prompt_tokens_details"]["cached_tokens"], least)

    def test_refused_by_the_template(self):
        turns = [*TALK, {"role": "assistant", "content": "That one."}]
        status, text = self.server.ask("POST", "/v1/chat/completions", {"messages": turns})
        self.assertEqual(status, 400, text)
        self.assertIn("nobody asks", json.loads(text)["error"]["message"])
        # That a shorter conversation would be refused is no matter of this one's.
        said = json.loads(self.chat([*turns, {"role": "user", "content": "And down?"}]))
        self.assertTrue(said["choices"][0]["message"]["content"])

    def test_stops(self):
        text = json.loads(self.chat(max_tokens=24))["choices"][0]["message"]["content"]
        stop = text[len(text) // 2:len(text) // 2 + 2]
        said = json.loads(self.chat(max_tokens=24, stop=stop))["choices"][0]
        self.assertEqual(said["message"]["content"], text.split(stop)[0])
        self.assertEqual(said["finish_reason"], "stop")

    def test_plans(self):
        for plan in ["duo:0.5", "int4", "headkv:128", "keydiff:20", "keydiff:20,compete=model", "kvzip:20"]:
            status, text = self.server.ask("POST", "/v1/chat/completions", {"messages": TALK, "max_tokens": 4, "kv_plan": plan})
            if plan == "int4" or plan.startswith("keydiff"):
                self.assertEqual(status, 200, text)
                self.assertEqual(json.loads(text)["kv_plan"], plan)
            elif plan.startswith("kvzip"):
                self.assertEqual(status, 400, text)
                self.assertIn("reading the prompt a second time", json.loads(text)["error"]["message"])
            else:  # nobody has looked for this model's heads
                self.assertEqual(status, 400, text)
                self.assertIn("kv_plan", json.loads(text)["error"]["message"])

    def test_bad_messages(self):
        for messages, part in [([], "messages"), ([{"role": "user"}], "content"), ([{"content": "a"}], "role"),
                               ([{"role": "user", "content": [{"type": "image_url"}]}], "text")]:
            status, text = self.server.ask("POST", "/v1/chat/completions", {"messages": messages})
            self.assertEqual(status, 400, text)
            self.assertIn(part, json.loads(text)["error"]["message"])

    def test_openai_client(self):
        try:
            import openai
        except ImportError:
            self.skipTest("the package openai is not installed (pip install openai)")
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.server.port}/v1", api_key="none")
        self.assertEqual([one.id for one in client.models.list().data], ["tiny"])
        said = client.chat.completions.create(model="tiny", messages=TALK, max_completion_tokens=12, temperature=0)
        expected = json.loads(self.chat())["choices"][0]["message"]["content"]
        self.assertEqual(said.choices[0].message.content, expected)
        self.assertEqual(said.choices[0].message.role, "assistant")
        stream = client.chat.completions.create(model="tiny", messages=TALK, max_completion_tokens=12, temperature=0, stream=True,
                                                stream_options={"include_usage": True}, extra_body={"kv_plan": "full"})
        pieces = list(stream)
        self.assertEqual("".join(one.choices[0].delta.content or "" for one in pieces if one.choices), expected)
        self.assertEqual(pieces[-1].usage.completion_tokens, said.usage.completion_tokens)
        with self.assertRaises(openai.BadRequestError) as raised:
            client.chat.completions.create(model="tiny", messages=TALK, extra_body={"kv_plan": "nonsense"})
        self.assertIn("kv_plan", str(raised.exception))


if __name__ == "__main__":
    served.main()
