// SPDX-License-Identifier: Apache-2.0
//
// Pages in tensors of an engine: numbers written through a pool are read by plain indices into the tensor's
// layout, and the other way round.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include <kvpolicy/memory/page_pool.hpp>

#include "support/memory.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

namespace {

using Number = std::uint16_t;

struct Sizes {
  std::size_t blocks, block_size, kv_heads, head_dim;
};

struct Layout {
  std::string name;
  std::function<EnginePages(std::span<std::byte>, const BlockShape&)> describe;
  // The index of a number in the flat tensor; side 0 is keys, side 1 values.
  std::function<std::size_t(const Sizes&, std::size_t side, std::size_t block, std::size_t token,
                            std::size_t head, std::size_t channel)>
      index;
};

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all{
      {"vLLM NHD [2, blocks, block_size, kv_heads, head_dim]", vllm_nhd,
       [](const Sizes& s, std::size_t side, std::size_t block, std::size_t token, std::size_t head,
          std::size_t d) {
         return (((side * s.blocks + block) * s.block_size + token) * s.kv_heads + head) * s.head_dim + d;
       }},
      {"FlashInfer NHD [blocks, 2, block_size, kv_heads, head_dim]", flashinfer_nhd,
       [](const Sizes& s, std::size_t side, std::size_t block, std::size_t token, std::size_t head,
          std::size_t d) {
         return (((block * 2 + side) * s.block_size + token) * s.kv_heads + head) * s.head_dim + d;
       }},
      {"FlashInfer HND [blocks, 2, kv_heads, block_size, head_dim]", flashinfer_hnd,
       [](const Sizes& s, std::size_t side, std::size_t block, std::size_t token, std::size_t head,
          std::size_t d) {
         return (((block * 2 + side) * s.kv_heads + head) * s.block_size + token) * s.head_dim + d;
       }},
  };
  return all;
}

Number load(const std::byte* address) {
  Number number;
  std::memcpy(&number, address, sizeof number);
  return number;
}

template <class Visit>
void for_each_number(const Sizes& s, Visit visit) {
  for (std::size_t block = 0; block < s.blocks; ++block) {
    for (std::size_t head = 0; head < s.kv_heads; ++head) {
      for (std::size_t side = 0; side < 2; ++side) {
        for (std::size_t token = 0; token < s.block_size; ++token) {
          for (std::size_t channel = 0; channel < s.head_dim; ++channel)
            visit(block, head, side, token, channel);
        }
      }
    }
  }
}

void check_layout(const Layout& layout, const Sizes& s, std::size_t arenas) {
  CAPTURE(layout.name);
  CAPTURE(s.blocks);
  CAPTURE(s.block_size);
  CAPTURE(s.kv_heads);
  CAPTURE(s.head_dim);
  const std::size_t numbers = 2 * s.blocks * s.block_size * s.kv_heads * s.head_dim;
  constexpr Number guard = 0xABCD;
  std::vector<std::vector<Number>> tensors(arenas);
  std::vector<Number> wanted(arenas * numbers);
  EnginePages engine;
  std::vector<std::span<std::byte>> spans;
  for (auto& tensor : tensors) {
    tensor.assign(numbers + 2, guard);
    for (std::size_t i = 0; i < numbers; ++i) {
      tensor[1 + i] = static_cast<Number>(i * 7 + static_cast<std::size_t>(&tensor - tensors.data()));
    }
    spans.push_back(std::as_writable_bytes(std::span{tensor}.subspan(1, numbers)));
    engine = layout.describe(spans.back(), {s.blocks, s.block_size, s.kv_heads, s.head_dim * sizeof(Number)});
  }
  engine.arenas = spans;
  PagePool pool{engine};
  CHECK(engine.page_bytes() == 2 * s.block_size * s.head_dim * sizeof(Number));
  CHECK(pool.obtained_bytes() == arenas * numbers * sizeof(Number));

  const auto address = [&](PageId page, std::size_t side, std::size_t token, std::size_t channel) {
    return pool.address(page) + side * engine.values_offset + token * engine.row_stride +
           channel * sizeof(Number);
  };
  std::set<PageId> ids;
  bool read = true;
  for (std::size_t arena = 0; arena < arenas; ++arena) {
    for_each_number(
        s, [&](std::size_t block, std::size_t head, std::size_t side, std::size_t token, std::size_t d) {
          const PageId page = pool.engine_page(arena, head, block);
          ids.insert(page);
          read = read && page == pool.engine_page(arena, head, 0) + static_cast<PageId>(block);
          read = read && load(address(page, side, token, d)) ==
                             tensors[arena][1 + layout.index(s, side, block, token, head, d)];
        });
  }
  CHECK(read);  // the number that the engine wrote
  CHECK(ids.size() == arenas * s.blocks * s.kv_heads);

  // Allocates every page once, in whatever order the pool gives them.
  std::vector<PageId> pages(ids.size());
  pool.allocate(engine.page_bytes(), pages);
  CHECK(std::set<PageId>(pages.begin(), pages.end()) == ids);
  CHECK_THROWS_AS(static_cast<void>(pool.allocate(engine.page_bytes())), OutOfMemory);
  CHECK(pool.live_bytes() == pool.obtained_bytes());
  for (auto& tensor : tensors) std::fill(tensor.begin() + 1, tensor.end() - 1, Number{0});
  for (std::size_t arena = 0; arena < arenas; ++arena) {
    for_each_number(
        s, [&](std::size_t block, std::size_t head, std::size_t side, std::size_t token, std::size_t d) {
          const auto number =
              static_cast<Number>(arena * 31 + block * 29 + head * 23 + side * 19 + token * 5 + d + 1);
          std::memcpy(address(pool.engine_page(arena, head, block), side, token, d), &number, sizeof number);
          wanted[arena * numbers + layout.index(s, side, block, token, head, d)] = number;
        });
  }
  for (std::size_t arena = 0; arena < arenas; ++arena) {
    const auto first = wanted.begin() + static_cast<std::ptrdiff_t>(arena * numbers);
    CHECK(std::equal(tensors[arena].begin() + 1, tensors[arena].end() - 1, first));
    CHECK(tensors[arena].front() == guard);
    CHECK(tensors[arena].back() == guard);
  }
  for (const PageId page : pages) pool.release(page);
  CHECK(pool.live_bytes() == 0);
  CHECK(pool.obtained_bytes() == arenas * numbers * sizeof(Number));  // the engine keeps its memory
}

}  // namespace

TEST_CASE("pages of an engine's tensor have the addresses of its layout") {
  for (const Layout& layout : layouts()) {
    check_layout(layout, {1, 1, 1, 1}, 1);
    check_layout(layout, {1, 1, 3, 8}, 2);
    check_layout(layout, {7, 1, 1, 5}, 1);
    check_layout(layout, {16, 16, 2, 8}, 1);
    check_layout(layout, {17, 13, 5, 11}, 3);
    check_layout(layout, {31, 2, 8, 16}, 1);
    check_layout(layout, {33, 64, 1, 8}, 2);
  }
}

TEST_CASE("a latent cache has only keys: [blocks, block_size, row]") {
  constexpr std::size_t blocks = 19, block_size = 3, row = 36;
  std::vector<std::byte> tensor(blocks * block_size * row);
  PagePool pool{EnginePages{.arenas = {tensor},
                            .blocks = blocks,
                            .block_stride = block_size * row,
                            .page_rows = block_size,
                            .row_stride = row,
                            .row_bytes = row}};
  for (std::size_t block = 0; block < blocks; ++block) {
    const PageId page = pool.engine_page(0, 0, block);
    CHECK(pool.address(page) == tensor.data() + block * block_size * row);
    CHECK(pool.bytes(page) == block_size * row);
  }
}

TEST_CASE("pages that the engine filled are claimed by their number, and only once") {
  std::vector<std::byte> tensor(std::size_t{2} * 20 * 4 * 2 * 8);
  const EnginePages engine = vllm_nhd(tensor, {.blocks = 20, .block_size = 4, .kv_heads = 2, .row_bytes = 8});
  PagePool pool{engine};
  std::set<PageId> claimed;
  for (const std::size_t block : {0U, 3U, 15U, 16U, 19U}) {
    claimed.insert(pool.engine_page(0, 1, block));
    CHECK(pool.claim(pool.engine_page(0, 1, block)));
    CHECK_FALSE(pool.claim(pool.engine_page(0, 1, block)));
  }
  CHECK(pool.live_bytes() == 5 * engine.page_bytes());
  std::vector<PageId> others(35);
  pool.allocate(engine.page_bytes(), others);
  for (const PageId page : others) CHECK(claimed.insert(page).second);
  CHECK_THROWS_WITH_AS(
      static_cast<void>(pool.allocate(engine.page_bytes())),
      "PagePool: all 40 pages of the engine's memory are in use (release pages, or give more "
      "blocks)",
      OutOfMemory);
  std::vector<PageId> too_many(2);
  pool.release(others.back());
  CHECK_THROWS_AS(pool.allocate(engine.page_bytes(), too_many), OutOfMemory);  // only one is free
  CHECK(pool.live_bytes() == 39 * engine.page_bytes());
  CHECK(pool.claim(others.back()));
  CHECK_THROWS_AS(static_cast<void>(pool.claim(20)), ShapeError);  // between two heads, not a page
  CHECK_THROWS_AS(static_cast<void>(pool.claim(no_page)), ShapeError);
  CHECK_THROWS_AS(static_cast<void>(pool.claim(64)), ShapeError);
  CHECK_THROWS_AS(static_cast<void>(pool.engine_page(0, 2, 0)), ShapeError);
  CHECK_THROWS_AS(static_cast<void>(pool.engine_page(0, 0, 20)), ShapeError);
  CHECK_THROWS_AS(static_cast<void>(pool.engine_page(1, 0, 0)), ShapeError);
}

TEST_CASE("an engine's memory as the fast tier, our own memory as a slower one") {
  std::vector<std::byte> tensor(std::size_t{2} * 16 * 16 * 8);
  test::CountingResource memory;
  ResourceProvider slow{&memory};
  const std::array<PageProvider*, 1> slower{&slow};
  const EnginePages engine =
      flashinfer_hnd(tensor, {.blocks = 16, .block_size = 16, .kv_heads = 1, .row_bytes = 8});
  PagePool pool{engine, slower};
  CHECK(pool.provider(0) == nullptr);
  CHECK(pool.provider(1) == &slow);
  CHECK_THROWS_WITH_AS(static_cast<void>(pool.allocate(100)),
                       "PagePool: a page of 100 bytes was asked for, must be 256 as the engine's pages are",
                       ConfigError);
  const PageId fast = pool.allocate(256), other = pool.allocate(100, 1);
  CHECK(pool.tier(fast) == 0);
  CHECK(pool.tier(other) == 1);
  CHECK(memory.live_bytes() == 100);
  std::vector<PageId> pages{fast};
  CHECK(pool.consolidate(pages) == 0);
  pool.release(other);
  pool.release(fast);
  CHECK(memory.live_bytes() == 0);
}

TEST_CASE("invalid descriptions are refused with what would fit") {
  std::vector<std::byte> tensor(std::size_t{2} * 4 * 8 * 2 * 16);
  const EnginePages good = vllm_nhd(tensor, {.blocks = 4, .block_size = 8, .kv_heads = 2, .row_bytes = 16});
  CHECK_NOTHROW(good.validate());
  const auto refused = [&](auto change, const char* text) {
    EnginePages bad = good;
    change(bad);
    CHECK_THROWS_WITH_AS(PagePool{bad}, text, ConfigError);
  };
  refused([](EnginePages& e) { e.arenas.clear(); }, "EnginePages: there is no arena, must be at least one");
  refused([](EnginePages& e) { e.blocks = 0; }, "EnginePages: blocks is 0, must be at least 1");
  refused([](EnginePages& e) { e.heads = 0; }, "EnginePages: heads is 0, must be at least 1");
  refused([](EnginePages& e) { e.page_rows = 0; }, "EnginePages: page_rows is 0, must be at least 1");
  refused([](EnginePages& e) { e.row_bytes = 0; }, "EnginePages: row_bytes is 0, must be at least 1");
  refused([](EnginePages& e) { e.head_stride = 15; },
          "EnginePages: head_stride is 15 bytes, must be at least 16, or rows overlap");
  refused([](EnginePages& e) { e.row_stride = 24; },
          "EnginePages: row_stride is 24 bytes, must be at least 32, or rows overlap");
  refused([](EnginePages& e) { e.block_stride = 0; },
          "EnginePages: block_stride is 0 bytes, must be at least 16, or rows overlap");
  refused([](EnginePages& e) { e.values_offset -= 1; },
          "EnginePages: values_offset is 1023 bytes, must be at least 1024, or rows overlap");
  refused([](EnginePages& e) { e.values_offset += 1; },
          "EnginePages: an arena has 2048 bytes, too few for 2 times a values_offset of 1025 (give "
          "all of the "
          "tensor, or fewer blocks)");
  refused([](EnginePages& e) { e.blocks = test::never; },
          "EnginePages: an arena has 2048 bytes, too few for 18446744073709551615 times a "
          "block_stride of 256 (give "
          "all of the tensor, or fewer blocks)");
  std::vector<std::byte> second(2048);
  refused([&](EnginePages& e) { e.arenas.push_back(e.arenas.front()); },
          "EnginePages: arenas 0 and 1 overlap, must be memory of their own");
  refused([&](EnginePages& e) { e.arenas.push_back(e.arenas.front().last(4)); },
          "EnginePages: arenas 0 and 1 overlap, must be memory of their own");
  refused([&](EnginePages& e) { e.arenas.push_back(std::span{second}.first(2047)); },
          "EnginePages: an arena has 2047 bytes, too few for 2 times a values_offset of 1024 (give "
          "all of the "
          "tensor, or fewer blocks)");
  CHECK_THROWS_WITH_AS(
      PagePool(EnginePages{.arenas = {tensor}, .blocks = 1, .page_rows = 1, .row_bytes = 4096}),
      "EnginePages: an arena has 2048 bytes, must have at least 4096", ConfigError);
  for (const Layout& layout : layouts()) {
    CHECK_THROWS_AS(layout.describe(tensor, {5, 8, 2, 16}), ConfigError);
    CHECK_THROWS_AS(layout.describe(tensor, {0, 8, 2, 16}), ConfigError);
    CHECK_THROWS_AS(layout.describe(tensor, {std::size_t{1} << 62, 8, 2, 16}), ConfigError);
  }
}
