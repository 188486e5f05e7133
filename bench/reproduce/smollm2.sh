# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2054,SC2154
#
# What ./scripts/reproduce --model smollm2 measures; it reads this file, and --help prints the list. Each point has 30 texts,
# which are drawn from novels that no head was identified on.
#
#   tasks      the full cache on every kind of task at 1,024, 2,048 and 4,096 tokens. A kind that it answers less than
#              half of is not asked at greater lengths, nor in what follows
#   heads      how far the methods of finding heads agree
#   gates      DuoAttention by each kind of gates and by random ones, at two sparsities
#   sinks      first and latest rows of streaming heads, at deployment
#   needles    pass keys by length (to 8,192 tokens) and depth, each method at a half and a quarter of the bytes
#   settings   HeadKV's kernel and beta and SnapKV's kernel, chosen on texts that nothing else is measured on
#   budgets    HeadKV's three kinds of scores against other methods at 32 to 256 rows a head
#   combined   every method at a half to a 32nd of the bytes
#   unasked    rows are dropped before any question is known, and two and ten questions are asked of what is left
#   language   KL divergence to the full cache and surprise, on three kinds of prose and on code, far into a text and near
#              its beginning
#   choices    short questions with four endings, where compression should cost nothing
#   storage    8 to 2 bits, per token and per channel, by the number of exact rows, other codebooks, and widths for each head
#   bounds     reads with a bound beside Quest's and TriForce's chunks, by the bytes that a token reads
#   rows       the rows that each head reads under a bound, over the length of the text
#   reads      plans that are searched by what a bound reads of each head and what dropping rows loses, within what a step reads
#   memory     what the cache takes over the length of the text and the number of texts
experiments=(tasks heads gates sinks needles settings budgets combined unasked language choices storage bounds rows reads memory)
targets=(plan identify_heads)
results=$all_results/smollm2
folder=models/smollm2

prepare() {
  if [ ! -e "$folder/config.json" ]; then
    stage "Model" ./scripts/fetch-model smollm2 || die "./scripts/fetch-model smollm2 has to bring the model"
  fi
  stage "Texts" ./scripts/fetch-texts || die "./scripts/fetch-texts has to bring the texts"
}
draw_figures() { "$PYTHON" bench/plot_real.py --results "$results" --weights "$weights" --out "$figures"; }

# A point has `texts` for each of the `seeds`, which are measured one after the other.
seeds=(1 2 3)
texts=10
if [ -n "$quick" ]; then
  seeds=(1)
  texts=2
fi
size_of() {
  if [ -n "$quick" ]; then set -- $(($1 < 1024 ? $1 : 1024)); fi
  size=(--model "$folder" --lengths "$@" --seeds "${seeds[@]}")
}
# ask NAME LENGTHS ARGUMENTS...: suites with one question a text.
ask() { experiment "$@" --questions "$texts" --per-text 1; }
# ask_keys KEYS NAME LENGTHS ARGUMENTS...: pass keys, so many in a text, at five depths that the texts take in turn.
ask_keys() {
  local keys=$1
  shift
  experiment "$@" --suite niah_depths --text novels --depths 5 --per-text "$keys" --questions "$((keys * texts))"
}
# go_on NAME LENGTHS ARGUMENTS...: texts that are continued by 16 tokens. The suite has questions as well: one a seed.
go_on() { experiment "$@" --suite agreement --windows "$texts" --score 16 --questions 1 --per-text 1; }

# read_answered LENGTH: sets `tasks` to those of which the full cache answers at least half. With --quick two texts say
# nothing, so it is one that is known to be among them.
read_answered() {
  local names=niah_single_2
  if [ -z "$quick" ]; then
    names=$("$PYTHON" bench/answered_tasks.py "$results/tasks_$1.json") ||
      die "no task to measure on: $results/tasks_$1.json says which there are, --only tasks makes it"
  fi
  mapfile -t tasks <<<"$names"
}

measure_tasks() {
  local tasks=(niah_single_1 niah_single_2 niah_single_3 niah_multikey_1 niah_multikey_2 niah_multikey_3 niah_multivalue
    niah_multiquery vt cwe fwe qa_1 qa_2) length
  for length in 1024 2048 4096; do
    ask "tasks_$length" "$length" --suite "${tasks[@]}" --text novels --plans full
    if [ -n "$quick" ]; then break; fi
    read_answered "$length"
  done
}

measure_heads() {
  local files=() file
  for file in "$weights"/{duo*,razor/*_heads.json,headkv/*.json}; do
    if [ -e "$file" ]; then files+=("$file"); fi
  done
  "$PYTHON" bench/head_agreement.py "${files[@]}" --kv-heads 3 --json >"$results/heads.json"
}

measure_gates() {
  local plans=(full) gates random
  mapfile -t random < <(random_gates 3)
  for gates in "$weights"/{duo,duo-ablation,duo-profile,razor,kvzip} "${random[@]}"; do
    if [ -d "$gates" ]; then plans+=("duo@$gates:0.5" "duo@$gates:0.75"); fi
  done
  ask_keys 2 gates 2048 --plans "${plans[@]}"
}

measure_sinks() {
  local sinks recent plans=(full)
  for sinks in 4 16 64; do
    for recent in 64 256; do plans+=("duo:0.5,sinks=$sinks,recent=$recent"); done
  done
  ask_keys 2 sinks 2048 --plans "${plans[@]}"
}

measure_needles() {
  ask_keys 1 needles "1024 2048 4096 8192" --bytes 1/2 1/4 --plans full duo headkv streaming_llm h2o tova snapkv
}

# The published setting comes first, because the first of equal ones is chosen.
headkv_published=kernel=7,beta=1.005
snapkv_published=kernel=7
measure_settings() {
  local kernel beta plans=(full)
  for beta in 1.005 1.1 1.2 1.5 2 5 10; do plans+=("headkv:128,kernel=7,beta=$beta"); done
  for kernel in 3 13 29; do
    for beta in 1.005 1.2 2; do plans+=("headkv:128,kernel=$kernel,beta=$beta"); done
  done
  for kernel in 7 3 13 29; do plans+=("snapkv:128,kernel=$kernel"); done
  ask_keys 2 settings 2048 --split validation --plans "${plans[@]}"
}
# tuned METHOD: prints the chosen setting of a method, and nothing if that is the published one.
tuned() {
  local setting published=$1_published
  setting=$(chosen "$1")
  if [ "$setting" != "${!published}" ]; then echo "$setting"; fi
}

# pool LENGTH: sets `tasks` to those that the full cache answers, and `texts` and `seeds` such that they have 30 texts together.
pool() {
  read_answered "$1"
  seeds=(1)
  if [ -z "$quick" ]; then texts=$(((30 + ${#tasks[@]} - 1) / ${#tasks[@]})); fi
}

# PyramidKV and Ada-KV rank rows as SnapKV does.
measure_budgets() {
  local tasks texts=$texts seeds rows method headkv snapkv plans=(full) scores=$weights/headkv
  headkv=$(tuned headkv)
  snapkv=$(tuned snapkv)
  pool 2048
  for rows in 32 64 128 256; do
    plans+=("headkv@$scores"/{retrieval_reasoning_heads,enhanced_heads,retrieval_heads}".json:$rows" {snapkv,pyramid,adakv}":$rows")
    if [ -n "$headkv" ]; then plans+=("headkv@$scores/retrieval_heads.json:$rows,$headkv"); fi
    if [ -n "$snapkv" ]; then plans+=({snapkv,pyramid,adakv}":$rows,$snapkv"); fi
  done
  ask budgets 2048 --suite "${tasks[@]}" --text novels --plans "${plans[@]}"
}

# Another plan for the comparison can be added here.
measure_combined() {
  local tasks texts=$texts seeds headkv snapkv plans=(full duo duo:sinks=16,recent=64 headkv snapkv pyramid adakv h2o tova streaming_llm
    headkv+int4 duo+int4 int8 int4 int2 kivi4 kivi2 quest:16,512 quest:16,256 chunk:16,512 chunk:16,256)
  headkv=$(tuned headkv)
  snapkv=$(tuned snapkv)
  pool 2048
  if [ -e "$weights/damage.json" ]; then plans+=(search); fi
  if [ -n "$headkv" ]; then plans+=("headkv:$headkv" "headkv+int4:$headkv"); fi
  if [ -n "$snapkv" ]; then plans+=({snapkv,pyramid,adakv}":$snapkv"); fi
  ask combined 2048 --suite "${tasks[@]}" --text novels --bytes 1/2 1/4 1/8 1/16 1/32 --plans "${plans[@]}"
}

# The methods whose budgets are in rows: each head's own, a layer's, the model's, or by what heads needed of other texts.
# Two pass keys in a text, and ten, each asked for of a fork of one compressed text.
measure_unasked() {
  local kept=$weights/kvzip/kept.json
  local plans=(full snapkv h2o keynorm keydiff keydiff:compete=layer keydiff:compete=model "keydiff@$kept" expected
    "expected@$kept" "duo@$weights/kvzip:sinks=16,recent=64" kvzip:compete=head kvzip:compete=layer,safeguard=0 kvzip)
  ask_keys 2 unasked 2048 --compress text --bytes 1/4 1/8 --plans "${plans[@]}"
  local ten=(2048 --suite niah_depths --text novels --depths 10 --per-text 10 --questions "$((10 * texts))" --compress text)
  experiment unasked_ten "${ten[@]}" --bytes 1/4 1/8 --plans "${plans[@]}"
  experiment unasked_ten_ends "${ten[@]}" --bytes 1/2 1/16 --plans "${plans[@]}"
}

# 512 rows are a quarter of the longer texts, and all of the shorter ones.
measure_language() {
  local text
  for text in novels lexicon manual code; do
    go_on "language_$text" 2048 --text "$text" \
      --plans full duo:0.5 streaming_llm:64,448 headkv:512 snapkv:512 h2o:512 tova:512 int8 int4 int2 kivi2
  done
  for text in novels code; do
    go_on "language_short_$text" 512 --text "$text" --plans full duo:0.5 int8 int4 int2 kivi2
  done
}

# Rows that share no scale lose their exact numbers at once; the formats that names stand for keep some of a short text.
measure_choices() {
  local plans=(full duo:0.5 streaming_llm:64,256 headkv:128 snapkv:128 int8:0 int4:0 int2:0)
  mapfile -t -O ${#plans[@]} plans < <(each "%s:0,sinks=0,keys=token,group=32" int8 int4 int2)
  ask choices 512 --suite choice_kind choice_capital choice_opposite choice_larger choice_ending --text novels \
    --plans "${plans[@]}" kivi2:32
}

measure_storage() {
  local plans=(full) by_row="sinks=0,keys=token,group=32"
  mapfile -t -O 1 plans < <(each "%s:0,$by_row" int8 int4 int2)
  mapfile -t -O ${#plans[@]} plans < <(each "%s:32,$by_row" int4 int2)
  mapfile -t -O ${#plans[@]} plans < <(each "%s:32" int8 int4 int3 int2 k8v4 k4v2 kivi4 kivi2)
  mapfile -t -O ${#plans[@]} plans < <(each "%s:32,normal=values" int4 int3 int2)
  mapfile -t -O ${#plans[@]} plans < <(each "%s:128" int4 int2 kivi4 kivi2)
  plans+=(kivi2:32,flush=steady hf4:128 fp8 mxfp4 nvfp4 duo:0.5 duo+int4:0.5)
  # Widths for each head, for 4.5, 3.5 and 2.5 of 16 bits with budgets beside them; and alone, for 4.5 bits and for about
  # what int3 and int2 take.
  if [ -e "$weights/damage.json" ]; then mapfile -t -O ${#plans[@]} plans < <(each "search:%s,2048" 0.28125 0.21875 0.15625); fi
  if [ -e "$weights/bits.json" ]; then
    mapfile -t -O ${#plans[@]} plans < <(each "search@$weights/bits.json:%s,2048" 0.28125 0.25 0.2265)
  fi
  go_on storage 2048 --text novels --plans "${plans[@]}"
  plans=(full duo:0.5)
  mapfile -t -O 2 plans < <(each "%s:32" int8 int4 int3 int2 kivi4 kivi2)
  if [ -e "$weights/damage.json" ]; then mapfile -t -O ${#plans[@]} plans < <(each "search:%s,2048" 0.28125 0.21875 0.15625); fi
  ask storage_answers 2048 --suite niah_single_2 --text novels --plans "${plans[@]}"
}

# What a bound lets a query leave unread, and the same with estimates in its place; chunks at budgets that read as much.
measure_bounds() {
  local plans=(full bounded:0 bounded+int8:0.05) certainty epsilon budget
  for certainty in sure four_sigma none; do
    for epsilon in 0.01 0.05 0.2; do plans+=("bounded:$epsilon,certainty=$certainty"); done
  done
  for budget in 64 128 256 512 1024; do plans+=("quest:16,$budget" "chunk:16,$budget"); done
  for budget in 512 1024; do plans+=("quest+int8:16,$budget" "chunk+int8:16,$budget"); done
  go_on bounds 2048 --text novels --plans "${plans[@]}"
  ask_keys 2 bounds_answers 2048 --plans "${plans[@]}"
}

measure_rows() {
  local lengths=(1024 2048 4096 8192) texts=4
  if [ -n "$quick" ]; then lengths=(512) texts=1; fi
  stage rows "$PYTHON" bench/rows_by_head.py --tool "$tools/identify_heads" --model "$folder" --text novels \
    --gates "$weights/duo" --lengths "${lengths[@]}" --epsilons 0.05 0.01 --texts "$texts" --folder "$work/rows" \
    --out "$results/rows_by_head.json" || die "what heads read under a bound could not be measured"
}

# Heads were measured on the first 30 % of the novels, plans are on the rest. All keep as few exact rows as the search's.
measure_reads() {
  local share plan plans=(full bounded:0.05,residual=32)
  mapfile -t -O ${#plans[@]} plans < <(each "%s:32" int8 int4 int3)
  mkdir -p "build/reproduce/$model/reads"
  for share in 1/2 1/3 1/4 1/6; do
    plan=build/reproduce/$model/reads/${share/\//_}.json
    "$tools/plan" search --shape "$folder" --damage "$weights/shares/damage.json" --context 2048 --bytes-read "$share" \
      "$plan" >/dev/null || die "no plan was found that reads $share of a full cache"
    plans+=("bounded@$plan:0.05")
  done
  go_on reads 2048 --text novels --compress text --plans "${plans[@]}"
}

measure_memory() {
  "$PYTHON" bench/memory_over_length.py --tool "$tools/plan" --shape smollm2-135m --contexts 512 1024 2048 4096 8192 \
    --plans full int8 int4 kivi2 "duo@$weights/duo:0.5" "duo+int4@$weights/duo:0.5" snapkv:512 snapkv:128 >"$results/memory.json"
}

identify() {
  local texts=(--model "$folder" --sinks 64 --recent 256 --lengths 4 --passkeys 5)
  find_gates duo "${texts[@]}" --context 2048 --steps 240 --save-every 2
  find_gates duo-ablation "${texts[@]}" --method ablation --context 1024 --samples 8 --save-every 2
  find_gates duo-profile "${texts[@]}" --method profile --context 2048 --samples 8
  stage razor "$tools/identify_heads" razor --model "$folder" --sinks 64 --recent 256 --out "$found/razor" \
    >"$found/razor.log" || die "echo and induction scores could not be measured"
  keep_gates razor
  cp "$found"/razor/{echo,induction}_heads.json "$weights/razor/"
  find_file headkv/retrieval_heads.json headkv --model "$folder" --kind retrieval --lengths 512 1024 2048
  find_file headkv/enhanced_heads.json headkv --model "$folder" --kind enhanced --lengths 512 1024 2048
  find_file headkv/retrieval_reasoning_heads.json headkv --model "$folder" --kind reasoning --lengths 512 1024 2048 --depths 5
  stage shares "$tools/identify_heads" shares --model "$folder" --text novels --length 2048 --texts 6 --later text \
    --out "$found/shares" >"$found/shares.log" || die "what a bound reads could not be measured"
  mkdir -p "$weights/shares"
  cp "$found"/shares/*.json "$weights/shares/"
  find_file damage.json damage --model "$folder" --length 1024 --texts 1 --questions 4
  find_file bits.json damage --model "$folder" --length 1024 --texts 2 --questions 0 --menu bits --by divergence
}
