// SPDX-License-Identifier: Apache-2.0
//
// What a device cache checks of a call before it launches anything. Shapes and addresses; the
// numbers themselves are on the device and stay there.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include <kvpolicy/cache/call_checks.hpp>
#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>

namespace kvpolicy::gpu {

/// @throws ShapeError, as all of them.
template <class E>
void check_rows(const char* name, const TensorView<const E>& rows, std::size_t tokens, std::size_t heads,
                std::size_t head_dim) {
  check_tensor(name, ConstTensor{rows}, tokens, heads, head_dim);
  constexpr std::size_t numbers = 16 / sizeof(E);
  const bool aligned = reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 &&
                       (rows.tokens <= 1 || rows.token_stride % numbers == 0) &&
                       (rows.heads <= 1 || rows.head_stride % numbers == 0);
  require<ShapeError>(tokens == 0 || aligned, "gpu::KvCache: ", name, " has a token stride of ",
                      rows.token_stride, " and a head stride of ", rows.head_stride, " elements at ",
                      static_cast<const void*>(rows.data),
                      "; the kernels read rows that are aligned to 16 bytes (", numbers, " elements)");
  constexpr std::size_t most = std::size_t{1} << 24;
  require<ShapeError>(tokens <= most, "gpu::KvCache: ", name, " has ", tokens,
                      " tokens, a call takes at most 2^24");
}

inline void check_spans(const AttendOptions& options, std::size_t tokens, std::size_t q_heads,
                        std::size_t kv_heads) {
  AttendOptions on_host = options;  // sink logits lie on the device: only their number can be seen
  on_host.attention_sink_bias = {};
  check_options(on_host, tokens, q_heads, kv_heads);
  require<ShapeError>(options.attention_sink_bias.empty() || options.attention_sink_bias.size() == q_heads,
                      "gpu::KvCache: attention_sink_bias has ", options.attention_sink_bias.size(),
                      " numbers, must have q_heads = ", q_heads, " or none");
}

/// A view as the kernels take it.
template <class E>
[[nodiscard]] Tensor tensor_of(const TensorView<const E>& view) {
  // Kernels write only what was handed in as `out`.
  auto* data = const_cast<E*>(view.data);
  return {.data = reinterpret_cast<std::byte*>(data),
          .sequence_stride = 0,
          .token_stride = static_cast<long long>(view.token_stride),
          .head_stride = static_cast<long long>(view.head_stride)};
}

/// Scale, soft cap and sink logits of a call.
inline void set_logits(AttendParams& params, const AttendOptions& options, std::size_t head_dim) {
  params.attention_sink_bias =
      options.attention_sink_bias.empty() ? nullptr : options.attention_sink_bias.data();
  params.scale_log2 = options.scale.value_or(1.0F / std::sqrt(static_cast<float>(head_dim))) * log2_e;
  params.softcap = options.softcap;
}

}  // namespace kvpolicy::gpu
