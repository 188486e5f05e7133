// SPDX-License-Identifier: Apache-2.0
//
// The CPU engine over rows in an inference engine's memory must give, bit for bit, what it gives over
// the cache's own pages.
#include <doctest/doctest.h>

#include <kvpolicy/cpu.hpp>

#include "support/engine_fp8.hpp"
#include "support/engine_memory.hpp"

using namespace kvpolicy;
using test::EngineLayout;

TEST_CASE("cpu: an engine's memory is read in place") {
  std::uint64_t seed = 20;
  for (const EngineLayout kind :
       {EngineLayout::vllm_nhd, EngineLayout::flashinfer_nhd, EngineLayout::flashinfer_hnd}) {
    test::check_engine_memory<float, cpu::Engine<>>(kind, ++seed);
    test::check_engine_memory<bfloat16, cpu::Engine<>>(kind, ++seed);
  }
}

TEST_CASE("cpu: an engine's memory in FP8 is read in place") {
  std::uint64_t seed = 60;
  for (const EngineLayout kind :
       {EngineLayout::vllm_nhd, EngineLayout::flashinfer_nhd, EngineLayout::flashinfer_hnd}) {
    test::check_engine_fp8<float, cpu::Engine<>>(kind, ++seed);
    test::check_engine_fp8<bfloat16, cpu::Engine<>>(kind, ++seed);
  }
  test::check_engine_fp8_budget<bfloat16, cpu::Engine<>>(++seed);
}
