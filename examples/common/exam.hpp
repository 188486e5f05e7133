// SPDX-License-Identifier: Apache-2.0
//
// Asks a model questions about texts under a plan and measures what that costs: the text is read
// once, and every question goes to a fork of what was read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <reference_model/llama.hpp>

#include "exam_plan.hpp"
#include "retrieval_text.hpp"

namespace kvpolicy::tools {

/// What one plan did over all texts.
struct ExamResult {
  std::string plan;
  std::vector<std::string> answers;  ///< greedily decoded, one for each question, text after text
  std::vector<bool> right;           ///< whether it is the expected answer, byte for byte
  double bytes = 0;                  ///< of the cache that answers, mean over the questions
  double peak_bytes = 0;             ///< of a cache at the end of a text, mean over the texts
  double bytes_read = 0;             ///< that attention reads for a token, mean over the questions
  double prefill_ms = 0;             ///< of a text, mean
  double compress_ms = 0;            ///< mean over the questions; 0 without budgets
  double decode_ms = 0;              ///< of a token, mean

  [[nodiscard]] std::size_t right_count() const;
};

/// The share of answer bytes that are the same as another plan's, place by place.
[[nodiscard]] double agreement(const ExamResult& one, const ExamResult& other);

/// Called with the tokens read and decoded so far and in all.
using ExamReport = std::function<void(std::size_t done, std::size_t total)>;

/// @throws ConfigError unless the model reads and writes bytes: a vocabulary of 256.
void require_bytes(const reference::Llama& model);

/// What threads share: the work on one text after another, whose times then mean something, or the
/// texts themselves, which is quicker where there are many.
enum class Threads : std::uint8_t { one_text, texts };

/// `make`: empty for sequences on the CPU. Others are asked for one after another: with
/// Threads::one_text.
/// @throws as require_bytes; what the cache throws.
[[nodiscard]] ExamResult examine(const reference::Llama& model, const ExamPlan& plan,
                                 std::span<const RetrievalText> texts,
                                 const ExamReport& report = {}, Threads share = Threads::one_text,
                                 const MakeSequence& make = {});

/// The bytes of a text as tokens.
[[nodiscard]] std::vector<int> tokens_of(std::string_view text);

}  // namespace kvpolicy::tools
