// SPDX-License-Identifier: Apache-2.0
#include "attend.hpp"

namespace own {

Attended attend_baseline() { return attend(); }

kvpolicy::DuoCache<float> made_by_library() { return kvpolicy::DuoCache<float>{plan()}; }

void refuse() {
  kvpolicy::DuoCache<float> cache{plan()};
  cache.truncate(1);  // the cache holds fewer tokens
}

}  // namespace own
