// SPDX-License-Identifier: Apache-2.0
//
// A captured step of a batch with seats, replayed while sequences come and go: each has the rows that its twin has,
// which takes every step by itself, and reads the same.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/support/device_cache.hpp"

using namespace kvpolicy;
using test::contains;
using test::DeviceCache;
using test::DeviceChunk;
using test::Graph;
using test::thrown;

namespace {

using E = float16;
constexpr ModelShape shape{2, 16, 8, 64};
constexpr std::size_t seats = 4;
constexpr std::size_t row = 16 * 64;  // numbers of a token's queries

// Each sequence has other heads in each place.
test::DevicePlan plan_of_sequence(std::size_t number) {
  const std::vector<test::HeadSpec> all = test::mixed_heads();
  std::vector<test::HeadSpec> heads;
  while (heads.size() < shape.kv_head_count()) heads.push_back(all[(number + heads.size()) % all.size()]);
  return test::plan_of<E>(shape, heads);
}

struct Sequence {
  DeviceCache cache;
  DeviceCache twin;
};

// A batch whose step is captured once.
struct Hall {
  test::SmallDevice device;
  test::Stream stream;
  std::size_t tokens;
  Read read;
  std::shared_ptr<gpu::Engine<E>> engine;
  gpu::SeatedBatch<E> batch;
  std::vector<std::unique_ptr<Sequence>> sequences = {};
  std::vector<DeviceChunk<>> inputs = {};  // of each layer: what the graph reads
  std::optional<Graph> graph = {};
  std::size_t made = 0;
  test::Random random{3};

  Hall(std::size_t of_seat, Read how)
      : tokens{of_seat},
        read{how},
        engine{std::make_shared<gpu::Engine<E>>(shape, gpu::default_memory(), stream)},
        batch{engine, seats, tokens, 64, gpu::default_memory(), stream},
        sequences(seats) {
    for (std::size_t l = 0; l < shape.layers; ++l) inputs.emplace_back(shape, seats * tokens);
    graph.emplace(stream, [&] { put_step(); });
  }

  void put_step(AttendOptions options = {}) {
    for (std::size_t l = 0; l < shape.layers; ++l) {
      const DeviceChunk<>& in = inputs[l];
      options.log_sum_exp = {in.log_sum_exp.data(), in.log_sum_exp.size()};
      batch.step(l, in.rows<const E>(in.q.data(), shape.q_heads, 0, in.tokens),
                 in.rows<const E>(in.k.data(), shape.kv_heads, 0, in.tokens),
                 in.rows<const E>(in.v.data(), shape.kv_heads, 0, in.tokens),
                 in.rows<E>(in.out.data(), shape.q_heads, 0, in.tokens), options, stream);
    }
  }
  void join(std::size_t seat) {
    const gpu::CacheOptions options{.max_rollback = made % 3 == 0 ? 0U : 4U, .max_append = 8};
    const auto plan = plan_of_sequence(made++);
    sequences[seat].reset(
        new Sequence{DeviceCache{plan, options, stream, engine}, DeviceCache{plan, options, stream}});
    for (DeviceCache* each : {&sequences[seat]->cache, &sequences[seat]->twin}) {
      test::feed_device(*each, made, {70, 2}, {.refresh_selection = true}, stream);
      each->compress(stream);
      each->reserve(400, stream);
    }
    batch.seat(seat, sequences[seat]->cache, read, stream);
  }
  void leave(std::size_t seat) {
    check(seat);
    batch.vacate(seat, stream);
    sequences[seat].reset();
  }
  void check(std::size_t seat) const {
    const Sequence& one = *sequences[seat];
    CHECK(test::dump_device(one.cache, true, stream) == test::dump_device(one.twin, true, stream));
  }
  // A replay, and the twins' own steps; whether all say the same.
  bool replay() {
    const std::vector<E> marks(seats * tokens * row, E{-7.0F});
    for (const DeviceChunk<>& in : inputs) {
      in.randomize(random, stream);
      in.out.upload(marks, stream);
    }
    batch.replayed();
    graph->launch(stream);
    bool same = true;
    for (std::size_t l = 0; l < shape.layers; ++l) {
      const DeviceChunk<>& in = inputs[l];
      const std::vector<float> said = in.results(stream);
      for (std::size_t seat = 0; seat < seats; ++seat) {
        if (sequences[seat] != nullptr) {
          in.step_part(sequences[seat]->twin, l, seat * tokens, tokens, {.read = read}, stream);
        }
      }
      const std::vector<float> alone = in.results(stream);
      for (std::size_t i = 0; i < seats * tokens * row; ++i) {
        const bool taken = sequences[i / row / tokens] != nullptr;
        same = same && (taken ? std::abs(said[i] - alone[i]) <= 4e-3F : said[i] == -7.0F);
      }
      for (std::size_t i = 0; i < seats * tokens * shape.q_heads; ++i) {
        const std::size_t at = seats * tokens * row + i;
        const bool taken = sequences[i / shape.q_heads / tokens] != nullptr;
        same = same && (!taken || std::abs(said[at] - alone[at]) <= 4e-3F);
      }
    }
    return same;
  }
};

}  // namespace

TEST_CASE("a graph of a batch is replayed while sequences come, go and do what they do") {
  for (const std::size_t tokens : {1U, 3U}) {
    CAPTURE(tokens);
    Hall hall{tokens, tokens == 1 ? Read::selected : Read::upper_half};
    CHECK(hall.replay());  // nobody has a seat
    test::Random random{tokens};
    bool same = true;
    for (int i = 0; i < 18; ++i) {
      const std::size_t seat = test::below(random, seats);
      const std::size_t what = test::below(random, 8);
      if (hall.sequences[seat] == nullptr) {
        hall.join(seat);
      } else if (what == 0) {
        hall.leave(seat);
      } else if (what == 1) {
        Sequence& one = *hall.sequences[seat];
        const std::size_t to =
            one.twin.tokens() - test::below(random, one.twin.tokens() - one.twin.commit_point() + 1);
        for (DeviceCache* each : {&one.cache, &one.twin}) each->truncate(to, hall.stream);
      } else if (what == 2) {
        Sequence& one = *hall.sequences[seat];
        for (DeviceCache* each : {&one.cache, &one.twin}) each->compress(hall.stream);
        hall.check(seat);
      } else if (what == 3) {
        Sequence& one = *hall.sequences[seat];
        CHECK(test::same_bits(test::next_step(one.cache, 9, 5, {}, hall.stream),
                              test::next_step(one.twin, 9, 5, {}, hall.stream)));
      }
      for (int step = 0; step < 2; ++step) same = hall.replay() && same;
    }
    CHECK(same);
    for (std::size_t seat = 0; seat < seats; ++seat) {
      if (hall.sequences[seat] != nullptr) hall.leave(seat);
    }
    CHECK(hall.replay());
  }
}

#if !defined(__CUDACC__)  // only the emulation counts
TEST_CASE("a step of a batch with seats is two launches a layer and asks nothing of the host") {
  Hall hall{1, Read::all};
  for (const std::size_t seat : {0U, 2U, 3U}) hall.join(seat);
  CHECK(hall.replay());
  hall.stream.wait();
  const std::uint64_t launches = gpu::simt::grid().launches;
  const std::uint64_t waits = gpu::simt::device().waits();
  const std::size_t bytes = gpu::simt::device().live_bytes();
  for (int i = 0; i < 4; ++i) {
    hall.batch.replayed();
    hall.graph->launch(hall.stream);
  }
  hall.put_step();
  CHECK(gpu::simt::grid().launches - launches == 5 * 2 * shape.layers);
  CHECK(gpu::simt::device().waits() == waits);
  CHECK(gpu::simt::device().live_bytes() == bytes);
  hall.stream.wait();
}
#endif

TEST_CASE("what cannot have a seat is refused, and what has one keeps it") {
  Hall hall{1, Read::all};
  hall.join(1);
  DeviceCache& first = hall.sequences[1]->cache;
  const auto before = test::dump_device(first, true, hall.stream);
  const auto seat = [&](std::size_t place, DeviceCache& cache) {
    hall.batch.seat(place, cache, Read::all, hall.stream);
  };
  CHECK(contains(thrown<ShapeError>([&] { seat(4, first); }), "no seat 4, the batch has 4"));
  CHECK(contains(thrown<ShapeError>([&] { hall.batch.vacate(9, hall.stream); }), "no seat 9"));
  CHECK(contains(thrown<ConfigError>([&] { seat(2, first); }), "has a seat already"));
  const auto refused = [&](const test::DevicePlan& plan, const gpu::CacheOptions& options,
                           const std::string& says) {
    DeviceCache cache{plan, options, hall.stream, hall.engine};
    const std::string text = thrown<ConfigError>([&] { seat(2, cache); });
    INFO(text);
    CHECK(contains(text, says));
    CHECK(hall.batch.at(2) == nullptr);
  };
  const test::DevicePlan plain{shape};
  refused(plain, {.page_rows = 128}, "pages of 128 rows");
  test::DevicePlan plan = plain;
  plan.set(1, 2, HeadBudgetCache<DenseStorage<E>>::Config{.budget = 8, .compress_every = 4});
  refused(plan, {}, "compresses by itself");
  std::vector<test::HeadSpec> heads(shape.kv_head_count());
  heads[3] = {.kind = test::Kind::budget, .rank = test::Rank::h2o, .budget = 17, .window = 9};
  plan = test::plan_of<E>(shape, heads);
  refused(plan, {}, "add up attention");
  // Heads that wait for scoring passes add up nothing in a seat.
  DeviceCache zip{test::DevicePlan{shape, HeadBudgetCache<DenseStorage<E>, KvZipScorer>::Config{}},
                  {},
                  hall.stream,
                  hall.engine};
  seat(2, zip);
  hall.batch.vacate(2, hall.stream);
  CHECK(contains(thrown<ConfigError>([&] { hall.put_step({.scores_rows = true}); }), "score no rows"));
  for (const Read read : {Read::selected, Read::upper_half, Read::bounded}) {
    CHECK(contains(thrown<ConfigError>([&] { hall.put_step({.read = read}); }), "options.read"));
  }
  gpu::PinnedMemory pinned;
  refused(plain, {.slow_memory = &pinned}, "slow memory");
  DeviceCache stranger{plain, {}, hall.stream};
  CHECK(contains(thrown<ConfigError>([&] { seat(2, stranger); }), "another engine"));
  CHECK(contains(thrown<ConfigError>([&] { gpu::SeatedBatch<E>{hall.engine, 2, 9}; }),
                 "9 tokens for each seat, must be 1 to 8"));
  CHECK(contains(thrown<ConfigError>([&] { gpu::SeatedBatch<E>{hall.engine, 513}; }),
                 "513 sequences in a call"));
  const std::string room = thrown<CapacityError>([&] { hall.batch.replayed(1000); });
  CHECK(contains(room, "seat 1"));
  CHECK(contains(room, "reserve more first"));
  CHECK(hall.batch.at(1) == &first);
  CHECK(test::dump_device(first, true, hall.stream) == before);
  CHECK(hall.replay());
  hall.check(1);
}
