// SPDX-License-Identifier: Apache-2.0
//
// A model that reads one text over a KV cache whose plan is known only at run time. Tools use this
// interface, so that the cache over every shipped policy is compiled once, in sequence.cpp. A
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
#include <reference_model/repeat_request.hpp>

namespace kvpolicy::tools {

/// How a cache is read during decoding. A prompt always reads all rows.
struct Reading {
  Read read = Read::all;
  bool refresh_each_step = false;  ///< selecting heads choose a new selection at every token
  float epsilon = 0.0F;            ///< of Read::bounded: the share of attention that may stay unread
  Certainty certainty = Certainty::sure;

  friend bool operator==(const Reading&, const Reading&) = default;
};

class Sequence {
 public:
  using Report = std::function<void(std::size_t done, std::size_t total)>;

  virtual ~Sequence() = default;

  /// A copy that can continue the text differently; full pages are shared with it.
  [[nodiscard]] virtual std::unique_ptr<Sequence> fork() const = 0;

  /// The same text under another plan (KvCache::fork_as), so that one prompt serves many plans. A
  /// plan that compresses needs queries: make this sequence with `kept_queries`.
  /// @throws ConfigError where rows were dropped or quantised, and for sequences that are not of
  /// bfloat16 on the CPU; otherwise as KvCache::fork_as
  [[nodiscard]] virtual std::unique_ptr<Sequence> fork_as(HeadPlan<bfloat16> plan) const;

  /// Reads tokens, `chunk` at a time, and returns the logits of the last one: [vocabulary].
  virtual std::vector<float> prefill(std::span<const int> tokens, std::size_t chunk = 512,
                                     const Report& report = {}) = 0;

  /// Reads one more token and returns its logits: [vocabulary].
  virtual std::vector<float> decode(int token, const Reading& reading = {}) = 0;

  /// Reads tokens as one chunk and returns the logits of all of them: [tokens, vocabulary].
  virtual std::vector<float> score(std::span<const int> tokens) = 0;

  virtual void compress() = 0;

  /// Lets heads whose scorer waits for it know what the model needs to repeat `text`, which is all that the sequence
  /// has read: what their next `compress` goes by.
  /// @throws ConfigError for sequences that are not on the CPU; as reference::score_by_repeating
  virtual void score_rows(std::span<const int> text, const reference::RepeatRequest& ask);

  /// For each KV head, layer after layer, the largest score that `score_rows` has given a row, the first `sinks` and
  /// the latest `recent` rows left out; 0 for heads that do not wait for scores.
  /// @throws ConfigError for sequences that are not on the CPU
  [[nodiscard]] virtual std::vector<double> largest_scores(std::size_t sinks, std::size_t recent) const;

  /// Makes the next `compress` choose a plan first, by FastGen, from how the latest queries attend.
  /// Until then every head must keep all rows, and the sequence must keep `window` queries. Earlier
  /// forks choose for themselves.
  /// @throws ConfigError for sequences that are not of bfloat16 on the CPU
  virtual void choose_after_prompt(const FastGenConfig& config);

  [[nodiscard]] virtual std::size_t tokens() const = 0;
  [[nodiscard]] virtual std::size_t bytes() const = 0;
  /// Bytes of the rows that each KV head keeps, layer after layer. `bytes` counts whole pages,
  /// which are rarely full.
  [[nodiscard]] virtual std::vector<std::size_t> head_bytes() const = 0;
  /// Rows times the tokens for which they were held since the text began, as a share of what a cache comes to that
  /// keeps every row (footprint.hpp). What a fork was given counts as its own; a pass of `score_rows` is time, too.
  /// @throws ConfigError for sequences that are not on the CPU
  [[nodiscard]] virtual double footprint() const;
  /// Bytes of cached rows that the next token's attention reads, over all heads; of bounded reads the latest token's.
  [[nodiscard]] virtual std::size_t bytes_read(const Reading& reading = {}) const = 0;

 protected:
  Sequence() = default;
  Sequence(const Sequence&) = default;
  Sequence& operator=(const Sequence&) = default;
};

/// Makes an empty sequence. Layers with a sliding window in the model get one whatever the plan
/// says. The model must outlive the sequence and its forks. `kept_queries` is that of CacheOptions.
/// @throws ConfigError, ShapeError if the plan does not fit the model
[[nodiscard]] std::unique_ptr<Sequence> make_sequence(const reference::Llama& model, HeadPlan<bfloat16> plan,
                                                      std::size_t kept_queries = 0);
[[nodiscard]] std::unique_ptr<Sequence> make_sequence(const reference::Llama& model, HeadPlan<float> plan);

/// Makes an empty sequence under a plan on the device where the model runs (device.hpp); on the CPU
/// it is `make_sequence`.
using MakeSequence = std::function<std::unique_ptr<Sequence>(HeadPlan<bfloat16> plan)>;

/// Sets the number of threads for attention and matrix products from now on; 0 leaves the choice to
/// OpenMP.
void set_threads(std::size_t threads);
[[nodiscard]] std::size_t threads();

}  // namespace kvpolicy::tools
