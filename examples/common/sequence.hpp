// SPDX-License-Identifier: Apache-2.0
//
// A model reading one text over a KV cache whose plan is known only at run time. Tools hold this
// interface, so that the cache over every shipped policy is compiled once, in sequence.cpp; a
// program that knows its policies uses KvCache itself and pays no virtual call.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/fastgen.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <reference_model/llama.hpp>

namespace kvpolicy::tools {

/// How the rows of a cache are read while it decodes. A prompt always reads all of them.
struct Reading {
  Read read = Read::all;
  bool refresh_each_step = false;  ///< selecting heads choose anew at every token

  friend bool operator==(const Reading&, const Reading&) = default;
};

class Sequence {
 public:
  using Report = std::function<void(std::size_t done, std::size_t total)>;

  virtual ~Sequence() = default;

  /// Another continuation of the same text; rows that are full pages are shared with it.
  [[nodiscard]] virtual std::unique_ptr<Sequence> fork() const = 0;

  /// The same text under another plan (KvCache::fork_as), so that one prompt serves many plans. A plan
  /// that compresses needs queries: make this sequence with `kept_queries`.
  /// @throws ConfigError where rows are gone or quantised, and for sequences that are not of bfloat16
  /// on the CPU; as KvCache::fork_as
  [[nodiscard]] virtual std::unique_ptr<Sequence> fork_as(HeadPlan<bfloat16> plan) const;

  /// Reads tokens, `chunk` at a time; logits of the last one.
  virtual std::vector<float> prefill(std::span<const int> tokens, std::size_t chunk = 512,
                                     const Report& report = {}) = 0;

  /// Logits behind one more token.
  virtual std::vector<float> decode(int token, const Reading& reading = {}) = 0;

  /// Logits of all tokens, read as one chunk.
  virtual std::vector<float> score(std::span<const int> tokens) = 0;

  virtual void compress() = 0;

  /// The next `compress` goes, first, under the plan that FastGen chooses then, by how the latest
  /// queries attend. Every head must keep all rows until then, and the sequence `window` queries.
  /// Forks made before it choose for themselves.
  /// @throws ConfigError for sequences that are not of bfloat16 on the CPU
  virtual void choose_behind_prompt(const FastGenConfig& config);

  [[nodiscard]] virtual std::size_t tokens() const = 0;
  [[nodiscard]] virtual std::size_t bytes() const = 0;
  /// Bytes of the rows that each KV head keeps, layer after layer; `bytes` counts pages, which are
  /// rarely full.
  [[nodiscard]] virtual std::vector<std::size_t> head_bytes() const = 0;
  /// Bytes of cached rows that the next token's attention reads, over all heads.
  [[nodiscard]] virtual std::size_t bytes_read(const Reading& reading = {}) const = 0;

 protected:
  Sequence() = default;
  Sequence(const Sequence&) = default;
  Sequence& operator=(const Sequence&) = default;
};

/// An empty sequence. Layers that the model reads through a sliding window get one, whatever the
/// plan says. The model must outlive the sequence and its forks. `kept_queries`: as CacheOptions has it.
/// @throws ConfigError, ShapeError if the plan does not fit the model.
[[nodiscard]] std::unique_ptr<Sequence> make_sequence(const reference::Llama& model,
                                                      HeadPlan<bfloat16> plan,
                                                      std::size_t kept_queries = 0);
[[nodiscard]] std::unique_ptr<Sequence> make_sequence(const reference::Llama& model,
                                                      HeadPlan<float> plan);

/// Makes an empty sequence under a plan where the model runs: on the CPU as above, or on another
/// device (device.hpp).
using MakeSequence = std::function<std::unique_ptr<Sequence>(HeadPlan<bfloat16> plan)>;

/// Threads of attention and matrix products from now on; 0 leaves the choice to OpenMP.
void set_threads(std::size_t threads);
[[nodiscard]] std::size_t threads();

}  // namespace kvpolicy::tools
