// SPDX-License-Identifier: Apache-2.0
//
// A layer of any heads, a call over it, and what the call must give: float64, plain loops over the
// rows that each head's policy shows to each query, listed one by one. Which rows those are is said
// here anew, without the kernels' segments.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include <kvpolicy/cuda/kernels/attend.cuh>

#include "device_head.hpp"
#include "support/tensors.hpp"
#include "tree_mask.hpp"

namespace test {

namespace gpu = kvpolicy::gpu;

/// A head and its text. `view` is as HeadView, without addresses.
struct HeadCase {
  gpu::HeadView view;
  int tokens = 0;
  int committed = 0;
  std::vector<int> chosen = {};  ///< chunks, ascending, where the view selects
  int chosen_end = 0;            ///< rows after which every row is read
  bool turns_sinks = false;      ///< in-cache positions
  float key_size = 1.0F;         ///< standard deviation of the cached numbers
  float value_size = 1.0F;
  float value_growth = 1.0F;  ///< from a row to the next one
};

struct CallCase {
  int queries = 1;
  bool own_rows = true;
  bool selected = false;
  bool upper_half = false;
  float softcap = 0.0F;
  bool attention_sink_bias = false;
  float loudness = 1.5F;          ///< of the queries
  kvpolicy::TokenTree tree = {};  ///< whose last nodes the queries are; those before are appended
};

/// Sequences of heads; heads of one sequence share its state.
template <kvpolicy::Element E>
class DecodeLayer {
 public:
  DecodeLayer(int head_dim, int group, int kv_heads, int page_rows, std::vector<HeadCase> heads,
              const CallCase& call, std::uint32_t seed)
      : head_dim_{head_dim},
        group_{group},
        kv_heads_{kv_heads},
        page_rows_{page_rows},
        cases_{std::move(heads)},
        call_{call},
        random_{seed} {
    if (!call_.tree.empty()) mask_ = TreeMask{call_.tree, call_.queries};
    const std::size_t sequences = cases_.size() / static_cast<std::size_t>(kv_heads);
    for (int i = 0; i < head_dim / 2; ++i) {
      frequencies_.push_back(static_cast<float>(std::pow(10000.0, -2.0 * i / static_cast<double>(head_dim))));
    }
    for (HeadCase& head : cases_) {
      if (head.turns_sinks) head.view.inverse_frequencies = frequencies_.data();
      owned_.push_back(std::make_unique<DeviceHead<E>>(head.view, head_dim, page_rows,
                                                       std::max(1, head.tokens - head.view.evicted)));
      DeviceHead<E>& device = *owned_.back();
      const int rows = head.tokens - head.view.evicted;
      const auto width = static_cast<std::size_t>(head_dim);
      const std::size_t numbers = static_cast<std::size_t>(rows) * width;
      std::vector<float> keys = normal(numbers);
      std::vector<float> values = normal(numbers);
      for (std::size_t i = 0; i < numbers; ++i) {
        keys[i] *= head.key_size;
        values[i] *= head.value_size * std::pow(head.value_growth, static_cast<float>(i / width));
      }
      device.store(keys, values, {head.tokens, head.committed});
      if (head.view.chunk_rows > 0) {
        gpu::Selections& chosen = device.selections();
        chosen.latest = 1;
        chosen.valid = head.chosen.empty() ? 0 : 1;
        chosen.ends[1] = head.chosen_end;
        chosen.counts[1] = static_cast<int>(head.chosen.size());
        std::copy(head.chosen.begin(), head.chosen.end(),
                  chosen.chunks + chosen.latest * head.view.budget_chunks);
      }
      views_.push_back(device.view());
      Rows seen;
      for (int row = 0; row < rows; ++row) {
        for (const Side side : {Side::keys, Side::values}) {
          const auto own = device.row(side, row, {head.tokens, head.committed}, call_.upper_half);
          auto& all = side == Side::keys ? seen.keys : seen.values;
          all.insert(all.end(), own.begin(), own.end());
        }
      }
      rows_.push_back(std::move(seen));
    }
    for (std::size_t s = 0; s < sequences; ++s) {
      const HeadCase& head = cases_[s * static_cast<std::size_t>(kv_heads)];
      states_.push_back({head.tokens, head.committed});
    }
    // Rows with room between them, to be stepped over.
    const int rows = static_cast<int>(sequences) * call.queries;
    q_ = tensor(q_data_, rows, kv_heads * group, 8, call.loudness);
    k_ = tensor(k_data_, rows, kv_heads, 16, 1.0F);
    v_ = tensor(v_data_, rows, kv_heads, 0, 1.0F);
    for (int h = 0; h < kv_heads * group; ++h) {
      sinks_.push_back(h % 5 == 4 ? -std::numeric_limits<float>::infinity()
                                  : 0.5F * static_cast<float>(h) - 1.0F);
    }
  }

  struct Result {
    std::vector<double> out;  ///< [sequences, queries, q_heads, head_dim]
    std::vector<double> log_sum_exp;
    // For each output, means by the rows' weights of what roundings are relative to:
    std::vector<double> magnitude;  ///< the values' magnitudes
    std::vector<double> range;      ///< the ranges of the groups that the values are in
    std::vector<double> spread;     ///< the values' distances from the output
  };

  [[nodiscard]] gpu::AttendParams params() const {
    gpu::AttendParams p;
    p.heads = views_.data();
    p.states = states_.data();
    p.sequences = static_cast<int>(states_.size());
    p.kv_heads = kv_heads_;
    p.group = group_;
    p.page_rows = page_rows_;
    p.request = {call_.queries, call_.own_rows, call_.selected, call_.upper_half, mask_.view()};
    p.q = q_;
    if (call_.own_rows) {
      p.k = k_;
      p.v = v_;
    }
    p.attention_sink_bias = call_.attention_sink_bias ? sinks_.data() : nullptr;
    p.scale_log2 = scale() * gpu::log2_e;
    p.softcap = call_.softcap;
    return p;
  }
  [[nodiscard]] std::size_t rows_out() const {
    return states_.size() * static_cast<std::size_t>(call_.queries * kv_heads_ * group_);
  }
  [[nodiscard]] std::size_t heads() const { return views_.size(); }
  [[nodiscard]] int head_dim() const { return head_dim_; }
  [[nodiscard]] int columns() const { return call_.queries * group_; }
  [[nodiscard]] bool packed() const {
    return std::any_of(views_.begin(), views_.end(), [](const auto& v) { return v.is_packed(); });
  }
  /// The cached numbers, to be spoiled.
  [[nodiscard]] DeviceHead<E>& device(std::size_t head) { return *owned_[head]; }
  [[nodiscard]] const std::vector<HeadCase>& cases() const { return cases_; }

  [[nodiscard]] Result oracle() const {
    Result result;
    for (int s = 0; s < static_cast<int>(states_.size()); ++s) {
      for (int j = 0; j < call_.queries; ++j) {
        for (int h = 0; h < kv_heads_ * group_; ++h) add_row(result, s, j, h);
      }
    }
    return result;
  }

 private:
  [[nodiscard]] float scale() const { return 1.0F / std::sqrt(static_cast<float>(head_dim_)); }

  std::vector<float> normal(std::size_t count) {
    std::vector<float> numbers(count);
    for (float& x : numbers) x = test::normal(random_);
    return numbers;
  }
  gpu::Tensor tensor(std::vector<std::uint16_t>& data, int rows, int heads, int gap, float loudness) {
    const long long pitch = static_cast<long long>(heads) * head_dim_ + gap;
    data.assign(static_cast<std::size_t>(rows * pitch), 0xffff);
    for (int r = 0; r < rows; ++r) {
      for (int i = 0; i < heads * head_dim_; ++i) {
        data[static_cast<std::size_t>(r * pitch + i)] = E{loudness * test::normal(random_)}.bits;
      }
    }
    return {reinterpret_cast<std::byte*>(data.data()), call_.queries * pitch, pitch, head_dim_};
  }
  static double number(const std::uint16_t* row, int channel) {
    E x;
    x.bits = row[channel];
    return static_cast<float>(x);
  }

  void add_row(Result& result, int sequence, int query, int q_head) const {
    const std::size_t h = static_cast<std::size_t>(sequence * kv_heads_ + q_head / group_);
    const HeadCase& head = cases_[h];
    const gpu::LayerState& state = states_[static_cast<std::size_t>(sequence)];
    // With a tree, `first` is where the text ends.
    const bool tree = !call_.tree.empty();
    const int older = tree ? static_cast<int>(call_.tree.size()) - call_.queries : 0;
    const int first = (call_.own_rows ? state.tokens : state.tokens - call_.queries) - older;
    const auto place_of = [&](int i) {
      return tree ? first + static_cast<int>(call_.tree.depth(static_cast<std::size_t>(older + i)))
                  : first + i;
    };
    const int position = place_of(query);
    int lowest = place_of(0);
    for (int i = 0; i < call_.queries; ++i) lowest = std::min(lowest, place_of(i));
    std::vector<double> q, turned;
    for (int c = 0; c < head_dim_; ++c) q.push_back(number(q_.row(sequence, query, q_head), c));
    turned = q;
    if (head.turns_sinks) {
      const double steps = std::min(position, head.view.rotation_limit) - position;
      for (int c = 0; c < head_dim_ / 2; ++c) {
        const std::size_t low = static_cast<std::size_t>(c);
        const std::size_t high = low + static_cast<std::size_t>(head_dim_ / 2);
        const double angle = steps * static_cast<double>(frequencies_[low]);
        turned[low] = q[low] * std::cos(angle) - q[high] * std::sin(angle);
        turned[high] = q[high] * std::cos(angle) + q[low] * std::sin(angle);
      }
    }

    std::vector<double> logits;
    std::vector<std::vector<double>> values;
    const auto show = [&](bool sink, auto key, auto value) {
      double dot = 0;
      std::vector<double> row;
      for (int c = 0; c < head_dim_; ++c) {
        dot += (sink && head.turns_sinks ? turned : q)[static_cast<std::size_t>(c)] * key(c);
        row.push_back(value(c));
      }
      double logit = dot * static_cast<double>(scale());
      if (call_.softcap > 0) logit = call_.softcap * std::tanh(logit / call_.softcap);
      logits.push_back(logit);
      values.push_back(std::move(row));
    };
    const int recent = head.view.recent;
    const auto within = [&](int token) {
      if (token > position) return false;
      if (recent == 0) return true;
      return head.view.prefill_chunk_mask ? token >= lowest - recent : token > position - recent;
    };
    const auto show_stored = [&](bool sink, int row) {
      const auto at = static_cast<std::size_t>(row) * static_cast<std::size_t>(head_dim_);
      show(
          sink, [&](int c) { return rows_[h].keys[at + static_cast<std::size_t>(c)]; },
          [&](int c) { return rows_[h].values[at + static_cast<std::size_t>(c)]; });
    };
    const auto show_own = [&](bool sink, int j) {
      show(
          sink, [&](int c) { return number(k_.row(sequence, j, q_head / group_), c); },
          [&](int c) { return number(v_.row(sequence, j, q_head / group_), c); });
    };
    for (int row = 0; row < (tree ? first : state.tokens) - head.view.evicted; ++row) {
      const bool sink = row < head.view.sinks;
      const int token = sink ? row : row + head.view.evicted;
      if (sink ? token > position : !within(token)) continue;
      if (call_.selected && !head.chosen.empty() && row < head.chosen_end) {
        const auto chunk = row / head.view.chunk_rows;
        if (std::find(head.chosen.begin(), head.chosen.end(), chunk) == head.chosen.end()) continue;
      }
      show_stored(sink, row);
    }
    for (int node = 0; node < static_cast<int>(call_.tree.size()); ++node) {
      const auto number = static_cast<std::size_t>(node);
      if (!is_ancestor_or_same(call_.tree, number, static_cast<std::size_t>(older + query))) continue;
      const int token = first + static_cast<int>(call_.tree.depth(number));
      const bool sink = token < head.view.sinks;
      if (!sink && !within(token)) continue;
      if (node >= older && call_.own_rows) {
        show_own(sink, node - older);
      } else {
        show_stored(sink, first - head.view.evicted + node);
      }
    }
    for (int j = 0; !tree && call_.own_rows && j < call_.queries; ++j) {
      const bool sink = first + j < head.view.sinks;
      if (sink ? first + j > position : !within(first + j)) continue;
      show_own(sink, j);
    }

    constexpr double nothing = -std::numeric_limits<double>::infinity();
    const double extra = call_.attention_sink_bias ? sinks_[static_cast<std::size_t>(q_head)] : nothing;
    double max = extra;
    for (const double x : logits) max = std::max(max, x);
    double sum = extra == nothing ? 0.0 : std::exp(extra - max);
    std::vector<double> out(static_cast<std::size_t>(head_dim_));
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const double weight = std::exp(logits[i] - max);
      sum += weight;
      for (std::size_t c = 0; c < out.size(); ++c) out[c] += weight * values[i][c];
    }
    for (double& x : out) x = sum > 0 ? x / sum : 0.0;
    add_magnitudes(result, head.view.is_packed() ? head.view.value_group : 1, logits, values, out, max, sum);
    result.out.insert(result.out.end(), out.begin(), out.end());
    result.log_sum_exp.push_back(sum > 0 ? max + std::log(sum) : nothing);
  }

  static void add_magnitudes(Result& result, int group, const std::vector<double>& logits,
                             const std::vector<std::vector<double>>& values, const std::vector<double>& out,
                             double max, double sum) {
    const std::size_t dim = out.size(), at = result.magnitude.size(), width = static_cast<std::size_t>(group);
    for (auto* of : {&result.magnitude, &result.range, &result.spread}) of->resize(at + dim);
    double* const magnitude = result.magnitude.data() + at;
    double* const range = result.range.data() + at;
    double* const spread = result.spread.data() + at;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const double weight = std::exp(logits[i] - max) / sum;
      const double* const row = values[i].data();
      for (std::size_t first = 0; first < dim; first += width) {
        const auto [least, largest] = std::minmax_element(row + first, row + first + width);
        const double weighed = weight * (*largest - *least);
        for (std::size_t c = first; c < first + width; ++c) {
          magnitude[c] += weight * std::fabs(row[c]);
          range[c] += weighed;
          spread[c] += weight * std::fabs(row[c] - out[c]);
        }
      }
    }
  }

  /// A head's rows as attention must see them, [rows, head_dim].
  struct Rows {
    std::vector<float> keys, values;
  };

  int head_dim_, group_, kv_heads_, page_rows_;
  std::vector<HeadCase> cases_;
  CallCase call_;
  TreeMask mask_;
  Random random_;
  std::vector<float> frequencies_;
  std::vector<std::unique_ptr<DeviceHead<E>>> owned_;
  std::vector<Rows> rows_;
  std::vector<gpu::HeadView> views_;
  std::vector<gpu::LayerState> states_;
  std::vector<std::uint16_t> q_data_, k_data_, v_data_;
  gpu::Tensor q_, k_, v_;
  std::vector<float> sinks_;
};

}  // namespace test
