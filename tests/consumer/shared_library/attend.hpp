// SPDX-License-Identifier: Apache-2.0
//
// The fast engine, compiled by both translation units of the library.
#pragma once

#include <kvpolicy/cpu.hpp>

#include "engine.hpp"

namespace own {
namespace {

Attended attend() {
  kvpolicy::cpu::KvCache<float> cache{plan()};
  return {hwy::TargetName(HWY_STATIC_TARGET), run(cache)};
}

}  // namespace
}  // namespace own
