// SPDX-License-Identifier: Apache-2.0
//
// Bounds of units (kernels/bound.cuh) over heads that a seed determines, keys and queries of models and of the worst
// kind, against what the units' exact rows weigh in double.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include <kvpolicy/cuda/bound_room.hpp>
#include <kvpolicy/cuda/kernels/bound.cuh>

#include "cuda/support/device_head.hpp"
#include "cuda/support/elements.hpp"
#include "cuda/support/launch.hpp"
#include "support/tensors.hpp"

namespace test {

/// One launch over the heads of one sequence.
template <kvpolicy::Element E, int HeadDim>
class BoundTrial {
  using BoundParams = kvpolicy::gpu::BoundParams;
  static constexpr int unit_rows = kvpolicy::gpu::tile_rows;

 public:
  explicit BoundTrial(Random& random) {
    group_ = 1 + static_cast<int>(below(random, 8));
    queries_ = 1 + static_cast<int>(below(random, static_cast<std::size_t>(16 / group_)));
    page_rows_ = one_of<int>(random, {64, 128});
    tokens_ = 1 + static_cast<int>(below(random, 420));
    const std::size_t kv_heads = 1 + below(random, 3);
    for (int c = 0; c < HeadDim; ++c) signs_.push_back(below(random, 2) == 0 ? 1.0F : -1.0F);
    for (std::size_t head = 0; head < kv_heads; ++head) add_head(random);
    make_queries(random);
  }

  /// Launches the kernel and checks every unit's bound for every query; returns how many rows were bounded, each time
  /// that a query's were.
  std::size_t run(Random& random) {
    const auto columns = static_cast<std::size_t>(queries_ * group_);
    // Room for a text that is longer, as a graph's may be.
    const kvpolicy::gpu::BoundExtent extent = kvpolicy::gpu::BoundExtent::of(
        static_cast<std::size_t>(tokens_) + 64 * below(random, 3), static_cast<int>(heads_.size()),
        static_cast<int>(columns), 1 + static_cast<int>(below(random, 4)));
    if (extent.units == 0) return 0;
    // Not a number until it is written.
    std::vector<std::byte> memory(extent.bytes(), std::byte{0xff});
    kvpolicy::gpu::ArrayCarver carver{memory.data()};
    std::vector<kvpolicy::gpu::HeadView> views;
    for (const auto& head : heads_) views.push_back(head->view());
    const std::vector<kvpolicy::gpu::LayerState> states{{tokens_, tokens_}};
    BoundParams params;
    params.call.heads = views.data();
    params.call.states = states.data();
    params.call.kv_heads = static_cast<int>(heads_.size());
    params.call.group = group_;
    params.call.page_rows = page_rows_;
    params.call.request = {.queries = queries_};
    params.call.q = {reinterpret_cast<std::byte*>(q_.data()), 0, token_stride(), HeadDim};
    params.call.scale_log2 = scale_ * kvpolicy::gpu::log2_e;
    params.call.softcap = softcap_;
    params.memory = extent.carve(carver);
    params.units = extent.units;
    params.blocks = extent.blocks;
    set_order(random());
    if (columns <= 8) {
      launch<1>(params);
    } else {
      launch<2>(params);
    }
    std::size_t rows = 0;
    for (std::size_t head = 0; head < heads_.size(); ++head) rows += check(params, states[0], head);
    return rows;
  }

 private:
  [[nodiscard]] long long token_stride() const {
    return static_cast<long long>(heads_.size()) * group_ * HeadDim + 8;
  }
  template <int ColumnTiles>
  void launch(const BoundParams& params) const {
    test::launch(kvpolicy::gpu::bound_kernel<E, HeadDim, ColumnTiles>, params.blocks, params.call.kv_heads,
                 kvpolicy::gpu::bound_threads, kvpolicy::gpu::bound_shared_bytes<E, HeadDim, ColumnTiles>(),
                 params);
  }

  void add_head(Random& random) {
    kvpolicy::gpu::HeadView view{.sinks = static_cast<int>(one_of<std::size_t>(random, {0, 0, 1, 5})),
                                 .key_encoding = kvpolicy::Encoding::uint4x2,
                                 .value_encoding = kvpolicy::Encoding::uint4x2,
                                 .key_per_channel = below(random, 3) != 0,
                                 .key_hadamard = below(random, 4) == 0,
                                 .value_group = 32,
                                 .residual = static_cast<int>(below(random, 33))};
    view.key_group =
        view.key_per_channel ? one_of<int>(random, {16, 32, 64}) : one_of<int>(random, {8, 16, 32, HeadDim});
    heads_.push_back(std::make_unique<DeviceHead<E>>(view, HeadDim, page_rows_, tokens_));
    const std::size_t kind = below(random, 6);
    std::vector<float> keys;
    // Channels, and rows 16 by 16, differ in size, so that a bound by the scales of others shows.
    const auto draw_size = [&] { return std::exp2(static_cast<float>(below(random, 1000)) / 400.0F); };
    std::vector<float> of_channels(HeadDim), of_blocks(static_cast<std::size_t>(tokens_ / 16 + 2), 1.0F);
    for (float& size : of_channels) size = draw_size();
    if (below(random, 2) == 0) {
      for (float& size : of_blocks) size = draw_size();
    }
    for (int row = 0; row < tokens_; ++row) {
      const float size = of_blocks[static_cast<std::size_t>((row + 16 - view.sinks) / 16)];
      for (int c = 0; c < HeadDim; ++c) {
        keys.push_back(key(random, kind, row, c) * of_channels[static_cast<std::size_t>(c)] * size);
      }
    }
    heads_.back()->store(keys, keys, {tokens_, tokens_});
  }
  [[nodiscard]] float key(Random& random, std::size_t kind, int row, int c) const {
    const auto upper = static_cast<float>(16 * below(random, 16));
    const bool up = signs_[static_cast<std::size_t>(c)] > 0;
    switch (kind) {
      // Codes of groups whose ends are 0 and 255, as far from the middle of their upper half as can be: to the side
      // where an aligned query (below) is loudest, or to either.
      case 0:
      case 1:
        if (row % 8 < 2) return (row % 8 == 0) == up ? 255.0F : 0.0F;
        return upper + ((kind == 0 ? up : c % 2 == 0) ? 15.0F : 0.0F);
      case 2: return 3.0F + 1e-4F * normal(random);   // nearly equal
      case 3: return 100.0F + 4.0F * normal(random);  // far from zero, where half is coarse
      case 4: return 1e-6F * normal(random);          // where half has subnormal numbers
      default: return (c % 7 == 3 ? 6.0F : 1.0F) * normal(random) + (c % 5 == 0 ? 4.0F : 0.0F);
    }
  }

  void make_queries(Random& random) {
    const float size = one_of<float>(random, {1e-4F, 0.05F, 0.5F, 4.0F});
    const std::size_t kind = below(random, 3);
    std::vector<float> of_groups;  // of 8 channels
    for (int i = 0; i < HeadDim / 8; ++i) {
      of_groups.push_back(size * (below(random, 2) == 0 ? 1.0F : 0.125F));
    }
    q_.assign(static_cast<std::size_t>(queries_ * token_stride()), 0xffff);
    for (int t = 0; t < queries_; ++t) {
      for (int i = 0; i < static_cast<int>(heads_.size()) * group_ * HeadDim; ++i) {
        const auto c = static_cast<std::size_t>(i % HeadDim);
        float drawn = of_groups[c / 8];
        switch (kind) {
          case 0: drawn *= normal(random); break;
          case 1: drawn *= below(random, 5) == 0 ? -1.0F : 1.0F; break;
          default: drawn *= signs_[c] * rounded_down(random, i / HeadDim / group_, i % HeadDim);
        }
        q_[static_cast<std::size_t>(t * token_stride() + i)] = E{drawn}.bits;
      }
    }
    scale_ = below(random, 4) == 0 ? -0.2F : 1.0F / std::sqrt(static_cast<float>(HeadDim));
    softcap_ = below(random, 4) == 0 ? 30.0F : 0.0F;
  }
  /// A number whose product with a channel's scale loses much where it is rounded to half.
  [[nodiscard]] float rounded_down(Random& random, int head, int c) const {
    const DeviceHead<E>& keys = *heads_[static_cast<std::size_t>(head)];
    const bool packed = keys.view().packed_end(tokens_) > keys.view().sinks;
    const float scale =
        packed ? static_cast<float>(keys.grid_of_upper_half(Side::keys, keys.view().sinks, c).scale) : 1.0F;
    float best = 1.0F, most_lost = -1.0F;
    for (int i = 0; i < 8; ++i) {
      const auto drawn = static_cast<float>(E{1.0F + static_cast<float>(below(random, 128)) / 128.0F});
      const float product = drawn * scale;
      const float lost = (product - static_cast<float>(kvpolicy::float16{product})) / product;
      if (lost > most_lost) best = drawn, most_lost = lost;
    }
    return best;
  }
  [[nodiscard]] double query(int token, std::size_t q_head, int c) const {
    E number;
    number.bits =
        q_[static_cast<std::size_t>(token * token_stride()) + q_head * HeadDim + static_cast<std::size_t>(c)];
    return static_cast<float>(number);
  }

  std::size_t check(const BoundParams& params, const kvpolicy::gpu::LayerState& state,
                    std::size_t head) const {
    const kvpolicy::gpu::HeadView& view = heads_[head]->view();
    const int units = (view.packed_end(state.committed) - view.sinks) / unit_rows;
    REQUIRE(units <= params.units);
    const int columns = queries_ * group_;
    int below_truth = 0, above_bound = 0;
    double worst = 0;
    for (int unit = 0; unit < units; ++unit) {
      std::vector<std::vector<float>> keys;
      for (int row = 0; row < unit_rows; ++row) {
        keys.push_back(heads_[head]->row(Side::keys, view.sinks + unit * unit_rows + row, state));
      }
      for (int column = 0; column < columns; ++column) {
        const double truth =
            weight_of(keys, column / group_,
                      head * static_cast<std::size_t>(group_) + static_cast<std::size_t>(column % group_));
        const auto at = (head * static_cast<std::size_t>(columns) + static_cast<std::size_t>(column)) *
                            static_cast<std::size_t>(params.units) +
                        static_cast<std::size_t>(unit);
        const double most = params.memory.most[at];
        // NaN, which says that nothing is known, is for numbers that are not finite.
        if (!(truth <= most)) {
          ++below_truth;
          worst = std::max(worst, truth - most);
        }
        if (!(static_cast<double>(params.memory.likely[at]) <= most)) ++above_bound;
      }
    }
    CAPTURE(head);
    CAPTURE(worst);
    CHECK(below_truth == 0);
    CHECK(above_bound == 0);
    return static_cast<std::size_t>(units * unit_rows * columns);
  }
  /// log2 of what a unit's rows weigh for a query.
  [[nodiscard]] double weight_of(const std::vector<std::vector<float>>& keys, int token,
                                 std::size_t q_head) const {
    std::vector<double> logits;
    double top = -1e300;
    for (const std::vector<float>& key : keys) {
      double logit = 0;
      for (int c = 0; c < HeadDim; ++c) {
        logit += query(token, q_head, c) * static_cast<double>(key[static_cast<std::size_t>(c)]);
      }
      logit *= static_cast<double>(scale_);
      const auto cap = static_cast<double>(softcap_);
      if (cap > 0) logit = cap * std::tanh(logit / cap);
      logits.push_back(logit);
      top = std::max(top, logit);
    }
    double sum = 0;
    for (const double logit : logits) sum += std::exp(logit - top);
    return (top + std::log(sum)) / std::log(2.0);
  }

  int group_ = 1;
  int queries_ = 1;
  int page_rows_ = 64;
  int tokens_ = 0;
  float scale_ = 1.0F;
  float softcap_ = 0.0F;
  std::vector<float> signs_;  // of each channel
  std::vector<std::unique_ptr<DeviceHead<E>>> heads_;
  std::vector<std::uint16_t> q_;
};

/// A launch that a seed determines; returns how many rows were bounded, each time that a query's were.
inline std::size_t check_random_device_bounds(std::uint64_t seed) {
  Random random{seed};
  const auto run = [&]<class E, int D>() { return BoundTrial<E, D>{random}.run(random); };
  switch (seed % 4) {
    case 0: return run.template operator()<kvpolicy::float16, 64>();
    case 1: return run.template operator()<OtherElement, 64>();
    case 2: return run.template operator()<kvpolicy::float16, 128>();
    default: return run.template operator()<OtherElement, 128>();
  }
}

}  // namespace test
