// SPDX-License-Identifier: Apache-2.0
//
// Reads of the upper halves of codes (Read::upper_half) through a cache.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/kvpolicy.hpp>

#include "support/tensors.hpp"

using namespace kvpolicy;

namespace {

constexpr std::size_t head_dim = 64;
const CacheOptions options{.max_append = 512};
const ModelShape shape{.layers = 1, .q_heads = 4, .kv_heads = 2, .head_dim = head_dim};

std::vector<float> numbers(std::size_t count, test::Random& random) {
  std::vector<float> made(count);
  for (float& number : made) number = test::normal(random);
  return made;
}

template <class Cache>
std::vector<float> attended(Cache& cache, std::vector<float>& q, Read read) {
  std::vector<float> out(q.size());
  cache.attend(0, TensorView{q.data(), std::size_t{1}, shape.q_heads, head_dim},
               TensorView{out.data(), std::size_t{1}, shape.q_heads, head_dim}, {.read = read});
  return out;
}

template <class Cache>
void append(Cache& cache, std::size_t tokens, test::Random& random) {
  std::vector<float> k = numbers(tokens * shape.kv_heads * head_dim, random);
  std::vector<float> v = numbers(tokens * shape.kv_heads * head_dim, random);
  cache.append(0, TensorView{k.data(), tokens, shape.kv_heads, head_dim},
               TensorView{v.data(), tokens, shape.kv_heads, head_dim});
}

double difference(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    most = std::max(most, std::abs(static_cast<double>(a[i]) - b[i]));
  return most;
}

}  // namespace

TEST_CASE("reads of the upper half are approximate, and change nothing") {
  test::Random random{7};
  const auto format = LowBitFormat::of_halves(shape, 32);
  KvCache cache{HeadPlan<float>{shape, format.head<float>()}, options};
  append(cache, 500, random);
  append(cache, 1, random);
  std::vector<float> q = numbers(shape.q_heads * head_dim, random);
  const std::vector<float> all = attended(cache, q, Read::all);
  const std::vector<float> upper = attended(cache, q, Read::upper_half);
  CHECK(difference(all, upper) > 1e-5);
  CHECK(difference(all, upper) < 0.1);
  CHECK(attended(cache, q, Read::all) == all);
  CHECK(attended(cache, q, Read::upper_half) == upper);

  // Both read what the segments show: rows of 4 bits where rows are quantised, and the same exact rows.
  const SegmentList whole = cache.segments(0, 0);
  const SegmentList halves = cache.segments(0, 0, Read::upper_half);
  REQUIRE(whole.size() == halves.size());
  std::size_t quantised = 0;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    CHECK(whole[i].rows == halves[i].rows);
    CHECK(whole[i].position == halves[i].position);
    const bool packed = is_quantized(whole[i].keys.format.encoding);
    if (packed) quantised += whole[i].rows;
    CHECK(halves[i].keys.format.encoding == (packed ? Encoding::uint4 : whole[i].keys.format.encoding));
  }
  CHECK(quantised > 400);
}

TEST_CASE("heads without halves show the same for every read") {
  test::Random random{8};
  HeadPlan<float> plan{shape, LowBitFormat::of_text({8, 8}, shape, 16).head<float>()};
  plan.set(0, 1, SinkRecentCache<DenseStorage<float>>::Config{.sinks = 4, .recent = 40});
  KvCache cache{plan, options};
  append(cache, 200, random);
  append(cache, 1, random);
  std::vector<float> q = numbers(shape.q_heads * head_dim, random);
  CHECK(attended(cache, q, Read::all) == attended(cache, q, Read::upper_half));
}

TEST_CASE("a retrieval head over halves reads all its rows, or its selection whole") {
  test::Random random{9};
  using Policy = ChunkRetrievalCache<PerTokenStorage<float>>;
  const ResidualConfig storage{.bits = 8, .key_group = 32, .value_group = 32, .residual = 16, .halves = true};
  KvCache cache{HeadPlan<float>{shape, Policy::Config{.chunk = 8, .budget = 64, .storage = storage}},
                options};
  append(cache, 400, random);
  append(cache, 1, random);
  std::vector<float> q = numbers(shape.q_heads * head_dim, random);
  const std::vector<float> all = attended(cache, q, Read::all);
  const std::vector<float> selected = attended(cache, q, Read::selected);
  const std::vector<float> upper = attended(cache, q, Read::upper_half);
  CHECK(difference(all, upper) < 0.1);
  CHECK(difference(all, upper) > 1e-6);
  CHECK(difference(all, selected) > difference(all, upper));
  std::size_t rows = 0;
  for (const Segment& segment : cache.segments(0, 0, Read::upper_half)) rows += segment.rows;
  CHECK(rows == 401);
}

TEST_CASE("a cache in halves answers as one of plain 8 bits") {
  test::Random random{10};
  LowBitFormat plain = LowBitFormat::of_halves(shape, 16);
  plain.storage.halves = false;
  KvCache a{HeadPlan<float>{shape, LowBitFormat::of_halves(shape, 16).head<float>()}, options};
  KvCache b{HeadPlan<float>{shape, plain.head<float>()}, options};
  test::Random again = random;
  append(a, 333, random);
  append(b, 333, again);
  append(a, 1, random);
  append(b, 1, again);
  std::vector<float> q = numbers(shape.q_heads * head_dim, random);
  CHECK(attended(a, q, Read::all) == attended(b, q, Read::all));
  CHECK(a.bytes() > b.bytes());
  CHECK(10 * a.bytes() < 11 * b.bytes());
  CHECK(a.bytes() == a.plan().memory(a.tokens(), options).total());
}
