// SPDX-License-Identifier: Apache-2.0
#include "equal_bytes.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>

#include <fmt/format.h>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/low_bits.hpp>

#include "../common/plan_name.hpp"

namespace kvpolicy::tools {
namespace {

// Rounds rows down; the small addend keeps whole numbers whole after the rounding of a share.
std::size_t whole(double rows) { return static_cast<std::size_t>(rows + 1e-6); }

std::string duo(PlanName& plan, const ByteBudget& budget) {
  const ModelShape& shape = budget.shape;
  const double dense = row_bytes(shape);
  double coded = dense;
  std::size_t exact = budget.length;
  if (!plan.storage.empty()) {
    const LowBitFormat format = io::text_format(plan, plan.storage, shape);
    coded = row_bytes(shape, format.storage);
    exact = std::min(budget.length, format.sinks + format.storage.residual);
  }
  const std::size_t window = plan.count("sinks", budget.sinks) + plan.count("recent", budget.recent);
  const double retrieving =
      static_cast<double>(exact) * dense + static_cast<double>(budget.length - exact) * coded;
  const double streaming = static_cast<double>(std::min(budget.length, window)) * dense;
  const std::size_t heads = shape.kv_head_count();
  const double allowed = budget.share * static_cast<double>(heads * budget.length) * dense * (1 + 1e-9);
  for (std::size_t stream = 0; stream <= heads; ++stream) {
    const double bytes =
        static_cast<double>(stream) * streaming + static_cast<double>(heads - stream) * retrieving;
    if (bytes > allowed) continue;
    return plan.with_numbers(fmt::format("{}", static_cast<double>(stream) / static_cast<double>(heads)));
  }
  throw ConfigError{fmt::format(
      "{} cannot keep as little as {:.4g} of {} rows: with every head streaming it is {:.4g}", plan.text,
      budget.share, budget.length, streaming / (static_cast<double>(budget.length) * dense))};
}

}  // namespace

double row_bytes(const ModelShape& shape) {
  return static_cast<double>(2 * shape.head_dim * sizeof(bfloat16));
}

double row_bytes(const ModelShape& shape, const ResidualConfig& rows) {
  const auto channels = static_cast<double>(shape.head_dim);
  const auto bits = static_cast<double>(bits_of(rows.key_encoding()) + bits_of(rows.value_encoding()));
  const auto params = [&](Codebook codebook, std::size_t group) {
    if (group == 0) group = ResidualConfig::usual_group(codebook, shape.head_dim);
    return channels / static_cast<double>(group) * static_cast<double>(param_bytes_of_group(codebook));
  };
  return channels * bits / 8 + params(rows.key_codebook, rows.key_group) +
         params(rows.value_codebook, rows.value_group);
}

std::string at_equal_bytes(const std::string& method, const ByteBudget& budget) {
  require(budget.share > 0 && budget.share <= 1, "a share of the bytes is ", budget.share,
          ", must be above 0 and at most 1");
  PlanName plan{method};
  const bool exact = plan.storage.empty();
  if (plan.name == "duo") return duo(plan, budget);
  if (plan.name == "search") {
    require(exact, method, ": chooses precisions by itself");
    return plan.with_numbers(fmt::format("{},{}", budget.share, budget.length));
  }
  const std::size_t rows =
      whole(budget.share * static_cast<double>(budget.length) * row_bytes(budget.shape) /
            (exact ? row_bytes(budget.shape)
                   : row_bytes(budget.shape, io::row_format(plan, plan.storage, budget.shape, 0))));
  require(rows > 0, method, " cannot keep as little as ", budget.share, " of ", budget.length,
          " rows: that is less than one row for each head");
  if (plan.name == "streaming_llm" || plan.name == "sink_recent") {
    require(exact, method, ": its window has no setting at equal bytes when quantised");
    const std::size_t sinks = std::min(budget.sinks, rows / 2);
    return plan.with_numbers(fmt::format("{},{}", sinks, rows - sinks));
  }
  constexpr std::string_view counted[]{"headkv", "snapkv",  "criticalkv", "pyramid", "adakv",   "h2o",
                                       "tova",   "keynorm", "keydiff",    "kvzip",   "expected"};
  require(
      std::ranges::count(counted, plan.name) > 0, method,
      " has no setting that makes it keep a share of the bytes; those that have are duo, "
      "streaming_llm, sink_recent, headkv, snapkv, criticalkv, pyramid, adakv, h2o, tova, keynorm, keydiff, "
      "kvzip, expected and search");
  const std::size_t capacity = std::min(rows, budget.length);
  // Budgets by the shares of a file also say how many rows a head can have at most.
  constexpr std::string_view shared[]{"keynorm", "keydiff", "expected"};
  if (!plan.source.empty() && std::ranges::count(shared, plan.name) > 0) {
    return plan.with_numbers(fmt::format("{},{}", capacity, budget.length));
  }
  return plan.with_numbers(fmt::format("{}", capacity));
}

std::string method_of(const std::string& plan) { return PlanName{plan}.method(); }

double parse_share(const std::string& text) {
  const auto number = [&](std::string_view digits) {
    double value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    require(error == std::errc{} && end == digits.data() + digits.size(), "'", text,
            "' is not a share: write 1/4, 0.25 or 25%");
    return value;
  };
  const std::string_view all{text};
  const std::size_t slash = all.find('/');
  const double share = slash != std::string_view::npos
                           ? number(all.substr(0, slash)) / number(all.substr(slash + 1))
                       : all.ends_with('%') ? number(all.substr(0, all.size() - 1)) / 100
                                            : number(all);
  require(share > 0 && share <= 1, "'", text, "' must be a share above 0 and at most 1");
  return share;
}

}  // namespace kvpolicy::tools
