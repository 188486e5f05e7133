# SPDX-License-Identifier: Apache-2.0
"""Makes tests/jinja/goldens/constructs.json: what Jinja prints for small templates of each construct, with the settings of
transformers' apply_chat_template.

    python -m venv venv && venv/bin/pip install jinja2
    venv/bin/python tests/jinja/make_goldens.py
"""
import datetime
import json
import pathlib

from reference import environment

NAMES = {
    "x": 3, "y": 2.5, "yes": True, "no": False, "nothing": None, "word": "Hello World", "spaced": "  a b\n", "empty": "",
    "greek": "αβγ été 👍🏽", "list": [3, 1, 2], "words": ["b", "A", "c"], "table": {"b": 1, "a": {"c": [1, 2]}, "items": 5},
    "people": [{"name": "Ann", "age": 3}, {"name": "bob", "age": 1}, {"name": "Cy", "age": 2, "pet": {"kind": "cat"}}],
    "messages": [{"role": "system", "content": "Be <|im_end|> brief."}, {"role": "user", "content": "Hi \"there\"\n"},
                 {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1, "b": "é"}}}]}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}],
}

TEMPLATES = r'''
{{ word }}{{ x }}{{ y }}{{ yes }}{{ nothing }}{{ missing }}{{ list }}{{ table }}
=====
{{ [1, 'a', "b'c", 'd"e', none, true, 1.5, 1e20, (1,), (), {'k': (1, 2)}, 'tab	\n\\ é', -0.0] }}
=====
{{ 1.0 }} {{ 1e16 }} {{ 1e15 }} {{ 0.00001 }} {{ 0.0001 }} {{ 123456789.123 }} {{ 1_000 }} {{ 5e-324 }} {{ 0.1 + 0.2 }} {{ 2e0 }}
=====
{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 4 / 2 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ -2 ** 2 }} {{ 1 + 2 * 3 - 4 }} {{ 7.5 // 2 }} {{ -7.5 % 2 }} {{ +x }} {{ -y }} {{ 2 ** 3 ** 2 }}
=====
{{ 'a' * 3 }}{{ [1] * 2 }}{{ 2 * (1, 2) }}{{ 'a' + 'b' }}{{ [1] + [2] }}{{ 'a' ~ 1 ~ none ~ [2] }}{{ true + 1 }}{{ -true }}
=====
{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}{{ 1 == 1.0 }}{{ true == 1 }}{{ 'a' < 'b' }}{{ [1, 2] < [1, 3] }}{{ 'a' != 'b' }}{{ 1 == '1' }}{{ none == missing }}{{ missing == absent }}{{ 2 >= 2 }}{{ (1,) == [1] }}{{ {'a': 1} == {'a': 1.0} }}
=====
{{ 'b' in 'abc' }}{{ 3 in list }}{{ 'a' in table }}{{ 'z' not in table }}{{ not 'z' in table }}{{ 'x' in missing }}{{ not x }}{{ not not x }}
=====
{{ x or 5 }}{{ 0 or 'z' }}{{ no and missing.a }}{{ yes and 'q' }}{{ '' or [] or {} or 'last' }}{{ 1 if no else 2 if yes else 3 }}|{{ 'a' if no }}|{{ ('a' if no) is defined }}
=====
{{ word[0] }}{{ word[-1] }}{{ word[1:4] }}{{ word[::-1] }}{{ word[:-2] }}{{ word[-100:100:3] }}{{ greek[1] }}{{ greek[-2:] }}{{ greek[::2] }}{{ list[::-1] }}{{ list[5:] }}{{ list[-2:] }}{{ (1, 2, 3)[1:] }}{{ list[3:0:-1] }}
=====
{{ table.a.c[1] }}{{ table['a']['c'] }}{{ table.missing }}{{ table['items'] }}{{ table.get('b') }}{{ table.get('q') }}{{ table.get('q', 7) }}{{ list.0 }}{{ list[9] is defined }}{{ people[2].pet.kind }}{{ people[0].pet is defined }}
=====
{% for k, v in table.items() %}{{ k }}={{ v }};{% endfor %}{% for k in table %}{{ k }},{% endfor %}{% for k, v in table|items %}{{ k }}{% endfor %}{% for v in table.values() %}{{ v }}{% endfor %}{{ table.keys()|list }}{{ table.items()|list|length }}{{ table|length }}
=====
{% for i in list %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('a', 'b') }}{{ loop.changed(i > 1) }};{% endfor %}
=====
{% for i in list if i > 1 %}{{ i }}{{ loop.index }}{% else %}none{% endfor %}{% for i in list if i > 5 %}{{ i }}{% else %}none{% endfor %}{% for i in missing %}x{% else %}-{% endfor %}{% for c in 'añb' %}[{{ c }}]{% endfor %}
=====
{% for a in [1, 2] %}{% for b in [3, 4] %}{{ a }}{{ b }}{{ loop.index }}{{ loop.depth }} {% endfor %}{{ loop.index }}{% endfor %}{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}
=====
{% for i in [1, 2] %}{% if i == 1 %}{% set z = 5 %}{% endif %}{{ z }},{% endfor %}{{ z }}{% set z = 1 %}{% for i in [1, 2] %}{{ z }}{% set z = i * 10 %}{{ z }}{% endfor %}{{ z }}{% if yes %}{% set z = 8 %}{% endif %}{{ z }}
=====
{% set ns = namespace(found=false, n=0) %}{% for i in list %}{% if i == 1 %}{% set ns.found = true %}{% endif %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.found }}{{ ns.n }}{{ ns.other is defined }}{% set ns.other = [1] %}{{ ns.other }}{{ ns['n'] }}{% set ns2 = namespace({'a': 1}, b=2) %}{{ ns2.a }}{{ ns2.b }}
=====
{% set a, b = 1, [2] %}{{ a }}{{ b }}{% set c = a, b %}{{ c }}{% set (d, e) = (4, 5) %}{{ d }}{{ e }}{% set t %} body {{ x }} {% endset %}[{{ t }}]{% set u | trim | upper %} body {% endset %}[{{ u }}]
=====
{% macro m(a, b=2, c=a) %}{{ a }}{{ b }}{{ c }}|{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(a=5, c=6) }}{{ m() }}{{ m(b=1) }}{{ m.name }}{% macro v() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ v(1, 2, k=3) }}
=====
{% macro m() %}{{ z }}{% endmacro %}{% set z = 3 %}{{ m() }}{% set z = 4 %}{{ m() }}{% macro r(n) %}{{ n }}{% if n > 0 %}{{ r(n - 1) }}{% endif %}{% endmacro %}{{ r(4) }}{% for i in [1, 2] %}{% macro q() %}{{ i }}{{ w }}{% endmacro %}{% set w = i %}{{ q() }}{% endfor %}
=====
{% macro box(title) %}<{{ title }}:{{ caller('in') }}>{% endmacro %}{% call(word) box('t') %}{{ word }}{{ x }}{% endcall %}{% macro p() %}[{{ caller() }}]{% endmacro %}{% call p() %}q{% endcall %}
=====
{% filter upper %}abc {{ x }}{% endfilter %}{% with a = 1, b = x %}{{ a }}{{ b }}{% endwith %}{{ a }}{% generation %}g{{ x }}{% endgeneration %}{% raw %}{{ x }}{% if %}{% endraw %}
=====
{%- for c in [{'n': 1, 'c': [{'n': 2, 'c': []}, {'n': 3, 'c': [{'n': 4, 'c': []}]}]}] recursive %}{{ c.n }}{{ loop.depth }}{% if c.c %}({{ loop(c.c) }}){% endif %}{%- endfor %}
=====
a
  {% if yes %}
  b
  {% endif %}
c {# comment #} d
  {# alone #}
e
=====
a  {%- if yes -%}  b  {%- endif -%}  c  {{- x -}}  d {#- q -#} e
=====
  {%+ if yes %}
  b
  {%+ endif +%}

c {{ x }}
{{ x }}
=====
{% if x == 1 %}1{% elif x == 3 %}3{% elif x == 4 %}4{% else %}e{% endif %}{% if no %}a{% else %}b{% endif %}{% if missing %}a{% endif %}{% if list and table or missing %}l{% endif %}
=====
{{ word is string }}{{ x is number }}{{ x is integer }}{{ y is float }}{{ yes is boolean }}{{ yes is true }}{{ no is false }}{{ nothing is none }}{{ missing is undefined }}{{ missing is not defined }}{{ table is mapping }}{{ list is sequence }}{{ table is sequence }}{{ word is iterable }}{{ x is iterable }}{{ true is number }}{{ true is integer }}{{ namespace is callable }}
=====
{{ x is odd }}{{ x is even }}{{ x is divisibleby 3 }}{{ x is eq 3 }}{{ x is ne 3 }}{{ x is gt 2 }}{{ x is lt(2) }}{{ x is ge 3 }}{{ 'a' is in 'abc' }}{{ x is in list }}{{ x is not in list }}{{ 'abc' is lower }}{{ 'ABC' is upper }}{{ yes is sameas true }}{{ nothing is sameas none }}{{ x is equalto 3 and word is string }}{{ list is iterable and list is not mapping }}
=====
{{ spaced|trim }}|{{ '--a--'|trim('-') }}|{{ word|upper }}{{ word|lower }}{{ 'hello world'|title }}{{ 'hELLO'|capitalize }}{{ word|length }}{{ greek|length }}{{ word|replace('l', 'L') }}{{ word|replace('l', 'L', 1) }}{{ word|reverse }}{{ "it's 3d-art (x) [y]"|title }}{{ [missing] }}
=====
{{ list|join(',') }}{{ list|join }}{{ words|join(', ') }}{{ people|join('-', attribute='name') }}{{ list|first }}{{ list|last }}{{ list|sort }}{{ list|sort(reverse=true) }}{{ words|sort }}{{ words|sort(case_sensitive=true) }}{{ people|sort(attribute='age')|map(attribute='name')|join }}{{ list|min }}{{ list|max }}{{ list|sum }}{{ people|sum(attribute='age') }}{{ list|reverse|list }}{{ [1, 1, 2, 'A', 'a']|unique|list }}
=====
{{ people|selectattr('pet')|map(attribute='name')|list }}{{ people|selectattr('age', 'gt', 1)|map(attribute='name')|list }}{{ people|rejectattr('age', 'equalto', 1)|list|length }}{{ nothing|select|list }}{{ 0|map('upper')|list }}{{ table[missing] is defined }}{{ list[missing] is defined }}{{ list|select('odd')|list }}{{ list|reject('odd')|list }}{{ [0, 1, '']|select|list }}{{ people|map(attribute='pet.kind', default='no')|list }}{{ words|map('upper')|join('|') }}{{ words|map('replace', 'b', 'z')|list }}{{ people|selectattr('name', 'in', ['Ann'])|list|length }}
=====
{{ missing|default('d') }}{{ nothing|default('d') }}{{ empty|default('d', true) }}{{ empty|default('d') }}{{ missing|d }}{{ x|string + 'a' }}{{ '3.7'|int }}{{ 'x'|int }}{{ 'x'|int(5) }}{{ 3.7|int }}{{ ' 12 '|int }}{{ '2.5'|float }}{{ 3|float }}{{ 'q'|float }}{{ -3|abs }}{{ 3.5|round }}{{ 2.5|round }}{{ 2.567|round(2) }}{{ 2.1|round(method='ceil') }}{{ 3|round }}{{ list|list }}{{ 'abc'|list }}{{ table|list }}
=====
{{ table|dictsort }}{{ {'b': 1, 'A': 2}|dictsort }}{{ {'b': 1, 'a': 2}|dictsort(by='value') }}{{ 'a\nb\n\nc'|indent }}|{{ 'a\nb'|indent(2, true) }}|{{ 'a\n\nb'|indent(2, blank=true) }}|{{ 'a\nb'|indent('> ') }}|{{ '%s is %d'|format('a', 3) }}{{ 'x'|safe }}{{ '<b>'|safe + '<' }}{{ '&"' + '<b>'|safe }}{{ '<'|safe ~ '<' }}{{ word|attr('nope') is defined }}
=====
{{ messages|tojson }}{{ table|tojson(indent=2) }}{{ greek|tojson }}{{ 'q"\\\n\t/<>&\u0001'|tojson }}{{ 1.5|tojson }}{{ none|tojson }}{{ true|tojson }}{{ []|tojson(indent=4) }}{{ {}|tojson(indent=4) }}{{ {1: 2, none: 3}|tojson }}{{ (1, 2)|tojson }}{{ greek|tojson(ensure_ascii=true) }}{{ table|tojson(sort_keys=true) }}{{ table|tojson(separators=(',', ':')) }}
=====
{{ spaced.strip() }}|{{ spaced.lstrip() }}|{{ spaced.rstrip() }}|{{ 'xxaxx'.strip('x') }}{{ 'a,b,,c'.split(',') }}{{ ' a  b '.split() }}{{ 'a,b,c'.split(',', 1) }}{{ 'a,b,c'.rsplit(',', 1) }}{{ 'a b c'.split(none, 1) }}{{ 'a\nb\r\nc\n'.splitlines() }}{{ word.startswith('He') }}{{ word.endswith(('x', 'ld')) }}{{ word.replace('o', '0') }}{{ 'ab'.replace('', '-') }}{{ word.upper() }}{{ word.lower() }}{{ word.title() }}{{ 'aBC'.capitalize() }}
=====
{{ ', '.join(words) }}{{ word.find('o') }}{{ word.rfind('o') }}{{ word.find('z') }}{{ word.index('W') }}{{ word.count('l') }}{{ greek.find('👍') }}{{ '{} and {}'.format(1, 'b') }}{{ '{0}{1}{0} {k} {{}}'.format('a', 'b', k=3) }}{{ '%s-%s' % ('a', 1) }}{{ '%s%%' % word }}{{ 'prefix-x'.removeprefix('prefix-') }}{{ 'x.py'.removesuffix('.py') }}{{ 'a=b=c'.partition('=') }}{{ 'a=b=c'.rpartition('=') }}{{ '12'.isdigit() }}{{ 'a1'.isalnum() }}{{ 'ab'.isalpha() }}{{ ' '.isspace() }}{{ 'aB'.isupper() }}{{ [1, 2, 1].count(1) }}{{ [1, 2].index(2) }}
=====
{{ range(3)|list }}{{ range(1, 7, 2)|list }}{{ range(3, 0, -1)|list }}{{ dict(a=1, b=2) }}{{ dict([('a', 1)]) if no else '' }}{% for i in range(2) %}{{ i }}{% endfor %}{{ range(4)|length }}{{ 2 in range(3) }}
=====
{% set users = messages|selectattr('role', 'equalto', 'user') %}{% for u in users %}{{ u.content }}{% endfor %}{% for u in users %}again{% endfor %}{{ messages|map(attribute='role')|join(',') }}{{ (messages|selectattr('role', 'equalto', 'user')|first).content }}
=====
{{ '\x41\u00e9\U0001F600\101\q\'' "joined" 'x' }}{{ "a\
b" }}{{ {'a': {'b': 1}}['a']['b'] }}{{ {'a': 1}}}{{ "}}" }}{{ '%}' }}
=====
{%- if messages[0]['role'] == 'system' -%}
    {%- set system_message = messages[0]['content'] | trim -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{{ system_message }}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\n' + message.content | trim + '<|end|>\n' -}}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
{{ call.function.name }}({{ call.function.arguments | tojson }})
        {%- endfor %}
    {%- endif %}
{%- endfor %}
=====
{{ strftime_now('%d %b %Y %H:%M:%S %A %j') }}{{ strftime_now is defined }}
=====
{{ x.y is defined }}{{ nothing.a is defined }}{{ word.nope is defined }}{{ word['nope'] is defined }}{{ x['a'] is defined }}{{ yes[0] is defined }}{{ list['a'] is defined }}{{ list.append is defined }}{{ word.upper is defined }}{{ (1, 2)[5] is defined }}
=====
{{ missing.a }}
=====
{{ missing + 1 }}
=====
{{ 1 + 'a' }}
=====
{{ 1 < 'a' }}
=====
{{ 1 / 0 }}
=====
{{ list.append(4) }}
=====
{{ raise_exception('roles must alternate') }}
=====
{{ x() }}
=====
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
=====
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(b=2) }}
=====
{% for a, b in list %}{% endfor %}
=====
{% set x.y = 1 %}
=====
{{ word.__class__ }}
=====
{{ 5 in 5 }}
=====
{% for i in 5 %}{% endfor %}
=====
{{ none|length }}
=====
{{ table.a.c.d.e }}
=====
{{ 'a'.split('') }}
=====
{{ missing|tojson }}
'''

BROKEN = ["{{ x", "{% if x %}", "{% endif %}", "{{ x + }}", "{% for in x %}{% endfor %}", "{{ 'a }}", "{# open", "{% raw %}x", "{{ (1 }}", "{{ x | }}",
          "{% if x %}a{% else %}b{% else %}c{% endif %}", "{% unknown %}", "{% set %}", "{{ x is }}", "{{ 1 2 }}", "{% for i in x %}{% endif %}", "{{ a b }}",
          "{% break %}", "{% macro m(a=1, b) %}{% endmacro %}", "{{ f(a=1, 2) }}", "{{ ) }}", "{% elif x %}"]


def main():
    now = datetime.datetime(2026, 3, 4, 5, 6, 7)
    cases = []
    for template in TEMPLATES.strip("\n").split("\n=====\n"):
        case = {"template": template}
        try:
            case["text"] = environment(now).from_string(template).render(**NAMES)
        except Exception as error:  # whatever Python raises: the template cannot be rendered
            case["error"] = type(error).__name__
        cases.append(case)
    for template in BROKEN:
        try:
            environment(now).from_string(template)
            raise SystemExit(f"Jinja takes {template}")
        except Exception:
            cases.append({"template": template, "broken": True})
    path = pathlib.Path(__file__).resolve().parent / "goldens" / "constructs.json"
    path.write_text(json.dumps({"names": NAMES, "cases": cases}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {len(cases)} templates, {sum('error' in case for case in cases)} of them fail, {len(BROKEN)} are broken")


if __name__ == "__main__":
    main()
