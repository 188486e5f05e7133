// SPDX-License-Identifier: Apache-2.0
//
// Chunk summaries of one's own on a device, written once for both: what the host chooses by them, the device
// chooses too.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <set>
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

// The middle between the smallest and the largest number.
struct MidRange {
  static constexpr std::string_view name = "mid_range";
  static constexpr std::size_t vectors = 1;
  float min = 1e9F;
  float max = -1e9F;

  KVPOLICY_HOST_DEVICE void add(float number) {
    min = number < min ? number : min;
    max = number > max ? number : max;
  }
  KVPOLICY_HOST_DEVICE float finish(int) const { return 0.5F * (min + max); }
  KVPOLICY_HOST_DEVICE static float split(int, float query) { return query; }
  template <class Archive>
  void serialize(Archive& archive) {
    archive(min, max);
  }
};

// The first and the last number: a query takes the first where it is positive.
struct Ends {
  static constexpr std::string_view name = "ends";
  static constexpr std::size_t vectors = 2;
  float number[2] = {};
  bool begun = false;

  KVPOLICY_HOST_DEVICE void add(float next) {
    if (!begun) number[0] = next;
    number[1] = next;
    begun = true;
  }
  KVPOLICY_HOST_DEVICE float finish(int which) const { return number[which]; }
  KVPOLICY_HOST_DEVICE static float split(int which, float query) {
    return (query > 0.0F) == (which == 0) ? query : 0.0F;
  }
  template <class Archive>
  void serialize(Archive& archive) {
    archive(number[0], number[1], begun);
  }
};

// Host alone: the sum of the keys.
class SumKey : public MeanKey {
 public:
  static constexpr std::string_view name = "sum";
  using MeanKey::MeanKey;
};

template <class Channel, class Storage = DenseStorage<E>>
using Retrieval = ChunkRetrievalCache<Storage, ChannelSummary<Channel>>;

constexpr ModelShape shape{1, 8, 4, 64};

DevicePlan own_plan() {
  DevicePlan plan{shape, Retrieval<MidRange>::Config{.chunk = 8, .budget = 32}};
  plan.set(0, 1, Retrieval<Ends>::Config{.chunk = 5, .budget = 15});
  plan.set(0, 2, ChunkRetrievalCache<DenseStorage<E>, MinMaxKey>::Config{.chunk = 8, .budget = 24});
  plan.set(0, 3, Retrieval<Ends>::Config{.chunk = 16, .budget = 48, .refresh_every = 20});
  return plan;
}

std::shared_ptr<gpu::Engine<E>> own_engine() {
  auto engine = std::make_shared<gpu::Engine<E>>(shape);
  engine->serve<ChannelSummary<MidRange>>();
  engine->serve<ChannelSummary<Ends>>();
  return engine;
}

void step_both(test::Random& random, DeviceCache& device, KvCache<E>& host, std::size_t tokens,
               const AttendOptions& options = {}) {
  const DeviceChunk<> chunk{random, shape, tokens};
  chunk.step(device, 0, options);
  const auto q = chunk.q.download(), k = chunk.k.download(), v = chunk.v.download();
  std::vector<float> out(tokens * shape.q_heads * shape.head_dim);
  const auto rows = [&](const std::vector<E>& numbers, std::size_t heads) {
    return TensorView{numbers.data(), tokens, heads, shape.head_dim};
  };
  host.step(0, rows(q, shape.q_heads), rows(k, shape.kv_heads), rows(v, shape.kv_heads),
            TensorView{out.data(), tokens, shape.q_heads, shape.head_dim}, options);
}

void check_same_rows(const DeviceCache& device, const KvCache<E>& host) {
  for (std::size_t head = 0; head < shape.kv_heads; ++head) {
    CAPTURE(head);
    std::set<std::int64_t> expected;
    for (const kvpolicy::Segment& rows : host.segments(0, head, Read::selected)) {
      rows.for_each_run([&](const RowRun& run) {
        for (std::size_t i = run.first; i < run.first + run.rows; ++i) expected.insert(rows.position_of(i));
      });
    }
    const auto shown = device.rows(0, head, Read::selected).positions;
    CHECK(std::set<std::int64_t>(shown.begin(), shown.end()) == expected);
  }
}

}  // namespace

TEST_CASE("summaries of one's own choose on a device what they choose on the host") {
  const test::SmallDevice small;
  const AttendOptions choose{.read = Read::selected, .refresh_selection = true};
  for (const std::size_t max_rollback : std::initializer_list<std::size_t>{0, 9}) {
    CAPTURE(max_rollback);
    kvpolicy::CacheOptions options;
    options.max_rollback = max_rollback;
    KvCache<E> host{own_plan(), options};
    DeviceCache device{own_plan(), {.max_rollback = max_rollback}, nullptr, own_engine()};
    test::Random random{max_rollback + 5};
    for (const std::size_t tokens : std::initializer_list<std::size_t>{150, 1, 7, 1, 40, 1, 1, 90, 1}) {
      step_both(random, device, host, tokens);
      step_both(random, device, host, 1, choose);
      check_same_rows(device, host);
      if (max_rollback == 0) continue;
      const std::size_t to = host.tokens() - 3;
      host.truncate(to);
      device.truncate(to);
    }
    DeviceCache fork = device.fork();
    KvCache<E> copy = gpu::to_host(device);
    DeviceCache back = gpu::to_device(copy, {.max_rollback = max_rollback}, nullptr, own_engine());
    step_both(random, fork, copy, 30, choose);
    check_same_rows(fork, copy);
    KvCache<E> again = gpu::to_host(back);
    step_both(random, back, again, 30, choose);
    check_same_rows(back, again);
  }
}

TEST_CASE("summaries of one's own: a text that is taken over is summarised") {
  const test::SmallDevice small;
  const DevicePlan full{shape, FullCache<DenseStorage<E>>::Config{}};
  KvCache<E> host{full};
  DeviceCache device{full, {}, nullptr, own_engine()};
  test::Random random{3};
  step_both(random, device, host, 200);
  KvCache<E> own = host.fork_as(own_plan());
  DeviceCache own_device = device.fork_as(own_plan());
  step_both(random, own_device, own, 1, {.read = Read::selected, .refresh_selection = true});
  check_same_rows(own_device, own);
}

TEST_CASE("summaries of one's own: what a device lacks is refused by name") {
  const test::SmallDevice small;
  const auto refusal = [](const DevicePlan& plan, std::shared_ptr<gpu::Engine<E>> engine = nullptr) {
    return test::thrown<ConfigError>([&] { DeviceCache{plan, {}, nullptr, engine}; });
  };
  CHECK(test::contains(refusal(own_plan()),
                       "chunks are summarised by mid_range, for which the engine has no kernels"));
  CHECK(refusal(own_plan(), own_engine()).empty());
  CHECK(test::contains(
      refusal(DevicePlan{shape, ChunkRetrievalCache<DenseStorage<E>, SumKey>::Config{}}, own_engine()),
      "chunks are summarised by sum"));
  const DeviceCache cache{own_plan(), {}, nullptr, own_engine()};
  CHECK(test::contains(test::thrown<ConfigError>([&] {
                         static_cast<void>(cache.fork(nullptr, std::make_shared<gpu::Engine<E>>(shape)));
                       }),
                       "chunks are summarised by mid_range"));
}
