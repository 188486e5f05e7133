// SPDX-License-Identifier: Apache-2.0
//
// The bytes of a recording, head after head, with numbers as ByteWriter writes them:
//
//   kept    the number of runs; for each run of rows its length, and until when its rows were kept: one
//           more than the number of the last step, 0 for none. The runs cover the text.
//   exact   the same for the steps until which rows were not quantised; no runs if no row ever is
//   steps   for each step: how the rows read are given (ReadAs); if by runs, their number, and for
//           each run the rows skipped since the one before and its length; then the number of rows with
//           attention, and for each the rows skipped and a byte, 255 times the root of the share
//
// A row that is dropped never comes back, and a row that is quantised never becomes exact again, so
// one step per row describes its history.
#include "page.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <kvpolicy/format.hpp>

#include "bytes.hpp"
#include "page_parts.hpp"

namespace kvpolicy::tools {
namespace {

using Json = nlohmann::json;

enum class ReadAs : std::uint8_t {
  nothing,         // the step has no query
  kept,            // the rows kept after the step
  before_and_new,  // the rows kept before the step, and the new rows
  runs
};

std::uint8_t level_of(float share) {
  return static_cast<std::uint8_t>(std::lround(255.0F * std::sqrt(std::clamp(share, 0.0F, 1.0F))));
}

long millionths(float share) { return std::lround(1e6F * share); }

RowRuns with_new_rows(RowRuns runs, std::size_t first, std::size_t end) {
  if (first == end) return runs;
  if (!runs.empty() && runs.back().first + runs.back().rows == first) {
    runs.back().rows += end - first;
  } else {
    runs.push_back({first, end - first});
  }
  return runs;
}

bool equal_runs(const RowRuns& one, const RowRuns& other) {
  return std::ranges::equal(
      one, other, [](const RowRun& a, const RowRun& b) { return a.first == b.first && a.rows == b.rows; });
}

class Encoder {
 public:
  /// Attention below `least_share` is omitted.
  Encoder(const Recording& recording, float least_share) : recording_{recording}, least_share_{least_share} {
    for (std::size_t head = 0; head < recording.heads.shape().kv_head_count(); ++head) {
      last_steps(head, &HeadStep::kept);
      if (always_exact(head)) {
        out_.number(0);
      } else {
        last_steps(head, &HeadStep::exact);
      }
      for (std::size_t step = 0; step < recording.steps.size(); ++step) {
        rows_read(head, step);
        attention(recording.steps[step].heads[head].attention);
      }
    }
  }

  [[nodiscard]] std::string text() const { return base64(out_.bytes()); }

 private:
  [[nodiscard]] bool always_exact(std::size_t head) const {
    return std::ranges::all_of(recording_.steps, [&](const Step& step) {
      return equal_runs(step.heads[head].kept, step.heads[head].exact);
    });
  }

  // For each row the step until which it belonged to `rows` of its head.
  void last_steps(std::size_t head, RowRuns HeadStep::*rows) {
    const auto& steps = recording_.steps;
    std::vector<std::size_t> until(recording_.tokens.size());
    for (std::size_t s = 0; s < steps.size(); ++s) {
      for (const RowRun& run : steps[s].heads[head].*rows) {
        std::fill_n(until.begin() + static_cast<std::ptrdiff_t>(run.first), run.rows, s + 1);
      }
    }
    for (std::size_t s = 0; s < steps.size(); ++s) {
      const auto end = until.begin() + static_cast<std::ptrdiff_t>(steps[s].tokens);
      const auto count = std::count_if(until.begin(), end, [&](std::size_t u) { return u > s; });
      if (static_cast<std::size_t>(count) != rows_in(steps[s].heads[head].*rows)) {
        throw std::logic_error{"write_page: a row that was dropped or quantised came back"};
      }
    }
    std::vector<std::pair<std::size_t, std::size_t>> runs;  // number of rows, until
    for (const std::size_t step : until) {
      if (runs.empty() || runs.back().second != step) runs.emplace_back(0, step);
      ++runs.back().first;
    }
    out_.number(runs.size());
    for (const auto& [count, step] : runs) {
      out_.number(count);
      out_.number(step);
    }
  }

  void rows_read(std::size_t head, std::size_t at) {
    const Step& step = recording_.steps[at];
    const HeadStep& own = step.heads[head];
    const std::size_t before = at == 0 ? 0 : recording_.steps[at - 1].tokens;
    const RowRuns none;
    const RowRuns& kept_before = at == 0 ? none : recording_.steps[at - 1].heads[head].kept;
    const auto as = [&](ReadAs how) { out_.byte(static_cast<std::uint8_t>(how)); };
    if (step.kind == StepKind::compress) {
      as(ReadAs::nothing);
    } else if (equal_runs(own.read, own.kept)) {
      as(ReadAs::kept);
    } else if (equal_runs(own.read, with_new_rows(kept_before, before, step.tokens))) {
      as(ReadAs::before_and_new);
    } else {
      as(ReadAs::runs);
      out_.number(own.read.size());
      std::size_t end = 0;
      for (const RowRun& run : own.read) {
        out_.number(run.first - end);
        out_.number(run.rows);
        end = run.first + run.rows;
      }
    }
  }

  void attention(const std::vector<RowAttention>& rows) {
    const auto shown = [&](const RowAttention& row) { return row.share >= least_share_; };
    out_.number(static_cast<std::size_t>(std::ranges::count_if(rows, shown)));
    std::size_t end = 0;
    for (const RowAttention& row : rows) {
      if (!shown(row)) continue;
      out_.number(row.row - end);
      out_.byte(level_of(row.share));
      end = row.row + 1;
    }
  }

  const Recording& recording_;
  float least_share_;
  ByteWriter out_;
};

Json heads_json(const Recording& recording, std::vector<ShownPolicy>& kinds) {
  Json heads = Json::array();
  const ModelShape& shape = recording.heads.shape();
  for (std::size_t head = 0; head < shape.kv_head_count(); ++head) {
    const auto& config = recording.heads.at(head / shape.kv_heads, head % shape.kv_heads);
    const ShownPolicy kind = shown_policy(config);
    const auto known = std::ranges::find(kinds, kind);
    const auto index = static_cast<std::size_t>(known - kinds.begin());
    if (known == kinds.end()) kinds.push_back(kind);
    Json held = Json::array();
    Json read = Json::array();
    Json unread = Json::array();
    bool bounded = false;
    for (const Step& step : recording.steps) {
      const HeadStep& own = step.heads[head];
      held.push_back(own.bytes);
      read.push_back(own.bytes_read);
      unread.push_back(own.unread ? Json{millionths(own.unread->bound), millionths(own.unread->measured)}
                                  : Json{});
      bounded = bounded || own.unread.has_value();
    }
    heads.push_back({{"kind", index},
                     {"setting", describe(config)},
                     {"bytes", std::move(held)},
                     {"bytesRead", std::move(read)}});
    if (bounded) heads.back()["unread"] = std::move(unread);
  }
  return heads;
}

Json about_json(const Recording& recording) {
  const ModelShape& shape = recording.heads.shape();
  Json about{{"model", recording.model},
             {"plan", recording.plan},
             {"layers", shape.layers},
             {"kvHeads", shape.kv_heads},
             {"group", shape.queries_per_kv()},
             {"headDim", shape.head_dim},
             {"promptTokens", recording.prompt_tokens},
             {"piece", recording.piece},
             {"tokens", recording.tokens},
             {"texts", recording.texts},
             {"steps", Json::array()},
             {"kinds", Json::array()}};
  constexpr std::array names{"prompt", "compress", "generate"};
  for (const Step& step : recording.steps) {
    about["steps"].push_back({{"kind", names[static_cast<std::size_t>(step.kind)]},
                              {"tokens", step.tokens},
                              {"bytes", step.bytes},
                              {"fullHead", step.full_head_bytes}});
  }
  std::vector<ShownPolicy> kinds;
  about["heads"] = heads_json(recording, kinds);
  for (const ShownPolicy& kind : kinds) {
    about["kinds"].push_back(
        {{"policy", kind.policy}, {"keyBits", kind.key_bits}, {"valueBits", kind.value_bits}});
  }
  return about;
}

// Writes JSON that no HTML parser takes for a tag or a comment, whatever its strings contain. In
// JSON a '<' occurs only in strings, where it can be written as an escape.
std::string script_text(const Json& json) {
  std::string text;
  for (const char c : json.dump(-1, ' ', false, Json::error_handler_t::replace)) {
    if (c == '<') {
      text += "\\u003c";
    } else {
      text += c;
    }
  }
  return text;
}

// Splits the page's frame at `mark`, which is dropped.
std::pair<std::string_view, std::string_view> split_at(std::string_view text, std::string_view mark) {
  const std::size_t at = text.find(mark);
  if (at == std::string_view::npos) {
    throw std::logic_error{"write_page: page.html lacks " + std::string{mark}};
  }
  return {text.substr(0, at), text.substr(at + mark.size())};
}

}  // namespace

ShownPolicy shown_policy(const HeadSettings<bfloat16>& config) {
  ShownPolicy kind{.policy = std::string{config.names().policy}};
  const HeadRule rule = config.rule(0);
  if (rule.is_quantized()) {
    kind.key_bits = bits_of(rule.key_encoding);
    kind.value_bits = bits_of(rule.value_encoding);
  }
  return kind;
}

HtmlPage write_page(const Recording& recording, std::size_t most_bytes) {
  const auto [before_css, after_css] = split_at(page_html, "/*page.css*/");
  const auto [before_data, after_data] = split_at(after_css, "<!--recording-->");
  const auto [before_js, after_js] = split_at(after_data, "/*page.js*/");
  Json about = about_json(recording);
  HtmlPage page;
  for (float least = recording.least_attention;; least = std::max(least * 1.25F, 0.0005F)) {
    page.least_shown = least;
    about["leastShown"] = least;
    about["rows"] = Encoder{recording, least}.text();
    page.html.clear();
    for (const std::string_view part : {before_css, page_css, before_data}) page.html += part;
    page.html += script_text(about);
    for (const std::string_view part : {before_js, page_js, after_js}) page.html += part;
    if (page.html.size() <= most_bytes || least > 1) return page;
  }
}

}  // namespace kvpolicy::tools
