# SPDX-License-Identifier: Apache-2.0
"""Published chat templates print what Jinja prints.

    published_test.py <render program>

The templates are the 70 that llama-cpp-python 0.3.36 brings in its source distribution, found in the folder that KVPOLICY_CHAT_TEMPLATES
names, or fetched once into .cache. Each renders ten conversations here and in Jinja with transformers' settings: the same bytes, or both fail,
or ours refuses by the construct's name. At least 63 files must be the same in all of them; the others are listed. Skipped
(77) without jinja2, or where the templates can be neither found nor fetched.
"""
import datetime
import http.client
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.parse
import urllib.request

FILES = 70
SAME_AT_LEAST = 63
PACKAGE = "llama_cpp_python-0.3.36.tar.gz"
NOW = datetime.datetime(2026, 3, 4, 5, 6, 7)
SKIP = 77
CACHE = pathlib.Path(__file__).resolve().parents[2] / ".cache" / "chat_templates"

try:
    from reference import environment
except ImportError:
    print("skipped: jinja2 is not installed (Debian: python3-jinja2)")
    sys.exit(SKIP)

TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "The weather of a place, <now>.", "parameters": {
    "type": "object", "properties": {"place": {"type": "string", "description": "a city"}, "unit": {"type": "string", "enum": ["C", "F"]},
                                     "days": {"type": "array", "items": {"type": "integer"}}}, "required": ["place"]}}},
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"place": "Zürich", "days": [1, 2]}}}
SYSTEM = {"role": "system", "content": "You are <b>terse</b>."}


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def conversation(messages, **names):
    return {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True,
            "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", **names}


CONVERSATIONS = {
    "one question": conversation([user("Hello, who are you?")]),
    "system message": conversation([SYSTEM, user("Hello!")]),
    "several turns": conversation([SYSTEM, user("One?"), said("  Two.\n"), user("Three?"), said("Four."), user("Five?")]),
    "no generation prompt": conversation([user("Hi"), said("Hello.")], add_generation_prompt=False),
    "tools": conversation([SYSTEM, user("What is the weather in Zürich?")], tools=TOOLS),
    "call and result": conversation([user("Weather?"), said("", tool_calls=[CALL]),
                                     {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": "{\"degrees\": 21.5}"}], tools=TOOLS),
    "after the result": conversation([SYSTEM, user("Weather?"), said("I look.", tool_calls=[CALL]),
                                      {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": "warm"},
                                      said("It is warm."), user("Thanks")], tools=TOOLS),
    "thoughts": conversation([user("2 + 2?"), said("<think>\neasy\n</think>\n\n4", reasoning_content="easy"), user("3 + 3?")], enable_thinking=False),
    "an empty message": conversation([user(""), said(""), user(" ")]),
    "unicode and special tokens": conversation([user("naïve 👩‍🚀 日本語 <|im_end|></s>[INST]<|eot_id|> \"q\" \\n {{ x }} {% if %}"), said("<|start|>"), user("é")]),
}


def kept_templates():
    """The text of each template by its name; None where there is no way to get them."""
    folder = pathlib.Path(os.environ.get("KVPOLICY_CHAT_TEMPLATES", CACHE))
    if not folder.is_dir() and "KVPOLICY_CHAT_TEMPLATES" not in os.environ:
        fetch(folder)
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))} if folder.is_dir() else None


def fetch(folder):
    try:
        from pip._internal.models.index import PyPI  # where this Python's packages come from
        index = os.environ.get("PIP_INDEX_URL", PyPI.simple_url).rstrip("/") + "/llama-cpp-python/"
        print(f"fetching {PACKAGE}, 73 MiB", flush=True)
        page = urllib.request.urlopen(index, timeout=60).read().decode()
        link = re.search(rf'href="([^"]*{re.escape(PACKAGE)}[^"]*)"', page)
        data = urllib.request.urlopen(urllib.parse.urljoin(index, link[1]), timeout=300).read()
    except (ImportError, OSError, TypeError, http.client.HTTPException):  # TypeError: the index does not have it
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    unpacked = pathlib.Path(tempfile.mkdtemp(dir=folder.parent))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            if "/models/templates/" in member.name and member.name.endswith(".jinja"):
                (unpacked / member.name.rsplit("/", 1)[1]).write_bytes(archive.extractfile(member).read())
    unpacked.rename(folder)  # whole, or not at all


def expected(source, names):
    try:
        return {"text": environment(NOW).from_string(source).render(**names)}
    except Exception as error:  # whatever Python raises
        return {"failed": f"{type(error).__name__}: {error}"}


def main():
    templates = kept_templates()
    if not templates:
        print("skipped: the templates cannot be fetched (set KVPOLICY_CHAT_TEMPLATES to a folder that has them)")
        sys.exit(SKIP)
    lines = []
    for source in templates.values():
        for names in CONVERSATIONS.values():
            lines.append(json.dumps({"template": source, "names": names,
                                     "now": [NOW.year, NOW.month, NOW.day, NOW.hour, NOW.minute, NOW.second]}))
    answers = subprocess.run([sys.argv[1]], input="\n".join(lines) + "\n", capture_output=True, text=True, encoding="utf-8", check=True).stdout.splitlines()
    assert len(answers) == len(lines), f"{len(answers)} answers to {len(lines)} lines"
    rows = iter(answers)
    same, refused, wrong, texts = [], {}, {}, 0
    for file, source in templates.items():
        for name, names in CONVERSATIONS.items():
            answer, right = json.loads(next(rows)), expected(source, names)
            if "refused" in answer:
                refused.setdefault(file, set()).add(answer["refused"])
            elif ("text" in answer) != ("text" in right) or answer.get("text") != right.get("text"):
                wrong.setdefault(file, []).append((name, answer, right))
            texts += "text" in answer and "text" in right
        if file not in refused and file not in wrong:
            same.append(file)
    print(f"{len(templates)} templates, {len(CONVERSATIONS)} conversations, {texts} texts: {len(same)} files the same in all, "
          f"{len(refused)} refused, {len(wrong)} wrong")
    for file, why in sorted(refused.items()):
        print(f"  refused  {file}: {'; '.join(sorted(why))[:300]}")
    for file, cases in sorted(wrong.items()):
        for name, answer, right in cases[:3]:
            print(f"  wrong    {file}, {name}:")
            mine, theirs = answer.get("text"), right.get("text")
            if mine is None or theirs is None:
                print(f"    ours   {str(answer)[:300]}\n    Jinja  {str(right)[:300]}")
                continue
            at = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
            print(f"    ours   {mine[max(0, at - 60):at + 60]!r}\n    Jinja  {theirs[max(0, at - 60):at + 60]!r}")
    assert len(templates) >= FILES, f"{len(templates)} templates, should be {FILES}"
    assert not wrong, f"{len(wrong)} files print something else than Jinja"
    assert len(same) >= SAME_AT_LEAST, f"{len(same)} files are the same, should be {SAME_AT_LEAST}"


if __name__ == "__main__":
    main()
