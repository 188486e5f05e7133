// SPDX-License-Identifier: Apache-2.0
//
// Captured steps: recorded once, replayed while the text grows, beside a twin that does every step
// by itself.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
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
constexpr AttendOptions selecting{.read = Read::selected};
constexpr AttendOptions choosing{.read = Read::selected, .refresh_selection = true};
constexpr AttendOptions choosing_after{.refresh_selection = true};

// A cache that replays and one that steps, with the same text: a prompt, a compression, and a choice
// of chunks.
struct Twins {
  test::SmallDevice device;
  test::CountingDeviceMemory memory;
  test::Stream stream;
  gpu::CacheOptions options;
  DeviceCache cache;
  DeviceCache twin;
  std::vector<DeviceChunk<>> inputs;  // of each layer: what the graphs read
  std::vector<DeviceChunk<>> twin_inputs;
  test::Random random{11};

  explicit Twins(std::size_t max_rollback, std::size_t tokens = 1, std::size_t prompt = 70,
                 std::size_t reserve = 400)
      : options{make_options(max_rollback, tokens)},
        cache{test::mixed_device_plan(shape), options, stream},
        twin{test::mixed_device_plan(shape), options, stream} {
    for (std::size_t l = 0; l < shape.layers; ++l) {
      inputs.emplace_back(shape, tokens);
      twin_inputs.emplace_back(shape, tokens);
    }
    for (DeviceCache* each : {&cache, &twin}) {
      test::feed_device(*each, 1, {prompt - 1, 1}, choosing_after, stream);
      each->compress(stream);
      each->reserve(reserve, stream);
    }
  }
  Twins(const Twins&) = delete;
  Twins& operator=(const Twins&) = delete;

  gpu::CacheOptions make_options(std::size_t max_rollback, std::size_t tokens) {
    gpu::CacheOptions made;
    made.max_rollback = max_rollback;
    made.max_append = tokens;
    made.memory = &memory;
    return made;
  }

  void put_step(DeviceCache& to, std::vector<DeviceChunk<>>& from, const AttendOptions& how) const {
    for (std::size_t l = 0; l < shape.layers; ++l) from[l].step(to, l, how, stream);
  }
  void put_halves(DeviceCache& to, std::vector<DeviceChunk<>>& from, const AttendOptions& how) const {
    for (std::size_t l = 0; l < shape.layers; ++l) {
      from[l].append(to, l, stream);
      from[l].attend(to, l, how, stream);
    }
  }
  [[nodiscard]] Graph captured(const AttendOptions& how, bool apart = false) {
    return Graph{stream, [&] { apart ? put_halves(cache, inputs, how) : put_step(cache, inputs, how); }};
  }
  // New numbers, the same for both.
  void next_inputs() {
    for (std::size_t l = 0; l < shape.layers; ++l) {
      test::Random same = random;
      inputs[l].randomize(random, stream);
      twin_inputs[l].randomize(same, stream);
    }
  }
  [[nodiscard]] bool results_are_equal() const {
    bool equal = true;
    for (std::size_t l = 0; l < shape.layers; ++l) {
      equal = equal && test::same_bits(inputs[l].results(stream), twin_inputs[l].results(stream));
    }
    return equal;
  }
  // One step of both; whether they say the same.
  [[nodiscard]] bool replay(const Graph& graph, const AttendOptions& how, bool apart = false) {
    next_inputs();
    cache.replayed(1, inputs[0].tokens, how.refresh_selection, apart);
    graph.launch(stream);
    apart ? put_halves(twin, twin_inputs, how) : put_step(twin, twin_inputs, how);
    return results_are_equal() && cache.tokens() == twin.tokens() &&
           cache.commit_point() == twin.commit_point();
  }
  void check_equal() const {
    CHECK(test::dump_device(cache, true, stream) == test::dump_device(twin, true, stream));
  }
};

// Calls of the runtime that may wait; only the emulation counts them.
std::uint64_t waits() {
#if defined(__CUDACC__)
  return 0;
#else
  return gpu::simt::device().waits();
#endif
}

}  // namespace

TEST_CASE("a captured step, replayed over pages, blocks and rings, is the step") {
  Twins twins{0};
  const auto before = test::dump_device(twins.cache, true, twins.stream);
  const Graph graph = twins.captured(selecting);
  CHECK(test::dump_device(twins.cache, true, twins.stream) == before);  // recorded, not done
  const std::size_t allocations = twins.memory.allocations();
  bool equal = true;
  for (int i = 0; i < 150; ++i) equal = twins.replay(graph, selecting) && equal;
  CHECK(equal);
  CHECK(twins.memory.allocations() == allocations);
  CHECK(twins.cache.tokens() == 70 + 150);
  twins.check_equal();
  // And what comes next finds everything in its place.
  twins.cache.compress(twins.stream);
  twins.twin.compress(twins.stream);
  twins.check_equal();
  bool after = true;
  for (int i = 0; i < 3; ++i) after = twins.replay(graph, selecting) && after;
  CHECK(after);  // though the compressed head lies elsewhere
  CHECK(test::same_bits(test::next_step(twins.cache, 5, 33, choosing, twins.stream),
                        test::next_step(twins.twin, 5, 33, choosing, twins.stream)));
  twins.check_equal();
}

TEST_CASE("steps of several tokens, with a rollback after each: a draft that is verified") {
  Twins twins{6, 5};
  const Graph graph = twins.captured({});
  const Graph refresh = twins.captured(choosing_after);
  bool equal = true;
  for (std::size_t i = 0; i < 30; ++i) {
    const bool chooses = i % 7 == 3;
    equal = twins.replay(chooses ? refresh : graph, chooses ? choosing_after : AttendOptions{}) && equal;
    const std::size_t back = i % 6;
    twins.cache.truncate(twins.cache.tokens() - back, twins.stream);
    twins.twin.truncate(twins.twin.tokens() - back, twins.stream);
  }
  CHECK(equal);
  twins.check_equal();
  twins.cache.commit(twins.stream);
  twins.twin.commit(twins.stream);
  twins.check_equal();
}

TEST_CASE("a graph that chooses chunks chooses each time; both can take turns") {
  Twins twins{3};
  const Graph plain = twins.captured(selecting);
  const Graph chooses = twins.captured(choosing);
  bool equal = true;
  for (int i = 0; i < 40; ++i) {
    equal = twins.replay(i % 5 == 0 ? chooses : plain, i % 5 == 0 ? choosing : selecting) && equal;
    if (i % 9 == 8) {
      twins.cache.truncate(twins.cache.tokens() - 3, twins.stream);
      twins.twin.truncate(twins.twin.tokens() - 3, twins.stream);
    }
  }
  CHECK(equal);
  twins.check_equal();
}

TEST_CASE("append and attend, captured apart") {
  Twins twins{2, 2};
  const Graph apart = twins.captured(selecting, true);
  const Graph together = twins.captured(selecting);
  bool equal = true;
  for (int i = 0; i < 45; ++i) {
    const bool halves = i % 4 != 3;
    equal = twins.replay(halves ? apart : together, selecting, halves) && equal;
    if (i % 10 == 5) {
      // Appended rows wait for the next call: this far back goes only after the two halves.
      const std::size_t to = twins.twin.commit_point();
      twins.cache.truncate(to, twins.stream);
      twins.twin.truncate(to, twins.stream);
    }
  }
  CHECK(equal);
  twins.check_equal();
  const DeviceCache fork = twins.cache.fork(twins.stream);
  CHECK(test::dump_device(fork, false, twins.stream) == test::dump_device(twins.twin, false, twins.stream));
}

TEST_CASE("replayed refuses to pass the reserve; more room keeps the graph") {
  Twins twins{0, 1, 125, 0};  // there is room for whole pages: 128
  const Graph graph = twins.captured(selecting);
  CHECK(twins.replay(graph, selecting));
  const auto before = test::dump_device(twins.cache, true, twins.stream);
  const std::string text = thrown<CapacityError>([&] { twins.cache.replayed(3); });
  CHECK(contains(text, "3 more tokens after 126"));
  CHECK(contains(text, "the 128"));
  CHECK(!thrown<CapacityError>([&] { twins.cache.replayed(1, 3); }).empty());
  CHECK(!thrown<CapacityError>([&] { twins.cache.replayed(std::size_t{1} << 63, 2); }).empty());
  CHECK(test::dump_device(twins.cache, true, twins.stream) == before);
  CHECK(twins.replay(graph, selecting));
  CHECK(twins.replay(graph, selecting));
  CHECK(!thrown<CapacityError>([&] { twins.cache.replayed(); }).empty());

  // New pages, and new tables for them: the same graph finds both.
  for (const std::size_t tokens : std::initializer_list<std::size_t>{131, 1200}) {
    twins.cache.reserve(tokens, twins.stream);
    twins.twin.reserve(tokens, twins.stream);
    bool equal = true;
    for (int i = 0; i < (tokens == 131 ? 3 : 20); ++i) equal = twins.replay(graph, selecting) && equal;
    CHECK(equal);
  }
  twins.check_equal();
}

TEST_CASE("a step that needs room cannot be captured, and does no harm") {
  Twins twins{0, 1, 128, 0};  // just full
  test::succeed(cudaStreamBeginCapture(twins.stream, cudaStreamCaptureModeThreadLocal));
  const std::string text =
      thrown<CaptureError>([&] { twins.put_step(twins.cache, twins.inputs, selecting); });
  CHECK(contains(text, "1 more tokens after 128"));
  CHECK(contains(text, "reserve first"));
  // Nor anything else that asks for memory, or moves what the host knows.
  DeviceCache& cache = twins.cache;
  CHECK(!thrown<CaptureError>([&] { cache.reserve(500, twins.stream); }).empty());
  CHECK(!thrown<CaptureError>([&] { cache.compress(twins.stream); }).empty());
  CHECK(!thrown<CaptureError>([&] { cache.compress(1, twins.stream); }).empty());
  CHECK(!thrown<CaptureError>([&] { cache.truncate(cache.tokens(), twins.stream); }).empty());
  CHECK(!thrown<CaptureError>([&] { cache.commit(twins.stream); }).empty());
  CHECK(!thrown<CaptureError>([&] { static_cast<void>(cache.fork(twins.stream)); }).empty());
  CHECK(!thrown<CaptureError>([&] {
           const DeviceCache other{test::mixed_device_plan(shape), twins.options, twins.stream};
         }).empty());
  cudaGraph_t graph = nullptr;
  test::succeed(cudaStreamEndCapture(twins.stream, &graph));  // the capture survived all of it
  test::succeed(cudaGraphDestroy(graph));
  twins.check_equal();
  cache.reserve(200, twins.stream);
  twins.twin.reserve(200, twins.stream);
  const Graph works = twins.captured(selecting);
  CHECK(twins.replay(works, selecting));
  twins.check_equal();
}

TEST_CASE("a fork made between replays goes its own way") {
  Twins twins{2};
  const Graph graph = twins.captured(selecting);
  for (int i = 0; i < 15; ++i) CHECK(twins.replay(graph, selecting));
  DeviceCache fork = twins.cache.fork(twins.stream);
  DeviceCache other = twins.twin.fork(twins.stream);
  const auto then = test::dump_device(fork, true, twins.stream);
  CHECK(then == test::dump_device(other, true, twins.stream));
  bool equal = true;
  for (int i = 0; i < 22; ++i) equal = twins.replay(graph, selecting) && equal;
  CHECK(equal);
  CHECK(test::dump_device(fork, true, twins.stream) == then);
  const auto after = test::dump_device(twins.cache, true, twins.stream);
  CHECK(test::same_bits(test::next_step(fork, 3, 40, selecting, twins.stream),
                        test::next_step(other, 3, 40, selecting, twins.stream)));
  CHECK(test::dump_device(twins.cache, true, twins.stream) == after);
  twins.check_equal();
}

TEST_CASE("within the reserve nothing is allocated and nothing waits") {
  Twins twins{3};
  const Graph graph = twins.captured(selecting);
  const DeviceChunk<> longer{twins.random, shape, 17, twins.stream};
  const test::DeviceArray<float> sinks{shape.q_heads};
  sinks.upload(std::vector<float>(shape.q_heads, 0.5F), twins.stream);
  twins.next_inputs();
  const std::size_t allocations = twins.memory.allocations();
  const std::uint64_t before = waits();
  for (int i = 0; i < 14; ++i) {
    twins.cache.replayed();
    graph.launch(twins.stream);
    twins.put_step(twins.twin, twins.twin_inputs, i % 3 == 0 ? choosing : choosing_after);
  }
  for (std::size_t l = 0; l < shape.layers; ++l) {
    longer.step(twins.twin, l, {.attention_sink_bias = {sinks.data(), sinks.size()}}, twins.stream);
  }
  twins.put_halves(twins.twin, twins.twin_inputs, {});
  twins.twin.truncate(twins.twin.commit_point(), twins.stream);
  twins.twin.commit(twins.stream);
  CHECK(twins.memory.allocations() == allocations);
  CHECK(waits() == before);
  twins.stream.wait();
}

TEST_CASE("a head that compresses by itself is not captured") {
  using Budget = HeadBudgetCache<DenseStorage<E>>;
  test::DevicePlan plan{ModelShape{1, 2, 1, 64}};
  plan.set(0, 0, Budget::Config{.budget = 8, .compress_every = 4, .scorer = {.observation_window = 2}});
  const test::Stream stream;
  DeviceCache cache{plan, {}, stream};
  cache.reserve(200, stream);
  test::Random random{1};
  const DeviceChunk<> chunk{random, plan.shape(), 1, stream};
  test::succeed(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CHECK(contains(thrown<CaptureError>([&] { chunk.step(cache, 0, {}, stream); }),
                 "layer 0 compresses by itself"));
  CHECK(!thrown<CaptureError>([&] { chunk.attend(cache, 0, {}, stream); }).empty());
  cudaGraph_t graph = nullptr;
  test::succeed(cudaStreamEndCapture(stream, &graph));
  test::succeed(cudaGraphDestroy(graph));
  CHECK(cache.tokens() == 0);
}
