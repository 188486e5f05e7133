#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes docs/api.md: every public name of the headers with a line each, by what Doxygen reads out of
them. A name of a namespace must have a comment; a member whose name and type say it all need not.

  docs/site/api_list.py docs/api.md           writes it
  docs/site/api_list.py --check docs/api.md   fails if it would be written differently
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# In which order folders come; what lies in none of them is a method's own header.
ROOMS = [("", "Methods, and the whole"), ("plan", "Plans"), ("cache", "The cache"),
         ("policy", "Policies"), ("storage", "Storage"), ("core", "Core"),
         ("speculation", "Speculative decoding"), ("offload", "Slow memory in a file"),
         ("io", "Files (`kvpolicy::io`)"), ("format", "Values as text (`kvpolicy::format`)"), ("cpu", "The CPU engine (`kvpolicy::cpu`)"),
         ("compiled", "The CPU engine in a library (`kvpolicy::compiled`)"),
         ("cuda", "The CUDA engine (`kvpolicy::cuda`)")]
INTRO = """# Every public name

This page is made from the headers by `./scripts/docs --api`, and a test compares it with them. It lists the names of each header and
the public members of each class with the first sentence of their comments; some names need no comment. Copying, moving, comparing and
destroying are left out. All names are in namespace `kvpolicy`.
"""


def xml_of_headers(folder):
    """Doxygen's reading of include/, as the site has it."""
    with open(os.path.join(ROOT, "docs/Doxyfile"), encoding="utf-8") as file:
        config = file.read()
    config += f"""
INPUT = include
USE_MDFILE_AS_MAINPAGE =
OUTPUT_DIRECTORY = "{folder}"
GENERATE_HTML = NO
WARNINGS = NO
WARN_IF_DOC_ERROR = NO
"""
    subprocess.run(["doxygen", "-"], input=config, text=True, check=True, cwd=ROOT,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    xml = os.path.join(folder, "xml")
    index = ElementTree.parse(os.path.join(xml, "index.xml")).getroot()
    return [ElementTree.parse(os.path.join(xml, f"{entry.get('refid')}.xml")).getroot().find("compounddef")
            for entry in index.findall("compound")
            if entry.get("kind") in ("namespace", "struct", "class", "concept", "file")]


def text_of(node):
    """Markdown of a comment's one paragraph."""
    if node is None:
        return ""
    out = node.text or ""
    for child in node:
        inner = text_of(child)
        out += f"`{inner}`" if child.tag == "computeroutput" else inner
        out += child.tail or ""
    return re.sub(r"\s+", " ", out)


def plain(node):
    return re.sub(r"\s+", " ", "".join(node.itertext())).strip() if node is not None else ""


def sentence(definition):
    """A comment's first sentence."""
    text = text_of(definition.find("briefdescription")).strip()
    if not text:
        paragraph = definition.find("detaileddescription/para")
        if paragraph is not None and paragraph.find("parameterlist") is None:
            text = text_of(paragraph).strip()
    match = re.match(r"(.*?[.:])(?= [A-Z`]|$)", text)
    text = match.group(1) if match else text
    text = re.sub(r":$", ".", text)
    return text if not text or text.endswith((".", "?", "!")) else text + "."


def arguments(member):
    names = []
    for param in member.findall("param"):
        name = plain(param.find("declname")) or plain(param.find("type"))
        default = plain(param.find("defval"))
        names.append(f"{name} = {default}" if default else name)
    return "(" + ", ".join(names) + ")"


def name_of(member):
    name = plain(member.find("name"))
    if name in ("double", "float", "int", "bool"):
        # Doxygen takes a member called `local` for a keyword of another language.
        location = member.find("location")
        with open(os.path.join(ROOT, "include", location.get("file")), encoding="utf-8") as file:
            line = file.read().split("\n")[int(location.get("line")) - 1]
        name = re.search(rf"{name} (\w+)", line).group(1)
    return name


def shown(member):
    """A member as it is called, with its default."""
    name, kind = name_of(member), member.get("kind")
    if kind == "function":
        return name + arguments(member)
    if kind == "variable":
        value = re.sub(r"^=\s*", "", plain(member.find("initializer")))
        if value and len(value) < 40 and value != "{}":
            return f"{name} = {value}"
    return name


def is_listed(member, owner):
    name = plain(member.find("name"))
    if member.get("prot", "public") != "public" or member.get("kind") == "friend":
        return False
    if name.startswith(("~", "operator=", "operator!=")) or "@" in name or name == "static_assert":
        return False
    if "delete" in plain(member.find("argsstring")).split("=")[-1]:
        return False
    # Copying and moving.
    if name == owner:
        types = [plain(param.find("type")) for param in member.findall("param")]
        if not types or re.match(rf"(const )?{name}\b[^,]*&", types[0]):
            return False
    return True


class List:
    """Lines by header."""

    def __init__(self):
        self.headers = {}    # path -> its sentence
        self.lines = {}      # path -> {(line, text): [member lines]}
        self.bare = []

    def add(self, definition, kind, name, members=()):
        location = definition.find("location")
        header = location.get("file")
        said = sentence(definition)
        name = name.replace("HWY_NAMESPACE::", "").removeprefix("kvpolicy::")
        if not said and "<" in name:
            return  # a specialisation that does what the template says
        if not said:
            self.bare.append(f"{header}:{location.get('line')}: {name}")
        line = f"- `{name}` ({kind}): {said}"
        entries = self.lines.setdefault(header, {})
        place = next((key for key in entries if key[1] == line), (int(location.get("line")), line))
        entries.setdefault(place, []).extend(members)

    def members(self, definition, owner):
        lines = []
        for member in definition.findall("sectiondef/memberdef"):
            if not is_listed(member, owner):
                continue
            said = sentence(member)
            line = f"  - `{shown(member)}`" + (f": {said}" if said else "")
            if line not in [known for _, known in lines]:
                lines.append((int(member.find("location").get("line")), line))
            for value in member.findall("enumvalue"):
                said = sentence(value)
                lines.append((0, f"    - `{plain(value.find('name'))}`" + (f": {said}" if said else "")))
        return [line for _, line in lines]


def collected(compounds):
    names = List()
    for compound in compounds:
        kind, full = compound.get("kind"), plain(compound.find("compoundname"))
        if kind == "file":
            names.headers[compound.find("location").get("file")] = sentence(compound)
            for macro in compound.findall("sectiondef/memberdef[@kind='define']"):
                if plain(macro.find("name")).startswith("KVPOLICY_"):
                    names.add(macro, "macro", plain(macro.find("name")))
        elif compound.get("prot", "public") != "public" or not full.startswith("kvpolicy"):
            continue
        elif kind == "concept":
            names.add(compound, kind, full)
        elif kind in ("struct", "class"):
            owner = re.sub(r"<.*", "", full).split("::")[-1]
            names.add(compound, kind, re.sub(r"\s*([<>])\s*", r"\1", full), names.members(compound, owner))
        else:
            for member in compound.findall("sectiondef/memberdef"):
                name = plain(member.find("qualifiedname")) or f"{full}::{plain(member.find('name'))}"
                if "@" in name or "operator" in name or member.get("kind") == "friend":
                    continue
                values = []
                for value in member.findall("enumvalue"):
                    said = sentence(value)
                    values.append(f"  - `{plain(value.find('name'))}`" + (f": {said}" if said else ""))
                called = arguments(member) if member.get("kind") == "function" else ""
                called = "" if name.split("::")[-1] == "static_assert" else called
                kind_shown = {"typedef": "alias", "variable": "constant"}.get(member.get("kind"), member.get("kind"))
                if name.split("::")[-1] != "static_assert":
                    names.add(member, kind_shown, name + called, values)
    return names


def page_of(names):
    def room(header):
        parts = header.split("/")
        if len(parts) == 2:
            folder = parts[1].removesuffix(".hpp")
            return folder if folder in ("format", "cpu", "cuda") else ""
        return parts[1]

    text = INTRO
    for folder, title in ROOMS:
        headers = sorted((h for h in names.lines if room(h) == folder),
                         key=lambda h: (h.count("/"), h))
        if not headers:
            continue
        text += f"\n## {title}\n"
        for header in headers:
            said = names.headers.get(header, "")
            text += f"\n### {header}\n\n" + (f"{said}\n\n" if said else "")
            for (_, line), members in sorted(names.lines[header].items()):
                text += "\n".join([line, *members]) + "\n"
    return text


def main():
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        return
    check = sys.argv[1:2] == ["--check"]
    if len(sys.argv) != (3 if check else 2):
        sys.exit(__doc__)
    path = sys.argv[-1]
    folder = tempfile.mkdtemp()
    try:
        names = collected(xml_of_headers(folder))
    finally:
        shutil.rmtree(folder)
    if names.bare:
        sys.exit("these names need a comment:\n  " + "\n  ".join(sorted(names.bare)))
    text = page_of(names)
    if not check:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return
    with open(path, encoding="utf-8") as file:
        written = file.read()
    if written != text:
        for number, (old, new) in enumerate(zip(written.split("\n"), text.split("\n")), 1):
            if old != new:
                print(f"line {number}:\n  is    {old}\n  be    {new}")
                break
        sys.exit(f"{path} is not what the headers say: ./scripts/docs --api writes it anew")


if __name__ == "__main__":
    main()
