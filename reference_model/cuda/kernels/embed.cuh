// SPDX-License-Identifier: Apache-2.0
//
// The beginning of a forward pass: the tokens' rows of the embedding, and the angles by which
// queries and keys are rotated to their positions. Tokens and position are read from device memory,
// so that a captured pass can be replayed while the text grows.
#pragma once

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu::llama {

struct AnglesParams {
  const int* position = nullptr;  ///< of the first row
  const int* offsets = nullptr;   ///< [rows]: distances of the rows' positions from the first one's
  const float* inverse_frequencies = nullptr;  ///< [pairs]
  float* cosines = nullptr;                    ///< [rows, pairs]
  float* sines = nullptr;
  int pairs = 0;  ///< head_dim / 2
};

inline constexpr int angles_threads = 128;

/// One block for each row. All heads of all layers use the same angles.
template <int Threads = angles_threads>
KVPOLICY_KERNEL(Threads, 1)
angles_kernel(const KVPOLICY_GRID_CONSTANT AnglesParams p) {
  const int row = block_x();
  const long long at = static_cast<long long>(row) * p.pairs;
  for (int pair = thread_index(); pair < p.pairs; pair += thread_count()) {
    // The product is in double, as in kvpolicy::rotate: at a million positions a float angle has an
    // error of a tenth.
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

/// One block for each row. This kernel also advances the position by the rows, which saves a
/// launch; it runs after the angles kernel, the last one that reads the position.
template <int Threads = embed_threads>
KVPOLICY_KERNEL(Threads, 1)
embed_kernel(const KVPOLICY_GRID_CONSTANT EmbedParams p) {
  const int row = block_x();
  int token = p.tokens[row];
  // -1 says that no likeliest token exists (likeliest.cuh). The host throws when it reads the
  // tokens; until then a replayed graph must not read outside the embedding.
  if (token < 0 || token >= p.vocabulary) token = 0;
  const std::uint16_t* from = p.embedding + static_cast<long long>(token) * p.hidden;
  float* to = p.residual + static_cast<long long>(row) * p.hidden;
  for (int i = thread_index(); i < p.hidden; i += thread_count()) to[i] = to_float<bfloat16>(from[i]);
  if (row == 0 && thread_index() == 0) *p.position += p.rows;
}

}  // namespace kvpolicy::gpu::llama
