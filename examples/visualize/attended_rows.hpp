// SPDX-License-Identifier: Apache-2.0
//
// How much of a text's attention few rows get, and for how long the same few rows: the two
// observations of section 3 of TriForce (arXiv:2404.11912), on which its middle level rests.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include <reference_model/llama.hpp>

#include <common/speculative_text.hpp>

namespace kvpolicy::tools {

/// The shares of a query's attention that rows get, each a mean over the query heads of a KV head.
/// All but `fixed` are of as many rows as the head's choice for this query shows.
struct AttendedShares {
  double best = 0;    ///< the rows that get most
  double chosen = 0;  ///< the chunks that the head chooses by this query, and later rows
  double latest = 0;  ///< the first 16 rows and the latest ones, as a streaming head keeps them
  double fixed = 0;   ///< the chunks that the first query chose, and later rows
  /// The share of the rows that the first query chose which this query chooses again.
  double overlap = 0;
};

/// A text that was read once, of which queries are then followed.
class AttendedRows {
 public:
  /// Reads the text. The model must outlive this object.
  /// @throws what model and cache throw
  AttendedRows(const reference::Llama& model, std::span<const int> text);
  ~AttendedRows();

  /// Reads the tokens that follow the text, attending to all rows, and returns the shares of each
  /// token's query: [next.size()][KV heads of all layers]. Chunks, budget and summaries are those
  /// of `setup`.
  /// @throws ConfigError for a setup that does not work; what model and cache throw
  [[nodiscard]] std::vector<std::vector<AttendedShares>> follow(const SpeculationSetup& setup,
                                                                std::span<const int> next) const;

 private:
  struct Text;
  std::unique_ptr<Text> text_;
};

}  // namespace kvpolicy::tools
