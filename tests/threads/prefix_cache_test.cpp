// SPDX-License-Identifier: Apache-2.0
//
// Threads that go on from prefixes while another one keeps new ones and lets old ones go: each says what it would
// have said alone.
#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <thread>
#include <utility>
#include <vector>

#include <kvpolicy/cache/prefix_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

#include "cache/prefix_texts.hpp"

using namespace kvpolicy;

TEST_CASE("many threads find prefixes while one keeps them and lets them go") {
  using Window = SinkRecentCache<DenseStorage<float>>;
  const ModelShape shape{1, 2, 2, 16};
  HeadPlan<float> windows{shape};
  windows.set(0, 1, Window::Config{.sinks = 3, .recent = 20});
  const std::vector<HeadPlan<float>> plans{windows, HeadPlan<float>{shape}};
  PagePool pool;
  for (PagePool* given : {static_cast<PagePool*>(nullptr), &pool}) {
    const CacheOptions options{.page_rows = 16, .pool = given};
    {
      PrefixCache<float> prefixes{options};
      // Texts that begin alike: number i has the first 8 * i tokens of all, then its own.
      std::vector<test::Text> texts(8);
      for (std::size_t i = 0; i < texts.size(); ++i) {
        for (std::size_t token = 0; token < 70; ++token) {
          texts[i].add(static_cast<std::int32_t>(token < 8 * i ? token : 100 * i + token));
        }
      }
      const auto cold = [&](const HeadPlan<float>& plan, const test::Text& text) {
        KvCache<float> cache{plan, options};
        return test::read_text(cache, text, 0, text.size(), 69, [](std::size_t) {});
      };
      std::vector<std::vector<float>> expected;
      for (const auto& plan : plans) {
        for (const auto& text : texts) expected.push_back(cold(plan, text));
      }
      std::atomic<bool> done = false;
      std::atomic<std::size_t> wrong = 0;
      std::atomic<std::size_t> hits = 0;
      const auto read = [&](std::size_t seed) {
        test::Random random{seed};
        for (int round = 0; round < 60; ++round) {
          const std::size_t plan = test::below(random, plans.size());
          const std::size_t text = test::below(random, texts.size());
          auto found = prefixes.find(plans[plan], texts[text].tokens().first(69));
          if (found) ++hits;
          const std::size_t from = found ? found->tokens : 0;
          KvCache<float> cache = found ? std::move(found->cache) : KvCache<float>{plans[plan], options};
          const auto said = test::read_text(cache, texts[text], from, 70, 69, [](std::size_t) {});
          if (!test::same_bits(said, expected[plan * texts.size() + text])) ++wrong;
          static_cast<void>(prefixes.statistics());
          static_cast<void>(prefixes.list());
        }
      };
      std::thread writer{[&] {
        test::Random random{99};
        while (!done) {
          const std::size_t plan = test::below(random, plans.size());
          const test::Text& text = texts[test::below(random, texts.size())];
          KvCache<float> cache{plans[plan], options};
          test::read_text(cache, text, 0, text.size(), 70, [&](std::size_t tokens) {
            static_cast<void>(prefixes.keep(cache, text.tokens().first(tokens)));
          });
          static_cast<void>(prefixes.evict(test::below(random, 40'000)));
        }
      }};
      std::vector<std::thread> readers;
      for (std::size_t i = 0; i < 3; ++i) readers.emplace_back(read, i);
      for (std::thread& reader : readers) reader.join();
      done = true;
      writer.join();
      CHECK(wrong == 0);
      CHECK(hits > 0);
    }
    CHECK(pool.live_bytes() == 0);
  }
}
