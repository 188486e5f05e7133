// SPDX-License-Identifier: Apache-2.0
//
// Shared memory, loads and asynchronous copies of the emulation.
#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "simt/run_kernel.hpp"

using namespace kvpolicy;
using namespace kvpolicy::gpu;
using simt::run_kernel;

namespace {

TEST_CASE("shared memory is NaN in every block, whatever the block before wrote") {
  struct Params {
    int* numbers;
  };
  int numbers = 0;
  for (const std::size_t bytes : {std::size_t{64}, std::size_t{4096}, std::size_t{166912}}) {
    run_kernel({5, 1, 32, bytes}, Params{&numbers}, [](const Params p) {
      if (thread_index() != 0) return;
      auto* const words = reinterpret_cast<std::uint32_t*>(shared_memory());
      const std::uint32_t word = words[3];
      const auto low = static_cast<std::uint16_t>(word);
      *p.numbers += !std::isnan(float_of_bits(word));
      *p.numbers += !std::isnan(to_float<float16>(low)) + !std::isnan(to_float<bfloat16>(low));
      *p.numbers += reinterpret_cast<std::uintptr_t>(words) % 16 != 0;
      words[3] = 0;
    });
  }
  CHECK(numbers == 0);
}

TEST_CASE("load_once moves 4, 8 and 16 bytes") {
  struct Params {
    const std::uint32_t* in;
    std::uint32_t* out;
  };
  alignas(16) std::array<std::uint32_t, 128> in;
  std::array<std::uint32_t, 3 * 128> out{};
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::uint32_t>(i * i + 1);
  run_kernel({1, 1, 32, 0}, Params{in.data(), out.data()}, [](const Params p) {
    const int lane = lane_index();
    const Words4 four = load_once(reinterpret_cast<const Words4*>(p.in) + lane);
    std::memcpy(p.out + lane * 4, &four, sizeof four);
    for (int i = 0; i < 2; ++i) {
      const Words2 two = load_once(reinterpret_cast<const Words2*>(p.in) + lane * 2 + i);
      std::memcpy(p.out + 128 + lane * 4 + i * 2, &two, sizeof two);
    }
    for (int i = 0; i < 4; ++i) {
      p.out[256 + lane * 4 + i] = load_once(reinterpret_cast<const Words1*>(p.in) + lane * 4 + i).word[0];
    }
  });
  for (std::size_t i = 0; i < out.size(); ++i) CHECK(out[i] == in[i % 128]);
}

TEST_CASE("a copy arrives when its group is waited for, and not before") {
  struct Params {
    const float* in;  // [4 groups, 4]
    float* out;       // [waits, 4 groups]: the group's first number, as seen after each wait
  };
  alignas(16) std::array<float, 16> in;
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i) + 1.0F;
  std::array<float, 16> out{};
  run_kernel({1, 1, 1, 64}, Params{in.data(), out.data()}, [](const Params p) {
    auto* const shared = reinterpret_cast<float*>(shared_memory());
    for (int i = 0; i < 16; ++i) shared[i] = -1.0F;
    const auto note = [&](int wait) {
      for (int group = 0; group < 4; ++group) p.out[wait * 4 + group] = shared[group * 4];
    };
    for (int group = 0; group < 3; ++group) {
      cp_async_16(shared + group * 4, p.in + group * 4, group != 1);
      cp_async_commit();
    }
    cp_async_16(shared + 12, p.in + 12, true);  // this group stays open
    cp_async_wait<2>();
    note(0);
    cp_async_wait<1>();
    note(1);
    cp_async_wait<0>();
    note(2);
    cp_async_commit();
    cp_async_wait<0>();
    note(3);
  });
  const float nan = std::nanf("");
  const std::array<float, 16> expected = {1, nan, nan, nan, 1, 0, nan, nan, 1, 0, 9, nan, 1, 0, 9, 13};
  for (std::size_t i = 0; i < out.size(); ++i) {
    CAPTURE(i);
    if (std::isnan(expected[i])) {
      CHECK(std::isnan(out[i]));
    } else {
      CHECK(out[i] == expected[i]);
    }
  }
}

TEST_CASE("a copy that is not valid does not touch its source") {
  struct Params {
    const void* nowhere;
    std::uint32_t* out;
  };
  std::array<std::uint32_t, 4> out;
  run_kernel({1, 1, 1, 16}, Params{reinterpret_cast<const void*>(16), out.data()}, [](const Params p) {
    cp_async_16(shared_memory(), p.nowhere, false);
    cp_async_commit();
    cp_async_wait<0>();
    std::memcpy(p.out, shared_memory(), 16);
  });
  CHECK(out == std::array<std::uint32_t, 4>{0, 0, 0, 0});
}

TEST_CASE("copies of a double-buffered loop, as kernels use them") {
  struct Params {
    const std::uint32_t* in;  // [tiles, 128 threads, 4]
    std::uint32_t* sums;
    int tiles;
  };
  constexpr int all_threads = 128;
  for (const int tiles : {0, 1, 2, 3, 7}) {
    std::vector<Words4> in(static_cast<std::size_t>(tiles * all_threads));
    std::uint32_t expected = 0;
    for (std::size_t i = 0; i < in.size() * 4; ++i) {
      in[i / 4].word[i % 4] = static_cast<std::uint32_t>(i * 7 + 3);
      expected += in[i / 4].word[i % 4];
    }
    std::vector<std::uint32_t> sums(all_threads);
    const int wrong = simt::count_seeds(5, [&] {
      run_kernel({1, 1, all_threads, 2 * all_threads * 16},
                 Params{reinterpret_cast<const std::uint32_t*>(in.data()), sums.data(), tiles},
                 [](const Params p) {
                   std::byte* const shared = shared_memory();
                   const int threads = thread_count();
                   const auto fetch = [&](int tile) {
                     const int at = thread_index() * 16;
                     if (tile < p.tiles) {
                       cp_async_16(shared + tile % 2 * threads * 16 + at,
                                   reinterpret_cast<const std::byte*>(p.in) + tile * threads * 16 + at, true);
                     }
                     cp_async_commit();
                   };
                   std::uint32_t sum = 0;
                   fetch(0);
                   for (int tile = 0; tile < p.tiles; ++tile) {
                     fetch(tile + 1);
                     cp_async_wait<1>();
                     sync_block();
                     // 16 bytes of another thread.
                     Words4 words;
                     std::memcpy(&words,
                                 shared + tile % 2 * threads * 16 + (thread_index() + 41) % threads * 16, 16);
                     for (const std::uint32_t word : words.word) sum += word;
                     sync_block();
                   }
                   p.sums[thread_index()] = sum;
                 });
      std::uint32_t total = 0;
      for (const std::uint32_t sum : sums) total += sum;
      return total != expected;
    });
    CHECK(wrong == 0);
  }
}

}  // namespace
