// SPDX-License-Identifier: Apache-2.0
//
// Asks a model questions about texts under a plan and measures the cost. A text is read once, and
// every question goes to a fork of its cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "exam_plan.hpp"
#include "retrieval_text.hpp"
#include "text_model.hpp"

namespace kvpolicy::tools {

/// The results of one plan over all texts.
struct ExamResult {
  std::string plan;
  /// Tokens, decoded greedily, one answer for each question, text after text.
  std::vector<std::vector<int>> answers;
  std::vector<bool> right;  ///< whether it begins with the expected answer
  double bytes = 0;         ///< of the cache that answers; mean over the questions
  double peak_bytes = 0;    ///< of a cache at the end of a text; mean over the texts
  double bytes_read = 0;    ///< by attention for a token; mean over the questions
  double prefill_ms = 0;    ///< for a text, mean
  double compress_ms = 0;   ///< mean over the questions; 0 without budgets
  double decode_ms = 0;     ///< for a token, mean

  [[nodiscard]] std::size_t right_count() const;
};

/// The share of answer tokens that equal those of another plan at the same positions.
[[nodiscard]] double agreement(const ExamResult& one, const ExamResult& other);

/// Is called with the tokens read and decoded so far, and with the total.
using ExamReport = std::function<void(std::size_t done, std::size_t total)>;

/// How threads share the work. `one_text`: texts are read one after another, each by all threads,
/// so that times mean something. `texts`: each thread takes whole texts, which is faster where
/// there are many.
enum class Threads : std::uint8_t { one_text, texts };

/// `make` creates the sequences; if empty, they run on the CPU. Any other `make` is only called by
/// one thread at a time and needs Threads::one_text.
/// @throws what the cache throws
[[nodiscard]] ExamResult examine(const TextModel& model, const ExamPlan& plan,
                                 std::span<const RetrievalText> texts, const ExamReport& report = {},
                                 Threads share = Threads::one_text, const MakeSequence& make = {});

}  // namespace kvpolicy::tools
