// SPDX-License-Identifier: Apache-2.0
//
// Kernels that keep one path of a tree: rows and queries move to the front, and nothing else changes.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include <kvpolicy/cuda/kernels/accept.cuh>

#include "cuda/support/device_head.hpp"
#include "cuda/support/launch.hpp"
#include "support/tensors.hpp"

namespace {

using namespace kvpolicy::gpu;
using kvpolicy::float16;
using test::Random;
using test::Side;

/// Ascending nodes of `nodes`, each at least its place: about one of `apart` nodes, or the first ones.
std::vector<int> random_path(Random& random, int nodes, std::size_t apart) {
  std::vector<int> path;
  for (int node = 0; node < nodes; ++node) {
    if (test::below(random, apart) == 0) path.push_back(node);
  }
  return path;
}

/// All that a call of `move` puts on the stream for one path.
template <class Move>
void in_parts(const std::vector<int>& path, int root, int most, Move move) {
  const auto count = static_cast<int>(path.size());
  for (int first = 0; first < count; first += most) {
    PathPart part{.root = root, .first = first, .count = std::min(count - first, most), .node = {}};
    for (int i = 0; i < part.count; ++i) {
      part.node[i] = static_cast<std::uint16_t>(path[static_cast<std::size_t>(first + i)]);
    }
    move(part);
  }
}

/// Each number of each slot is one of a kind, and what was never written is NaN.
std::uint16_t number(std::size_t head, int row, Side side, int channel) {
  const int mixed = static_cast<int>(head) * 7919 + row * 131 + channel * 2 + (side == Side::values ? 1 : 0);
  return static_cast<std::uint16_t>(mixed % 31743);
}

void check_rows(Random& random, int head_dim, int page_rows, int text, int nodes, std::size_t apart,
                int most) {
  CAPTURE(head_dim);
  CAPTURE(text);
  CAPTURE(nodes);
  const auto up = [&](int rows) { return (rows + page_rows - 1) / page_rows * page_rows; };
  std::vector<HeadView> views{{},
                              {.sinks = 5, .recent = 7, .exact_ring = up(7 + nodes)},
                              {.evicted = text / 2},
                              {.sinks = 40, .recent = 1, .exact_ring = up(1 + nodes)},
                              {.exact_ring = up(9 + nodes),
                               .key_encoding = kvpolicy::Encoding::uint4,
                               .value_encoding = kvpolicy::Encoding::uint2,
                               .key_group = head_dim,
                               .value_group = head_dim,
                               .residual = 9}};
  if (head_dim % 64 != 0) views.pop_back();  // quantised rows have no kernels there
  std::vector<std::unique_ptr<test::DeviceHead<float16>>> heads;
  std::vector<HeadView> described;
  for (std::size_t h = 0; h < views.size(); ++h) {
    heads.push_back(std::make_unique<test::DeviceHead<float16>>(views[h], head_dim, page_rows, text + nodes));
    described.push_back(heads[h]->view());
    for (int row = 0; row < text + nodes - views[h].evicted; ++row) {
      for (const Side side : {Side::keys, Side::values}) {
        for (int c = 0; c < head_dim; ++c) heads[h]->exact(side, row)[c] = number(h, row, side, c);
      }
    }
  }
  const std::vector<int> path = random_path(random, nodes, apart);
  in_parts(path, text, most, [&](const PathPart& part) {
    const AcceptRowsParams params{
        .heads = described.data(), .head_dim = head_dim, .page_rows = page_rows, .path = part};
    test::launch(accept_rows_kernel<>, static_cast<int>(views.size()), 1, accept_threads, 0, params);
  });
  int wrong = 0;
  for (std::size_t h = 0; h < views.size(); ++h) {
    const int root = text - views[h].evicted;
    const int lost = views[h].exact_ring > 0 ? root + nodes - views[h].exact_ring : 0;
    for (int row = 0; row < root + nodes; ++row) {
      if (row >= views[h].sinks && row < lost) continue;
      const std::size_t place = row < root ? path.size() : static_cast<std::size_t>(row - root);
      const int was = place < path.size() ? root + path[place] : row;
      for (const Side side : {Side::keys, Side::values}) {
        for (int c = 0; c < head_dim; ++c) wrong += heads[h]->exact(side, row)[c] != number(h, was, side, c);
      }
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("accept: rows of a path move to the front, in lines and rings, as sinks or not") {
  Random random{1};
  for (const int head_dim : {64, 80, 96, 128, 256}) {
    for (const int text : {0, 3, 39, 64, 301}) {
      for (const int nodes : {1, 2, 9, 40, 70}) {
        if ((text + nodes + head_dim / 16) % 2 == 0) continue;
        check_rows(random, head_dim, nodes == 40 ? 128 : 64, text, nodes, 1 + test::below(random, 4), 1024);
      }
    }
  }
}

TEST_CASE("accept: long paths, in one part or several") {
  Random random{2};
  for (const int most : {1, 7, 100, PathPart::most}) check_rows(random, 64, 64, 50, 300, 2, most);
  check_rows(random, 64, 64, 5, 2200, 2, PathPart::most);
}

TEST_CASE("accept: rows are read before they are written over, whoever comes first") {
  for (std::uint64_t order = 1; order < 6; ++order) {
    test::set_order(order);
    Random random{order};
    check_rows(random, 128, 64, 20, 60, 1 + order % 3, 1024);
  }
  test::set_order(0);
}

TEST_CASE("accept: queries of a path move as its rows do") {
  Random random{3};
  for (const int numbers : {64, 240, 4096}) {
    for (const int slots : {41, 64}) {
      for (const int text : {0, 30, 500}) {
        const int nodes = 40;
        std::vector<std::uint16_t> ring(static_cast<std::size_t>(slots * numbers));
        const auto at = [&](int token) { return ring.data() + token % slots * numbers; };
        const int first = std::max(0, text + nodes - slots);  // the oldest that is there
        for (int token = first; token < text + nodes; ++token) {
          for (int i = 0; i < numbers; ++i) at(token)[i] = number(0, token, Side::keys, i);
        }
        const std::vector<int> path = random_path(random, nodes, 3);
        in_parts(path, text, numbers == 64 ? 4 : 1024, [&](const PathPart& part) {
          const AcceptQueriesParams params{
              .ring = ring.data(), .slots = slots, .numbers = numbers, .path = part};
          test::launch(accept_queries_kernel<>, quotient_up(numbers, 8 * accept_threads), 1, accept_threads,
                       0, params);
        });
        int wrong = 0;
        for (int token = first; token < text + nodes; ++token) {
          const std::size_t place = token < text ? path.size() : static_cast<std::size_t>(token - text);
          const int was = place < path.size() ? text + path[place] : token;
          for (int i = 0; i < numbers; ++i) wrong += at(token)[i] != number(0, was, Side::keys, i);
        }
        CHECK(wrong == 0);
      }
    }
  }
}

}  // namespace
