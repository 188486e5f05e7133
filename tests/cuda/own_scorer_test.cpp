// SPDX-License-Identifier: Apache-2.0
//
// Scorers of one's own on a device: they state a ranking that the kernels have, or bring a function of the key,
// written once; they keep what they keep on the host.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <kvpolicy/cuda/host_copy.hpp>

#include "cuda/support/device_cache.hpp"

using namespace kvpolicy;
using E = kvpolicy::float16;
using test::DeviceCache;
using test::DeviceChunk;
using test::DevicePlan;

namespace {

// The latest four queries vote, and other rows than theirs always stay.
struct LateVotes {
  struct Config {
    std::size_t kept = 12;
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor& visit) { visit("kept", kept); }
    void describe(HeadRule& rule) const { rule.ranking = Ranking::attention; }
  };
  static constexpr std::string_view name = "late_votes";
  static void validate(const Config&) {}
  static std::size_t kept_rows(const Config& config) { return config.kept; }
  static std::size_t observed_queries(const Config&) { return 4; }
  static void score(const Config&, std::span<const float> sums, std::size_t group, std::size_t /*queries*/,
                    std::span<float> out) {
    const std::size_t rows = sums.size() / group;
    for (std::size_t row = 0; row < out.size(); ++row) {
      out[row] = 0.0F;
      for (std::size_t head = 0; head < group; ++head) out[row] += sums[head * rows + row];
    }
  }
};

// All attention so far, and no row besides.
struct AllVotes {
  struct Config {
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor&) {}
    void describe(HeadRule& rule) const { rule.ranking = Ranking::accumulated; }
  };
  static constexpr std::string_view name = "all_votes";
  static void validate(const Config&) {}
  static std::size_t kept_rows(const Config&) { return 0; }
  static void score_sums(const Config&, std::span<const double> sums, std::span<float> out) {
    std::ranges::transform(sums, out.begin(), [](double sum) { return static_cast<float>(sum); });
  }
};

// The largest number of a key, and so much of the sum of its numbers.
struct PeakKey {
  struct Config {
    double share = 0.0;
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor& visit) { visit("share", share); }
    [[nodiscard]] KeyNumbers numbers() const { return {{static_cast<float>(share)}}; }
    void describe(HeadRule& rule) const {
      rule.ranking = Ranking::keys;
      rule.key_numbers = numbers();
    }
  };
  static constexpr std::string_view name = "peak_key";
  struct Gather {
    float share;
    float peak = -1e9F;
    float sum = 0.0F;

    KVPOLICY_HOST_DEVICE explicit Gather(const KeyNumbers& numbers) : share{numbers.number[0]} {}
    KVPOLICY_HOST_DEVICE void add(float number) {
      peak = number > peak ? number : peak;
      sum += number;
    }
    KVPOLICY_HOST_DEVICE float score() const { return peak + share * sum; }
  };
  static void validate(const Config&) {}
  static std::size_t kept_rows(const Config&) { return 2; }
  static float score_key(const Config& config, std::span<const float> key) {
    return gather_key<Gather>(config.numbers(), key);
  }
};
static_assert(GatheringKeyScorer<PeakKey>);

// A function of the key that only the host knows.
struct FirstChannel {
  struct Config {
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor&) {}
  };
  static constexpr std::string_view name = "first_channel";
  static void validate(const Config&) {}
  static std::size_t kept_rows(const Config&) { return 0; }
  static float score_key(const Config&, std::span<const float> key) { return key[0]; }
};

template <class Scorer, class Storage = DenseStorage<E>>
using Budget = HeadBudgetCache<Storage, Scorer>;

constexpr ModelShape shape{1, 10, 5, 64};

DevicePlan own_plan(std::size_t compress_every) {
  DevicePlan plan{shape, Budget<LateVotes>::Config{.budget = 20, .compress_every = compress_every}};
  plan.set(0, 1, Budget<AllVotes>::Config{.budget = 25, .compress_every = compress_every});
  plan.set(0, 2, Budget<PeakKey>::Config{.budget = 30, .compress_every = compress_every});
  plan.set(0, 3,
           Budget<PeakKey>::Config{.budget = 7, .compress_every = compress_every, .scorer = {.share = 0.5}});
  plan.set(0, 4, Budget<KeyNormScorer>::Config{.budget = 11, .compress_every = compress_every});
  return plan;
}

std::shared_ptr<gpu::Engine<E>> own_engine() {
  auto engine = std::make_shared<gpu::Engine<E>>(shape);
  engine->serve<PeakKey>();
  return engine;
}

void step_both(test::Random& random, DeviceCache& device, KvCache<E>& host, std::size_t tokens) {
  const DeviceChunk<> chunk{random, shape, tokens};
  chunk.step(device, 0);
  const auto q = chunk.q.download(), k = chunk.k.download(), v = chunk.v.download();
  std::vector<float> out(tokens * shape.q_heads * shape.head_dim);
  const auto rows = [&](const std::vector<E>& numbers, std::size_t heads) {
    return TensorView{numbers.data(), tokens, heads, shape.head_dim};
  };
  host.step(0, rows(q, shape.q_heads), rows(k, shape.kv_heads), rows(v, shape.kv_heads),
            TensorView{out.data(), tokens, shape.q_heads, shape.head_dim});
}

void check_same_rows(const DeviceCache& device, const KvCache<E>& host) {
  for (std::size_t head = 0; head < shape.kv_heads; ++head) {
    CAPTURE(head);
    std::vector<std::int64_t> positions;
    for (const kvpolicy::Segment& rows : host.segments(0, head)) {
      for (std::size_t i = 0; i < rows.rows; ++i) positions.push_back(rows.position_of(i));
    }
    CHECK(device.rows(0, head).positions == positions);
  }
}

std::string refusal(const DevicePlan& plan, std::shared_ptr<gpu::Engine<E>> engine = nullptr) {
  return test::thrown<ConfigError>([&] { DeviceCache{plan, {}, nullptr, engine}; });
}

}  // namespace

TEST_CASE("scorers of one's own keep on a device what they keep on the host") {
  const test::SmallDevice small;
  for (const std::size_t every : std::initializer_list<std::size_t>{0, 9}) {
    CAPTURE(every);
    KvCache<E> host{own_plan(every)};
    DeviceCache device{own_plan(every), {}, nullptr, own_engine()};
    test::Random random{every + 3};
    for (const std::size_t tokens : std::initializer_list<std::size_t>{70, 1, 1, 20, 3, 100, 1}) {
      step_both(random, device, host, tokens);
      check_same_rows(device, host);
    }
    device.compress();
    host.compress();
    check_same_rows(device, host);
    CHECK(device.rows(0, 3).positions.size() == 9);
    CHECK(device.observed_rows() == host.observed_rows());
    DeviceCache fork = device.fork();
    KvCache<E> copy = gpu::to_host(device);
    step_both(random, fork, copy, 30);
    fork.compress();
    copy.compress();
    check_same_rows(fork, copy);
  }
}

TEST_CASE("scorers of one's own: quantised keys are ranked as they read") {
  const test::SmallDevice small;
  for (const bool rotated : {false, true}) {
    CAPTURE(rotated);
    const ResidualConfig storage{
        .bits = 8, .residual = 0, .key_hadamard = rotated, .value_hadamard = rotated};
    const DevicePlan plan{shape,
                          Budget<PeakKey, PerTokenStorage<E>>::Config{.budget = 90, .storage = storage}};
    KvCache<E> host{plan};
    DeviceCache device{plan, {}, nullptr, own_engine()};
    test::Random random{1};
    step_both(random, device, host, 156);
    for (int i = 0; i < 2; ++i) {
      device.compress();
      host.compress();
      check_same_rows(device, host);
      step_both(random, device, host, 36);  // 92 + 36 rows are two blocks
    }
  }
}

TEST_CASE("scorers of one's own: what a device lacks is refused by name") {
  const test::SmallDevice small;
  CHECK(test::contains(refusal(own_plan(0)),
                       "rows are ranked by a function of their keys, peak_key, for which the "
                       "engine has no kernel; call Engine::serve"));
  CHECK(refusal(own_plan(0), own_engine()).empty());
  CHECK(test::contains(
      refusal(DevicePlan{shape, Budget<FirstChannel>::Config{}}),
      "ranked by first_channel have no kernel, because the scorer's `describe` states no ranking"));
  CHECK(test::contains(refusal(DevicePlan{shape, Budget<LateVotes>::Config{.scorer = {.kept = 2}}}),
                       "window is 4 queries, must be 1 to 3: at most one more than the rows"));
  CHECK(refusal(DevicePlan{shape, Budget<LateVotes>::Config{.scorer = {.kept = 3}}}).empty());
}
