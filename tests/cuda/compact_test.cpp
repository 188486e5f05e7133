// SPDX-License-Identifier: Apache-2.0
//
// Compressions of random heads: every survivor stands where it should, quantised ones code by code,
// and knows its position in the text.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include <kvpolicy/cuda/kernels/compact.cuh>

#include "cuda/support/codes.hpp"
#include "cuda/support/device_head.hpp"
#include "cuda/support/launch.hpp"
#include "cuda/support/row_oracle.hpp"
#include "support/tensors.hpp"

using kvpolicy::AffineGrid;
using kvpolicy::Encoding;
using kvpolicy::gpu::CompactParams;
using kvpolicy::gpu::HeadView;
using kvpolicy::gpu::LayerState;
using test::all_codes;
using test::below;
using test::DeviceHead;
using test::one_of;
using test::QuantizedGroup;
using test::Random;
using test::Side;

namespace {

template <class E, int HeadDim>
struct Compression {
  std::unique_ptr<DeviceHead<E>> from, to;  // null: the head does not compress
  std::vector<int> kept;
  std::vector<long long> old_positions, new_positions;
  LayerState state;
  int out_of_range = 0;

  Compression(Random& random, int page_rows, int tokens, bool compressed_before)
      : state{.tokens = tokens, .committed = tokens} {
    HeadView view;
    if constexpr (HeadDim == 64 || HeadDim == 128) {
      if (below(random, 7) > 0) all_codes[below(random, all_codes.size())].describe(view);
      view.key_group = HeadDim >> below(random, 4);
      view.value_group = HeadDim >> below(random, 4);
      view.key_hadamard = view.is_packed() && below(random, 2) == 0;
      view.value_hadamard = view.is_packed() && below(random, 2) == 0;
    }
    view.sinks = one_of(random, std::vector{0, 0, 0, 4, 64, 70});
    view.evicted = compressed_before ? static_cast<int>(below(random, 50)) : 0;
    const int rows = tokens - view.evicted;
    view.sinks = std::min(view.sinks, rows);
    HeadView next = view;
    const std::vector residuals{0, 1, 64, 100, kvpolicy::gpu::unlimited};
    view.residual = one_of(random, residuals);
    next.residual = one_of(random, residuals);

    from = std::make_unique<DeviceHead<E>>(view, HeadDim, page_rows, rows);
    std::vector<float> numbers[2];
    for (auto& side : numbers) {
      for (int i = 0; i < rows * HeadDim; ++i) side.push_back(test::normal(random));
    }
    from->store(numbers[0], numbers[1], state);

    // Survivors: the sinks and any of the others.
    const std::size_t share = one_of(random, std::vector<std::size_t>{0, 1, 2, 4, 5});
    for (int row = 0; row < rows; ++row) {
      if (row < view.sinks || below(random, 5) < share) kept.push_back(row);
    }
    const int old_count =
        compressed_before ? static_cast<int>(below(random, static_cast<std::size_t>(rows) + 1)) : 0;
    long long position = 0;
    for (int row = 0; row < old_count; ++row) {
      old_positions.push_back(position += 1 + static_cast<long long>(below(random, 3)));
    }
    new_positions.assign(kept.size(), -1);

    next.evicted = tokens - static_cast<int>(kept.size());
    to = std::make_unique<DeviceHead<E>>(next, HeadDim, page_rows, static_cast<int>(kept.size()));
    // A few numbers that cannot be quantised where they have to be.
    for (std::size_t i = 0; i < kept.size(); i += 31) {
      const int row = static_cast<int>(i);
      if (is_packed(*from, kept[i]) || below(random, 2) == 0) continue;
      from->exact(Side::keys, kept[i])[5] = 0x7fff;  // NaN
      // A rotated key has a share of the NaN in every channel.
      if (is_packed(*to, row)) out_of_range += from->rotates(Side::keys) ? HeadDim : 1;
    }
  }

  [[nodiscard]] bool is_packed(const DeviceHead<E>& head, int row) const {
    return row >= head.view().sinks && row < head.view().packed_end(state.committed);
  }

  void check() const {
    int wrong_rows = 0, wrong_codes = 0, wrong_grids = 0, wrong_positions = 0;
    for (int row = 0; row < static_cast<int>(kept.size()); ++row) {
      const int source = kept[static_cast<std::size_t>(row)];
      for (const Side side : {Side::keys, Side::values}) {
        if (!is_packed(*to, row)) {
          const std::vector<float> numbers = from->row(side, source, state);
          for (int c = 0; c < HeadDim; ++c) {
            const std::uint16_t expected = is_packed(*from, source)
                                               ? E{numbers[static_cast<std::size_t>(c)]}.bits
                                               : from->exact(side, source)[c];
            wrong_rows += to->exact(side, row)[c] != expected;
          }
          continue;
        }
        const int group = side == Side::keys ? to->view().key_group : to->view().value_group;
        for (int first = 0; first < HeadDim; first += group) {
          AffineGrid grid;
          std::vector<std::uint32_t> codes;
          if (is_packed(*from, source)) {
            grid = from->grid(side, source, first);
            for (int i = 0; i < group; ++i) codes.push_back(from->code(side, source, first + i));
          } else {
            std::vector<float> numbers = from->row(side, source, state);
            if (from->rotates(side)) kvpolicy::rotate_hadamard(numbers);
            const auto begin = numbers.begin() + first;
            numbers = {begin, begin + group};
            const HeadView& view = to->view();
            const QuantizedGroup quantized{numbers,
                                           side == Side::keys ? view.key_encoding : view.value_encoding};
            grid = quantized.grid;
            codes = quantized.codes;
          }
          const AffineGrid there = to->grid(side, row, first);
          wrong_grids += there.scale != grid.scale || there.zero != grid.zero;
          for (int i = 0; i < group; ++i) {
            wrong_codes += to->code(side, row, first + i) != codes[static_cast<std::size_t>(i)];
          }
        }
      }
      const auto at = static_cast<std::size_t>(source);
      const long long position =
          at < old_positions.size() ? old_positions[at] : source + from->view().evicted;
      wrong_positions += new_positions[static_cast<std::size_t>(row)] != position;
    }
    CHECK(wrong_rows == 0);
    CHECK(wrong_codes == 0);
    CHECK(wrong_grids == 0);
    CHECK(wrong_positions == 0);
  }
};

template <class E, int HeadDim>
void check_compressions(unsigned first_seed, unsigned seeds) {
  for (unsigned seed = first_seed; seed < first_seed + seeds; ++seed) {
    CAPTURE(seed);
    CAPTURE(HeadDim);
    test::set_order(seed);
    Random random{seed};
    const int page_rows = below(random, 2) == 0 ? 64 : 128;
    const int tokens = 50 + one_of(random, std::vector{0, 1, 13, 14, 15, 78, 150, 300});
    const bool compressed_before = below(random, 2) == 0;
    std::vector<std::unique_ptr<Compression<E, HeadDim>>> heads;
    std::vector<HeadView> from, to;
    std::vector<const int*> kept;
    std::vector<int> counts, old_counts;
    std::vector<const long long*> old_positions;
    std::vector<long long*> new_positions;
    const auto out_of_range = std::make_unique<int>(0);
    int expected_out_of_range = 0, tiles = 1;
    for (int h = 0; h < 3; ++h) {
      heads.push_back(
          std::make_unique<Compression<E, HeadDim>>(random, page_rows, tokens, compressed_before));
      auto& head = *heads.back();
      from.push_back(head.from->view());
      to.push_back(head.to->view());
      const bool compresses = h != 1 || below(random, 2) == 0;
      counts.push_back(static_cast<int>(head.kept.size()));
      head.kept.push_back(-1);  // so that no list is empty
      head.new_positions.push_back(-1);
      kept.push_back(compresses ? head.kept.data() : nullptr);
      old_counts.push_back(static_cast<int>(head.old_positions.size()));
      old_positions.push_back(head.old_positions.data());
      new_positions.push_back(head.new_positions.data());
      if (compresses) {
        expected_out_of_range += head.out_of_range;
        tiles = std::max(tiles, kvpolicy::gpu::compact_tiles(counts.back(), to.back().sinks));
      }
    }
    const CompactParams params{.from = from.data(),
                               .to = to.data(),
                               .kv_heads = 3,
                               .page_rows = page_rows,
                               .kept = kept.data(),
                               .counts = counts.data(),
                               .old_positions = compressed_before ? old_positions.data() : nullptr,
                               .old_counts = compressed_before ? old_counts.data() : nullptr,
                               .new_positions = new_positions.data(),
                               .out_of_range = out_of_range.get()};
    test::launch(kvpolicy::gpu::compact_kernel<E, HeadDim>, below(random, 4) == 0 ? 1 : tiles, 3,
                 kvpolicy::gpu::write_threads, kvpolicy::gpu::compact_shared_bytes<HeadDim>(), params);
    CHECK(*out_of_range == expected_out_of_range);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      CHECK(heads[h]->kept.back() == -1);
      CHECK(heads[h]->new_positions.back() == -1);
      heads[h]->kept.pop_back();
      if (kept[h] != nullptr) heads[h]->check();
    }
  }
}

}  // namespace

TEST_CASE("survivors keep their numbers, codes and positions") {
  check_compressions<kvpolicy::bfloat16, 128>(1000, 20);
  check_compressions<kvpolicy::float16, 128>(2000, 20);
  check_compressions<kvpolicy::bfloat16, 64>(3000, 30);
  check_compressions<kvpolicy::float16, 64>(4000, 30);
  check_compressions<kvpolicy::float16, 80>(5000, 6);
  check_compressions<kvpolicy::bfloat16, 96>(6000, 6);
  check_compressions<kvpolicy::bfloat16, 256>(7000, 6);
}
