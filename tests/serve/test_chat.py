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
        self.assertEqual(pieces[-1]["kv_bytes"], whole["kv_bytes"])
        self.assertTrue(json.loads(self.server.ask("GET", "/state")[1])["chat"])

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
            self.assertNotIn(self.folder.name, text)

    def refused(self, body, *parts, status=400, path="/v1/chat/completions", code=None):
        found, text = self.server.ask("POST", path, {"max_tokens": 2, **body})
        self.assertEqual(found, status, text)
        error = json.loads(text)["error"]
        for part in parts:
            self.assertIn(part, error["message"])
        self.assertEqual(error["code"], code)
        return error

    def test_bad_messages(self):
        for messages, part in [([], "messages"), ([{"role": "user"}], "content"), ([{"content": "a"}], "role"), ([3], "messages[0]"),
                               ({"role": "user"}, "messages"), ([{"role": "user", "content": 3}], "messages[0].content"),
                               ([{"role": "user", "content": None}], "messages[0].content"),
                               ([{"role": "user", "content": [{"type": "image_url"}]}], "text"),
                               ([{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}], "cache_control")]:
            self.assertEqual(self.refused({"messages": messages}, part)["param"], "messages")

    def test_members_that_the_template_does_not_read(self):
        """They would change nothing, and nobody would know."""
        for member, value in [("name", "Ann"), ("tool_calls", [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]),
                              ("reasoning_content", "because"), ("contnet", "a misspelt one"), ("function_call", {"name": "f"})]:
            for place in [0, 1]:
                messages = [dict(one) for one in TALK]
                messages[place][member] = value
                error = self.refused({"messages": messages}, f"messages[{place}]", repr(member))
                self.assertEqual(error["param"], "messages")
        # What clients send back of an answer in which there was nothing.
        empty = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None, "reasoning_content": "", "name": ""}
        talk = [*TALK, {"role": "assistant", "content": "That way.", **empty}, {"role": "user", "content": "Why?"}]
        plain = [{"role": one["role"], "content": one["content"]} for one in talk]
        self.assertEqual(json.loads(self.chat(talk))["choices"], json.loads(self.chat(plain))["choices"])
        self.refused({"messages": TALK, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}, "tools", "template")
        self.refused({"messages": TALK, "reasoning_effort": "high"}, "reasoning_effort", "template")
        self.refused({"messages": TALK, "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking")
        self.refused({"messages": TALK, "chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token", "server")
        self.refused({"messages": TALK, "chat_template_kwargs": [1]}, "object")
        self.refused({"messages": [{"role": f"r{i}", "content": "a"} for i in range(100)]}, "more than 16 roles")

    def test_defaults_that_clients_send(self):
        answer = json.loads(self.chat())["choices"]
        defaults = dict(n=1, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, logprobs=False, top_logprobs=0, tools=[],
                        tool_choice="none", functions=[], function_call="auto", parallel_tool_calls=False, response_format={"type": "text"},
                        modalities=["text"], user="someone", metadata={"a": "b"}, store=True, service_tier="auto",
                        stream_options={"include_usage": False, "include_obfuscation": False})
        for name, value in defaults.items():
            self.assertEqual(json.loads(self.chat(**{name: value}))["choices"], answer, name)
        self.assertEqual(json.loads(self.chat(**defaults))["choices"], answer)
        self.assertEqual(json.loads(self.chat(**dict.fromkeys(defaults)))["choices"], answer)
        for name, value in [("n", 2), ("logprobs", True), ("top_logprobs", 3), ("response_format", {"type": "json_object"}), ("logit_bias", {"3": 1}),
                            ("tool_choice", "required"), ("tool_choice", {"type": "function"}), ("functions", [{"name": "f"}]),
                            ("modalities", ["audio"]), ("prompt", "Which way?"), ("best_of", 1), ("verbosity", "high"),
                            ("stream_options", {"include_obfuscation": True}), ("stream_options", {"other": 1}), ("stream_options", 3)]:
            self.assertEqual(self.refused({"messages": TALK, name: value}, name)["param"], name)

    def test_reasons_for_programs(self):
        """The words by which clients tell reasons apart."""
        self.refused({"messages": [{"role": "user", "content": "up " * 3000}]}, "2048", code="context_length_exceeded")
        self.refused({"prompt": "up " * 3000}, "2048", path="/v1/completions", code="context_length_exceeded")
        self.refused({"prompt": "up ", "max_tokens": 3000}, "2048", path="/v1/completions", code="context_length_exceeded")
        long = [{"role": "user", "content": "up"}, {"role": "assistant", "content": "down"}] * 300 + TALK[1:]
        self.refused({"messages": long}, "2048", code="context_length_exceeded")
        self.refused({"messages": TALK, "model": "other"}, "tiny", status=404, code="model_not_found")
        self.assertEqual(json.loads(self.server.ask("GET", "/v1/models/tiny")[1])["id"], "tiny")
        status, text = self.server.ask("GET", "/v1/models/a/b")
        self.assertEqual((status, json.loads(text)["error"]["code"]), (404, "model_not_found"))

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


CALL = {"id": "call_1", "type": "function", "function": {"name": "turn", "arguments": '{"way": "up", "far": 3}'}}
TOOLS = [{"type": "function", "function": {"name": "turn", "parameters": {"type": "object", "properties": {"way": {"type": "string"}}}}}]


class ChatsWithTools(unittest.TestCase):
    """What a model reads of tools, calls and results, whose template knows of them."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        chat_model.write(os.path.join(cls.folder.name, "tiny"), chat_model.WITH_TOOLS)
        cls.server = Server("--model", os.path.join(cls.folder.name, "tiny"), "--memory", "64")
        cls.addClassCleanup(cls.server.kill)

    def reads(self, text, **body):
        """The model is asked as if it had been given this text."""
        status, said = self.server.ask("POST", "/v1/chat/completions", {"temperature": 0, "max_tokens": 12, **body})
        self.assertEqual(status, 200, said)
        said = json.loads(said)
        status, plain = self.server.complete(prompt=text, max_tokens=12)
        self.assertEqual(status, 200, plain)
        self.assertEqual(said["usage"]["prompt_tokens"], plain["usage"]["prompt_tokens"])
        self.assertEqual(said["choices"][0]["message"]["content"], plain["choices"][0]["text"])

    def refused(self, part, **body):
        status, said = self.server.ask("POST", "/v1/chat/completions", {"max_tokens": 2, **body})
        self.assertEqual(status, 400, said)
        self.assertIn(part, json.loads(said)["error"]["message"])

    def test_calls_and_results(self):
        talk = [{"role": "user", "content": "Turn up."}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "name": "turn", "content": "done"}]
        text = ('<|im_start|>user\nTurn up.<|im_end|>\n<|im_start|>assistant\n[turn {"way": "up", "far": 3}]<|im_end|>\n'
                "<|im_start|>tool\ndone<|im_end|>\n<|im_start|>assistant\n")
        self.reads(text, messages=talk)
        called = {**talk[1], "tool_calls": [{**CALL, "index": 0, "type": None, "function": {"name": "turn", "arguments": {"way": "up", "far": 3}}}]}
        self.reads(text, messages=[talk[0], called, talk[2]])
        # In the order in which the client wrote it, as models were trained.
        tool = '{"type": "function", "function": {"name": "turn", "parameters": {"type": "object", "properties": {"way": {"type": "string"}}}}}'
        self.reads(f"<|im_start|>tools\n{tool}\n<|im_end|>\n" + text, messages=talk, tools=TOOLS, tool_choice="none")

    def test_bad_calls(self):
        user = {"role": "user", "content": "Turn up."}
        for call, part in [({}, "tool_calls[0]"), ({"function": {"arguments": "{}"}}, "name"), ({"function": {"name": "f"}}, "arguments"),
                           ({"function": {"name": "f", "arguments": "{"}}, "arguments"), ({"function": {"name": "f", "arguments": "[1]"}}, "object"),
                           ({"function": {"name": "f", "arguments": "[" * 100}}, "deeper"), ({"type": "custom", "function": {"name": "f"}}, "type"),
                           ({"function": {"name": "f", "arguments": "{}", "strict": True}}, "strict"), ({**CALL, "way": 1}, "way")]:
            self.refused(part, messages=[user, {"role": "assistant", "content": "", "tool_calls": [call]}, user])
        self.refused("tool_calls", messages=[user, {"role": "assistant", "tool_calls": 3}, user])
        for tools, part in [(3, "list"), ([3], "tools[0]"), ([{"type": "function"}], "tools[0]"), ([{"type": "web"}], "tools[0]")]:
            self.refused(part, messages=[user], tools=tools, tool_choice="none")
        self.refused("tool_choice", messages=[user], tools=TOOLS)
        self.refused("64 bits", messages=[user], chat_template_kwargs={"enable_thinking": 2 ** 64 - 1})

    def test_thinking(self):
        user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"}
        text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        # It is read where the answer is the last, and left out here as the template's authors wished.
        self.reads(text, messages=[user, assistant, user])
        self.reads(text + "<think></think>", messages=[user, assistant, user], chat_template_kwargs={"enable_thinking": False})
        self.reads(text, messages=[user, assistant, user], chat_template_kwargs={"enable_thinking": True})
        self.refused("enable_thinkng", messages=[user], chat_template_kwargs={"enable_thinkng": False})
        self.refused("'name'", messages=[{**user, "name": "Ann"}])

    def test_a_role_that_the_template_leaves_out(self):
        """A newer client's word for "system", which many templates pass over in silence."""
        self.refused("messages[0] would be left out", messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "a"}])


class NoTokenizer(unittest.TestCase):
    def test_a_text_is_refused_without_the_place_of_the_model(self):
        with tempfile.TemporaryDirectory() as folder:
            chat_model.write(os.path.join(folder, "tiny"))
            os.remove(os.path.join(folder, "tiny", "tokenizer.json"))
            server = Server("--model", os.path.join(folder, "tiny") + "/", "--memory", "64")
            self.addCleanup(server.kill)
            status, said = server.complete()
            self.assertEqual(status, 400)
            self.assertIn("tiny", said["error"]["message"])
            self.assertIn("the model has a vocabulary of 700", said["error"]["message"])
            self.assertEqual(said["error"]["param"], "prompt")
            self.assertEqual(json.loads(server.ask("GET", "/v1/models/tiny")[1])["id"], "tiny")
            self.assertNotIn(folder, said["error"]["message"])
            self.assertEqual(server.complete(prompt=[1, 2, 3])[0], 200)
            self.assertEqual(server.stop()[0], 0)


class RowsWithoutTokens(unittest.TestCase):
    def test_they_say_nothing(self):
        """A third of what is sampled has no spelling; embeddings are rounded up so."""
        with tempfile.TemporaryDirectory() as folder:
            chat_model.write(os.path.join(folder, "tiny"), padding=300)
            server = Server("--model", os.path.join(folder, "tiny"), "--memory", "64")
            self.addCleanup(server.kill)
            for stream in [False, True]:
                status, text = server.ask("POST", "/v1/completions", {"prompt": "Up", "max_tokens": 60, "temperature": 1, "seed": 3, "stream": stream,
                                                                      "stream_options": {"include_usage": True}})
                self.assertEqual(status, 200, text)
                said = events(text)[0][-1] if stream else json.loads(text)
                self.assertEqual(said["usage"]["completion_tokens"], 60)
            status, said = server.complete(prompt=[5, 999], max_tokens=4)
            self.assertEqual(status, 200, said)
            self.assertEqual(server.stop()[0], 0)


if __name__ == "__main__":
    served.main()
