// SPDX-License-Identifier: Apache-2.0
//
// Where a forward pass begins: the tokens' rows of the embedding, and the angles by which their
// positions turn queries and keys. Tokens and position are read from the device, so that a captured
// pass can be replayed while the text grows.
#pragma once

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::cuda::llama {

struct AnglesParams {
  const int* position = nullptr;               ///< of the first row
  const int* offsets = nullptr;                ///< [rows]: positions of the rows behind the first
  const float* inverse_frequencies = nullptr;  ///< [pairs]
  float* cosines = nullptr;                    ///< [rows, pairs]
  float* sines = nullptr;
  int pairs = 0;  ///< head_dim / 2
};

inline constexpr int angles_threads = 128;

/// One block a row: the same angles serve all heads of all layers.
template <int Threads = angles_threads>
KVPOLICY_KERNEL(Threads, 1)
angles_kernel(const KVPOLICY_GRID_CONSTANT AnglesParams p) {
  const int row = block_x();
  const long long at = static_cast<long long>(row) * p.pairs;
  for (int pair = thread_index(); pair < p.pairs; pair += thread_count()) {
    // In double, as kvpolicy::rotate: at a million positions a float angle is off by a tenth.
    sine_cosine(static_cast<double>(*p.position + p.offsets[row]) * p.inverse_frequencies[pair],
                p.sines[at + pair], p.cosines[at + pair]);
  }
}

struct EmbedParams {
  const int* tokens = nullptr;               ///< [rows]
  const std::uint16_t* embedding = nullptr;  ///< [vocabulary, hidden], bfloat16
  float* residual = nullptr;                 ///< [rows, hidden]
  int* position = nullptr;
  int rows = 0;
  int vocabulary = 0;
  int hidden = 0;
};

inline constexpr int embed_threads = 256;

/// One block a row. Moves the position on by the rows as well: it comes behind the angles, the last
/// to read it, and so saves a launch.
template <int Threads = embed_threads>
KVPOLICY_KERNEL(Threads, 1)
embed_kernel(const KVPOLICY_GRID_CONSTANT EmbedParams p) {
  const int row = block_x();
  int token = p.tokens[row];
  // -1 stands for "there was no likeliest token" (likeliest.cuh). The host hears of it when it
  // reads the tokens; until then a replayed graph must not read beside the embedding.
  if (token < 0 || token >= p.vocabulary) token = 0;
  const std::uint16_t* from = p.embedding + static_cast<long long>(token) * p.hidden;
  float* to = p.residual + static_cast<long long>(row) * p.hidden;
  for (int i = thread_index(); i < p.hidden; i += thread_count())
    to[i] = to_float<bfloat16>(from[i]);
  if (row == 0 && thread_index() == 0) *p.position += p.rows;
}

}  // namespace kvpolicy::cuda::llama
