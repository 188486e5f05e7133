// SPDX-License-Identifier: Apache-2.0
//
// Compares methods at equal bytes: finds the setting with which a method keeps a given share of
// what the full cache keeps. Bytes are counted for rows of KV heads at the point where the answer
// begins, not for whole pages, for which 65 rows and 128 would be the same.
#pragma once

#include <cstddef>
#include <string>

#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/storage/residual_storage.hpp>

namespace kvpolicy::tools {

/// The budget that a plan's settings are chosen for.
struct ByteBudget {
  double share = 0.5;         ///< of the bytes of all heads' full rows, above 0, at most 1
  std::size_t length = 4096;  ///< rows of a head that keeps all: text and question
  ModelShape shape;
  std::size_t sinks = 16;    ///< first rows that streaming heads keep
  std::size_t recent = 128;  ///< duo: latest rows of streaming heads, as its pattern says
};

/// Bytes of one row's key and value in bfloat16.
[[nodiscard]] double row_bytes(const ModelShape& shape);
/// The same if they are quantised, with a scale and a zero in half precision for each group; its groups must not be 0.
[[nodiscard]] double row_bytes(const ModelShape& shape, const ResidualConfig& rows);

/// Gives `method` the setting that comes closest to the budget without exceeding it, as a `--plan`:
///
///   streaming_llm, sink_recent      "sink_recent:16,1008"   sinks, and the latest rows
///   headkv, snapkv, pyramid, adakv,
///   h2o, tova, keynorm, keydiff,
///   kvzip, expected                 "h2o:1024"              rows per head, on average
///   duo                             "duo:0.8125"            the fewest heads stream that may
///   search                          "search:0.25,4096"      what plan search finds for the bytes
///
/// "@FILE", "+int4" and named settings ("headkv:kernel=29") are kept. The bytes include bits,
/// groups and the windows of duo. The exact rows of quantised retrieval heads are counted as
/// such.
/// @throws ConfigError for another method, or for a budget that the method cannot meet because it
/// is less than one row per head or less than all heads streaming take.
[[nodiscard]] std::string at_equal_bytes(const std::string& method, const ByteBudget& budget);

/// A `--plan` without its positional numbers: "duo@gates/a+int4:0.5" gives "duo@gates/a+int4",
/// "headkv:64,kernel=29" gives "headkv:kernel=29".
[[nodiscard]] std::string method_of(const std::string& plan);

/// Parses "1/4", "0.25" or "25%". @throws ConfigError unless it is a share above 0 and at most 1.
[[nodiscard]] double parse_share(const std::string& text);

}  // namespace kvpolicy::tools
