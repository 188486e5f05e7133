# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154
#
# What ./scripts/reproduce measures on the shipped byte model; it reads this file, and --help prints the list.
#
#   gates      which methods find the retrieval heads, and how few of them are enough
#   needles    DuoAttention against other methods at a half and a quarter of the bytes: length x depth
#   settings   HeadKV's and SnapKV's kernel and beta, chosen on texts that nothing else is measured on
#   budgets    HeadKV's scores against other methods at 16 to 256 rows per head, each as published and
#              with the setting chosen before
#   storage    8, 4 and 2 bits, per token and per channel with the same exact rows, on all heads and under
#              DuoAttention's plan
#   unasked    rows are dropped before any of ten questions is known
#   combined   the best methods at a half to a 32nd of the bytes, and the plans of plan search
experiments=(gates needles settings budgets storage unasked combined)

prepare() { :; }
draw_figures() { "$PYTHON" bench/plot.py --results "$results" --out "$figures"; }

# Numbers of questions and windows are per seed, so 3 x 34 questions give one point.
questions=34
per_text=17
size_of() {
  size=(--lengths "$@" --seeds 1 2 3 --questions "$questions" --per-text "$per_text" --windows 4)
  if [ -n "$quick" ]; then size=(--lengths 1024 --seeds 1 --questions 10 --per-text 10 --windows 2); fi
}

measure_gates() {
  local plans=(full) folder sparsity folders
  mapfile -t folders < <(random_gates 10)
  for folder in duo duo-ablation duo-profile duo-lm duo-lm-passkeys duo-sinks duo-recent; do
    if [ ! -d "$weights/$folder" ]; then continue; fi
    for sparsity in 0.5 0.75 0.8125 0.875 0.9375 1; do
      plans+=("duo@$weights/$folder:$sparsity")
    done
  done
  for folder in "${folders[@]}"; do
    plans+=("duo@$folder:0.5" "duo@$folder:0.75")
  done
  experiment gates "2048" --suite keys --plans "${plans[@]}"
}

measure_needles() {
  experiment needles "1024 1536 2048 3072 4096" --suite passkey --depths 10 --bytes 1/2 1/4 \
    --plans full duo streaming_llm h2o tova fastgen:0.95,sinks=16,window=32
}

# The published setting comes first, because the first of equal ones is chosen.
measure_settings() {
  local rows kernel beta plans=(full)
  for rows in 32 128; do
    for kernel in 7 13 29; do
      for beta in 1.005 1.2 2; do plans+=("headkv:$rows,kernel=$kernel,beta=$beta"); done
      plans+=("snapkv:$rows,kernel=$kernel")
    done
  done
  experiment settings "2048" --split validation --suite keys --plans "${plans[@]}"
}

measure_budgets() {
  local method headkv snapkv plans=(full)
  headkv=$(chosen headkv)
  snapkv=$(chosen snapkv)
  for method in headkv@$weights/headkv/{retrieval_reasoning_heads,enhanced_heads,retrieval_heads}.json; do
    mapfile -t -O ${#plans[@]} plans < <(each "$method:%s" 16 32 64 128 256)
    mapfile -t -O ${#plans[@]} plans < <(each "$method:%s,$headkv" 16 32 64 128 256)
  done
  # PyramidKV and Ada-KV rank rows as SnapKV does.
  for method in snapkv pyramid adakv; do
    mapfile -t -O ${#plans[@]} plans < <(each "$method:%s" 16 32 64 128 256)
    mapfile -t -O ${#plans[@]} plans < <(each "$method:%s,$snapkv" 16 32 64 128 256)
  done
  experiment budgets "2048" --suite keys reasoning --plans "${plans[@]}"
}

measure_storage() {
  local plans=(full) by_row="sinks=0,keys=token,group=32"
  mapfile -t -O 1 plans < <(each "%s:0,$by_row" int8 int4 int2)
  mapfile -t -O ${#plans[@]} plans < <(each "%s:32,$by_row" int8 int4 int2)
  mapfile -t -O ${#plans[@]} plans < <(each '%s:32' int8 int4 int3 int2 k8v4 k4v2 kivi4 kivi2)
  mapfile -t -O ${#plans[@]} plans < <(each '%s:32,flush=steady' kivi4 kivi2)
  mapfile -t -O ${#plans[@]} plans < <(each '%s:128' int8 int4 int2 kivi4 kivi2)
  plans+=(duo:0.5 duo+int8:0.5 duo+int4:0.5 duo+int2:0.5)
  experiment storage "1024 4096" --suite perplexity keys --plans "${plans[@]}"
}

# Each head's own rows compete, a layer's or the model's.
measure_unasked() {
  local questions=100 per_text=10
  experiment unasked "2048" --suite keys --compress text --bytes 1/2 1/4 1/8 1/16 --plans full snapkv h2o keynorm keydiff \
    keydiff:compete=layer keydiff:compete=model expected kvzip:compete=head kvzip:compete=layer,safeguard=0 kvzip
}

# Another plan for the comparison can be added here.
measure_combined() {
  local headkv snapkv
  headkv=$(chosen headkv)
  snapkv=$(chosen snapkv)
  experiment combined "4096" --suite keys --bytes 1/2 1/4 1/8 1/16 1/32 --plans full search duo headkv \
    "headkv:$headkv" snapkv "snapkv:$snapkv" pyramid "pyramid:$snapkv" adakv "adakv:$snapkv" h2o tova \
    streaming_llm int8 int4 int2 kivi2 kivi2:32,flush=steady duo+int4 duo+int2 headkv+int4 \
    "headkv+int4:$headkv"
}

identify() {
  find_gates duo
  find_gates duo-ablation --method ablation
  find_gates duo-profile --method profile
  find_gates duo-lm --loss lm
  find_gates duo-lm-passkeys --loss lm --texts passkeys
  find_gates duo-sinks --mask sinks
  find_gates duo-recent --mask recent
  find_file headkv/retrieval_heads.json headkv --kind retrieval
  find_file headkv/enhanced_heads.json headkv --kind enhanced
  find_file headkv/retrieval_reasoning_heads.json headkv --kind reasoning
  find_file damage.json damage --kernel 29
}
