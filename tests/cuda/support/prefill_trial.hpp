// SPDX-License-Identifier: Apache-2.0
//
// One call of the prefill kernel against dense attention in double over the rows that each query is
// to see, listed one by one from what the policies promise.
//
// The bound is not a guess. With u the rounding error of E, weights are rounded once (u sum p |v|),
// the output once (u |out|); rows that are dequantised and queries that are rotated are rounded
// once more, which moves a logit by up to u sum |q k| scale. What single precision adds is small
// beside them and stands in the two constants. Where rows are rotated, queries and rows are both
// rounded, in the rotated channels; their errors are independent and stay within 0.6 of the same bound.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include <kvpolicy/cuda/kernels/prefill.cuh>
#include <kvpolicy/cuda/kernels/prefill_hopper.cuh>

#include "cuda/support/device_head.hpp"
#include "cuda/support/launch.hpp"
#include "cuda/support/tree_mask.hpp"
#include "support/tensors.hpp"

namespace test::prefill {

using namespace kvpolicy;
using namespace kvpolicy::gpu;

inline constexpr std::uint16_t guard = 0x5a5a;

struct Head {
  HeadView view;
  std::vector<int> chosen;  // chunks; all committed rows after the last chunk are read on top
  int chosen_end = 0;
};

inline Head full() { return {}; }
inline Head window(int sinks, int recent, int ring, bool prefill_chunk_mask = false) {
  Head head;
  head.view.sinks = sinks;
  head.view.recent = recent;
  head.view.exact_ring = ring;
  head.view.prefill_chunk_mask = prefill_chunk_mask;
  return head;
}
inline Head chosen(Head head, int chunk_rows, std::vector<int> chunks, int end) {
  head.view.chunk_rows = chunk_rows;
  head.view.budget_chunks = static_cast<int>(chunks.size()) + 1;
  head.chosen = std::move(chunks);
  head.chosen_end = end;
  return head;
}

struct Case {
  std::vector<Head> heads = {Head{}};
  int group = 1;
  int queries = 1;
  std::vector<int> histories = {0};  // of each sequence
  int splits = 1;
  int page_rows = 64;
  int tentative = 0;
  bool own_rows = true;
  bool selected = false;
  bool upper_half = false;
  bool padded = false;
  bool attention_sink_bias = false;
  bool log_sum_exp = true;
  int more_heads = 0;  // that the log-sum-exp has room for
  float softcap = 0.0F;
  float scale = 0.0F;   // 0: 1 / sqrt(head_dim)
  bool hopper = false;  // the kernel of prefill_hopper.cuh
  TokenTree tree = {};  // whose last nodes the queries are; those before are appended to the history
};

/// [sequences, tokens, heads, head_dim] of 16-bit numbers.
struct Numbers {
  std::vector<std::uint16_t> storage;
  gpu::Tensor tensor;

  Numbers(int sequences, int tokens, int heads, int head_dim, bool padded) {
    const long long head_stride = head_dim + (padded ? 8 : 0);
    const long long token_stride = heads * head_stride + (padded ? 24 : 0);
    const long long sequence_stride = tokens * token_stride + (padded ? 40 : 0);
    storage.assign(static_cast<std::size_t>(sequences * sequence_stride), guard);
    tensor = {reinterpret_cast<std::byte*>(storage.data()), sequence_stride, token_stride, head_stride};
  }
};

template <Element E>
double number(std::uint16_t bits) {
  E value;
  value.bits = bits;
  return static_cast<double>(static_cast<float>(value));
}

struct Row {
  std::vector<double> key;
  std::vector<double> value;
  bool rotated = false;
  bool rounded = false;  // once more, on its way to the products
};

template <Element E, int HeadDim>
class Trial {
 public:
  explicit Trial(const Case& c) : c_{c} {
    const int sequences = static_cast<int>(c.histories.size());
    const int kv_heads = static_cast<int>(c.heads.size());
    if (!c.tree.empty()) mask_ = TreeMask{c.tree, c.queries};
    test::Random random{static_cast<std::uint64_t>(c.queries * 1000 + c.histories[0])};
    q_ = std::make_unique<Numbers>(sequences, c.queries, kv_heads * c.group, HeadDim, c.padded);
    out_ = std::make_unique<Numbers>(sequences, c.queries, kv_heads * c.group, HeadDim, c.padded);
    k_ = std::make_unique<Numbers>(sequences, c.queries, kv_heads, HeadDim, c.padded);
    v_ = std::make_unique<Numbers>(sequences, c.queries, kv_heads, HeadDim, c.padded);
    fill(*q_, kv_heads * c.group, random);
    fill(*k_, kv_heads, random);
    fill(*v_, kv_heads, random);
    for (int pair = 0; pair < HeadDim / 2; ++pair) {
      frequencies_.push_back(std::pow(10000.0F, -2.0F * static_cast<float>(pair) / HeadDim));
    }
    for (int s = 0; s < sequences; ++s) {
      const int history = c.histories[static_cast<std::size_t>(s)];
      const int tokens = history + older() + (c.own_rows ? 0 : c.queries);
      const int firm = c.tree.empty() ? tokens : history;  // nodes may always be taken back
      states_.push_back({.tokens = tokens, .committed = std::max(0, firm - c.tentative)});
      for (const Head& head : c.heads) add(head, states_.back(), random);
    }
    for (int h = 0; h < kv_heads * c.group; ++h) sinks_.push_back(test::normal(random) * 2);
    log_sum_exp_.assign(static_cast<std::size_t>(sequences * c.queries * state_heads()), -7.0F);
  }

  void run() {
    if constexpr (has_hopper_prefill<HeadDim>) {
      if (c_.hopper) return run_with<HopperShape<HeadDim>>();
    }
    run_with<PrefillShape<HeadDim>>();
  }

  void check() const {
    double worst = 0;  // error in units of its bound
    bool guards = true;
    std::size_t written = 0;
    for (int s = 0; s < static_cast<int>(states_.size()); ++s) {
      for (int h = 0; h < static_cast<int>(c_.heads.size()); ++h) {
        const auto rows = rows_of(s, h);
        for (int t = 0; t < c_.queries; ++t) {
          for (int g = 0; g < c_.group; ++g) {
            worst = std::max(worst, error_of(s, h, t, h * c_.group + g, rows));
            written += HeadDim;
          }
        }
      }
    }
    // What lies between the rows stays as it was; a result may happen to look like the guard.
    std::size_t changed = 0;
    for (const std::uint16_t bits : out_->storage) changed += bits != guard ? 1 : 0;
    guards = changed <= written;
    CHECK(guards);
    CHECK(worst <= 1.0);
  }

  [[nodiscard]] const std::vector<std::uint16_t>& out() const { return out_->storage; }

 private:
  template <class Shape>
  void run_with() {
    AttendParams params;
    params.heads = views_.data();
    params.states = states_.data();
    params.sequences = static_cast<int>(states_.size());
    params.kv_heads = static_cast<int>(c_.heads.size());
    params.group = c_.group;
    params.page_rows = c_.page_rows;
    params.request = {.queries = c_.queries,
                      .own_rows = c_.own_rows,
                      .selected = c_.selected,
                      .upper_half = c_.upper_half,
                      .tree = mask_.view()};
    params.q = q_->tensor;
    if (c_.own_rows) params.k = k_->tensor, params.v = v_->tensor;
    params.out = out_->tensor;
    if (c_.log_sum_exp) params.log_sum_exp = log_sum_exp_.data();
    if (c_.more_heads > 0) params.log_sum_exp_heads = state_heads();
    if (c_.attention_sink_bias) params.attention_sink_bias = sinks_.data();
    params.scale_log2 = static_cast<float>(scale() / std::log(2.0));
    params.softcap = c_.softcap;
    params.splits = c_.splits;

    const int items = prefill_items<Shape>(params);
    const std::size_t columns =
        c_.splits == 1 ? 0 : static_cast<std::size_t>(items) * c_.splits * Shape::query_rows;
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> values(columns * HeadDim, nan);
    std::vector<PartialState> states(columns, PartialState{nan, nan});
    std::vector<std::uint32_t> tickets(c_.splits == 1 ? 0 : static_cast<std::size_t>(items), 0);
    params.workspace = {values.data(), states.data(), tickets.data()};

    bool packed = false;
    for (const Head& head : c_.heads) packed = packed || head.view.is_packed();
    if constexpr (std::is_same_v<Shape, PrefillShape<HeadDim>>) {
      auto* kernel = &prefill_kernel<E, HeadDim, false>;
      if constexpr (HeadDim == 64 || HeadDim == 128) {
        if (packed) kernel = &prefill_kernel<E, HeadDim, true>;
      }
      test::launch(kernel, items * c_.splits, 1, prefill_threads, prefill_shared_bytes<HeadDim>(), params);
    } else {
      REQUIRE(!packed);
      test::launch(&prefill_hopper_kernel<E, HeadDim>, items * c_.splits, 1, Shape::threads,
                   prefill_hopper_shared_bytes<HeadDim>(), params);
    }
    for (const std::uint32_t ticket : tickets) CHECK(ticket == 0);
  }

  static constexpr double unit = std::is_same_v<E, float16> ? 0x1p-11 : 0x1p-8;

  [[nodiscard]] int state_heads() const {
    return static_cast<int>(c_.heads.size()) * c_.group + c_.more_heads;
  }
  [[nodiscard]] double scale() const {
    return c_.scale == 0.0F ? 1.0 / std::sqrt(static_cast<double>(HeadDim)) : static_cast<double>(c_.scale);
  }

  void fill(Numbers& numbers, int heads, test::Random& random) {
    for (int s = 0; s < static_cast<int>(c_.histories.size()); ++s) {
      for (int t = 0; t < c_.queries; ++t) {
        for (int h = 0; h < heads; ++h) {
          std::uint16_t* row = numbers.tensor.row(s, t, h);
          for (int i = 0; i < HeadDim; ++i) row[i] = E{test::normal(random)}.bits;
        }
      }
    }
  }

  void add(const Head& head, const LayerState& state, test::Random& random) {
    HeadView view = head.view;
    if (view.rotation_limit > 0) view.inverse_frequencies = frequencies_.data();
    heads_.push_back(std::make_unique<test::DeviceHead<E>>(view, HeadDim, c_.page_rows, state.tokens + 1));
    test::DeviceHead<E>& made = *heads_.back();
    const auto numbers = static_cast<std::size_t>((state.tokens - view.evicted) * HeadDim);
    std::vector<float> keys(numbers), values(numbers);
    for (std::size_t i = 0; i < numbers; ++i) {
      keys[i] = test::normal(random);
      values[i] = test::normal(random) + 1.0F;
    }
    made.store(keys, values, state);
    if (view.chunk_rows > 0 && c_.selected) {
      Selections& chosen = made.selections();
      chosen.valid = 1;
      chosen.latest = 1;  // the second of the ring
      chosen.counts[1] = static_cast<int>(head.chosen.size());
      chosen.ends[1] = head.chosen_end;
      std::copy(head.chosen.begin(), head.chosen.end(), chosen.chunks + view.budget_chunks);
    }
    views_.push_back(made.view());
  }

  struct Seen {
    int position;
    bool sink;
    Row row;
    int node = -1;
  };

  [[nodiscard]] int older() const {
    return c_.tree.empty() ? 0 : static_cast<int>(c_.tree.size()) - c_.queries;
  }
  /// Where the call begins; with a tree, where the text ends.
  [[nodiscard]] int first_of(const LayerState& state) const {
    return (c_.own_rows ? state.tokens : state.tokens - c_.queries) - older();
  }
  [[nodiscard]] int position_of(const LayerState& state, int token) const {
    if (c_.tree.empty()) return first_of(state) + token;
    return first_of(state) + static_cast<int>(c_.tree.depth(static_cast<std::size_t>(older() + token)));
  }

  /// Every row that the head holds or the call brings, that its policy lets some query see.
  [[nodiscard]] std::vector<Seen> rows_of(int s, int h) const {
    const Head& head = c_.heads[static_cast<std::size_t>(h)];
    const HeadView& view = head.view;
    const LayerState& state = states_[static_cast<std::size_t>(s)];
    const auto& stored = *heads_[static_cast<std::size_t>(s) * c_.heads.size() + h];
    int first = position_of(state, 0);
    for (int t = 0; t < c_.queries; ++t) first = std::min(first, position_of(state, t));
    const int text = c_.tree.empty() ? state.tokens : first_of(state);
    std::vector<Seen> seen;
    for (int row = 0; row < state.tokens - view.evicted; ++row) {
      const int node = row + view.evicted < text ? -1 : row + view.evicted - text;
      const int position = node < 0 ? row + view.evicted
                                    : text + static_cast<int>(c_.tree.depth(static_cast<std::size_t>(node)));
      const bool sink = node < 0 ? row < view.sinks : position < view.sinks;
      if (!sink && view.recent > 0 && position < first - view.recent) continue;
      if (node < 0 && c_.selected && view.chunk_rows > 0 && row < head.chosen_end &&
          std::find(head.chosen.begin(), head.chosen.end(), row / view.chunk_rows) == head.chosen.end()) {
        continue;
      }
      // The oldest rows of the window are seen by no query where the mask is exact.
      if (!sink && view.recent > 0 && !view.prefill_chunk_mask && position <= first - view.recent) continue;
      Row r;
      const auto key = stored.row(Side::keys, row, state, c_.upper_half),
                 value = stored.row(Side::values, row, state, c_.upper_half);
      r.key.assign(key.begin(), key.end());
      r.value.assign(value.begin(), value.end());
      r.rounded = !sink && row < view.packed_end(state.committed);
      r.rotated = sink && view.rotation_limit > 0;
      seen.push_back({position, sink, std::move(r), node});
    }
    for (int t = 0; c_.own_rows && t < c_.queries; ++t) {
      const int position = position_of(state, t);
      const bool sink = position < view.sinks;
      if (!c_.tree.empty() && !sink && view.recent > 0 && position < first - view.recent) continue;
      Row r;
      for (int i = 0; i < HeadDim; ++i) {
        r.key.push_back(number<E>(k_->tensor.row(s, t, h)[i]));
        r.value.push_back(number<E>(v_->tensor.row(s, t, h)[i]));
      }
      r.rotated = sink && view.rotation_limit > 0;
      seen.push_back({position, sink, std::move(r), c_.tree.empty() ? -1 : older() + t});
    }
    return seen;
  }

  [[nodiscard]] double error_of(int s, int h, int token, int q_head, const std::vector<Seen>& rows) const {
    const HeadView& view = c_.heads[static_cast<std::size_t>(h)].view;
    const LayerState& state = states_[static_cast<std::size_t>(s)];
    const int position = position_of(state, token);
    std::vector<double> query, turned;
    for (int i = 0; i < HeadDim; ++i) query.push_back(number<E>(q_->tensor.row(s, token, q_head)[i]));
    turned = query;
    const bool turns = view.rotation_limit > 0 && position > view.rotation_limit;
    for (int i = 0; turns && i < HeadDim / 2; ++i) {
      const double angle = (view.rotation_limit - position) * static_cast<double>(frequencies_[i]);
      const double a = query[i], b = query[i + HeadDim / 2];
      turned[i] = a * std::cos(angle) - b * std::sin(angle);
      turned[i + HeadDim / 2] = b * std::cos(angle) + a * std::sin(angle);
    }

    std::vector<double> logits;
    std::vector<const Row*> visible;
    double moved = 0;  // how far rounding may move a logit
    for (const Seen& at : rows) {
      if (at.position > position) continue;
      if (at.node >= 0 && !is_ancestor_or_same(c_.tree, static_cast<std::size_t>(at.node),
                                               static_cast<std::size_t>(older() + token))) {
        continue;
      }
      const bool windowed = view.recent > 0 && !view.prefill_chunk_mask && !at.sink;
      if (windowed && at.position <= position - view.recent) continue;
      const auto& q = at.row.rotated ? turned : query;
      double dot = 0, size = 0;
      for (int i = 0; i < HeadDim; ++i) {
        dot += q[i] * at.row.key[i];
        size += std::abs(q[i] * at.row.key[i]);
      }
      dot *= scale();
      if (c_.softcap > 0) dot = c_.softcap * std::tanh(dot / c_.softcap);
      if (at.row.rounded || (at.row.rotated && turns)) {
        moved = std::max(moved, unit * size * std::abs(scale()));
      }
      logits.push_back(dot);
      visible.push_back(&at.row);
    }
    double highest = -std::numeric_limits<double>::infinity();
    for (const double logit : logits) highest = std::max(highest, logit);
    const double sink = static_cast<double>(sinks_[static_cast<std::size_t>(q_head)]);
    if (c_.attention_sink_bias) highest = std::max(highest, sink);
    double sum = c_.attention_sink_bias ? std::exp(sink - highest) : 0.0;
    for (double& logit : logits) sum += logit = std::exp(logit - highest);

    double worst = 0;
    for (int i = 0; i < HeadDim; ++i) {
      double expected = 0, spread = 0, largest = 0;
      for (std::size_t r = 0; r < visible.size(); ++r) {
        const double value = visible[r]->value[i];
        expected += logits[r] / sum * value;
        spread += logits[r] / sum * std::abs(value) * (visible[r]->rounded ? 2 : 1);
        largest = std::max(largest, std::abs(value));
      }
      const double got = number<E>(out_->tensor.row(s, token, q_head)[i]);
      const double bound =
          1.05 * (unit * (spread + std::abs(expected)) + 2 * moved * spread) + 1e-5 * largest + 1e-30;
      const double error = std::abs(got - expected) / bound;
      if (!(error <= worst)) worst = std::isnan(error) ? 1e300 : error;
    }
    if (c_.log_sum_exp) {
      const double got = static_cast<double>(
          log_sum_exp_[static_cast<std::size_t>((s * c_.queries + token) * state_heads() + q_head)]);
      if (sum == 0.0) {
        if (!(got == -std::numeric_limits<double>::infinity())) worst = 1e300;
      } else {
        const double expected = highest + std::log(sum);
        const double error = std::abs(got - expected) / (moved * 1.05 + 1e-5 * (1 + std::abs(expected)));
        if (!(error <= worst)) worst = std::isnan(error) ? 1e300 : error;
      }
    }
    return worst;
  }

  const Case& c_;
  TreeMask mask_;
  std::unique_ptr<Numbers> q_, k_, v_, out_;
  std::vector<float> frequencies_;
  std::vector<LayerState> states_;
  std::vector<std::unique_ptr<test::DeviceHead<E>>> heads_;
  std::vector<HeadView> views_;
  std::vector<float> sinks_;
  std::vector<float> log_sum_exp_;
};

}  // namespace test::prefill
