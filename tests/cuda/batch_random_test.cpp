// SPDX-License-Identifier: Apache-2.0
//
// Random operations on a device cache whose every step is part of a batch, beside other sequences: it does what
// the set-based models of its heads say, and the others keep what they keep when they are called alone.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/support/device_cache.hpp"
#include "cuda/support/random_device.hpp"

namespace {

using kvpolicy::AttendOptions;
using kvpolicy::LeftOut;
using kvpolicy::TensorView;
using test::DeviceChunk;

/// Another sequence of the same batch, and its twin, which is called alone.
template <kvpolicy::Element E>
struct Companion {
  kvpolicy::gpu::KvCache<E> batched;
  kvpolicy::gpu::KvCache<E> alone;

  static kvpolicy::HeadPlan<E> plan(const kvpolicy::ModelShape& shape, std::size_t first) {
    const std::vector<test::HeadSpec> all = test::mixed_heads();
    std::vector<test::HeadSpec> heads;
    while (heads.size() < shape.kv_head_count()) heads.push_back(all[(first + heads.size()) % all.size()]);
    return test::plan_of<E>(shape, heads);
  }
};

template <kvpolicy::Element E>
class BatchedCache : public test::WaitingCache<E> {
 public:
  using Base = test::WaitingCache<E>;
  using Batch = kvpolicy::gpu::Batch<E>;

  BatchedCache(const kvpolicy::HeadPlan<E>& plan, const kvpolicy::gpu::CacheOptions& options)
      : Base{plan, options} {
    invite();
  }

  [[nodiscard]] BatchedCache fork() const { return BatchedCache{Base::fork()}; }

  template <class Q, class K, class V, class Out>
  void step(std::size_t l, Q q, K k, V v, Out out, AttendOptions options = {}) {
    const std::size_t own = q.tokens;
    const auto sinks = Base::move_sinks(options);
    const std::size_t more[] = {test::below(random_, 4), test::below(random_, 3) == 0 ? 19U : 1U};
    // The first companion's tokens, those of the cache, those of the second.
    const DeviceChunk<E> ragged{random_, Base::plan().shape(), more[0] + own + more[1]};
    const auto part = [&](auto* data, std::size_t heads, std::size_t first, std::size_t count) {
      return ragged.rows(data, heads, first, count);
    };
    const auto& shape = Base::plan().shape();
    copy(part(ragged.q.data(), shape.q_heads, more[0], own), q);
    copy(part(ragged.k.data(), shape.kv_heads, more[0], own), k);
    copy(part(ragged.v.data(), shape.kv_heads, more[0], own), v);
    AttendOptions theirs;
    theirs.scale = options.scale;
    theirs.softcap = options.softcap;
    theirs.attention_sink_bias = options.attention_sink_bias;
    const std::size_t first[] = {0, more[0] + own};
    std::vector<kvpolicy::BatchSequence<kvpolicy::gpu::KvCache<E>>> sequences(4);
    sequences[1] = {this, options};
    sequences[2] = {idle_.get(), theirs};
    for (const std::size_t c : {0U, 1U}) {
      theirs.log_sum_exp = {ragged.log_sum_exp.data() + first[c] * shape.q_heads, more[c] * shape.q_heads};
      sequences[3 * c] = {&companions_[c]->batched, theirs};
    }
    const auto at = [](std::size_t token) { return static_cast<std::int32_t>(token); };
    const std::vector<std::int32_t> indptr{0, at(more[0]), at(first[1]), at(first[1]),
                                           at(first[1] + more[1])};
    const auto all = [&](const auto& tensor, std::size_t heads) {
      return ragged.template rows<const E>(tensor.data(), heads, 0, ragged.tokens);
    };
    const auto left_out =
        batch_->step(l, sequences, indptr, all(ragged.q, shape.q_heads), all(ragged.k, shape.kv_heads),
                     all(ragged.v, shape.kv_heads), part(ragged.out.data(), shape.q_heads, 0, ragged.tokens));
    copy(out, part(static_cast<const E*>(ragged.out.data()), shape.q_heads, more[0], own));
    for (const std::size_t c : {0U, 1U}) compare(l, *companions_[c], ragged, first[c], more[c], theirs);
    test::succeed(cudaStreamSynchronize(nullptr));
    for (const LeftOut& one : left_out) {
      REQUIRE(one.sequence == 1);
      std::rethrow_exception(one.error);
    }
  }

 private:
  explicit BatchedCache(Base base) : Base{std::move(base)} { invite(); }

  void invite() {
    const auto& shape = Base::plan().shape();
    const kvpolicy::gpu::CacheOptions options{.max_rollback = 3, .page_rows = Base::options().page_rows};
    using Cache = kvpolicy::gpu::KvCache<E>;
    const auto made = [&](std::size_t first) {
      return Cache{Companion<E>::plan(shape, first), options, nullptr, Base::engine()};
    };
    for (const std::size_t first : {1U, 5U})
      companions_.emplace_back(new Companion<E>{made(first), made(first)});
    idle_.reset(new Cache{made(0)});
    batch_.reset(new Batch{Base::engine(), 4});
  }

  // The companion's rows are those of its twin, bit for bit; what it read is the same to rounding.
  void compare(std::size_t l, Companion<E>& one, const DeviceChunk<E>& ragged, std::size_t first,
               std::size_t count, AttendOptions options) {
    const auto& shape = Base::plan().shape();
    const auto rows = [&](const auto& tensor, std::size_t heads) {
      return ragged.template rows<const E>(tensor.data(), heads, first, count);
    };
    const std::vector<float> said = results(ragged, first, count);
    options.log_sum_exp = {ragged.log_sum_exp.data() + first * shape.q_heads, count * shape.q_heads};
    one.alone.step(l, rows(ragged.q, shape.q_heads), rows(ragged.k, shape.kv_heads),
                   rows(ragged.v, shape.kv_heads),
                   ragged.rows(ragged.out.data(), shape.q_heads, first, count), options);
    CHECK(test::largest_difference(results(ragged, first, count), said) <= test::DeviceBackend<E>::out_error);
    if (test::below(random_, 5) == 0) CHECK(test::dump_device(one.batched) == test::dump_device(one.alone));
  }

  // Of `count` tokens from `first` on.
  [[nodiscard]] static std::vector<float> results(const DeviceChunk<E>& chunk, std::size_t first,
                                                  std::size_t count) {
    const std::vector<float> all = chunk.results();
    const std::size_t row = chunk.shape.q_heads * chunk.shape.head_dim;
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(first * row);
    const auto lse =
        all.begin() + static_cast<std::ptrdiff_t>(chunk.tokens * row + first * chunk.shape.q_heads);
    std::vector<float> own(begin, begin + static_cast<std::ptrdiff_t>(count * row));
    own.insert(own.end(), lse, lse + static_cast<std::ptrdiff_t>(count * chunk.shape.q_heads));
    return own;
  }

  template <class To, class From>
  static void copy(TensorView<To> to, From from) {
    for (std::size_t token = 0; token < from.tokens; ++token) {
      for (std::size_t head = 0; head < from.heads; ++head) {
        test::succeed(cudaMemcpyAsync(to.row(token, head), from.row(token, head), from.head_dim * sizeof(E),
                                      cudaMemcpyDefault, nullptr));
      }
    }
  }

  std::vector<std::unique_ptr<Companion<E>>> companions_;
  std::unique_ptr<kvpolicy::gpu::KvCache<E>> idle_;  // without tokens in any call
  std::unique_ptr<Batch> batch_;
  test::Random random_{4711};
};

template <kvpolicy::Element E>
struct BatchedBackend : test::DeviceBackend<E> {
  using Base = test::DeviceBackend<E>;
  using Cache = BatchedCache<E>;

  static std::size_t live_bytes(const std::vector<const Cache*>& caches) {
    return Base::live_bytes({caches.begin(), caches.end()});
  }
};

}  // namespace

TEST_CASE("random operations on a sequence of a batch on the device: every policy does what its model says") {
  const test::SmallDevice small;
  test::random_device_sequences<kvpolicy::float16, BatchedBackend<kvpolicy::float16>>(test::more_seeds(3),
                                                                                      14);
  test::random_device_sequences<test::OtherElement, BatchedBackend<test::OtherElement>>(test::more_seeds(4),
                                                                                        8);
}
