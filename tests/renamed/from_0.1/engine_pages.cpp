// SPDX-License-Identifier: Apache-2.0
//
// A cache whose rows lie in an engine's own paged KV tensor (docs/engine_pages.md): it reads what a cache with pages
// of its own reads, and an engine's kernel finds its rows by page ids.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <span>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>

namespace {

constexpr kvpolicy::ModelShape shape{.layers = 1, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
constexpr std::size_t block_count = 64;
using Number = kvpolicy::bfloat16;  // what the tensor holds

// Tokens of one layer: keys, values and queries that any model could have made.
std::vector<Number> tokens(std::size_t first, std::size_t count, std::size_t heads, double frequency) {
  std::vector<Number> numbers(count * heads * shape.head_dim);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const std::size_t index = first * heads * shape.head_dim + i;
    numbers[i] = Number{static_cast<float>(std::sin(static_cast<double>(index) * frequency))};
  }
  return numbers;
}

std::vector<float> step(kvpolicy::KvCache<Number>& cache, std::size_t count) {
  const std::size_t first = cache.tokens();
  const auto q = tokens(first, count, shape.q_heads, 0.7);
  const auto k = tokens(first, count, shape.kv_heads, 0.3);
  const auto v = tokens(first, count, shape.kv_heads, 0.9);
  std::vector<float> out(count * shape.q_heads * shape.head_dim);
  cache.step(0, kvpolicy::TensorView{q.data(), count, shape.q_heads, shape.head_dim},
             kvpolicy::TensorView{k.data(), count, shape.kv_heads, shape.head_dim},
             kvpolicy::TensorView{v.data(), count, shape.kv_heads, shape.head_dim},
             kvpolicy::TensorView{out.data(), count, shape.q_heads, shape.head_dim});
  return out;
}

bool check(bool ok, const char* what) {
  std::printf("%s: %s\n", ok ? "as it should be" : "WRONG", what);
  return ok;
}

}  // namespace

int main() {
  std::vector<std::byte> tensor(2 * block_count * 16 * shape.kv_heads * shape.head_dim * sizeof(Number));
  bool ok = true;

  using Rows = kvpolicy::EnginePageStorage<Number>;
  const kvpolicy::BlockShape blocks{.blocks = block_count,
                                    .block_size = 16,
                                    .kv_heads = shape.kv_heads,
                                    .row_bytes = shape.head_dim * sizeof(Number)};
  kvpolicy::PagePool pool{kvpolicy::vllm_nhd(tensor, blocks)};  // must outlive its caches

  // The engine takes a block for itself; a page has one owner at first, who gives it back.
  constexpr std::size_t own_block = 7;
  for (std::size_t head = 0; head < shape.kv_heads; ++head) {
    const kvpolicy::PageId page = pool.engine_page(/*arena=*/0, head, own_block);
    ok &= check(pool.claim(page), "the engine's own block was free");
  }

  kvpolicy::HeadPlan<Number> plan{shape, kvpolicy::FullCache<Rows>::Config{}};
  plan.set(/*layer=*/0, /*head=*/1, kvpolicy::SinkRecentCache<Rows>::Config{.sinks = 4, .recent = 28});
  kvpolicy::KvCache<Number> cache{plan, {.page_rows = blocks.block_size, .pool = &pool}};

  kvpolicy::HeadPlan<Number> own_plan{shape};
  own_plan.set(0, 1,
               kvpolicy::SinkRecentCache<kvpolicy::DenseStorage<Number>>::Config{.sinks = 4, .recent = 28});
  kvpolicy::KvCache<Number> control{own_plan, {.page_rows = blocks.block_size}};
  for (const std::size_t count : {std::size_t{90}, std::size_t{1}, std::size_t{1}, std::size_t{9}}) {
    ok &= check(step(cache, count) == step(control, count), "reads what a cache with pages of its own reads");
  }

  // Rows that could be taken back are in the tail; now all are in the tensor.
  cache.commit();
  const auto& policy = cache.policy<kvpolicy::FullCache<Rows>>(/*layer=*/0, /*head=*/0);
  std::size_t row = 0;
  for (const kvpolicy::PageId page : policy.storage().pages()) {
    const std::byte* keys = pool.address(page);  // a value is values_offset bytes after its key
    for (std::size_t i = 0; i < blocks.block_size && row < cache.tokens(); ++i, ++row) {
      const auto expected = tokens(row, 1, shape.kv_heads, 0.3);
      ok &= std::memcmp(keys + i * pool.engine_rows().row_stride, expected.data(), blocks.row_bytes) == 0;
    }
  }
  ok &= check(ok && row == cache.tokens(), "every key is where its page id says");

  for (std::size_t head = 0; head < shape.kv_heads; ++head) {
    pool.release(pool.engine_page(/*arena=*/0, head, own_block));
  }
  // An engine whose tensor is in FP8 gives the scales of its keys and values as well.
  std::vector<std::byte> fp8_tensor(2 * block_count * 16 * shape.kv_heads * shape.head_dim);
  using Fp8Rows = kvpolicy::EnginePageStorage<Number, kvpolicy::Codebook::fp8>;
  kvpolicy::BlockShape fp8_blocks = blocks;
  fp8_blocks.row_bytes = shape.head_dim;  // a byte for each number
  kvpolicy::PagePool fp8_pool{kvpolicy::vllm_nhd(fp8_tensor, fp8_blocks)};
  kvpolicy::HeadPlan<Number> fp8_plan{
      shape, kvpolicy::FullCache<Fp8Rows>::Config{.storage = {.key_scale = 0.01, .value_scale = 0.02}}};
  kvpolicy::KvCache<Number> in_fp8{fp8_plan, {.page_rows = blocks.block_size, .pool = &fp8_pool}};
  kvpolicy::KvCache<Number> in_full{kvpolicy::HeadPlan<Number>{shape}, {.page_rows = blocks.block_size}};
  static_cast<void>(step(in_fp8, 90));  // a call reads its own rows as it brings them, and codes from then on
  static_cast<void>(step(in_full, 90));
  const std::vector<float> near = step(in_fp8, 9);
  const std::vector<float> exact = step(in_full, 9);
  double off = 0;
  for (std::size_t i = 0; i < near.size(); ++i)
    off = std::max(off, std::abs(static_cast<double>(near[i] - exact[i])));
  ok &= check(off > 0 && off < 0.1, "FP8 is near what exact rows give");
  ok &= check(in_fp8.bytes() < in_full.bytes() * 6 / 10, "FP8 takes little more than half the bytes");

  // The cache counts its tail as well.
  ok &= check(pool.live_bytes() > 0 && pool.live_bytes() <= cache.bytes(),
              "the pool counts the cache's pages alone");
  return ok ? 0 : 1;
}
