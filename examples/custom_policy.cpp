// SPDX-License-Identifier: Apache-2.0
//
// A policy of one's own: keep the opening, then every n-th row. It says which rows live; attention
// on any engine, rollback, forks and byte counts come with the library.
#include <cstdio>

#include <kvpolicy/cpu.hpp>
#include <kvpolicy/kvpolicy.hpp>

class StridedCache {
 public:
  using element_type = float;
  struct Config {
    using policy_type = StridedCache;
    std::size_t opening = 16, stride = 4;
    friend bool operator==(const Config&, const Config&) = default;
  };
  StridedCache(const Config& config, const kvpolicy::StorageContext& context)
      : config_{config}, kept_{{}, context} {
    kvpolicy::require(config.stride > 0, "StridedCache: stride is 0, must be at least 1");
  }
  void reserve(std::size_t rows) { kept_.reserve(rows); }
  void release_spare() noexcept { kept_.release_spare(); }
  void commit(const kvpolicy::Segment& rows) {
    for (std::size_t i = 0; i < rows.rows; ++i, ++seen_) {
      if (seen_ < config_.opening || seen_ % config_.stride == 0) kept_.append(rows.part(i, 1));
    }
    kept_.release_spare();  // what the rows left out would have taken
  }
  void segments(const kvpolicy::ReadRequest&, kvpolicy::SegmentList& out) const {
    kept_.show(0, kept_.end(), {}, out);
  }
  std::size_t rows() const { return kept_.end(); }
  std::size_t bytes() const { return kept_.bytes(); }
  std::size_t shared_bytes() const { return kept_.shared_bytes(); }

 private:
  Config config_;
  kvpolicy::DenseStorage<float> kept_;
  std::size_t seen_ = 0;
};

template <class Engine>
float last_output() {
  const kvpolicy::ModelShape shape{.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 64};
  kvpolicy::KvCache<float, Engine> cache{kvpolicy::HeadPlan{shape, StridedCache::Config{}}};
  std::vector<float> q(128), kv(64), out(128);
  for (std::size_t token = 0; token < 200; ++token) {
    for (std::size_t i = 0; i < 128; ++i) q[i] = kv[i / 2] = static_cast<float>((token + i) % 7);
    const kvpolicy::TensorView row{kv.data(), 1, 1, 64};
    cache.step(0, kvpolicy::TensorView{q.data(), 1, 2, 64}, row, row,
               kvpolicy::TensorView{out.data(), 1, 2, 64});
  }
  std::printf("%zu tokens, %zu bytes, %f\n", cache.tokens(), cache.bytes(), double{out.back()});
  return out.back();
}

int main() {
  const float difference = last_output<kvpolicy::ScalarEngine>() - last_output<kvpolicy::cpu::Engine<>>();
  return difference < 1e-5F && difference > -1e-5F ? 0 : 1;  // both engines say the same
}
