// SPDX-License-Identifier: Apache-2.0
//
// What a model still can under a plan. A suite is a kind of task; its tasks are drawn from a seed,
// and every plan meets the same ones. One task goes to many plans at once, so that its text is read
// once (prompt_forks.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <reference_model/llama.hpp>

#include "exam_plan.hpp"
#include "prompt_forks.hpp"
#include "retrieval_text.hpp"

namespace kvpolicy::tools {

enum class Suite : std::uint8_t {
  passkey,     ///< facts at even depths, one question each: a grid of length and depth
  keys,        ///< many facts anywhere in a text, as the model was trained
  reasoning,   ///< two-step questions: the key of the older of two
  perplexity,  ///< surprise at text that goes on
  agreement,   ///< how far from the full cache: answers and text that goes on
};

inline constexpr std::string_view suite_names[] = {"passkey", "keys", "reasoning", "perplexity",
                                                   "agreement"};

[[nodiscard]] inline std::string_view name_of(Suite suite) {
  return suite_names[static_cast<std::size_t>(suite)];
}

/// Whether its tasks are questions with right answers.
[[nodiscard]] inline bool asks(Suite suite) {
  return suite == Suite::passkey || suite == Suite::keys || suite == Suite::reasoning;
}

/// What is drawn, and how plans meet it.
struct SuiteConfig {
  std::size_t length =
      4096;  ///< bytes of text, question and answer together, or text and what follows
  std::size_t questions = 34;  ///< for a seed; the passkey grid rounds up to whole texts
  std::size_t per_text = 10;   ///< questions that share a text, at most
  std::size_t depths = 10;     ///< of the passkey grid, from 5 % to 95 %
  std::size_t windows = 4;     ///< texts that go on, for a seed
  std::size_t scored = 256;    ///< bytes that a text goes on for
  bool lead_in = false;        ///< questions end with the opening of their answer
  Prefill prefill = Prefill::shared;
  Compress compress = Compress::behind_question;
};

/// A text, with questions about it or with bytes that follow it.
struct Task {
  RetrievalText text;
  std::string follows;
};

/// The tasks of one length and seed; the same on every machine, for any plans and threads.
/// `agreement` has texts with questions first, then texts that go on.
/// @throws ConfigError for a length or depths that cannot be.
[[nodiscard]] std::vector<Task> draw_tasks(Suite suite, const SuiteConfig& config,
                                           std::uint64_t seed, const std::string& plain);

/// What one plan did, over one or several tasks.
struct Outcome {
  /// A mark for each question: '1' right; 'o' two-step, the key of the other of the two names; '0'.
  std::string marks;
  /// "nats": surprise per byte, for each text that goes on; "answer_kl", "text_kl": divergence from
  /// the full cache in nats per byte, "answer_same", "text_same": share of bytes with the same
  /// likeliest next byte, for each question or text.
  std::map<std::string, std::vector<double>> measures;
  /// Where the answer or the scored text begins, for each question or text: allocated bytes, and
  /// the bytes of the rows kept by each KV head, layer after layer.
  std::vector<double> kv_bytes;
  std::vector<std::vector<double>> head_bytes;

  void add(const Outcome& more);
};

/// Called with units of cost done since the last call.
using Advance = std::function<void(double units)>;

/// What each plan does with a task. Single-threaded, so that results do not depend on how work is
/// shared out.
/// @throws what the cache throws.
[[nodiscard]] std::vector<Outcome> perform(const reference::Llama& model, const Task& task,
                                           std::span<const ExamPlan* const> plans,
                                           const SuiteConfig& config, bool compare_with_full,
                                           const Advance& advance = {});

/// What performing a task under so many plans takes, in arbitrary units.
[[nodiscard]] double cost(const Task& task, std::size_t plans);

}  // namespace kvpolicy::tools
