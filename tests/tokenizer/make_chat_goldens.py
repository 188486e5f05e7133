# SPDX-License-Identifier: Apache-2.0
"""Makes tests/tokenizer/goldens/chat.json and chat_changed.json: conversations as Jinja renders them, with the settings of
transformers' apply_chat_template, by templates of well-known families, and by these with changes that fine-tuners make.

    python -m venv venv && venv/bin/pip install jinja2
    venv/bin/python tests/tokenizer/make_chat_goldens.py

The templates are what the models' own say about messages; their branches for tools are cut down.
"""
import argparse
import json
import pathlib

import jinja2.sandbox

CHATML = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n@SYSTEM@<|im_end|>\n' }}{% endif %}"
          "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
QWEN25 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {{- "\n\n# Tools\n\nYou may call one or more functions.\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
QWEN3 = r"""{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
LLAMA2 = (r"{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}"
          r"{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
          r"{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
          r"{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}"
          r"{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}")
LLAMA3 = (r"{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}"
          r"{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}")
LLAMA31 = r"""{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}

{#- This block extracts the system message, so we can slot it into the right place. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}

{#- System message #}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Cutting Knowledge Date: December 2023\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}

{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
MISTRAL1 = ("{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
            "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token@SPACE@}}"
            "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}")
MISTRAL2 = r"""{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.@WHICH@ and system_message is defined %}
            {{- @BEFORE@ + system_message + '\n\n' + message['content'] + @AFTER@ }}
        {%- else %}
            {{- @BEFORE@ + message['content'] + @AFTER@ }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content']@TRIM@ + eos_token}}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported, with the exception of an initial optional system message!') }}
    {%- endif %}
{%- endfor %}
"""


def mistral2(which, before, after, trim):
    return MISTRAL2.replace("@WHICH@", which).replace("@BEFORE@", before).replace("@AFTER@", after).replace("@TRIM@", trim)


SENTENCEPIECE, LLAMA3_TOKENS, CHATML_TOKENS = ["<s>", "</s>"], ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], ["<|im_start|>", "<|im_end|>"]
TEMPLATES = {
    "ChatML, SmolLM2": (CHATML.replace("@SYSTEM@", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"), CHATML_TOKENS),
    "ChatML, Qwen2": (CHATML.replace("@SYSTEM@", "You are a helpful assistant."), CHATML_TOKENS),
    "ChatML, no system message": (CHATML.replace("{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n@SYSTEM@<|im_end|>\n' }}{% endif %}", ""), CHATML_TOKENS),
    "ChatML, Qwen2.5": (QWEN25, CHATML_TOKENS),
    "Qwen3": (QWEN3, CHATML_TOKENS),
    "Llama 2": (LLAMA2, SENTENCEPIECE),
    "Llama 3": (LLAMA3, LLAMA3_TOKENS),
    "Llama 3.1": (LLAMA31, LLAMA3_TOKENS),
    "Mistral v0.2": (MISTRAL1.replace("@SPACE@", ""), SENTENCEPIECE),
    "Mistral v0.1": (MISTRAL1.replace("@SPACE@", " + ' '"), SENTENCEPIECE),
    "Mistral v0.2 with a system message": (mistral2("first", "' [INST] '", "' [/INST]'", ""), SENTENCEPIECE),
    "Mistral v0.3": (mistral2("last", '"[INST] "', '"[/INST]"', "|trim"), SENTENCEPIECE),
}

CHATML_PLAIN = TEMPLATES["ChatML, no system message"][0]
GENERATION = "{{ '<|im_start|>assistant\n' }}"
CHANGED = {
    "default system message with an apostrophe": (CHATML.replace("@SYSTEM@", "You\\'re Bob\\'s \"helper\"."), CHATML_TOKENS),
    "default system message in a variable": ("{% set default = 'Be kind.' %}" + CHATML.replace("@SYSTEM@", "' + default + '"), CHATML_TOKENS),
    "default system message in two prints": (CHATML.replace("@SYSTEM@", "Be ' }}{{ 'kind."), CHATML_TOKENS),
    "default system message by set messages": ("{% if messages[0].role != 'system' %}{% set messages = [{'role': 'system', 'content': 'Be kind.'}] + messages %}{% endif %}" + CHATML_PLAIN, CHATML_TOKENS),
    "default system message as text": ("{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n\n{% endif %}" + CHATML_PLAIN, CHATML_TOKENS),
    "thoughts after the generation prompt": (CHATML_PLAIN.replace(GENERATION, GENERATION + "{{ '<think>\n' }}"), CHATML_TOKENS),
    "the latest two messages": (CHATML_PLAIN.replace("in messages %}", "in messages[-2:] %}"), CHATML_TOKENS),
    "stripped messages": (CHATML_PLAIN.replace("message['content'] +", "message['content'] | trim +"), CHATML_TOKENS),
    "users alone": (CHATML_PLAIN.replace("in messages %}", "in messages if message.role == 'user' %}"), CHATML_TOKENS),
    "names of roles": (CHATML_PLAIN.replace("message['role'] +", "{'user': 'human', 'assistant': 'gpt'}.get(message['role'], message['role']) +"), CHATML_TOKENS),
    "capital roles": (CHATML_PLAIN.replace("message['role'] +", "message['role'] | upper +"), CHATML_TOKENS),
    "a bos token in front": ("{{ bos_token }}" + CHATML_PLAIN, CHATML_TOKENS),
    "a number for each turn": (CHATML_PLAIN.replace("message['role'] +", "message['role'] + ' ' + loop.index | string +"), CHATML_TOKENS),
    "no line break at the end": (CHATML_PLAIN.replace("'<|im_end|>' + '\n'", "'<|im_end|>'"), CHATML_TOKENS),
    "Llama 2 with a default of its own": (LLAMA2.replace("{% set system_message = false %}", "{% set system_message = 'Be kind.' %}"), SENTENCEPIECE),
    "Mistral, changed first user message": (MISTRAL1.replace("@SPACE@", "").replace("message['content'] + ' [/INST]'", "('Q: ' if loop.first else '') + message['content'] + ' [/INST]'"), SENTENCEPIECE),
    "Llama 3 with a default date": (LLAMA31.replace("26 Jul 2024", "1 Jan 2020"), LLAMA3_TOKENS),
}


def speaker(role):
    return lambda text: {"role": role, "content": text}


user, assistant, system = speaker("user"), speaker("assistant"), speaker("system")
CONVERSATIONS = [
    [user("What is the capital of France?")],
    [system("Answer in one word."), user("What is the capital of France?")],
    [user("Hi"), assistant("Hello!"), user("And now?")],
    [system("  Be terse. \n"), user("\n a question \t"), assistant(" \nan answer\u3000\n"), user("one more \x1f")],
    [user("Hi"), assistant("Hello!")],
    [system("Be terse."), user("Hi"), assistant("Hello!")],
    [user("one"), assistant("<think>\nlong\n\nthoughts\n</think>\n\nshort answer"), user("two"), assistant("<think>\n\nmore\n</think>\n\nsecond")],
    [user("one"), assistant("<think>\nthoughts\n</think>\n\nanswer"), user("two")],
    [user("one"), assistant("thoughts</think>and</think>\nanswer\n")],
    [user(""), assistant(""), user("")],
    [system(""), user(" \n")],
    [user("Ignore <|im_end|> and </s> and <|eot_id|>, [INST] é 👩‍👧")],
    [system("only a system message"), assistant("speaks first")],
    [assistant("speaks first"), user("then the user")],
    [user("twice"), user("in a row")],
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "goldens", help="the folder")
    out = parser.parse_args().out

    class Refused(Exception):
        pass

    def raise_exception(message):
        raise Refused(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    for file, templates in [("chat.json", TEMPLATES), ("chat_changed.json", CHANGED)]:
        write(out / file, environment, templates, Refused)


def write(out, environment, templates, refused):
    goldens = []
    for name, (template, tokens) in templates.items():
        compiled = environment.from_string(template)
        cases = []
        for messages in CONVERSATIONS:
            for prompt, thinking in [(True, True), (True, False), (False, True)]:
                try:
                    text = compiled.render(messages=messages, bos_token=tokens[0], eos_token=tokens[1], add_generation_prompt=prompt,
                                           **({} if thinking else {"enable_thinking": False}))
                except refused:
                    text = None
                cases.append({"messages": [[m["role"], m["content"]] for m in messages], "prompt": prompt, "thinking": thinking, "text": text})
        goldens.append({"name": name, "template": template, "tokens": tokens, "cases": cases})
    out.write_text(json.dumps(goldens, indent=0) + "\n")


if __name__ == "__main__":
    main()
