// SPDX-License-Identifier: Apache-2.0
//
// Plans of any policies that can be saved, some of which compress by themselves.
#pragma once

#include <cstddef>

#include <kvpolicy/kvpolicy.hpp>

#include "plan/random_plan.hpp"
#include "support/shipped_plan.hpp"

namespace test {

/// A plan of any policies that a cache with these options accepts; some of them compress by themselves.
template <kvpolicy::Element E>
kvpolicy::HeadPlan<E> random_saved_plan(const kvpolicy::ModelShape& shape, kvpolicy::testing::Random& random,
                                        bool rollback) {
  auto plan = kvpolicy::testing::random_plan<kvpolicy::HeadPlan<E>>(shape, random);
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    for (std::size_t head = 0; head < shape.kv_heads; ++head) {
      const kvpolicy::HeadSettings<E> settings = plan.at(layer, head);
      if (!settings.roles().compresses) continue;
      if (rollback) {
        using Full = kvpolicy::FullCache<kvpolicy::DenseStorage<E>>;
        if (settings.roles().accumulates) plan.set(layer, head, typename Full::Config{});
        continue;
      }
      if (random() % 2 != 0) continue;
      for_each_shipped<E>([&]<class P>() {
        if constexpr (kvpolicy::CompressingPolicy<P>) {
          if (!settings.template is<P>()) return;
          auto config = settings.template get<P>();
          if (kvpolicy::policy_traits<P>::waits_for_scoring) return;
          config.compress_every = 1 + random() % 60;
          config.after_first_compress = random() % 2 == 0;
          plan.set(layer, head, config);
        }
      });
    }
  }
  return plan;
}

}  // namespace test
