// SPDX-License-Identifier: Apache-2.0
#include "attended_rows.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/cpu.hpp>
#include <reference_model/run.hpp>

#include "watching_engine.hpp"

namespace kvpolicy::tools {
namespace {

using Engine = WatchingEngine<cpu::Engine<>>;
using Cache = KvCache<bfloat16, Engine>;

constexpr std::size_t prefill_chunk = 512;
constexpr std::size_t sinks = 16;  // of the streaming head

// The rows of a segment list, by position: 1 where a row is in it.
std::vector<char> marked(const SegmentList& shown, std::size_t rows) {
  std::vector<char> marks(rows, 0);
  for (const Segment& segment : shown) {
    segment.for_each_run([&](const RowRun& run) {
      for (std::size_t row = run.first; row < run.first + run.rows; ++row) {
        marks[static_cast<std::size_t>(segment.position_of(row))] = 1;
      }
    });
  }
  return marks;
}

double sum(std::span<const float> shares) { return std::accumulate(shares.begin(), shares.end(), 0.0); }

// What the first query chose, and the length of the text with it.
struct FirstChoice {
  std::vector<char> rows;
  std::size_t tokens = 0;
};

AttendedShares shares_of(std::vector<float> attention, const std::vector<char>& chosen,
                         const FirstChoice& first, std::size_t chunk) {
  AttendedShares shares;
  // Rows after the last whole chunk are shown to whatever query, so they are no choice.
  const std::size_t choosable = first.tokens / chunk * chunk;
  std::size_t shown = 0, again = 0, first_chosen = 0;
  for (std::size_t row = 0; row < attention.size(); ++row) {
    const bool own = chosen[row] != 0;
    const bool before = row >= first.tokens || first.rows[row] != 0;
    if (own) ++shown;
    if (own) shares.chosen += attention[row];
    if (before) shares.fixed += attention[row];
    if (row >= choosable || first.rows[row] == 0) continue;
    ++first_chosen;
    if (own) ++again;
  }
  shares.overlap = first_chosen == 0 ? 1.0 : static_cast<double>(again) / static_cast<double>(first_chosen);
  const std::size_t opening = std::min(sinks, shown);
  shares.latest = sum(std::span{attention}.first(opening)) + sum(std::span{attention}.last(shown - opening));
  std::ranges::nth_element(attention, attention.begin() + static_cast<std::ptrdiff_t>(shown), std::greater{});
  shares.best = sum(std::span{attention}.first(shown));
  return shares;
}

HeadPlan<bfloat16> plan_of(const reference::Llama& model, const SpeculationSetup& setup) {
  auto plan = target_plan(model.config().shape(), setup);
  reference::limit_windows(plan, model.config());
  return plan;
}

}  // namespace

struct AttendedRows::Text {
  explicit Text(const reference::Llama& own)
      : model{&own}, cache{plan_of(own, {}), CacheOptions{}, Engine{watch}} {}

  const reference::Llama* model;
  Watch watch;
  Cache cache;
};

AttendedRows::AttendedRows(const reference::Llama& model, std::span<const int> text)
    : text_{std::make_unique<Text>(model)} {
  text_->watch.least_attention = std::numeric_limits<float>::infinity();
  static_cast<void>(reference::prefill(model, text_->cache, text, prefill_chunk));
  text_->watch.least_attention = 0;
}
AttendedRows::~AttendedRows() = default;

std::vector<std::vector<AttendedShares>> AttendedRows::follow(const SpeculationSetup& setup,
                                                              std::span<const int> next) const {
  const reference::Llama& model = *text_->model;
  Cache cache = text_->cache.fork_as(plan_of(model, setup));
  const ModelShape& shape = cache.plan().shape();
  std::vector<FirstChoice> first(shape.kv_head_count());
  std::vector<std::vector<AttendedShares>> result;
  for (const int token : next) {
    std::vector<AttendedShares>& shares = result.emplace_back();
    const auto attend = [&](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                            TensorView<const float> v, TensorView<float> out) {
      cache.step(layer, q, k, v, out, {.read = Read::all, .refresh_selection = true});
      for (std::size_t head = 0; head < shape.kv_heads; ++head) {
        const std::size_t rows = cache.tokens(layer);
        std::vector<float> attention(rows, 0.0F);
        for (const RowAttention& row : text_->watch.heads[head].attention) {
          attention[row.row] = row.share;
        }
        const std::vector<char> chosen = marked(cache.segments(layer, head, Read::selected), rows);
        FirstChoice& own = first[layer * shape.kv_heads + head];
        if (own.rows.empty()) own = {chosen, rows};
        shares.push_back(shares_of(std::move(attention), chosen, own, setup.chunk));
      }
    };
    static_cast<void>(model.forward(std::span{&token, 1}, cache.tokens(), attend, LogitsOf::none));
  }
  return result;
}

}  // namespace kvpolicy::tools
