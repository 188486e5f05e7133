// SPDX-License-Identifier: Apache-2.0
//
// An engine for tests that look at memory alone: attention over every row was most of their time.
#pragma once

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/scalar_engine.hpp>

namespace test {

/// Leaves outputs as they are, and does the rest (scores of rows, observed queries) as kvpolicy::ScalarEngine.
class NoAttention : public kvpolicy::ScalarEngine {
 public:
  void attend(const kvpolicy::LayerAttention&) {}
};

}  // namespace test
