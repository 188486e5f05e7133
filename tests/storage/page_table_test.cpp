// SPDX-License-Identifier: Apache-2.0
//
// Page tables under random operations, compared with plain lists of the contents of each page: forks,
// reserved pages, dropped first pages, reused pages.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <deque>
#include <set>
#include <utility>
#include <vector>

#include <kvpolicy/storage/page_table.hpp>

#include "support/memory.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

namespace {

constexpr std::size_t page_bytes = 192;

struct Model {
  PageTable table;
  std::deque<std::uint32_t> marks;  // for the pages in use
};

void check(const Model& model) {
  REQUIRE(model.table.size() == model.marks.size());
  for (std::size_t i = 0; i < model.marks.size(); ++i) {
    std::uint32_t mark = 0;
    std::memcpy(&mark, model.table.addresses()[i], sizeof(mark));
    CHECK(mark == model.marks[i]);
    CHECK(model.table.address(i) == model.table.pool().address(model.table.pages()[i]));
  }
}

}  // namespace

TEST_CASE("page tables: random operations on tables and forks of them") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    CAPTURE(seed);
    test::Random random{seed};
    test::CountingResource memory;
    ResourceProvider provider{&memory};
    const std::vector<PageProvider*> tiers{&provider, &provider};
    PagePool pool{tiers, {.max_slab_bytes = seed % 2 == 0 ? std::size_t{0} : std::size_t{4096}}};
    std::uint32_t next_mark = 0;
    {
      std::vector<Model> models;
      models.push_back({PageTable{pool}, {}});
      for (int i = 0; i < 400; ++i) {
        CAPTURE(i);
        const std::size_t which = test::below(random, models.size());
        Model& own = models[which];
        switch (test::below(random, 6)) {
          case 0: {
            const std::size_t count = test::below(random, 7);
            const std::size_t had = own.table.reserved();
            own.table.reserve(count, page_bytes);
            CHECK(own.table.reserved() == std::max(count, had));
            break;
          }
          case 1:
          case 2:
            if (own.table.reserved() == 0) break;
            own.table.begin_page();
            own.marks.push_back(++next_mark);
            std::memcpy(own.table.address(own.table.size() - 1), &next_mark, sizeof(next_mark));
            break;
          case 3: {
            const std::size_t count = test::below(random, own.table.size() + 1);
            const std::size_t wanted = test::below(random, 5);
            std::size_t reserved = own.table.reserved();
            for (std::size_t p = 0; p < count; ++p) {
              const bool is_fast = pool.tier(own.table.pages()[p]) == 0;
              if (reserved < wanted && is_fast && !own.table.is_shared(p)) ++reserved;
            }
            own.table.drop_front(count, wanted);
            CHECK(own.table.reserved() == reserved);
            own.marks.erase(own.marks.begin(), own.marks.begin() + static_cast<std::ptrdiff_t>(count));
            break;
          }
          case 4:
            if (test::below(random, 2) == 0) {
              own.table.release_reserved();
              CHECK(own.table.reserved() == 0);
            } else if (own.table.size() > 0) {
              const std::size_t at = test::below(random, own.table.size());
              const PageId page = pool.allocate(page_bytes, test::below(random, 2));
              own.marks[at] = ++next_mark;
              std::memcpy(pool.address(page), &next_mark, sizeof(next_mark));
              own.table.replace(at, page);
            }
            break;
          default:
            if (models.size() < 4) {
              models.push_back(Model{own});
              CHECK(models.back().table.reserved() == 0);
            } else {
              models[which] = Model{models[test::below(random, 4)]};
            }
        }
        for (const Model& model : models) check(model);
        // Each page is counted once, however many forks share it.
        std::set<PageId> pages;
        std::size_t reserved = 0;
        for (const Model& model : models) {
          pages.insert(model.table.pages().begin(), model.table.pages().end());
          reserved += model.table.reserved();
        }
        CHECK(pool.live_bytes(0) + pool.live_bytes(1) == (pages.size() + reserved) * page_bytes);
      }
    }
    CHECK(pool.live_bytes(0) + pool.live_bytes(1) == 0);
    CHECK(memory.live_blocks() == 0);
    CHECK(memory.faults() == 0);
  }
}

TEST_CASE("page tables: a full table at least doubles, an empty one takes no memory") {
  PagePool pool;
  PageTable table{pool};
  CHECK(table.overhead_bytes() == 0);
  std::size_t changes = 0, before = 0;
  for (std::size_t i = 0; i < 1000; ++i) {
    table.reserve(1, page_bytes);
    table.begin_page();
    changes += table.overhead_bytes() != before ? 1 : 0;
    before = table.overhead_bytes();
    CHECK(before <= 2 * (i + 1) * 12 + 16);
  }
  CHECK(changes <= 11);
}

TEST_CASE("page tables: a failed reservation leaves the table unchanged") {
  test::CountingResource memory;
  PagePool pool{&memory, {.max_slab_bytes = 0}};
  PageTable table{pool};
  table.reserve(2, page_bytes);
  table.begin_page();
  memory.fail_after(2);
  CHECK_THROWS_AS(table.reserve(5, page_bytes), std::bad_alloc);
  CHECK(table.size() == 1);
  CHECK(table.reserved() == 1);
  CHECK(memory.live_bytes() == 2 * page_bytes);
  memory.fail_after(test::never);
  table.reserve(5, page_bytes);
  CHECK(memory.live_bytes() == 6 * page_bytes);
}
