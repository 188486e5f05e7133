#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs every example that a tool's --help shows, exactly as shown, in a folder with the same layout as
# the published ones.
#
#   run_examples.sh REPOSITORY FOLDER_OF_THE_TOOLS WORK_FOLDER TOOL [SUBCOMMAND]
#
# An example is a line after "Examples:" that begins with a tool's name; the text after two spaces
# explains it. Sizes that an example leaves to the defaults are made small, so that all examples
# together take seconds.
set -euo pipefail
repository=$1 tools=$2 work=$3 tool=$4 subcommand=${5:-}

fail() {
  printf 'FAILED: %s\n' "$*" >&2
  exit 1
}

# smaller COMMAND: prints the options that make it quick, except those that it has already.
smaller() {
  local -a options
  case $1 in
    "compare "* | compare) options=("--tokens 768" "--questions 2") ;;
    evaluate*) options=("--lengths 640" "--seeds 1" "--questions 2" "--depths 2" "--windows 1" "--score 32") ;;
    visualize*--file* | visualize*--tokens*) options=("--max-new 16" "--steps 4") ;;
    visualize*) options=("--text 1024" "--max-new 16" "--steps 4") ;;
    triforce_generate*--tokens*) options=("--max-new 16") ;;
    triforce_generate*) options=("--text 1024" "--max-new 16") ;;
    generate*) options=("--max-new 8") ;;
    "identify_heads duo"*--help*) options=() ;;
    "identify_heads duo"*--labelled*) options=("--steps 2") ;;
    "identify_heads duo"*) options=("--steps 2" "--samples 1") ;;
    "identify_heads headkv"*--samples*) options=() ;;
    "identify_heads headkv"*) options=("--lengths 640" "--depths 2" "--threads 1") ;;
    "identify_heads razor"*) options=("--samples 1") ;;
    "identify_heads shares"*) options=("--length 512" "--texts 1" "--budget 128" "--threads 1") ;;
    "identify_heads damage"*) options=("--length 512" "--texts 1" "--questions 1" "--min-rows 256") ;;
    *) options=() ;;
  esac
  local option words=
  for option in "${options[@]}"; do
    case " $1 " in *" ${option%% *} "*) ;; *) words+=" $option" ;; esac
  done
  printf '%s' "$words"
}

# ---- the folder

rm -rf "$work"
mkdir -p "$work"
cd "$work"
ln -s "$repository/reference_model" "$repository/tests" .
# The layout of DuoAttention's repository: a folder for the model, with one for the training run.
pattern=attn_patterns/Llama-3-8B-Instruct-Gradient-1048k/lr=0.02-reg=0.05-ctx=1000_32000-multi_passkey10
mkdir -p "$pattern"
awk 'BEGIN {
  for (layer = 0; layer < 32; ++layer)
    for (head = 0; head < 8; ++head) printf "%.4f%s", (layer * 8 + head) * 37 % 256 / 255, head < 7 ? "\t" : "\n"
}' >"$pattern/full_attention_heads.tsv"
echo '{"sink_size": 128, "recent_size": 256}' >"$pattern/config.json"
ln -s "$(dirname "$pattern")" PATTERN_FOLDER
# The layout of HeadKV's repository: samples of each query head.
awk 'BEGIN {
  for (layer = 0; layer < 32; ++layer)
    for (head = 0; head < 32; ++head)
      printf "%s\"%d-%d\": [%.3f, %.3f]", layer + head ? ", " : "{", layer, head, (layer * 32 + head) * 7 % 101 / 100, head / 32
  print "}"
}' >Meta-Llama-3-8B-Instruct_retrieval_heads.json
# Costs that were measured, for heads of 128 channels.
ln -s "$repository"/bench/results/costs_intel_xeon_processor_2core.json COSTS.json
# A model without its tokenizer, one with a tokenizer and gates, and a byte model.
mkdir -p path/to models/smollm2/duo
ln -s "$repository"/tests/model/goldens/gqa2_d80/{config.json,model.safetensors} models/smollm2
ln -s "$repository"/tests/tools/data/tiny_tokenizer/* models/smollm2
printf '0.9\t0.1\n0.2\t0.8\n' >models/smollm2/duo/full_attention_heads.tsv
echo '{"sink_size": 4, "recent_size": 16}' >models/smollm2/duo/config.json
ln -s "$repository/tests/model/goldens/gqa2_d80" path/to/Llama-3.2-1B
ln -s path/to/Llama-3.2-1B llama
ln -s reference_model/weights/keyfinder DIR
ln -s reference_model/weights/keyfinder-draft DIR-draft
cp "$repository/tests/tools/data/labelled_texts.json" texts.json
cp "$repository/tests/tools/data/needle_samples.json" samples.json
mkdir shares
cp "$repository/tests/tools/data/damage_with_reads.json" shares/damage.json
head -c 700 "$repository/reference_model/weights/heldout_kjv.txt" >chapter.txt

# ---- the examples

PATH=$tools:$PATH
names='plan|generate|evaluate|compare|visualize|triforce_generate|identify_heads|logits|model_info|tokenize'
mapfile -t examples < <("$tool" ${subcommand:+"$subcommand"} --help | sed -n '/^ *Examples:/,$p' |
  grep -E "^ +(echo [^|]*\| )?($names)( |$)" | sed -E 's/^ +//; s/ {2,}.*$//')
[ ${#examples[@]} -gt 0 ] || fail "$tool $subcommand --help shows no example"
for example in "${examples[@]}"; do
  # A training of hours is replaced by one of two steps.
  run=$(sed -E 's/--steps [0-9]{3,}/--steps 2/; s/--context 4096( --sinks)/--context 1024\1/' <<<"$example")
  case $run in *" > "*) run=${run/ > /$(smaller "$run") > } ;; *) run+=$(smaller "${run##*| }") ;; esac
  printf '== %s\n   as: %s\n' "$example" "$run"
  bash -c "$run" >out.txt 2>err.txt </dev/null || {
    cat err.txt >&2
    fail "$example"
  }
done
echo "${#examples[@]} examples of $tool $subcommand run"
