// SPDX-License-Identifier: Apache-2.0
//
// What the two attention kernels share: decode.cuh for few queries, prefill.cuh for many.
#pragma once

#include <kvpolicy/cuda/kernels/call_sequence.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

inline constexpr float log2_e = 1.4426950408889634F;
inline constexpr float ln_2 = 0.6931471805599453F;

KVPOLICY_HOST_DEVICE float minus_infinity() {
#if defined(__CUDA_ARCH__)
  return float_of_bits(0xff800000U);
#else
  return -__builtin_inff();
#endif
}

/// Softmax state over some rows, for one query of one head; logits are in units of log 2.
struct alignas(8) PartialState {
  float max;
  float sum;  ///< sum of 2^(logit - max)
};

/// Memory for the partial results of blocks. If several blocks share a head or tile, the last block
/// to finish merges their results in the order of the rows, so results do not depend on timing.
struct Workspace {
  float* values = nullptr;           ///< [slots, columns, head_dim], not normalised
  PartialState* states = nullptr;    ///< [slots, columns]
  std::uint32_t* tickets = nullptr;  ///< one for each shared head or tile; 0 before and after a call
};

/// Attention of one layer, for any number of sequences. All pointers are device pointers.
struct AttendParams {
  const HeadView* heads = nullptr;     ///< [sequences, kv_heads]
  const LayerState* states = nullptr;  ///< [sequences]
  /// [sequences], of a ragged call; or null: all sequences have as many queries. The table then says which heads
  /// and states are read, and tensors are [tokens, heads, head_dim], with a sequence stride of 0.
  const CallSequence* ragged = nullptr;
  int sequences = 1;
  int kv_heads = 0;
  int group = 1;  ///< query heads for each KV head
  int page_rows = 64;
  Request request = {};  ///< the same for every sequence; of a ragged call `own_rows` and the most queries
  int least_queries =
      0;          ///< of a ragged call: sequences with fewer, or with more than the most, are left out
  Tensor q = {};  ///< [sequences, queries, kv_heads * group, head_dim]
  Tensor k = {};  ///< the call's own rows [sequences, queries, kv_heads, head_dim], or none
  Tensor v = {};
  Tensor out = {};  ///< shaped as q
  /// [sequences, queries, log_sum_exp_heads], of a ragged call [tokens, log_sum_exp_heads]; or null, where the
  /// sequences of a ragged call may have their own.
  float* log_sum_exp = nullptr;
  int log_sum_exp_heads = 0;                   ///< 0: kv_heads * group; more for a part of the heads
  const float* attention_sink_bias = nullptr;  ///< [kv_heads * group] or null
  float scale_log2 = 0.0F;                     ///< scale of a dot product, times log2(e)
  float softcap = 0.0F;                        ///< natural logit -> cap * tanh(logit / cap); 0: no cap
  Workspace workspace = {};
  int splits = 1;  ///< prefill.cuh: blocks that share a tile of queries

  /// What the call asks of a sequence.
  KVPOLICY_HOST_DEVICE Request request_of(int sequence) const {
    if (ragged == nullptr) return request;
    const CallSequence& own = ragged[sequence];
    const bool served = own.tokens >= least_queries && own.tokens <= request.queries;
    return {.queries = served ? own.tokens : 0,
            .own_rows = request.own_rows,
            .selected = own.selected != 0,
            .upper_half = own.upper_half != 0,
            .tree = own.tree};
  }
  KVPOLICY_HOST_DEVICE CallTokens tokens_of(int sequence) const {
    if (ragged == nullptr) return {sequence, 0, request.queries};
    return {0, ragged[sequence].first, ragged[sequence].tokens};
  }
  KVPOLICY_HOST_DEVICE const HeadView& head_of(int sequence, int kv_head) const {
    return ragged == nullptr ? heads[sequence * kv_heads + kv_head] : ragged[sequence].read_heads[kv_head];
  }
  KVPOLICY_HOST_DEVICE const LayerState& state_of(int sequence) const {
    return ragged == nullptr ? states[sequence] : *ragged[sequence].state;
  }

  /// The log-sum-exp of a sequence's own tokens, [queries, state_heads()], or null.
  KVPOLICY_HOST_DEVICE float* log_sum_exp_of(int sequence) const {
    if (log_sum_exp == nullptr) return ragged == nullptr ? nullptr : ragged[sequence].log_sum_exp;
    const CallTokens tokens = tokens_of(sequence);
    const long long first = static_cast<long long>(tokens.sequence) * tokens.count + tokens.first;
    return log_sum_exp + first * state_heads();
  }
  /// How many numbers log_sum_exp has for each token.
  KVPOLICY_HOST_DEVICE int state_heads() const {
    return log_sum_exp_heads > 0 ? log_sum_exp_heads : kv_heads * group;
  }
};

/// Applies the soft cap to a scaled dot product (in units of log 2): cap tanh(logit / cap), to about 2^-20 of itself. A
/// library's tanh would be most of a kernel's code, because it stands in every unrolled loop.
KVPOLICY_DEVICE float capped(float logit, float softcap) {
  if (softcap == 0.0F) return logit;
  const float cap = softcap * log2_e;
  const float x = logit * reciprocal_approximate(cap);
  // Where 1 - 2 / (e^2x + 1) would lose digits, the series does not.
  const float x2 = x * x;
  const float series = logit * (1.0F + x2 * (-1.0F / 3.0F + x2 * (2.0F / 15.0F)));
  const float grown = exp2_approximate(x * (2.0F * log2_e)) + 1.0F;
  const float closed = cap - 2.0F * cap * reciprocal_approximate(grown);
  return x2 < 1.0F / 64.0F ? series : closed;
}

/// 2^(from - to), or 1 if both are -infinity, so that merging an empty part never gives NaN.
KVPOLICY_DEVICE float rescale_factor(float from, float to) {
  return from == to ? 1.0F : exp2_approximate(from - to);
}

/// The final state of a query head, and the factor for its unnormalised values. A sink logit
/// (natural units) counts as one more weight without a value.
struct FinishedRow {
  float factor;
  float log_sum_exp;
};
KVPOLICY_DEVICE FinishedRow finish_row(PartialState state, const float* sink_logit) {
  float factor = 1.0F;
  if (sink_logit != nullptr) {
    const float sink = *sink_logit * log2_e;
    const float max = sink > state.max ? sink : state.max;
    factor = rescale_factor(state.max, max);
    state.sum = state.sum * factor + (sink == minus_infinity() ? 0.0F : exp2_approximate(sink - max));
    state.max = max;
  }
  if (state.sum == 0.0F) return {0.0F, minus_infinity()};
  return {factor / state.sum, (state.max + log2_exact(state.sum)) * ln_2};
}

}  // namespace kvpolicy::gpu
