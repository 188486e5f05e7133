// SPDX-License-Identifier: Apache-2.0
//
// Kernels with one mistake each. The tests of the other kernels are only as good as the emulation's ability
// to find mistakes: each mistake here must be detected as a named fault, as a wrong or NaN result under one
// of a few orders of threads, or by AddressSanitizer.
#include <doctest/doctest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "simt/run_kernel.hpp"

using namespace kvpolicy;
using namespace kvpolicy::gpu;
using simt::count_seeds;
using simt::run_kernel;

namespace {

constexpr int handful = 10;
constexpr int many = 100;  // orders to try for mistakes that few orders show

// Which mistake a kernel makes; without a mistake each kernel below is right.
enum class Mistake : std::uint8_t { none, first, second, third };

struct Output {
  float* out;
  Mistake mistake;
};

// ---- missing barriers -------------------------------------------------------------------------
// Threads sum what others stored in shared memory, for several rounds.
void sum_kernel(const Output p) {
  auto* const shared = reinterpret_cast<float*>(shared_memory());
  float sum = 0.0F;
  for (int round = 0; round < 4; ++round) {
    shared[thread_index()] = static_cast<float>(thread_index() * (round + 1));
    if (p.mistake != Mistake::first) sync_block();  // before others read
    for (int i = 0; i < thread_count(); ++i) sum += shared[i];
    if (p.mistake != Mistake::second) sync_block();  // before the next round writes
  }
  p.out[thread_index()] = sum;
}

bool sums_are_right(Mistake mistake, unsigned threads) {
  std::vector<float> out(threads);
  run_kernel({1, 1, threads, threads * sizeof(float)}, Output{out.data(), mistake}, sum_kernel);
  const auto expected = static_cast<float>(threads * (threads - 1) / 2 * 10);
  bool right = true;
  for (const float sum : out) right = right && sum == expected;
  return right;
}

TEST_CASE("a missing barrier") {
  for (const unsigned threads : {64U, 128U}) {
    CAPTURE(threads);
    CHECK(count_seeds(handful, [=] { return sums_are_right(Mistake::none, threads); }) == handful);
    CHECK(count_seeds(handful, [=] { return sums_are_right(Mistake::first, threads); }) == 0);
    CHECK(count_seeds(handful, [=] { return sums_are_right(Mistake::second, threads); }) == 0);
  }
}

// The same within a warp: each lane reads what the lane below wrote. Without a sync_warp this happens to work
// if lanes run in ascending order.
void warp_exchange_kernel(const Output p) {
  auto* const shared = reinterpret_cast<float*>(shared_memory());
  shared[lane_index()] = static_cast<float>(lane_index());
  if (p.mistake != Mistake::first) sync_warp();
  p.out[lane_index()] = shared[lane_index() > 0 ? lane_index() - 1 : 0];
}

TEST_CASE("a missing sync_warp") {
  const auto right = [](Mistake mistake) {
    std::array<float, 32> out;
    run_kernel({1, 1, 32, 128}, Output{out.data(), mistake}, warp_exchange_kernel);
    bool same = true;
    for (std::size_t i = 0; i < 32; ++i) same = same && out[i] == static_cast<float>(i > 0 ? i - 1 : 0);
    return same;
  };
  CHECK(count_seeds(handful, [&] { return right(Mistake::none); }) == handful);
  CHECK(count_seeds(handful, [&] { return right(Mistake::first); }) == 0);
}

// Blocks add up partial results. The ticket must be taken after the result is written, and after all threads
// of the block have written theirs.
struct Ticket {
  float* partial;  // [blocks, 64]
  float* total;
  std::uint32_t* ticket;
  Mistake mistake;
};
void ticket_kernel(const Ticket p) {
  auto* const last = reinterpret_cast<std::uint32_t*>(shared_memory());
  const auto write = [&] { p.partial[block_x() * 64 + thread_index()] = 1.0F; };
  if (p.mistake != Mistake::first) write();
  if (p.mistake != Mistake::second) sync_block();
  if (thread_index() == 0) *last = arrive(p.ticket);
  sync_block();
  if (p.mistake == Mistake::first) write();
  if (*last != static_cast<std::uint32_t>(grid_x() - 1) || thread_index() != 0) return;
  for (int i = 0; i < grid_x() * 64; ++i) *p.total += load_shared_by_blocks(p.partial + i);
}

TEST_CASE("a block that takes its ticket before it is done") {
  const auto right = [](Mistake mistake) {
    std::vector<float> partial(5 * 64, 0.0F);
    float total = 0.0F;
    std::uint32_t ticket = 0;
    run_kernel({5, 1, 64, 16}, Ticket{partial.data(), &total, &ticket, mistake}, ticket_kernel);
    return total == 320.0F;
  };
  CHECK(count_seeds(handful, [&] { return right(Mistake::none); }) == handful);
  CHECK(count_seeds(handful, [&] { return right(Mistake::first); }) < handful);
  CHECK(count_seeds(many, [&] { return right(Mistake::second); }) < many);
}

// ---- the kernel before -------------------------------------------------------------------------
// Two kernels in a row double numbers, of which the second is launched early: what the first one writes is not there
// before the wait, and what it has yet to read must still be there.
struct Doubled {
  const float* in;
  float* out;
  Mistake mistake;
};
void doubling_kernel(const Doubled p) {
  const int i = block_x() * thread_count() + thread_index();
  float number = p.mistake == Mistake::first ? p.in[i] : 0.0F;
  if (p.mistake == Mistake::second) p.out[i] = 0.0F;
  sync_block();
  if (p.mistake != Mistake::third || i != 40) wait_for_kernel_before();
  if (p.mistake != Mistake::first) number = p.in[i];
  p.out[i] = 2.0F * number;
}

// `writes_back`: the second kernel writes where the first one reads.
bool doubles_twice(Mistake mistake, bool writes_back) {
  constexpr unsigned blocks = 5, threads = 64;
  simt::Device& device = simt::device();
  device.major = 9;
  device.late = true;
  std::vector<float> numbers(blocks * threads, 1.0F);
  std::vector<float> doubled(blocks * threads, -1.0F);
  std::vector<float> last(blocks * threads);
  float* const to = writes_back ? numbers.data() : last.data();
  const auto launch = [&](const Doubled& params, bool early) {
    REQUIRE(simt::launch(doubling_kernel, blocks, 1, threads, 0, nullptr, params, early) == cudaSuccess);
  };
  launch({numbers.data(), doubled.data(), Mistake::none}, false);
  launch({doubled.data(), to, mistake}, true);
  const auto restored = [&] {
    device.late = false;
    device.major = 8;
  };
  try {
    device.finish_all();
  } catch (...) {
    restored();
    throw;
  }
  restored();
  return std::all_of(to, to + blocks * threads, [](float x) { return x == 4.0F; });
}

TEST_CASE("a kernel that is launched early and reads or writes before it waits for the kernel before") {
  for (const bool writes_back : {false, true}) {
    CAPTURE(writes_back);
    CHECK(count_seeds(handful, [=] { return doubles_twice(Mistake::none, writes_back); }) == handful);
    CHECK(count_seeds(handful, [=] { return doubles_twice(Mistake::first, writes_back); }) == 0);
    CHECK_THROWS_AS(doubles_twice(Mistake::third, writes_back), simt::Fault);
  }
  CHECK(count_seeds(handful, [] { return doubles_twice(Mistake::second, false); }) == handful);
  CHECK(count_seeds(handful, [] { return doubles_twice(Mistake::second, true); }) == 0);
}

// Each kernel of a chain begins before all that come before it.
void adding_kernel(const Output p) {
  float before = p.out[0];
  wait_for_kernel_before();
  if (p.mistake == Mistake::none) before = p.out[0];
  sync_block();
  if (thread_index() == 0) p.out[0] = before + 1.0F;
}

TEST_CASE("a chain of kernels that are launched early") {
  simt::Device& device = simt::device();
  device.major = 9;
  device.late = true;
  const auto sum = [&](Mistake mistake) {
    float number = 0.0F;
    for (int i = 0; i < 7; ++i) {
      REQUIRE(simt::launch(adding_kernel, 1, 1, 64, 0, nullptr, {&number, mistake}, i > 0) == cudaSuccess);
    }
    device.finish_all();
    return number;
  };
  CHECK(sum(Mistake::none) == 7.0F);
  CHECK(sum(Mistake::first) == 3.0F);  // three at a time: one addition of each three is seen
  device.late = false;
  device.major = 8;
}

// ---- copies ----------------------------------------------------------------------------------
struct Copy {
  const float* in;  // [4 tiles, 32, 4]
  float* out;
  Mistake mistake;
};
void copy_kernel(const Copy p) {
  auto* const shared = reinterpret_cast<float*>(shared_memory());
  float sum = 0.0F;
  const auto fetch = [&](int tile) {
    if (tile < 4) {
      cp_async_16(shared + tile % 2 * 128 + lane_index() * 4, p.in + tile * 128 + lane_index() * 4, true);
    }
    cp_async_commit();
  };
  fetch(0);
  for (int tile = 0; tile < 4; ++tile) {
    fetch(tile + 1);
    if (p.mistake == Mistake::first) {
      cp_async_wait<2>();  // one group too many may still be copying
    } else if (p.mistake != Mistake::second) {
      cp_async_wait<1>();
    }
    sync_warp();
    sum += shared[tile % 2 * 128 + (lane_index() + 1) % 32 * 4];
    if (p.mistake != Mistake::third) sync_warp();  // before the buffer is filled again
  }
  p.out[lane_index()] = sum;
}

TEST_CASE("a missing wait for a copy") {
  alignas(16) static std::array<float, 512> in;
  in.fill(1.0F);
  const auto sums = [&](Mistake mistake) {
    std::array<float, 32> out;
    run_kernel({1, 1, 32, 1024}, Copy{in.data(), out.data(), mistake}, copy_kernel);
    return out;
  };
  const auto nans = [&](Mistake mistake) {
    int count = 0;
    for (const float sum : sums(mistake)) count += std::isnan(sum);
    return count;
  };
  std::array<float, 32> fours;
  fours.fill(4.0F);
  CHECK(count_seeds(handful, [&] { return sums(Mistake::none) == fours; }) == handful);
  CHECK(nans(Mistake::first) == 32);
  CHECK(nans(Mistake::second) == 32);
  CHECK(count_seeds(handful, [&] { return nans(Mistake::third) > 0; }) == handful);
}

TEST_CASE("addresses that a device does not accept") {
  struct Params {
    const std::byte* in;
    int kind;
  };
  alignas(16) static std::array<std::byte, 64> in{};
  const auto attempt = [&](int kind) {
    run_kernel({1, 1, 32, 512}, Params{in.data(), kind}, [](const Params p) {
      std::uint32_t r[4];
      switch (p.kind) {
        case 0: load_once(reinterpret_cast<const Words4*>(p.in + 8)); break;
        case 1: cp_async_16(shared_memory() + 8, p.in, true); break;
        case 2: cp_async_16(shared_memory(), p.in + 4, true); break;
        case 3: load_matrix_x4(r, shared_memory() + 2); break;
        case 4: cp_async_16(shared_memory() + 512, p.in, true); break;
        case 5: load_matrix_x4(r, shared_memory() + lane_index() * 16 + 16); break;
        default: load_matrix_x4_transposed(r, p.in);
      }
    });
  };
  for (const int kind : {0, 1, 2, 3}) {
    CAPTURE(kind);
    CHECK_THROWS_AS(attempt(kind), simt::Misaligned);
  }
  for (const int kind : {4, 5, 6}) {
    CAPTURE(kind);
    CHECK_THROWS_AS(attempt(kind), simt::OutOfBounds);
  }
}

// ---- tiles -----------------------------------------------------------------------------------
// A dot product over tiles of 16 rows in shared memory; rows from `rows` on were never written.
struct Rows {
  float* out;
  int rows;
  int tiles;
};
void tile_kernel(const Rows p) {
  auto* const shared = reinterpret_cast<std::uint16_t*>(shared_memory());  // [tiles, 16, 8]
  for (int i = lane_index(); i < p.rows * 8; i += 32) shared[i] = from_float<bfloat16>(1.0F);
  sync_warp();
  float d[4] = {};
  for (int tile = 0; tile < p.tiles; tile += 2) {
    std::uint32_t a[4];
    load_matrix_x4(a, shared + (tile * 16 + lane_index()) * 8);
    multiply_add<bfloat16>(d, a, 0x3f803f80U, 0x3f803f80U);
  }
  p.out[lane_index()] = d[0] + d[1] + d[2] + d[3];
}

TEST_CASE("one tile too many") {
  std::array<float, 32> out;
  const auto attempt = [&](int rows, int tiles, std::size_t room) {
    run_kernel({1, 1, 32, room * 256}, Rows{out.data(), rows, tiles}, tile_kernel);
    int nans = 0;
    for (const float x : out) nans += std::isnan(x);
    return nans;
  };
  CHECK(attempt(64, 4, 4) == 0);
  CHECK(attempt(63, 4, 4) > 0);                           // a row that was never written
  CHECK(attempt(64, 6, 6) == 32);                         // a tile that was never written
  CHECK_THROWS_AS(attempt(64, 6, 4), simt::OutOfBounds);  // a tile outside the memory
}

// ---- divergence ------------------------------------------------------------------------------
template <class Kernel>
std::string message_of(unsigned threads, Kernel kernel) {
  try {
    run_kernel({3, 1, threads, 0}, Output{nullptr, Mistake::none}, kernel);
  } catch (const simt::Divergence& fault) {
    return fault.what();
  }
  return "";
}
bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

TEST_CASE("a warp collective that not all lanes reach") {
  for (int s = 0; s < handful; ++s) {
    simt::seed(static_cast<std::uint64_t>(s));
    const std::string absent = message_of(64, [](const Output) {
      if (lane_index() != 7) ballot(true);
    });
    CHECK(contains(absent, "31 in ballot, 1 have returned"));
    const std::string waiting = message_of(64, [](const Output) {
      if (lane_index() < 5) {
        sync_block();
      } else {
        shuffle_xor(1.0F, 1);
      }
    });
    CHECK(contains(waiting, "5 lanes at the barrier, 27 in shuffle_xor"));
    const std::string kinds = message_of(32, [](const Output) {
      if (lane_index() % 2 == 0) {
        any(true);
      } else {
        sync_warp();
      }
    });
    CHECK(contains(kinds, "where others are in"));
    const std::string partial = message_of(48, [](const Output) { sync_warp(); });
    CHECK(contains(partial, "not full"));
  }
}

TEST_CASE("a barrier that not all threads reach") {
  const std::string uneven = message_of(128, [](const Output) {
    sync_block();
    // Warp 2 waits for a collective that one of its lanes never joins.
    if (warp_index() == 2 && lane_index() != 0) sync_warp();
    sync_block();
  });
  CHECK(contains(uneven, "warp 2: 1 lanes at the barrier, 31 in sync_warp"));
  CHECK(contains(uneven, "warp 0: 32 lanes at the barrier"));
}

TEST_CASE("a fault does not affect the next launch") {
  for (int i = 0; i < 3; ++i) {
    CHECK_THROWS_AS(run_kernel(
                        {4, 1, 96, 0}, Output{},
                        +[](const Output) {
                          if (thread_index() == 40) return;
                          sync_warp();
                          sync_block();
                        }),
                    simt::Divergence);
    CHECK(sums_are_right(Mistake::none, 128));
  }
}

// ---- plain loads and stores outside shared memory ---------------------------------------------
struct Beside {
  int offset;
  bool write;
  std::uint32_t* sink;
};
void beside_kernel(const Beside p) {
  if (thread_index() != 0) return;
  auto* const words = reinterpret_cast<volatile std::uint32_t*>(shared_memory());
  if (p.write) {
    words[p.offset] = 1;
  } else {
    *p.sink = words[p.offset];
  }
}
void run_beside(int offset, bool write) {
  std::uint32_t sink = 0;
  run_kernel({1, 1, 32, 100}, Beside{offset, write, &sink}, beside_kernel);
}

#if KVPOLICY_SIMT_ASAN
// The message of AddressSanitizer when body() ended a process of its own.
template <class Body>
std::string last_words(Body body) {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    ::dup2(ends[1], 2);
    ::close(ends[0]);
    body();
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string text;
  std::array<char, 4096> part;
  for (ssize_t n = 0; (n = ::read(ends[0], part.data(), part.size())) > 0;) {
    text.append(part.data(), static_cast<std::size_t>(n));
  }
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(status != 0);
  return text;
}

TEST_CASE("AddressSanitizer stops an access outside shared memory") {
  for (const bool write : {false, true}) {
    CAPTURE(write);
    run_beside(24, write);
    for (const int offset : {25, 26, 500, -1, -500}) {
      CAPTURE(offset);
      CHECK(contains(last_words([=] { run_beside(offset, write); }), "use-after-poison"));
    }
  }
}

TEST_CASE("AddressSanitizer stops a copy with a bad source") {
  struct Params {
    const std::byte* in;
  };
  std::vector<std::byte> in(40);
  const auto attempt = [&](std::size_t offset) {
    run_kernel({1, 1, 32, 16}, Params{in.data() + offset}, [](const Params p) {
      if (thread_index() == 0) cp_async_16(shared_memory(), p.in, true);
    });
  };
  attempt(16);
  CHECK(contains(last_words([&] { attempt(32); }), "heap-buffer-overflow"));
}
#else
TEST_CASE("stores outside shared memory are found when the block ends") {
  run_beside(24, true);
  for (const int offset : {25, 26, 500, -1, -500}) {
    CAPTURE(offset);
    CHECK_THROWS_AS(run_beside(offset, true), simt::OutOfBounds);
  }
}
#endif

}  // namespace
