// SPDX-License-Identifier: Apache-2.0
//
// Compares random operations on a pool with a map of the expected contents of each page, and measures how
// much memory a million operations leave idle.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <vector>

#include <kvpolicy/memory/page_pool.hpp>

#include "support/memory.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

namespace {

// ---- the model of a pool: a map from ids to contents and numbers of owners

struct ModelPage {
  std::size_t bytes;
  std::size_t tier;
  std::size_t owners;
  int content;
};
using Model = std::map<PageId, ModelPage>;

bool is_as_expected(const PagePool& pool, PageId page, const ModelPage& expected) {
  const std::vector<unsigned char> content(expected.bytes, static_cast<unsigned char>(expected.content));
  return pool.bytes(page) == expected.bytes && pool.tier(page) == expected.tier &&
         pool.is_shared(page) == (expected.owners > 1) &&
         std::memcmp(pool.address(page), content.data(), content.size()) == 0;
}

void compare(const PagePool& pool, const Model& model) {
  std::array<std::size_t, 2> live{};
  std::map<const std::byte*, std::size_t> addresses;
  std::size_t wrong = 0;
  for (const auto& [page, expected] : model) {
    wrong += is_as_expected(pool, page, expected) ? 0 : 1;
    live[expected.tier] += expected.bytes;
    addresses[pool.address(page)] = expected.bytes;
  }
  const std::byte* end = nullptr;
  for (const auto& [address, bytes] : addresses) {
    wrong += address >= end ? 0 : 1;  // pages do not overlap
    end = address + bytes;
  }
  REQUIRE(wrong == 0);
  REQUIRE(addresses.size() == model.size());
  REQUIRE(pool.live_bytes(0) == live[0]);
  REQUIRE(pool.live_bytes(1) == live[1]);
}

void run_operations(std::uint64_t seed, std::size_t max_slab_bytes) {
  CAPTURE(seed);
  CAPTURE(max_slab_bytes);
  test::Random random{seed};
  std::array<test::CountingResource, 2> memory;
  {
    ResourceProvider fast{&memory[0]}, slow{&memory[1]};
    const std::array<PageProvider*, 2> providers{&fast, &slow};
    PagePool pool{providers, {.max_slab_bytes = max_slab_bytes}};
    Model model;
    const std::vector<std::size_t> sizes{1, 64, 100, 576, 1024, 2048, 5000};
    const auto add = [&](PageId page, std::size_t bytes, std::size_t tier) {
      const ModelPage written{bytes, tier, 1, static_cast<int>(random() % 256)};
      REQUIRE(model.emplace(page, written).second);  // an id in use is never given again
      std::memset(pool.address(page), written.content, bytes);
    };
    for (int i = 0; i < 3000; ++i) {
      const bool grows = i / 500 % 2 == 0;
      const std::size_t operation = test::below(random, 10);
      const auto any = [&] {
        return std::next(model.begin(), static_cast<std::ptrdiff_t>(test::below(random, model.size())));
      };
      if (model.empty() || operation < (grows ? 4U : 2U)) {
        const std::size_t bytes = test::one_of(random, sizes);
        const std::size_t tier = test::below(random, 4) == 0 ? 1 : 0;
        if (test::below(random, 8) == 0) {
          std::vector<PageId> pages(test::below(random, 40));
          pool.allocate(bytes, pages, tier);
          for (const PageId page : pages) add(page, bytes, tier);
        } else {
          add(pool.allocate(bytes, tier), bytes, tier);
        }
      } else if (operation < 5) {
        const auto page = any();
        pool.retain(page->first);
        ++page->second.owners;
      } else if (operation < 9) {
        const auto page = any();
        pool.release(page->first);
        if (--page->second.owners == 0) model.erase(page);
      } else if (test::below(random, 10) == 0) {
        std::vector<PageId> before;
        for (const auto& [page, unused] : model) before.push_back(page);
        std::vector<PageId> after = before;
        pool.consolidate(after);
        Model moved;
        bool stayed = true;
        for (std::size_t p = 0; p < before.size(); ++p) {
          const ModelPage& page = model[before[p]];
          moved[after[p]] = page;
          stayed = stayed && (after[p] == before[p] || (page.tier == 0 && page.owners == 1));
        }
        REQUIRE(stayed);
        REQUIRE(moved.size() == model.size());
        model = moved;
      }
      if (i % 100 == 0) compare(pool, model);
      for (const std::size_t tier : {0U, 1U}) {
        REQUIRE(pool.obtained_bytes(tier) == memory[tier].live_bytes());
        if (max_slab_bytes == 0) REQUIRE(pool.live_bytes(tier) == memory[tier].live_bytes());
      }
    }
    compare(pool, model);
    CHECK(memory[0].faults() + memory[1].faults() == 0);
    for (const auto& [page, expected] : model) {
      for (std::size_t owner = 0; owner < expected.owners; ++owner) pool.release(page);
    }
    CHECK(memory[0].live_bytes() + memory[1].live_bytes() == 0);
  }
  CHECK(memory[0].faults() + memory[1].faults() == 0);
}

// ---- idle memory

// Only counts, so that a million operations take a second.
class ByteCounter final : public std::pmr::memory_resource {
 public:
  std::size_t live = 0;
  std::size_t calls = 0;

 private:
  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    live += bytes;
    ++calls;
    return std::pmr::new_delete_resource()->allocate(bytes, alignment);
  }
  void do_deallocate(void* start, std::size_t bytes, std::size_t alignment) override {
    live -= bytes;
    std::pmr::new_delete_resource()->deallocate(start, bytes, alignment);
  }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
};

// 64 rows of 128 numbers: in bfloat16; in 8, 4 and 2 bits with a grid for each row; a summary; in float.
constexpr std::array<std::size_t, 6> page_sizes{16384, 8448, 4352, 2304, 512, 32768};

struct Idle {
  double worst = 0;  // largest ratio of idle to live bytes, after the first tenth of the operations
  double last = 0;
  double calls_per_page = 0;
};

// Holds about `target(progress)` pages, of sizes that `size(progress)` chooses, and releases them in random
// order. `consolidates`: the owner consolidates its pages every 1,000 operations, and idle memory is measured
// after that.
template <class Target, class Size>
Idle idle_after(std::size_t operations, bool consolidates, Target target, Size size) {
  test::Random random{17};
  ByteCounter memory;
  PagePool pool{&memory};
  std::vector<PageId> pages;
  std::size_t live = 0, allocated = 0;
  Idle idle;
  for (std::size_t i = 0; i < operations; ++i) {
    const double progress = static_cast<double>(i) / static_cast<double>(operations);
    const auto wanted = static_cast<std::size_t>(target(progress));
    if (pages.size() < wanted / 2 || test::below(random, 2 * wanted) >= pages.size()) {
      const std::size_t bytes = page_sizes[size(random, progress)];
      pages.push_back(pool.allocate(bytes));
      live += bytes;
      ++allocated;
    } else {
      PageId& page = pages[test::below(random, pages.size())];
      live -= pool.bytes(page);
      pool.release(page);
      page = pages.back();
      pages.pop_back();
    }
    if (consolidates && i % 1000 == 0) pool.consolidate(pages);
    if (i < operations / 10 || (consolidates && i % 1000 != 0)) continue;
    idle.last = static_cast<double>(memory.live) / static_cast<double>(live) - 1;
    idle.worst = std::max(idle.worst, idle.last);
  }
  idle.calls_per_page = static_cast<double>(memory.calls) / static_cast<double>(allocated);
  for (const PageId page : pages) pool.release(page);
  CHECK(memory.live == 0);
  return idle;
}

const auto any_size = [](test::Random& random, double) { return test::below(random, page_sizes.size()); };
// Each size is replaced by the next, in three rounds.
const auto changing_size = [](test::Random& random, double progress) {
  const double phase = progress * 18;
  const auto whole = static_cast<std::size_t>(phase);
  const bool next =
      static_cast<double>(test::below(random, 1000)) < (phase - static_cast<double>(whole)) * 1000;
  return (whole + (next ? 1 : 0)) % page_sizes.size();
};

}  // namespace

TEST_CASE("random operations on a pool and on a map of pages agree") {
  for (const std::uint64_t seed : {1U, 2U, 3U, 4U}) {
    for (const std::size_t max_slab_bytes :
         {std::size_t{0}, std::size_t{1000}, std::size_t{4096}, std::size_t{65536}}) {
      run_operations(seed, max_slab_bytes);
    }
  }
}

TEST_CASE("a million operations leave at most 10 % idle if the number of pages is steady") {
  const Idle idle = idle_after(1'000'000, false, [](double) { return 3000; }, any_size);
  CHECK(idle.worst < 0.10);
  CHECK(idle.calls_per_page < 0.05);
  const Idle many = idle_after(1'000'000, false, [](double) { return 30000; }, any_size);
  CHECK(many.worst < 0.05);
}

TEST_CASE("with a few pages in steady number idle memory is bounded and does not grow") {
  const Idle idle = idle_after(300'000, false, [](double) { return 300; }, any_size);
  CHECK(idle.worst < 0.30);
  CHECK(idle.last < 0.20);
}

TEST_CASE("an owner that consolidates has at most 10 % idle, whatever is allocated and released") {
  const auto swings = [](double progress) { return static_cast<int>(progress * 10) % 2 == 0 ? 6000 : 3000; };
  CHECK(idle_after(300'000, true, swings, any_size).worst < 0.10);
  CHECK(idle_after(300'000, true, [](double) { return 3000; }, changing_size).worst < 0.10);
  CHECK(idle_after(300'000, false, swings, any_size).worst > 0.10);  // otherwise the test shows nothing
}
