// SPDX-License-Identifier: Apache-2.0
#include "equal_bytes.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>

#include <fmt/format.h>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>

namespace kvpolicy::tools {
namespace {

constexpr std::size_t exact_latest = 128;  // rows of a quantised head that are not

// "duo@folder+int4" is duo, its "@folder" and 4 bits.
struct Method {
  std::string name;
  std::size_t bits = 16;
};

Method parse(const std::string& method) {
  const std::size_t plus = method.rfind("+int");
  Method parsed{method.substr(0, plus), 16};
  if (plus != std::string::npos) {
    const std::string bits = method.substr(plus + 4);
    require(bits == "8" || bits == "4" || bits == "2", "the method ", method,
            ": rows may be quantised as int8, int4 or int2, not int", bits);
    parsed.bits = static_cast<std::size_t>(bits.front() - '0');
  }
  parsed.name.resize(std::min(parsed.name.find('@'), parsed.name.size()));
  return parsed;
}

// Rows, with what rounding of a share makes of a whole number put right.
std::size_t whole(double rows) { return static_cast<std::size_t>(rows + 1e-6); }

std::string duo(const std::string& method, std::size_t bits, const ByteBudget& budget) {
  const ModelShape& shape = budget.shape;
  const double dense = row_bytes(shape, 16);
  const double coded = row_bytes(shape, bits);
  const std::size_t exact = bits == 16 ? budget.length : std::min(budget.length, exact_latest);
  const double retrieving =
      static_cast<double>(exact) * dense + static_cast<double>(budget.length - exact) * coded;
  const double streaming =
      static_cast<double>(std::min(budget.length, budget.sinks + budget.recent)) * dense;
  const std::size_t heads = shape.kv_head_count();
  const double allowed =
      budget.share * static_cast<double>(heads * budget.length) * dense * (1 + 1e-9);
  for (std::size_t stream = 0; stream <= heads; ++stream) {
    const double bytes =
        static_cast<double>(stream) * streaming + static_cast<double>(heads - stream) * retrieving;
    if (bytes > allowed) continue;
    return fmt::format("{}:{}", method, static_cast<double>(stream) / static_cast<double>(heads));
  }
  throw ConfigError{fmt::format(
      "{} cannot keep as little as {:.4g} of {} rows: with every head streaming it is {:.4g}",
      method, budget.share, budget.length,
      streaming / (static_cast<double>(budget.length) * dense))};
}

}  // namespace

double row_bytes(const ModelShape& shape, std::size_t bits) {
  if (bits == 16) return static_cast<double>(2 * shape.head_dim * sizeof(bfloat16));
  const std::size_t group = shape.head_dim % 32 == 0 ? 32 : 16;
  return static_cast<double>(
      2 * (shape.head_dim * bits / 8 + shape.head_dim / group * 2 * sizeof(half)));
}

std::string at_equal_bytes(const std::string& method, const ByteBudget& budget) {
  require(budget.share > 0 && budget.share <= 1, "a share of the bytes is ", budget.share,
          ", must be above 0 and at most 1");
  const Method parsed = parse(method);
  if (parsed.name == "duo") return duo(method, parsed.bits, budget);
  if (parsed.name == "search") {
    require(parsed.bits == 16, method, ": chooses precisions by itself");
    return fmt::format("{}:{},{}", method, budget.share, budget.length);
  }
  const std::size_t rows =
      whole(budget.share * static_cast<double>(budget.length) * row_bytes(budget.shape, 16) /
            row_bytes(budget.shape, parsed.bits));
  require(rows > 0, method, " cannot keep as little as ", budget.share, " of ", budget.length,
          " rows: that is less than one row for each head");
  if (parsed.name == "streaming_llm" || parsed.name == "sink_recent") {
    require(parsed.bits == 16, method, ": its window has no setting at equal bytes when quantised");
    const std::size_t sinks = std::min(budget.sinks, rows / 2);
    return fmt::format("{}:{},{}", method, sinks, rows - sinks);
  }
  constexpr std::string_view counted[]{"headkv", "snapkv", "pyramid", "adakv",
                                       "h2o",    "tova",   "keynorm"};
  require(std::ranges::count(counted, parsed.name) > 0, method,
          " has no setting that makes it keep a share of the bytes; those that have are duo, "
          "streaming_llm, sink_recent, headkv, snapkv, pyramid, adakv, h2o, tova, keynorm and "
          "search");
  return fmt::format("{}:{}", method, std::min(rows, budget.length));
}

std::string method_of(const std::string& plan) {
  const std::size_t file = plan.find('/');  // behind it a : may be part of a name
  const std::size_t last = file == std::string::npos ? 0 : plan.rfind('/');
  return plan.substr(0, plan.find(':', last));
}

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
