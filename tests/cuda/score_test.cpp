// SPDX-License-Identifier: Apache-2.0
//
// Chunk scores against plain loops in double.
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include <kvpolicy/cuda/kernels/score.cuh>

#include "cuda/support/device_head.hpp"
#include "cuda/support/forbid.hpp"
#include "cuda/support/launch.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;
using namespace kvpolicy::gpu;

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float untouched = -12345.0F;

struct Case {
  int kv_heads = 4;
  int group = 1;
  int page_rows = 64;
  int chunks = 5;  // of the first sequence; the second has two thirds of them
  int blocks = 1;
};

template <Element E, int HeadDim>
void check(const Case& c) {
  CAPTURE(HeadDim);
  CAPTURE(c.group);
  CAPTURE(c.chunks);
  CAPTURE(c.blocks);
  constexpr int sequences = 2, queries = 3, chunk_rows = 2;
  test::Random random{static_cast<std::uint64_t>(c.chunks * 64 + c.group)};
  const int q_heads = c.kv_heads * c.group;

  // Heads in turn: mean keys, bounds, no selection, a budget that takes everything.
  std::vector<LayerState> states;
  std::vector<std::unique_ptr<test::DeviceHead<E>>> heads;
  std::vector<HeadView> views;
  for (int s = 0; s < sequences; ++s) {
    const int chunks = s == 0 ? c.chunks : c.chunks * 2 / 3;
    // One open chunk, and tentative rows that would close it.
    states.push_back({.tokens = chunks * chunk_rows + 7, .committed = chunks * chunk_rows + 1});
    for (int h = 0; h < c.kv_heads; ++h) {
      HeadView view;
      view.chunk_rows = h % 4 == 2 ? 0 : chunk_rows;
      view.budget_chunks = h % 4 == 3 ? c.chunks + 1 : h % 4 == 2 ? 0 : 1;
      view.min_max = h % 4 == 1;
      heads.push_back(
          std::make_unique<test::DeviceHead<E>>(view, HeadDim, c.page_rows, chunks * chunk_rows + 8));
      views.push_back(heads.back()->view());
      for (int i = 0; i < chunks && view.chunk_rows > 0; ++i) {
        for (int v = 0; v < (view.min_max ? 2 : 1); ++v) {
          for (int d = 0; d < HeadDim; ++d) {
            heads.back()->summary(i, v)[d] = E{test::normal(random)}.bits;
          }
        }
      }
      for (int i = chunks; i % c.page_rows != 0 && view.chunk_rows > 0; ++i) {
        for (int v = 0; v < (view.min_max ? 2 : 1); ++v) {
          test::forbid(heads.back()->summary(i, v), HeadDim);
        }
      }
    }
  }
  // Strides that nothing divides, and NaN for all but the last query.
  const long long token_stride = q_heads * (HeadDim + 3) + 5;
  std::vector<std::uint16_t> q(static_cast<std::size_t>(sequences * queries * token_stride), 0xffff);
  const auto at = [&](int s, int head, int d) {
    return static_cast<std::size_t>((s * queries + queries - 1) * token_stride + head * (HeadDim + 3) + d);
  };
  for (int s = 0; s < sequences; ++s) {
    for (int head = 0; head < q_heads; ++head) {
      for (int d = 0; d < HeadDim; ++d) q[at(s, head, d)] = E{test::normal(random)}.bits;
    }
  }
  // A NaN among a summary's numbers is that chunk's affair alone.
  const int poisoned = c.chunks > 3 ? 2 : -1;
  if (poisoned >= 0) heads[0]->summary(poisoned, 0)[HeadDim - 1] = 0xffff;

  const long long pitch = c.chunks + 3;
  std::vector<float> scores(static_cast<std::size_t>(sequences * c.kv_heads * pitch), untouched);
  ScoreParams params;
  params.heads = views.data();
  params.states = states.data();
  params.kv_heads = c.kv_heads;
  params.group = c.group;
  params.page_rows = c.page_rows;
  params.queries = queries;
  params.q = {reinterpret_cast<std::byte*>(q.data()), queries * token_stride, token_stride, HeadDim + 3};
  for (int y = 0; y < sequences * c.kv_heads; ++y) {
    views[static_cast<std::size_t>(y)].scores = scores.data() + y * pitch;
  }
  test::launch(score_kernel<E, HeadDim>, c.blocks, sequences * c.kv_heads, score_threads,
               score_shared_bytes<HeadDim>(), params);

  const auto number = [](std::uint16_t bits) {
    E value;
    value.bits = bits;
    return static_cast<double>(static_cast<float>(value));
  };
  for (int y = 0; y < sequences * c.kv_heads; ++y) {
    const int s = y / c.kv_heads, h = y % c.kv_heads;
    CAPTURE(y);
    const int chunks = s == 0 ? c.chunks : c.chunks * 2 / 3;
    const bool scored = h % 4 < 2 && chunks > 1;
    for (int i = 0; i < pitch; ++i) {
      CAPTURE(i);
      const float score = scores[static_cast<std::size_t>(y * pitch + i)];
      if (!scored || i >= chunks) {
        CHECK(score == untouched);
      } else if (i == 0) {
        CHECK(score == inf);
      } else if (y == 0 && i == poisoned) {
        CHECK(score != score);
      } else {
        double expected = 0, size = 0;
        for (int member = 0; member < c.group; ++member) {
          for (int d = 0; d < HeadDim; ++d) {
            const double x = number(q[at(s, h * c.group + member, d)]);
            const double key =
                number(heads[static_cast<std::size_t>(y)]->summary(i, h % 4 == 1 && x > 0 ? 1 : 0)[d]);
            expected += x * key;
            size += std::abs(x * key);
          }
        }
        // Float sums of HeadDim + group terms: a few units in the last place of their size.
        CHECK(std::abs(score - expected) <= 0x1p-21 * size);
      }
    }
  }
}

template <Element E, int HeadDim>
void check_sizes() {
  for (const int chunks : {0, 1, 2, 5, 63, 64, 65, 131}) check<E, HeadDim>({.chunks = chunks});
  check<E, HeadDim>({.group = 4, .page_rows = 128, .chunks = 300, .blocks = 3});
  check<E, HeadDim>({.kv_heads = 6, .group = 7, .chunks = 130, .blocks = 2});
}

TEST_CASE("chunk scores are dot products with the summaries") {
  check_sizes<bfloat16, 64>();
  check_sizes<bfloat16, 80>();
  check_sizes<bfloat16, 128>();
  check_sizes<float16, 64>();
  check_sizes<float16, 96>();
  check_sizes<float16, 128>();
  check_sizes<float16, 256>();
}

}  // namespace
