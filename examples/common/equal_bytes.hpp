// SPDX-License-Identifier: Apache-2.0
//
// Methods are compared at equal bytes: which setting makes a method keep a given share of what the
// full cache keeps. Counted in rows of KV heads where the answer begins, without the pages that
// hold them, which make no difference between 65 rows and 128.
#pragma once

#include <cstddef>
#include <string>

#include <kvpolicy/core/model_shape.hpp>

namespace kvpolicy::tools {

/// What a plan's settings are made for.
struct ByteBudget {
  double share = 0.5;         ///< of the bytes of all heads' rows in full, above 0, at most 1
  std::size_t length = 4096;  ///< rows of a head in full: text and question
  ModelShape shape;
  std::size_t sinks = 16;    ///< opening rows of heads that stream
  std::size_t recent = 128;  ///< duo: their latest rows, as its pattern says
};

/// Bytes of one row's key and value in bfloat16, or in so many bits with a scale and a zero in half
/// for `group` channels; 0: 32, or 16 where 32 does not divide head_dim. `bits`: 16, 8, 4 or 2.
[[nodiscard]] double row_bytes(const ModelShape& shape, std::size_t bits, std::size_t group = 0);

/// `method` with the setting that comes closest to the budget from below, as a `--plan`:
///
///   streaming_llm, sink_recent      "sink_recent:16,1008"   sinks, and the latest rows
///   headkv, snapkv, pyramid, adakv,
///   h2o, tova, keynorm              "h2o:1024"              rows per head, on average
///   duo                             "duo:0.8125"            the fewest heads stream that may
///   search                          "search:0.25,4096"      what plan search finds for the bytes
///
/// "@FILE", "+int4" and settings with a name ("headkv:kernel=29") stay where they are; bits, groups
/// and what duo's windows keep count. The latest 128 rows of quantised retrieval heads count as
/// exact. @throws ConfigError for another method, or a budget that it cannot meet: one row per
/// head, or all heads streaming.
[[nodiscard]] std::string at_equal_bytes(const std::string& method, const ByteBudget& budget);

/// A `--plan` without its numbers: "duo@gates/a+int4:0.5" is "duo@gates/a+int4",
/// "headkv:64,kernel=29" is "headkv:kernel=29".
[[nodiscard]] std::string method_of(const std::string& plan);

/// "1/4", "0.25" or "25%". @throws ConfigError unless it is a share above 0 and at most 1.
[[nodiscard]] double parse_share(const std::string& text);

}  // namespace kvpolicy::tools
