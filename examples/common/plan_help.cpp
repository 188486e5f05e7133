// SPDX-License-Identifier: Apache-2.0
//
// What the tools' --help says of plans and their settings.
#include "../tool_plan.hpp"

namespace kvpolicy::tools {

const char* plan_help() {
  return R"(  full                 every row, exact
  sink_recent:16,128   the first 16 rows and the latest 128
  int8 int6 int5 int4  every row in so many bits (also int3, int2), but for the first 4 and the latest 128;
                       int4:64 for 64. Below 8 bits rows are rotated, and keys share a scale along the text
  int8:halves=yes      8 bits, of which a draft may read the upper 4 (QuantSpec)
  int2:normal=values   values as Lloyd-Max numbers: fewer bits
  fp8, mxfp4, nvfp4    every row in such numbers; fp8:scale=0.5 for a head's scale
  bounded:0.05         keys of 8 bits, values of 4; the upper 4 bits of every key are read, and then only rows that can
                       matter: what stays unread holds at most 5 % of a query's attention, for sure
  k8v4 k4v2            and so on: keys of 8 bits, values of 4
  kivi2 kivi4          quantised whenever the residual is full, as published (KIVI)
  hf4 hf2              groups of 64 in a row, the latest 128 exact (transformers' QuantizedCache)
  chunk:16,1024        every row kept, 1,024 read, in chunks of 16, by mean key (TriForce)
  quest:16,1024        the same by smallest and largest key (Quest)
  duo:0.5              half of the heads stream, by the model's own gates (DuoAttention);
                       duo@FOLDER:0.5 by those of a pattern folder
  headkv:128           128 rows per head on average, by the model's own scores (HeadKV);
                       headkv@FILE:128 by those of a score file
  snapkv:128           128 rows of every head, those that the prompt's end attends to most (SnapKV)
  adakv:128            128 rows per head on average; the heads of a layer compete for them (Ada-KV)
  criticalkv:128       as snapkv; the second half of the rows by attention times what their values add to the layer's
                       output (CriticalKV)
  h2o:128              128 rows of every head: half by all attention so far, half the latest (H2O)
  tova:128             128 rows of every head, by the latest token's attention only (TOVA)
  keynorm:128          128 rows of every head, those with the shortest keys
  keydiff:128          128 rows of every head, those whose keys differ most from the others (KeyDiff);
                       keydiff@FILE:128,4096 for 128 rows per head on average, divided by what heads needed of texts before
                       (`identify_heads kvzip`), at most 4,096 for one; keynorm and expected as well
  expected:128         128 rows of every head, those that queries to come can be expected to look at, times the length
                       of their values (Expected Attention)
  kvzip:128            128 rows per head on average, over the whole model those that the model needs to repeat the
                       text; the text is read a second time for that (KVzip). Good for any question
  pyramid:128          128 rows per head on average, most in the lower layers (PyramidKV)
  streaming_llm:4,1020 as sink_recent, with keys rotated as if no rows were missing (StreamingLLM)
  search:0.125,4096    an eighth of a full cache's bytes at 4,096 tokens, distributed over heads and all
                       of these by the files beside the model (`plan search`), or search@damage.json
  duo+int4:0.5         and so on: +int8 to +int2, +k8v4, +fp8 quantise sink_recent, chunk, quest,
                       duo's retrieval heads and the survivors of headkv, snapkv, criticalkv and adakv
  FILE.json            a plan file (`plan convert` writes them), or HeadKV head scores
  FOLDER               a DuoAttention pattern: full_attention_heads.tsv and config.json

What a name leaves open is as published, or as listed here; other settings are written out after its numbers:
  headkv, snapkv, adakv, pyramid,
  criticalkv                       window=8 pooling=max|average kernel=7, as in headkv:128,kernel=29,beta=2
  headkv, pyramid                  beta=1.005 (pyramid: 20), headkv also score_power=1; adakv: safeguard=0.2
                                   keep_short_prompts=true: a prompt shorter than the capacity keeps all rows
  expected                         window=64 latest queries that stand for those to come, future=512 positions
  snapkv, adakv, criticalkv        votes=mean|largest (the worst case in place of the mean), and with it
                                   prior_share=0: no score below this share of the mean (DefensiveKV: 1)
  snapkv, adakv, criticalkv,       weigh_values=true|false: scores times a norm of the value, and with it
  expected, kvzip                  value_norm=value_l2|output_l1 (its length, or what it adds to the output) and
                                   unweighed_share=0 (criticalkv: 0.5), the rows that go by scores alone
  snapkv, adakv, criticalkv,       compete=head|layer|model: whose rows compete for the budgets, as in
  keynorm, keydiff, expected,      keydiff:128,compete=model; safeguard: the share of its own that a head keeps
  kvzip
  sink_recent, streaming_llm, duo  sinks=N recent=N mask=exact|chunk; duo also rule=exact_count|threshold
  bounded                          (how it is read is in the name, not in a plan file that is made from it)
                                   certainty=sure|four_sigma|none (estimates), key_group=64, residual=128;
                                   bounded+int8:0.05 has values of 8 bits; bounded@FILE.json:0.05 reads the heads of a
                                   plan file so whose keys are in halves, and the others as they are
  what is quantised                group=N channels that share a scale, residual=N, hadamard=none|keys|values|both
                                   (what is rotated first), normal=none|keys|values|both (codes that stand for
                                   Lloyd-Max numbers); kivi has flush=kivi|steady instead; fp8, mxfp4 and nvfp4 have
                                   residual=N, and scale=1.0 but for mxfp4
  int4 and so on, duo+int4         keys=channel|token key_group=64 rows that share a scale; int4 also sinks=4
)";
}

}  // namespace kvpolicy::tools
