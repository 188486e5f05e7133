// SPDX-License-Identifier: Apache-2.0
//
// Reads head scores and plans from any bytes: they are refused, or what was read can be used, and reading it
// back after writing gives the same.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include <kvpolicy/io/head_scores.hpp>
#include <kvpolicy/io/plan_json.hpp>

namespace {

using namespace kvpolicy;

// Errors must be short, however long the refused text is.
void expect_short(const FormatError& error) {
  if (std::string_view{error.what()}.size() > 4000) std::abort();
}

void read_scores(std::string_view text) {
  HeadScores scores;
  try {
    scores = io::parse_head_scores(text);
  } catch (const FormatError& error) {
    return expect_short(error);
  }
  if (io::parse_head_scores(io::format_head_scores(scores)) != scores) std::abort();
  try {
    const HeadBudgets budgets = headkv_budgets(scores, 1, {.capacity = 64, .observation_window = 8});
    std::size_t sum = 0;
    for (const std::size_t budget : budgets.values()) sum += budget;
    if (sum != 56 * scores.layers()) std::abort();
  } catch (const ConfigError&) {  // for example for a negative score
  }
}

void read_plan(std::string_view text) {
  try {
    const auto plan = io::parse_plan(text);
    if (io::parse_plan(io::format_plan(plan)) != plan) std::abort();
  } catch (const FormatError& error) {
    expect_short(error);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text{reinterpret_cast<const char*>(data), size};
  read_scores(text);
  read_plan(text);
  return 0;
}
